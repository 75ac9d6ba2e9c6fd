"""Attentions that own what they learn, as cores of multi-head attention: see `Core` of `tfx_jax.nn.cores`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.additive import additive_attention, general_attention
from tfx_jax.functional.attention.masks import Mask
from tfx_jax.functional.attention.relative import relative_attention
from tfx_jax.functional.attention.routing import routing_attention, update_centroids
from tfx_jax.functional.layers import layer_norm
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.nn.attention_options import AttentionOptions


class AdditiveAttention(nnx.Module):
    """Additive attention (Bahdanau et al., 2015) with a hidden layer for each head."""

    scores_pairs = True

    def __init__(
        self,
        num_heads: int,
        d_k: int,
        options: AttentionOptions,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        d_hidden = options.d_hidden or d_k
        draw = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0)
        self.w_query = nnx.Param(draw(rngs.params(), (num_heads, d_k, d_hidden), param_dtype))
        self.w_key = nnx.Param(draw(rngs.params(), (num_heads, d_k, d_hidden), param_dtype))
        self.v = nnx.Param(nnx.initializers.normal(d_hidden**-0.5)(rngs.params(), (num_heads, d_hidden), param_dtype))

    def __call__(
        self, query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], *arguments: Any, **options: Any
    ) -> Any:
        """Attends; see `tfx_jax.functional.additive_attention`. Each query head has its own view of its key head."""
        dtype = query.dtype
        if key.shape[2] and not query.shape[2] % key.shape[2]:
            key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)  # [B, S, N, H]
        weights = {name: getattr(self, name)[...].astype(dtype) for name in ("w_query", "w_key", "v")}
        return additive_attention(query, key, *arguments, **weights, **options)


class GeneralAttention(nnx.Module):
    """The general score of Luong et al. (2015) with a matrix for each head, which starts as the scaled dot product."""

    scores_pairs = True

    def __init__(
        self,
        num_heads: int,
        d_k: int,
        options: AttentionOptions,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        del options, rngs
        self.w = nnx.Param(jnp.tile(jnp.eye(d_k, dtype=param_dtype)[None] * d_k**-0.5, (num_heads, 1, 1)))

    def __call__(self, query: Float[Array, "B T N H"], *arguments: Any, **options: Any) -> Any:
        """Attends; see `tfx_jax.functional.general_attention`."""
        return general_attention(query, *arguments, w=self.w[...].astype(query.dtype), **options)


class RelativeAttention(nnx.Module):
    """Attention by content and distance (Transformer-XL: Dai et al., 2019, section 3.3), without a memory."""

    scores_pairs = False

    def __init__(
        self,
        num_heads: int,
        d_k: int,
        options: AttentionOptions,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        del options
        d_model = num_heads * d_k
        draw = nnx.initializers.glorot_uniform()
        self.relative_key = nnx.Param(
            draw(rngs.params(), (d_model, d_model), param_dtype).reshape(d_model, num_heads, d_k)
        )
        self.content_bias = nnx.Param(jnp.zeros((num_heads, d_k), param_dtype))
        self.position_bias = nnx.Param(jnp.zeros((num_heads, d_k), param_dtype))

    def __call__(
        self, query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], *arguments: Any, **options: Any
    ) -> Any:
        """Attends; see `tfx_jax.functional.relative_attention`, whose encodings of distances are sinusoids here."""
        dtype, kernel = query.dtype, self.relative_key[...]
        distances = jnp.arange(key.shape[1] - 1, -query.shape[1], -1)
        encodings = sinusoidal_positions(distances, kernel.shape[0]).astype(dtype)
        return relative_attention(
            query,
            key,
            *arguments,
            relative_key=jnp.einsum("PD,DNH->PNH", encodings, kernel.astype(dtype)),
            content_bias=self.content_bias[...].astype(dtype),
            position_bias=self.position_bias[...].astype(dtype),
            **options,
        )


class RoutingAttention(nnx.Module):
    """Attention inside clusters whose centroids follow the tokens (Routing Transformer: Roy et al., 2020).

    The centroids are state: no gradient reaches them, training moves them, and evaluation leaves them as they are.
    """

    scores_pairs = False
    has_running_statistics = True

    def __init__(
        self,
        num_heads: int,
        d_k: int,
        options: AttentionOptions,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        del param_dtype
        drawn = jax.random.normal(rngs.params(), (num_heads, options.num_clusters or 1, d_k))
        self.centroids = nnx.BatchStat(layer_norm(drawn))
        self.window = 1 if options.window is None else options.window  # a configuration without it is refused
        self.decay = 0.999 if options.decay is None else options.decay

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K U"],
        bias: None = None,
        mask: Mask | None = None,
        *,
        is_training: bool = False,
        **options: Any,
    ) -> Any:
        """Attends, and moves the centroids if `is_training`; see `tfx_jax.functional.routing_attention`."""
        centroids = self.centroids[...]
        if is_training:
            self.centroids[...] = update_centroids(centroids, query, key, mask, decay=self.decay)
        options |= {"centroids": centroids, "window": self.window}
        return routing_attention(query, key, value, bias, mask, **options)
