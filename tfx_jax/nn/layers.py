"""Encoder and decoder layers (Vaswani et al., 2017, section 3.1): a call for sequences, and a step for one token.

A layer is composed of sublayers that the caller makes. Its call is for training and for prompts. A step has few rows,
and reading the weights takes most of its time. `fused` returns the layer for it: its sublayers are replaced by those at
the end of this file, which have projections of the same input in one matrix, weights in the layout in which they are
read, and int8 weights on request. `quantized` returns the layer whose call multiplies with int8 weights.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.signature import Bias, Mask
from tfx_jax.functional.attention.spec import CachedDecoding, RecurrentDecoding
from tfx_jax.functional.layers import gated_units, int8_product, quantize_rows
from tfx_jax.nn.attention import (
    AttentionFn,
    KVCache,
    LearnedAttention,
    MultiHeadAttention,
    decoding_of,
    gated,
    logit_options,
    repeated,
    with_positions,
)
from tfx_jax.nn.basic import FeedForward, LayerNorm, Linear, drop
from tfx_jax.nn.lora import matrices_of, merged
from tfx_jax.nn.moe import MixtureOfExperts


class Residual(nnx.Module):
    """Dropout, residual connection and layer normalization around a sublayer.

    Post-norm, the paper's: norm(x + f(x)). Pre-norm (Xiong et al., 2020): x + f(norm(x)), which trains without warm-up
    and needs another norm after the last layer. `output_norm` also normalizes the output of f:
    x + output_norm(f(norm(x))) as in Gemma 2, or, without `input_norm`, x + output_norm(f(x)) as in OLMo 2. `scale`
    multiplies what is added to x: x + scale * f(norm(x)) as in Granite.
    """

    def __init__(
        self,
        d_model: int,
        *,
        dropout_rate: float = 0.0,
        pre_norm: bool = False,
        input_norm: bool = True,
        output_norm: bool = False,
        scale: float = 1.0,
        epsilon: float = 1e-6,
        make_norm: Callable[..., nnx.Module] = LayerNorm,
        param_dtype: DTypeLike = jnp.float32,
    ):
        """Initializes the norms.

        Args:
          d_model: width D.
          dropout_rate: dropout rate of the sublayer's output.
          pre_norm: whether the norm is before the sublayer instead of after the sum.
          input_norm: with `pre_norm`, whether there is a norm before the sublayer.
          output_norm: whether the output of the sublayer is normalized.
          scale: multiplies what is added to the input of the sublayer.
          epsilon: epsilon of the norms.
          make_norm: makes a norm, such as `LayerNorm`.
          param_dtype: dtype of the norms' parameters.
        """
        make = functools.partial(make_norm, d_model, epsilon=epsilon, param_dtype=param_dtype)
        self.norm = make() if input_norm or not pre_norm else None
        self.output_norm = make() if output_norm else None
        self.dropout_rate = dropout_rate
        self.pre_norm = pre_norm
        self.scale = scale

    def __call__(
        self,
        sublayer: Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]],
        x: Float[Array, "B T D"],
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        """Applies `y = sublayer(x)` with residual connection, dropout and norms."""
        return self.with_extra(lambda x: (sublayer(x), None), x, rngs)[0]

    def with_extra(
        self,
        sublayer: Callable[[Float[Array, "B T D"]], tuple[Float[Array, "B T D"], Any]],
        x: Float[Array, "B T D"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Applies a sublayer that also returns something extra, such as weights or a cache.

        Args:
          sublayer: returns the pair `y, extra`.
          x: input of the sublayer and of the residual connection.
          rngs: stream `dropout`; None means evaluation.

        Returns:
          The pair of what `__call__` returns for `y`, and `extra`.
        """
        y, extra = sublayer(self.norm(x) if self.pre_norm and self.norm is not None else x)
        y = y if self.output_norm is None else self.output_norm(y)
        y = drop(y, self.dropout_rate, rngs)
        x = x + (y if self.scale == 1.0 else self.scale * y)
        return (x if self.pre_norm or self.norm is None else self.norm(x)), extra


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward. With `is_causal` it is the layer of a language model such as GPT.

    With `is_parallel` one residual connection adds the sum of both, as in StableLM 2:
    x + attention(norm(x)) + feed_forward(norm(x)).
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feed_forward: FeedForward | MixtureOfExperts,
        make_residual: Callable[[], Residual],
        *,
        is_parallel: bool = False,
    ):
        """Composes the layer; `make_residual` makes the residual connection of each sublayer, or the one of both."""
        self.self_attention: Any = self_attention
        self.self_attention_residual = make_residual()
        self.feed_forward: Any = feed_forward
        self.feed_forward_residual = None if is_parallel else make_residual()

    def __call__(
        self,
        x: Float[Array, "B S D"],
        *,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
        return_cache: bool = False,
        token_mask: Bool[Array, "B S"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B S D"], dict[str, Any] | None]:
        """Transforms a sequence.

        Args:
          x: [B, S, D].
          rngs: stream `dropout`; None means evaluation.
          return_weights: whether to return "self" in the extras, the attention weights [B, N, S, keys].
          cache: keys and values of the tokens before `x`; the extras then have "cache", extended by those of `x`.
          return_cache: whether to return "cache" in the extras even if `cache` is None.
          token_mask: True for tokens, False for padding, which is not sent to experts; None means no padding.
          **options: options of the attention: `bias`, `mask`, `is_causal`, `segment_ids`, `positions`.

        Returns:
          The output, and a dictionary of the extras, None if it is empty.
        """

        def attend(x: Array) -> tuple[Array, dict[str, Any]]:
            requested = {"return_weights": return_weights, "return_cache": return_cache}
            return _attend(self.self_attention, x, cache, rngs=rngs, **requested, **options)

        x, extras = self._run(attend, lambda x: _transform(self.feed_forward, x, token_mask, rngs), x, rngs)
        return x, extras or None

    def _run(
        self,
        attend: Callable[[Array], tuple[Array, Any]],
        transform: Callable[[Array], Array],
        x: Array,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Array, Any]:
        """Applies both sublayers, in succession or in parallel; returns the output and the extra of `attend`."""
        if self.feed_forward_residual is not None:
            x, extra = self.self_attention_residual.with_extra(attend, x, rngs)
            return self.feed_forward_residual(transform, x, rngs), extra

        def both(x: Array) -> tuple[Array, Any]:
            y, extra = attend(x)
            return y + transform(x), extra

        return self.self_attention_residual.with_extra(both, x, rngs)

    def step(self, x: Float[Array, "R 1 D"], past: Any, **options: Any) -> tuple[Float[Array, "R 1 D"], Any]:
        """Processes one token per row; for a layer that `fused` returned.

        Args:
          x: the newest token of each row.
          past: the tokens before it, from `FusedSelfAttention.init_cache` or the previous step.
          **options: `entry`, `mask`, `positions` and `bias` of `FusedSelfAttention`.

        Returns:
          The output and the extended past.

        Raises:
          TypeError: if the layer is not from `fused`.
          ValueError: for a memory, which only a decoder layer takes.
        """
        if options.keys() & {"memory", "memory_mask"}:
            raise ValueError("this layer has no cross-attention: pass no memory")
        attend = functools.partial(_fused_part(self.self_attention), past=past, **options)
        return self._run(attend, self.feed_forward, x)


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention to the encoder's output, then feed-forward."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: FeedForward | MixtureOfExperts,
        make_residual: Callable[[], Residual],
    ):
        """Composes the layer; `make_residual` makes the residual connection of each of the three sublayers."""
        self.self_attention: Any = self_attention
        self.self_attention_residual = make_residual()
        self.cross_attention: Any = cross_attention
        self.cross_attention_residual = make_residual()
        self.feed_forward: Any = feed_forward
        self.feed_forward_residual = make_residual()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        *,
        memory_mask: Mask | None = None,
        bias: Bias | None = None,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any] | None]:
        """Transforms a target sequence.

        Args:
          x: [B, T, D].
          memory: the encoder's output, [B, S, D].
          memory_mask: True for visible positions of the memory, [B, 1, 1, S].
          bias: bias of the self-attention, broadcastable to [B, N, T, keys].
          rngs: stream `dropout`; None means evaluation.
          return_weights: whether to return "self" and "cross" in the extras, the attention weights [B, N, T, keys].
          cache: keys and values of the tokens before `x`; the extras then have "cache", extended by those of `x`.
          token_mask: True for tokens, False for padding, which is not sent to experts; None means no padding.

        Returns:
          The output, and a dictionary of the extras, None if it is empty.
        """
        options: dict[str, Any] = {"rngs": rngs, "return_weights": return_weights}

        def attend_self(x: Array) -> tuple[Array, dict[str, Any]]:
            return _attend(self.self_attention, x, cache, bias=bias, is_causal=True, **options)

        def attend_memory(x: Array) -> tuple[Array, Any]:
            return _with_extra(self.cross_attention(x, memory, mask=memory_mask, **options))

        x, extras = self.self_attention_residual.with_extra(attend_self, x, rngs)
        x, cross_weights = self.cross_attention_residual.with_extra(attend_memory, x, rngs)
        x = self.feed_forward_residual(lambda x: _transform(self.feed_forward, x, token_mask, rngs), x, rngs)
        if return_weights:
            extras["cross"] = cross_weights
        return x, extras or None

    def step(
        self,
        x: Float[Array, "R 1 D"],
        past: Any,
        memory: "FusedKVCache | None" = None,
        memory_mask: Mask | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "R 1 D"], Any]:
        """Processes one token per row, as `EncoderLayer.step` does.

        Args:
          x: the newest token of each row.
          past: the tokens before it.
          memory: keys and values of the encoder's output, from `tfx_jax.nn.decoding.project_memories`.
          memory_mask: True for visible keys of the memory, [B, 1, 1, S].
          **options: `entry`, `mask`, `positions` and `bias` of `FusedSelfAttention`.

        Raises:
          TypeError: if the layer is not from `fused`.
          ValueError: if `memory` is None.
        """
        if memory is None:
            raise ValueError("this layer has cross-attention: pass memory, from `project_memories`")
        attend = functools.partial(_fused_part(self.self_attention), past=past, **options)
        x, past = self.self_attention_residual.with_extra(attend, x)
        x = self.cross_attention_residual(lambda x: self.cross_attention(x, memory, memory_mask), x)
        x = self.feed_forward_residual(self.feed_forward, x)
        return x, past


