"""Dense attention: logits, softmax and weighted values, shared by all attentions that score every query-key pair."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.signature import (
    AttentionMask,
    Bias,
    Mask,
    MaskMod,
    Positions,
    ScoreMod,
    SegmentIds,
    Window,
    add_key_lengths,
    check_floats,
    check_pairs,
    check_shapes,
    check_soft_cap,
    check_window,
    combine_masks,
    count_from_lengths,
    pair_of_segment_ids,
    statistics_dtype,
)
from tfx_jax.functional.layers import dropout


class Request(NamedTuple):
    """Checked arguments of `tfx_jax.functional.dot_product_attention`, the input of every implementation."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K U"]
    bias: Bias | None
    mask: AttentionMask
    scale: float | None
    dropout_rate: float
    dropout_rng: Array | None
    logits_soft_cap: float | None
    sinks: Float[Array, " N"] | None
    score_mod: ScoreMod | None
    return_lse: bool

    @property
    def factor(self) -> float:
        """The factor that multiplies the logits; 1 / sqrt(H) by default."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def drops(self) -> bool:
        """Whether dropout is active."""
        return self.dropout_rng is not None and self.dropout_rate > 0

    @property
    def shaping(self) -> dict[str, Any]:
        """Arguments of `_logits_and_mask`: scale, soft cap, causality, window, segments and modifiers."""
        masks = {"is_causal": self.mask.is_causal, "window": self.mask.window, "segment_ids": self.mask.ids}
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask.mask_mod}
        return {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap} | masks | mods


def make_request(
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
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    local_window_size: Window | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
) -> Request:
    """Checks the arguments of `tfx_jax.functional.dot_product_attention` and returns them as a `Request`."""
    check_shapes(query, key, value, bias, mask)
    check_sinks(sinks, query.shape[2])
    check_soft_cap(logits_soft_cap)
    window, is_causal = check_window(local_window_size, is_causal)
    positions = Positions(is_causal, window, mask_mod)
    is_causal, window, mask_mod = count_from_lengths(positions, query, key, query_lengths, key_lengths)
    ids = None
    if segment_ids is not None:
        ids = pair_of_segment_ids(segment_ids, query.shape[0], query.shape[1], key.shape[1])
    return Request(
        query,
        key,
        value,
        bias,
        AttentionMask(add_key_lengths(mask, key_lengths, key), is_causal, window, ids, mask_mod),
        scale,
        dropout_rate,
        dropout_rng,
        logits_soft_cap,
        sinks,
        score_mod,
        return_lse,
    )


def dot_product_logits(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], scale: float | None = None
) -> Float[Array, "B N T S"]:
    """Computes scale * Q K^T, in float32 at least; a scale of None means 1 / sqrt(H)."""
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    dtype = statistics_dtype(query)
    # One matrix product for each key head: the queries of its G query heads are stacked along one axis.
    stacked_query = query.swapaxes(1, 2).reshape(b, k, n // k * t, h)
    logits = jnp.einsum("BKTH,BKSH->BKTS", stacked_query, key.swapaxes(1, 2), preferred_element_type=dtype)
    return logits.reshape(b, n, t, s) * (h**-0.5 if scale is None else scale)


def soft_capped(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Limits logits to -cap .. cap by cap * tanh(logits / cap): section 2 of Gemma 2 (2024)."""
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
    """Returns biased, scaled dot products and the combined mask, for attentions that do not use the plain softmax.

    A bias of minus infinity becomes part of the mask, so the logits are finite.
    """
    check_shapes(query, key, value, bias, mask)
    logits = dot_product_logits(query, key, scale)
    mask = combine_masks(mask, is_causal, segment_ids, query.shape[0], query.shape[1], key.shape[1])
    return _biased(logits, bias, mask)


def dot_product_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    sinks: Float[Array, " N"] | None = None,
    **options: Any,
) -> Float[Array, "B N T S"]:
    """Computes the weights of `tfx_jax.functional.dot_product_attention`, before dropout, by the formula.

    `options` are those of `_logits_and_mask`, see `Request.shaping`.
    """
    check_shapes(query, key, key, bias, mask)
    logits, mask = _logits_and_mask(query, key, bias, mask, **options)
    return masked_softmax(logits, mask, _sink_logits(sinks, logits))


