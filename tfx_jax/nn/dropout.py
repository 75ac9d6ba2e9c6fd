"""Dropout of what modules compute, which has its key from their streams."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.functional.dropout import dropout


def drop(x: Float[Array, "*shape"], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "*shape"]:
    """Drops elements as `tfx_jax.functional.dropout` does, with a key of the stream `dropout`.

    Args:
      x: any shape.
      rate: probability of a zero; of 0 no key is taken, so that what is random elsewhere does not depend on it.
      rngs: None means evaluation and returns `x` unchanged.
    """
    return dropout(x, rate, rngs.dropout() if rngs is not None and rate else None)


def dropout_mask(shape: tuple[int, ...], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "*shape"] | None:
    """What `drop` would multiply an array by, for what is dropped alike at every step; None where it drops nothing."""
    return drop(jnp.ones(shape), rate, rngs) if rngs is not None and rate else None
