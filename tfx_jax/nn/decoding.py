"""Decoding: the protocols of models that generate, steps with a KV cache, and decoding without one.

`tfx_jax.generation` uses every model through `DecodingModel` and `Decoder`, which a model implements in its own file.
The searches of `tfx_jax.functional.search` call `Decoder.step` only.

Models of the layers of `tfx_jax.nn.layers` decode by `fused_step`, which runs `step` of each layer. Training uses
parameters that shard and restore well: stacked layers, with separate projections for query, key and value.
`fuse_for_decoding` splits the stack and rearranges the weights; `with_int8_stacks` quantizes those that read the source
or the prompt. Attentions that cannot decode from a cache use `replay_step`, which processes all tokens again.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.errors import UserError
from tfx_jax.functional.attention.signature import Mask
from tfx_jax.functional.attention.spec import RecurrentDecoding
from tfx_jax.functional.search import BeamInvariant, Cache
from tfx_jax.nn.attention import KVCache, LearnedAttention, MultiHeadAttention, decoding_of
from tfx_jax.nn.basic import FeedForward
from tfx_jax.nn.layers import (
    ConvolvedPast,
    DecoderLayer,
    EncoderLayer,
    FusedKVCache,
    FusedLinear,
    Residual,
    fused,
    quantized,
)
from tfx_jax.nn.moe import MixtureOfExperts
from tfx_jax.nn.stack import LayerGroup, map_layers, unstack_layers

Model = TypeVar("Model", bound=nnx.Module)


class Decoder(Protocol):
    """A model, or a version of it prepared for decoding, that encodes inputs once and then processes token by token.

    It is a pytree, such as a Module, that can be passed to `jax.jit`. There are R = B * W rows, the W beams of each of
    B inputs next to each other.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of `step`."""
        ...

    @property
    def pad_id(self) -> int:
        """The id of PAD, which is never generated; -1 if there is no PAD."""
        ...

    @property
    def continues_inputs(self) -> bool:
        """Whether the output continues the input, as in a language model, or is a separate sequence."""
        ...

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns the maximum input length, in tokens, if `max_new_tokens` follow.

        Below 1 means that no input fits, None means no limit.
        """
        ...

    def encode(self, inputs: Shaped[Array, "B ..."], token_mask: Bool[Array, "B S"] | None = None) -> Any:
        """Encodes inputs, once before decoding.

        Args:
          inputs: tokens, [B, S], at least one per row for a language model; or images for a captioning model.
          token_mask: True for tokens, False for padding on either side; None means that PAD is the padding.

        Returns:
          The memory, any pytree: the output of an encoder, the keys and values of a prompt, or a recurrent state.
        """
        ...

    def init_cache(self, memory: Any, *, max_length: int, num_beams: int = 1) -> tuple[Cache, Int[Array, " B"]]:
        """Returns the cache and the tokens of the first step.

        Args:
          memory: the result of `encode`.
          max_length: maximum number of tokens that will be generated.
          num_beams: W.

        Returns:
          The cache, as in `tfx_jax.functional.search`: its arrays have B rows, which beam search repeats and reorders,
          except in `BeamInvariant` parts. And the tokens that the first step gets, [B].

        Raises:
          ValueError: if input and output together are too long for the model.
        """
        ...

    def step(self, tokens: Int[Array, " R"], cache: Cache) -> tuple[Float[Array, "R V"], Cache]:
        """Processes the newest token of each row; returns the logits of the next token and the new cache."""
        ...


@runtime_checkable
class DecodingModel(Protocol):
    """A model that can generate."""

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the fastest decoder of the model: the model itself, or a version with its weights rearranged.

        Args:
          int8: whether weights are quantized to int8, see `tfx_jax.functional.int8_product`.

        Raises:
          UserError: if the model does not support `int8`.
        """
        ...


def project_memories(layers: DecoderLayer, memory: Float[Array, "B S D"]) -> list[FusedKVCache]:
    """Projects the encoder's output to the keys and values of the cross-attention of each layer of a stack."""
    keys, values = map_layers(lambda layer: layer.cross_attention.project_memory(memory), layers)  # [L, B, S, K, _]
    memories = [FusedKVCache.of(key, value) for key, value in zip(keys, values, strict=True)]
    return jax.lax.optimization_barrier(memories)  # or XLA for CPUs would transpose the values again in every step


