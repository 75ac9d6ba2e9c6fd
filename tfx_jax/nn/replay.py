"""Decoding that reads everything anew for each token: for attentions that no cache of keys and values serves.

It costs a factor of the length more than `tfx_jax.nn.decoder_step`, and is right for every causal model, since it is
the model itself that is called.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.decoding import StepFn


def start_replay(
    score: Callable[[Int[Array, "R C"], Int[Array, " R"]], Float[Array, "R V"]],
    tokens: Int[Array, "B C"],
    lengths: Int[Array, " B"],
) -> tuple[StepFn, dict[str, Any]]:
    """Makes a model that scores whole sequences into what the searches of `tfx_jax.functional.decoding` call.

    Args:
      score: from the tokens of R rows, of which the first `lengths` [R] exist, to the logits after the last of these.
      tokens: what was read before, [B, C], with room behind it for all that will be generated.
      lengths: how many of them exist.

    Returns:
      `step_fn(tokens [R], cache) -> (logits [R, V], cache)` and the cache, whose rows may be repeated for beams.
    """

    def step_fn(newest: Array, cache: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        rows = jnp.arange(newest.shape[0])
        tokens = cache["tokens"].at[rows, cache["lengths"]].set(newest.astype(cache["tokens"].dtype))
        lengths = cache["lengths"] + 1
        return score(tokens, lengths), {"tokens": tokens, "lengths": lengths}

    return step_fn, {"tokens": tokens, "lengths": lengths.astype(jnp.int32)}


def at_last(x: Float[Array, "R C D"], lengths: Int[Array, " R"]) -> Float[Array, "R 1 D"]:
    """Takes what belongs to the last token of each row."""
    return jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)


def for_beams(x: Array, num_rows: int) -> Array:
    """Repeats the rows of sentences for the beams of each, which lie next to each other."""
    return jnp.repeat(x, num_rows // x.shape[0], axis=0)
