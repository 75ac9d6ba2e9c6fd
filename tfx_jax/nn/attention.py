"""Attention layers: `MultiHeadAttention`, and `AttentionConfig`, which selects the attention of a model's layers.

Options and checks in configurations are derived from the `AttentionSpec` of each attention, in
`tfx_jax.functional.attention`. Read `MultiHeadAttention` first: projections around a pure attention function.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, one_of, within
from tfx_jax.functional.attention import SPECS, AttentionSpec
from tfx_jax.functional.attention.axial import attention_over_axes
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import Bias, Mask, SegmentIds
from tfx_jax.functional.attention.spec import CachedDecoding, HeadSizes, RecurrentDecoding, unbound
from tfx_jax.functional.positions import ROTARY_SCALINGS, rotary_embedding, rotary_frequencies
from tfx_jax.nn.basic import Linear, ShortConvolution, check_sizes
from tfx_jax.nn.distribution import current_distribution
from tfx_jax.nn.lora import Frozen

AttentionFn = Callable[..., Any]
"""A callable with the signature of `tfx_jax.functional.dot_product_attention`."""


class KVCache(NamedTuple):
    """Keys, values and gates of the S tokens before a layer's input.

    A layer attends to the cache and to its input, and returns the cache extended by its input. Pass an empty cache with
    a prompt, and the returned cache with the tokens that follow. The caller passes positions, as without a cache, and a
    mask that covers all keys.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K U"]
    gates: dict[str, Float[Array, "B S ..."]] | None = None
    recent: dict[str, Float[Array, "B W-1 heads _"]] | None = None
    """Of the last W - 1 tokens, the "query", "key" and "value" that a short convolution takes; None without one."""

    @classmethod
    def empty(
        cls, batch_size: int, num_heads: int, d_k: int, d_v: int | None = None, dtype: DTypeLike = "float32"
    ) -> "KVCache":
        """Returns a cache of no tokens, key [B, 0, K, d_k] and value [B, 0, K, d_v]; `d_v` is d_k by default."""
        shape = (batch_size, 0, num_heads)
        return cls(jnp.zeros((*shape, d_k), dtype), jnp.zeros((*shape, d_k if d_v is None else d_v), dtype))

    def append(self, newer: "KVCache") -> "KVCache":
        """Returns the cache extended by newer tokens, along the axis of tokens; `recent` is that of the newer ones."""
        gates = newer.gates
        if gates and self.key.shape[1]:  # a cache of no tokens has no gates either
            older_gates = self.gates or {}
            gates = {name: jnp.concatenate([older_gates[name], gate], axis=1) for name, gate in gates.items()}
        key = jnp.concatenate([self.key, newer.key], axis=1)
        value = jnp.concatenate([self.value, newer.value], axis=1)
        return KVCache(key, value, gates, newer.recent)


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    The module owns the projections; `attention_fn` computes attention between them. Every attention of
    `tfx_jax.functional` can be used, with its options bound by `functools.partial`. Kernels have a separate axis for
    heads (query [D, N, H], key [D, K, H], value [D, K, U], out [N, U, D]), so that heads can be sharded.
    """

    def __init__(
        self,
        d_model: int | None = None,
        num_heads: int | None = None,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        num_kv_heads: int | None = None,
        num_key_heads: int | None = None,
        d_key_input: int | None = None,
        d_value_input: int | None = None,
        d_out: int | None = None,
        use_bias: bool = False,
        use_key_bias: bool | None = None,
        use_out_bias: bool | None = None,
        use_sinks: bool = False,
        query_norm: nnx.Module | None = None,
        key_norm: nnx.Module | None = None,
        value_norm: nnx.Module | None = None,
        query_rank: int | None = None,
        query_rank_norm: nnx.Module | None = None,
        rotary: "RotaryConfig | None" = None,
        convolution_width: int = 0,
        use_output_gate: bool = False,
        gate_fn: Callable[[Array], Array] = jax.nn.sigmoid,
        output_norm: nnx.Module | None = None,
        use_gate_bias: bool = True,
        dropout_rate: float = 0.0,
        attention_fn: AttentionFn = dot_product_attention,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        attention_axes: Sequence[int] | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **unknown: Any,
    ):
        """Initializes the projections.

        Args:
          d_model: width D of the query inputs, and the default of the other widths.
          num_heads: N, the paper's h.
          d_k: head size H of queries and keys; None means d_model / num_heads.
          d_v: head size U of values; None means d_k. Attentions with `AttentionSpec.head_sizes`, such as latent
            attention, determine the sizes of keys and values by their own options.
          num_kv_heads: K, a divisor of num_heads; None means num_heads.
          num_key_heads: number of projected queries and of projected keys, each of which is repeated for as many of the
            num_heads heads, which all have their own values (Qwen3-Next, 2025). None means N queries and K keys.
          d_key_input: width of the inputs of the key projection; None means d_model.
          d_value_input: width of the inputs of the value projection; None means d_key_input.
          d_out: width of the output; None means d_model.
          use_bias: whether the projections have a bias; the paper's have none.
          use_key_bias: whether the key projection has a bias; None means `use_bias`. In plain softmax attention it
            shifts all logits of a query alike and changes no output, so Whisper has none.
          use_out_bias: whether the output projection has a bias; None means `use_bias`.
          use_sinks: whether each head has a learned logit that takes weight from the keys (gpt-oss, 2025).
          query_norm: norm of queries, before rotary positions (Henry et al., 2020). It normalizes each head separately,
            or all heads together if its scale has N * H numbers. None means no norm.
          key_norm: norm of keys, as `query_norm`.
          value_norm: norm of the values of each head: of the latents of latent attention. None means no norm.
          query_rank: size of a vector between two projections, from which queries are computed (DeepSeek-V2, 2024).
            None means one projection.
          query_rank_norm: norm of this vector; None means no norm.
          rotary: rotates queries and keys by their positions; None means no rotation.
          convolution_width: number of tokens in a causal convolution of queries, keys and values, which is before norms
            and rotary positions: 4 in Mamba-2 and Gated DeltaNet. For self-attention only. 0 means no convolution.
          use_output_gate: whether the output of each head is multiplied by a nonlinear function of a linear map of the
            query inputs, element by element (Qiu et al., 2025, https://arxiv.org/abs/2505.06708; Qwen3-Next).
          gate_fn: this function; Gated DeltaNet has SiLU.
          output_norm: norm of the output of each head, before the gate. None means no norm.
          use_gate_bias: whether the projections of the attention's own gates (`AttentionSpec.gates`) have a bias.
          dropout_rate: dropout rate of the attention weights; 0 in the paper's text, 0.1 in its code.
          attention_fn: any attention with the signature of `tfx_jax.functional.dot_product_attention`, a function or a
            Module that owns parameters. `AttentionConfig(name, options).make(num_heads, d_k, rngs=rngs)` returns one
            for an attention with learned arrays, such as "linformer".
          scale: multiplies the logits; None leaves it to `attention_fn`.
          logits_soft_cap: c of c * tanh(logits / c) (Gemma 2, 2024); None leaves logits unbounded.
          attention_axes: for inputs [B, ..., D] with several axes, the axes to attend over; negative numbers count from
            the end. See `tfx_jax.functional.attention_over_axes`. None means inputs [B, T, D].
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: stream `params` initializes the kernels: Glorot uniform; query, key and value with half the variance, as
            if they were one matrix, so that attention starts flatter. The paper does not specify this.
          unknown: must be empty; the error says what the arguments of `flax.nnx.MultiHeadAttention` are here.

        Raises:
          TypeError: for a missing size or an unknown argument.
          ValueError: if a size is below 1, `d_k` is None and num_heads does not divide d_model, num_kv_heads does not
            divide num_heads, there is a convolution over several axes, `d_v` is set and the attention determines it, or
            a head with rotary positions has an odd size.
        """
        if unknown:
            raise TypeError(
                f"MultiHeadAttention got unexpected arguments: {', '.join(unknown)}; Flax's in_features is d_model, "
                "qkv_features is num_heads * d_k, out_features is d_out"
            )
        if d_model is None or num_heads is None:
            raise TypeError(
                "MultiHeadAttention needs d_model and num_heads: write MultiHeadAttention(512, 8, rngs=rngs)"
            )
        check_sizes(d_model=d_model, num_heads=num_heads, d_k=d_k, d_v=d_v, num_kv_heads=num_kv_heads)
        check_sizes(num_key_heads=num_key_heads, query_rank=query_rank)
        check_sizes(d_key_input=d_key_input, d_value_input=d_value_input, d_out=d_out)
        if d_k is None:
            if d_model % num_heads:
                raise ValueError(f"d_model={d_model} is not divisible by num_heads={num_heads}; set d_k, the head size")
            d_k = d_model // num_heads
        if query_rank_norm is not None and query_rank is None:
            raise ValueError("query_rank_norm is the norm of a vector of query_rank numbers: set query_rank")
        spec, sizes = spec_of(attention_fn), head_sizes_of(attention_fn, d_k, d_v)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        if num_key_heads is not None and (num_kv_heads != num_heads or num_heads % num_key_heads):
            raise ValueError(
                f"num_key_heads={num_key_heads} must divide num_heads={num_heads}, and num_kv_heads={num_kv_heads} "
                "must equal it"
            )
        num_queries, num_keys = (num_heads, num_kv_heads) if num_key_heads is None else (num_key_heads, num_key_heads)
        self.num_repeats = 1 if num_key_heads is None else num_heads // num_key_heads
        d_key_input = d_model if d_key_input is None else d_key_input
        d_value_input = d_key_input if d_value_input is None else d_value_input
        linear = functools.partial(Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        project = functools.partial(linear, kernel_init=nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform"))
        self.query_down = None if query_rank is None else project(d_model, query_rank)
        self.query = project(d_model if query_rank is None else query_rank, (num_queries, d_k))
        self.key = project(
            d_key_input, (num_keys, sizes.key), use_bias=use_bias if use_key_bias is None else use_key_bias
        )
        self.value = project(d_value_input, (num_kv_heads, sizes.value))
        self.out = linear(
            (num_heads, sizes.output),
            d_model if d_out is None else d_out,
            use_bias=use_bias if use_out_bias is None else use_out_bias,
            kernel_init=nnx.initializers.glorot_uniform(),
        )
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm
        self.query_rank_norm = query_rank_norm
        self.rotary = self.key_rotary = rotary
        if rotary is not None and (d_k % 2 or sizes.key % 2):
            size = d_k if d_k % 2 else sizes.key
            raise ValueError(f"rotary positions rotate pairs of features, but a head has {size}: set an even size")
        if rotary is not None and sizes.key < d_k:  # only the first features of a query meet a key
            self.rotary = dataclasses.replace(rotary, fraction=rotary.fraction * sizes.key / d_k)
        if convolution_width < 0:
            raise ValueError(f"convolution_width must be at least 0, got {convolution_width}")
        if convolution_width and attention_axes is not None:
            raise ValueError(
                f"convolution_width must be 0 with attention_axes, because tokens of several axes have no order, got "
                f"{convolution_width}"
            )

        def convolution(heads: int, size: int) -> ShortConvolution | None:
            """Returns the short convolution of `heads` heads of `size` features, None if its width is 0."""
            if not convolution_width:
                return None
            return ShortConvolution(convolution_width, heads, size, param_dtype=param_dtype, rngs=rngs)

        self.query_convolution = convolution(num_queries, d_k)
        self.key_convolution = convolution(num_keys, sizes.key)
        self.value_convolution = convolution(num_kv_heads, sizes.value)
        self.output_gate = project(d_model, (num_heads, sizes.output)) if use_output_gate else None
        self.gate_fn, self.output_norm = gate_fn, output_norm
        self.gate_names = ()
        if spec is not None and spec.gates is not None:
            shapes = spec.gates(num_heads=num_heads, num_kv_heads=num_kv_heads, d_k=d_k, **options_of(attention_fn))
            self.gate_names = tuple(shapes)
            for name, shape in shapes.items():
                setattr(self, f"gate_{name}", linear(d_key_input, shape, use_bias=use_gate_bias))
        self.dropout_rate = dropout_rate
        if attention_axes is not None:
            attention_fn = functools.partial(attention_over_axes, attention_fn, axes=tuple(attention_axes))
        self.attention_fn = attention_fn
        self.scale = scale
        self.logits_soft_cap = logits_soft_cap

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S _"] | None = None,
        value_memory: Float[Array, "B S _"] | None = None,
        *,
        bias: Bias | None = None,
        mask: Mask | None = None,
        is_causal: bool | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Int[Array, "#B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attends from `x` to `memory`.

        Args:
          x: inputs of the query projection.
          memory: inputs of the key projection; None means `x`, self-attention.
          value_memory: inputs of the value projection; None means `memory`.
          bias: added to the logits, as in `tfx_jax.functional.dot_product_attention`.
          mask: True where a query may attend, broadcastable to [B, N, T, S].
          is_causal: whether future keys are hidden; None is what is bound to `attention_fn`, or its default.
          segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
          positions: positions of the tokens of `x` in their sequences, for `rotary`, and of a memory of as many tokens;
            None means 0 .. T - 1 and 0 .. S - 1.
          rngs: stream `dropout`; None means evaluation.
          return_weights: also return the attention weights, [B, N, T, S].

        Returns:
          [B, T, d_out], or a pair of output and weights; with `attention_axes`, the axes of `x` instead of T.

        Raises:
          ValueError: if the layer has a short convolution and there is a memory or a mask of pairs, or `segment_ids`
            are passed and the rotary frequencies depend on the length of a text; or if there is a rotation, and x or
            the memory has not as many tokens as `positions`, which are those of both.
        """
        if self.query_convolution is not None and not (memory is None and value_memory is None):
            raise ValueError(
                "a short convolution is for self-attention only: set convolution_width=0 or pass no memory"
            )
        memory = x if memory is None else memory
        key, value = self.project_memory(memory, value_memory, positions, mask=mask, segment_ids=segment_ids)
        return self.attend(
            x,
            key,
            value,
            gates=self.project_gates(memory),
            positions=positions,
            bias=bias,
            mask=mask,
            is_causal=is_causal,
            segment_ids=segment_ids,
            rngs=rngs,
            return_weights=return_weights,
        )

    def project_memory(
        self,
        memory: Float[Array, "B S _"],
        value_memory: Float[Array, "B S _"] | None = None,
        positions: Int[Array, "#B S"] | None = None,
        *,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
        recent: Mapping[str, Array] | None = None,
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Returns keys and values for `attend`, so that a memory used in many steps is projected only once.

        Args:
          memory: inputs of the key projection.
          value_memory: inputs of the value projection; None means `memory`.
          positions: positions of the keys in their sequences, for `rotary`; None means 0 .. S - 1.
          mask: padding mask, [B, 1, 1, S], for a short convolution, which skips padding.
          segment_ids: packed sequences, [B, S] or a pair ([B, S], [B, S]), for a short convolution.
          recent: `KVCache.recent` of the tokens before `memory`, for a short convolution; None means no tokens.

        Raises:
          ValueError: if the layer has a short convolution and `mask` differs between queries or heads, or both
            `segment_ids` and `recent` are passed; or if `segment_ids` are passed and the rotary frequencies depend on
            the length of a text.
        """
        if segment_ids is not None and self.rotary is not None:
            self.rotary.check_packed()
        tokens = {"mask": mask, "segment_ids": segment_ids, "recent": recent}
        key = self._convolved("key", self.key(memory), **tokens)
        value = self._convolved("value", self.value(memory if value_memory is None else value_memory), **tokens)
        value = value if self.value_norm is None else self.value_norm(value)
        key = with_positions(key, self.key_norm, self.key_rotary, positions)
        return repeated(key, self.num_repeats), value

    def _project_query(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Returns queries before convolution, norm and rotation."""
        if self.query_down is not None:
            x = self.query_down(x)
        return self.query(x if self.query_rank_norm is None else self.query_rank_norm(x))

    def _convolved(
        self,
        name: str,
        heads: Float[Array, "B T N _"],
        *,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
        recent: Mapping[str, Array] | None = None,
    ) -> Float[Array, "B T N _"]:
        """Applies the short convolution of queries, keys or values, if there is one.

        Args:
          name: "query", "key" or "value".
          heads: projected queries, keys or values.
          mask: padding mask, [B, 1, 1, S], whose last T entries are for these tokens.
          segment_ids: packed sequences, [B, T] or a pair whose first part is [B, T].
          recent: `KVCache.recent` of the tokens before; None means no tokens.
        """
        convolution = getattr(self, f"{name}_convolution")
        if convolution is None:
            return heads
        ids = segment_ids[0] if isinstance(segment_ids, tuple) else segment_ids
        past = None if recent is None else recent[name]
        return convolution(heads, past, token_mask=_token_mask(mask, heads.shape[1]), segment_ids=ids)

    def project_gates(self, memory: Float[Array, "B S _"]) -> dict[str, Float[Array, "B S ..."]]:
        """Returns the gates of the attention by name, for `attend`; empty for most attentions."""
        return {name: getattr(self, f"gate_{name}")(memory) for name in self.gate_names}

    def project_cache(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"] | None = None,
        *,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
        recent: Mapping[str, Array] | None = None,
    ) -> KVCache:
        """Returns keys, values and gates of `x` as a cache, for self-attention.

        Arguments are as in `project_memory`; `recent` is that of the older cache.

        Raises:
          ValueError: as `project_memory`; and for `segment_ids` in a layer with a short convolution.
        """
        if segment_ids is not None and self.query_convolution is not None:
            raise ValueError("a short convolution has no cache of packed sequences: pass no segment_ids")
        memory = self.project_memory(x, None, positions, mask=mask, segment_ids=segment_ids, recent=recent)
        return KVCache(*memory, self.project_gates(x), self._recent(x, mask, recent))

    def _recent(
        self, x: Float[Array, "B T D"], mask: Mask | None, past: Mapping[str, Array] | None
    ) -> dict[str, Array] | None:
        """Returns `KVCache.recent` after `x`: the projections of its last tokens that the short convolutions need next.

        `past` is `KVCache.recent` before `x`; the result is None without a short convolution.
        """
        if self.query_convolution is None:
            return None
        parts = {
            "query": (self.query_convolution, self._project_query),
            "key": (self.key_convolution, self.key),
            "value": (self.value_convolution, self.value),
        }
        token_mask = _token_mask(mask, x.shape[1])
        return {
            name: convolution.last_tokens(project(x), None if past is None else past[name], token_mask)
            for name, (convolution, project) in parts.items()
            if convolution is not None
        }

    def attend(
        self,
        x: Float[Array, "B T D"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K U"],
        *,
        gates: Mapping[str, Array] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        recent: Mapping[str, Array] | None = None,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attends from `x` to keys and values that are already projected; options and result as in `__call__`.

        `recent` is that of the cache before `x`, for a short convolution.
        """
        tokens = {"mask": options.get("mask"), "segment_ids": options.get("segment_ids"), "recent": recent}
        query = self._convolved("query", self._project_query(x), **tokens)
        # Pass on only options that are set: not every attention has every option.
        options = {name: option for name, option in options.items() if option is not None} | dict(gates or {})
        options |= logit_options(self)
        if rngs is not None and self.dropout_rate:
            options |= {"dropout_rate": self.dropout_rate, "dropout_rng": rngs.dropout()}
        if rngs is not None and getattr(self.attention_fn, "has_running_statistics", False):
            options["is_training"] = True
        if return_weights:
            options["return_weights"] = True
        query = repeated(with_positions(query, self.query_norm, self.rotary, positions), self.num_repeats)
        result = current_distribution().attend(self.attention_fn, query, key, value, **options)
        output_gates = None if self.output_gate is None else self.output_gate(x)
        if return_weights:
            context, weights = result
            return self.out(gated(self, context, output_gates)), weights
        return self.out(gated(self, result, output_gates))


@documented
@dataclasses.dataclass(unsafe_hash=True)
class RotaryConfig:
    """Rotary positions of queries and keys (Su et al., 2021); see `tfx_jax.functional.rotary_frequencies`."""

    base: float = at_least(1, 10_000.0)  # base of the geometric sequence of frequencies
    fraction: float = within(0, 1, 1.0)  # share of each head's features that is rotated, from the first feature on
    # Method for sequences longer than those of the original training; "dynamic" and "longrope" take no packed texts.
    scaling: str = one_of(ROTARY_SCALINGS, "none")
    factor: float = at_least(1, 1.0)  # ratio of the new maximum length to original_max_length
    original_max_length: int = at_least(1, 8192)  # sequence length of the original training, in tokens
    low_frequency_factor: float = 1.0  # llama3: number of turns below which a frequency is divided by factor
    high_frequency_factor: float = 4.0  # llama3: number of turns above which a frequency is unchanged
    beta_fast: float = 32.0  # yarn: number of turns above which a frequency is unchanged
    beta_slow: float = 1.0  # yarn: number of turns below which a frequency is divided by factor
    attention_factor: float | None = None  # yarn, longrope: multiplies queries and keys; None: the paper's value
    is_truncated: bool = True  # yarn: whether the interpolation starts and ends at whole pairs of features
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies up to original_max_length tokens
    long_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies of longer texts

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.scaling in ("dynamic", "longrope")

    def validate(self, head_size: int | None = None) -> None:
        """Raises ValueError for options that `rotary_frequencies` rejects, for any head size or for this one.

        Computes no array of the head size, which may be a mistake of a configuration.
        """
        if self.scaling == "longrope" and head_size is not None:
            self.frequencies(head_size)  # raises before it computes anything if there are more or fewer factors
        else:
            fitting_size = 2 * len(self.short_factors) or 4  # one factor for each pair of features
            dataclasses.replace(self, fraction=1.0).frequencies(fitting_size)

    def check_packed(self) -> None:
        """Raises ValueError if the frequencies depend on the length of a text, of which a packed row has several."""
        if self.depends_on_length:
            raise ValueError(
                f"rotary.scaling={self.scaling!r} depends on the length of a text and does not support packed "
                "sequences: turn packing off or use another scaling"
            )

    def frequencies(self, head_size: int, length: Int[Array, " B"] | None = None) -> tuple[Any, float]:
        """Returns the pair of `rotary_frequencies` for a head size: radians per position of each pair, and a scale."""
        options = dataclasses.asdict(self)
        size = 2 * round(options.pop("fraction") * head_size / 2)  # rotated features: an even number
        return rotary_frequencies(size, **options, length=length)

    def rotate(self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]) -> Float[Array, "B T N H"]:
        """Rotates queries or keys; the length of a text, if a scaling depends on it, is its last position plus 1."""
        length = positions.max(axis=-1) + 1 if self.depends_on_length else None
        frequencies, factor = self.frequencies(x.shape[-1], length)
        return rotary_embedding(x, positions, frequencies=frequencies, scale=factor)


def _token_mask(mask: Mask | None, length: int) -> Bool[Array, "#B T"] | None:
    """Returns which of the last T = `length` keys are tokens, for a short convolution.

    Raises:
      ValueError: for a mask that is not a padding mask, [B, 1, 1, S].
    """
    if mask is None:
        return None
    if mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"a short convolution takes only a padding mask, [B, 1, 1, S], got shape {mask.shape}: use is_causal and "
            "segment_ids, or convolution_width=0"
        )
    return mask[:, 0, 0, -length:]


def repeated(heads: Float[Array, "B T N H"], count: int) -> Float[Array, "B T N*count H"]:
    """Repeats each head `count` times."""
    return heads if count == 1 else jnp.repeat(heads, count, axis=2)


def gated(layer: Any, context: Float[Array, "B T N U"], gates: Float[Array, "B T N U"] | None) -> Array:
    """Normalizes the outputs of the heads and multiplies them by `gate_fn(gates)`, where `layer` does so."""
    context = context if layer.output_norm is None else layer.output_norm(context)
    return context if gates is None else context * layer.gate_fn(gates)


def logit_options(layer: Any) -> dict[str, Any]:
    """Returns the attention options `scale`, `logits_soft_cap` and `sinks` of a layer, without those that are None."""
    sinks = None if layer.sinks is None else layer.sinks[...]
    options = {"scale": layer.scale, "logits_soft_cap": layer.logits_soft_cap, "sinks": sinks}
    return {name: option for name, option in options.items() if option is not None}


def with_positions(
    heads: Float[Array, "B T N H"],
    norm: Any,
    rotary: RotaryConfig | None,
    positions: Int[Array, "#B T"] | None,
) -> Float[Array, "B T N H"]:
    """Normalizes queries or keys, then rotates them by their positions (rotary embedding); None skips either step.

    Args:
      heads: queries or keys, [B, T, N, H].
      norm: normalization with a `scale` [H] or [N, H], for each head, or [N * H], for all heads together.
      rotary: rotary embedding.
      positions: positions of the tokens, [B or 1, T]; None means 0 .. T - 1.

    Raises:
      ValueError: if there are not as many positions as tokens.
    """
    if norm is not None:
        is_shared = norm.scale.shape[-1] != heads.shape[-1]  # one norm over all heads
        heads = norm(heads.reshape(*heads.shape[:2], -1) if is_shared else heads).reshape(heads.shape)
    if rotary is None:
        return heads
    positions = jnp.arange(heads.shape[1])[None] if positions is None else positions
    if positions.shape[-1] != heads.shape[1]:  # one position would be that of all tokens
        raise ValueError(
            f"positions must have one entry for each of {heads.shape[1]} tokens, got shape {positions.shape}; for a "
            "memory of another length call `project_memory` with its own positions, then `attend`"
        )
    return rotary.rotate(heads, jnp.broadcast_to(positions, heads.shape[:2]))


class LearnedAttention(nnx.Module):
    """An attention function together with the parameters or the state that its spec declares."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        *,
        num_heads: int,
        num_kv_heads: int,
        d_k: int,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters and the state of the attention called `name` in `SPECS`."""
        spec = SPECS[name]
        self.name = name
        self.options = tuple(options.items())  # a tuple, because static parts of a module must be hashable
        self.has_running_statistics = spec.update_state is not None
        sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "d_k": d_k, "dtype": param_dtype}
        for kind, init in ((nnx.Param, spec.parameters), (nnx.BatchStat, spec.state)):
            arrays = init(rngs.params(), **sizes, **options) if init else {}
            for array_name, array in arrays.items():
                setattr(self, array_name, kind(array))

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K U"],
        bias: Bias | None = None,
        mask: Mask | None = None,
        *,
        is_training: bool = False,
        **options: Any,
    ) -> Any:
        """Attends with the parameters and the current state; with `is_training` updates the state for later calls."""
        spec, bound_options, arrays = SPECS[self.name], dict(self.options), self.arrays(query.dtype)
        if is_training and spec.update_state is not None:
            for name, x in spec.update_state(arrays, query, key, mask, **bound_options).items():
                getattr(self, name)[...] = x
        return spec.function(query, key, value, bias, mask, **arrays, **spec.passed(bound_options), **options)

    def arrays(self, dtype: DTypeLike) -> dict[str, Array]:
        """Returns the parameters, cast to `dtype`, and the state by name, as options of the attention."""
        arrays: dict[str, Array] = {}
        for name, variable in vars(self).items():
            if isinstance(variable, (nnx.Param, Frozen)):
                arrays[name] = variable[...].astype(dtype)
            elif isinstance(variable, nnx.Variable):
                arrays[name] = variable[...]
        return arrays


def spec_of(attention_fn: AttentionFn) -> AttentionSpec | None:
    """Returns the spec of an attention, whatever options are bound to it; None if it has no spec."""
    if isinstance(attention_fn, LearnedAttention):
        return SPECS[attention_fn.name]
    try:
        return _SPEC_OF.get(unbound(attention_fn)[0])
    except (ValueError, TypeError):  # positional arguments are bound, or the callable is not hashable
        return None


def options_of(attention_fn: AttentionFn) -> dict[str, Any]:
    """Returns the options that are bound to an attention with a spec."""
    return dict(attention_fn.options) if isinstance(attention_fn, LearnedAttention) else unbound(attention_fn)[1]


def head_sizes_of(attention_fn: AttentionFn, d_k: int, d_v: int | None = None) -> HeadSizes:
    """Returns the numbers of features that a head has in keys, values and outputs.

    Args:
      attention_fn: the attention; see `AttentionSpec.head_sizes`.
      d_k: head size H of queries.
      d_v: head size of values; None means d_k, or what the attention determines.

    Raises:
      ValueError: if `d_v` is set and the attention determines it.
    """
    spec = spec_of(attention_fn)
    if spec is None or spec.head_sizes is None:
        d_v = d_k if d_v is None else d_v
        return HeadSizes(key=d_k, value=d_v, output=d_v)
    if d_v is not None:
        raise ValueError(f"d_v must be None with {spec.name} attention, which has options for sizes, got {d_v}")
    return spec.head_sizes(d_k=d_k, **options_of(attention_fn))


def decoding_of(attention_fn: AttentionFn) -> CachedDecoding | RecurrentDecoding | None:
    """Returns how an attention decodes one token at a time.

    Returns:
      None if the attention has no decoding or no spec, or an option of `_NOT_DECODED` is bound to it: then the model
      processes all tokens again for each new token.
    """
    spec = spec_of(attention_fn)
    if spec is None or spec.decoding is None:
        return None
    options = options_of(attention_fn)
    bound = {name for name, option in options.items() if option is not None}
    if (_NOT_DECODED & bound) - spec.options.keys():
        return None
    if any(isinstance(option, (jax.Array, np.ndarray)) for option in options.values()):  # arrays are not hashable
        decoding = spec.decoding(**options)
    else:
        decoding = _decoding(spec.name, tuple(options.items()))
    if isinstance(decoding, CachedDecoding) and decoding.attention_fn is None:
        return decoding._replace(attention_fn=attention_fn)
    return decoding


_NOT_DECODED = {"local_window_size", "logits_soft_cap", "mask_mod", "score_mod", "sinks"}
"""Options that change the weights, and that `AttentionSpec.decoding` does not take unless they are the spec's own."""


@functools.lru_cache(maxsize=256)
def _decoding(name: str, options: tuple[tuple[str, Any], ...]) -> CachedDecoding | RecurrentDecoding | None:
    """Returns the same function objects for equal options, so that compiled programs are shared."""
    decoding = SPECS[name].decoding
    return decoding and decoding(**dict(options))


# The spec of each attention function without its bound options; the first one if several share a function.
_SPEC_OF: dict[Any, AttentionSpec] = {}
for _spec in SPECS.values():
    _SPEC_OF.setdefault(unbound(_spec.function)[0], _spec)

# Names that are accepted beside those of `SPECS`: "window_attention", and "sliding_window_attention", its function.
_OTHER_NAMES = {f"{name}_attention": name for name in SPECS}
_OTHER_NAMES |= {function.__name__: spec.name for function, spec in _SPEC_OF.items() if function.__name__[0] != "_"}


def _option_fields() -> list[tuple[str, Any, Any]]:
    """Returns (name, type, field) of each field of `AttentionOptions`: the options of all specs with their help."""
    owners: dict[str, dict[str, Any]] = {}  # by name of the option: the specs that have it, each with its `Option`
    for spec in SPECS.values():
        for name, option in spec.options.items():
            owners.setdefault(name, {})[spec.name] = option
    fields: list[tuple[str, Any, Any]] = []
    for name, by_spec in owners.items():
        texts: dict[str, list[str]] = {}  # by help text: names of the specs, because specs may share a text
        for spec_name, option in by_spec.items():
            texts.setdefault(option.help, []).append(spec_name)
        texts_by_specs = (f"{', '.join(spec_names)}: {text}" for text, spec_names in texts.items())
        metadata: dict[str, Any] = {"help": "; ".join(texts_by_specs)}
        options = list(by_spec.values())
        for limit in ("at_least", "at_most"):  # the loosest limit, if all attentions with the option have one
            values = [getattr(option, limit) for option in options]
            if None not in values:
                metadata[limit] = min(values) if limit == "at_least" else max(values)
        fields.append((name, options[0].kind | None, dataclasses.field(default=None, metadata=metadata)))
    return fields


_Options: Any = dataclasses.make_dataclass("_Options", _option_fields(), unsafe_hash=True)


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable, because configurations are static parts of models
class AttentionOptions(_Options):
    """Options of the attentions that `AttentionConfig` names; None means the default of the attention function."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def only(self, names: Collection[str]) -> "AttentionOptions":
        """Returns a copy with only the named options set."""
        return AttentionOptions(**{name: value for name, value in self.given.items() if name in names})


@documented
@dataclasses.dataclass(unsafe_hash=True)
class AttentionConfig:
    """The self-attention of a model's layers, by name: `--config.model.attention.name=window`.

    Several names are a pattern that the layers repeat: with "window,window,dense" every third layer has dense
    attention. Each attention gets only the options that its spec has.
    """

    name: str = "dense"  # name of an attention in `SPECS`, or several, comma-separated, which the layers repeat
    options: AttentionOptions = dataclasses.field(default_factory=AttentionOptions)

    def check(
        self,
        *,
        is_causal: bool = False,
        has_bias: bool = False,
        is_packed: bool = False,
        is_float32: bool = False,
        drops: str | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        d_k: int | None = None,
    ) -> None:
        """Checks that the attentions exist, have the options that are set, and support what a model needs.

        Args:
          is_causal: whether the model hides future tokens.
          has_bias: whether it adds a bias for each pair of positions.
          is_packed: whether it is trained on packed sequences.
          is_float32: whether it computes in float32.
          drops: name of the field that sets a dropout rate of attention weights above 0; None if there is no dropout.
          num_heads: N; None skips the checks of options that depend on the sizes, as None for d_k does.
          num_kv_heads: K; None means N.
          d_k: head size.

        Raises:
          ValueError: if a check fails; the message names the attention and the requirement.
        """
        set_options = self.options.given
        for name in self.names:
            if name not in SPECS:
                similar = difflib.get_close_matches(name, SPECS, n=1)
                hint = f"; did you mean {similar[0]!r}?" if similar else ""
                raise ValueError(f"attention.name={name!r} must be one of {', '.join(SPECS)}{hint}")
        known = list(dict.fromkeys(option for name in self.names for option in SPECS[name].options))
        unknown = [name for name in set_options if name not in known]
        if unknown:
            raise ValueError(
                f"attention.options.{unknown[0]} is not an option of {self.name} attention; its options are: "
                f"{', '.join(known) or 'none'}"
            )
        for name in self.names:
            spec = SPECS[name]
            missing = [key for key, option in spec.options.items() if option.required and key not in set_options]
            if missing:
                raise ValueError(f"{name} attention needs attention.options.{missing[0]}: set it")
            if spec.causal_only and not is_causal:
                raise ValueError(f"{name} attention is causal only, and this model is not: use another attention")
            if is_causal and not spec.causal:
                raise ValueError(f"{name} attention has no causal form, which this model needs: use another attention")
            if has_bias and not spec.bias:
                raise ValueError(
                    f"{name} attention takes no bias for each pair of positions, which this model adds: use another "
                    "attention or other positions"
                )
            if is_packed and not spec.segments:
                raise ValueError(
                    f"{name} attention does not support packed sequences: turn packing off or use another attention"
                )
            if num_kv_heads not in (None, num_heads) and not spec.grouped_queries:
                raise ValueError(f"{name} attention needs as many key heads as query heads: leave num_kv_heads out")
            if drops is not None and not spec.dropout:
                raise ValueError(f"{drops} must be 0 with {name} attention, which has no dropout of weights")
            if is_float32 and spec.bfloat16_only:
                raise ValueError(f'dtype must be "bfloat16" with {name} attention, got "float32"')
        if num_heads is not None and d_k is not None:
            for attention in self.pattern():
                _check_options(attention, num_heads, num_kv_heads or num_heads, d_k)

    @property
    def names(self) -> list[str]:
        """Names of the attentions in the order of the layers; that of a function is accepted for that of its spec."""
        return [_OTHER_NAMES.get(name, name) for name in self.name.split(",")]

    def pattern(self) -> "list[AttentionConfig]":
        """Returns the configuration of each layer of the pattern, in order."""
        if len(self.names) == 1:
            return [self]
        return [AttentionConfig(name, self.options.only(SPECS[name].options)) for name in self.names]

    def head_sizes(self, d_k: int) -> HeadSizes:
        """Returns the numbers of features that a head has in keys, values and outputs, `d_k` being that of queries."""
        (name,) = self.names  # a pattern is split by `pattern` first
        spec = SPECS[name]
        return HeadSizes(d_k, d_k, d_k) if spec.head_sizes is None else spec.head_sizes(d_k=d_k, **self.options.given)

    def make(
        self,
        num_heads: int,
        d_k: int,
        *,
        num_kv_heads: int | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> AttentionFn:
        """Returns the attention of one layer: a function, or a `LearnedAttention` if its spec has parameters or state.

        For equal options the same function object is returned, so that compiled programs are shared.

        Args:
          num_heads: N.
          d_k: H, the size of a query and a key.
          num_kv_heads: K; None means N.
          param_dtype: dtype of the parameters, if the attention has any.
          rngs: stream `params` initializes the parameters.
        """
        (name,) = self.names  # a pattern is split by `pattern` first
        spec = SPECS[name]
        if spec.parameters or spec.state:
            return LearnedAttention(
                name,
                self.options.given,
                num_heads=num_heads,
                num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
                d_k=d_k,
                param_dtype=param_dtype,
                rngs=rngs,
            )
        return _bound(name, self.options)


@functools.lru_cache(maxsize=256)
def _bound(name: str, options: AttentionOptions) -> AttentionFn:
    """Returns the attention called `name` with options bound; the same object for equal options."""
    spec = SPECS[name]
    passed = spec.passed(options.given)
    return functools.partial(spec.function, **passed) if passed else spec.function


@functools.lru_cache(maxsize=256)
def _check_options(attention: AttentionConfig, num_heads: int, num_kv_heads: int, d_k: int) -> None:
    """Raises ValueError if the attention function rejects its options: traces it with 8 tokens, without computing.

    Attentions for one platform are skipped: they have no options.
    """
    spec = SPECS[attention.names[0]]
    if spec.platform is not None:
        return
    features = attention.head_sizes(d_k)
    shapes = ((num_heads, d_k), (num_kv_heads, features.key), (num_kv_heads, features.value))
    query, key, value = (jax.ShapeDtypeStruct((1, 8, *shape), jnp.float32) for shape in shapes)
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "d_k": d_k}
    shapes = spec.gates(**sizes, **attention.options.given) if spec.gates is not None else {}
    gates = {name: jax.ShapeDtypeStruct((1, 8, *shape), jnp.float32) for name, shape in shapes.items()}
    try:
        jax.eval_shape(
            lambda query, key, value, gates: attention.make(**sizes, rngs=nnx.Rngs(0))(query, key, value, **gates),
            query,
            key,
            value,
            gates,
        )
    except ValueError as error:
        raise ValueError(f"{attention.name} attention: {error}") from None
