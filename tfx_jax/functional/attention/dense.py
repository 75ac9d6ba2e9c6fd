"""From logits to a result: what all attentions share that score every query against every key."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tfx_jax.functional.attention.masks import (
    Bias,
    Mask,
    SegmentIds,
    check_floats,
    check_pairs,
    check_shapes,
    combine_masks,
    pair_of_segment_ids,
)
from tfx_jax.functional.layers import dropout


def dot_product_logits(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], scale: float | None = None
) -> Float[Array, "B N T S"]:
    """Scaled dot products of queries and keys, in float32 at least; see `tfx_jax.functional.dot_product_attention`."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    dtype = np.promote_types(query.dtype, np.float32)  # NumPy's: JAX's own refuses under strict promotion
    # Plain products of matrices, one for each key head: its G query heads lie below each other.
    stacked_query = query.swapaxes(1, 2).reshape(b, k, n // k * t, h)
    logits = jnp.einsum("BKTH,BKSH->BKTS", stacked_query, key.swapaxes(1, 2), preferred_element_type=dtype)
    return logits.reshape(b, n, t, s) * (h**-0.5 if scale is None else scale)


def masked_logits(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    *,
    is_causal: bool,
    scale: float | None,
    segment_ids: SegmentIds | None,
) -> tuple[Float[Array, "B N T S"], Mask | None]:
    """Scaled dot products with the bias, and the mask of all pairs that may meet, for normalizations of one's own.

    A bias of minus infinity becomes a part of the mask; the logits are finite.
    """
    check_shapes(query, key, value, bias, mask)
    logits = dot_product_logits(query, key, scale)
    mask = combine_masks(mask, is_causal, segment_ids, query.shape[0], query.shape[1], key.shape[1])
    if bias is not None:
        is_finite = bias != -jnp.inf
        logits = logits + jnp.where(is_finite, bias, 0).astype(logits.dtype)
        mask = is_finite if mask is None else mask & is_finite
    return logits, mask


def dot_product_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
) -> Float[Array, "B N T S"]:
    """The weights of `tfx_jax.functional.dot_product_attention`, before dropout, whatever computes its values."""
    check_shapes(query, key, key, bias, mask)
    return _weights(dot_product_logits(query, key, scale), bias, mask, is_causal, segment_ids)


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    queries: Sequence[int],
    heads: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
) -> Float[Array, "B P Q S"]:
    """Computes the weights of some queries and heads of `tfx_jax.functional.dot_product_attention`, without the others.

    For maps of sequences so long that [B, N, T, S] is more than a device holds, whatever computed the values.

    Args:
      query: queries, [B, T, N, H]; all of them, since causality counts from the last.
      key: keys, [B, S, K, H]; K divides N.
      bias: as in `dot_product_attention`, and so are all that are not named here.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      queries: positions of Q queries, 0 to T - 1.
      heads: numbers of P heads, 0 to N - 1; None means all.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).

    Returns:
      Weights before dropout, [B, P, Q, S], float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the sizes do not fit together, or there is no such query or head.

    >>> attend = jax.jit(attention_weights, static_argnames=("queries", "heads", "is_causal"))
    >>> x = jnp.ones((1, 1000, 8, 4))
    >>> attend(x, x, queries=(0, 1), heads=(7,), is_causal=True)[0, 0, :, :3].round(2).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    check_shapes(query, key, key, bias, mask)
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    rows = _numbers("queries", queries, t)
    columns = _numbers("heads", range(n) if heads is None else heads, n)

    def chosen(pairs: Array | None) -> Array | None:
        if pairs is not None and pairs.shape[1] > 1:
            pairs = pairs[:, columns]
        return pairs if pairs is None or pairs.shape[2] == 1 else pairs[:, :, rows]

    bias, mask = chosen(bias), chosen(mask)
    if is_causal:
        past = (jnp.arange(s)[None] <= (rows + s - t)[:, None])[None, None]
        mask = past if mask is None else mask & past
    if segment_ids is not None:
        query_ids, key_ids = pair_of_segment_ids(segment_ids, b, t, s)
        segment_ids = query_ids[:, rows], key_ids
    logits = dot_product_logits(query[:, rows][:, :, columns], key[:, :, columns // (n // k)], scale)
    return _weights(logits, bias, mask, False, segment_ids)


def _numbers(name: str, numbers: Sequence[int], size: int) -> np.ndarray:
    for number in numbers:
        if not 0 <= number < size:
            raise ValueError(f"{name} must be in 0 .. {size - 1}, got {number}")
    return np.asarray(numbers, np.int32)


def attention_from_logits(
    logits: Float[Array, "B N T S"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(logits + bias) V for every head: a dictionary that answers with a mean of its values.

    Equations 15.34 and 15.35 of "Probabilistic Machine Learning: An Introduction" (Murphy, 2022,
    https://probml.github.io/book1). Whatever scores a query against the keys, this is the rest of attention: the dot
    product of `dot_product_attention` and the hidden layer of `additive_attention` end here, and so may a score of
    your own.

    Args:
      logits: how well each query fits each key, [B, N, T, S], float32 at least.
      value: values, [B, S, K, U]; K divides N.
      bias: as in `dot_product_attention`, and so are all that follow.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `value`, and the weights before dropout, [B, N, T, S], in the dtype
      of `logits`.

    Raises:
      ValueError: if the sizes do not fit together, or a mask is not boolean or not of rank 4.

    >>> out, weights = jax.jit(attention_from_logits)(jnp.zeros((1, 1, 1, 4)), jnp.arange(4.0).reshape(1, 4, 1, 1))
    >>> out.tolist(), weights[0, 0].tolist()
    ([[[[1.5]]]], [[0.25, 0.25, 0.25, 0.25]])
    """
    check_pairs(bias, mask, logits.shape)
    check_floats(logits=logits, value=value)
    (b, n, _, s), k = logits.shape, value.shape[2]
    if value.shape[:2] != (b, s) or n % k:
        raise ValueError(f"values {value.shape} do not fit logits [B, N, T, S] = {logits.shape}")
    weights = _weights(logits, bias, mask, is_causal, segment_ids)
    return weighted_values(dropout(weights, dropout_rate, dropout_rng), value), weights


