"""Decoding that reads everything anew for each token: for attentions that no cache of keys and values serves.

It costs a factor of the length more than `tfx_jax.nn.decoder_step`, and is right for every causal model, since it is
the model itself that is called.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention import Mask
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


def start_decoder_replay(
    decode: Callable[[Int[Array, "R C"], Float[Array, "R S D"], Mask], Float[Array, "R C D"]],
    score: Callable[[Float[Array, "R 1 D"]], Float[Array, "R 1 V"]],
    memory: Float[Array, "B S D"],
    memory_mask: Mask,
    *,
    max_length: int,
    pad_id: int,
) -> tuple[StepFn, dict[str, Any]]:
    """Makes a decoder that reads an encoder's output into what the searches call.

    Args:
      decode: from tokens, the encoder's output and its mask to the output of the decoder's last layer.
      score: from that to logits.
      memory: the encoder's output for each sentence, which its beams share; they lie next to each other.
      memory_mask: which of it exist, [B, 1, 1, S].
      max_length: how many tokens there is room for.
      pad_id: fills the tokens that are not there yet.

    Returns:
      As `start_replay`.
    """
    batch_size = memory.shape[0]

    def score_last(tokens: Array, lengths: Array) -> Array:
        num_beams = tokens.shape[0] // batch_size
        x = decode(tokens, *(jnp.repeat(array, num_beams, axis=0) for array in (memory, memory_mask)))
        return score(at_last(x, lengths))[:, 0]

    tokens = jnp.full((batch_size, max_length), pad_id, jnp.int32)
    return start_replay(score_last, tokens, jnp.zeros(batch_size, jnp.int32))
