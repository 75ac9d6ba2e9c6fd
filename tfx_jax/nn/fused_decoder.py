"""Decoder layers with their weights rearranged for fast decoding, one token per row at a time.

Training uses parameters that shard and restore well: stacked layers, with separate projections for query, key and
value. A decoding step has few rows, and reading the weights takes most of its time. So here layers are not stacked,
projections of the same input are fused into one matrix, weights are in the layout in which they are read, and they are
int8 on request.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.errors import UserError
from tfx_jax.functional.attention.signature import Bias, Mask
from tfx_jax.functional.attention.spec import CachedDecoding, RecurrentDecoding
from tfx_jax.functional.search import BeamInvariant
from tfx_jax.nn.attention import (
    AttentionFn,
    KVCache,
    LearnedAttention,
    MultiHeadAttention,
    decoding_of,
    logit_options,
    with_positions,
)
from tfx_jax.nn.basic import FeedForward, Linear
from tfx_jax.nn.fused_linear import FusedFeedForward, FusedLinear
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.lora import merged
from tfx_jax.nn.moe import MixtureOfExperts
from tfx_jax.nn.stack import LayerGroup, map_layers, unstack_layers


class FusedKVCache(NamedTuple):
    """Keys and values in the layout of the products of each head: heads first, keys transposed.

    With W beams and room for L tokens, S = L * W: the entries of all beams of an input for one token are adjacent, and
    never move.
    """

    key: Float[Array, "B K H S"]
    value: Float[Array, "B K S U"]

    @classmethod
    def of(cls, key: Float[Array, "B S K H"], value: Float[Array, "B S K U"]) -> "FusedKVCache":
        """Converts the keys and values of `MultiHeadAttention.project_memory`."""
        return cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))

    @classmethod
    def of_memory(cls, layers: DecoderLayer, memory: Float[Array, "B S D"]) -> "list[FusedKVCache]":
        """Projects the encoder's output to the keys and values of the cross-attention of each layer of a stack."""
        stacked = map_layers(lambda layer: layer.cross_attention.project_memory(memory), layers)
        return [cls.of(*layer) for layer in zip(*stacked, strict=True)]

    def append(self, newest: "FusedKVCache", position: Int[Array, ""]) -> "FusedKVCache":
        """Writes the entries of all W beams at token `position`, as one block: otherwise XLA would copy the cache."""
        start = position * newest.key.shape[-1]
        return FusedKVCache(
            jax.lax.dynamic_update_slice_in_dim(self.key, newest.key, start, 3),
            jax.lax.dynamic_update_slice_in_dim(self.value, newest.value, start, 2),
        )

    def keys_and_values(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Returns keys and values in the layout of attention functions; XLA compiles this without a copy."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


class ConvolvedPast(NamedTuple):
    """Past of a layer with a short convolution: that of its attention, and the last tokens before the convolution."""

    past: Any
    recent: dict[str, Float[Array, "R W-1 heads _"]]


class FusedDecoderLayer(nnx.Module):
    """A layer of a decoder or of a language model that processes one token per row."""

    def __init__(self, layer: DecoderLayer | EncoderLayer, *, int8: bool = False):
        """Rearranges the weights of a layer.

        Args:
          layer: the trained layer; it is not changed.
          int8: whether weights are quantized to int8, see `tfx_jax.functional.int8_product`.
        """
        layer = merged(layer)
        attention, feed_forward = layer.self_attention, layer.feed_forward
        linear = functools.partial(FusedLinear, dtype=feed_forward.dtype, int8=int8)
        self.query_key_value = linear(*_joined(attention.query, attention.key, attention.value))
        self.self_out = linear(*_joined(attention.out))
        self.self_residual = layer.self_attention_residual
        if isinstance(layer, DecoderLayer):
            self.cross_query = linear(*_joined(layer.cross_attention.query))
            self.cross_out = linear(*_joined(layer.cross_attention.out))
            self.cross_residual = layer.cross_attention_residual
        is_plain = isinstance(feed_forward, FeedForward)
        self.feed_forward = FusedFeedForward(feed_forward, int8=int8) if is_plain else feed_forward
        self.feed_forward_residual = layer.feed_forward_residual
        _, self.num_kv_heads, self.d_k = attention.key.kernel.shape
        self.d_v = attention.value.kernel.shape[2]
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.rotary, self.sinks = attention.rotary, attention.sinks
        self.output_gate = attention.output_gate
        convolutions = {name: getattr(attention, f"{name}_convolution") for name in ("query", "key", "value")}
        self.convolutions = nnx.Dict({name: layer for name, layer in convolutions.items() if layer is not None})
        self.gates = nnx.Dict({name: getattr(attention, f"gate_{name}") for name in attention.gate_names})
        decoding = _decoding_of(attention)
        is_recurrent = isinstance(decoding, RecurrentDecoding)
        # `decoding` is a pair in both cases; the other two functions are None.
        self.read_fn, self.step_fn = decoding if is_recurrent else (None, None)
        self.attention_fn, self.is_visible = (None, None) if is_recurrent else decoding
        self.learned = attention.attention_fn if isinstance(attention.attention_fn, LearnedAttention) else None
        self.scale, self.logits_soft_cap = attention.scale, attention.logits_soft_cap
        self.cross_attention_fn = self.cross_scale = None
        if isinstance(layer, DecoderLayer):
            cross_decoding = _decoding_of(layer.cross_attention)
            if isinstance(cross_decoding, RecurrentDecoding):
                raise ValueError(
                    "cross-attention must decode from cached keys and values, got an attention with a recurrent state"
                )
            self.cross_attention_fn, self.cross_scale = cross_decoding.attention_fn, layer.cross_attention.scale

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> KVCache:
        """Returns an empty cache of keys, values and gates."""
        gates = {name: jnp.zeros((batch_size, 0, *gate.kernel.shape[1:]), dtype) for name, gate in self.gates.items()}
        empty = KVCache.empty(batch_size, self.num_kv_heads, self.d_k, self.d_v, dtype)
        recent = {
            name: jnp.zeros((batch_size, layer.kernel.shape[0] - 1, *layer.kernel.shape[1:]), dtype)
            for name, layer in self.convolutions.items()
        }
        return empty._replace(gates=gates, recent=recent or None)

    def init_cache(
        self, past: KVCache, is_past: Bool[Array, "B P"] | None, *, max_new_tokens: int, num_beams: int
    ) -> "FusedKVCache | Any":
        """Returns the `past` of the first `__call__`: a cache with room for `max_new_tokens`, or a recurrent state."""
        if self.read_fn is None:
            state = _extended_cache(FusedKVCache.of(past.key, past.value), max_new_tokens, num_beams)
        else:
            mask = None if is_past is None else is_past[:, None, None, :]
            state = self.read_fn(past.key, past.value, mask, **(past.gates or {}), **self._parameters(past.key.dtype))
        return state if past.recent is None else ConvolvedPast(state, past.recent)

    def _parameters(self, dtype: DTypeLike) -> dict[str, Array]:
        """Returns the attention's own parameters and state as options; empty for most attentions."""
        return {} if self.learned is None else self.learned.arrays(dtype)

    def __call__(
        self,
        x: Float[Array, "R 1 D"],
        past: Any,
        position: Int[Array, ""],
        mask: Bool[Array, "B 1 W S"],
        memory: FusedKVCache | None = None,
        memory_mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Int[Array, "#B 1"] | None = None,
    ) -> tuple[Float[Array, "R 1 D"], Any]:
        """Processes one token per row.

        Args:
          x: the newest token of each row; R = B * W rows, the W beams of an input next to each other.
          past: keys and values of all beams so far, [B, K, H, S] and [B, K, S, U], S = L * W, with room for L tokens;
            or the recurrent state of each row, for an attention that decodes from one. With a short convolution a
            `ConvolvedPast` of either.
          position: number of tokens in the cache; x is written there.
          mask: which keys of an input belong to the tokens of each beam, x included.
          memory: projected keys and values of the encoder's output, [B, K, H, S] and [B, K, S, U]; None for a layer
            without an encoder.
          memory_mask: True for visible keys of the memory, [B, 1, 1, S].
          bias: bias of the self-attention, broadcastable to [B, N, W, S].
          positions: position of the newest token in its sequence, for rotary positions; None means `position`.

        Returns:
          The layer's output and the extended past.
        """
        shape, beams = x.shape, (mask.shape[0], x.shape[0] // mask.shape[0])

        recent = {}
        if isinstance(past, ConvolvedPast):
            past, recent = past

        def attend_self(x: Array) -> tuple[Array, Any]:
            # The beams of an input are the queries of one attention to the keys of all its beams; the mask selects.
            joined = self.query_key_value(x).reshape(*beams, -1)
            value_start = joined.shape[-1] - self.num_kv_heads * self.d_v
            parts = jnp.split(joined, [value_start - self.num_kv_heads * self.d_k, value_start], axis=-1)
            query, key, value = (
                part.reshape(*beams, -1, size) for part, size in zip(parts, (self.d_k, self.d_k, self.d_v), strict=True)
            )
            newest = {}
            if self.convolutions:
                parts = {"query": query, "key": key, "value": value}
                rows = {name: part.reshape(*shape[:2], *part.shape[2:]) for name, part in parts.items()}
                newest = {name: self.convolutions[name].last_tokens(x, recent[name]) for name, x in rows.items()}
                rows = {name: self.convolutions[name](x, recent[name]) for name, x in rows.items()}
                query, key, value = (rows[name].reshape(parts[name].shape) for name in ("query", "key", "value"))
            token_positions = jnp.broadcast_to(position if positions is None else positions, beams)
            query = with_positions(query, self.query_norm, self.rotary, token_positions)
            key = with_positions(key, self.key_norm, self.rotary, token_positions)
            options = logit_options(self)
            if self.step_fn is not None:
                options |= {name: gate(x) for name, gate in self.gates.items()} | self._parameters(x.dtype)
                rows = (part.reshape(*shape[:2], *part.shape[2:]) for part in (query, key, value))
                context, extended = self.step_fn(past, *rows, **options)
            else:
                extended = past.append(FusedKVCache.of(key, value), position)
                attend = cast(AttentionFn, self.attention_fn)
                context = attend(query, *extended.keys_and_values(), bias, mask=mask, **options)
            extended = ConvolvedPast(extended, newest) if newest else extended
            context = context.reshape(*shape[:2], -1)
            if self.output_gate is not None:
                context = context * jax.nn.sigmoid(self.output_gate(x)).reshape(context.shape)
            return self.self_out(context), extended

        def attend_memory(attend: AttentionFn, memory: FusedKVCache, x: Array) -> tuple[Array, None]:
            query = self.cross_query(x).reshape(*beams, -1, memory.key.shape[2])
            context = attend(query, *memory.keys_and_values(), mask=memory_mask, **_scaled(self.cross_scale))
            return self.cross_out(context.reshape(*shape[:2], -1)), None

        attend_cross = self.cross_attention_fn
        if (attend_cross is None) != (memory is None):
            if memory is None:
                raise ValueError("this layer has cross-attention: pass the encoder's output as memory")
            raise ValueError("this layer has no cross-attention: pass memory=None")
        x, extended = self.self_residual(attend_self, x)
        if attend_cross is not None and memory is not None:
            x, _ = self.cross_residual(functools.partial(attend_memory, attend_cross, memory), x)
        x, _ = self.feed_forward_residual(lambda x: (self.feed_forward(x), None), x)
        return x, extended


class FusedDecoder(nnx.Module):
    """The layers and the output layer of a decoder or of a language model, rearranged for decoding."""

    def __init__(
        self,
        layers: DecoderLayer | EncoderLayer,
        kernel: Float[Array, "D V"],
        bias: Float[Array, " V"] | None = None,
        *,
        dtype: DTypeLike,
        int8: bool,
    ):
        self.steps = nnx.List([FusedDecoderLayer(layer, int8=int8) for layer in unstack_layers(layers)])
        self.output = FusedLinear(kernel, bias, dtype=dtype, int8=int8)


def fuse_for_decoding(
    layers: DecoderLayer | EncoderLayer,
    table: Float[Array, "V D"],
    bias: Float[Array, " V"] | None = None,
    *,
    dtype: DTypeLike,
    int8: bool,
) -> FusedDecoder | None:
    """Rearranges weights for decoding, in one compiled program. Call it once, before decoding.

    Args:
      layers: a stack of layers.
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
    if (obstacle := fusing_obstacle(layers)) is None:
        return _fuse(layers, table, bias, dtype=dtype, int8=int8)
    if int8:
        raise UserError(f"int8 needs a model whose attention decodes from a cache: leave int8 out ({obstacle})")
    _warn_of_slow_decoding(obstacle)
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "int8"))
def _fuse(layers: Any, table: Array, bias: Array | None, *, dtype: DTypeLike, int8: bool) -> FusedDecoder:
    return FusedDecoder(layers, table.T, bias, dtype=dtype, int8=int8)


class DecodingConstants(NamedTuple):
    """Arrays that every decoding step reads and none changes.

    Attributes:
      inputs: indices 0 .. B - 1 of the inputs; only its shape is used.
      beams: indices 0 .. W - 1 of an input's beams; only its shape is used.
      exists: False for padding of the prompt, True for its tokens and for new ones, [B, P + max_new_tokens]; None means
        that there is no padding.
      positions: position of each token in its sequence, without padding, [B, P + max_new_tokens]; None without padding.
      memories: for each layer, the keys and values of the encoder's output, or None.
      memory_mask: True for visible keys of the memories, [B, 1, 1, S].
    """

    inputs: Int[Array, " B"]
    beams: Int[Array, " W"]
    exists: Bool[Array, "B S"] | None
    positions: Int[Array, "B S"] | None
    memories: list[FusedKVCache | None]
    memory_mask: Mask | None


def init_fused_cache(
    steps: Sequence[FusedDecoderLayer],
    past: Sequence[KVCache],
    *,
    max_new_tokens: int,
    num_beams: int,
    is_past: Bool[Array, "B P"] | None = None,
    memories: Sequence[FusedKVCache | None] | None = None,
    memory_mask: Mask | None = None,
) -> dict[str, Any]:
    """Returns the cache of `fused_step`.

    Rows are the beams of the inputs, the beams of an input next to each other. Keys and values stay where a beam wrote
    them. Beam search reorders only `beam_ancestry`, which says which beam wrote each token of a row.

    Args:
      steps: the layers.
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
        exists=exists,
        positions=None if exists is None else jnp.cumsum(exists, axis=1) - 1,
        memories=[None] * len(past) if memories is None else list(memories),
        memory_mask=memory_mask,
    )
    pasts = [
        step.init_cache(layer_past, is_past, max_new_tokens=max_new_tokens, num_beams=num_beams)
        for step, layer_past in zip(steps, past, strict=True)
    ]
    return {
        "position": jnp.full((), num_past, jnp.int32),
        # Which beam wrote each token of a row. The prompt is stored once, as if the first beam had written it.
        "beam_ancestry": jnp.zeros((batch_size, num_past + max_new_tokens), jnp.int32),
        "past": BeamInvariant([_split_past(past)[0] for past in pasts]),
        "states": [_split_past(past)[1] for past in pasts],
        "constants": BeamInvariant(constants),
    }


def fused_step(
    steps: Sequence[FusedDecoderLayer],
    embed: Callable[[Int[Array, " R"], Int[Array, "*rows"]], Float[Array, "R 1 D"]],
    score: Callable[[Float[Array, "R 1 D"]], Float[Array, "R V"]],
    tokens: Int[Array, " R"],
    cache: dict[str, Any],
    *,
    bias: Callable[[Int[Array, ""], int], Float[Array, "L N 1 S"]] | None = None,
) -> tuple[Float[Array, "R V"], dict[str, Any]]:
    """Processes one token per row through all layers, as `tfx_jax.nn.decoding.Decoder.step` does.

    Args:
      steps: the layers.
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
    batch_size, num_beams, length = constants.inputs.shape[0], constants.beams.shape[0], beam_ancestry.shape[1]
    if tokens.shape[0] != batch_size * num_beams:
        raise ValueError(
            f"tokens must have batch size * num_beams = {batch_size} * {num_beams} rows, got {tokens.shape[0]}"
        )
    beams, indices = jnp.arange(num_beams), jnp.arange(length)
    exists = jnp.ones((1, length), bool) if constants.exists is None else constants.exists
    positions = indices[None] if constants.positions is None else constants.positions
    newest = jax.lax.dynamic_slice_in_dim(positions, position, 1, axis=1)  # position of the newest token
    beam_ancestry = beam_ancestry.at[:, position].set(jnp.tile(beams, batch_size))
    is_of_beam = beam_ancestry.reshape(batch_size, num_beams, -1, 1) == beams[None, None, None]  # [B, W, L, W]
    is_written = exists & (indices <= position)[None]

    def mask(is_visible: Any) -> Bool[Array, "B 1 W S"]:
        """Returns which entries of the cache each beam sees; an `is_visible` of None hides no position."""
        is_seen = is_written if is_visible is None else is_written & is_visible(newest, positions)
        return (is_of_beam & is_seen[:, None, :, None]).reshape(batch_size, 1, num_beams, -1)

    # One mask for each different visibility of the layers' attentions.
    masks = {is_visible: mask(is_visible) for is_visible in dict.fromkeys(step.is_visible for step in steps)}
    biases: list[Array | None] = [None] * len(steps)
    if bias is not None:
        layer_biases = jnp.repeat(bias(position, length), num_beams, axis=-1)
        # The leading axis has one entry for each layer, or one for all.
        biases = [layer_biases[index % len(layer_biases)][None] for index in range(len(steps))]
    x = embed(tokens, position if constants.positions is None else jnp.repeat(newest[:, 0], num_beams))
    pasts, states = [], []
    for step, layer_cache, state, memory, layer_bias in zip(
        steps, cache["past"].value, cache["states"], constants.memories, biases, strict=True
    ):
        x, extended = step(
            x,
            _joined_past(layer_cache, state),
            position,
            masks[step.is_visible],
            memory,
            constants.memory_mask,
            layer_bias,
            positions=newest,
        )
        layer_cache, state = _split_past(extended)
        pasts.append(layer_cache)
        states.append(state)
    new_cache = {"position": position + 1, "beam_ancestry": beam_ancestry}
    return score(x), cache | new_cache | {"past": BeamInvariant(pasts), "states": states}


def _split_past(past: Any) -> tuple[FusedKVCache | None, Any]:
    """Splits a layer's past into what stays when beams are reordered, keys and values, and the state of each row."""
    if isinstance(past, FusedKVCache):
        return past, None
    if isinstance(past, ConvolvedPast) and isinstance(past.past, FusedKVCache):
        return past.past, past._replace(past=None)
    return None, past


def _joined_past(cache: FusedKVCache | None, state: Any) -> Any:
    """Returns the past that `_split_past` split."""
    if cache is None:
        return state
    return cache if state is None else ConvolvedPast(cache, state.recent)


def _extended_cache(past: FusedKVCache, max_new_tokens: int, num_beams: int) -> FusedKVCache:
    """Adds a beam axis to keys [B, K, H, P] and values [B, K, P, U], appends empty entries, and flattens to S."""
    key, value = past.key[..., None], past.value[:, :, :, None]
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, max_new_tokens), (0, num_beams - 1)))
    value = jnp.pad(value, ((0, 0), (0, 0), (0, max_new_tokens), (0, num_beams - 1), (0, 0)))
    return FusedKVCache(key.reshape(*key.shape[:3], -1), value.reshape(*value.shape[:2], -1, value.shape[-1]))


