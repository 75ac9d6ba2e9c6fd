"""What models with an encoder and a decoder have in common."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.nn.fused_decoder import FusedDecoder, FusedKVCache, init_fused_cache
from tfx_jax.nn.layers import DecoderLayer
from tfx_jax.nn.replay import at_last, init_replay


class EncoderMemory(NamedTuple):
    """An encoder's output, and which of it exists."""

    output: Float[Array, "B S D"]
    mask: Bool[Array, "B 1 1 S"]


class TokenIds(Protocol):
    """Special tokens of a configuration."""

    vocab_size: int
    pad_id: int
    start_id: int


def check_token_ids(config: TokenIds) -> None:
    """Checks that special tokens have a vector.

    Raises:
      ValueError: if one is outside the vocabulary.
    """
    for name in ("pad_id", "start_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            raise ValueError(f"{name}={getattr(config, name)} is no token of a vocabulary of {config.vocab_size}")


def with_padding(tokens: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None, pad_id: int) -> Int[Array, "B S"]:
    """Puts a model's own padding where no token exists."""
    return tokens if token_mask is None else jnp.where(token_mask, tokens, pad_id)


def init_decoder(
    fused: FusedDecoder | None,
    layers: DecoderLayer,
    memory: EncoderMemory,
    *,
    max_length: int,
    num_beams: int,
    pad_id: int,
) -> dict[str, Any]:
    """Makes the empty cache of a decoder that reads an encoder's output; of a replay where it is not `fused`."""
    if fused is None:
        batch_size = memory.output.shape[0]
        tokens = jnp.full((batch_size, max_length), pad_id, jnp.int32)
        return init_replay(tokens, jnp.zeros(batch_size, jnp.int32), memory)
    memories = FusedKVCache.of_memory(layers, memory.output)
    batch_size, dtype = memory.output.shape[0], memories[0].key.dtype
    return init_fused_cache(
        fused.steps,
        [step.empty_cache(batch_size, dtype) for step in fused.steps],
        max_new_tokens=max_length,
        num_beams=num_beams,
        memories=memories,
        memory_mask=memory.mask,
    )


def replayed(decode: Callable[..., Any], score: Callable[[Array], Array]) -> Callable[..., Array]:
    """Makes a decoder of whole targets into what `replay_step` calls; the beams of a sentence share its memory.

    Args:
      decode: from tokens, an encoder's output and its mask to a pair, first the output of the decoder's last layer.
      score: from that to logits.
    """

    def score_last(tokens: Array, lengths: Array, memory: EncoderMemory) -> Array:
        num_beams = tokens.shape[0] // memory.output.shape[0]
        x, _ = decode(tokens, *(jnp.repeat(array, num_beams, axis=0) for array in memory))
        return score(at_last(x, lengths))[:, 0]

    return score_last


def source_mask(source: Int[Array, "B S"], pad_id: int) -> Bool[Array, "B 1 1 S"]:
    """Hides padding tokens from every query."""
    return (source != pad_id)[:, None, None, :]


def input_mask(inputs: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B T"]:
    """Which of the tokens that a decoder reads exist; the first does, even where padding starts a target."""
    return (inputs != pad_id).at[:, 0].set(True)


def shift_right(target: Int[Array, "B T"], start_id: int) -> Int[Array, "B T"]:
    """What a decoder reads to predict `target`.

    >>> shift_right(jnp.array([[5, 6, 2]]), 1).tolist()
    [[1, 5, 6]]
    """
    return jnp.concatenate([jnp.full_like(target[:, :1], start_id), target[:, :-1]], axis=1)


def named_maps(prefix: str, maps: dict[str, Array] | None) -> dict[str, Array]:
    """Splits maps stacked over layers into one entry for each layer and kind."""
    return {
        f"{prefix}/{index}/{kind}": weights
        for kind, stacked in (maps or {}).items()
        for index, weights in enumerate(stacked)
    }
