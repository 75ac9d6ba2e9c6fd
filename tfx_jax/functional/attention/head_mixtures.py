"""Softmax attention that mixes the weights of several heads: talking heads and differential attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dense import at_least_visible, masked_logits, masked_softmax, weighted_values
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option
from tfx_jax.functional.layers import dropout


@weights_on_request
@shard_like_query
@zeros_where_empty
def talking_heads_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    logits_mix: Float[Array, "N N"],
    weights_mix: Float[Array, "N N"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes (softmax((scale * Q K^T) P_l + bias) P_w) V: heads mix their logits, and then their weights.

    "Talking-Heads Attention" (Shazeer et al., 2020, https://arxiv.org/abs/2003.02436), with equal numbers of heads of
    queries and keys, of the softmax, and of values.

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the mixed logits.
      mask: True where a query may attend; applied to the softmax, and again to the mixed weights.
      logits_mix: P_l, [N, N]: from a head of queries and keys to a head of the softmax.
      weights_mix: P_w, [N, N]: from a head of the softmax to a head of values.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping a mixed weight.
      dropout_rng: PRNG key.
      return_weights: also return the mixed weights; they may be negative and need not add up to 1.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if a mix has the wrong shape, or in the cases of `dot_product_attention`.

    >>> x, mean = jnp.ones((1, 3, 2, 4)), jnp.full((2, 2), 0.5)
    >>> jax.jit(talking_heads_attention)(x, x, x, logits_mix=mean, weights_mix=mean).shape
    (1, 3, 2, 4)
    """
    n = query.shape[2]
    for name, mix in (("logits_mix", logits_mix), ("weights_mix", weights_mix)):
        if mix.shape != (n, n):
            raise ValueError(f"{name} must have shape [N, N] = {(n, n)}, got {mix.shape}")
    # The bias belongs to the mixed logits: before the mix, only its minus infinities are used, as a mask.
    hiding_bias = None if bias is None else jnp.where(bias == -jnp.inf, bias, jnp.zeros((), bias.dtype))
    logits, mask = masked_logits(
        query, key, value, hiding_bias, mask, is_causal=is_causal, scale=scale, segment_ids=segment_ids
    )
    logits = jnp.einsum("BNTS,NM->BMTS", logits, logits_mix.astype(logits.dtype))
    if bias is not None:
        finite = jnp.where(bias == -jnp.inf, jnp.zeros((), bias.dtype), bias).astype(logits.dtype)
        logits = logits + at_least_visible(finite)
    weights = jnp.einsum("BNTS,NM->BMTS", masked_softmax(logits, mask), weights_mix.astype(logits.dtype))
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.zeros((), weights.dtype))
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value).astype(query.dtype)
    return (out, weights) if return_weights else out


