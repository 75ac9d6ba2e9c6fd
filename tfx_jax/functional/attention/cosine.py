"""Cosine attention, whose logits do not depend on the lengths of queries and keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_floats,
    check_shapes,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding

_LEAST_TAU = 0.01


@weights_on_request
@shard_like_query
@zeros_where_empty
def cosine_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    tau_scale: Float[Array, " N"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(cos(q, k) / tau + bias) V for every head, with a learned temperature tau of each head.

    Equation 2 in section 3.2 of "Swin Transformer V2" (Liu et al., 2022, https://arxiv.org/abs/2111.09883). Logits are
    at most 1 / tau, so that no pair dominates because its vectors are long. A tau below 0.01 counts as 0.01, and then
    gets no gradient.

    Args:
      query: queries, [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the logits after the division by tau.
      mask: True where a query may attend.
      tau_scale: tau, [N].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1.
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the softmax weights, before dropout.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if `tau_scale` has the wrong shape or dtype, or in the cases of `dot_product_attention`.

    >>> query, key = jnp.ones((1, 1, 1, 1)), jnp.array([2.0, 9.0]).reshape(1, 2, 1, 1)
    >>> attend = jax.jit(cosine_attention, static_argnames="return_weights")
    >>> attend(query, key, key, tau_scale=jnp.ones(1), return_weights=True)[1].round(2).ravel().tolist()
    [0.5, 0.5]
    """
    check_shapes(query, key, value, bias, mask)
    check_floats(tau_scale=tau_scale)
    n = query.shape[2]
    if tau_scale.shape != (n,):
        raise ValueError(f"tau_scale must have shape [N] = {(n,)}, got {tau_scale.shape}")
    unit_query, unit_key = _unit(query), _unit(key)
    tau = jnp.maximum(tau_scale.astype(unit_query.dtype), _LEAST_TAU)
    return dot_product_attention(
        (unit_query / tau[None, None, :, None]).astype(query.dtype),
        unit_key.astype(key.dtype),
        value,
        bias,
        mask,
        is_causal=is_causal,
        scale=1.0 if scale is None else scale,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )


def _unit(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Divides vectors by their length, in float32 at least; a vector of zeros stays one, with a finite gradient."""
    x = x.astype(statistics_dtype(x))
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-12)


def _init(rng: Array, *, num_heads: int, dtype: DTypeLike, **_: Any) -> dict[str, Array]:
    """Initializes every tau with 0.1, as the authors' code does; the paper states no value."""
    del rng
    return {"tau_scale": jnp.full(num_heads, 0.1, dtype)}


COSINE = AttentionSpec(
    name="cosine",
    function=cosine_attention,
    reference="Liu et al. (2022), equation 2",
    parameters=_init,
    decoding=lambda **options: CachedDecoding(),
)
