"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al., 2017)."""

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.config import DTYPES, layer_pattern
from tfx_jax.models.encoder_decoder import (
    EncoderMemory,
    check_token_ids,
    init_decoder,
    input_mask,
    named_maps,
    replayed,
    shift_right,
    source_mask,
    with_padding,
)
from tfx_jax.models.padding import padding_last
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, drop
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.fused_decoder import arrange, fused_step
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.replay import replay_step
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class TransformerConfig:
    """Configuration of a Transformer; the defaults are the paper's base model (Table 3)."""

    # Size of the vocabulary that both languages share; 0: `train` chooses it by the amount of training text.
    vocab_size: int = at_least(0, 37_000)
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
    interleaved_sinusoids: bool = True  # true: sine, cosine, sine, ... as in the paper; false: all sines first
    scale_embedding: bool = True  # whether token vectors are multiplied by sqrt(d_model)
    attention_bias: bool = False  # whether the projections of attention have a bias
    logits_bias: bool = False  # whether the output layer has a bias for each token
    # The paper does not state a value; 1e-5 is the one of Marian and of PyTorch's Transformer.
    layer_norm_epsilon: float = at_least(0, 1e-5)
    # Self-attention of every layer; the attention to the output of the encoder is dense.
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    pad_id: int = PAD_ID  # id of the padding token
    start_id: int = BOS_ID  # id of the token that the decoder reads first
    eos_id: int = EOS_ID  # id of the token that ends a sentence; used by decoding only
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
        if self.d_model % 2 and not self.learned_positions:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: set d_k and d_v")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        del max_length  # sinusoids have no limit, and `learned_positions` is left as it is
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "Transformer":
        return Transformer(self, rngs=rngs)