def _attend(
    attention: MultiHeadAttention,
    x: Array,
    cache: KVCache | None,
    *,
    return_weights: bool,
    return_cache: bool = False,
    positions: Array | None = None,
    **options: Any,
) -> tuple[Array, dict[str, Any]]:
    """Computes self-attention from `x`, [B, T, D], to a cache and to `x`.

    Args:
      attention: the self-attention of a layer.
      x: normalized inputs.
      cache: keys and values of the tokens before `x`; None means no such tokens.
      return_weights: whether to return "self" in the extras.
      return_cache: whether to return "cache" in the extras even if `cache` is None.
      positions: positions of the tokens of `x`; None means 0 .. T - 1.
      **options: further options of `MultiHeadAttention.attend`.

    Returns:
      The output, and the extras "self", attention weights [B, N, T, S], and "cache", extended by `x`.
    """
    recent = None if cache is None else cache.recent
    tokens = {"mask": options.get("mask"), "segment_ids": options.get("segment_ids"), "recent": recent}
    if return_cache or cache is not None:
        new_entries = attention.project_cache(x, positions, **tokens)
    else:
        new_entries = KVCache(*attention.project_memory(x, None, positions, **tokens), attention.project_gates(x))
    extended = new_entries if cache is None else cache.append(new_entries)
    options |= {"gates": extended.gates, "positions": positions, "recent": recent, "return_weights": return_weights}
    y, weights = _with_extra(attention.attend(x, extended.key, extended.value, **options))
    extras: dict[str, Any] = {"self": weights} if return_weights else {}
    return y, extras | {"cache": extended} if return_cache or cache is not None else extras


