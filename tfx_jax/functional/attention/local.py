"""Attention within blocks and within sliding windows, in memory linear in the length.

Positions count the tokens of one sequence: padding, wherever it is, and other sequences of the row are not counted.

Both are computed as dense attention of each block of queries over the few keys that it may see, with the blocks as a
batch axis: large products of static shape, which accelerators compute efficiently.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention.blocks import attend_in_blocks, check_over_keys, cut
from tfx_jax.functional.attention.dot_product import decode_densely, dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    are_static_sizes,
    check_integers,
    check_sides,
    check_soft_cap,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option, SeesBack, SeesBlock
from tfx_jax.functional.attention.token_order import (
    TokenOrder,
    attend_in_order,
    check_last_positions,
    order_tokens,
    positions_of,
)

SMALLEST_BLOCK = 32
"""Fewest queries in a block by default: smaller products leave matrix units idle."""


@weights_on_request
@shard_like_query
@zeros_where_empty
def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    block_size: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes attention within blocks: position p sees position s where floor(p / b) = floor(s / b), b = block_size.

    The local attention of section 4.2 in "Generating Wikipedia by Summarizing Long Sequences" (Liu et al., 2018,
    https://arxiv.org/abs/1801.10198) and of Long Range Arena. Time and memory grow as T * block_size. Packed sequences,
    whose blocks begin anywhere, cost up to three times as much.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions: T < S is decoding with a cache.
      key: keys, [B, S, K, H]; K divides N.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, S].
      mask: True for visible keys, the same for all queries: broadcastable to [B, N, 1, S]. A token that is hidden from
        all heads is padding and gets zeros. With T = 1, the query is the last visible token; with 1 < T < S the cache
        must be written to its end.
      block_size: tokens in a block; it need not divide T or S. With S or more, this is dense attention.
      is_causal: a position sees itself and earlier positions of its block only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding. Positions start at 0 in each.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the blocks; needs O(T * S) memory.
      logits_soft_cap: c of c * tanh(logits / c), as in `dot_product_attention`.
      sinks: a logit for each head that takes weight from the keys, [N], as in `dot_product_attention`.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, S]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match, or bias or mask differs between queries.

    >>> import jax
    >>> attend = jax.jit(lambda x: local_attention(x, x, x, block_size=2, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 4, 1, 2)))
    >>> weights[0, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5]]
    """
    _check_positions(query, key, value, bias, mask)
    check_soft_cap(logits_soft_cap)
    check_integers(1, block_size=block_size)
    (b, t), s = query.shape[:2], key.shape[1]
    block_size = min(block_size, s)
    attend = functools.partial(
        _banded, scale=scale, dropout_rate=dropout_rate, dropout_rng=dropout_rng, return_weights=return_weights
    )
    attend = functools.partial(attend, logits_soft_cap=logits_soft_cap, sinks=sinks)
    window = (block_size - 1, 0 if is_causal else block_size - 1)
    in_blocks = functools.partial(
        attend, block_size=block_size, first_row=(s - t) % block_size, reach=(0, 0), window=window
    )
    order = order_tokens(mask, segment_ids, b, t, s)
    if order is None:
        return in_blocks(query, key, value, bias, mask, segment_ids=None)
    if segment_ids is None and t == s:  # tokens come first, so blocks begin at multiples of their size
        return attend_in_order(in_blocks, query, key, value, bias, mask, order)
    # Blocks begin anywhere: number them as segments, and let each query see the keys of its segment within the window.
    order = order._replace(segment_ids=_number_blocks(order, block_size))
    in_window = functools.partial(attend, **_window_blocks(t, s, window))
    return attend_in_order(in_window, query, key, value, bias, mask, order)


