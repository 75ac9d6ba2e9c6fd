"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017), and its relatives by options.

These are Marian, BART, mBART, PEGASUS and M2M-100, whose Hugging Face folders `tfx_jax.models.hf.load` reads.
"""

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderClassifier,
    check_special_ids,
)
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention, spec_of
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.stack import REMATS, stack_layers

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class TransformerConfig:
    """Configuration of a Transformer; the defaults are the paper's base model (Table 3)."""

    # Size of the vocabulary that both languages share; 0: `train` chooses it by the amount of training text.
    vocab_size: int = at_least(0, 37_000)
    source_vocab_size: int | None = at_least(1, None)  # None: sources use the vocabulary and embedding of targets
    num_layers: int = at_least(1, 6)  # the paper's N, in the encoder and again in the decoder
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)  # the paper's h
    d_k: int | None = at_least(1, None)  # None: d_model / num_heads
    d_v: int | None = at_least(1, None)  # None: d_k's default, d_model / num_heads
    d_ff: int = at_least(1, 2048)
    activation: str = one_of(ACTIVATIONS, "relu")
    dropout_rate: float = fraction(0.1)  # dropout of each sublayer's output and of embeddings plus positions
    attention_dropout_rate: float = fraction(0.0)  # dropout of attention weights; the paper's text has none
    activation_dropout_rate: float = fraction(0.0)  # dropout of hidden feed-forward units; the paper has none
    pre_norm: bool = False  # norm(x + f(x)) as in the paper, or x + f(norm(x))
    learned_positions: int = at_least(0, 0)  # 0: sinusoidal positions; above 0: number of learned position vectors
    first_position: int = at_least(0, 0)  # position of the first token: 2 in BART, mBART and M2M-100
    interleaved_sinusoids: bool = True  # true: sine, cosine, sine, ... as in the paper; false: all sines first
    sinusoids_reach_base: bool = False  # true: the longest wavelength is 10,000 * 2 pi, as in M2M-100
    scale_embedding: bool = True  # whether token vectors are multiplied by sqrt(d_model)
    embedding_norm: bool = False  # whether embeddings plus positions are normalized, as in BART
    is_tied: bool = True  # true: logits use the embedding of the targets; false: a separate output matrix
    attention_bias: bool = False  # whether the projections of attention have a bias
    logits_bias: bool = False  # whether the output layer has a bias for each token
    # The paper does not state a value; 1e-5 is the one of Marian and of PyTorch's Transformer.
    layer_norm_epsilon: float = at_least(0, 1e-5)
    # Self-attention of every layer; the attention to the output of the encoder is dense.
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    pad_id: int = PAD_ID  # id of the padding token
    start_id: int = BOS_ID  # id of the token that the decoder reads first
    eos_id: int = EOS_ID  # id of the token that ends a sentence; used by decoding and by classifiers
    labels: tuple[str, ...] = ()  # names of the classes, for a `TransformerClassifier`
    head_dropout_rate: float = fraction(0.0)  # dropout in the head of a `TransformerClassifier`
    problem_type: str | None = None  # kept for export to Hugging Face, which chooses a loss by it; unused here
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "encoder_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False
    can_shard_positions: ClassVar[bool] = True  # `config.mesh.sequence` may divide the positions of a sequence

    @classmethod
    def big(cls, **overrides: Any) -> "TransformerConfig":
        """Returns the configuration of the paper's big model (Table 3, last row)."""
        return cls(**{"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3} | overrides)

    @classmethod
    def marian(cls, **overrides: Any) -> "TransformerConfig":
        """Returns the configuration of Marian (Junczys-Dowmunt et al., 2018), which `tfx_jax.models.hf` exports.

        The released OPUS-MT models (Tiedemann and Thottingal, 2020) differ only in token ids: EOS is 0, and the last
        id of the vocabulary is both start token and padding.
        """
        options = {"activation": "swish", "attention_bias": True, "logits_bias": True, "interleaved_sinusoids": False}
        return cls(**options | overrides)

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % 2 and not self.learned_positions:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: set d_k and d_v")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # sinusoids have no limit, and `learned_positions` is left as it is
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "Transformer":
        return Transformer(self, rngs=rngs)


class Transformer(EncoderDecoder):
    """Encoder-decoder Transformer; by default source, target and output layer share one embedding."""

    def __init__(self, config: TransformerConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: self-attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`. Cross-attention, to the encoder's output, is dense.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, the attention cannot be causal, the activation is unknown, or
            `pad_id` or `start_id` is outside the vocabulary.
        """
        c = checked(config)
        check_special_ids(c)
        c.attention.check(is_causal=True, num_heads=c.num_heads, d_k=c.d_k or c.d_model // c.num_heads)
        dtype = jnp.dtype(c.dtype)
        attention = functools.partial(
            MultiHeadAttention,
            c.d_model,
            c.num_heads,
            d_k=c.d_k,
            d_v=c.d_model // c.num_heads if c.d_v is None else c.d_v,
            use_bias=c.attention_bias,
            dropout_rate=c.attention_dropout_rate,
            dtype=dtype,
        )

        def self_attention(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> MultiHeadAttention:
            core = attention_fn or layer_attention.make(c.num_heads, c.d_k or c.d_model // c.num_heads, rngs=rngs)
            spec = spec_of(core)
            if spec is not None and spec.head_sizes is not None:  # it has no use for a default of d_v
                return attention(attention_fn=core, d_v=c.d_v, rngs=rngs)
            return attention(attention_fn=core, rngs=rngs)

        def feed_forward(has_experts: bool, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
            """Makes the feed-forward network, or the mixture of experts, of a layer."""
            return (c.experts.make if has_experts else FeedForward)(
                c.d_model,
                c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                dropout_rate=c.activation_dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )

        residual = functools.partial(
            Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=c.pre_norm, epsilon=c.layer_norm_epsilon
        )
        norm = functools.partial(LayerNorm, c.d_model, epsilon=c.layer_norm_epsilon)

        def encoder_layer(layer_attention: AttentionConfig, has_experts: bool, rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(self_attention(layer_attention, rngs), feed_forward(has_experts, rngs), residual)

        def decoder_layer(layer_attention: AttentionConfig, has_experts: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                self_attention(layer_attention, rngs), attention(rngs=rngs), feed_forward(has_experts, rngs), residual
            )

        scale = math.sqrt(c.d_model) if c.scale_embedding else 1.0
        self.embedding = Embedding(c.vocab_size, c.d_model, scale=scale, dtype=dtype, rngs=rngs)
        make_embedding = functools.partial(Embedding, d_model=c.d_model, scale=scale, dtype=dtype, rngs=rngs)
        self.source_embedding = None if c.source_vocab_size is None else make_embedding(c.source_vocab_size)
        self.output_embedding = None if c.is_tied else make_embedding(c.vocab_size)
        self.source_embedding_norm = norm() if c.embedding_norm else None
        self.target_embedding_norm = norm() if c.embedding_norm else None
        self.encoder_layers = stack_layers(layer_pattern(encoder_layer, c.attention, c.experts), c.num_layers, rngs)
        self.decoder_layers = stack_layers(
            layer_pattern(decoder_layer, c.attention, c.experts),
            c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers,
            rngs,
        )
        self.encoder_norm = norm() if c.pre_norm else None
        self.decoder_norm = norm() if c.pre_norm else None
        make_positions = functools.partial(LearnedPositions, c.first_position + c.learned_positions, c.d_model)
        self.source_positions = make_positions(rngs=rngs) if c.learned_positions else None
        self.target_positions = make_positions(rngs=rngs) if c.learned_positions else None
        self.logits_bias = nnx.Param(jnp.zeros(c.vocab_size)) if c.logits_bias else None
        self.config = copy.deepcopy(c)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " T"],
        rngs: nnx.Rngs | None = None,
        *,
        is_source: bool = False,
    ) -> Float[Array, "B T D"]:
        """Returns embeddings of tokens plus positions, the input of the encoder (`is_source`) or the decoder."""
        embedding = self.source_embedding if is_source and self.source_embedding is not None else self.embedding
        x = embedding(tokens)
        positions = self.config.first_position + positions
        learned_positions = self.source_positions if is_source else self.target_positions
        if learned_positions is None:
            options = {
                "is_interleaved": self.config.interleaved_sinusoids,
                "reaches_base": self.config.sinusoids_reach_base,
            }
            position_vectors = sinusoidal_positions(positions, x.shape[-1], **options)
        else:
            position_vectors = learned_positions(positions)
        norm = self.source_embedding_norm if is_source else self.target_embedding_norm
        x = add_bias(x, position_vectors)
        return drop(x if norm is None else norm(x), self.config.dropout_rate, rngs)

    def encoder_output(self, x: Float[Array, "B S D"], rngs: nnx.Rngs | None) -> Float[Array, "B S D"]:
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def last_norm(self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding

    @property
    def max_positions(self) -> int | None:
        return self.config.learned_positions or None


class TransformerClassifier(EncoderDecoderClassifier):
    """BART's classifier (Lewis et al., 2020, https://arxiv.org/abs/1910.13461, section 3.1).

    Its entailment models classify into any labels without examples.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Initializes a Transformer without an output layer, and a head of two linear layers.

        Raises:
          ValueError: as `Transformer`, and if there are no labels.
        """
        body_config = dataclasses.replace(config, is_tied=True, logits_bias=False)
        super().__init__(config, lambda: Transformer(body_config, rngs=rngs), rngs=rngs)
