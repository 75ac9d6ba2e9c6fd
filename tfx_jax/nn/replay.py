"""Decoding that reads everything again for each token: for attentions that no cache of keys and values serves.

It costs a factor of the length more than `tfx_jax.nn.fused_decoder`, and is right for every causal model, since it is
the model itself that is called.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.search import BeamInvariant


def init_replay(tokens: Int[Array, "B C"], lengths: Int[Array, " B"], memory: Any = None) -> dict[str, Any]:
    """Makes the cache of a model that scores whole sequences.

    Args:
      tokens: what was read before, [B, C], with room behind it for all that will be written.
      lengths: how many of them exist.
      memory: what no step changes, for `replay_step` to hand over.
    """
    return {"tokens": tokens, "lengths": lengths.astype(jnp.int32), "memory": BeamInvariant(memory)}


def replay_step(
    score: Callable[[Int[Array, "R C"], Int[Array, " R"], Any], Float[Array, "R V"]],
    newest: Int[Array, " R"],
    cache: dict[str, Any],
) -> tuple[Float[Array, "R V"], dict[str, Any]]:
    """Takes one token a row, as `tfx_jax.nn.decoding.Decoder.step` does.

    Args:
      score: from the tokens of R rows, of which the first `lengths` [R] exist, and the memory to the logits after the
        last of these.
      newest: the tokens.
      cache: of `init_replay`, its rows repeated for beams.
    """
    rows = jnp.arange(newest.shape[0])
    tokens = cache["tokens"].at[rows, cache["lengths"]].set(newest.astype(cache["tokens"].dtype))
    lengths = cache["lengths"] + 1
    return score(tokens, lengths, cache["memory"].value), cache | {"tokens": tokens, "lengths": lengths}


def at_last(x: Float[Array, "R C D"], lengths: Int[Array, " R"]) -> Float[Array, "R 1 D"]:
    """Takes what belongs to the last token of each row."""
    return jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
