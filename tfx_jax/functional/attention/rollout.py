"""Attention rollout: how much of each input reaches each output through all layers of attention."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def attention_rollout(maps: Sequence[Float[Array, "B N T T"]]) -> Float[Array, "B T T"]:
    """Multiplies the attention weights of all layers, each averaged with the identity of the residual connection.

    Section 3 of "Quantifying Attention Flow in Transformers" (Abnar and Zuidema, 2020,
    https://arxiv.org/abs/2005.00928): with A_l the mean over the heads of layer l, the product of all (A_l + I) / 2,
    the last layer first. This is the share of each input in each output if layers only added the attended vectors: a
    visualization, not an exact attribution.

    Args:
      maps: the attention weights of each layer, [B, N, T, T], from the input to the output.

    Returns:
      Shares of the inputs, [B, T, T], float32. A row adds up to 1 if all queries of all layers saw a key. In each
      layer, a query that saw no key keeps half of its own row.

    Raises:
      ValueError: if `maps` is empty, or a map is not square.

    >>> attention_rollout([jnp.array([[[[0.0, 1.0], [0.0, 1.0]]]])])[0].tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    if not maps:
        raise ValueError("maps must have the attention weights of at least one layer, got none")
    for weights in maps:
        if weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
            raise ValueError(f"rollout needs self-attention, [B, N, T, T], got a map of shape {weights.shape}")
    rollout = jnp.eye(maps[0].shape[-1], dtype=jnp.float32)[None]
    for weights in maps:
        rollout = 0.5 * (weights.astype(jnp.float32).mean(axis=1) @ rollout + rollout)
    return rollout
