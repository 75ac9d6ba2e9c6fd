"""T5, an encoder and a decoder that know positions by their distances alone (Raffel et al., 2020)."""

import copy
import dataclasses
import functools
from collections.abc import Callable
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
from tfx_jax.models.padding import hide_padding, padding_last
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, RMSNorm, drop
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.fused_decoder import arrange, fused_step
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.replay import replay_step
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

# Layers on either side, width, heads, head size and hidden units of each published model. T5: Raffel et al. (2020,
# https://arxiv.org/abs/1910.10683), section 3.7. Version 1.1: the notes of its authors beside the released parameters.
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
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class T5Config:
    """Sizes of a T5; the defaults are those of the smallest."""

    vocab_size: int = at_least(0, 32_128)  # 32,000 pieces, 100 sentinels, and 28 that are never used
    num_layers: int = at_least(1, 6)  # of the encoder
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_k: int = at_least(1, 64)  # size of a head, whatever d_model is
    d_ff: int = at_least(1, 2048)
    activation: str = one_of(ACTIVATIONS, "relu")
    is_gated: bool = False  # whether hidden units are multiplied by a second projection (Shazeer, 2020)
    is_tied: bool = True  # the output layer is the embedding, of x / sqrt(d_model); or it has a matrix of its own
    num_buckets: int = at_least(1, 32)  # of distances, see `tfx_jax.functional.relative_position_bucket`
    layers_have_biases: bool = False  # whether each layer has biases of its own (UMT5), or a side's layers share them
    max_distance: int = at_least(1, 128)  # tokens, from which on all distances share a bucket
    dropout_rate: float = fraction(0.1)  # of inputs, sublayers' and last outputs, attention weights, hidden units
    norm_epsilon: float = at_least(0, 1e-6)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # to oneself; to a source: dense
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)  # as in the Switch Transformer
    pad_id: int = at_least(0, 0)  # the token that fills a row
    start_id: int = at_least(0, 0)  # the one that the decoder reads first
    eos_id: int = at_least(0, 1)  # the one that ends a text; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "encoder_decoder"
    is_causal: ClassVar[bool] = True
    has_position_bias: ClassVar[bool] = True

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "T5Config":
        """The sizes of a published model: "t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b", or of version 1.1.

        That is "t5-v1_1-small", "-base", "-large", "-xl" and "-xxl": hidden units are gated, the output layer has a
        matrix of its own, and pre-training was without dropout; for fine-tuning, `dropout_rate=0.1` is advised.

        Raises:
          ValueError: for another name.
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
        del max_length  # distances have no end
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.d_k = 16

    def make(self, *, rngs: nnx.Rngs) -> "T5":
        return T5(self, rngs=rngs)


class RelativeBias(nnx.Module):
    """A learned number for every head and bucket of distances, one table for all layers of a side or one for each."""

    def __init__(self, config: T5Config, *, num_layers: int, is_bidirectional: bool, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.d_model**-0.5)
        shape = (config.num_buckets, config.num_heads)
        shape = (num_layers, *shape) if config.layers_have_biases else shape
        self.table = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.max_distance = config.max_distance
        self.is_bidirectional = is_bidirectional

    def __call__(
        self, num_queries: int, num_keys: int, offset: Int[Array, ""] | int | None = None
    ) -> Float[Array, "L N T S"]:
        """What to add to the scores of attention, once or for each layer; `offset` keys precede the first query."""
        bias = functools.partial(self.of, num_queries=num_queries, num_keys=num_keys, offset=offset)
        table = self.table[...]
        return bias(table) if table.ndim == 2 else jax.vmap(bias)(table)[:, 0]

    def of(
        self,
        table: Float[Array, "buckets N"],
        num_queries: int,
        num_keys: int,
        offset: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "1 N T S"]:
        """What a table adds to the scores."""
        return relative_position_bias(
            table,
            num_queries,
            num_keys,
            offset=offset,
            max_distance=self.max_distance,
            is_bidirectional=self.is_bidirectional,
        )

    def by_layer(self, length: int) -> tuple[Any, Callable[[Any], Float[Array, "1 N T T"]]]:
        """The tables that layers are given, None for none, and what makes a layer's bias of its own."""
        table = self.table[...]
        if table.ndim == 3:
            return table, lambda own: self.of(own, length, length)
        bias = self.of(table, length, length)
        return None, lambda _: bias


