"""What an output sees of the inputs through all layers of attention."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def attention_rollout(maps: Sequence[Float[Array, "B N T T"]]) -> Float[Array, "B T T"]:
    """Multiplies the attention of layers, each averaged with the residual connection around it.

    Section 3 of "Quantifying Attention Flow in Transformers" (Abnar and Zuidema, 2020,
    https://arxiv.org/abs/2005.00928): with A_l the mean of a layer's heads, the product of all (A_l + I) / 2, the last
    layer first. It is how much of each input arrives at each position if every layer did nothing but add what it
    attends to, and no more than a picture of the real thing.

    Args:
      maps: the attention weights of each layer, [B, N, T, T], first the one nearest to the input.

    Returns:
      Shares of the inputs, [B, T, T], float32; a row sums to 1 where each query of each layer saw a key. A query that
      saw none has only itself, with 1/2.

    Raises:
      ValueError: if there is no layer, or the queries of a map are not its keys.

    >>> attention_rollout([jnp.array([[[[0.0, 1.0], [0.0, 1.0]]]])])[0].tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    if not maps:
        raise ValueError("there is no layer to follow attention through")
    for weights in maps:
        if weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
            raise ValueError(f"rollout needs self-attention, [B, N, T, T], got a map of shape {weights.shape}")
    rollout = jnp.eye(maps[0].shape[-1], dtype=jnp.float32)[None]
    for weights in maps:
        rollout = 0.5 * (weights.astype(jnp.float32).mean(axis=1) @ rollout + rollout)
    return rollout
