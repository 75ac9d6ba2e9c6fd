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
    if rng is None or num_kept_levels(rate) is None:
        return x
    return rescaled(x, hashed(_places(x.shape), *hash_words(rng)), rate)


def num_kept_levels(rate: float) -> int | None:
    """How many of 65,536 equally likely hashes keep an element, at least one; None if all do."""
    kept = _LEVELS - round(rate * _LEVELS)
    return None if kept == _LEVELS else max(kept, 1)


def hash_words(rng: Array) -> UInt32[Array, "2"]:
    """What a key chooses a hash by."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def hashed(places: UInt32[Array, "*shape"], first: Array, second: Array) -> UInt32[Array, "*shape"]:
    """A hash of each place that two words choose from 2^64; the same in a kernel as outside."""
    return _mixed(_mixed(places ^ first) ^ second)


def rescaled(x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"], rate: float) -> Float[Array, "*shape"]:
    """Zeroes the elements that the upper half of their `bits` drops at a rate above 0, and scales the rest."""
    kept = num_kept_levels(rate)
    assert kept is not None
    keep = (bits >> 16).astype(jnp.int32) < kept
    # Rounded to bfloat16, the scale itself would be wrong: by 0.16 % at rate 0.1, and for every element alike.
    scaled = x.astype(np.promote_types(x.dtype, np.float32)) * (_LEVELS / kept)
    return jnp.where(keep, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


def _places(shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """The number of each element in row-major order, modulo 2^32."""
    places = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        places = places + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return places


def _mixed(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits each of which flips half of the others.

    Wellons's `lowbias32`, found by search for the least bias (2018, https://nullprogram.com/blog/2018/07/31/).
    """
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
