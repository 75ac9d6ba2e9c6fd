"""Inverted dropout without a train flag: no key, no dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_LEVELS = 1 << 16


def dropout(x: Float[Array, "*shape"], rate: float, rng: Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the rest to keep the mean (Srivastava et al., 2014).

    The mask is drawn from 16 random bits an element: half of what a float32 uniform takes from the `rbg` generator,
    while `threefry` makes 32 bits anyway. `rate` is therefore rounded to a multiple of 1/65536; the scale uses the
    rounded value, so the expectation is exact.

    Args:
      x: any shape, any float dtype.
      rate: probability of a zero, in [0, 1).
      rng: PRNG key; None means evaluation and returns `x` unchanged.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      ValueError: if `rate` is outside [0, 1).

    >>> dropout(jnp.ones(3), 0.5, None).tolist()
    [1.0, 1.0, 1.0]
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate must be in [0, 1), got {rate}")
    kept = _LEVELS - round(rate * _LEVELS)
    if rng is None or kept == _LEVELS:
        return x
    kept = max(kept, 1)
    keep = jax.random.bits(rng, x.shape, jnp.uint16) <= jnp.uint16(kept - 1)
    # Rounded to bfloat16, the scale itself would be wrong: by 0.16 % at rate 0.1, and for every element alike.
    scaled = x.astype(np.promote_types(x.dtype, np.float32)) * (_LEVELS / kept)
    return jnp.where(keep, scaled.astype(x.dtype), jnp.zeros((), x.dtype))
