"""One vector of all vectors of a sequence, of which those of padding say nothing."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mean_over_tokens(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B D"]:
    """Returns the mean of the vectors where there is a token, float32 [B, D]; zeros for a row without any."""
    kept = jnp.where(token_mask[..., None], x.astype(jnp.float32), 0.0)
    return kept.sum(axis=1) / jnp.maximum(token_mask.sum(axis=1, keepdims=True), 1).astype(jnp.float32)


def max_over_tokens(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B D"]:
    """Returns the largest number of each column where there is a token, float32 [B, D]; zeros for a row without any."""
    largest = jnp.where(token_mask[..., None], x.astype(jnp.float32), -jnp.inf).max(axis=1)
    return jnp.where(token_mask.any(axis=1, keepdims=True), largest, 0.0)
