"""Decoder layers in the form in which they take one token at a time.

Training wants parameters that shard and restore well: a stack of layers, a projection each for query, key and value. A
step of decoding has a few rows, and its time is that of reading the weights: here they are one layer after the other,
with one matrix where the inputs are the same, transposed as they are read, and of eight bits if wanted.
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
from tfx_jax.functional.attention.masks import Bias, Mask
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
    """Keys and values with the heads in front and the keys transposed, as the products of each head want them.

    Of W beams, S = L * W: what the beams of a sentence write for a token lies side by side and never moves.
    """

    key: Float[Array, "B K H S"]
    value: Float[Array, "B K S U"]

    @classmethod
    def of(cls, key: Float[Array, "B S K H"], value: Float[Array, "B S K U"]) -> "FusedKVCache":
        """Arranges what `MultiHeadAttention.project_memory` returns."""
        return cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))

    @classmethod
    def of_memory(cls, layers: DecoderLayer, memory: Float[Array, "B S D"]) -> "list[FusedKVCache]":
        """What each layer of a stack attends to in the encoder's output, projected once."""
        stacked = map_layers(lambda layer: layer.cross_attention.project_memory(memory), layers)
        return [cls.of(*layer) for layer in zip(*stacked, strict=True)]

    def append(self, newest: "FusedKVCache", position: Int[Array, ""]) -> "FusedKVCache":
        """Writes those of W beams as one block: for anything else XLA would copy all of the past."""
        start = position * newest.key.shape[-1]
        return FusedKVCache(
            jax.lax.dynamic_update_slice_in_dim(self.key, newest.key, start, 3),
            jax.lax.dynamic_update_slice_in_dim(self.value, newest.value, start, 2),
        )

    def arranged(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """The arguments of an attention function, for which XLA has nothing to move."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


class FusedDecoderLayer(nnx.Module):
    """A layer of a decoder or of a language model that extends every row by one token."""

    def __init__(self, layer: DecoderLayer | EncoderLayer, *, int8: bool = False):
        """Rearranges the weights of a layer.

        Args:
          layer: what was trained; it stays as it is.
          int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`.
        """
        layer = merged(layer)
        own, feed_forward = layer.self_attention, layer.feed_forward
        product = functools.partial(FusedLinear, dtype=feed_forward.dtype, int8=int8)
        self.query_key_value = product(*_joined(own.query, own.key, own.value))
        self.own_out = product(*_joined(own.out))
        self.own_residual = layer.self_attention_residual
        if isinstance(layer, DecoderLayer):
            self.cross_query = product(*_joined(layer.cross_attention.query))
            self.cross_out = product(*_joined(layer.cross_attention.out))
            self.cross_residual = layer.cross_attention_residual
        is_plain = isinstance(feed_forward, FeedForward)
        self.feed_forward = FusedFeedForward(feed_forward, int8=int8) if is_plain else feed_forward
        self.feed_forward_residual = layer.feed_forward_residual
        self.num_kv_heads, self.d_k, self.d_v = (
            own.key.kernel.shape[1],
            own.key.kernel.shape[2],
            own.value.kernel.shape[2],
        )
        self.query_norm, self.key_norm, self.rotary, self.sinks = own.query_norm, own.key_norm, own.rotary, own.sinks
        self.gates = nnx.Dict({name: getattr(own, f"gate_{name}") for name in own.gate_names})
        decoding = _decoding_of(own)
        is_recurrent = isinstance(decoding, RecurrentDecoding)
        self.read_fn, self.step_fn = decoding if is_recurrent else (None, None)
        self.attention_fn, self.is_visible = (None, None) if is_recurrent else decoding
        self.learned = own.attention_fn if isinstance(own.attention_fn, LearnedAttention) else None
        self.scale, self.logits_soft_cap = own.scale, own.logits_soft_cap
        self.cross_attention_fn = self.cross_scale = None
        if isinstance(layer, DecoderLayer):
            cross_decoding = _decoding_of(layer.cross_attention)
            if isinstance(cross_decoding, RecurrentDecoding):
                raise ValueError("attention to an encoder's output decodes from its keys and values")
            self.cross_attention_fn, self.cross_scale = cross_decoding.attention_fn, layer.cross_attention.scale

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> KVCache:
        """Returns the keys, values and gates of no token."""
        gates = {name: jnp.zeros((batch_size, 0, *gate.kernel.shape[1:]), dtype) for name, gate in self.gates.items()}
        empty = KVCache.empty(batch_size, self.num_kv_heads, self.d_k, self.d_v, dtype)
        return empty._replace(gates=gates)

    def init_cache(
        self, past: KVCache, is_past: Bool[Array, "B P"] | None, *, room: int, num_beams: int
    ) -> "FusedKVCache | Any":
        """Returns what `__call__` takes as `past`: a cache with room for more tokens, or a state of constant size."""
        if self.read_fn is None:
            return _with_room(FusedKVCache.of(past.key, past.value), room, num_beams)
        mask = None if is_past is None else is_past[:, None, None, :]
        return self.read_fn(past.key, past.value, mask, **(past.gates or {}), **self._parameters(past.key.dtype))

    def _parameters(self, dtype: DTypeLike) -> dict[str, Array]:
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
        """Takes one token a row.

        Args:
          x: the newest token of each row; R = B * W rows, the W beams of one sentence next to each other.
          past: keys and values of all beams so far, [B, K, H, S] and [B, K, S, U], S = L * W, with room for L tokens;
            or the state of each row, of an attention that decodes from one.
          position: how many tokens they hold; x is written there.
          mask: which of the keys of a sentence are of tokens that a beam consists of, x among them.
          memory: projected keys and values of the encoder's output, [B, K, H, S] and [B, K, S, U]; None for a layer
            without an encoder.
          memory_mask: which of them exist, [B, 1, 1, S].
          bias: of the attention to the past, broadcastable to [B, N, W, S].
          positions: of the newest token of each sentence in its text, for rotary positions; None means `position`.

        Returns:
          The layer's output and the longer past.
        """
        shape, beams = x.shape, (mask.shape[0], x.shape[0] // mask.shape[0])

        def attend_own(x: Array) -> tuple[Array, Any]:
            # The beams of a sentence are the queries of one attention to what any of them has seen.
            joined = self.query_key_value(x).reshape(*beams, -1)
            value_start = joined.shape[-1] - self.num_kv_heads * self.d_v
            parts = jnp.split(joined, [value_start - self.num_kv_heads * self.d_k, value_start], axis=-1)
            query, key, value = (
                part.reshape(*beams, -1, size) for part, size in zip(parts, (self.d_k, self.d_k, self.d_v), strict=True)
            )
            at = jnp.broadcast_to(position if positions is None else positions, beams)
            query = with_positions(query, self.query_norm, self.rotary, at)
            key = with_positions(key, self.key_norm, self.rotary, at)
            options = logit_options(self)
            if self.step_fn is not None:
                options |= {name: gate(x) for name, gate in self.gates.items()} | self._parameters(x.dtype)
                rows = (part.reshape(*shape[:2], *part.shape[2:]) for part in (query, key, value))
                context, longer = self.step_fn(past, *rows, **options)
            else:
                longer = past.append(FusedKVCache.of(key, value), position)
                context = cast(AttentionFn, self.attention_fn)(query, *longer.arranged(), bias, mask=mask, **options)
            return self.own_out(context.reshape(*shape[:2], -1)), longer

        def attend_memory(attend: AttentionFn, memory: FusedKVCache, x: Array) -> tuple[Array, None]:
            query = self.cross_query(x).reshape(*beams, -1, memory.key.shape[2])
            context = attend(query, *memory.arranged(), mask=memory_mask, **_scaled(self.cross_scale))
            return self.cross_out(context.reshape(*shape[:2], -1)), None

        attend_cross = self.cross_attention_fn
        if (attend_cross is None) != (memory is None):
            raise ValueError("a decoder layer takes the memory of an encoder, a layer without an encoder takes none")
        x, longer = self.own_residual(attend_own, x)
        if attend_cross is not None and memory is not None:
            x, _ = self.cross_residual(functools.partial(attend_memory, attend_cross, memory), x)
        x, _ = self.feed_forward_residual(lambda x: (self.feed_forward(x), None), x)
        return x, longer


class FusedDecoder(nnx.Module):
    """The layers of a decoder or of a language model, and its output layer, all as a step reads them."""

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


def arrange(
    layers: DecoderLayer | EncoderLayer,
    table: Float[Array, "V D"],
    bias: Float[Array, " V"] | None = None,
    *,
    dtype: DTypeLike,
    int8: bool,
) -> FusedDecoder | None:
    """Arranges weights for decoding, in one program: worth it once for all that will be decoded with them.

    Args:
      layers: a stack of them.
      table: of the output layer, a vector for each token.
      bias: likewise.
      dtype: of the output layer's computation.
      int8: whether products with weights are of integers, see `tfx_jax.functional.int8_product`.

    Returns:
      None if the attention needs all tokens at every step, so that the model itself decodes; a warning says why.

    Raises:
      UserError: if integers are asked of such a model.
    """
    if (obstacle := fusing_obstacle(layers)) is None:
        return _arrange(layers, table, bias, dtype=dtype, int8=int8)
    if int8:
        raise UserError(
            f"int8 is for models whose attention decodes from cached keys and values: leave it out ({obstacle})"
        )
    _warn_of_slow_decoding(obstacle)
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "int8"))
def _arrange(layers: Any, table: Array, bias: Array | None, *, dtype: DTypeLike, int8: bool) -> FusedDecoder:
    return FusedDecoder(layers, table.T, bias, dtype=dtype, int8=int8)


class Given(NamedTuple):
    """What every step reads and none changes.

    Attributes:
      sentences: their numbers.
      beams: the numbers of a sentence's beams.
      exists: which of the P tokens of a prompt and of the room behind them there are; None means all.
      positions: how many tokens exist before each, [B, P + room]; None where nothing was read before.
      memories: of each layer the keys and values of the encoder's output, or None.
      memory_mask: which of these exist, [B, 1, 1, S].
    """

    sentences: Int[Array, " B"]
    beams: Int[Array, " W"]
    exists: Bool[Array, "B S"] | None
    positions: Int[Array, "B S"] | None
    memories: list[FusedKVCache | None]
    memory_mask: Mask | None


def init_fused_cache(
    steps: Sequence[FusedDecoderLayer],
    past: Sequence[KVCache],
    *,
    room: int,
    num_beams: int,
    is_past: Bool[Array, "B P"] | None = None,
    memories: Sequence[FusedKVCache | None] | None = None,
    memory_mask: Mask | None = None,
) -> dict[str, Any]:
    """Makes the cache of `fused_step`.

    Rows are the beams of the sentences, those of a sentence next to each other. Keys and values stay where a beam has
    written them: what follows the beams is a table of who wrote which token of each.

    Args:
      steps: the layers.
      past: of each layer the keys, values and gates of the P tokens that were read before; P may be 0.
      room: how many tokens the cache has room for beside these.
      num_beams: W, rows of each sentence.
      is_past: which of the P exist; None means all.
      memories: of each layer the keys and values of the encoder's output; None where there is none.
      memory_mask: which of these exist, [B, 1, 1, S].

    Returns:
      The cache of B rows.
    """
    batch_size, num_past = past[0].key.shape[:2]
    exists = None if is_past is None else jnp.pad(is_past, ((0, 0), (0, room)), constant_values=True)
    given = Given(
        sentences=jnp.arange(batch_size),
        beams=jnp.arange(num_beams),
        exists=exists,
        positions=None if exists is None else jnp.cumsum(exists, axis=1) - 1,
        memories=[None] * len(past) if memories is None else list(memories),
        memory_mask=memory_mask,
    )
    pasts = [
        step.init_cache(layer_past, is_past, room=room, num_beams=num_beams)
        for step, layer_past in zip(steps, past, strict=True)
    ]
    return {
        "position": jnp.full((), num_past, jnp.int32),
        # Which beam wrote each token of a row; what was read before counts as the first beam's, for all of them.
        "beam_ancestry": jnp.zeros((batch_size, num_past + room), jnp.int32),
        "past": BeamInvariant([past if isinstance(past, FusedKVCache) else None for past in pasts]),
        "states": [None if isinstance(past, FusedKVCache) else past for past in pasts],
        "given": BeamInvariant(given),
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
    """Takes one token a row through all layers, as `tfx_jax.nn.decoding.Decoder.step` does.

    Args:
      steps: the layers.
      embed: from tokens and their positions to the input of the first layer; a position for each row if something was
        read before, else one for all.
      score: from the output of the last layer to float32 logits.
      tokens: the newest of each row.
      cache: of `init_fused_cache`.
      bias: from the place of a token, and how many there are, to the bias of its attention to all places: one for each
        layer, or one for all.

    Returns:
      Logits and the next step's cache.
    """
    position, beam_ancestry, given = cache["position"], cache["beam_ancestry"], cache["given"].value
    batch_size, num_places = given.sentences.shape[0], beam_ancestry.shape[1]
    num_beams = given.beams.shape[0]
    if tokens.shape[0] != batch_size * num_beams:
        raise ValueError(f"{tokens.shape[0]} rows for {batch_size} sentences of num_beams={num_beams}")
    beams, places = jnp.arange(num_beams), jnp.arange(num_places)
    exists = jnp.ones((1, num_places), bool) if given.exists is None else given.exists
    positions = places[None] if given.positions is None else given.positions
    newest = jax.lax.dynamic_slice_in_dim(positions, position, 1, axis=1)
    beam_ancestry = beam_ancestry.at[:, position].set(jnp.tile(beams, batch_size))
    is_own = beam_ancestry.reshape(batch_size, num_beams, -1, 1) == beams[None, None, None]
    is_there = exists & (places <= position)[None]

    def mask(is_visible: Any) -> Bool[Array, "B 1 W S"]:
        is_seen = is_there if is_visible is None else is_there & is_visible(newest, positions)
        return (is_own & is_seen[:, None, :, None]).reshape(batch_size, 1, num_beams, -1)

    masks = {is_visible: mask(is_visible) for is_visible in dict.fromkeys(step.is_visible for step in steps)}
    biases: list[Array | None] = [None] * len(steps)
    if bias is not None:
        place_bias = jnp.repeat(bias(position, num_places), num_beams, axis=-1)
        biases = [place_bias[index % len(place_bias)][None] for index in range(len(steps))]
    x = embed(tokens, position if given.positions is None else jnp.repeat(newest[:, 0], num_beams))
    pasts, states = [], []
    for step, layer_past, state, memory, own_bias in zip(
        steps, cache["past"].value, cache["states"], given.memories, biases, strict=True
    ):
        own = state if layer_past is None else layer_past
        of_memory = memory, given.memory_mask, own_bias
        x, longer = step(x, own, position, masks[step.is_visible], *of_memory, positions=newest)
        pasts.append(None if layer_past is None else longer)
        states.append(longer if layer_past is None else None)
    longer = {"past": BeamInvariant(pasts), "states": states}
    return score(x), cache | {"position": position + 1, "beam_ancestry": beam_ancestry} | longer


def _with_room(past: FusedKVCache, room: int, num_beams: int) -> FusedKVCache:
    """Lays keys and values [B, K, H, P] and [B, K, P, U] out with a place for every beam, and appends empty places."""
    key, value = past.key[..., None], past.value[:, :, :, None]
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, room), (0, num_beams - 1)))
    value = jnp.pad(value, ((0, 0), (0, 0), (0, room), (0, num_beams - 1), (0, 0)))
    return FusedKVCache(key.reshape(*key.shape[:3], -1), value.reshape(*value.shape[:2], -1, value.shape[-1]))


def fusing_obstacle(layers: Any) -> str | None:
    """Returns why `FusedDecoderLayer` does not compute what a layer, or a stack of layers, computes; None if it does.

    It knows the classes of this package and the attentions that score each pair of positions by itself; of a subclass
    it knows nothing.
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
            return f"{type(part).__name__} is not {' or '.join(kind.__name__ for kind in kinds)}"
    for attention in (layers.self_attention, getattr(layers, "cross_attention", None)):
        if attention is not None and decoding_of(attention.attention_fn) is None:
            return f"{_name_of(attention.attention_fn)} has no form for one token (`AttentionSpec.decoding`)"
    if isinstance(layers, DecoderLayer) and not _is_plain(layers.cross_attention):
        return "attention to the encoder's output has more than projections and a scale"
    return None


def _name_of(attention_fn: Any) -> str:
    if isinstance(attention_fn, LearnedAttention):
        return f"{attention_fn.name} attention"
    function = getattr(attention_fn, "func", attention_fn)  # of a partial
    return getattr(function, "__name__", type(function).__name__)


@functools.cache
def _warn_of_slow_decoding(obstacle: str) -> None:
    logging.warning("each new token reads all tokens before it again: %s", obstacle)


def _is_plain(cross: MultiHeadAttention) -> bool:
    """Whether attention to an encoder's output has projections and a scale alone, as the fused layer computes it."""
    others = (cross.query_norm, cross.key_norm, cross.rotary, cross.sinks, cross.logits_soft_cap)
    is_recurrent = isinstance(decoding_of(cross.attention_fn), RecurrentDecoding)
    return not is_recurrent and all(other is None for other in others)


def _decoding_of(attention: MultiHeadAttention) -> CachedDecoding | RecurrentDecoding:
    """Returns how one token of each row attends.

    Raises:
      ValueError: if the attention has to read all tokens.
    """
    decoding = decoding_of(attention.attention_fn)
    if decoding is None:
        raise ValueError(f"{attention.attention_fn} does not decode from cached keys and values")
    return decoding


def _scaled(scale: float | None) -> dict[str, float]:
    """Options of an attention function. Not bound to it, for it may be a module, whose parameters a partial hides."""
    return {} if scale is None else {"scale": scale}


def _joined(*projections: Linear) -> tuple[Float[Array, "D N"], Float[Array, " N"] | None]:
    """Kernel and bias of one product for several projections of the same inputs; heads are flattened."""
    kernels = [projection.kernel[...].reshape(math.prod(projection.in_features), -1) for projection in projections]
    biases = [projection.bias[...].reshape(-1) for projection in projections if projection.bias is not None]
    return jnp.concatenate(kernels, axis=1), jnp.concatenate(biases) if biases else None