def _transform(
    feed_forward: FeedForward | MixtureOfExperts, x: Array, token_mask: Array | None, rngs: nnx.Rngs | None
) -> Array:
    """Calls the feed-forward network or the experts; only experts need the mask of tokens."""
    if isinstance(feed_forward, MixtureOfExperts):
        return feed_forward(x, token_mask=token_mask, rngs=rngs)
    return feed_forward(x, rngs=rngs)


def _with_extra(result: Any) -> tuple[Array, Any]:
    """Returns an attention's result as (output, weights), with weights None if they were not requested."""
    return result if isinstance(result, tuple) else (result, None)


Layer = TypeVar("Layer", bound=EncoderLayer | DecoderLayer)


def fused(layer: Layer, *, int8: bool = False) -> Layer:
    """Returns a copy of a layer for its `step`, with the weights of its sublayers rearranged.

    Args:
      layer: the trained layer; it is not changed.
      int8: whether weights are quantized to int8, see `tfx_jax.functional.int8_product`; those of experts and routers
        are not.
    """
    layer = jax.tree.map(lambda x: x, merged(layer))  # a copy, whose sublayers are replaced below
    dtype = layer.feed_forward.dtype
    layer.self_attention = FusedSelfAttention(layer.self_attention, dtype=dtype, int8=int8)
    if isinstance(layer, DecoderLayer):
        layer.cross_attention = FusedCrossAttention(layer.cross_attention, dtype=dtype, int8=int8)
    if isinstance(layer.feed_forward, FeedForward):
        layer.feed_forward = FusedFeedForward(layer.feed_forward, int8=int8)
        return layer
    mixture = layer.feed_forward

    def in_dtype(leaf: Array) -> Array:
        """Rounds a matrix of the experts, [E, rows, columns], as each step would; biases are added as they are."""
        return leaf.astype(dtype) if leaf.ndim == 3 and leaf.dtype.itemsize > jnp.dtype(dtype).itemsize else leaf

    mixture.experts = jax.tree.map(in_dtype, mixture.experts)
    if mixture.shared is not None:
        mixture.shared = FusedFeedForward(mixture.shared, int8=int8)
    return layer


