"""Attention to a fixed number of keys, with memory linear in the length: Linformer and induced attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import dot_product_weights, weighted_values
from tfx_jax.functional.attention.signature import (
    check_shapes,
    refuse_pairs,
    shard_like_query,
    statistics_dtype,
    visible_keys,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.layers import dropout


@weights_on_request
@shard_like_query
@zeros_where_empty
def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #S"] | None = None,
    *,
    key_projection: Float[Array, "M L"],
    value_projection: Float[Array, "M L"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q (E K)^T) (F V): learned projections shorten keys and values to M.

    Equation 7 of "Linformer" (Wang et al., 2020, https://arxiv.org/abs/2006.04768), with projections that all heads
    share. Column l of a projection belongs to the l-th visible token of a sequence; padding is not counted.

    Args:
      query: [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: refused, because the logits of pairs are never formed.
      mask: True for keys that may be seen, [B or 1, 1, 1, S].
      key_projection: E, [M, L], for sequences of up to L tokens; M is the paper's k.
      value_projection: F, [M, L].
      is_causal: must be False: each projected key is a mixture of all tokens.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: refused: packed sequences would share the projected keys.
      dropout_rate: probability in [0, 1) of dropping the weight of a projected key.
      dropout_rng: PRNG key.
      return_weights: also return softmax(...) F, [B, N, T, S], whose entries may be negative and whose rows need not
        add up to 1; quadratic in memory.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if there are more than L keys, a projection has the wrong shape, or for a refused argument.

    >>> x, mean = jnp.arange(4.0).reshape(1, 4, 1, 1), jnp.full((2, 4), 0.25)
    >>> jax.jit(linformer_attention)(x, x, x, key_projection=mean, value_projection=mean).ravel().tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    check_shapes(query, key, value, None, mask)
    refuse_pairs("Linformer attention", "projected keys", bias, mask, is_causal, segment_ids)
    b, s = key.shape[:2]
    if key_projection.ndim != 2 or key_projection.shape != value_projection.shape:
        shapes = f"{key_projection.shape} and {value_projection.shape}"
        raise ValueError(f"key_projection and value_projection must both have shape [M, L], got {shapes}")
    if s > key_projection.shape[1]:
        raise ValueError(f"a sequence must have at most max_length={key_projection.shape[1]} keys, got {s}")
    dtype = statistics_dtype(query)
    visible = visible_keys(mask, b, s)
    position = jnp.maximum(jnp.cumsum(visible, axis=1) - 1, 0)  # [B, S], among the visible tokens
    # [B, S, M]: for each token the column of E, and of F, for its position; zeros for padding.
    key_columns, value_columns = (
        jnp.where(visible[..., None], jnp.asarray(x, dtype).T[position], 0) for x in (key_projection, value_projection)
    )
    projected_keys = jnp.einsum("BSM,BSKH->BMKH", key_columns, key.astype(dtype))
    projected_values = jnp.einsum("BSM,BSKU->BMKU", value_columns, value.astype(dtype))
    weights = dot_product_weights(query.astype(dtype), projected_keys, scale=scale)
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), projected_values).astype(query.dtype)
    return (out, jnp.einsum("BNTM,BSM->BNTS", weights, value_columns)) if return_weights else out


@weights_on_request
@shard_like_query
@zeros_where_empty
def induced_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #S"] | None = None,
    *,
    inducing: Float[Array, "N M H"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q (A K)^T) A V with A = softmax(scale * I K^T): M inducing points between all tokens.

    Equations 9 and 10 of "Set Transformer" (Lee et al., 2019, https://arxiv.org/abs/1810.00825), the induced set
    attention block without its residuals, norms and feed-forward layers; its first half is the cross-attention of
    Perceiver's latents (Jaegle et al., 2021, https://arxiv.org/abs/2103.03206). The inducing points attend to the
    tokens, and the queries attend to the results.

    Args:
      query: [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: refused, because the logits of pairs are never formed.
      mask: True for keys that may be seen, [B or 1, 1, 1, S].
      inducing: I, learned queries, [N, M, H].
      is_causal: must be False: each inducing point sees all tokens.
      scale: multiplies the logits of both softmaxes; None means 1 / sqrt(H).
      segment_ids: refused: packed sequences would share the inducing points.
      dropout_rate: probability in [0, 1) of dropping the weight of an inducing point.
      dropout_rng: PRNG key.
      return_weights: also return the product of both maps, [B, N, T, S], whose rows add up to 1; quadratic in memory.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if `inducing` has the wrong shape, or for a refused argument.

    >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
    >>> jax.jit(induced_attention)(x, x, x, inducing=jnp.zeros((1, 2, 1))).ravel().tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    check_shapes(query, key, value, None, mask)
    refuse_pairs("induced attention", "inducing points", bias, mask, is_causal, segment_ids)
    (b, _, n, h), result_dtype, dtype = query.shape, query.dtype, statistics_dtype(query)
    if inducing.ndim != 3 or (inducing.shape[0], inducing.shape[2]) != (n, h):
        raise ValueError(f"inducing must have shape [N, M, H] with N, H = {(n, h)}, got {inducing.shape}")
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    points = jnp.broadcast_to(inducing.astype(dtype).swapaxes(0, 1)[None], (b, inducing.shape[1], n, h))
    inward = dot_product_weights(points, key, mask=mask, scale=scale)  # [B, N, M, S]
    outward = dot_product_weights(query, weighted_values(inward, key), scale=scale)  # [B, N, T, M]
    out = weighted_values(dropout(outward, dropout_rate, dropout_rng), weighted_values(inward, value))
    out = out.astype(result_dtype)
    return (out, outward @ inward) if return_weights else out


def _init_projections(
    rng: Array, *, dtype: DTypeLike, max_length: int, num_projected: int, **_: Any
) -> dict[str, Array]:
    """Returns both projections from a normal distribution of variance 1 / M, which keeps distances on average."""
    projections = jax.random.normal(rng, (2, num_projected, max_length), jnp.float32) * num_projected**-0.5
    return dict(zip(("key_projection", "value_projection"), projections.astype(dtype), strict=True))


def _init_points(
    rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, num_inducing: int, **_: Any
) -> dict[str, Array]:
    """Samples the inducing points from a standard normal distribution."""
    return {"inducing": jax.random.normal(rng, (num_heads, num_inducing, d_k), jnp.float32).astype(dtype)}


LINFORMER = AttentionSpec(
    name="linformer",
    function=linformer_attention,
    reference="Wang et al. (2020), equation 7",
    options={
        "max_length": Option("tokens of the longest sequence", required=True, at_least=1, is_passed=False),
        "num_projected": Option(
            "keys and values that are left, the paper's k", required=True, at_least=1, is_passed=False
        ),
    },
    example=lambda length: {"max_length": 2 * length, "num_projected": min(256, max(length // 4, 1))},
    causal=False,
    bias=False,
    segments=False,
    parameters=_init_projections,
)
INDUCED = dataclasses.replace(
    LINFORMER,
    name="induced",
    function=induced_attention,
    reference="Lee et al. (2019), equations 9 and 10",
    options={
        "num_inducing": Option("learned points between queries and keys", required=True, at_least=1, is_passed=False)
    },
    example=lambda length: {"num_inducing": min(64, max(length // 4, 1))},
    parameters=_init_points,
)
