"""LongT5's attention: a window with a bias for each distance, and summaries of blocks that all tokens see."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.blocks import check_over_keys
from tfx_jax.functional.attention.longformer import attend_to_front_and_window
from tfx_jax.functional.attention.signature import (
    Mask,
    check_integers,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.token_order import attend_in_order, order_tokens


@weights_on_request
@shard_like_query
@functools.partial(zeros_where_empty, front="summary_key")
def transient_global_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: None = None,
    mask: Mask | None = None,
    *,
    distance_bias: Float[Array, "N D"],
    block_size: int | None = None,
    summary_key: Float[Array, "B G K H"] | None = None,
    summary_value: Float[Array, "B G K U"] | None = None,
    summary_bias: Float[Array, "N E"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes self-attention within a window and, in the same softmax, to a summary of each block of tokens.

    Section 3.1 of "LongT5" (Guo et al., 2022, https://arxiv.org/abs/2112.07916): its transient-global attention and,
    without summaries, its local attention. Position p sees position s if |p - s| <= w; each pair gets a learned bias
    for its distance. `block_summaries` makes the summaries, which are projected to keys and values as tokens are. Time
    and memory grow as T * (w + G).

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: must be None: pairs get the biases below.
      mask: True for tokens, False for padding, which is not counted in windows and blocks: [#B, 1, 1, T].
      distance_bias: added to the logits of the window, [N, 2w + 1]: column w + (s - p) is for query p and key s.
      block_size: tokens in a block; required with summaries.
      summary_key: keys of the summaries, [B, G, K, H] with G = floor(T / block_size); None means no summaries.
      summary_value: values of the summaries, [B, G, K, U].
      summary_bias: added to the logits of the summaries, [N, 2G - 1]: column G - 1 + (g - b) is for a query in block b
        and the summary of block g.
      is_causal: must be False, because summaries contain the future.
      scale: multiplies the logits; None means 1 / sqrt(H).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, those of the summaries first; needs O(T * T) memory.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, G + T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match, or bias or is_causal is set.

    >>> attend = jax.jit(lambda x: transient_global_attention(x, x, x, distance_bias=jnp.zeros((1, 3))))
    >>> attend(jnp.arange(4.0).reshape(1, 4, 1, 1) * 0 + 1).ravel().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    check_over_keys(query, key, value, None, mask)
    (b, t), n = query.shape[:2], query.shape[2]
    if t != key.shape[1] or bias is not None or is_causal:
        raise ValueError(
            "transient-global attention is self-attention with biases for distances: pass as many keys as queries "
            f"(got {t} and {key.shape[1]}), bias=None and is_causal=False"
        )
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(f"mask must be one of padding, [B, 1, 1, T], got shape {mask.shape}")
    if distance_bias.shape[0] != n or distance_bias.shape[1] % 2 == 0:
        raise ValueError(f"distance_bias must have shape [{n}, 2 * window + 1], got {distance_bias.shape}")
    num_summaries = 0
    if summary_key is not None:
        check_integers(1, block_size=block_size)
        num_summaries = t // block_size  # type: ignore[operator]
        for name, array, shape in [
            ("summary_key", summary_key, (b, num_summaries, *key.shape[2:])),
            ("summary_value", summary_value, (b, num_summaries, *value.shape[2:])),
            ("summary_bias", summary_bias, (n, max(2 * num_summaries - 1, 0))),
        ]:
            if array is None or array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {None if array is None else array.shape}")
    window = distance_bias.shape[1] // 2
    exists = _exists(mask, b, t)
    # In the order of `attend`, tokens are first: block of each query, and number of blocks.
    blocks = _blocks(jnp.sort(exists, axis=1, descending=True), block_size or 1)
    num_blocks = blocks.max(axis=1, keepdims=True) + 1  # [B, 1]

    def with_summaries(x: Array, summaries: Array | None) -> Array:
        """Puts the summaries in front of the tokens."""
        return jnp.concatenate([summaries, x], axis=1) if summaries is not None and num_summaries else x

    front_bias = jnp.zeros((1, n, t, 0), distance_bias.dtype)
    if num_summaries and summary_bias is not None:
        column = jnp.maximum(
            num_summaries - 1 + jnp.arange(num_summaries)[None, None] - blocks[..., None], 0
        )  # [B, T, G]
        front_bias = jnp.moveaxis(jnp.take(summary_bias, column, axis=1, mode="clip"), 0, 1)  # [B, N, T, G]

    def attend(query: Array, key: Array, value: Array, bias: None, mask: Array | None, *, segment_ids: Any) -> Any:
        """Attends with the tokens first and padding last; `segment_ids` are 0 for padding."""
        del bias, mask
        ids = jnp.ones((b, t), jnp.int32) if segment_ids is None else segment_ids[0]
        is_summary = (jnp.arange(num_summaries)[None] < num_blocks).astype(jnp.int32)  # others summarize nothing
        return attend_to_front_and_window(
            query,
            with_summaries(key, summary_key),
            with_summaries(value, summary_value),
            None,
            jnp.ones((1, 1, 1, 1), bool),
            num_in_front=num_summaries,
            window=window,
            segment_ids=(ids, jnp.concatenate([is_summary, ids], axis=1)),
            front_bias=front_bias,
            distance_bias=distance_bias,
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )

    order = order_tokens(mask, None, b, t, t)
    if order is None:
        return attend(query, key, value, None, None, segment_ids=None)
    if not return_weights:
        return attend_in_order(attend, query, key, value, None, mask, order)
    out, weights = attend(
        order.of_queries(query), order.of_keys(key), order.of_keys(value), None, None, segment_ids=order.segment_ids
    )
    summary_weights = order.to_columns(weights[..., :num_summaries].swapaxes(1, 2)).swapaxes(1, 2)
    out, weights = order.restore((out, weights[..., num_summaries:]))
    return out, jnp.concatenate([summary_weights, weights], axis=-1)


def block_summaries(x: Float[Array, "B T D"], mask: Mask | None = None, *, block_size: int) -> Float[Array, "B G D"]:
    """Returns the sum of the vectors of each block of tokens, G = floor(T / block_size), for LongT5's summaries.

    Padding is not counted. Tokens after the last full block belong to it; a block that a row does not have gets zeros.

    Args:
      x: vectors of tokens, [B, T, D].
      mask: True for tokens, False for padding, [#B, 1, 1, T].
      block_size: tokens in a block.

    >>> summarize = jax.jit(functools.partial(block_summaries, block_size=2))
    >>> summarize(jnp.arange(5.0)[None, :, None]).ravel().tolist()
    [1.0, 9.0]
    """
    b, t, _ = x.shape
    num_summaries = t // block_size
    blocks = _blocks(_exists(mask, b, t), block_size)
    blocks = jnp.where(blocks < 0, num_summaries, blocks)  # out of range, so that it is dropped
    return jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=num_summaries))(x, blocks)


def _exists(mask: Mask | None, batch: int, num_tokens: int) -> Bool[Array, "B T"]:
    """Returns True for tokens, False for padding."""
    shape = (batch, num_tokens)
    return jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(mask[:, 0, 0], shape)


def _blocks(exists: Bool[Array, "B T"], block_size: int) -> Int[Array, "B T"]:
    """Returns the block of each token; -1 for padding, and for all tokens of a row without a full block."""
    position = jnp.cumsum(exists, axis=1) - 1
    last = exists.sum(axis=1, keepdims=True) // block_size - 1
    return jnp.where(exists, jnp.minimum(position // block_size, last), -1)
