"""Inverted dropout without a train flag: no key, no dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

_LEVELS = 1 << 16


def dropout(x: Float[Array, "*shape"], rate: float, rng: Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the rest to keep the mean (Srivastava et al., 2014).

    The key is asked for two words only; they choose a hash of each element's place, sixteen bits of which decide. That
    is a dozen integer operations an element, which fuse with what comes before and after, on every kind of device, and
    the mask does not depend on how the array is sharded. Arrays of more than 2^32 elements repeat it.

    Args:
      x: any shape, any float dtype.
      rate: probability of a zero, in [0, 1), rounded to a multiple of 1/65536; the scale uses the rounded value, so the
        expectation is exact.
      rng: PRNG key of any implementation; None means evaluation and returns `x` unchanged.

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
    keep = (_hashed_places(rng, x.shape) >> 16) < kept
    # Rounded to bfloat16, the scale itself would be wrong: by 0.16 % at rate 0.1, and for every element alike.
    scaled = x.astype(np.promote_types(x.dtype, np.float32)) * (_LEVELS / kept)
    return jnp.where(keep, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


def _hashed_places(rng: Array, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """A hash of the place of each element that the key chooses from 2^64."""
    first, second = jax.random.bits(rng, (2,), jnp.uint32)
    places = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        places = places + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return _mixed(_mixed(places ^ first) ^ second)


def _mixed(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits each of which flips half of the others.

    Wellons's `lowbias32`, found by search for the least bias (2018, https://nullprogram.com/blog/2018/07/31/).
    """
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
