"""T5, an encoder-decoder whose only position information is a bias for distances (Raffel et al., 2020)."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.positions import relative_position_bias
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
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, RMSNorm, drop
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.fused_decoder import arrange, fused_step
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.replay import replay_step
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

# num_layers (of encoder and decoder each), d_model, num_heads, d_k and d_ff of each published model. T5: Raffel et al.
# (2020, https://arxiv.org/abs/1910.10683), section 3.7. Version 1.1: its authors' notes with the released parameters.
_SIZES = {
    "t5-small": (6, 512, 8, 64, 2048),
    "t5-base": (12, 768, 12, 64, 3072),
    "t5-large": (24, 1024, 16, 64, 4096),
    "t5-3b": (24, 1024, 32, 128, 16_384),
    "t5-11b": (24, 1024, 128, 128, 65_536),
    "t5-v1_1-small": (8, 512, 6, 64, 1024),
    "t5-v1_1-base": (12, 768, 12, 64, 2048),
    "t5-v1_1-large": (24, 1024, 16, 64, 2816),
    "t5-v1_1-xl": (24, 2048, 32, 64, 5120),
    "t5-v1_1-xxl": (24, 4096, 64, 64, 10_240),
}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class T5Config:
    """Configuration of a T5; the defaults are T5 small."""

    vocab_size: int = at_least(0, 32_128)  # default: 32,000 pieces, 100 sentinels and 28 unused entries
    num_layers: int = at_least(1, 6)  # layers of the encoder
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_k: int = at_least(1, 64)  # size of a head; num_heads * d_k may differ from d_model
    d_ff: int = at_least(1, 2048)
    activation: str = one_of(ACTIVATIONS, "relu")
    is_gated: bool = False  # whether hidden units are multiplied by a second projection (Shazeer, 2020)
    is_tied: bool = True  # true: logits are embedding times x / sqrt(d_model); false: separate output matrix
    num_buckets: int = at_least(1, 32)  # buckets of distances, see `tfx_jax.functional.relative_position_bucket`
    max_distance: int = at_least(1, 128)  # distance in tokens from which on all distances share a bucket
    # Dropout of embeddings, sublayers' outputs, attention weights, hidden units and the outputs of both stacks.
    dropout_rate: float = fraction(0.1)
    norm_epsilon: float = at_least(0, 1e-6)
    # Self-attention of every layer; the attention to the output of the encoder is dense.
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)  # as in the Switch Transformer
    pad_id: int = at_least(0, 0)  # id of the padding token
    start_id: int = at_least(0, 0)  # id of the token that the decoder reads first
    eos_id: int = at_least(0, 1)  # id of the token that ends a text; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "encoder_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = True

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "T5Config":
        """Returns the configuration of a published model.

        Names are "t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b", and for version 1.1 "t5-v1_1-small", "-base",
        "-large", "-xl" and "-xxl". Version 1.1 has gated hidden units and a separate output matrix, and was pre-trained
        without dropout; its authors advise `dropout_rate=0.1` for fine-tuning.

        Raises:
          ValueError: if `name` is unknown; the message lists the names.
        """
        if name not in _SIZES:
            raise ValueError(f"no published T5 is called {name!r}; there are {', '.join(_SIZES)}")
        num_layers, d_model, num_heads, d_k, d_ff = _SIZES[name]
        sizes: dict[str, Any] = {
            "num_layers": num_layers,
            "d_model": d_model,
            "num_heads": num_heads,
            "d_k": d_k,
            "d_ff": d_ff,
        }
        if "v1_1" in name:
            sizes |= {"activation": "gelu_tanh", "is_gated": True, "is_tied": False, "dropout_rate": 0.0}
        return cls(**sizes | overrides)

    def validate(self) -> None:
        if not 4 <= self.num_buckets // 2 * 2 < 2 * self.max_distance:
            raise ValueError(
                f"num_buckets={self.num_buckets} must be at least 4 and less than twice "
                f"max_distance={self.max_distance}"
            )
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        del max_length  # biases exist for every distance
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.d_k = 16

    def make(self, *, rngs: nnx.Rngs) -> "T5":
        return T5(self, rngs=rngs)


class RelativeBias(nnx.Module):
    """Learned bias for each head and bucket of distances; encoder and decoder have one table each, for all layers."""

    def __init__(self, config: T5Config, *, is_bidirectional: bool, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.d_model**-0.5)
        self.table = nnx.Param(init(rngs.params(), (config.num_buckets, config.num_heads), jnp.float32))
        self.max_distance = config.max_distance
        self.is_bidirectional = is_bidirectional

    def __call__(
        self, num_queries: int, num_keys: int, offset: Int[Array, ""] | int | None = None
    ) -> Float[Array, "1 N T S"]:
        """Returns the bias to add to attention logits; `offset` keys precede the first query (None: S - T)."""
        return relative_position_bias(
            self.table[...],
            num_queries,
            num_keys,
            offset=offset,
            max_distance=self.max_distance,
            is_bidirectional=self.is_bidirectional,
        )


class T5(nnx.Module):
    """Pre-norm encoder-decoder with relative position biases; linear layers and norms have no bias."""

    def __init__(self, config: T5Config, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters from normal distributions, as the paper's code does.

        Matrices have variance 1 / (number of inputs) and the embedding has variance 1. Attention logits are not scaled
        by 1 / sqrt(d_k); instead, query matrices are initialized smaller by that factor.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: self-attention of every layer, with the signature of `dot_product_attention` and support for a
            bias that differs between queries; None uses `config.attention`. Cross-attention is dense.
          rngs: stream `params`.

        Raises:
          ValueError: if the activation is unknown, `pad_id` or `start_id` is outside the vocabulary, or the attention
            cannot be causal or take a bias.
        """
        c = config
        c.attention.check(is_causal=True, has_bias=True)
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {c.activation!r}")
        check_token_ids(c)
        dtype = jnp.dtype(c.dtype)
        residual = functools.partial(
            Residual,
            c.d_model,
            dropout_rate=c.dropout_rate,
            pre_norm=True,
            epsilon=c.norm_epsilon,
            make_norm=RMSNorm,
        )

        def initialize(stddev: float, *params: nnx.Param[Array], rngs: nnx.Rngs) -> None:
            for param in params:
                param[...] = stddev * jax.random.normal(rngs.params(), param.shape, param.dtype)

        def attention(rngs: nnx.Rngs, core: AttentionFn = dot_product_attention) -> MultiHeadAttention:
            layer = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                d_k=c.d_k,
                dropout_rate=c.dropout_rate,
                attention_fn=core,
                scale=1.0,
                dtype=dtype,
                rngs=rngs,
            )
            initialize((c.d_model * c.d_k) ** -0.5, layer.query.kernel, rngs=rngs)
            initialize(c.d_model**-0.5, layer.key.kernel, layer.value.kernel, rngs=rngs)
            initialize((c.num_heads * c.d_k) ** -0.5, layer.out.kernel, rngs=rngs)
            return layer

        def self_attention(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> MultiHeadAttention:
            return attention(rngs, attention_fn or layer_attention.make(c.num_heads, c.d_k, rngs=rngs))

        def feed_forward(is_sparse: bool, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
            layer = (c.experts.make if is_sparse else FeedForward)(
                c.d_model,
                c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=False,
                is_gated=c.is_gated,
                dropout_rate=c.dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )
            network = layer.experts if isinstance(layer, MixtureOfExperts) else layer
            initialize(c.d_model**-0.5, network.up, *([] if network.gate is None else [network.gate]), rngs=rngs)
            initialize(c.d_ff**-0.5, network.down, rngs=rngs)
            return layer

        def encoder_layer(layer_attention: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(self_attention(layer_attention, rngs), feed_forward(is_sparse, rngs), residual)

        def decoder_layer(layer_attention: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                self_attention(layer_attention, rngs), attention(rngs), feed_forward(is_sparse, rngs), residual
            )

        embedding = functools.partial(Embedding, c.vocab_size, c.d_model, scale=1.0, dtype=dtype, rngs=rngs)
        self.embedding = embedding(init_stddev=1.0)
        self.encoder_bias = RelativeBias(c, is_bidirectional=True, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(encoder_layer, c.attention, c.experts), c.num_layers, rngs)
        self.encoder_norm = RMSNorm(c.d_model, epsilon=c.norm_epsilon)
        self.decoder_bias = RelativeBias(c, is_bidirectional=False, rngs=rngs)
        depth = c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers
        self.decoder_layers = stack_layers(layer_pattern(decoder_layer, c.attention, c.experts), depth, rngs)
        self.decoder_norm = RMSNorm(c.d_model, epsilon=c.norm_epsilon)
        self.output_embedding = None if c.is_tied else embedding()
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
        logits = self._output().attend(drop(self._last_norm(x), self.config.dropout_rate, rngs))
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
        bias = self.decoder_bias(inputs.shape[1], inputs.shape[1])
        token_mask = input_mask(inputs, self.config.pad_id)
        x = drop(self.embedding(inputs), self.config.dropout_rate, rngs)

        def decode(layer: DecoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            options: dict[str, Any] = {"memory_mask": memory_mask, "bias": bias, "token_mask": token_mask}
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
        mask = source_mask(source, self.config.pad_id)
        bias = self.encoder_bias(source.shape[1], source.shape[1])
        x = drop(self.embedding(source), self.config.dropout_rate, rngs)

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            options: dict[str, Any] = {"bias": bias, "mask": mask, "token_mask": mask[:, 0, 0]}
            return layer(x, rngs=rngs, return_weights=return_attention, **options)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)
        return drop(self.encoder_norm(x), self.config.dropout_rate, rngs), named_maps("encoder", maps)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns a decoder with fused weights, see `tfx_jax.nn.decoding.DecodingModel`."""
        return T5Decoder(self, int8=int8)

    def _output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding

    def _last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalizes the decoder's output; divided by sqrt(d_model) for a tied embedding, whose variance is 1."""
        return self.decoder_norm(x) * (self.config.d_model**-0.5 if self.config.is_tied else 1.0)


class T5Decoder(nnx.Module):
    """Decodes a `T5` one token at a time; implements `tfx_jax.nn.decoding.Decoder` like `TransformerDecoder`."""

    continues_inputs = False

    def __init__(self, model: T5, *, int8: bool = False):
        """Fuses the decoder's weights for decoding; `model` is not changed and its encoder is used directly."""
        output = model._output()
        self.model = model
        self.fused = arrange(model.decoder_layers, output.table[...], dtype=output.dtype, int8=int8)

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, which is never generated."""
        return self.model.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns None, no limit: there is a bias for every distance."""
        del max_new_tokens
        return None

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> EncoderMemory:
        """Encodes sources, [B, S]; where `token_mask` is False, tokens count as padding."""
        source = padding_last(with_padding(inputs, token_mask, self.pad_id), self.pad_id)
        return EncoderMemory(self.model._encode(source)[0], source_mask(source, self.pad_id))

    def init_cache(
        self, memory: EncoderMemory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Projects the memory to keys and values of each layer (kept as it is without a KV cache); no target yet."""
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
        model, fused = self.model, self.fused
        if fused is None:
            score = replayed(model._decode, lambda x: model._output().attend(model._last_norm(x)))
            return replay_step(score, tokens, cache)
        return fused_step(
            fused.steps,
            lambda tokens, _: model.embedding(tokens[:, None]),
            lambda x: fused.output(model._last_norm(x), jnp.float32)[:, 0],
            tokens,
            cache,
            bias=lambda position, num_places: model.decoder_bias(1, num_places, position),
        )
