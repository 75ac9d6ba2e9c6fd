"""A linear map with its parameters."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.linear import linear


class Linear(nnx.Module):
    """`tfx_jax.functional.linear` from and to one axis or several, with a kernel [*in, *out].

    Unlike `nnx.LinearGeneral`, whose parameters it draws, it computes their gradients in their own precision.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        use_bias: bool = True,
        kernel_init: nnx.Initializer,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters.

        Args:
          in_features: sizes of the last axes of what it is given.
          out_features: sizes of the axes that take their place.
          use_bias: whether it has an offset.
          kernel_init: draws the kernel as a matrix [in, out].
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: stream `params`.
        """
        self.in_features = (in_features,) if isinstance(in_features, int) else tuple(in_features)
        out = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        matrix = kernel_init(rngs.params(), (math.prod(self.in_features), math.prod(out)), param_dtype)
        self.kernel = nnx.Param(matrix.reshape(*self.in_features, *out))
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), out, param_dtype)) if use_bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch_and_in"]) -> Float[Array, "*batch_and_out"]:
        """Maps the last axes."""
        bias = None if self.bias is None else self.bias[...]
        return linear(x.astype(self.dtype), self.kernel[...], bias, num_axes=len(self.in_features))