# Of the modules with matrices, those that `fused` quantizes as well.
_QUANTIZED = ("query_down", "query", "key", "value", "output_gate", "out", "feed_forward", "shared")


def quantized(layers: Layer) -> Layer:
    """Returns a copy of a layer, or of a stack, that multiplies in int8 with the matrices that `fused` quantizes.

    It is for many tokens at once, as a source or a prompt has; experts and routers are left as they are.
    """
    layers = jax.tree.map(lambda x: x, merged(layers))  # a copy, whose matrices are replaced below
    for path, owner, name, num_inputs, num_axes in [*matrices_of(layers)]:
        if path.split("/")[-2] not in _QUANTIZED:
            continue
        kernel = getattr(owner, name)[...]  # [*stack, *in, *out]
        num_stack_axes = kernel.ndim - num_axes
        stack, out = kernel.shape[:num_stack_axes], kernel.shape[num_stack_axes + num_inputs :]
        values, scales = quantize_rows(jnp.moveaxis(kernel.reshape(*stack, -1, *out), num_stack_axes, -1))
        setattr(owner, name, nnx.Param(values))
        setattr(owner, f"{name}_scales", nnx.Param(scales))
    return layers


def _fused_part(attention: Any) -> "FusedSelfAttention":
    """Returns the self-attention of a layer for its step; raises TypeError if the layer is not from `fused`."""
    if not isinstance(attention, FusedSelfAttention):
        raise TypeError("a step needs rearranged weights: call `step` of the layer that `fused(layer)` returns")
    return attention


