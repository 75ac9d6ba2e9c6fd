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
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class TransformerConfig:
    """Sizes of a Transformer; the defaults are the paper's base model (Table 3)."""

    # One vocabulary for both languages; of a training, 0: by the size of its text.
    vocab_size: int = at_least(0, 37_000)
    source_vocab_size: int | None = at_least(1, None)  # of an embedding of the sources' own; None: one for both
    num_layers: int = at_least(1, 6)  # the paper's N, in the encoder and again in the decoder
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)  # the paper's h
    d_k: int | None = at_least(1, None)  # None: d_model / num_heads
    d_v: int | None = at_least(1, None)  # None: d_k's default, d_model / num_heads
    d_ff: int = at_least(1, 2048)
    activation: str = one_of(ACTIVATIONS, "relu")
    dropout_rate: float = fraction(0.1)  # of each sublayer's output and of the sums of embeddings and positions
    attention_dropout_rate: float = fraction(0.0)  # of the attention weights; the paper's text has none
    activation_dropout_rate: float = fraction(0.0)  # of the hidden units of a feed-forward layer; the paper has none
    pre_norm: bool = False  # norm(x + f(x)) as in the paper, or x + f(norm(x))
    learned_positions: int = at_least(0, 0)  # 0: sinusoids; else the number of positions that have a learned vector
    first_position: int = at_least(0, 0)  # number of the first token: 2 in BART, mBART and M2M-100
    interleaved_sinusoids: bool = True  # a sine and its cosine side by side as in the paper, or all sines in front
    sinusoids_reach_base: bool = False  # whether the longest wavelength is 10,000 * 2 pi, as in M2M-100
    scale_embedding: bool = True  # whether the vectors of tokens are multiplied by sqrt(d_model)
    embedding_norm: bool = False  # whether the sum of embeddings and positions is normalized, as in BART
    is_tied: bool = True  # whether the output layer is the targets' embedding, or has a matrix of its own
    attention_bias: bool = False  # whether the attention's projections have offsets
    logits_bias: bool = False  # whether the output layer has an offset for each token
    layer_norm_epsilon: float = at_least(
        0, 1e-5
    )  # the paper's text has none; that of Marian, and of PyTorch's Transformer
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # to oneself; to a source: dense
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)
    pad_id: int = PAD_ID  # the token that fills a row
    start_id: int = BOS_ID  # the one that the decoder reads first
    eos_id: int = EOS_ID  # the one that ends a sentence; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "encoder_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = False
    can_shard_positions: ClassVar[bool] = True  # `config.mesh.sequence` may divide them

    @classmethod
    def big(cls, **overrides: Any) -> "TransformerConfig":
        """The paper's big model (Table 3, last row)."""
        return cls(**{"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3} | overrides)

    @classmethod
    def marian(cls, **overrides: Any) -> "TransformerConfig":
        """The Transformer of Marian (Junczys-Dowmunt et al., 2018), as which `tfx_jax.models.hf` saves a model.

        The released ones of OPUS-MT (Tiedemann and Thottingal, 2020) are like this too, but for their tokens: 0 ends a
        sentence, the last of the vocabulary starts and pads it.
        """
        own = {"activation": "swish", "attention_bias": True, "logits_bias": True, "interleaved_sinusoids": False}
        return cls(**own | overrides)

    def validate(self) -> None:
        if self.d_model % 2 and not self.learned_positions:
            raise ValueError(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: give d_k and d_v")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        del max_length  # positions are computed, or as many as they were
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64

    def make(self, *, rngs: nnx.Rngs) -> "Transformer":
        return Transformer(self, rngs=rngs)


class Transformer(nnx.Module):
    """Encoder and decoder over one shared embedding."""

    def __init__(self, config: TransformerConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          attention_fn: the self-attention of every layer, with the signature of `dot_product_attention`; None means
            what `config.attention` names. The attention to the encoder's output is dense.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other, the attention does not fit, or there is no such activation or
            start token.
        """
        c = config
        c.validate()
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation={c.activation!r} is none of {', '.join(ACTIVATIONS)}")
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

        def self_attention(own: AttentionConfig, rngs: nnx.Rngs) -> MultiHeadAttention:
            core = attention_fn or own.make(c.num_heads, c.d_k or c.d_model // c.num_heads, rngs=rngs)
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

        def encoder_layer(own: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(self_attention(own, rngs), feed_forward(is_sparse, rngs), residual)

        def decoder_layer(own: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                self_attention(own, rngs), attention(rngs=rngs), feed_forward(is_sparse, rngs), residual
            )

        scale = math.sqrt(c.d_model) if c.scale_embedding else 1.0
        self.embedding = Embedding(c.vocab_size, c.d_model, scale=scale, dtype=dtype, rngs=rngs)
        own = functools.partial(Embedding, d_model=c.d_model, scale=scale, dtype=dtype, rngs=rngs)
        self.source_embedding = None if c.source_vocab_size is None else own(c.source_vocab_size)
        self.output_embedding = None if c.is_tied else own(c.vocab_size)
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
        learned = functools.partial(LearnedPositions, c.first_position + c.learned_positions, c.d_model)
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
        """Scores every next target token, given the source and the target tokens before it (teacher forcing).

        Args:
          source: source tokens, `config.pad_id` where there is none: behind them, in front or in between.
          target: target tokens to be predicted, padding behind them alone; the decoder reads them shifted right, behind
            the start token.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` a pair of these and a dictionary with the keys
          "encoder/0/self" [B, N, S, S], "decoder/0/self" [B, N, T, T], "decoder/0/cross" [B, N, T, S] and so on;
          columns of padding are last.
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
        x = self._embed_target(inputs, jnp.arange(inputs.shape[1]), rngs)
        token_mask = input_mask(inputs, self.config.pad_id)

        def decode(layer: DecoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            options: dict[str, Any] = {"memory_mask": memory_mask, "token_mask": token_mask}
            return layer(x, memory, rngs=rngs, return_weights=return_weights, **options)

        return scan_layers(decode, self.decoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)

    def encode(
        self, source: Int[Array, "B S"], *, rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
        """Returns the encoder's output and its attention maps (an empty dictionary unless asked for).

        Padding is moved behind the tokens of each row, in the output and the maps as well.
        """
        return self._encode(padding_last(source, self.config.pad_id), rngs, return_attention)

    def _encode(
        self, source: Int[Array, "B S"], rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
        """Encodes rows whose padding is behind the tokens, where columns are positions."""
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        positions = jnp.arange(source.shape[1])
        x = self._embed(embedding(source), positions, self.source_positions, self.source_embedding_norm, rngs)
        mask = source_mask(source, self.config.pad_id)

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, mask=mask, token_mask=mask[:, 0, 0], rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)
        return (x if self.encoder_norm is None else self.encoder_norm(x)), named_maps("encoder", maps)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model as it decodes, see `tfx_jax.nn.decoding.DecodingModel`."""
        return TransformerDecoder(self, int8=int8)

    def _embed_target(
        self, inputs: Int[Array, "B T"], positions: Int[Array, " T"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T D"]:
        x = self.embedding(inputs)
        return self._embed(x, positions, self.target_positions, self.target_embedding_norm, rngs)

    def _embed(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, " T"],
        learned: LearnedPositions | None,
        norm: LayerNorm | None,
        rngs: nnx.Rngs | None,
    ) -> Float[Array, "B T D"]:
        positions = self.config.first_position + positions
        if learned is None:
            options = {
                "is_interleaved": self.config.interleaved_sinusoids,
                "reaches_base": self.config.sinusoids_reach_base,
            }
            vectors = sinusoidal_positions(positions, x.shape[-1], **options)
        else:
            vectors = learned(positions)
        x = add_bias(x, vectors)
        return drop(x if norm is None else norm(x), self.config.dropout_rate, rngs)

    def _output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding

    def _logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = self._output().attend(x if self.decoder_norm is None else self.decoder_norm(x))
        return logits if self.logits_bias is None else logits + self.logits_bias[...][None, None]


class TransformerDecoder(nnx.Module):
    """A Transformer that writes, as `tfx_jax.nn.decoding.Decoder` has it.

    A source is encoded and projected once; a step then costs one token. Only where the attention needs all tokens at
    every step, the model itself reads them all.
    """

    continues_inputs = False

    def __init__(self, model: Transformer, *, int8: bool = False):
        """Arranges the weights of the decoder; the model stays as it is, and its encoder is used where it is."""
        self.model = model
        embedding, bias = model._output(), None if model.logits_bias is None else model.logits_bias[...]
        self.fused = arrange(model.decoder_layers, embedding.table[...], bias, dtype=embedding.dtype, int8=int8)

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """As in the configuration."""
        return self.model.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """As many as there are learned positions, which a source has apart from its target."""
        num_learned = self.model.config.learned_positions
        if not num_learned:
            return None
        return num_learned if max_new_tokens <= num_learned else 0

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> EncoderMemory:
        """Reads sources."""
        source = padding_last(with_padding(inputs, token_mask, self.pad_id), self.pad_id)
        return EncoderMemory(self.model._encode(source)[0], source_mask(source, self.pad_id))

    def init_cache(
        self, memory: EncoderMemory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Projects the memory for each layer, or keeps it for a replay; nothing is written yet."""
        num_learned = self.model.config.learned_positions
        if num_learned and max_length > num_learned:
            raise ValueError(f"max_length={max_length}, but there are {num_learned} learned positions")
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
        """Takes one token of each row."""
        if self.fused is None:
            return replay_step(replayed(self.model._decode, self.model._logits), tokens, cache)
        output, norm = self.fused.output, self.model.decoder_norm

        def embed(tokens: Array, position: Array) -> Array:
            return self.model._embed_target(tokens[:, None], position[None])

        def score(x: Array) -> Array:
            return output(x if norm is None else norm(x), jnp.float32)[:, 0]

        return fused_step(self.fused.steps, embed, score, tokens, cache)
