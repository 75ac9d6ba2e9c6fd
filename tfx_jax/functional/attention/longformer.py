"""Longformer: a sliding window, and a few tokens that see all and are seen by all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention.blocks import attend_in_blocks, check_over_keys, cut
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.local import SMALLEST_BLOCK, sliding_window_attention
from tfx_jax.functional.attention.masks import Bias, Mask, SegmentIds
from tfx_jax.functional.attention.token_order import attend_in_order, order_tokens
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request, zeros_where_empty


@weights_on_request
@divided_as_queries
@zeros_where_empty
def longformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    window: int,
    global_mask: Bool[Array, "B T"] | None = None,
    max_global_tokens: int = 64,
    global_query: Float[Array, "B T N H"] | None = None,
    global_key: Float[Array, "B T K H"] | None = None,
    global_value: Float[Array, "B T K U"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes self-attention in a window, beside tokens that are global: they see all, and all see them.

    Section 3.1 of "Longformer" (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150). Position p sees position s
    where |p - s| <= window or s is global; one softmax is over both. A global token attends with queries, keys and
    values of projections of its own. Which tokens are global is data; how many of a row there may be is a size. Time
    and memory grow as T * (window + max_global_tokens).

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, T].
      mask: True where a key may be seen, by all queries alike: broadcastable to [B, N, 1, T]. A token that no head may
        see is padding: it takes up no room in a window, is never global, and gets zeros.
      window: how many tokens a position sees on each side, besides itself.
      global_mask: which tokens are global, [B, T]; None means none, which is `sliding_window_attention`.
      max_global_tokens: of each row so many are global at most, the first ones; the others are as if they were not.
      global_query: queries of the global tokens, read where these are; None means `query`.
      global_key: keys that global tokens see; None means `key`.
      global_value: values that global tokens take; None means `value`.
      is_causal: must be False: global tokens see the future and tell it to all.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T]; 0 is padding. Global tokens, too, then see their own segments alone.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the pattern: this does take T * T.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      float32 [B, N, T, T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if the sizes do not fit together, bias or mask are over pairs, or an option is impossible.

    >>> is_global = jnp.arange(6)[None] == 0
    >>> attend = jax.jit(lambda x: longformer_attention(x, x, x, window=1, global_mask=is_global, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 6, 1, 2)))
    >>> (weights[0, 0] > 0).sum(axis=-1).tolist()
    [6, 3, 4, 4, 4, 3]
    """
    check_over_keys(query, key, value, bias, mask)
    b, t = query.shape[:2]
    if t != key.shape[1]:
        raise ValueError(f"Longformer's is self-attention, but there are {t} queries and {key.shape[1]} keys")
    if is_causal:
        raise ValueError("Longformer's attention has no causal form: global tokens see the future and are seen by all")
    if window < 0 or max_global_tokens < 1:
        raise ValueError(f"window must not be negative, max_global_tokens not 0: {window} and {max_global_tokens}")
    options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "return_weights": return_weights}
    if global_mask is None:
        ids = {"segment_ids": segment_ids, "dropout_rng": dropout_rng}
        return sliding_window_attention(query, key, value, bias, mask, window=window, **ids, **options)
    if global_mask.shape != (b, t):
        raise ValueError(f"global_mask must say it of every token, {(b, t)}, got shape {global_mask.shape}")

    options |= {"window": window, "max_global_tokens": max_global_tokens, "dropout_rng": dropout_rng}
    attend = functools.partial(_attend_globally, **options)
    query_of = {"global_query": query if global_query is None else global_query, "global_mask": global_mask}
    key_of = {
        "global_key": key if global_key is None else global_key,
        "global_value": value if global_value is None else global_value,
    }
    order = order_tokens(mask, segment_ids, b, t, t)
    if order is None:
        return attend(query, key, value, bias, mask, segment_ids=None, **query_of, **key_of)
    # The first ones of the columns, and of tokens alone.
    exists = order.to_columns(order.segment_ids[0] != 0)
    global_mask = global_mask & exists
    query_of["global_mask"] = global_mask & (jnp.cumsum(global_mask, axis=1) <= max_global_tokens)
    query_of, key_of = jax.tree.map(order.of_queries, query_of), jax.tree.map(order.of_keys, key_of)
    return attend_in_order(functools.partial(attend, **query_of, **key_of), query, key, value, bias, mask, order)