def dense_attention(
    request: Request,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T S"], Float[Array, "B N T"] | None]:
    """Computes `tfx_jax.functional.dot_product_attention` by the formula.

    Returns:
      Output, weights before dropout, and the logarithms of the softmax denominators, None unless requested.
    """
    query = request.query
    logits, mask = _logits_and_mask(query, request.key, request.bias, request.mask.pairs, **request.shaping)
    sink = _sink_logits(request.sinks, logits)
    weights = masked_softmax(logits, mask, sink)
    dropped = dropout(weights, request.dropout_rate, request.dropout_rng)
    lse = _log_sum_exp(logits, mask, sink) if request.return_lse else None
    return weighted_values(dropped, request.value).astype(query.dtype), weights, lse


def _logits_and_mask(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Bias | None,
    mask: Mask | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    window: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[Array, "B N T S"], Mask | None]:
    """Returns finite, biased logits and the combined mask.

    The arguments are those of `tfx_jax.functional.dot_product_attention`; `window` is (left, right).
    """
    (b, t, n, _), s = query.shape, key.shape[1]
    logits = dot_product_logits(query, key, scale)
    if logits_soft_cap is not None:
        logits = soft_capped(logits, logits_soft_cap)
    mask = combine_masks(mask, is_causal, segment_ids, b, t, s, window=window)
    # Indices for the modifiers: [B, 1, 1, 1], [1, N, 1, 1], [1, 1, T, 1] and [1, 1, 1, S].
    indices = [jnp.arange(size, dtype=jnp.int32) for size in (b, n, t, s)]
    indices = [jnp.expand_dims(x, [other for other in range(4) if other != axis]) for axis, x in enumerate(indices)]
    if score_mod is not None:
        logits, mask = _hide_infinite(apply_score_mod(score_mod, logits, *indices), mask)
    if mask_mod is not None:
        visible = apply_mask_mod(mask_mod, (b, n, t, s), *indices)
        mask = visible if mask is None else mask & visible
    return _biased(logits, bias, mask)


def apply_score_mod(score_mod: ScoreMod, logits: Float[Array, "B N T S"], *indices: Array) -> Float[Array, "B N T S"]:
    """Calls `score_mod`; raises ValueError unless it returns floating-point logits of the same shape."""
    result = score_mod(logits, *indices)
    if result.shape != logits.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(
            f"score_mod must return floating-point logits of shape {logits.shape}, got {result.dtype} {result.shape}"
        )
    return result.astype(logits.dtype)


def apply_mask_mod(mask_mod: MaskMod, full: tuple[int, ...], *indices: Array) -> Bool[Array, "#B #N #T #S"]:
    """Calls `mask_mod`; raises ValueError unless it returns booleans that are broadcastable to the shape `full`."""
    visible = mask_mod(*indices)
    fits = visible.ndim == 4 and all(size in (1, required) for size, required in zip(visible.shape, full, strict=True))
    if not fits or visible.dtype != jnp.bool_:
        raise ValueError(f"mask_mod must return booleans broadcastable to {full}, got {visible.dtype} {visible.shape}")
    return visible


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
    """Computes the weights of `tfx_jax.functional.dot_product_attention` for selected queries and heads only.

    For attention maps of sequences so long that [B, N, T, S] does not fit into device memory.

    Args:
      query: all queries, [B, T, N, H], because causality aligns the last query with the last key.
      key: keys, [B, S, K, H]; K divides N.
      bias: as in `dot_product_attention`, like all arguments but `queries` and `heads`.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      queries: positions of the Q selected queries, 0 to T - 1.
      heads: indices of the P selected heads, 0 to N - 1; None means all.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).

    Returns:
      Weights before dropout, [B, P, Q, S], float32 (float64 for float64 inputs).

    Raises:
      ValueError: if shapes do not match, or a query or a head is out of range.

    >>> attend = jax.jit(attention_weights, static_argnames=("queries", "heads", "is_causal"))
    >>> x = jnp.ones((1, 1000, 8, 4))
    >>> attend(x, x, queries=(0, 1), heads=(7,), is_causal=True)[0, 0, :, :3].round(2).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    check_shapes(query, key, key, bias, mask)
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    query_index = _checked_indices("queries", queries, t)
    head_index = _checked_indices("heads", range(n) if heads is None else heads, n)

    def select(pairs: Array | None) -> Array | None:
        """Selects heads and queries of a bias or a mask; axes of size 1 stay as they are."""
        if pairs is not None and pairs.shape[1] > 1:
            pairs = pairs[:, head_index]
        return pairs if pairs is None or pairs.shape[2] == 1 else pairs[:, :, query_index]

    bias, mask = select(bias), select(mask)
    if is_causal:
        not_future = (jnp.arange(s)[None] <= (query_index + s - t)[:, None])[None, None]  # [1, 1, Q, S]
        mask = not_future if mask is None else mask & not_future
    if segment_ids is not None:
        query_ids, key_ids = pair_of_segment_ids(segment_ids, b, t, s)
        segment_ids = query_ids[:, query_index], key_ids
    selected_query = query[:, query_index][:, :, head_index]  # [B, Q, P, H]
    selected_key = key[:, :, head_index // (n // k)]  # [B, S, P, H]: the key head of each query head
    logits = dot_product_logits(selected_query, selected_key, scale)
    mask = combine_masks(mask, False, segment_ids, b, len(query_index), s)
    return masked_softmax(*_biased(logits, bias, mask))


def _checked_indices(name: str, indices: Sequence[int], size: int) -> np.ndarray:
    """Returns indices as an array; raises ValueError if one is not in 0 .. size - 1."""
    for index in indices:
        if not 0 <= index < size:
            raise ValueError(f"{name} must be in 0 .. {size - 1}, got {index}")
    return np.asarray(indices, np.int32)


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
    r"""Computes softmax(logits + bias) V for every head: a soft dictionary lookup.

    Equations 15.34 and 15.35 of "Probabilistic Machine Learning: An Introduction" (Murphy, 2022,
    https://probml.github.io/book1). This is the part of attention after the scores: `additive_attention` ends with it,
    and so can an attention with your own score function.

    Args:
      logits: score of each query and key, [B, N, T, S], float32 at least.
      value: values, [B, S, K, U]; K divides N.
      bias: as in `dot_product_attention`, like all arguments below.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `value`, and the weights before dropout, [B, N, T, S], in the dtype
      of `logits`.

    Raises:
      ValueError: if shapes do not match, or a mask is not boolean or not of rank 4.

    >>> out, weights = jax.jit(attention_from_logits)(jnp.zeros((1, 1, 1, 4)), jnp.arange(4.0).reshape(1, 4, 1, 1))
    >>> out.tolist(), weights[0, 0].tolist()
    ([[[[1.5]]]], [[0.25, 0.25, 0.25, 0.25]])
    """
    check_pairs(bias, mask, logits.shape)
    check_floats(logits=logits, value=value)
    (b, n, _, s), k = logits.shape, value.shape[2]
    if value.shape[:2] != (b, s) or n % k:
        raise ValueError(
            f"value must have shape [B, S, K, U] with B = {b}, S = {s} and a K that divides {n} heads, for logits of "
            f"shape {logits.shape}; got {value.shape}"
        )
    mask = combine_masks(mask, is_causal, segment_ids, b, logits.shape[2], s)
    weights = masked_softmax(*_biased(logits, bias, mask))
    return weighted_values(dropout(weights, dropout_rate, dropout_rng), value), weights


def merge_attention(
    outs: Sequence[Float[Array, "B T N U"]], lses: Sequence[Float[Array, "B N T"]]
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N T"]]:
    r"""Merges attention over parts of the keys into attention over all keys.

    Section 3.1.1 of "FlashAttention-2" (Dao, 2023, https://arxiv.org/abs/2307.08691). With lse = log of the sum of
    exp(lse_i), the output is the sum of exp(lse_i - lse) out_i. For caches in several parts, such as a prefix that all
    rows share, and for keys on several devices. Pass `sinks` to only one of the parts.

    Args:
      outs: output of `dot_product_attention` over each part, [B, T, N, U].
      lses: second result of the same calls with `return_lse=True`, [B, N, T].

    Returns:
      Output and logarithm of the softmax denominator over all parts, which can be merged with further parts. A query
      without keys in any part has zeros and minus infinity.

    >>> outs = np.array([0.5, 2.5], np.float32).reshape(2, 1, 1, 1, 1)  # means of two keys each
    >>> lse = np.log(np.full((1, 1, 1), 2, np.float32))  # of two logits of zero
    >>> merged = jax.jit(lambda outs, lse: merge_attention(list(outs), [lse, lse]))(outs, lse)
    >>> merged[0].item(), round(merged[1].item(), 4)
    (1.5, 1.3863)
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge_attention needs at least one output and one lse per output, got {len(outs)} outputs and "
            f"{len(lses)} lses"
        )
    for out, lse in zip(outs, lses, strict=True):
        b, t, n, _ = out.shape
        if lse.shape != (b, n, t):
            raise ValueError(f"lse must have shape [B, N, T] = {(b, n, t)} for out {out.shape}, got {lse.shape}")
    parts = jnp.stack(list(lses))  # [parts, B, N, T]
    largest = jax.lax.stop_gradient(parts.max(axis=0, keepdims=True))  # subtracted, so that exp does not overflow
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
    """Computes weights @ values in the dtype of `value`; each of the K value heads serves N / K query heads."""
    (b, n, t, s), (k, u) = weights.shape, value.shape[2:]
    # One matrix product for each value head: the weights of its query heads are stacked along one axis.
    stacked = weights.astype(value.dtype).reshape(b, k, n // k * t, s)
    out = jnp.einsum("BKTS,BKSU->BKTU", stacked, value.swapaxes(1, 2))
    return out.reshape(b, n, t, u).swapaxes(1, 2)


def _biased(
    logits: Float[Array, "B N T S"], bias: Bias | None, mask: Mask | None
) -> tuple[Float[Array, "B N T S"], Mask | None]:
    """Adds the bias to the logits; keys that it hides by minus infinity become part of the mask."""
    if bias is None:
        return logits, mask
    bias, mask = _hide_infinite(bias.astype(logits.dtype), mask)
    return logits + bias, mask


def _hide_infinite(pairs: Float[Array, "#B #N #T #S"], mask: Mask | None) -> tuple[Float[Array, "#B #N #T #S"], Mask]:
    """Moves minus infinities of logits or a bias into the mask: softmax of a row of them would be NaN."""
    visible = pairs != -jnp.inf
    return jnp.where(visible, at_least_visible(pairs), 0), visible if mask is None else mask & visible


def _log_sum_exp(
    logits: Float[Array, "B N T S"], mask: Mask | None, sink: Float[Array, "1 N 1 1"] | None
) -> Float[Array, "B N T"]:
    """Returns the logarithm of the softmax denominator; minus infinity for a query without keys and without a sink."""
    lse = jax.nn.logsumexp(logits, axis=-1, where=mask)
    if sink is None:
        return lse
    sink = sink[..., 0]
    # The gradient of `logaddexp` is NaN where both are minus infinity.
    return jnp.where(sink == -jnp.inf, lse, jnp.logaddexp(lse, jnp.maximum(sink, hidden_logit(lse.dtype))))


def _sink_logits(sinks: Float[Array, " N"] | None, logits: Float[Array, "B N T S"]) -> Float[Array, "1 N 1 1"] | None:
    """Returns sinks in the dtype and with the axes of the logits; raises ValueError as `check_sinks`."""
    check_sinks(sinks, logits.shape[1])
    return None if sinks is None else sinks.astype(logits.dtype)[None, :, None, None]


def check_sinks(sinks: Float[Array, " N"] | None, num_heads: int) -> None:
    """Raises ValueError unless `sinks` is None or has one floating-point number per query head."""
    if sinks is not None and (sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks must be one floating-point logit for each query head, [N] = {(num_heads,)}, "
            f"got {sinks.dtype} {sinks.shape}"
        )


def hidden_logit(dtype: np.dtype) -> Array:
    """Returns the logit of hidden keys: below every other logit, but finite, so that a row without keys is not NaN."""
    return jnp.asarray(0.7 * jnp.finfo(dtype).min, dtype)


def at_least_visible(bias: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Raises finite numbers of a bias below half of `hidden_logit`, such as the lowest of its dtype, to that.

    The bias is in the dtype of the logits. Hidden keys then stay below all others, whatever the visible logits are.
    """
    lowest = 0.5 * hidden_logit(bias.dtype)
    return jnp.where((bias < lowest) & (bias != -jnp.inf), lowest, bias)


@jax.custom_jvp
def masked_softmax(
    logits: Float[Array, "B N T S"], mask: Mask | None, sink: Float[Array, "#B #N #T 1"] | None = None
) -> Float[Array, "B N T S"]:
    """Computes the softmax over the visible keys (mask True); a row without visible keys becomes zeros.

    `sink` is a logit that counts in the denominator only. The derivative uses nothing but the weights, so that a
    training step keeps these alone, and is half as many passes over them as that of the formula.
    """
    if mask is not None:  # hidden logits stay finite, so that a row without keys is not NaN
        logits = jnp.where(mask, logits, hidden_logit(logits.dtype))
    if sink is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        largest = jnp.maximum(logits.max(axis=-1, keepdims=True, initial=-jnp.inf), sink)
        largest = jnp.maximum(largest, hidden_logit(logits.dtype))  # finite even without keys and with a sink of -inf
        exponentials = jnp.exp(logits - largest)
        weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest))
    return weights if mask is None else jnp.where(mask, weights, jnp.zeros((), weights.dtype))


@masked_softmax.defjvp
def _masked_softmax_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Returns weights w and w (dl - sum over keys of w dl), the sink's own weight included."""
    weights = masked_softmax(*primals)
    logits_tangent, _, sink_tangent = tangents
    mean = (weights * logits_tangent).sum(axis=-1, keepdims=True)
    if sink_tangent is not None:
        mean += (1 - weights.sum(axis=-1, keepdims=True)) * sink_tangent
    return weights, weights * (logits_tangent - mean)


def among_largest(scores: Float[Array, "*rows S"], mask: Bool[Array, "*#rows S"] | None, size: int) -> Array:
    """Returns which scores of a row are among the `size` largest visible ones; ties with the last one are included.

    >>> jax.jit(among_largest, static_argnums=(1, 2))(jnp.array([3.0, 1.0, 2.0]), None, 2).tolist()
    [True, False, True]
    """
    scores = jax.lax.stop_gradient(scores)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.asarray(-jnp.inf, scores.dtype))
    order = _order(scores)
    num_bits = 8 * order.dtype.itemsize
    size = min(size, scores.shape[-1])

    def with_bit(index: Array, threshold: Array) -> Array:
        """Sets a bit of the threshold, from the highest on, if `size` scores still reach it."""
        bit = jnp.left_shift(order.dtype.type(1), (num_bits - 1 - index).astype(order.dtype))
        higher = threshold | bit
        return jnp.where((order >= higher[..., None]).sum(axis=-1) >= size, higher, threshold)

    # The threshold, the last of the largest, bit by bit: on CPUs nine times as fast as `jax.lax.top_k`, which sorts.
    threshold = jax.lax.fori_loop(0, num_bits, with_bit, jnp.zeros_like(order[..., 0]))
    is_large = order >= threshold[..., None]
    return is_large if mask is None else is_large & mask


def _order(x: Float[Array, "*shape"]) -> Array:
    """Returns unsigned integers of the same size, in the order of the numbers; both zeros are the same integer."""
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), dtype)
    sign = dtype.type(1 << (8 * dtype.itemsize - 1))
    return jnp.where(bits >= sign, ~bits, bits | sign)