def weighted_values(weights: Float[Array, "B N T S"], value: Float[Array, "B S K U"]) -> Float[Array, "B T N U"]:
    """Sums of values by the weights of each query; K value heads serve N / K query heads each. In the values' dtype."""
    (b, n, t, s), (k, u) = weights.shape, value.shape[2:]
    stacked = weights.astype(value.dtype).reshape(b, k, n // k * t, s)
    out = jnp.einsum("BKTS,BKSU->BKTU", stacked, value.swapaxes(1, 2))
    return out.reshape(b, n, t, u).swapaxes(1, 2)


def _weights(
    logits: Float[Array, "B N T S"],
    bias: Bias | None,
    mask: Mask | None,
    is_causal: bool,
    segment_ids: SegmentIds | None,
) -> Float[Array, "B N T S"]:
    b, _, t, s = logits.shape
    mask = combine_masks(mask, is_causal, segment_ids, b, t, s)
    if bias is None:
        return masked_softmax(logits, mask)
    bias = bias.astype(logits.dtype)
    has_key = (bias != -jnp.inf).any(axis=-1, keepdims=True)  # minus infinity hides a key, and may hide all of a row
    weights = masked_softmax(jnp.where(has_key, logits + bias, 0), mask)
    return jnp.where(has_key, weights, jnp.zeros((), weights.dtype))


def masked_softmax(logits: Float[Array, "B N T S"], mask: Mask | None) -> Float[Array, "B N T S"]:
    """Softmax over the visible keys; a row without any becomes zeros."""
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    # Large but finite: minus infinity would make a row without keys NaN, in the value or in the gradient.
    hidden = 0.7 * jnp.finfo(logits.dtype).min
    weights = jax.nn.softmax(jnp.where(mask, logits, hidden), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), weights.dtype))
