"""Longformer: a sliding window, and a few global tokens that see all tokens and that all tokens see."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention.blocks import attend_in_blocks, check_over_keys, cut
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.local import SMALLEST_BLOCK, sliding_window_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.token_order import attend_in_order, order_tokens


@weights_on_request
@shard_like_query
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
    r"""Computes self-attention within a window, and of global tokens, which see all tokens and which all tokens see.

    Section 3.1 of "Longformer" (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150). Position p sees position s if
    |p - s| <= window or s is global, in one softmax. Global tokens may attend with separately projected queries, keys
    and values. `global_mask` may be traced; `max_global_tokens` is static because it fixes array shapes. Time and
    memory grow as T * (window + max_global_tokens).

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, T].
      mask: True for visible keys, the same for all queries: broadcastable to [B, N, 1, T]. A token that is hidden from
        all heads is padding: it is not counted in windows, is never global, and gets zeros.
      window: how many tokens a position sees on each side, besides itself.
      global_mask: True for global tokens, [B, T]; None means no global token, which is `sliding_window_attention`.
      max_global_tokens: upper limit per row; if more are marked, the first ones are global and the rest are ordinary
        tokens.
      global_query: queries of the global tokens, used only at their positions; None means `query`.
      global_key: keys for the queries of global tokens; None means `key`.
      global_value: values for the queries of global tokens; None means `value`.
      is_causal: must be False, because global tokens see the future and every token sees them.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T]; 0 is padding. Global tokens see, and are seen by, their own segment only.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the pattern; needs O(T * T) memory.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match, bias or mask differs between queries, or an option is out of range.

    >>> is_global = jnp.arange(6)[None] == 0
    >>> attend = jax.jit(lambda x: longformer_attention(x, x, x, window=1, global_mask=is_global, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 6, 1, 2)))
    >>> (weights[0, 0] > 0).sum(axis=-1).tolist()
    [6, 3, 4, 4, 4, 3]
    """
    check_over_keys(query, key, value, bias, mask)
    b, t = query.shape[:2]
    if t != key.shape[1]:
        raise ValueError(
            f"Longformer attention is self-attention and needs as many keys as queries, got {t} queries and "
            f"{key.shape[1]} keys"
        )
    if is_causal:
        raise ValueError(
            "Longformer attention has no causal form, because global tokens see the future and every token sees them: "
            "pass is_causal=False"
        )
    check_integers(window=window, max_global_tokens=max_global_tokens)
    if window < 0 or max_global_tokens < 1:
        raise ValueError(
            f"window must be at least 0 and max_global_tokens at least 1, got window={window} and "
            f"max_global_tokens={max_global_tokens}"
        )
    options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "return_weights": return_weights}
    if global_mask is None:
        options |= {"window": window, "segment_ids": segment_ids, "dropout_rng": dropout_rng}
        return sliding_window_attention(query, key, value, bias, mask, **options)
    if global_mask.shape != (b, t):
        raise ValueError(f"global_mask must have shape [B, T] = {(b, t)}, got {global_mask.shape}")

    options |= {"window": window, "max_global_tokens": max_global_tokens, "dropout_rng": dropout_rng}
    attend = functools.partial(_attend_globally, **options)
    query_arrays = {"global_query": query if global_query is None else global_query, "global_mask": global_mask}
    key_arrays = {
        "global_key": key if global_key is None else global_key,
        "global_value": value if global_value is None else global_value,
    }
    order = order_tokens(mask, segment_ids, b, t, t)
    if order is None:
        return attend(query, key, value, bias, mask, segment_ids=None, **query_arrays, **key_arrays)
    # Apply the limit here, in the original order of the columns and without padding: `order` may move segments.
    exists = order.to_columns(order.segment_ids[0] != 0)
    global_mask = global_mask & exists
    query_arrays["global_mask"] = global_mask & (jnp.cumsum(global_mask, axis=1) <= max_global_tokens)
    query_arrays, key_arrays = jax.tree.map(order.of_queries, query_arrays), jax.tree.map(order.of_keys, key_arrays)
    attend = functools.partial(attend, **query_arrays, **key_arrays)
    return attend_in_order(attend, query, key, value, bias, mask, order)


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
    """Computes window and global attention; distances are those of columns, and padding is in segment 0.

    The arguments are those of `longformer_attention`, with `global_mask` given and
    `segment_ids` a pair or None; at most `max_global_tokens` are global.
    """
    b, t = query.shape[:2]
    options["return_weights"] = return_weights
    # Rows and keys are gathered below, so axes of size 1 are broadcast first.
    bias, mask = (None if x is None else jnp.broadcast_to(x, (b, *x.shape[1:3], t)) for x in (bias, mask))
    num_global = min(max_global_tokens, t)
    rank = jnp.cumsum(global_mask, axis=1)  # rank of each global token in its row, from 1
    global_mask = global_mask & (rank <= num_global)
    # Positions of the global tokens; a row with fewer than num_global of them is filled up with other tokens.
    position = jnp.argsort(~global_mask, axis=1, stable=True)[:, :num_global]
    is_global = jnp.take_along_axis(global_mask, position, axis=1)
    rngs = (None, None) if dropout_rng is None else jax.random.split(dropout_rng)

    # Copies of the global keys are put in front of all keys. Every block of queries sees these and its window.
    def prepend_global(x: Array, axis: int) -> Array:
        """Puts copies of the entries of global tokens in front of all entries."""
        return jnp.concatenate([_gather(x, position, axis), x], axis=axis)

    # Global tokens are seen in front only and other tokens in their windows only, so that none is seen twice.
    once_mask = jnp.concatenate([is_global, ~global_mask], axis=1)[:, None, None]
    result = attend_to_front_and_window(
        query,
        prepend_global(key, 1),
        prepend_global(value, 1),
        None if bias is None else prepend_global(bias, 3),
        once_mask if mask is None else once_mask & prepend_global(mask, 3),
        num_in_front=num_global,
        window=min(window, t - 1),
        segment_ids=None if segment_ids is None else (segment_ids[0], prepend_global(segment_ids[1], 1)),
        dropout_rng=rngs[0],
        **options,
    )
    global_result: Any = dot_product_attention(
        _gather(global_query, position, 1),
        global_key,
        global_value,
        bias,
        mask,
        segment_ids=None if segment_ids is None else (_gather(segment_ids[0], position, 1), segment_ids[1]),
        dropout_rng=rngs[1],
        **options,
    )
    index = jnp.clip(rank - 1, 0, num_global - 1)  # index of each global token in the results `global_result`
    if not return_weights:
        return jnp.where(global_mask[:, :, None, None], _gather(global_result, index, 1), result)
    (out, weights), (global_out, global_weights) = result, global_result
    # Add the weights of the keys in front to those of the same keys at their positions.
    is_position = (position[:, :, None] == jnp.arange(t)[None, None]).astype(weights.dtype)
    weights = weights[..., num_global:] + jnp.einsum("BNTG,BGS->BNTS", weights[..., :num_global], is_position)
    weights = jnp.where(global_mask[:, None, :, None], _gather(global_weights, index, 2), weights)
    return jnp.where(global_mask[:, :, None, None], _gather(global_out, index, 1), out), weights


def attend_to_front_and_window(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array,
    *,
    num_in_front: int,
    window: int,
    segment_ids: tuple[Array, Array] | None,
    front_bias: Float[Array, "#B N T G"] | None = None,
    distance_bias: Float[Array, "N D"] | None = None,
    **options: Any,
) -> Any:
    """Computes attention of blocks of queries over the first `num_in_front` keys and over the keys in their window.

    The keys in front are copies of global tokens, or summaries; the key of position s is at index num_in_front + s.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, num_in_front + T, K, H].
      value: values, [B, num_in_front + T, K, U].
      bias: broadcastable to [B, N, 1, num_in_front + T].
      mask: broadcastable to [B, N, 1, num_in_front + T].
      num_in_front: G, the number of keys that every query sees.
      window: w, how many keys a query sees on each side besides the one at its position.
      segment_ids: of queries and of keys, [B, T] and [B, num_in_front + T].
      front_bias: added to the logits of the keys in front.
      distance_bias: added to the logits of the keys in the window, for distances -w .. w from query to key; given with
        `front_bias`.
      options: options of `dot_product_attention`.
    """
    t = query.shape[1]
    num_blocks = -(-t // max(window, SMALLEST_BLOCK))  # -(-x // y) rounds the quotient up
    block_size = -(-t // num_blocks)
    span = block_size + 2 * window  # keys that a block gets besides those in front
    distance = jnp.arange(block_size)[:, None] + window - jnp.arange(span)[None]  # query minus key, [block_size, span]
    in_front = jnp.broadcast_to(jnp.arange(num_in_front), (num_blocks, num_in_front))
    position = block_size * jnp.arange(num_blocks)[:, None] - window + jnp.arange(span)[None]
    in_window = jnp.where((position >= 0) & (position < t), num_in_front + position, -1)  # -1 is padding

    def cut_keys(x: Array) -> Array:
        """Cuts [B, num_in_front + T, ...] into the keys of each block, [B, blocks, num_in_front + span, ...]."""
        front = jnp.broadcast_to(x[:, None, :num_in_front], (x.shape[0], num_blocks, num_in_front, *x.shape[2:]))
        return jnp.concatenate([front, cut(x[:, num_in_front:], -window, num_blocks, block_size, span)], axis=2)

    cut_queries = functools.partial(cut, start=0, num_blocks=num_blocks, block_size=block_size, span=block_size)
    if front_bias is not None and distance_bias is not None:
        in_front_bias = jnp.moveaxis(cut_queries(front_bias.swapaxes(1, 2)), 3, 2)  # [#B, blocks, N, I, G]
        # Other distances are not allowed.
        in_window_bias = jnp.take(distance_bias, jnp.clip(window - distance, 0, 2 * window), axis=1)  # [N, I, span]
        in_window_bias = jnp.broadcast_to(in_window_bias, (*in_front_bias.shape[:4], span))
        options["pair_bias"] = jnp.concatenate([in_front_bias, in_window_bias], axis=-1)
    return attend_in_blocks(
        query,
        key,
        value,
        bias,
        mask,
        cut_queries=cut_queries,
        cut_keys=cut_keys,
        columns=jnp.concatenate([in_front, in_window], axis=1),
        allowed=jnp.pad(jnp.abs(distance) <= window, ((0, 0), (num_in_front, 0)), constant_values=True),
        rows=slice(0, t),
        segment_ids=segment_ids,
        **options,
    )


def _gather(x: Shaped[Array, "..."], index: Int[Array, "B G"], axis: int) -> Shaped[Array, "..."]:
    """Gathers the entries of each row at the indices of that row along an axis."""
    index_shape = (len(index), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
    return jnp.take_along_axis(x, index.reshape(index_shape), axis)