@weights_on_request
@shard_like_query
@zeros_where_empty
def differential_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    lambda_query: Float[Array, "2 H"],
    lambda_key: Float[Array, "2 H"],
    norm_scale: Float[Array, " 2*U"] | None = None,
    lambda_init: float = 0.8,
    epsilon: float = 1e-5,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes (softmax(scale * Q_1 K_1^T) - lambda softmax(scale * Q_2 K_2^T)) [V_1, V_2] for each pair of heads.

    Equations 1 to 3 of "Differential Transformer" (Ye et al., 2024, https://arxiv.org/abs/2410.05258). Heads 2n and
    2n + 1 form a pair; the difference cancels what their weights have in common. lambda = exp(a_1 . b_1) -
    exp(a_2 . b_2) + lambda_init, with a = `lambda_query` and b = `lambda_key`. The values of a pair are concatenated
    to size 2U. The result is divided by its root mean square and multiplied by `norm_scale` and by 1 - lambda_init;
    its halves are the outputs of the two heads.

    Args:
      query: queries, [B, T, N, H], N even. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H], K even. N / K heads share a key head, and N / K pairs share the values of a pair.
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend.
      lambda_query: a_1 and a_2, [2, H].
      lambda_key: b_1 and b_2, [2, H].
      norm_scale: scale of the normalized outputs, [2U]. None means neither the norm nor the factor 1 - lambda_init.
      lambda_init: constant part of lambda; the paper uses 0.8 - 0.6 exp(-0.3 l) in layer l, counted from 0.
      epsilon: added to the mean square.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping a weight of the difference.
      dropout_rng: PRNG key.
      return_weights: also return the weights of the difference, the same for both heads of a pair.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if a number of heads is odd, a parameter has the wrong shape, or in the cases of
        `dot_product_attention`.

    >>> x, zeros = jnp.arange(2.0).reshape(1, 1, 2, 1), jnp.zeros((2, 1))
    >>> attend = jax.jit(differential_attention, static_argnames="lambda_init")
    >>> attend(x, x, x, lambda_query=zeros, lambda_key=zeros, lambda_init=0.25).ravel().tolist()
    [0.0, 0.75]
    """
    (b, t, n, h), (s, k), u = query.shape, key.shape[1:3], value.shape[-1]
    if n % 2 or k % 2:
        raise ValueError(
            f"differential attention needs even numbers of query and key heads, got {n} query heads and {k} key heads"
        )
    for name, x, required in (
        ("lambda_query", lambda_query, (2, h)),
        ("lambda_key", lambda_key, (2, h)),
        ("norm_scale", norm_scale, (2 * u,)),
    ):
        if x is not None and x.shape != required:
            raise ValueError(f"{name} must have shape {required}, got {x.shape}")
    logits, mask = masked_logits(
        query, key, value, bias, mask, is_causal=is_causal, scale=scale, segment_ids=segment_ids
    )
    dtype = logits.dtype
    products = (lambda_query.astype(dtype) * lambda_key.astype(dtype)).sum(axis=-1)  # a_1 . b_1 and a_2 . b_2
    factor = jnp.exp(products[0]) - jnp.exp(products[1]) + lambda_init  # the docstring's lambda
    head_weights = masked_softmax(logits, mask).reshape(b, n // 2, 2, t, s)
    weights = head_weights[:, :, 0] - factor * head_weights[:, :, 1]
    paired_value = value.reshape(b, s, k // 2, 2 * u)
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), paired_value)
    out = out.astype(np.promote_types(value.dtype, dtype))
    if norm_scale is not None:
        mean_square = jnp.square(out).mean(axis=-1, keepdims=True)
        factors = (1 - lambda_init) * norm_scale.astype(out.dtype)
        out = out * jax.lax.rsqrt(mean_square + epsilon) * factors[None, None, None]
    out = out.reshape(b, t, n, u).astype(query.dtype)
    return (out, jnp.repeat(weights, 2, axis=1)) if return_weights else out


def _init_mixes(rng: Array, *, num_heads: int, dtype: DTypeLike, **_: Any) -> dict[str, Array]:
    """Initializes both mixes near the identity, so that heads start unmixed."""
    noise = jax.random.normal(rng, (2, num_heads, num_heads), jnp.float32) / 50
    mixes = (jnp.eye(num_heads)[None] + noise).astype(dtype)
    return {"logits_mix": mixes[0], "weights_mix": mixes[1]}


def _init_lambdas(rng: Array, *, d_k: int, dtype: DTypeLike, **_: Any) -> dict[str, Array]:
    """Initializes the vectors of lambda from N(0, 0.01), as the paper does, and the scale with ones."""
    lambdas = (jax.random.normal(rng, (2, 2, d_k), jnp.float32) / 10).astype(dtype)
    return {"lambda_query": lambdas[0], "lambda_key": lambdas[1], "norm_scale": jnp.ones(2 * d_k, dtype)}


TALKING_HEADS_ATTENTION = AttentionSpec(
    name="talking_heads",
    function=talking_heads_attention,
    reference="Shazeer et al. (2020)",
    parameters=_init_mixes,
    decoding=lambda **options: CachedDecoding(),
)
DIFFERENTIAL_ATTENTION = dataclasses.replace(
    TALKING_HEADS_ATTENTION,
    name="differential",
    function=differential_attention,
    reference="Ye et al. (2024), equations 1 to 3",
    options={
        "lambda_init": Option("constant part of the factor of the second softmax", float, at_least=0, at_most=1),
        "epsilon": Option("added to the mean square of the output norm", float, at_least=0),
    },
    parameters=_init_lambdas,
)
