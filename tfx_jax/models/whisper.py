"""Whisper, an encoder-decoder that transcribes and translates speech (Radford et al., 2022).

Paper: https://arxiv.org/abs/2212.04356, section 2.2. `tfx_jax.models.hf.load` reads the published parameters, and
`tfx_jax.generation.speech` transcribes with them.
"""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.encoder_decoder import EncoderDecoder, EncoderMemory, check_special_ids, run_encoder
from tfx_jax.nn.attention import MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, stack_layers

_EPSILON = 1e-5  # of the layer norms


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class WhisperConfig:
    """Configuration of a Whisper; the defaults are the multilingual tiny model (paper, Table 1)."""

    vocab_size: int = at_least(1, 51_865)
    num_bands: int = at_least(1, 80)  # mel bands of a frame
    source_positions: int = at_least(1, 1500)  # positions of the encoder: half as many as frames
    learned_positions: int = at_least(1, 448)  # positions of the decoder, in tokens
    num_layers: int = at_least(1, 4)  # layers of the encoder
    num_decoder_layers: int = at_least(1, 4)
    d_model: int = at_least(1, 384)
    num_heads: int = at_least(1, 6)
    d_ff: int = at_least(1, 1536)
    activation: str = one_of(ACTIVATIONS, "gelu")  # of the feed-forward networks; the convolutions have GELU
    dropout_rate: float = fraction(0.0)  # dropout of each sublayer's output and of embeddings plus positions
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights
    activation_dropout_rate: float = fraction(0.0)  # dropout of hidden feed-forward units
    pad_id: int = at_least(0, 50_257)  # id of the padding token
    start_id: int = at_least(0, 50_258)  # id of the token that the decoder reads first
    eos_id: int = at_least(0, 50_257)  # id of the token that ends a transcript; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    has_position_bias: ClassVar[bool] = False

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")

    @property
    def num_frames(self) -> int:
        """Frames that the encoder reads: 30 seconds in the published models."""
        return 2 * self.source_positions


class Convolution(nnx.Module):
    """Convolution over frames with a window of 3 frames, one of padding on either side, and GELU."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int, dtype: Any, rngs: nnx.Rngs):
        """Initializes the kernel, [inputs, 3, outputs], and a bias of zeros."""
        init = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
        self.kernel = nnx.Param(init(rngs.params(), (num_inputs, 3, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.stride, self.dtype = stride, dtype

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B U D"]:
        """Returns U = ceil(T / stride) vectors."""
        kernel, axes = self.kernel[...].astype(self.dtype), ("NWC", "IWO", "NWC")
        x = jax.lax.conv_general_dilated(x.astype(self.dtype), kernel, (self.stride,), [(1, 1)], dimension_numbers=axes)
        return jax.nn.gelu(add_bias(x, self.bias[...]), approximate=False)


class Whisper(EncoderDecoder):
    """Two convolutions and pre-norm layers over log-mel frames, and a causal decoder of text tokens.

    A source is frames, [B, config.num_frames, F], of `tfx_jax.functional.whisper_features`; nothing in it is padding.
    """

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if `num_heads` does not divide `d_model`, `d_model` is odd, the activation is unknown, or `pad_id`
            or `start_id` is outside the vocabulary.
        """
        c, dtype = checked(config), jnp.dtype(config.dtype)
        check_special_ids(c)
        options: dict[str, Any] = {"use_bias": True, "use_key_bias": False, "dropout_rate": c.attention_dropout_rate}
        attention = functools.partial(MultiHeadAttention, c.d_model, c.num_heads, **options, dtype=dtype)
        feed_forward = functools.partial(
            FeedForward,
            c.d_model,
            c.d_ff,
            activation_fn=ACTIVATIONS[c.activation],
            dropout_rate=c.activation_dropout_rate,
            dtype=dtype,
        )
        residual = functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=True, epsilon=_EPSILON)

        def encoder_layer(rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(attention(rngs=rngs), feed_forward(rngs=rngs), residual)

        def decoder_layer(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(attention(rngs=rngs), attention(rngs=rngs), feed_forward(rngs=rngs), residual)

        self.convolution = Convolution(c.num_bands, c.d_model, stride=1, dtype=dtype, rngs=rngs)
        self.halving = Convolution(c.d_model, c.d_model, stride=2, dtype=dtype, rngs=rngs)
        self.source_positions = LearnedPositions(c.source_positions, c.d_model, rngs=rngs)
        self.source_positions.table[...] = sinusoidal_positions(
            jnp.arange(c.source_positions), c.d_model, is_interleaved=False, reaches_base=True
        )
        self.encoder_layers = stack_layers(encoder_layer, c.num_layers, rngs)
        self.encoder_norm = LayerNorm(c.d_model, epsilon=_EPSILON)
        self.embedding = Embedding(c.vocab_size, c.d_model, dtype=dtype, rngs=rngs)
        self.target_positions = LearnedPositions(c.learned_positions, c.d_model, rngs=rngs)
        self.decoder_layers = stack_layers(decoder_layer, c.num_decoder_layers, rngs)
        self.decoder_norm = LayerNorm(c.d_model, epsilon=_EPSILON)
        self.config = copy.deepcopy(c)

    def embed(
        self,
        tokens: Any,
        positions: Int[Array, " T"],
        rngs: nnx.Rngs | None = None,
        *,
        is_source: bool = False,
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer, for frames [B, T, F] (`is_source`) or target tokens [B, T]."""
        if is_source:
            x = add_bias(self.halving(self.convolution(tokens)), self.source_positions.table[...])
        else:
            x = add_bias(self.embedding(tokens), self.target_positions(positions))
        return drop(x, self.config.dropout_rate, rngs)

    def encode(
        self, source: Float[Array, "B T F"], rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> tuple[EncoderMemory, dict[str, Array]]:
        """Encodes frames.

        Raises:
          ValueError: if the number of frames or bands is not that of the model.
        """
        c = self.config
        if source.shape[1:] != (c.num_frames, c.num_bands):
            raise ValueError(f"frames of shape {source.shape[1:]}, but the model reads {(c.num_frames, c.num_bands)}")
        output, maps = run_encoder(self, source, None, rngs, return_attention)
        return EncoderMemory(output, None), maps

    def encoder_output(self, x: Float[Array, "B S D"], rngs: nnx.Rngs | None) -> Float[Array, "B S D"]:
        return self.encoder_norm(x)

    def last_norm(self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        return self.decoder_norm(x)

    def output(self) -> Embedding:
        return self.embedding

    @property
    def max_positions(self) -> int | None:
        return self.config.learned_positions
