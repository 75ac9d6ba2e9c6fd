"""Decoding without a cache: for each new token the model processes the whole sequence again.

For attentions that cannot decode from a cache. It costs L times as much as `tfx_jax.nn.fused_decoder`, with L the
length, and works for every causal model.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.search import BeamInvariant


def init_replay(tokens: Int[Array, "B C"], lengths: Int[Array, " B"], memory: Any = None) -> dict[str, Any]:
    """Returns the cache of `replay_step`.

    Args:
      tokens: tokens of the prompt, [B, C], followed by free columns for all tokens that will be generated.
      lengths: number of tokens of each row, [B].
      memory: constant data that `replay_step` passes to `score`.
    """
    return {"tokens": tokens, "lengths": lengths.astype(jnp.int32), "memory": BeamInvariant(memory)}


def replay_step(
    score: Callable[[Int[Array, "R C"], Int[Array, " R"], Any], Float[Array, "R V"]],
    newest: Int[Array, " R"],
    cache: dict[str, Any],
) -> tuple[Float[Array, "R V"], dict[str, Any]]:
    """Appends one token per row and scores the next one, as `tfx_jax.nn.decoding.Decoder.step` does.

    Args:
      score: called as `score(tokens, lengths, memory)`; returns the logits after the last of `lengths` tokens per row.
      newest: the newest token of each row.
      cache: the cache from `init_replay`, with rows repeated for beams, or from the previous step.

    Returns:
      Logits and the new cache.
    """
    rows = jnp.arange(newest.shape[0])
    tokens = cache["tokens"].at[rows, cache["lengths"]].set(newest.astype(cache["tokens"].dtype))
    lengths = cache["lengths"] + 1
    return score(tokens, lengths, cache["memory"].value), cache | {"tokens": tokens, "lengths": lengths}


def at_last(x: Float[Array, "R C D"], lengths: Int[Array, " R"]) -> Float[Array, "R 1 D"]:
    """Returns the vector of the last token of each row."""
    return jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
