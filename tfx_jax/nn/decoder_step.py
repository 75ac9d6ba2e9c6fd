"""Decoder layers in the form in which they take one token at a time.

Training wants parameters that shard and restore well: a stack of layers, a projection each for query, key and value. A
step of decoding has a few rows, and its time is that of reading the weights: here they are one layer after the other,
with one matrix where the inputs are the same, transposed as they are read, and of eight bits if wanted.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention import Mask
from tfx_jax.functional.int8 import int8_product, quantize_rows
from tfx_jax.nn.layers import DecoderLayer


class KeysValues(NamedTuple):
    """Keys and values with the heads in front and the keys transposed, as the products of each head want them.

    Of W beams, S = L * W: what the beams of a sentence write for a token lies side by side and never moves.
    """

    key: Float[Array, "B K H S"]
    value: Float[Array, "B K S U"]

    @classmethod
    def of(cls, key: Float[Array, "B S K H"], value: Float[Array, "B S K U"]) -> "KeysValues":
        """Arranges what `MultiHeadAttention.project_memory` returns."""
        return cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))

    def with_newest(self, newest: "KeysValues", position: Int[Array, ""]) -> "KeysValues":
        """Writes those of W beams as one block: for anything else XLA would copy all of the past."""
        start = position * newest.key.shape[-1]
        return KeysValues(
            jax.lax.dynamic_update_slice_in_dim(self.key, newest.key, start, 3),
            jax.lax.dynamic_update_slice_in_dim(self.value, newest.value, start, 2),
        )

    def arranged(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """The arguments of an attention function, for which XLA has nothing to move."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


class Product(nnx.Module):
    """x W + b with a matrix that is laid out for few rows."""

    def __init__(
        self, kernel: Float[Array, "D N"], bias: Float[Array, " N"] | None = None, *, dtype: DTypeLike, int8: bool
    ):
        values, scales = quantize_rows(kernel.T) if int8 else (kernel.astype(dtype), None)
        self.kernel = nnx.Param(values)
        self.scales = None if scales is None else nnx.Param(scales)
        self.bias = None if bias is None else nnx.Param(bias)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows D"], out_dtype: DTypeLike | None = None) -> Float[Array, "*rows N"]:
        """Multiplies in the module's dtype; the result has another one if asked for."""
        x, out_dtype = x.astype(self.dtype), self.dtype if out_dtype is None else out_dtype
        if self.scales is None:
            y = jnp.einsum("...D,DN->...N", x, self.kernel[...], preferred_element_type=out_dtype)
        else:
            y = int8_product(x, self.kernel[...], self.scales[...]).astype(out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class DecoderStep(nnx.Module):
    """A decoder layer that extends every row by one token."""

    def __init__(self, layer: DecoderLayer, *, int8: bool = False):
        """Rearranges the weights of a layer.

        Args:
          layer: what was trained; it stays as it is.
          int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`.
        """
        own, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
        product = functools.partial(Product, dtype=feed_forward.dtype, int8=int8)
        self.query_key_value = product(*_joined(own.query, own.key, own.value))
        self.own_out = product(*_joined(own.out))
        self.cross_query = product(*_joined(cross.query))
        self.cross_out = product(*_joined(cross.out))
        self.up = product(feed_forward.up[...], feed_forward.up_bias[...])
        self.down = product(feed_forward.down[...], feed_forward.down_bias[...])
        self.own_residual = layer.self_attention_residual
        self.cross_residual = layer.cross_attention_residual
        self.feed_forward_residual = layer.feed_forward_residual
        self.activation_fn = feed_forward.activation_fn
        self.attention_fn = own.attention_fn

    def __call__(
        self,
        x: Float[Array, "R 1 D"],
        past: KeysValues,
        position: Int[Array, ""],
        mask: Bool[Array, "B 1 W S"],
        memory: KeysValues,
        memory_mask: Mask,
    ) -> tuple[Float[Array, "R 1 D"], KeysValues]:
        """Takes one token a row.

        Args:
          x: the newest token of each row; R = B * W rows, the W beams of one sentence next to each other.
          past: keys and values of all beams so far, [B, K, H, S] and [B, K, S, U], S = L * W, with room for L tokens.
          position: how many tokens they hold; x is written there.
          mask: which of the keys of a sentence are of tokens that a beam consists of, x among them.
          memory: projected keys and values of the encoder's output, [B, K, H, S] and [B, K, S, U].
          memory_mask: which of them exist, [B, 1, 1, S].

        Returns:
          The layer's output and the longer past.
        """
        batch_size, num_heads, size, _ = past.key.shape
        shape, beams = x.shape, (batch_size, x.shape[0] // batch_size)

        def attend_own(x: Array) -> tuple[Array, KeysValues]:
            # The beams of a sentence are the queries of one attention to what any of them has seen.
            joined = self.query_key_value(x).reshape(*beams, -1)
            value_start = joined.shape[-1] - num_heads * past.value.shape[-1]
            query, *new = jnp.split(joined, [value_start - num_heads * size, value_start], axis=-1)
            newest = KeysValues.of(*(part.reshape(*beams, num_heads, -1) for part in new))
            longer = past.with_newest(newest, position)
            context = self.attention_fn(query.reshape(*beams, -1, size), *longer.arranged(), mask=mask)
            return self.own_out(context.reshape(*shape[:2], -1)), longer

        def attend_memory(x: Array) -> tuple[Array, None]:
            query = self.cross_query(x).reshape(*beams, -1, memory.key.shape[2])
            context = self.attention_fn(query, *memory.arranged(), mask=memory_mask)
            return self.cross_out(context.reshape(*shape[:2], -1)), None

        def transform(x: Array) -> tuple[Array, None]:
            return self.down(self.activation_fn(self.up(x))), None

        x, longer = self.own_residual(attend_own, x)
        x, _ = self.cross_residual(attend_memory, x)
        x, _ = self.feed_forward_residual(transform, x)
        return x, longer


def _joined(*projections: nnx.LinearGeneral) -> tuple[Float[Array, "D N"], Float[Array, " N"] | None]:
    """Kernel and bias of one product for several projections of the same inputs; heads are flattened."""
    kernels = [projection.kernel[...].reshape(math.prod(projection.in_features), -1) for projection in projections]
    biases = [projection.bias[...].reshape(-1) for projection in projections if projection.bias is not None]
    return jnp.concatenate(kernels, axis=1), jnp.concatenate(biases) if biases else None
