"""Multi-head attention: projections around a pure attention function."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.axial import attention_over_axes
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.masks import Bias, Mask, SegmentIds
from tfx_jax.nn.basic import Linear
from tfx_jax.nn.cores import AttentionFn
from tfx_jax.nn.distribution import current_distribution


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Owns the four projections and nothing else: what happens between them is `attention_fn`, so every attention of
    `tfx_jax.functional` plugs in, with its own options bound by `functools.partial`. Kernels keep the heads as an axis
    of their own (query [D, N, H], key [D, K, H], value [D, K, U], out [N, U, D]), so heads can be sharded.
    """

    def __init__(
        self,
        d_model: int | None = None,
        num_heads: int | None = None,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        num_kv_heads: int | None = None,
        d_key_input: int | None = None,
        d_value_input: int | None = None,
        d_out: int | None = None,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        attention_fn: AttentionFn = dot_product_attention,
        scale: float | None = None,
        attention_axes: Sequence[int] | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **flax_arguments: Any,
    ):
        """Initializes the projections.

        Args:
          d_model: width D of the query inputs, and of whatever is not said otherwise.
          num_heads: N, the paper's h.
          d_k: query and key head size H; None means d_model / num_heads.
          d_v: value head size U; None means d_k.
          num_kv_heads: K, a divisor of num_heads; None means num_heads.
          d_key_input: width of the inputs that keys are made from; None means d_model.
          d_value_input: width of the inputs that values are made from; None means d_key_input.
          d_out: width of the output; None means d_model.
          use_bias: whether the projections have one; the paper's have none.
          dropout_rate: of the attention weights; 0 in the paper's text, 0.1 in its code.
          attention_fn: any attention with the signature of `tfx_jax.functional.dot_product_attention`, a function or a
            Module that owns parameters.
          scale: multiplies the logits; None leaves it to `attention_fn`.
          attention_axes: for inputs [B, ..., D] of more axes, those to attend over, negative ones counted from the end;
            see `tfx_jax.functional.attention_over_axes`. None means the one axis of a sequence.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: stream `params` initializes the parameters: Glorot uniform, query, key and value with half the
          variance, as
            if they were one matrix. The paper is silent; attention then starts flatter.
          flax_arguments: must be empty; the error says what the arguments of `flax.nnx.MultiHeadAttention` are called
            here.

        Raises:
          TypeError: for a missing size or an unknown argument.
          ValueError: if a size is below 1, `d_k` is None and num_heads does not divide d_model, or num_kv_heads does
            not divide num_heads.
        """
        if d_model is None or num_heads is None or flax_arguments:
            named = f" (got {', '.join(flax_arguments)})" if flax_arguments else ""
            raise TypeError(
                f"MultiHeadAttention takes d_model and num_heads{named}: write MultiHeadAttention(512, 8, rngs=rngs); "
                "Flax's in_features is d_model, qkv_features is num_heads * d_k, out_features is d_out"
            )
        sizes = {"d_model": d_model, "num_heads": num_heads, "d_k": d_k, "d_v": d_v, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if d_k is None:
            if d_model % num_heads:
                raise ValueError(f"d_model={d_model} is not divisible by num_heads={num_heads}; give d_k")
            d_k = d_model // num_heads
        d_v = d_k if d_v is None else d_v
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}")
        d_key_input = d_model if d_key_input is None else d_key_input
        d_value_input = d_key_input if d_value_input is None else d_value_input
        linear = functools.partial(Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        project = functools.partial(linear, kernel_init=nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform"))
        self.query = project(d_model, (num_heads, d_k))
        self.key = project(d_key_input, (num_kv_heads, d_k))
        self.value = project(d_value_input, (num_kv_heads, d_v))
        self.out = linear(
            (num_heads, d_v),
            d_model if d_out is None else d_out,
            kernel_init=nnx.initializers.glorot_uniform(),
        )
        self.dropout_rate = dropout_rate
        if attention_axes is not None:
            attention_fn = functools.partial(attention_over_axes, attention_fn, axes=tuple(attention_axes))
        self.attention_fn = attention_fn
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S _"] | None = None,
        value_memory: Float[Array, "B S _"] | None = None,
        *,
        bias: Bias | None = None,
        mask: Mask | None = None,
        is_causal: bool = False,
        segment_ids: SegmentIds | None = None,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attends from `x` to `memory`.

        Args:
          x: what the queries are made from.
          memory: what the keys are made from; None means `x`, self-attention.
          value_memory: what the values are made from; None means `memory`.
          bias: see `tfx_jax.functional.dot_product_attention`, like the arguments below.
          mask: True where a query may attend.
          is_causal: hide the future.
          segment_ids: of packed sequences.
          rngs: stream `dropout`; None means evaluation.
          return_weights: also return the attention weights, [B, N, T, S].

        Returns:
          [B, T, d_out], or a pair of it and the weights; with `attention_axes`, the axes of `x` instead of T.
        """
        key, value = self.project_memory(x if memory is None else memory, value_memory)
        return self.attend(
            x,
            key,
            value,
            bias=bias,
            mask=mask,
            is_causal=is_causal,
            segment_ids=segment_ids,
            rngs=rngs,
            return_weights=return_weights,
        )

    def project_memory(
        self, memory: Float[Array, "B S _"], value_memory: Float[Array, "B S _"] | None = None
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Makes the keys and values that `attend` takes: once for a memory that many steps look at."""
        return self.key(memory), self.value(memory if value_memory is None else value_memory)

    def attend(
        self,
        x: Float[Array, "B T D"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K U"],
        *,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attends from `x` to keys and values that are projected already; options and result as in the call."""
        # What is not asked for is not passed on: not every attention knows every option.
        options = {name: option for name, option in options.items() if option is not None}
        if self.scale is not None:
            options["scale"] = self.scale
        if rngs is not None and self.dropout_rate:
            options |= {"dropout_rate": self.dropout_rate, "dropout_rng": rngs.dropout()}
        if rngs is not None and getattr(self.attention_fn, "has_running_statistics", False):
            options["is_training"] = True
        if return_weights:
            options["return_weights"] = True
        result = current_distribution().attend(self.attention_fn, self.query(x), key, value, **options)
        if return_weights:
            context, weights = result
            return self.out(context), weights
        return self.out(result)
