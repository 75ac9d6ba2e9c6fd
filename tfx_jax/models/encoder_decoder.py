"""Functions shared by encoder-decoder models."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.nn.fused_decoder import FusedDecoder, FusedKVCache, init_fused_cache
from tfx_jax.nn.layers import DecoderLayer
from tfx_jax.nn.replay import at_last, init_replay


class EncoderMemory(NamedTuple):
    """An encoder's output and its padding mask (True for tokens)."""

    output: Float[Array, "B S D"]
    mask: Bool[Array, "B 1 1 S"]


class TokenIds(Protocol):
    """Configuration with special token ids."""

    vocab_size: int
    pad_id: int
    start_id: int


def check_token_ids(config: TokenIds) -> None:
    """Checks that `pad_id` and `start_id` are in the vocabulary.

    Raises:
      ValueError: if one of them is not.
    """
    for name in ("pad_id", "start_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            raise ValueError(f"{name}={getattr(config, name)} is no token of a vocabulary of {config.vocab_size}")


def with_padding(tokens: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None, pad_id: int) -> Int[Array, "B S"]:
    """Replaces tokens by `pad_id` where `token_mask` is False."""
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
    """Returns the empty cache of a decoder with cross-attention to `memory`.

    It is a KV cache, or for `fused=None` (an attention without KV cache) the cache of `replay_step`.
    """
    if fused is None:
        batch_size = memory.output.shape[0]
        tokens = jnp.full((batch_size, max_length), pad_id, jnp.int32)
        return init_replay(tokens, jnp.zeros(batch_size, jnp.int32), memory)
    memories = FusedKVCache.of_memory(layers, memory.output)
    batch_size, dtype = memory.output.shape[0], memories[0].key.dtype
    return init_fused_cache(
        fused.steps,
        [step.empty_cache(batch_size, dtype) for step in fused.steps],
        room=max_length,
        num_beams=num_beams,
        memories=memories,
        memory_mask=memory.mask,
    )


def replayed(decode: Callable[..., Any], score: Callable[[Array], Array]) -> Callable[..., Array]:
    """Returns the function that `replay_step` calls to score the next token, from a decoder of whole targets.

    Args:
      decode: `decode(tokens, memory_output, memory_mask)` returns a pair whose first item is the last layer's output.
      score: computes logits from that output.
    """

    def score_last(tokens: Array, lengths: Array, memory: EncoderMemory) -> Array:
        # Each beam needs a copy of its sentence's memory.
        num_beams = tokens.shape[0] // memory.output.shape[0]
        x, _ = decode(tokens, *(jnp.repeat(array, num_beams, axis=0) for array in memory))
        return score(at_last(x, lengths))[:, 0]

    return score_last


def source_mask(source: Int[Array, "B S"], pad_id: int) -> Bool[Array, "B 1 1 S"]:
    """Returns the mask that hides padding from every query."""
    return (source != pad_id)[:, None, None, :]


def input_mask(inputs: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B T"]:
    """Returns True for tokens of a decoder's input; always for the first, because `start_id` may equal `pad_id`."""
    return (inputs != pad_id).at[:, 0].set(True)


def shift_right(target: Int[Array, "B T"], start_id: int) -> Int[Array, "B T"]:
    """Returns the decoder's input for predicting `target`: shifted right by one, after `start_id`.

    >>> shift_right(jnp.array([[5, 6, 2]]), 1).tolist()
    [[1, 5, 6]]
    """
    return jnp.concatenate([jnp.full_like(target[:, :1], start_id), target[:, :-1]], axis=1)


def named_maps(prefix: str, maps: dict[str, Array] | None) -> dict[str, Array]:
    """Splits attention maps stacked over layers into entries such as "encoder/0/self"."""
    return {
        f"{prefix}/{index}/{kind}": weights
        for kind, stacked in (maps or {}).items()
        for index, weights in enumerate(stacked)
    }
