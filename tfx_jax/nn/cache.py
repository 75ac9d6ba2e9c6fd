"""What a layer remembers of the tokens that it has read: an argument that goes in and comes out longer."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class KVCache(NamedTuple):
    """The keys and values of S tokens before those of a layer's input.

    A layer that is given one attends to it and to its own input, and returns it longer: an empty one reads a prompt,
    a full one reads the next part of a text as if both were read at once. Positions are the caller's business, as they
    are without a cache; so is a mask, which covers all keys.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K U"]

    @classmethod
    def empty(
        cls, batch_size: int, num_heads: int, d_k: int, d_v: int | None = None, dtype: str = "float32"
    ) -> "KVCache":
        """Returns the cache of no token; `d_v` is d_k by default."""
        shape = (batch_size, 0, num_heads)
        return cls(jnp.zeros((*shape, d_k), dtype), jnp.zeros((*shape, d_k if d_v is None else d_v), dtype))

    def append(self, newer: "KVCache") -> "KVCache":
        """Returns the cache with newer tokens behind its own."""
        return KVCache(*(jnp.concatenate(pair, axis=1) for pair in zip(self, newer, strict=True)))