def _attend_globally(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    window: int,
    global_mask: Array,
    max_global_tokens: int,
    global_query: Array,
    global_key: Array,
    global_value: Array,
    segment_ids: tuple[Array, Array] | None,
    dropout_rng: Array | None,
    return_weights: bool,
    **options: Any,
) -> Any:
    """Attention with distances in columns, beside global tokens of which rows may have more than the most."""
    b, t = query.shape[:2]
    options["return_weights"] = return_weights
    # Over rows and keys as they are read below: those of one row or for all keys alike are repeated.
    bias, mask = (None if x is None else jnp.broadcast_to(x, (b, *x.shape[1:3], t)) for x in (bias, mask))
    size = min(max_global_tokens, t)
    number = jnp.cumsum(global_mask, axis=1)  # of each global token among those of its row, from 1
    global_mask = global_mask & (number <= size)
    place = jnp.argsort(~global_mask, axis=1, stable=True)[:, :size]  # of the global tokens, and of others behind them
    taken = jnp.take_along_axis(global_mask, place, axis=1)
    rngs = (None, None) if dropout_rng is None else jax.random.split(dropout_rng)

    # The keys of global tokens stand in front of all keys, which every block of queries sees beside its window.
    def behind_global(x: Array, axis: int) -> Array:
        return jnp.concatenate([_picked(x, place, axis), x], axis=axis)

    is_first = jnp.concatenate([taken, ~global_mask], axis=1)[:, None, None]  # or else a token would be seen twice
    result = _in_windows(
        query,
        behind_global(key, 1),
        behind_global(value, 1),
        None if bias is None else behind_global(bias, 3),
        is_first if mask is None else is_first & behind_global(mask, 3),
        num_in_front=size,
        window=min(window, t - 1),
        segment_ids=None if segment_ids is None else (segment_ids[0], behind_global(segment_ids[1], 1)),
        dropout_rng=rngs[0],
        **options,
    )
    of_global: Any = dot_product_attention(
        _picked(global_query, place, 1),
        global_key,
        global_value,
        bias,
        mask,
        segment_ids=None if segment_ids is None else (_picked(segment_ids[0], place, 1), segment_ids[1]),
        dropout_rng=rngs[1],
        **options,
    )
    back = jnp.clip(number - 1, 0, size - 1)  # where the result of a global token is among `of_global`
    if not return_weights:
        return jnp.where(global_mask[:, :, None, None], _picked(of_global, back, 1), result)
    (out, weights), (global_out, global_weights) = result, of_global
    is_place = (place[:, :, None] == jnp.arange(t)[None, None]).astype(weights.dtype)
    weights = weights[..., size:] + jnp.einsum("BNTG,BGS->BNTS", weights[..., :size], is_place)
    weights = jnp.where(global_mask[:, None, :, None], _picked(global_weights, back, 2), weights)
    return jnp.where(global_mask[:, :, None, None], _picked(global_out, back, 1), out), weights


def _in_windows(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array,
    *,
    num_in_front: int,
    window: int,
    segment_ids: tuple[Array, Array] | None,
    **options: Any,
) -> Any:
    """Attention of blocks of queries over the keys in front of the sequence and over those near them."""
    t = query.shape[1]
    num_blocks = -(-t // max(window, SMALLEST_BLOCK))
    block_size = -(-t // num_blocks)
    span = block_size + 2 * window
    distance = jnp.arange(block_size)[:, None] + window - jnp.arange(span)[None]
    in_front = jnp.broadcast_to(jnp.arange(num_in_front), (num_blocks, num_in_front))
    near = block_size * jnp.arange(num_blocks)[:, None] - window + jnp.arange(span)[None]
    near = jnp.where((near >= 0) & (near < t), num_in_front + near, -1)

    def cut_keys(x: Array) -> Array:
        front = jnp.broadcast_to(x[:, None, :num_in_front], (x.shape[0], num_blocks, num_in_front, *x.shape[2:]))
        return jnp.concatenate([front, cut(x[:, num_in_front:], -window, num_blocks, block_size, span)], axis=2)

    return attend_in_blocks(
        query,
        key,
        value,
        bias,
        mask,
        cut_queries=functools.partial(cut, start=0, num_blocks=num_blocks, block_size=block_size, span=block_size),
        cut_keys=cut_keys,
        columns=jnp.concatenate([in_front, near], axis=1),
        allowed=jnp.pad(jnp.abs(distance) <= window, ((0, 0), (num_in_front, 0)), constant_values=True),
        rows=slice(0, t),
        segment_ids=segment_ids,
        **options,
    )


def _picked(x: Shaped[Array, "..."], place: Int[Array, "B G"], axis: int) -> Shaped[Array, "..."]:
    """The entries of each row at places of its own along an axis."""
    return jnp.take_along_axis(x, place.reshape(len(place), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)), axis)