class FusedDecoder(nnx.Module):
    """The layers and the output layer of a decoder or of a language model, rearranged for decoding."""

    def __init__(
        self,
        stacks: Sequence[DecoderLayer | EncoderLayer],
        kernel: Float[Array, "D V"],
        bias: Float[Array, " V"] | None = None,
        *,
        dtype: DTypeLike,
        int8: bool,
    ):
        """Splits the stacks and rearranges the weights of each layer and of the output layer x W + b."""
        layers = [layer for stack in stacks for layer in unstack_layers(stack)]
        self.layers = nnx.List([fused(layer, int8=int8) for layer in layers])
        self.output = FusedLinear(kernel, bias, dtype=dtype, int8=int8)


def fuse_for_decoding(
    stacks: Sequence[DecoderLayer | EncoderLayer],
    table: Float[Array, "V D"],
    bias: Float[Array, " V"] | None = None,
    *,
    dtype: DTypeLike,
    int8: bool,
) -> FusedDecoder | None:
    """Rearranges weights for decoding, in one compiled program. Call it once, before decoding.

    Args:
      stacks: stacks of layers, from input to output.
      table: matrix of the output layer, one row per token of the vocabulary.
      bias: bias of the output layer.
      dtype: dtype of the output layer's computation.
      int8: whether weights are quantized to int8, see `tfx_jax.functional.int8_product`.

    Returns:
      The fused decoder. None if `fusing_obstacle` finds a reason against it, which is logged as a warning; the model
      then decodes without a cache.

    Raises:
      UserError: if `int8` is set for such a model.
    """
    if (obstacle := next(filter(None, map(fusing_obstacle, stacks)), None)) is None:
        return _fuse(stacks, table, bias, dtype=dtype, int8=int8)
    if int8:
        raise UserError(f"int8 needs a model whose attention decodes from a cache: leave int8 out ({obstacle})")
    _warn_of_slow_decoding(obstacle)
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "int8"))
def _fuse(layers: Any, table: Array, bias: Array | None, *, dtype: DTypeLike, int8: bool) -> FusedDecoder:
    """Makes a `FusedDecoder` in one compiled program."""
    return FusedDecoder(layers, table.T, bias, dtype=dtype, int8=int8)


_quantized = jax.jit(quantized)


def with_int8_stacks(model: Model, *names: str) -> Model:
    """Returns a copy of a model whose stacks of layers `names` read a source or a prompt in int8, see `quantized`.

    A stack that the model does not have, None, is skipped.
    """
    model = jax.tree.map(lambda x: x, model)  # a copy, whose stacks are replaced below
    for name in names:
        if (layers := getattr(model, name)) is not None:
            setattr(model, name, _quantized(layers))
    return model


class DecodingConstants(NamedTuple):
    """Arrays that every decoding step reads and none changes.

    Attributes:
      inputs: indices 0 .. B - 1 of the inputs; only its shape is used.
      beams: indices 0 .. W - 1 of an input's beams; only its shape is used.
      prompt: indices 0 .. P - 1 of the prompt's tokens; only its shape is used.
      exists: False for padding of the prompt, True for its tokens and for new ones, [B, P + max_new_tokens]; None means
        that there is no padding.
      positions: position of each token in its sequence, without padding, [B, P + max_new_tokens]; None without padding.
      memories: for each layer, the keys and values of the encoder's output, or None.
      memory_mask: True for visible keys of the memories, [B, 1, 1, S].
    """

    inputs: Int[Array, " B"]
    beams: Int[Array, " W"]
    prompt: Int[Array, " P"]
    exists: Bool[Array, "B S"] | None
    positions: Int[Array, "B S"] | None
    memories: list[FusedKVCache | None]
    memory_mask: Mask | None