@weights_on_request
@shard_like_query
@zeros_where_empty
def sliding_window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    window: int | tuple[int, int],
    block_size: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes attention in a band: position p sees position s where -ahead <= p - s <= back, window = (back, ahead).

    The restricted self-attention of section 4 in "Attention Is All You Need" (Vaswani et al., 2017,
    https://arxiv.org/abs/1706.03762) and the sliding window of section 3.1 in "Longformer" (Beltagy et al., 2020,
    https://arxiv.org/abs/2004.05150). Time and memory grow as T * window.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions: T < S is decoding with a cache.
      key: keys, [B, S, K, H]; K divides N.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, S].
      mask: True for visible keys, the same for all queries: broadcastable to [B, N, 1, S]. A token that is hidden from
        all heads is padding and gets zeros. With T = 1, the query is the last visible token; with 1 < T < S the cache
        must be written to its end.
      window: how many tokens a position sees on each side, besides itself; a pair (back, ahead) gives different sides.
        With S - 1 or more, this is dense attention. Hugging Face's `sliding_window` counts the position itself too.
      block_size: queries in a block; affects speed only. Larger blocks compute more logits outside the window, smaller
        ones copy the keys more often. None means the wider side of the window, but at least 32.
      is_causal: sets `ahead` to 0: a position sees itself and the `back` tokens before it.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding. Positions start at 0 in each.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the band; needs O(T * S) memory.
      logits_soft_cap: c of c * tanh(logits / c), as in `dot_product_attention`.
      sinks: a logit for each head that takes weight from the keys, [N], as in `dot_product_attention`.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, S]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match, or bias or mask differs between queries.

    >>> import jax
    >>> attend = jax.jit(lambda x: sliding_window_attention(x, x, x, window=1, is_causal=True, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 3, 1, 2)))
    >>> weights[0, 0].tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    _check_positions(query, key, value, bias, mask)
    check_soft_cap(logits_soft_cap)
    back, ahead = check_sides("window", window)
    if block_size is not None:
        check_integers(1, block_size=block_size)
    (b, t), s = query.shape[:2], key.shape[1]
    sides = back, 0 if is_causal else ahead
    if are_static_sizes(t, s):
        attend = functools.partial(_banded, **_window_blocks(t, s, sides, block_size))
    else:  # nor is the number of blocks
        attend = functools.partial(dot_product_attention, local_window_size=sides)
    attend = functools.partial(
        attend,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    order = order_tokens(mask, segment_ids, b, t, s)
    if order is None:
        return attend(query, key, value, bias, mask, segment_ids=None)
    return attend_in_order(attend, query, key, value, bias, mask, order)


def _window_blocks(
    num_queries: int, num_keys: int, window: tuple[int, int], block_size: int | None = None
) -> dict[str, Any]:
    """Returns the options of `_banded` for a sliding window of (back, ahead) tokens."""
    window = min(window[0], num_keys - 1), min(window[1], num_queries - 1)
    if block_size is None:
        num_blocks = -(-num_queries // max(*window, SMALLEST_BLOCK))  # -(-x // y) rounds the quotient up
        block_size = -(-num_queries // num_blocks)  # equal blocks, so that the last one is not mostly padding
    return {"block_size": block_size, "first_row": 0, "reach": window, "window": window}


def _number_blocks(order: TokenOrder, block_size: int) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Numbers the blocks of all segments from 1, padding is 0; returns the numbers for queries and for keys."""
    query_ids, key_ids = order.segment_ids
    t, s = query_ids.shape[1], key_ids.shape[1]
    starts_block = positions_of(key_ids) % block_size == 0
    block_ids = jnp.cumsum(starts_block, axis=1, dtype=jnp.int32)
    block_ids = jnp.where(key_ids == 0, 0, block_ids)
    # Queries are in the last T columns. A query gets number 0 if its segment is not that of the key in its column.
    return jnp.where(query_ids == key_ids[:, s - t :], block_ids[:, s - t :], 0), block_ids


def _banded(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    mask: Mask | None,
    *,
    block_size: int,
    first_row: int,
    reach: tuple[int, int],
    window: tuple[int, int],
    segment_ids: SegmentIds | None,
    **options: Any,
) -> Any:
    """Computes attention of blocks of consecutive queries over consecutive keys.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H].
      value: values, [B, S, K, U].
      bias: broadcastable to [B, N, 1, S].
      mask: broadcastable to [B, N, 1, S].
      block_size: queries in a block.
      first_row: position of the first query within its block.
      reach: (before, after): how many keys before its first and after its last position a block gets.
      window: (back, ahead): how many of these keys each query sees before and after itself.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      options: options of `dot_product_attention`.
    """
    t, s = query.shape[1], key.shape[1]
    num_blocks = -(-(first_row + t) // block_size)
    if num_blocks == 1:  # as in decoding: shrink the block to the queries and keys that exist
        block_size, first_row, reach = t, 0, (min(reach[0] + first_row, s - t), 0)
    first_column = s - t - first_row - reach[0]  # index of the first key of the first block; may be negative
    span = reach[0] + block_size + reach[1]  # keys that each block gets
    # [block_size, span]: how far a key is before a query; negative after it.
    distance = jnp.arange(block_size)[:, None] + reach[0] - jnp.arange(span)[None]
    return attend_in_blocks(
        query,
        key,
        value,
        bias,
        mask,
        cut_queries=functools.partial(
            cut, start=-first_row, num_blocks=num_blocks, block_size=block_size, span=block_size
        ),
        cut_keys=functools.partial(cut, start=first_column, num_blocks=num_blocks, block_size=block_size, span=span),
        columns=first_column + block_size * jnp.arange(num_blocks)[:, None] + jnp.arange(span)[None],
        allowed=(distance <= window[0]) & (distance >= -window[1]),
        rows=slice(first_row, first_row + t),
        segment_ids=segment_ids,
        **options,
    )


def _check_positions(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> None:
    """Checks shapes, and that there are no more queries than keys."""
    check_over_keys(query, key, value, bias, mask)
    check_last_positions(query.shape[1], key.shape[1])


def _decode_window(window: int | tuple[int, int], scale: float | None = None, **_: Any) -> CachedDecoding:
    """Returns decoding over the last keys: in decoding, no key is after the query."""
    return decode_densely(SeesBack(check_sides("window", window)[0]), scale)


LOCAL = AttentionSpec(
    name="local",
    function=local_attention,
    reference="Liu et al. (2018), section 4.2",
    options={"block_size": Option("tokens in a block", required=True)},
    example=lambda length: {"block_size": min(128, max(length // 4, 1))},
    bias=False,
    decoding=lambda block_size, scale=None: decode_densely(SeesBlock(block_size), scale),
)
WINDOW = AttentionSpec(
    name="window",
    function=sliding_window_attention,
    reference="Beltagy et al. (2020), section 3.1",
    options={
        "window": Option("tokens that a position sees on each side, besides itself", required=True),
        "block_size": Option("queries in a block; affects speed only"),
    },
    example=lambda length: {"window": min(128, max(length // 4, 1))},
    bias=False,
    decoding=_decode_window,
)
