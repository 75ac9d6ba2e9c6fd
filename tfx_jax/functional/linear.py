"""Linear maps whose parameters have more precision than what they are multiplied with."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "*batch_and_in"],
    kernel: Float[Array, "*in_and_out"],
    bias: Float[Array, "*out"] | None = None,
    *,
    num_axes: int = 1,
) -> Float[Array, "*batch_and_out"]:
    """Computes x W + b in the precision of `x`, and the gradients of W and b in theirs.

    As mixed precision is meant to be (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740, section 3.1): a
    product of bfloat16 is summed in float32 in any case, and here the sum over all tokens is not rounded before it
    becomes a gradient, nor is that of the devices that share the tokens. In one precision it is a product like others;
    in two it is a `jax.custom_vjp`, which has no `jax.jvp`.

    Args:
      x: [*batch, *in], of which the last `num_axes` are summed over.
      kernel: W, [*in, *out], in the dtype of `x` or one of more precision.
      bias: b, [*out]; None means 0.
      num_axes: how many axes *in is.

    Returns:
      [*batch, *out] in the dtype of `x`.

    >>> gradient = jax.grad(lambda kernel: linear(jnp.ones((3, 2), jnp.bfloat16), kernel)[0, 0].astype(jnp.float32))
    >>> gradient(jnp.ones((2, 1))).dtype
    dtype('float32')
    """
    if x.dtype == kernel.dtype:
        y = _product(x, kernel, tuple(range(num_axes)), x.dtype)
        return y if bias is None else add_bias(y, bias)
    # As matrices: a TPU fills its lanes with the last axis, and sums over tokens run twice as fast where that is all
    # features instead of one head's 64. In one precision, as on CPUs, this would cost some percent.
    batch, out = x.shape[: x.ndim - num_axes], kernel.shape[num_axes:]
    matrix = kernel.reshape(math.prod(kernel.shape[:num_axes]), math.prod(out))
    y = _product(x.reshape(*batch, matrix.shape[0]), matrix, (0,), x.dtype)
    return (y if bias is None else add_bias(y, bias.reshape(-1))).reshape(*batch, *out)


def add_bias(x: Float[Array, "*batch_and_out"], bias: Float[Array, "*out"]) -> Float[Array, "*batch_and_out"]:
    """Adds a parameter for the last axes, such as learned positions; its gradient as in `linear`.

    Args:
      x: [*batch, *out].
      bias: [*out], in the dtype of `x` or one of more precision.

    Returns:
      [*batch, *out] in the dtype of `x`.
    """
    dtype = np.promote_types(x.dtype, bias.dtype)  # NumPy's: JAX's own refuses under strict promotion
    return (x.astype(dtype) + bias.astype(dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)).astype(x.dtype)


def linear_logits(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Scores each row of a matrix against `x`, in float32 at least; gradients as in `linear`.

    Args:
      x: [*batch, D].
      table: such as the vectors of a vocabulary, [V, D], in the dtype of `x` or one of more precision.

    Returns:
      [*batch, V].
    """
    return _product(x, table, (1,), np.promote_types(x.dtype, np.float32))


def _product(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Sums over the last axes of `x` and these of `kernel`, which are its first or its last."""
    if x.dtype == kernel.dtype:
        return _dot(x, kernel, axes, dtype)
    return _mixed_product(x, kernel, axes, jnp.dtype(dtype), kernel.dtype)


def _dot(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Array:
    last = tuple(range(x.ndim - len(axes), x.ndim))
    return jax.lax.dot_general(x, kernel, ((last, axes), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _mixed_product(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike) -> Array:
    del kernel_dtype
    return _dot(x, kernel.astype(x.dtype), axes, dtype)


def _forward(
    x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike
) -> tuple[Array, tuple[Array, Array]]:
    del kernel_dtype
    narrow = kernel.astype(x.dtype)
    return _dot(x, narrow, axes, dtype), (x, narrow)


def _backward(
    axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    del dtype
    (x, kernel), gradient = kept, gradient.astype(kept[0].dtype)
    others = tuple(axis for axis in range(kernel.ndim) if axis not in axes)
    batch = tuple(range(x.ndim - len(axes)))
    sides = (x, gradient) if axes[0] == 0 else (gradient, x)
    of_kernel = jax.lax.dot_general(*sides, ((batch, batch), ((), ())), preferred_element_type=kernel_dtype)
    return _dot(gradient, kernel, others, x.dtype), of_kernel


_mixed_product.defvjp(_forward, _backward)
