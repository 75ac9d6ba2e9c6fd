"""Linear layers for the few rows of a decoding step, with optional int8 weights."""

import functools

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.layers import gated_units, int8_product, quantize_rows
from tfx_jax.nn.basic import FeedForward


class FusedLinear(nnx.Module):
    """Computes x W + b for few rows; with `int8`, the weights are quantized and stored transposed."""

    def __init__(
        self, kernel: Float[Array, "D N"], bias: Float[Array, " N"] | None = None, *, dtype: DTypeLike, int8: bool
    ):
        values, scales = quantize_rows(kernel.T) if int8 else (kernel.astype(dtype), None)
        self.kernel = nnx.Param(values)
        self.scales = None if scales is None else nnx.Param(scales)
        self.bias = None if bias is None else nnx.Param(bias)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows D"], out_dtype: DTypeLike | None = None) -> Float[Array, "*rows N"]:
        """Multiplies in the module's dtype and returns `out_dtype`, by default the module's dtype."""
        x, out_dtype = x.astype(self.dtype), self.dtype if out_dtype is None else out_dtype
        if self.scales is None:
            y = jnp.einsum("...D,DN->...N", x, self.kernel[...], preferred_element_type=out_dtype)
        else:
            y = int8_product(x, self.kernel[...], self.scales[...]).astype(out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class FusedFeedForward(nnx.Module):
    """A feed-forward network of `FusedLinear` layers, without dropout."""

    def __init__(self, feed_forward: FeedForward, *, int8: bool):
        linear = functools.partial(FusedLinear, dtype=feed_forward.dtype, int8=int8)
        self.up = linear(feed_forward.up[...], _value(feed_forward.up_bias))
        self.gate = (
            None if feed_forward.gate is None else linear(feed_forward.gate[...], _value(feed_forward.gate_bias))
        )
        self.down = linear(feed_forward.down[...], _value(feed_forward.down_bias))
        self.units_fn = functools.partial(
            gated_units,
            activation_fn=feed_forward.activation_fn,
            gate_offset=feed_forward.gate_offset,
            limit=feed_forward.limit,
        )

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Transforms each position separately."""
        return self.down(self.units_fn(self.up(x), None if self.gate is None else self.gate(x)))


def _value(param: nnx.Param[Array] | None) -> Array | None:
    return None if param is None else param[...]
