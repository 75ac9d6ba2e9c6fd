"""Encoder and decoder layers (Vaswani et al., 2017, section 3.1), composed of sublayers that the caller makes."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.signature import Bias, Mask
from tfx_jax.nn.attention import KVCache, MultiHeadAttention
from tfx_jax.nn.basic import FeedForward, LayerNorm, drop
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
        sublayer: Callable[[Float[Array, "B T D"]], tuple[Float[Array, "B T D"], Any]],
        x: Float[Array, "B T D"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Applies `y, extra = sublayer(x)` with residual connection, dropout and norms; returns the sum and `extra`."""
        y, extra = sublayer(self.norm(x) if self.pre_norm and self.norm is not None else x)
        y = y if self.output_norm is None else self.output_norm(y)
        y = drop(y, self.dropout_rate, rngs)
        x = x + (y if self.scale == 1.0 else self.scale * y)
        return (x if self.pre_norm or self.norm is None else self.norm(x)), extra


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward. With `is_causal` it is the layer of a language model such as GPT."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feed_forward: FeedForward | MixtureOfExperts,
        make_residual: Callable[[], Residual],
    ):
        self.self_attention = self_attention
        self.self_attention_residual = make_residual()
        self.feed_forward = feed_forward
        self.feed_forward_residual = make_residual()

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

        x, extras = self.self_attention_residual(attend, x, rngs)
        x, _ = self.feed_forward_residual(lambda x: (_transform(self.feed_forward, x, token_mask, rngs), None), x, rngs)
        return x, extras or None


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention to the encoder's output, then feed-forward."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: FeedForward | MixtureOfExperts,
        make_residual: Callable[[], Residual],
    ):
        self.self_attention = self_attention
        self.self_attention_residual = make_residual()
        self.cross_attention = cross_attention
        self.cross_attention_residual = make_residual()
        self.feed_forward = feed_forward
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

        x, extras = self.self_attention_residual(attend_self, x, rngs)
        x, cross_weights = self.cross_attention_residual(attend_memory, x, rngs)
        x, _ = self.feed_forward_residual(lambda x: (_transform(self.feed_forward, x, token_mask, rngs), None), x, rngs)
        return x, extras | ({"cross": cross_weights} if return_weights else {}) or None


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
    """Attends from `x` to a cache and to `x`; returns the output and the extras "self" (weights) and "cache"."""
    recent = None if cache is None else cache.recent
    tokens = {"mask": options.get("mask"), "segment_ids": options.get("segment_ids"), "recent": recent}
    new_entries = attention.project_cache(x, positions, **tokens)
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
        return feed_forward(x, mask=token_mask, rngs=rngs)
    return feed_forward(x, rngs=rngs)


def _with_extra(result: Any) -> tuple[Array, Any]:
    """Returns an attention's result as (output, weights), with weights None if they were not requested."""
    return result if isinstance(result, tuple) else (result, None)
