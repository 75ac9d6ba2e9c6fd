"""Scaled dot-product attention, equation 1 of "Attention Is All You Need", and the lookup that all scores share."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.dropout import dropout
from tfx_jax.functional.masks import causal_mask, segment_mask

Bias = Float[Array, "#B #N #T #S"]
Mask = Bool[Array, "#B #N #T #S"]
SegmentIds = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: Literal["xla", "chunked", "cudnn", "splash", "flash"] = "xla",
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q K^T + bias) V for every head.

    Equation 1 of "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762); with K < N
    heads of keys and values, the grouped queries of Ainslie et al. (2023, https://arxiv.org/abs/2305.13245).

    Args:
      query: queries, [B, T, N, H]; H is the paper's d_k.
      key: keys, [B, S, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, S, K, U]; U is the paper's d_v and may differ from H.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. Not a way to mask.
      mask: True where a query may attend, broadcastable to [B, N, T, S]. A query that may see no key gets a zero
        output, never a NaN and never the mean value. Hidden keys and values change nothing, but must be finite: 0 * NaN
        is NaN.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H). T5 passes 1.0.
      segment_ids: packed sequences, [B, T] for self-attention or a pair ([B, T], [B, S]); a query sees the keys of its
        own segment, and segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      implementation: what computes the same values. "xla", the formula as it stands, and "chunked", in memory linear in
        the length (`chunked_attention`), take everything. The kernels have no dropout: "cudnn" is for NVIDIA GPUs, half
        precision and d_v = d_k; "splash" for TPUs, without bias, with padding masks only; "flash" for TPUs with a bias,
        K = N and d_v = d_k.
      return_weights: also return the softmax weights, before dropout; "xla" computes them, whatever the implementation.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      [B, N, T, S]. Logits, softmax and weights are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if the sizes do not fit together, a mask is not boolean or not of rank 4, or the implementation cannot
        do what is asked for.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend = jax.jit(dot_product_attention, static_argnames=("is_causal", "return_weights"))
    >>> out, weights = attend(x, x, x, is_causal=True, return_weights=True)
    >>> out.shape, weights[0, 0].round(2).tolist()[:2]
    ((1, 3, 2, 4), [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    """
    if implementation != "xla":
        from tfx_jax.functional.kernels import attention_by  # which needs this module

        options = {"is_causal": is_causal, "scale": scale, "segment_ids": segment_ids}
        dropping = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        out = attention_by(implementation, query, key, value, bias, mask, **options, **dropping)
        if not return_weights:
            return out
        return out, dot_product_attention(query, key, value, bias, mask, **options, return_weights=True)[1]

    check_shapes(query, key, value, bias, mask)
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    dtype = np.promote_types(query.dtype, np.float32)  # NumPy's: JAX's own refuses under strict promotion
    # Plain products of matrices, one for each key head: its G query heads lie below each other.
    stacked_query = query.swapaxes(1, 2).reshape(b, k, n // k * t, h)
    logits = jnp.einsum("BKTH,BKSH->BKTS", stacked_query, key.swapaxes(1, 2), preferred_element_type=dtype)
    logits = logits.reshape(b, n, t, s) * (h**-0.5 if scale is None else scale)
    out, weights = soft_lookup(
        logits,
        value,
        bias,
        mask,
        is_causal=is_causal,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
    )
    out = out.astype(query.dtype)
    return (out, weights) if return_weights else out


def soft_lookup(
    scores: Float[Array, "B N T S"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scores + bias) V for every head: a dictionary that answers with a mean of its values.

    Equations 15.34 and 15.35 of "Probabilistic Machine Learning: An Introduction" (Murphy, 2022,
    https://probml.github.io/book1). Whatever scores a query against the keys, this is the rest of attention: the dot
    product of `dot_product_attention` and the hidden layer of `additive_attention` end here, and so may a score of
    your own.

    Args:
      scores: how well each query fits each key, [B, N, T, S], float32 at least.
      value: values, [B, S, K, U]; K divides N.
      bias: as in `dot_product_attention`, and so are all that follow.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `value`, and the weights before dropout, [B, N, T, S], in the dtype
      of `scores`.

    Raises:
      ValueError: if the sizes do not fit together, or a mask is not boolean or not of rank 4.

    >>> out, weights = jax.jit(soft_lookup)(jnp.zeros((1, 1, 1, 4)), jnp.arange(4.0).reshape(1, 4, 1, 1))
    >>> out.tolist(), weights[0, 0].tolist()
    ([[[[1.5]]]], [[0.25, 0.25, 0.25, 0.25]])
    """
    _check_pairs(bias, mask, scores.shape)
    (b, n, t, s), (k, u) = scores.shape, value.shape[2:]
    if value.shape[:2] != (b, s) or n % k:
        raise ValueError(f"values {value.shape} do not fit scores [B, N, T, S] = {scores.shape}")
    mask = combined_mask(mask, is_causal, segment_ids, b, t, s)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, mask)
    dropped = dropout(weights, dropout_rate, dropout_rng).astype(value.dtype).reshape(b, k, n // k * t, s)
    out = jnp.einsum("BKTS,BKSU->BKTU", dropped, value.swapaxes(1, 2))
    return out.reshape(b, n, t, u).swapaxes(1, 2), weights


def masked_softmax(logits: Float[Array, "B N T S"], mask: Mask | None) -> Float[Array, "B N T S"]:
    """Softmax over the visible keys; a row without any becomes zeros."""
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    # Large but finite: minus infinity would make a row without keys NaN, in the value or in the gradient.
    hidden = 0.7 * jnp.finfo(logits.dtype).min
    weights = jax.nn.softmax(jnp.where(mask, logits, hidden), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def combined_mask(
    mask: Mask | None, is_causal: bool, segment_ids: SegmentIds | None, batch: int, num_queries: int, num_keys: int
) -> Mask | None:
    """Who may attend to whom, by everything that is said about it; None means everyone to everything."""
    masks = [] if mask is None else [mask]
    if is_causal:
        masks.append(causal_mask(num_queries, num_keys))
    if segment_ids is not None:
        masks.append(segment_mask(*pair_of_segment_ids(segment_ids, batch, num_queries, num_keys)))
    combined = None
    for part in masks:
        combined = part if combined is None else combined & part
    return combined


def pair_of_segment_ids(
    segment_ids: SegmentIds, batch: int, num_queries: int, num_keys: int
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """The segments of the queries and of the keys, checked."""
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    shapes, want = (query_ids.shape, key_ids.shape), ((batch, num_queries), (batch, num_keys))
    if shapes != want:
        raise ValueError(f"segment_ids must have shapes [B, T] = {want[0]} and [B, S] = {want[1]}, got {shapes}")
    return query_ids, key_ids


def check_shapes(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> None:
    """Raises ValueError, with both sizes in it, for arrays that no attention takes."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have rank 4, [batch, length, heads, size], got shape {array.shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key head sizes differ: {query.shape[-1]} != {key.shape[-1]}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value differ in batch, length or heads: {key.shape[:3]} != {value.shape[:3]}")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key batch sizes differ: {query.shape[0]} != {key.shape[0]}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{key.shape[2]} key heads do not divide {query.shape[2]} query heads")
    _check_pairs(bias, mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))


def _check_pairs(bias: Array | None, mask: Array | None, full: tuple[int, ...]) -> None:
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and (
            array.ndim != 4 or any(size not in (1, want) for size, want in zip(array.shape, full, strict=True))
        ):
            raise ValueError(f"{name} must be broadcastable to [B, N, T, S] = {full}, got shape {array.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True = may attend), got {mask.dtype}; use bias for additive terms")
