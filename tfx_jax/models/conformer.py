"""The Conformer, a speech recognizer with attention and convolutions (Gulati et al., 2020), with CTC."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.signature import padding_mask
from tfx_jax.functional.layers import add_bias
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import FeedForward, LayerNorm, Linear, drop
from tfx_jax.nn.layers import Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

_GLOROT = nnx.initializers.glorot_uniform()
# num_layers, d_model and num_heads of each published model (Gulati et al., 2020, table 1).
_SIZES = {"Conformer-S": (16, 144, 4), "Conformer-M": (16, 256, 4), "Conformer-L": (17, 512, 8)}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class ConformerConfig:
    """Configuration of a Conformer; the defaults are Conformer-S (https://arxiv.org/abs/2005.08100, table 1).

    One difference: the paper decodes with an LSTM transducer; here, as in later work with this encoder, with CTC.
    """

    vocab_size: int = at_least(0, 29)  # labels including the blank, which is 0; set by the task
    num_features: int = at_least(1, 80)  # features of a frame
    num_layers: int = at_least(1, 16)
    d_model: int = at_least(1, 144)
    num_heads: int = at_least(1, 4)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    kernel_size: int = at_least(1, 32)  # width of the convolutions in steps
    dropout_rate: float = fraction(0.1)  # dropout of sublayers' outputs, hidden units and the first layer's input
    attention_dropout_rate: float = fraction(0.1)  # dropout of attention weights
    attention: AttentionConfig = dataclasses.field(default_factory=lambda: AttentionConfig("relative"))
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "ctc"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "ConformerConfig":
        """Returns the configuration of "Conformer-S", "Conformer-M" or "Conformer-L".

        Raises:
          ValueError: if `name` is unknown; the message lists the names.
        """
        if name not in _SIZES:
            raise ValueError(f"no published Conformer is called {name!r}; there are {', '.join(_SIZES)}")
        sizes: dict[str, Any] = dict(zip(("num_layers", "d_model", "num_heads"), _SIZES[name], strict=True))
        return cls(**sizes | overrides)

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even for sinusoidal positions")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # positions are not learned, so any length is possible
        self.num_features, self.kernel_size = 8, 3
        self.num_layers, self.d_model, self.num_heads, self.d_ff = 1, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "Conformer":
        return Conformer(self, rngs=rngs)

    @property
    def subsampling(self) -> int:
        """Number of frames per step: each of two convolutions halves their number."""
        return 4

    def num_steps(self, num_frames: Any) -> Any:
        """Returns the number of steps for a number of frames (an integer or an array), rounded up."""
        return -(-num_frames // 4)


class Subsampling(nnx.Module):
    """Two 3 x 3 convolutions of stride 2 over time and frequency, then a linear layer."""

    def __init__(self, num_features: int, d_model: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes both convolutions, with d_model channels, and the linear layer."""
        init = nnx.initializers.he_normal(in_axis=(0, 1, 2), out_axis=3)
        self.first = nnx.Param(init(rngs.params(), (3, 3, 1, d_model), jnp.float32))
        self.first_bias = nnx.Param(jnp.zeros(d_model))
        self.second = nnx.Param(init(rngs.params(), (3, 3, d_model, d_model), jnp.float32))
        self.second_bias = nnx.Param(jnp.zeros(d_model))
        bands = -(-num_features // 4)
        self.out = Linear(bands * d_model, d_model, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, frames: Float[Array, "B T F"], num_frames: Int[Array, " B"]) -> Float[Array, "B S D"]:
        """Returns a vector for every four frames; padding is set to zero before each convolution."""
        x = frames.astype(self.dtype)[..., None]
        for kernel, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
            exists = jnp.arange(x.shape[1])[None] < num_frames[:, None]
            x = jnp.where(exists[:, :, None, None], x, jnp.zeros((), x.dtype))
            x = jax.lax.conv_general_dilated(
                x,
                kernel[...].astype(self.dtype),
                window_strides=(2, 2),
                padding=((1, 1), (1, 1)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(add_bias(x, bias[...]))
            num_frames = -(-num_frames // 2)
        return self.out(x.reshape(*x.shape[:2], -1))


class Convolution(nnx.Module):
    """Convolution module (section 2.2): gated linear unit, depthwise convolution over time, batch norm, swish."""

    decay = 0.99
    epsilon = 1e-5

    def __init__(self, d_model: int, kernel_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Initializes the parameters, and the running mean and variance of the batch norm."""
        self.gated = Linear(d_model, 2 * d_model, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        init = nnx.initializers.lecun_normal(in_axis=0, out_axis=1)
        self.kernel = nnx.Param(init(rngs.params(), (kernel_size, d_model), jnp.float32))
        self.kernel_bias = nnx.Param(jnp.zeros(d_model))
        self.scale = nnx.Param(jnp.ones(d_model))
        self.bias = nnx.Param(jnp.zeros(d_model))
        self.mean = nnx.BatchStat(jnp.zeros(d_model))
        self.variance = nnx.BatchStat(jnp.ones(d_model))
        self.out = Linear(d_model, d_model, kernel_init=_GLOROT, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "B S D"], exists: Bool[Array, "B S"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B S D"]:
        """Transforms steps; `exists` is False for padding, which changes no other step.

        Training (`rngs` is not None) normalizes by the statistics of the batch and updates their moving averages.
        """
        value, gate = jnp.split(self.gated(x), 2, axis=-1)
        x = jnp.where(exists[..., None], value * jax.nn.sigmoid(gate), jnp.zeros((), value.dtype))
        size, d_model = self.kernel.shape
        x = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype)[:, None],
            window_strides=(1,),
            padding=(((size - 1) // 2, size // 2),),
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=d_model,
        )
        x = self._normalized(add_bias(x, self.kernel_bias[...]), exists, is_training=rngs is not None)
        return self.out(jax.nn.silu(x))

    def _normalized(self, x: Array, exists: Array, *, is_training: bool) -> Array:
        """Returns batch norm over the steps where `exists` (Ioffe and Szegedy, 2015), computed in float32."""
        x32 = x.astype(jnp.float32)
        if is_training:
            weights = exists.astype(jnp.float32)[..., None]
            count = jnp.maximum(weights.sum(), 1)
            mean = (weights * x32).sum(axis=(0, 1)) / count
            variance = (weights * jnp.square(x32 - mean[None, None])).sum(axis=(0, 1)) / count
            # Evaluation uses running averages, which get no gradient.
            for average, new in ((self.mean, mean), (self.variance, variance)):
                average[...] = self.decay * average[...] + (1 - self.decay) * jax.lax.stop_gradient(new)
        else:
            mean, variance = self.mean[...], self.variance[...]
        scale = self.scale[...] * jax.lax.rsqrt(variance + self.epsilon)
        centered = x32 - mean[None, None]
        return (centered * scale[None, None] + self.bias[...][None, None]).astype(x.dtype)


class ConformerLayer(nnx.Module):
    """Half a feed-forward network, attention, convolution, the other half, and a norm (section 2.4, equation 1)."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        convolution: Convolution,
        make_feed_forward: Callable[[], FeedForward],
        make_residual: Callable[[], Residual],
        d_model: int,
    ):
        """Composes the layer; the functions make both feed-forward networks and the four residual connections."""
        self.first = make_feed_forward()
        self.first_residual = make_residual()
        self.self_attention = self_attention
        self.self_attention_residual = make_residual()
        self.convolution = convolution
        self.convolution_residual = make_residual()
        self.second = make_feed_forward()
        self.second_residual = make_residual()
        self.norm = LayerNorm(d_model)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        exists: Bool[Array, "B S"],
        *,
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """Returns the output and the attention weights, [B, N, S, S] (None unless `return_weights`)."""

        def attend(x: Array) -> tuple[Array, Any]:
            mask = exists[:, None, None]
            if return_weights:
                return self.self_attention(x, mask=mask, rngs=rngs, return_weights=True)
            return self.self_attention(x, mask=mask, rngs=rngs), None

        x = self.first_residual(lambda x: 0.5 * self.first(x, rngs=rngs), x, rngs)
        x, weights = self.self_attention_residual.with_extra(attend, x, rngs)
        x = self.convolution_residual(lambda x: self.convolution(x, exists, rngs=rngs), x, rngs)
        x = self.second_residual(lambda x: 0.5 * self.second(x, rngs=rngs), x, rngs)
        return self.norm(x), weights


class Conformer(nnx.Module):
    """Subsamples frames by four, runs layers of attention and convolution, and returns logits of labels per step."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: ConformerConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other.
        """
        c = checked(config)
        c.attention.check(num_heads=c.num_heads, d_k=c.d_model // c.num_heads)
        dtype = jnp.dtype(c.dtype)

        def make_layer(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> ConformerLayer:
            """Makes a layer with this attention."""
            attention = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                use_bias=True,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=attention_fn or layer_attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs),
                dtype=dtype,
                rngs=rngs,
            )
            return ConformerLayer(
                attention,
                Convolution(c.d_model, c.kernel_size, dtype=dtype, rngs=rngs),
                functools.partial(
                    FeedForward,
                    c.d_model,
                    4 * c.d_model if c.d_ff is None else c.d_ff,
                    activation_fn=jax.nn.silu,
                    dropout_rate=c.dropout_rate,
                    dtype=dtype,
                    rngs=rngs,
                ),
                functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=True),
                c.d_model,
            )

        self.subsampling = Subsampling(c.num_features, c.d_model, dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), c.num_layers, rngs)
        self.classifier = nnx.Linear(c.d_model, c.vocab_size, dtype=jnp.float32, rngs=rngs)
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        frames: Float[Array, "B T F"],
        num_frames: Int[Array, " B"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Computes logits of labels with bidirectional self-attention between steps.

        Args:
          frames: features, [B, T, F], any T; values after the first `num_frames` are ignored.
          num_frames: number of frames of each example, [B]; 0 for a padding example.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits, [B, S, V] with S = ceil(T / 4), of which the first ceil(num_frames / 4) are valid; with
          `return_attention` the pair (logits, {"encoder/0/self": [B, N, S, S], ...}).

        Raises:
          ValueError: if the number of features is not `config.num_features`.
        """
        c = self.config
        if frames.shape[2] != c.num_features:
            raise ValueError(f"frames must have num_features={c.num_features} features, got {frames.shape[2]}")
        x = drop(self.subsampling(frames, num_frames), c.dropout_rate, rngs)
        exists = padding_mask(c.num_steps(num_frames), x.shape[1])[:, 0, 0]

        def encode(layer: ConformerLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, exists, rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=c.remat, unroll=c.unroll)
        logits = self.classifier(x.astype(jnp.float32))
        if not return_attention:
            return logits
        return logits, {f"encoder/{index}/self": weights for index, weights in enumerate(maps)}