class Transformer(nnx.Module):
    """Encoder-decoder Transformer; source, target and output layer share one embedding."""

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
        c = config
        c.validate()
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {c.activation!r}")
        check_token_ids(c)
        c.attention.check(is_causal=True)
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
            return attention(attention_fn=core, rngs=rngs)

        def feed_forward(is_sparse: bool, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
            return (c.experts.make if is_sparse else FeedForward)(
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

        def encoder_layer(layer_attention: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(self_attention(layer_attention, rngs), feed_forward(is_sparse, rngs), residual)

        def decoder_layer(layer_attention: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                self_attention(layer_attention, rngs), attention(rngs=rngs), feed_forward(is_sparse, rngs), residual
            )

        scale = math.sqrt(c.d_model) if c.scale_embedding else 1.0
        self.embedding = Embedding(c.vocab_size, c.d_model, scale=scale, dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(encoder_layer, c.attention, c.experts), c.num_layers, rngs)
        self.decoder_layers = stack_layers(
            layer_pattern(decoder_layer, c.attention, c.experts),
            c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers,
            rngs,
        )
        self.encoder_norm = norm() if c.pre_norm else None
        self.decoder_norm = norm() if c.pre_norm else None
        learned = functools.partial(LearnedPositions, c.learned_positions, c.d_model)
        self.source_positions = learned(rngs=rngs) if c.learned_positions else None
        self.target_positions = learned(rngs=rngs) if c.learned_positions else None
        self.logits_bias = nnx.Param(jnp.zeros(c.vocab_size)) if c.logits_bias else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores each target token given the source and the target tokens before it (teacher forcing).

        Args:
          source: source tokens, [B, S]; padding, `config.pad_id`, may be anywhere.
          target: target tokens to predict, [B, T]; padding only at the end. The decoder reads them shifted right by
            one, after `config.start_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, maps), where maps has the keys
          "encoder/0/self" [B, N, S, S], "decoder/0/self" [B, N, T, T], "decoder/0/cross" [B, N, T, S] and so on. In
          the maps, the source's padding comes after its tokens.
        """
        source = padding_last(source, self.config.pad_id)
        memory, encoder_maps = self._encode(source, rngs, return_attention)
        mask = source_mask(source, self.config.pad_id)
        inputs = shift_right(target, self.config.start_id)
        x, decoder_maps = self._decode(inputs, memory, mask, rngs, return_attention)
        logits = self._logits(x)
        if not return_attention:
            return logits
        return logits, encoder_maps | named_maps("decoder", decoder_maps)

    def _decode(
        self,
        inputs: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        memory_mask: Bool[Array, "B 1 1 S"],
        rngs: nnx.Rngs | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the output of the decoder's last layer and its attention maps, stacked over layers."""
        x = self._embed(inputs, jnp.arange(inputs.shape[1]), self.target_positions, rngs)
        token_mask = input_mask(inputs, self.config.pad_id)

        def decode(layer: DecoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            options: dict[str, Any] = {"memory_mask": memory_mask, "token_mask": token_mask}
            return layer(x, memory, rngs=rngs, return_weights=return_weights, **options)

        return scan_layers(decode, self.decoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)

    def encode(
        self, source: Int[Array, "B S"], *, rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
        """Returns the encoder's output and its attention maps (empty unless `return_attention`).

        Padding is moved to the end of each sequence before encoding; outputs and maps are in that order.
        """
        return self._encode(padding_last(source, self.config.pad_id), rngs, return_attention)

    def _encode(
        self, source: Int[Array, "B S"], rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
        """Encodes sequences whose padding is at the end; otherwise like `encode`."""
        x = self._embed(source, jnp.arange(source.shape[1]), self.source_positions, rngs)
        mask = source_mask(source, self.config.pad_id)

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, mask=mask, token_mask=mask[:, 0, 0], rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)
        return (x if self.encoder_norm is None else self.encoder_norm(x)), named_maps("encoder", maps)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns a decoder with fused weights, see `tfx_jax.nn.decoding.DecodingModel`."""
        return TransformerDecoder(self, int8=int8)

    def _embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " T"],
        learned: LearnedPositions | None,
        rngs: nnx.Rngs | None,
    ) -> Float[Array, "B T D"]:
        """Returns token vectors plus position vectors: from the table `learned`, or sinusoidal if it is None."""
        x = self.embedding(tokens)
        if learned is None:
            is_interleaved = self.config.interleaved_sinusoids
            vectors = sinusoidal_positions(positions, x.shape[-1], is_interleaved=is_interleaved)
        else:
            vectors = learned(positions)
        return drop(add_bias(x, vectors), self.config.dropout_rate, rngs)

    def _logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = self.embedding.attend(x if self.decoder_norm is None else self.decoder_norm(x))
        return logits if self.logits_bias is None else logits + self.logits_bias[...][None, None]


class TransformerDecoder(nnx.Module):
    """Decodes a `Transformer` one token at a time; implements `tfx_jax.nn.decoding.Decoder`.

    The source is encoded and projected to keys and values once; each step then processes one token with a KV cache. If
    the self-attention has no KV cache, each step runs the decoder over all tokens so far (`replay_step`).
    """

    continues_inputs = False

    def __init__(self, model: Transformer, *, int8: bool = False):
        """Fuses the decoder's weights for decoding; `model` is not changed and its encoder is used directly."""
        self.model = model
        embedding, bias = model.embedding, None if model.logits_bias is None else model.logits_bias[...]
        self.fused = arrange(model.decoder_layers, embedding.table[...], bias, dtype=embedding.dtype, int8=int8)

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, which is never generated."""
        return self.model.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns the number of learned positions, None without them, 0 if `max_new_tokens` exceeds them."""
        num_learned = self.model.config.learned_positions
        if not num_learned:
            return None
        return num_learned if max_new_tokens <= num_learned else 0

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> EncoderMemory:
        """Encodes sources, [B, S]; where `token_mask` is False, tokens count as padding."""
        source = padding_last(with_padding(inputs, token_mask, self.pad_id), self.pad_id)
        return EncoderMemory(self.model._encode(source)[0], source_mask(source, self.pad_id))

    def init_cache(
        self, memory: EncoderMemory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Projects the memory to keys and values of each layer (kept as it is without a KV cache); no target yet."""
        positions = self.model.target_positions
        if positions is not None and max_length > positions.table.shape[0]:
            raise ValueError(f"max_length={max_length}, but there are {positions.table.shape[0]} learned positions")
        cache = init_decoder(
            self.fused,
            self.model.decoder_layers,
            memory,
            max_length=max_length,
            num_beams=num_beams,
            pad_id=self.pad_id,
        )
        return cache, jnp.full(memory.output.shape[:1], self.model.config.start_id)

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Reads one token of each row (beam); returns logits of the next token and the new cache."""
        if self.fused is None:
            return replay_step(replayed(self.model._decode, self.model._logits), tokens, cache)
        output, norm = self.fused.output, self.model.decoder_norm

        def embed(tokens: Array, position: Array) -> Array:
            return self.model._embed(tokens[:, None], position[None], self.model.target_positions, None)

        def score(x: Array) -> Array:
            return output(x if norm is None else norm(x), jnp.float32)[:, 0]

        return fused_step(self.fused.steps, embed, score, tokens, cache)
