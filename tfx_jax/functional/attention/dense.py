"""From logits to a result: what all attentions share that score every query against every key."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.masks import (
    Bias,
    Mask,
    MaskMod,
    ScoreMod,
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


def soft_capped(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Keeps logits within -cap .. cap: cap * tanh(logits / cap), as section 2 of Gemma 2 (2024) has it."""
    return jnp.tanh(logits / cap) * cap


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
    sinks: Float[Array, " N"] | None = None,
    **options: Any,
) -> Float[Array, "B N T S"]:
    """The weights of `tfx_jax.functional.dot_product_attention`, before dropout, whatever computes its values."""
    check_shapes(query, key, key, bias, mask)
    logits, mask, may_hide = _logits_and_mask(query, key, mask, **options)
    return _softmax(*_biased(logits, bias, may_hide), mask, sinks)


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    *,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T S"], Float[Array, "B N T"] | None]:
    """`tfx_jax.functional.dot_product_attention` by its formula: output, weights and, if asked for, the denominators.

    Args:
      query: queries.
      key: keys.
      value: values.
      bias: added to the logits.
      mask: True where a query may attend.
      sinks: a logit for each head that no value belongs to.
      dropout_rate: probability of dropping a weight.
      dropout_rng: PRNG key; None disables dropout.
      return_lse: whether to compute the logarithms of the softmax's denominators; otherwise they are None.
      options: of `_logits_and_mask`.
    """
    logits, mask, may_hide = _logits_and_mask(query, key, mask, **options)
    logits, has_key = _biased(logits, bias, may_hide)
    weights = _softmax(logits, has_key, mask, sinks)
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value).astype(query.dtype)
    return out, weights, _log_sum_exp(logits, has_key, mask, sinks) if return_lse else None


def _logits_and_mask(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Mask | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    window: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[Array, "B N T S"], Mask | None, bool]:
    """Logits without bias, who may attend to whom, and whether logits may be minus infinity."""
    (b, t, n, _), s = query.shape, key.shape[1]
    logits = dot_product_logits(query, key, scale)
    if logits_soft_cap is not None:
        logits = soft_capped(logits, logits_soft_cap)
    mask = combine_masks(mask, is_causal, segment_ids, b, t, s, window=window)
    places = [jnp.arange(size, dtype=jnp.int32) for size in (b, n, t, s)]
    places = [jnp.expand_dims(x, [a for a in range(4) if a != axis]) for axis, x in enumerate(places)]
    if score_mod is not None:
        logits = apply_score_mod(score_mod, logits, *places)
    if mask_mod is not None:
        seen = apply_mask_mod(mask_mod, (b, n, t, s), *places)
        mask = seen if mask is None else mask & seen
    return logits, mask, score_mod is not None


def apply_score_mod(score_mod: ScoreMod, logits: Float[Array, "B N T S"], *places: Array) -> Float[Array, "B N T S"]:
    """Calls `score_mod` and checks its result."""
    result = score_mod(logits, *places)
    if result.shape != logits.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(
            f"score_mod must return floating-point logits of shape {logits.shape}, got {result.dtype} {result.shape}"
        )
    return result.astype(logits.dtype)


def apply_mask_mod(mask_mod: MaskMod, full: tuple[int, ...], *places: Array) -> Bool[Array, "#B #N #T #S"]:
    """Calls `mask_mod` and checks its result, which may be broadcastable to `full`."""
    seen = mask_mod(*places)
    fits = seen.ndim == 4 and all(size in (1, want) for size, want in zip(seen.shape, full, strict=True))
    if not fits or seen.dtype != jnp.bool_:
        raise ValueError(f"mask_mod must return booleans broadcastable to {full}, got {seen.dtype} {seen.shape}")
    return seen


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
    mask = combine_masks(mask, False, segment_ids, b, len(rows), s)
    return _softmax(*_biased(logits, bias), mask)


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
    mask = combine_masks(mask, is_causal, segment_ids, b, logits.shape[2], s)
    weights = _softmax(*_biased(logits, bias), mask)
    return weighted_values(dropout(weights, dropout_rate, dropout_rng), value), weights