def fusing_obstacle(layers: Any) -> str | None:
    """Returns why `FusedDecoderLayer` cannot replace a layer or a stack of layers; None if it can.

    It can replace the layer classes of this package, but no subclasses, with attentions that have an
    `AttentionSpec.decoding`.
    """
    if type(layers) is LayerGroup:
        return next(filter(None, map(fusing_obstacle, layers.layers)), None)
    known = {
        "": (EncoderLayer, DecoderLayer),
        "feed_forward": (FeedForward, MixtureOfExperts),
        "self_attention_residual": (Residual,),
        "self_attention": (MultiHeadAttention,),
        "cross_attention": (MultiHeadAttention,),
    }
    for name, kinds in known.items():
        part = getattr(layers, name, None) if name else layers
        if part is not None and type(part) not in kinds:
            required = " or ".join(kind.__name__ for kind in kinds)
            return f"{name or 'layer'} must be {required}, got {type(part).__name__}"
    for attention in (layers.self_attention, getattr(layers, "cross_attention", None)):
        if attention is not None and decoding_of(attention.attention_fn) is None:
            return f"{_name_of(attention.attention_fn)} cannot decode from a cache (it has no `AttentionSpec.decoding`)"
    if isinstance(layers, DecoderLayer) and not _is_plain(layers.cross_attention):
        return (
            "cross-attention must have only projections and a scale: no norms, rotary positions, sinks, soft cap, "
            "convolution or output gate"
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
    logging.warning("decoding is slow, because each new token processes all earlier tokens again: %s", obstacle)


def _is_plain(cross: MultiHeadAttention) -> bool:
    """Whether cross-attention has only projections and a scale, which is all that the fused layer supports."""
    others = (cross.query_norm, cross.key_norm, cross.rotary, cross.sinks, cross.logits_soft_cap)
    others += (cross.query_convolution, cross.output_gate)
    is_recurrent = isinstance(decoding_of(cross.attention_fn), RecurrentDecoding)
    return not is_recurrent and all(other is None for other in others)


def _decoding_of(attention: MultiHeadAttention) -> CachedDecoding | RecurrentDecoding:
    """Returns the decoding of an attention; raises ValueError if it has none."""
    decoding = decoding_of(attention.attention_fn)
    if decoding is None:
        raise ValueError(f"{attention.attention_fn} cannot decode from a cache: it has no `AttentionSpec.decoding`")
    return decoding


def _scaled(scale: float | None) -> dict[str, float]:
    """Returns the scale as an option. It is not bound by a partial, which would hide the parameters of a module."""
    return {} if scale is None else {"scale": scale}


def _joined(*projections: Linear) -> tuple[Float[Array, "D N"], Float[Array, " N"] | None]:
    """Returns kernel and bias of one fused projection for several projections of the same input; flattens heads."""
    kernels = [projection.kernel[...].reshape(math.prod(projection.in_features), -1) for projection in projections]
    biases = [projection.bias[...].reshape(-1) for projection in projections if projection.bias is not None]
    return jnp.concatenate(kernels, axis=1), jnp.concatenate(biases) if biases else None
