"""Matrix products with weights of eight bits: a quarter of the memory to read for every token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

_LARGEST = 127


def quantize_rows(matrix: Float[Array, "*rows D"]) -> tuple[Int8[Array, "*rows D"], Float[Array, "*rows"]]:
    """Rounds each row to 255 levels, symmetric about 0; its largest element keeps its value.

    Args:
      matrix: any float dtype.

    Returns:
      The integers and the float32 scale of each row, 1 for a row of zeros. Their product is within half a scale of the
      element, which is 1/254 of the largest in its row. The scale of a row that is not finite is not either, so that
      what is computed from it shows that.

    >>> import jax
    >>> values, scales = jax.jit(quantize_rows)(jnp.array([[0.4, -1.0], [0.0, 0.0]]))
    >>> values.tolist(), (1 / scales).round().tolist()
    ([[51, -127], [0, 0]], [127.0, 1.0])
    """
    matrix = matrix.astype(jnp.float32)
    largest = jnp.abs(matrix).max(axis=-1, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest / _LARGEST)
    return jnp.round(matrix / scales).astype(jnp.int8), scales[..., 0]


def int8_product(
    x: Float[Array, "*rows D"], values: Int8[Array, "N D"], scales: Float[Array, " N"]
) -> Float[Array, "*rows N"]:
    """Computes x W^T from integers: each row of `x` is rounded as the rows of W were, and sums are exact.

    Args:
      x: [*rows, D], any float dtype.
      values: W as `quantize_rows` gives it, [N, D].
      scales: of its rows, [N].

    Returns:
      float32, [*rows, N].

    >>> import jax
    >>> quantised = jax.jit(quantize_rows)(jnp.array([[0.5, -1.0]]))
    >>> jax.jit(int8_product)(jnp.array([2.0, -4.0]), *quantised).round().tolist()
    [5.0]
    """
    rounded, row_scales = quantize_rows(x)
    sums = jnp.einsum("...D,ND->...N", rounded, values, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * row_scales[..., None] * scales.reshape((1,) * (x.ndim - 1) + (-1,))