def init_fused_cache(
    layers: Sequence[EncoderLayer | DecoderLayer],
    past: Sequence[KVCache],
    *,
    max_new_tokens: int,
    num_beams: int,
    is_past: Bool[Array, "B P"] | None = None,
    memories: Sequence[FusedKVCache | None] | None = None,
    memory_mask: Mask | None = None,
) -> dict[str, Any]:
    """Returns the cache of `fused_step`.

    Rows are the beams of the inputs, the beams of an input next to each other. The beams share the keys and values of
    the prompt; those of new tokens stay where a beam wrote them. Beam search reorders only `beam_ancestry`, which says
    which beam wrote each new token of a row.

    Args:
      layers: the layers, from `fused`.
      past: for each layer, the keys, values and gates of the P tokens of the prompt; P may be 0.
      max_new_tokens: how many more tokens the cache has room for.
      num_beams: W, rows per input.
      is_past: True for tokens of the prompt, False for padding; None means no padding.
      memories: for each layer, the keys and values of the encoder's output, or None.
      memory_mask: True for visible keys of the memories, [B, 1, 1, S].

    Returns:
      The cache, with B rows; beam search repeats them.
    """
    batch_size, num_past = past[0].key.shape[:2]
    exists = None if is_past is None else jnp.pad(is_past, ((0, 0), (0, max_new_tokens)), constant_values=True)
    constants = DecodingConstants(
        inputs=jnp.arange(batch_size),
        beams=jnp.arange(num_beams),
        prompt=jnp.arange(num_past),
        exists=exists,
        positions=None if exists is None else jnp.cumsum(exists, axis=1) - 1,
        memories=[None] * len(past) if memories is None else list(memories),
        memory_mask=memory_mask,
    )
    room: dict[str, int] = {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
    pasts = [
        _split_past(layer.self_attention.init_cache(layer_past, is_past, **room))
        for layer, layer_past in zip(layers, past, strict=True)
    ]
    return {
        "position": jnp.full((), num_past, jnp.int32),
        "beam_ancestry": jnp.zeros((batch_size, max_new_tokens), jnp.int32),  # which beam wrote each new token of a row
        "past": BeamInvariant([layer_cache for layer_cache, _ in pasts]),
        "states": [state for _, state in pasts],
        "constants": BeamInvariant(constants),
    }


def fused_step(
    layers: Sequence[EncoderLayer | DecoderLayer],
    embed: Callable[[Int[Array, " R"], Int[Array, "*rows"]], Float[Array, "R 1 D"]],
    score: Callable[[Float[Array, "R 1 D"]], Float[Array, "R V"]],
    tokens: Int[Array, " R"],
    cache: dict[str, Any],
    *,
    bias: Callable[[Int[Array, ""], int], Float[Array, "L N 1 S"]] | None = None,
) -> tuple[Float[Array, "R V"], dict[str, Any]]:
    """Processes one token per row through all layers, as `tfx_jax.nn.decoding.Decoder.step` does.

    Args:
      layers: the layers, from `fused`.
      embed: called as `embed(tokens, positions)`; returns the input of the first layer. There is one position per row
        if `is_past` was passed to `init_fused_cache`, otherwise one for all rows.
      score: maps the output of the last layer to float32 logits.
      tokens: the newest token of each row.
      cache: the cache from `init_fused_cache` or from the previous step.
      bias: called as `bias(position, length)` with the token's index in the cache and the cache's length; returns the
        bias of the self-attention, with a leading axis of layers or of size 1.

    Returns:
      Logits and the new cache.
    """
    position, beam_ancestry, constants = cache["position"], cache["beam_ancestry"], cache["constants"].value
    (batch_size,), (num_beams,), (num_past,) = constants.inputs.shape, constants.beams.shape, constants.prompt.shape
    if tokens.shape[0] != batch_size * num_beams:
        raise ValueError(
            f"tokens must have batch size * num_beams = {batch_size} * {num_beams} rows, got {tokens.shape[0]}"
        )
    length = num_past + beam_ancestry.shape[1]
    beams, indices = jnp.arange(num_beams), jnp.arange(length)
    exists = jnp.ones((1, length), bool) if constants.exists is None else constants.exists
    positions = indices[None] if constants.positions is None else constants.positions
    newest = jax.lax.dynamic_slice_in_dim(positions, position, 1, axis=1)  # position of the newest token, [B or 1, 1]
    num_new = position - num_past
    beam_ancestry = beam_ancestry.at[:, num_new].set(jnp.tile(beams, batch_size))
    # [B, W, M, W]: whether a new token of a beam's sequence is the one that a beam, the last axis, wrote.
    is_of_beam = beam_ancestry.reshape(batch_size, num_beams, -1, 1) == beams[None, None, None]
    is_written = exists & (indices <= position)[None]

    def mask(is_visible: Any) -> Bool[Array, "B 1 W S"]:
        """Returns which entries of the cache each beam sees; an `is_visible` of None hides no position."""
        may_see = is_written if is_visible is None else is_written & is_visible(newest, positions)
        prompt, new = jnp.split(may_see[:, None, :], [num_past], axis=-1)
        new = (is_of_beam & new[..., None]).reshape(batch_size, num_beams, -1)
        prompt = jnp.broadcast_to(prompt, (batch_size, num_beams, num_past))
        return jnp.concatenate([prompt, new], axis=-1)[:, None]

    # One mask for each different visibility of the layers' attentions.
    visibilities = [layer.self_attention.is_visible for layer in layers]
    masks = {is_visible: mask(is_visible) for is_visible in dict.fromkeys(visibilities)}
    biases: list[Array | None] = [None] * len(layers)
    if bias is not None:
        prompt_biases, new_biases = jnp.split(bias(position, length), [num_past], axis=-1)
        layer_biases = jnp.concatenate([prompt_biases, jnp.repeat(new_biases, num_beams, axis=-1)], axis=-1)
        # The leading axis has one entry for each layer, or one for all.
        biases = [layer_biases[index % len(layer_biases)][None] for index in range(len(layers))]
    x = embed(tokens, position if constants.positions is None else jnp.repeat(newest[:, 0], num_beams))
    pasts, states = [], []
    for layer, is_visible, layer_cache, state, memory, layer_bias in zip(
        layers, visibilities, cache["past"].value, cache["states"], constants.memories, biases, strict=True
    ):
        options: dict[str, Any] = {} if memory is None else {"memory": memory, "memory_mask": constants.memory_mask}
        options |= {"entry": num_past + num_new * num_beams, "positions": newest}
        options |= {"mask": masks[is_visible], "bias": layer_bias}
        x, extended = layer.step(x, _joined_past(layer_cache, state), **options)
        layer_cache, state = _split_past(extended)
        pasts.append(layer_cache)
        states.append(state)
    new_cache = {"position": position + 1, "beam_ancestry": beam_ancestry}
    return score(x), cache | new_cache | {"past": BeamInvariant(pasts), "states": states}


def _split_past(past: Any) -> tuple[FusedKVCache | None, Any]:
    """Splits a layer's past into what stays when beams are reordered, keys and values, and the state of each row."""
    if isinstance(past, FusedKVCache):
        return past, None
    if isinstance(past, ConvolvedPast) and isinstance(past.attention, FusedKVCache):
        return past.attention, past._replace(attention=None)
    return None, past


def _joined_past(cache: FusedKVCache | None, state: Any) -> Any:
    """Returns the past that `_split_past` split into `cache` and `state`."""
    if cache is None:
        return state
    return cache if state is None else ConvolvedPast(cache, state.recent)


def fusing_obstacle(layers: Any) -> str | None:
    """Returns why a layer, or a stack of layers, cannot decode by `step`; None if it can.

    Those that can are the layer classes of this package, but no subclasses, with attentions that have an
    `AttentionSpec.decoding`.
    """
    if type(layers) is LayerGroup:
        return next(filter(None, map(fusing_obstacle, layers.layers)), None)
    # Classes that each part may have; "" is the layer itself.
    supported = {
        "": (EncoderLayer, DecoderLayer),
        "feed_forward": (FeedForward, MixtureOfExperts),
        "self_attention_residual": (Residual,),
        "self_attention": (MultiHeadAttention,),
        "cross_attention": (MultiHeadAttention,),
    }
    for name, kinds in supported.items():
        part = getattr(layers, name, None) if name else layers
        if part is not None and type(part) not in kinds:
            required = " or ".join(kind.__name__ for kind in kinds)
            return f"{name or 'layer'} must be {required}, got {type(part).__name__}"
    for attention in (layers.self_attention, getattr(layers, "cross_attention", None)):
        if attention is not None and decoding_of(attention.attention_fn) is None:
            return (
                f"{_name_of(attention.attention_fn)} cannot decode from a cache (its `AttentionSpec` has no decoding, "
                "or none with the options that are bound to it)"
            )
    if layers.self_attention.rotary is not None and layers.self_attention.rotary.depends_on_length:
        return f"{layers.self_attention.rotary.scaling} rotary positions rotate all keys again as a text grows"
    if isinstance(layers, DecoderLayer) and not _is_plain(layers.cross_attention):
        return (
            "cross-attention must have only projections and a scale: no norms, rotary positions, sinks, soft cap, "
            "convolution, output gate, query_rank or num_key_heads"
        )
    return None


def _name_of(attention_fn: Any) -> str:
    """Returns the name of an attention for messages."""
    if isinstance(attention_fn, LearnedAttention):
        return f"{attention_fn.name} attention"
    function = getattr(attention_fn, "func", attention_fn)  # the function inside a functools.partial
    return getattr(function, "__name__", type(function).__name__)


@functools.cache
def _warn_of_slow_decoding(obstacle: str) -> None:
    """Logs, once for each reason, that a model decodes without a cache."""
    logging.warning("decoding is slow, because each new token processes all earlier tokens again: %s", obstacle)


def _is_plain(cross: MultiHeadAttention) -> bool:
    """Whether cross-attention has only projections and a scale, which is all that `FusedCrossAttention` supports."""
    others = (cross.query_norm, cross.key_norm, cross.rotary, cross.sinks, cross.logits_soft_cap)
    others += (cross.value_norm, cross.query_down, cross.output_norm, cross.query_convolution, cross.output_gate)
    is_recurrent = isinstance(decoding_of(cross.attention_fn), RecurrentDecoding)
    return not is_recurrent and cross.num_repeats == 1 and all(other is None for other in others)


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
