"""SAN-CTC, a speech recognizer of self-attention layers trained with CTC (Salazar et al., 2019)."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.signature import padding_mask
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import FeedForward, LayerNorm, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class SanCTCConfig:
    """Configuration of a SAN-CTC; the defaults are the paper's model (https://arxiv.org/abs/1901.10055, section 4).

    One difference from the paper: layers are pre-norm, so that small models train without a long warmup.
    """

    vocab_size: int = at_least(0, 29)  # labels including the blank, which is 0; set by the task
    num_features: int = at_least(1, 80)  # features of a frame
    subsampling: int = at_least(1, 3)  # number of frames stacked into one step
    num_layers: int = at_least(1, 10)
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # dropout of each sublayer's output and of steps plus positions
    attention_dropout_rate: float = fraction(0.1)  # dropout of attention weights
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # attention of every layer
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "ctc"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even for sinusoidal positions")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # positions are not learned, so any length is possible
        self.num_features, self.subsampling = 8, 2
        self.num_layers, self.d_model, self.num_heads, self.d_ff = 1, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "SanCTC":
        return SanCTC(self, rngs=rngs)

    def num_steps(self, num_frames: Any) -> Any:
        """Returns the number of steps for a number of frames (an integer or an array), rounded up."""
        return -(-num_frames // self.subsampling)


class SanCTC(nnx.Module):
    """Projects stacked frames, adds sinusoids, runs pre-norm encoder layers, and returns logits of labels per step."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: SanCTCConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
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
        residual = functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=True)

        def make_layer(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes a layer with this attention."""
            attention = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                dropout_rate=c.attention_dropout_rate,
                attention_fn=attention_fn or layer_attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs),
                dtype=dtype,
                rngs=rngs,
            )
            d_ff = 4 * c.d_model if c.d_ff is None else c.d_ff
            return EncoderLayer(attention, FeedForward(c.d_model, d_ff, dtype=dtype, rngs=rngs), residual)

        self.frames = nnx.Linear(c.subsampling * c.num_features, c.d_model, dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), c.num_layers, rngs)
        self.norm = LayerNorm(c.d_model)
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
          float32 logits, [B, S, V] with S = ceil(T / subsampling), of which the first ceil(num_frames / subsampling)
          are valid; with `return_attention` the pair (logits, {"encoder/0/self": [B, N, S, S], ...}).

        Raises:
          ValueError: if the number of features is not `config.num_features`.
        """
        c = self.config
        if frames.shape[2] != c.num_features:
            raise ValueError(f"frames must have num_features={c.num_features} features, got {frames.shape[2]}")
        x = self.frames(stack_frames(frames, num_frames, c.subsampling))
        positions = sinusoidal_positions(jnp.arange(x.shape[1]), c.d_model)
        x = x + positions[None].astype(x.dtype)
        x = drop(x, c.dropout_rate, rngs)
        mask = padding_mask(c.num_steps(num_frames), x.shape[1])

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, mask=mask, rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=c.remat, unroll=c.unroll)
        logits = self.classifier(self.norm(x).astype(jnp.float32))
        if not return_attention:
            return logits
        return logits, {f"encoder/{index}/self": weights for index, weights in enumerate(maps["self"])}


def stack_frames(
    frames: Float[Array, "B T F"], num_frames: Int[Array, " B"], size: int
) -> Float[Array, "B steps size*F"]:
    """Concatenates every `size` frames into one step (Salazar et al., 2019, section 3.2: "reshape").

    Args:
      frames: features, [B, T, F].
      num_frames: number of frames of each example, [B]; frames after them become zeros.
      size: number of frames per step; the last step is filled up with zeros.

    >>> frames = jnp.array([[[1.0], [2.0], [3.0], [9.0]]])
    >>> stack_frames(frames, jnp.array([3]), 2).tolist()
    [[[1.0, 2.0], [3.0, 0.0]]]
    """
    rows, length, features = frames.shape
    exists = jnp.arange(length)[None] < num_frames[:, None]
    frames = jnp.where(exists[..., None], frames, jnp.zeros((), frames.dtype))
    frames = jnp.pad(frames, ((0, 0), (0, -length % size), (0, 0)))
    return frames.reshape(rows, -1, size * features)