def merge_attention(
    outs: Sequence[Float[Array, "B T N U"]], lses: Sequence[Float[Array, "B N T"]]
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T"]]:
    r"""Merges attention over parts of the keys into attention over all: the softmax's sums, rescaled and added.

    Section 3.1.1 of "FlashAttention-2" (Dao, 2023, https://arxiv.org/abs/2307.08691). With lse = log of the sum of
    exp(lse_i), the output is the sum of exp(lse_i - lse) out_i. For caches in several pieces, such as a prefix that all
    rows share, and for keys on several devices. Pass `sinks` to one of the parts.

    Args:
      outs: outputs of `dot_product_attention` over each part, [B, T, N, U].
      lses: with `return_lse=True`, their second results, [B, N, T].

    Returns:
      Output and logarithm of the denominator over all parts, so that they can be merged in turn. A query without keys
      in any part has zeros and minus infinity.

    >>> outs = np.array([0.5, 2.5], np.float32).reshape(2, 1, 1, 1, 1)  # means of two keys each
    >>> lse = np.log(np.full((1, 1, 1), 2, np.float32))  # of two logits of zero
    >>> merged = jax.jit(lambda outs, lse: merge_attention(list(outs), [lse, lse]))(outs, lse)
    >>> merged[0].item(), round(merged[1].item(), 4)
    (1.5, 1.3863)
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs an lse for each of at least one output, got {len(outs)} and {len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        b, t, n, _ = out.shape
        if lse.shape != (b, n, t):
            raise ValueError(f"lse must have shape [B, N, T] = {(b, n, t)} beside out {out.shape}, got {lse.shape}")
    parts = jnp.stack(list(lses))
    largest = jax.lax.stop_gradient(parts.max(axis=0, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    shares = jnp.exp(parts - largest)
    total = shares.sum(axis=0, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    weights = (shares / total).swapaxes(2, 3)[..., None]  # [parts, B, T, N, 1]
    out = sum(weight * out.astype(weight.dtype) for weight, out in zip(weights, outs, strict=True))
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + largest)[0]
    return jnp.asarray(out).astype(outs[0].dtype), lse


def weighted_values(weights: Float[Array, "B N T S"], value: Float[Array, "B S K U"]) -> Float[Array, "B T N U"]:
    """Sums of values by the weights of each query; K value heads serve N / K query heads each. In the values' dtype."""
    (b, n, t, s), (k, u) = weights.shape, value.shape[2:]
    stacked = weights.astype(value.dtype).reshape(b, k, n // k * t, s)
    out = jnp.einsum("BKTS,BKSU->BKTU", stacked, value.swapaxes(1, 2))
    return out.reshape(b, n, t, u).swapaxes(1, 2)


def _biased(
    logits: Float[Array, "B N T S"], bias: Bias | None, may_hide: bool = False
) -> tuple[Float[Array, "B N T S"], Bool[Array, "#B #N #T 1"] | None]:
    """Logits with their bias, finite in each row, and which rows have a key that minus infinity does not hide.

    Args:
      logits: logits.
      bias: added to them.
      may_hide: whether logits may be minus infinity without a bias.
    """
    if bias is not None:
        bias = bias.astype(logits.dtype)
    if may_hide:
        logits = logits if bias is None else logits + bias
        has_key = (logits != -jnp.inf).any(axis=-1, keepdims=True)
        return jnp.where(has_key, logits, 0), has_key
    if bias is None:
        return logits, None
    has_key = (bias != -jnp.inf).any(axis=-1, keepdims=True)  # minus infinity hides a key, and may hide all of a row
    return jnp.where(has_key, logits + bias, 0), has_key


def _softmax(
    logits: Float[Array, "B N T S"],
    has_key: Bool[Array, "#B #N #T 1"] | None,
    mask: Mask | None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T S"]:
    if sinks is None:
        weights = masked_softmax(logits, mask)
    else:
        sink = _checked_sinks(sinks, logits.shape[1], logits.dtype)[None, :, None, None]
        logits = logits if mask is None else jnp.where(mask, logits, hidden_logit(logits.dtype))
        largest = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True, initial=-jnp.inf), sink))
        largest = jnp.maximum(largest, hidden_logit(logits.dtype))  # of no keys and a sink of minus infinity
        exponentials = jnp.exp(logits - largest)
        weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest))
        weights = weights if mask is None else jnp.where(mask, weights, jnp.zeros((), weights.dtype))
    return weights if has_key is None else jnp.where(has_key, weights, jnp.zeros((), weights.dtype))


def _log_sum_exp(
    logits: Float[Array, "B N T S"],
    has_key: Bool[Array, "#B #N #T 1"] | None,
    mask: Mask | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B N T"]:
    """The logarithm of the softmax's denominator; minus infinity in a row without keys and sink."""
    seen = jnp.asarray(True) if mask is None else mask
    sees_key = (seen & (logits != -jnp.inf)).any(axis=-1)
    if has_key is not None:
        sees_key = sees_key & has_key[..., 0]
    lse = jax.nn.logsumexp(jnp.where(seen, logits, hidden_logit(logits.dtype)), axis=-1)
    lse = jnp.where(sees_key, lse, jnp.asarray(-jnp.inf, lse.dtype))
    if sinks is None:
        return lse
    return jnp.logaddexp(lse, _checked_sinks(sinks, logits.shape[1], lse.dtype)[None, :, None])


def _checked_sinks(sinks: Float[Array, " N"], num_heads: int, dtype: np.dtype) -> Float[Array, " N"]:
    check_sinks(sinks, num_heads)
    return sinks.astype(dtype)


def check_sinks(sinks: Float[Array, " N"] | None, num_heads: int) -> None:
    """Raises ValueError for sinks that are not one number for each query head."""
    if sinks is not None and (sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks must be one floating-point logit for each query head, [N] = {(num_heads,)}, "
            f"got {sinks.dtype} {sinks.shape}"
        )


def hidden_logit(dtype: np.dtype) -> Array:
    """What hides a key: below every logit, but finite, since minus infinity would make a row without keys NaN."""
    return jnp.asarray(0.7 * jnp.finfo(dtype).min, dtype)


def masked_softmax(logits: Float[Array, "B N T S"], mask: Mask | None) -> Float[Array, "B N T S"]:
    """Softmax over the visible keys; a row without any becomes zeros."""
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    # Finite also for the gradient.
    weights = jax.nn.softmax(jnp.where(mask, logits, hidden_logit(logits.dtype)), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def among_largest(scores: Float[Array, "*rows S"], mask: Bool[Array, "*#rows S"] | None, size: int) -> Array:
    """Which scores of a row are among the `size` largest that the mask shows; those equal to the last of them are too.

    >>> jax.jit(among_largest, static_argnums=(1, 2))(jnp.array([3.0, 1.0, 2.0]), None, 2).tolist()
    [True, False, True]
    """
    scores = jax.lax.stop_gradient(scores)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.asarray(-jnp.inf, scores.dtype))
    is_kept = scores >= jax.lax.top_k(scores, min(size, scores.shape[-1]))[0][..., -1:]
    return is_kept if mask is None else is_kept & mask