class FusedKVCache(NamedTuple):
    """Keys and values in the layout of the products of each head: heads first, keys transposed.

    With W beams, S = P + M * W: one entry for each of P tokens of a prompt, then W for each of M new tokens, those of
    all beams of an input. Entries never move.
    """

    key: Float[Array, "B K H S"]
    value: Float[Array, "B K S U"]

    @classmethod
    def of(cls, key: Float[Array, "B S K H"], value: Float[Array, "B S K U"]) -> "FusedKVCache":
        """Returns a cache of the keys and values of `MultiHeadAttention.project_memory`."""
        return cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))

    def append(self, newest: "FusedKVCache", entry: Int[Array, ""]) -> "FusedKVCache":
        """Writes the entries of all W beams from `entry` on, as one block: otherwise XLA would copy the cache."""
        return FusedKVCache(
            jax.lax.dynamic_update_slice_in_dim(self.key, newest.key, entry, 3),
            jax.lax.dynamic_update_slice_in_dim(self.value, newest.value, entry, 2),
        )

    def with_room(self, max_new_tokens: int, num_beams: int) -> "FusedKVCache":
        """Returns a cache with room for `max_new_tokens` tokens of each beam after the P tokens so far."""
        room = max_new_tokens * num_beams
        return FusedKVCache(
            jnp.pad(self.key, ((0, 0), (0, 0), (0, 0), (0, room))),
            jnp.pad(self.value, ((0, 0), (0, 0), (0, room), (0, 0))),
        )

    def keys_and_values(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Returns keys and values in the layout of attention functions; XLA compiles this without a copy."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


class ConvolvedPast(NamedTuple):
    """Past of a layer with a short convolution: that of its attention, and what the convolution took last."""

    attention: Any
    recent: dict[str, Float[Array, "R W-1 heads _"]]


class FusedSelfAttention(nnx.Module):
    """The self-attention of a layer, for one token per row."""

    def __init__(self, attention: MultiHeadAttention, *, dtype: DTypeLike, int8: bool):
        """Joins the projections of a trained attention into one matrix, in `dtype` or quantized to int8.

        Raises:
          ValueError: if the attention cannot decode from a cache.
        """
        query = attention.query if attention.query_down is None else attention.query_down
        projections = [query, attention.key, attention.value]
        if attention.output_gate is not None:
            projections.append(attention.output_gate)
        self.projections = FusedLinear(*_joined(*projections), dtype=dtype, int8=int8)
        has_rank = attention.query_down is not None
        self.query_up = FusedLinear(*_joined(attention.query), dtype=dtype, int8=int8) if has_rank else None
        self.query_rank_norm, self.value_norm = attention.query_rank_norm, attention.value_norm
        self.out = FusedLinear(*_joined(attention.out), dtype=dtype, int8=int8)
        self.query_size, self.d_k = attention.query.kernel.shape[2], attention.key.kernel.shape[2]
        _, self.num_kv_heads, self.d_v = attention.value.kernel.shape
        self.num_repeats, self.gate_fn, self.output_norm = (
            attention.num_repeats,
            attention.gate_fn,
            attention.output_norm,
        )
        # Of the outputs of `projections`: where those of the query, the key and the value end.
        self.ends = (math.prod(query.out_features),)
        self.ends += (self.ends[0] + math.prod(attention.key.out_features),)
        self.ends += (self.ends[1] + math.prod(attention.value.out_features),)
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.rotary, self.key_rotary, self.sinks = attention.rotary, attention.key_rotary, attention.sinks
        convolutions = {name: getattr(attention, f"{name}_convolution") for name in ("query", "key", "value")}
        self.convolutions = nnx.Dict({name: layer for name, layer in convolutions.items() if layer is not None})
        self.gates = nnx.Dict({name: getattr(attention, f"gate_{name}") for name in attention.gate_names})
        decoding = _decoding_of(attention)
        is_recurrent = isinstance(decoding, RecurrentDecoding)
        # `decoding` is a pair in both cases: (read, step) or (attention_fn, is_visible). The other two are None.
        self.read_fn, self.step_fn = decoding if is_recurrent else (None, None)
        self.attention_fn, self.is_visible = (None, None) if is_recurrent else decoding
        self.learned = attention.attention_fn if isinstance(attention.attention_fn, LearnedAttention) else None
        self.scale, self.logits_soft_cap = attention.scale, attention.logits_soft_cap

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> KVCache:
        """Returns a cache of no tokens, with keys, values, gates and the past of the short convolutions."""
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
        """Returns the `past` of the first step: a cache with room for `max_new_tokens`, or a recurrent state.

        Args:
          past: keys, values and gates of the P tokens of a prompt.
          is_past: True for tokens of the prompt, False for padding; None means no padding.
          max_new_tokens: how many more tokens the cache has room for.
          num_beams: W, beams of each input.
        """
        if self.read_fn is None:
            state = FusedKVCache.of(past.key, past.value).with_room(max_new_tokens, num_beams)
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
        *,
        entry: Int[Array, ""],
        mask: Bool[Array, "B 1 W S"],
        positions: Int[Array, "#B 1"],
        bias: Bias | None = None,
    ) -> tuple[Float[Array, "R 1 D"], Any]:
        """Attends from one token per row to the tokens before it and to itself.

        Args:
          x: the newest token of each row; R = B * W rows, the W beams of an input next to each other.
          past: keys and values of all beams so far, [B, K, H, S] and [B, K, S, U], see `FusedKVCache`; or the recurrent
            state of each row, for an attention that decodes from one. With a short convolution a `ConvolvedPast` of
            either.
          entry: index in the cache from which the keys and values of the W beams of each input are written.
          mask: which keys of an input belong to the tokens of each beam, x included.
          positions: position of the newest token in its sequence, for rotary positions.
          bias: broadcastable to [B, N, W, S].

        Returns:
          The output and the extended past.
        """
        shape, beams = x.shape, (mask.shape[0], x.shape[0] // mask.shape[0])  # (R, 1, D) and (B, W)
        past, recent = past if isinstance(past, ConvolvedPast) else (past, None)
        # The beams of an input are the queries of one attention to the keys of all its beams; the mask selects.
        joined = self.projections(x).reshape(*beams, -1)
        query, key, value, output_gates = jnp.split(joined, self.ends, axis=-1)
        query = query if self.query_rank_norm is None else self.query_rank_norm(query)
        query = query if self.query_up is None else self.query_up(query)
        sized = ((query, self.query_size), (key, self.d_k), (value, self.d_v))
        query, key, value = (part.reshape(*beams, -1, size) for part, size in sized)
        if recent is not None:
            (query, key, value), recent = self._convolve({"query": query, "key": key, "value": value}, recent)
        token_positions = jnp.broadcast_to(positions, beams)
        query = repeated(with_positions(query, self.query_norm, self.rotary, token_positions), self.num_repeats)
        key = repeated(with_positions(key, self.key_norm, self.key_rotary, token_positions), self.num_repeats)
        value = value if self.value_norm is None else self.value_norm(value)
        options = logit_options(self)
        if self.step_fn is not None:
            options |= {name: gate(x) for name, gate in self.gates.items()} | self._parameters(x.dtype)
            rows = (part.reshape(*shape[:2], *part.shape[2:]) for part in (query, key, value))
            context, extended = self.step_fn(past, *rows, **options)
        else:
            extended = past.append(FusedKVCache.of(key, value), entry)
            attend = cast(AttentionFn, self.attention_fn)
            context = attend(query, *extended.keys_and_values(), bias, mask=mask, **options)
        context = context.reshape(*shape[:2], *context.shape[2:])  # [R, 1, N, U]
        context = gated(self, context, output_gates.reshape(context.shape) if output_gates.shape[-1] else None)
        return self.out(context.reshape(*shape[:2], -1)), extended if recent is None else ConvolvedPast(
            extended, recent
        )

    def _convolve(
        self, heads: dict[str, Float[Array, "B W heads _"]], recent: dict[str, Float[Array, "R W-1 heads _"]]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Applies the short convolutions of query, key and value; returns the results and the new `recent`."""
        convolved, newest = [], {}
        for name, part in heads.items():
            rows = part.reshape(-1, 1, *part.shape[2:])  # [R, 1, heads, _]
            convolved.append(self.convolutions[name](rows, recent[name]).reshape(part.shape))
            newest[name] = self.convolutions[name].last_tokens(rows, recent[name])
        return convolved, newest


class FusedCrossAttention(nnx.Module):
    """The cross-attention of a layer, for one token per row."""

    def __init__(self, attention: MultiHeadAttention, *, dtype: DTypeLike, int8: bool):
        """Takes the projections of queries and outputs of a trained attention; keys are those of a memory.

        Raises:
          ValueError: if the attention cannot decode from cached keys and values.
        """
        self.query = FusedLinear(*_joined(attention.query), dtype=dtype, int8=int8)
        self.out = FusedLinear(*_joined(attention.out), dtype=dtype, int8=int8)
        self.query_size = attention.query.kernel.shape[-1]  # of a head; that of keys may differ
        decoding = _decoding_of(attention)
        if isinstance(decoding, RecurrentDecoding):
            raise ValueError(
                "cross-attention must decode from cached keys and values, got an attention with a recurrent state: use "
                "another attention, such as dense"
            )
        self.attention_fn = cast(AttentionFn, decoding.attention_fn)
        self.scale = attention.scale

    def __call__(
        self, x: Float[Array, "R 1 D"], memory: FusedKVCache, mask: Mask | None = None
    ) -> Float[Array, "R 1 D"]:
        """Attends from the beams of each input to the keys and values of its memory, [B, K, H, S] and [B, K, S, U]."""
        batch_size = memory.key.shape[0]
        query = self.query(x).reshape(batch_size, x.shape[0] // batch_size, -1, self.query_size)  # [B, W, N, H]
        # The scale is not bound by a partial, which would hide the parameters of a module.
        options = {} if self.scale is None else {"scale": self.scale}
        context = self.attention_fn(query, *memory.keys_and_values(), mask=mask, **options)
        return self.out(context.reshape(*x.shape[:2], -1))


class FusedFeedForward(nnx.Module):
    """A feed-forward network of `FusedLinear` layers, without dropout."""

    def __init__(self, feed_forward: FeedForward, *, int8: bool):
        """Takes the matrices of a trained network, in its dtype or quantized to int8."""
        linear = functools.partial(FusedLinear, dtype=feed_forward.dtype, int8=int8)
        self.up = linear(feed_forward.up[...], _value(feed_forward.up_bias))
        self.gate = (
            None if feed_forward.gate is None else linear(feed_forward.gate[...], _value(feed_forward.gate_bias))
        )
        self.down = linear(feed_forward.down[...], _value(feed_forward.down_bias))
        self.units_fn = functools.partial(
            gated_units,
            activation_fn=feed_forward.activation_fn,
            gate_offset=feed_forward.gate_offset,
            limit=feed_forward.limit,
        )

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Transforms each position separately."""
        return self.down(self.units_fn(self.up(x), None if self.gate is None else self.gate(x)))


class FusedLinear(nnx.Module):
    """Computes x W + b for few rows, from W transposed; with `int8`, the weights are quantized."""

    def __init__(
        self, kernel: Float[Array, "D N"], bias: Float[Array, " N"] | None = None, *, dtype: DTypeLike, int8: bool
    ):
        """Stores W^T in `dtype`, or as int8 values with a scale for each output."""
        values, scales = quantize_rows(kernel.T) if int8 else (kernel.T.astype(dtype), None)
        self.kernel = nnx.Param(values)
        self.scales = None if scales is None else nnx.Param(scales)
        self.bias = None if bias is None else nnx.Param(bias)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows D"], out_dtype: DTypeLike | None = None) -> Float[Array, "*rows N"]:
        """Multiplies in the module's dtype and returns `out_dtype`, by default the module's dtype."""
        x, out_dtype = x.astype(self.dtype), self.dtype if out_dtype is None else out_dtype
        if self.scales is None:
            y = _product_of_rows(x, self.kernel[...], out_dtype)
        else:
            y = int8_product(x, self.kernel[...], self.scales[...]).astype(out_dtype)
        if self.bias is None:
            return y
        return y + self.bias[...].astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def _product_of_rows(x: Float[Array, "*rows D"], w: Float[Array, "N D"], dtype: DTypeLike) -> Float[Array, "*rows N"]:
    """Computes x W^T for few rows; in float32 as (W x^T)^T.

    XLA for CPUs packs the right matrix before it multiplies. For few rows and weights on the right, that takes longer
    than the product: with 37,000 x 512 weights, 4 rows took 9.3 ms instead of 5.1, 64 rows 28.2 instead of 20.9 (AMD
    EPYC without AVX-512, two cores). bfloat16, which is not packed, takes longer with the weights on the left.
    """
    if x.dtype != jnp.float32:
        return jnp.einsum("...D,ND->...N", x, w, preferred_element_type=dtype)
    y = jnp.einsum("ND,...D->N...", w, x, preferred_element_type=dtype)
    return jnp.moveaxis(jax.lax.optimization_barrier(y), 0, -1)  # without it XLA would exchange the sides again


def _decoding_of(attention: MultiHeadAttention) -> CachedDecoding | RecurrentDecoding:
    """Returns the decoding of an attention; raises ValueError if it has none."""
    decoding = decoding_of(attention.attention_fn)
    if decoding is None:
        raise ValueError(
            f"{attention.attention_fn} cannot decode from a cache, because it has no `AttentionSpec.decoding`: use an "
            "attention that has one, or decode without `fused`"
        )
    return decoding


def _joined(*projections: Linear) -> tuple[Float[Array, "D N"], Float[Array, " N"] | None]:
    """Returns kernel and bias of one fused projection for several projections of the same input; flattens heads."""
    kernels = [projection.kernel[...].reshape(math.prod(projection.in_features), -1) for projection in projections]
    if all(projection.bias is None for projection in projections):
        return jnp.concatenate(kernels, axis=1), None
    biases: list[Array] = []
    for projection, kernel in zip(projections, kernels, strict=True):
        if projection.bias is None:
            biases.append(jnp.zeros(kernel.shape[1], kernel.dtype))
        else:
            biases.append(projection.bias[...].reshape(-1))
    return jnp.concatenate(kernels, axis=1), jnp.concatenate(biases)


def _value(param: nnx.Param[Array] | None) -> Array | None:
    """Returns the array of an optional parameter."""
    return None if param is None else param[...]
