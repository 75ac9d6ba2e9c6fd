"""Scaled dot-product attention with other normalizations than softmax: sigmoid, entmax, top-k, stick-breaking."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dense import (
    among_largest,
    hidden_logit,
    masked_logits,
    masked_softmax,
    weighted_values,
)
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option
from tfx_jax.functional.layers import dropout

WeightsFn = Callable[[Float[Array, "B N T S"], Mask | None], Float[Array, "B N T S"]]
"""Maps logits and a mask to weights; weights of hidden keys may be anything, they are set to 0 later."""


@weights_on_request
@shard_like_query
@zeros_where_empty
def sigmoid_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    offset: float | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes sigmoid(scale * Q K^T + bias + offset) V: the weight of a key does not depend on other keys.

    Equation 3 of "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (Ramapuram et al., 2024,
    https://arxiv.org/abs/2409.04431).

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend.
      offset: added to all logits. None means minus the logarithm of the number of keys that the query sees, so that
        weights of logits near 0 add up to about 1. The paper uses the sequence length instead, with which later tokens
        would change the weights of earlier ones.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights, whose sum is not 1.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if shapes do not match, or a mask is not boolean or not of rank 4.

    >>> x = jnp.zeros((1, 3, 1, 1))
    >>> jax.jit(sigmoid_attention)(x, x, x + 1).ravel().round(2).tolist()
    [0.75, 0.75, 0.75]
    """

    def weights_fn(logits: Array, mask: Mask | None) -> Array:
        """Returns sigmoid(logits + offset)."""
        if offset is not None:
            return jax.nn.sigmoid(logits + offset)
        num_keys = logits.shape[-1]
        if mask is None:
            num_visible = jnp.full((1, 1, 1, 1), num_keys)
        else:  # the axis of the keys may be 1, for all of them
            num_visible = mask.sum(axis=-1, keepdims=True) * (num_keys // mask.shape[-1])
        return jax.nn.sigmoid(logits - jnp.log(jnp.maximum(num_visible, 1).astype(logits.dtype)))

    options = {"is_causal": is_causal, "scale": scale, "segment_ids": segment_ids, "return_weights": return_weights}
    return _attend(weights_fn, query, key, value, bias, mask, dropout_rate, dropout_rng, **options)


@weights_on_request
@shard_like_query
@zeros_where_empty
def entmax_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    alpha: float = 1.5,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes entmax_alpha(scale * Q K^T + bias) V: weights that add up to 1, exactly 0 for small logits.

    "Sparse Sequence-to-Sequence Models" (Peters et al., 2019, https://arxiv.org/abs/1905.05702); with alpha = 2 the
    sparsemax of Martins and Astudillo (2016, https://arxiv.org/abs/1602.02068). The weights are
    relu((alpha - 1) l - tau)^(1 / (alpha - 1)), with the tau for which they add up to 1.

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend.
      alpha: 1.5, or 2 for sparsemax; softmax is the limit at 1.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if alpha is neither 1.5 nor 2, or in the cases of `dot_product_attention`.

    >>> x = jnp.arange(2.0).reshape(1, 2, 1, 1)
    >>> attend = jax.jit(entmax_attention, static_argnames=("alpha", "return_weights"))
    >>> attend(x, x, x, alpha=2.0, return_weights=True)[1][0, 0].tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    if alpha not in (1.5, 2.0):
        raise ValueError(f"alpha must be 1.5 or 2, because only these have a closed form here, got {alpha}")
    options = {"is_causal": is_causal, "scale": scale, "segment_ids": segment_ids, "return_weights": return_weights}
    weights_fn = functools.partial(_masked_entmax, alpha)
    return _attend(weights_fn, query, key, value, bias, mask, dropout_rate, dropout_rng, **options)


def _masked_entmax(alpha: float, logits: Float[Array, "B N T S"], mask: Mask | None) -> Float[Array, "B N T S"]:
    """Computes entmax over the visible keys (mask True)."""
    if mask is not None:  # hidden logits are below all others, but finite
        logits = jnp.where(mask, logits, hidden_logit(logits.dtype))
    return _entmax(alpha, logits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entmax(alpha: float, logits: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
    """Computes entmax over the last axis by sorting (Peters et al., 2019, algorithm 2; sparsemax is alpha = 2).

    `taus[i]` is the threshold tau if exactly the i + 1 largest elements have weights above 0.
    """
    # Weights do not change if a constant is added to all logits, so let the largest be 0. No weight exceeds 1, so tau
    # is at least -1, and elements below it have weight 0. Clip them at -2, any value below -1, because the square of a
    # large negative number, such as a masked logit, would overflow.
    x = jnp.maximum((alpha - 1) * (logits - logits.max(axis=-1, keepdims=True)), -2.0)
    ordered = jnp.sort(x, axis=-1, descending=True)
    count = jnp.arange(1, x.shape[-1] + 1).astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    mean = jnp.cumsum(ordered, axis=-1) / count  # of the `count` largest elements
    if alpha == 2:  # sum(x - tau) = count * (mean - tau) = 1
        taus = mean - 1 / count
    else:  # alpha = 1.5: sum((x - tau)^2) = count * (variance + (mean - tau)^2) = 1
        variance = jnp.cumsum(jnp.square(ordered), axis=-1) / count - jnp.square(mean)
        taus = mean - jnp.sqrt(jnp.maximum(1 / count - variance, 0))
    support_size = (ordered >= taus).sum(axis=-1, keepdims=True)  # number of elements with weight
    tau = jnp.take_along_axis(taus, support_size - 1, axis=-1)
    return jnp.maximum(x - tau, 0) ** round(1 / (alpha - 1))


@_entmax.defjvp
def _(alpha: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Computes the derivative of entmax: (diag(s) - s s^T / sum(s)) tangent, where s = weights^(2 - alpha)."""
    weights, (tangent,) = _entmax(alpha, *primals), tangents
    # alpha = 2: weights^0, which is 1 for weights above 0. alpha = 1.5: the square root, of 1 where the weight is 0,
    # because the root's own derivative at 0 is infinite.
    is_positive = weights > 0
    roots = jnp.ones_like(weights) if alpha == 2 else jnp.sqrt(jnp.where(is_positive, weights, 1))
    slope = jnp.where(is_positive, roots, 0)
    mean = (slope * tangent).sum(axis=-1, keepdims=True) / slope.sum(axis=-1, keepdims=True)
    return weights, slope * (tangent - mean)


@weights_on_request
@shard_like_query
@zeros_where_empty
def topk_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    num_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax attention to the `num_keys` keys with the largest logits of each query.

    "Explicit Sparse Transformer" (Zhao et al., 2019, https://arxiv.org/abs/1912.11637). All logits are computed, so it
    costs as much as dense attention.

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend.
      num_keys: number of keys that a query attends to; more if further keys tie with the last one.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if `num_keys` is below 1, or in the cases of `dot_product_attention`.

    >>> x = jnp.array([1.0, 1.0, 0.0]).reshape(1, 3, 1, 1)
    >>> attend = jax.jit(topk_attention, static_argnames=("num_keys", "return_weights"))
    >>> attend(x, x, x, num_keys=2, return_weights=True)[1][0, 0, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    check_integers(1, num_keys=num_keys)

    def weights_fn(logits: Array, mask: Mask | None) -> Array:
        """Returns the softmax over the largest visible logits of each query."""
        return masked_softmax(logits, among_largest(logits, mask, num_keys))

    options = {"is_causal": is_causal, "scale": scale, "segment_ids": segment_ids, "return_weights": return_weights}
    return _attend(weights_fn, query, key, value, bias, mask, dropout_rate, dropout_rng, **options)


@weights_on_request
@shard_like_query
@zeros_where_empty
def stick_breaking_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes w V with w_ts = b_ts prod_{j > s} (1 - b_tj) over visible j and b = sigmoid(scale * Q K^T + bias).

    Section 2 of "Scaling Stick-Breaking Attention" (Tan et al., 2024, https://arxiv.org/abs/2410.17980): from the
    query's own key back to the first, each key takes the share b of the weight that later keys left. No position
    encoding is needed. The paper starts before the query's own key; for that, hide the own key by a `mask` of all
    pairs.

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend. Hidden keys take no weight and are skipped in the product.
      is_causal: must be true, because the product runs backward from the query.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights, whose sum is at most 1.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if not causal, or in the cases of `dot_product_attention`.

    >>> x = jnp.zeros((1, 3, 1, 1))
    >>> attend = jax.jit(stick_breaking_attention, static_argnames="return_weights")
    >>> attend(x, x, x, return_weights=True)[1][0, 0].tolist()
    [[0.5, 0.0, 0.0], [0.25, 0.5, 0.0], [0.125, 0.25, 0.5]]
    """
    if not is_causal:
        raise ValueError(
            "stick-breaking attention is causal only, because it runs backward from the query: pass is_causal=True"
        )

    def weights_fn(logits: Array, mask: Mask | None) -> Array:
        """Returns b_ts prod_{j > s} (1 - b_tj), computed from logarithms."""
        log_remaining = jax.nn.log_sigmoid(-logits)  # log(1 - b)
        if mask is not None:
            log_remaining = jnp.where(mask, log_remaining, 0)
        log_product = jax.lax.cumsum(log_remaining[..., 1:], axis=3, reverse=True)  # over the keys after each key
        log_product = jnp.pad(log_product, ((0, 0), (0, 0), (0, 0), (0, 1)))
        return jnp.exp(jax.nn.log_sigmoid(logits) + log_product)

    options = {"is_causal": is_causal, "scale": scale, "segment_ids": segment_ids, "return_weights": return_weights}
    return _attend(weights_fn, query, key, value, bias, mask, dropout_rate, dropout_rng, **options)


def _attend(
    weights_fn: WeightsFn,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    dropout_rate: float,
    dropout_rng: Array | None,
    *,
    return_weights: bool,
    **options: Any,
) -> Any:
    """Attends with weights from `weights_fn(logits, mask)`; the weights of hidden pairs are set to zero."""
    logits, mask = masked_logits(query, key, value, bias, mask, **options)
    weights = weights_fn(logits, mask)
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.zeros((), weights.dtype))
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value).astype(query.dtype)
    return (out, weights) if return_weights else out


SIGMOID_ATTENTION = AttentionSpec(
    name="sigmoid",
    function=sigmoid_attention,
    reference="Ramapuram et al. (2024), equation 3",
    options={
        "offset": Option("added to all logits; None means minus the logarithm of the number of visible keys", float)
    },
    decoding=lambda **options: CachedDecoding(),
)
ENTMAX_ATTENTION = dataclasses.replace(
    SIGMOID_ATTENTION,
    name="entmax",
    function=entmax_attention,
    reference="Peters et al. (2019); sparsemax: Martins and Astudillo (2016)",
    options={"alpha": Option("1.5, or 2 for sparsemax", float)},
)
TOPK_ATTENTION = dataclasses.replace(
    SIGMOID_ATTENTION,
    name="topk",
    function=topk_attention,
    reference="Zhao et al. (2019)",
    options={"num_keys": Option("number of keys that a query attends to", required=True, at_least=1)},
    example=lambda length: {"num_keys": max(length // 4, 1)},
)
STICK_BREAKING_ATTENTION = dataclasses.replace(
    SIGMOID_ATTENTION,
    name="stick_breaking",
    function=stick_breaking_attention,
    reference="Tan et al. (2024), section 2",
    options={},
    causal_only=True,
)
