"""Normalisation over the features of each token."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tfx_jax.functional.masks import check_floats


def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "*batch D"]:
    """Gives each token mean 0 and variance 1 over its D features, then a gain and an offset (Ba et al., 2016).

    Unlike batch normalisation, nothing depends on the other tokens, so batch size and padding do not matter.

    Args:
      x: [*batch, D], any float dtype.
      scale: the gain; None means 1.
      bias: the offset; None means 0.
      epsilon: added to the (biased) variance.

    Returns:
      [*batch, D] in the dtype of `x`; the statistics are float32 (float64 for float64 inputs).

    >>> layer_norm(jnp.array([1.0, 3.0])).round(3).tolist()
    [-1.0, 1.0]
    """
    check_floats(x=x)
    dtype = np.promote_types(x.dtype, np.float32)  # NumPy's: JAX's own refuses under strict promotion
    centred = x.astype(dtype) - x.mean(axis=-1, keepdims=True, dtype=dtype)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + epsilon)
    trailing = (1,) * (x.ndim - 1) + (-1,)
    if scale is not None:
        y = y * scale.astype(dtype).reshape(trailing)
    if bias is not None:
        y = y + bias.astype(dtype).reshape(trailing)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"] | None = None, *, epsilon: float = 1e-6
) -> Float[Array, "*batch D"]:
    """Gives each token a root mean square of 1 over its D features, then a gain (Zhang and Sennrich, 2019).

    Layer normalisation without the mean and the offset (https://arxiv.org/abs/1910.07467).

    Args:
      x: [*batch, D], any float dtype.
      scale: the gain; None means 1.
      epsilon: added to the mean square.

    Returns:
      [*batch, D] in the dtype of `x`; the statistics are float32 (float64 for float64 inputs).

    >>> rms_norm(jnp.array([4.0, 0.0, 0.0, 0.0])).round(3).tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    check_floats(x=x)
    dtype = np.promote_types(x.dtype, np.float32)
    y = x.astype(dtype)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + epsilon)
    if scale is not None:
        y = y * scale.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return y.astype(x.dtype)
