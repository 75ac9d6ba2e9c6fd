"""Normalisation of features with its parameters."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.normalization import layer_norm, rms_norm


class LayerNorm(nnx.Module):
    """Layer normalisation (Ba et al., 2016) with a learned gain and, with `use_bias`, offset for each feature."""

    def __init__(
        self, d_model: int, *, epsilon: float = 1e-6, use_bias: bool = True, param_dtype: DTypeLike = jnp.float32
    ):
        self.scale = nnx.Param(jnp.ones(d_model, param_dtype))
        self.bias = nnx.Param(jnp.zeros(d_model, param_dtype)) if use_bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis; see `tfx_jax.functional.layer_norm`."""
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, epsilon=self.epsilon)


class RMSNorm(nnx.Module):
    """Normalisation by the root mean square (Zhang and Sennrich, 2019) with a learned gain for each feature."""

    def __init__(self, d_model: int, *, epsilon: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        self.scale = nnx.Param(jnp.ones(d_model, param_dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis; see `tfx_jax.functional.rms_norm`."""
        return rms_norm(x, self.scale[...], epsilon=self.epsilon)