class T5(nnx.Module):
    """Encoder and decoder with biases for distances, norms in front of sublayers, and no offsets anywhere."""

    def __init__(self, config: T5Config, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters from normal distributions, as the paper's code does.

        Scores are not scaled; queries are drawn smaller by sqrt(d_k) instead. A matrix has the variance 1 / inputs, the
        embedding 1.

        Args:
          config: the sizes.
          attention_fn: the self-attention of every layer, with the signature of `dot_product_attention` and a full
            `bias`; None means what `config.attention` names. The attention to the encoder's output is dense.
          rngs: stream `params`.

        Raises:
          ValueError: if there is no such activation or start token, or the attention does not fit.
        """
        c = config
        c.attention.check(is_causal=True, has_bias=True)
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation={c.activation!r} is none of {', '.join(ACTIVATIONS)}")
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

        def draw(stddev: float, *params: nnx.Param[Array], rngs: nnx.Rngs) -> None:
            for param in params:
                param[...] = stddev * jax.random.normal(rngs.params(), param.shape, param.dtype)

        def attention(rngs: nnx.Rngs, core: AttentionFn = dot_product_attention) -> MultiHeadAttention:
            made = MultiHeadAttention(
                c.d_model,
                c.num_heads,
                d_k=c.d_k,
                dropout_rate=c.dropout_rate,
                attention_fn=core,
                scale=1.0,
                dtype=dtype,
                rngs=rngs,
            )
            draw((c.d_model * c.d_k) ** -0.5, made.query.kernel, rngs=rngs)
            draw(c.d_model**-0.5, made.key.kernel, made.value.kernel, rngs=rngs)
            draw((c.num_heads * c.d_k) ** -0.5, made.out.kernel, rngs=rngs)
            return made

        def self_attention(own: AttentionConfig, rngs: nnx.Rngs) -> MultiHeadAttention:
            return attention(rngs, attention_fn or own.make(c.num_heads, c.d_k, rngs=rngs))

        def feed_forward(is_sparse: bool, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
            made = (c.experts.make if is_sparse else FeedForward)(
                c.d_model,
                c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=False,
                is_gated=c.is_gated,
                dropout_rate=c.dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )
            network = made.experts if isinstance(made, MixtureOfExperts) else made
            draw(c.d_model**-0.5, network.up, *([] if network.gate is None else [network.gate]), rngs=rngs)
            draw(c.d_ff**-0.5, network.down, rngs=rngs)
            return made

        def encoder_layer(own: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(self_attention(own, rngs), feed_forward(is_sparse, rngs), residual)

        def decoder_layer(own: AttentionConfig, is_sparse: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(self_attention(own, rngs), attention(rngs), feed_forward(is_sparse, rngs), residual)

        embedding = functools.partial(Embedding, c.vocab_size, c.d_model, scale=1.0, dtype=dtype, rngs=rngs)
        self.embedding = embedding(init_stddev=1.0)
        self.encoder_bias = RelativeBias(c, num_layers=c.num_layers, is_bidirectional=True, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(encoder_layer, c.attention, c.experts), c.num_layers, rngs)
        self.encoder_norm = RMSNorm(c.d_model, epsilon=c.norm_epsilon)
        depth = c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers
        self.decoder_bias = RelativeBias(c, num_layers=depth, is_bidirectional=False, rngs=rngs)
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
        """Scores every next target token, given the source and the target tokens before it (teacher forcing).

        Args:
          source: source tokens, `config.pad_id` where there is none: behind them, in front or in between.
          target: target tokens to be predicted, padding behind them alone; the decoder reads them shifted right, behind
            `config.start_id`.
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
        tables, bias_of = self.decoder_bias.by_layer(inputs.shape[1])
        token_mask = input_mask(inputs, self.config.pad_id)
        x = drop(self.embedding(inputs), self.config.dropout_rate, rngs)

        def decode(layer: DecoderLayer, x: Array, rngs: nnx.Rngs | None, own: Any = None) -> tuple[Array, Any]:
            options: dict[str, Any] = {"memory_mask": memory_mask, "bias": bias_of(own), "token_mask": token_mask}
            return layer(x, memory, rngs=rngs, return_weights=return_weights, **options)

        options: dict[str, Any] = {"remat": self.config.remat, "unroll": self.config.unroll}
        return scan_layers(decode, self.decoder_layers, x, rngs, inputs=tables, **options)

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
        return _encode(self, source, source_mask(source, self.config.pad_id), rngs, return_attention)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model as it decodes, see `tfx_jax.nn.decoding.DecodingModel`."""
        return T5Decoder(self, int8=int8)

    def _output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding

    def _last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the output layer gets; the embedding, of variance 1, wants it smaller."""
        return self.decoder_norm(x) * (self.config.d_model**-0.5 if self.config.is_tied else 1.0)


class T5Encoder(nnx.Module):
    """The encoder of a T5 alone: a vector for each token."""

    def __init__(self, config: T5Config, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters; arguments and errors are those of a `T5`."""
        model = T5(config, attention_fn=attention_fn, rngs=rngs)
        self.embedding, self.encoder_bias = model.embedding, model.encoder_bias
        self.encoder_layers, self.encoder_norm = model.encoder_layers, model.encoder_norm
        self.config = model.config

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Reads texts; every token sees all those of its row.

        Args:
          tokens: ids, [B, T].
          token_mask: which of the tokens exist, padding may be on either side; None: those that are not
            `config.pad_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          [B, T, D]; with `return_attention` a pair of it and {"encoder/0/self": [B, N, T, T], ...}. The vectors of
          padding are arbitrary.
        """
        mask = tokens != self.config.pad_id if token_mask is None else token_mask
        x, maps = _encode(self, hide_padding(tokens, mask), mask[:, None, None, :], rngs, return_attention)
        return (x, maps) if return_attention else x


def _encode(
    model: T5 | T5Encoder,
    source: Int[Array, "B S"],
    mask: Bool[Array, "B 1 1 S"],
    rngs: nnx.Rngs | None,
    return_attention: bool,
) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
    """Runs an encoder; returns its output and its attention maps."""
    c = model.config
    tables, bias_of = model.encoder_bias.by_layer(source.shape[1])
    x = drop(model.embedding(source), c.dropout_rate, rngs)

    def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None, own: Any = None) -> tuple[Array, Any]:
        options: dict[str, Any] = {"bias": bias_of(own), "mask": mask, "token_mask": mask[:, 0, 0]}
        return layer(x, rngs=rngs, return_weights=return_attention, **options)

    x, maps = scan_layers(encode, model.encoder_layers, x, rngs, inputs=tables, remat=c.remat, unroll=c.unroll)
    return drop(model.encoder_norm(x), c.dropout_rate, rngs), named_maps("encoder", maps)


class T5Decoder(nnx.Module):
    """A T5 that writes, as `tfx_jax.nn.decoding.Decoder` has it; see `TransformerDecoder`."""

    continues_inputs = False

    def __init__(self, model: T5, *, int8: bool = False):
        """Arranges the weights of the decoder; the model stays as it is, and its encoder is used where it is."""
        output = model._output()
        self.model = model
        self.fused = arrange(model.decoder_layers, output.table[...], dtype=output.dtype, int8=int8)

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """As in the configuration."""
        return self.model.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """No limit: any distance has a bias."""
        del max_new_tokens
        return None

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> EncoderMemory:
        """Reads sources."""
        source = padding_last(with_padding(inputs, token_mask, self.pad_id), self.pad_id)
        return EncoderMemory(self.model._encode(source)[0], source_mask(source, self.pad_id))

    def init_cache(
        self, memory: EncoderMemory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Projects the memory for each layer, or keeps it for a replay; nothing is written yet."""
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
