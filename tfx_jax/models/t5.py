"""T5, an encoder-decoder whose only position information is a bias for distances (Raffel et al., 2020), and LongT5.

LongT5 (Guo et al., 2022) is a T5 whose encoder has another self-attention, see `T5Config.local_radius`.
"""

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
from tfx_jax.functional.attention.transient_global import block_summaries, transient_global_attention
from tfx_jax.functional.positions import relative_position_bias, relative_position_bucket
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.models.encoder_decoder import EncoderDecoder, EncoderDecoderClassifier, check_special_ids, run_encoder
from tfx_jax.models.padding import check_tokens, hide_padding
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, Linear, RMSNorm, drop
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer, Residual
from tfx_jax.nn.moe import ExpertsConfig, MixtureOfExperts
from tfx_jax.nn.stack import REMATS, stack_layers

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
    layers_have_biases: bool = False  # true: each layer has its own table of biases (UMT5); false: one for all layers
    max_distance: int = at_least(1, 128)  # distance in tokens from which on all distances share a bucket
    # Dropout of embeddings, sublayers' outputs, attention weights, hidden units and the outputs of both stacks.
    dropout_rate: float = fraction(0.1)
    norm_epsilon: float = at_least(0, 1e-6)
    # Self-attention of every layer; the attention to the output of the encoder is dense.
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    # LongT5: how many tokens on each side a token of the encoder sees, in place of `attention`; None: T5.
    local_radius: int | None = at_least(1, None)
    # Above 0: tokens in a block, whose summary all tokens of the encoder see (transient-global attention of LongT5).
    global_block_size: int = at_least(0, 0)
    experts: ExpertsConfig = dataclasses.field(default_factory=ExpertsConfig)  # as in the Switch Transformer
    pad_id: int = at_least(0, 0)  # id of the padding token
    start_id: int = at_least(0, 0)  # id of the token that the decoder reads first
    eos_id: int = at_least(0, 1)  # id of the token that ends a text; used by decoding and by `T5Classifier`
    labels: tuple[str, ...] = ()  # names of the classes, for a `T5Classifier` or `T5Tagger`
    head_dropout_rate: float = fraction(0.0)  # dropout in the head of a `T5Classifier` or `T5Tagger`
    problem_type: str | None = None  # kept for export to Hugging Face, which chooses a loss by it; unused here
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
        """Raises ValueError for fields that contradict each other."""
        if not 4 <= self.num_buckets // 2 * 2 < 2 * self.max_distance:
            raise ValueError(
                f"num_buckets={self.num_buckets} must be at least 4 and less than twice "
                f"max_distance={self.max_distance}"
            )
        if self.global_block_size and self.local_radius is None:
            raise ValueError(f"global_block_size={self.global_block_size} needs local_radius")
        if self.local_radius is not None and self.layers_have_biases:
            raise ValueError(f"local_radius={self.local_radius} needs layers_have_biases=False")
        self.experts.validate()

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # biases exist for every distance
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.d_k = 16

    def make(self, *, rngs: nnx.Rngs) -> "T5":
        return T5(self, rngs=rngs)


class RelativeBias(nnx.Module):
    """Learned bias for each head and bucket of distances; encoder and decoder have one table each, or one per layer."""

    def __init__(self, config: T5Config, *, num_layers: int, is_bidirectional: bool, rngs: nnx.Rngs):
        """Initializes the table, [buckets, N], or [num_layers, buckets, N] if each layer has its own."""
        init = nnx.initializers.normal(config.d_model**-0.5)
        shape = (config.num_buckets, config.num_heads)
        shape = (num_layers, *shape) if config.layers_have_biases else shape
        self.table = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.max_distance = config.max_distance
        self.is_bidirectional = is_bidirectional

    def __call__(
        self, num_queries: int, num_keys: int, offset: Int[Array, ""] | int | None = None
    ) -> Float[Array, "L N T S"]:
        """Returns the bias of attention logits, L = 1 or one per layer; `offset` keys precede the first query."""
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
        """Returns the bias that one table adds to the attention logits."""
        return relative_position_bias(
            table,
            num_queries,
            num_keys,
            offset=offset,
            max_distance=self.max_distance,
            is_bidirectional=self.is_bidirectional,
        )

    def of_distances(self, reach: int) -> Float[Array, "N D"]:
        """Returns the bias of each head for the distances -reach .. reach from query to key."""
        table = self.table[...]
        distances = jnp.arange(-reach, reach + 1)
        return table[relative_position_bucket(distances, len(table), max_distance=self.max_distance)].T

    def by_layer(self, length: int) -> tuple[Any, Callable[[Any], Float[Array, "1 N T T"]]]:
        """Returns the pair of `EncoderDecoder.layer_biases` for sequences of a length."""
        table = self.table[...]
        if table.ndim == 3:
            return table, lambda layer_table: self.of(layer_table, length, length)
        bias = self.of(table, length, length)
        return None, lambda _: bias


class LongAttention(MultiHeadAttention):
    """Self-attention of LongT5's encoder: a window and, with a norm for them, summaries of blocks of tokens."""

    def __init__(self, config: T5Config, *arguments: Any, **options: Any):
        """Initializes the projections, and the norm of summaries; arguments are those of `MultiHeadAttention`."""
        super().__init__(*arguments, **options | {"attention_fn": transient_global_attention})
        self.block_size = config.global_block_size
        self.summary_norm = RMSNorm(config.d_model, epsilon=config.norm_epsilon) if self.block_size else None

    def attend(self, x: Array, key: Array, value: Array, *, mask: Any = None, **options: Any) -> Any:
        """Adds the projected summaries of `x` to `MultiHeadAttention.attend`."""
        if self.summary_norm is not None and x.shape[1] >= self.block_size:
            summaries = self.summary_norm(block_summaries(x, mask, block_size=self.block_size))
            options |= {"summary_key": self.key(summaries), "summary_value": self.value(summaries)}
            options["block_size"] = self.block_size
        return super().attend(x, key, value, mask=mask, **options)


class T5(EncoderDecoder):
    """Pre-norm encoder-decoder with relative position biases; linear layers and norms have no bias."""

    def __init__(self, config: T5Config, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters from normal distributions, as the paper's code does.

        Matrices have variance 1 / (number of inputs) and the embedding has variance 1. Attention logits are not scaled
        by 1 / sqrt(d_k); instead, query matrices are initialized smaller by that factor.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: self-attention of every layer, of the decoder only if there is a `config.local_radius`. It has
            the signature of `dot_product_attention` and supports a bias that differs between queries; None uses
            `config.attention`. Cross-attention is dense.
          rngs: stream `params`.

        Raises:
          ValueError: if the activation is unknown, `pad_id` or `start_id` is outside the vocabulary, or the attention
            cannot be causal or take a bias.
        """
        c = checked(config)
        c.attention.check(is_causal=True, has_bias=True, num_heads=c.num_heads, d_k=c.d_k)
        check_special_ids(c)
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
            """Sets parameters to samples of a normal distribution."""
            for param in params:
                param[...] = stddev * jax.random.normal(rngs.params(), param.shape, param.dtype)

        def attention(
            rngs: nnx.Rngs, core: AttentionFn = dot_product_attention, make: Any = MultiHeadAttention
        ) -> MultiHeadAttention:
            """Makes the projections around the attention function `core`."""
            layer = make(
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

        def feed_forward(has_experts: bool, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
            """Initializes the feed-forward network, or mixture of experts, of a layer."""
            layer = (c.experts.make if has_experts else FeedForward)(
                c.d_model,
                c.d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=False,
                is_gated=c.is_gated,
                dropout_rate=c.dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )
            for network in layer.networks if isinstance(layer, MixtureOfExperts) else [layer]:
                initialize(c.d_model**-0.5, network.up, rngs=rngs)
                if network.gate is not None:
                    initialize(c.d_model**-0.5, network.gate, rngs=rngs)
                initialize(network.down.shape[-2] ** -0.5, network.down, rngs=rngs)
            return layer

        def encoder_layer(layer_attention: AttentionConfig, has_experts: bool, rngs: nnx.Rngs) -> EncoderLayer:
            if c.local_radius is None:
                encoder_attention = self_attention(layer_attention, rngs)
            else:
                encoder_attention = attention(rngs, make=functools.partial(LongAttention, c))
            return EncoderLayer(encoder_attention, feed_forward(has_experts, rngs), residual)

        def decoder_layer(layer_attention: AttentionConfig, has_experts: bool, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                self_attention(layer_attention, rngs), attention(rngs), feed_forward(has_experts, rngs), residual
            )

        make_embedding = functools.partial(Embedding, c.vocab_size, c.d_model, scale=1.0, dtype=dtype, rngs=rngs)
        self.embedding = make_embedding(init_stddev=1.0)
        self.encoder_bias = RelativeBias(c, num_layers=c.num_layers, is_bidirectional=True, rngs=rngs)
        make_summary_bias = functools.partial(RelativeBias, c, num_layers=c.num_layers, is_bidirectional=True)
        self.encoder_summary_bias = make_summary_bias(rngs=rngs) if c.global_block_size else None
        self.encoder_layers = stack_layers(layer_pattern(encoder_layer, c.attention, c.experts), c.num_layers, rngs)
        self.encoder_norm = RMSNorm(c.d_model, epsilon=c.norm_epsilon)
        depth = c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers
        self.decoder_bias = RelativeBias(c, num_layers=depth, is_bidirectional=False, rngs=rngs)
        self.decoder_layers = stack_layers(layer_pattern(decoder_layer, c.attention, c.experts), depth, rngs)
        self.decoder_norm = RMSNorm(c.d_model, epsilon=c.norm_epsilon)
        self.output_embedding = None if c.is_tied else make_embedding()
        self.config = copy.deepcopy(c)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " T"],
        rngs: nnx.Rngs | None = None,
        *,
        is_source: bool = False,
    ) -> Float[Array, "B T D"]:
        """Returns token embeddings; positions enter as biases of the attention logits."""
        del positions, is_source
        return drop(self.embedding(tokens), self.config.dropout_rate, rngs)

    def layer_biases(self, length: int, *, is_source: bool) -> tuple[Any, Callable[[Any], Any]]:
        c = self.config
        if is_source and c.local_radius is not None:
            biases = {"distance_bias": self.encoder_bias.of_distances(c.local_radius)}
            if self.encoder_summary_bias is not None and length >= c.global_block_size:
                biases["summary_bias"] = self.encoder_summary_bias.of_distances(length // c.global_block_size - 1)
            return None, lambda _: biases
        return (self.encoder_bias if is_source else self.decoder_bias).by_layer(length)

    def step_bias(self, position: Int[Array, ""], num_keys: int) -> Float[Array, "L N 1 S"]:
        return self.decoder_bias(num_queries=1, num_keys=num_keys, offset=position)

    def encoder_output(self, x: Float[Array, "B S D"], rngs: nnx.Rngs | None) -> Float[Array, "B S D"]:
        return drop(self.encoder_norm(x), self.config.dropout_rate, rngs)

    def last_norm(self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        """Returns the input of the output layer, divided by sqrt(d_model) for a tied embedding (variance 1)."""
        x = self.decoder_norm(x) * (self.config.d_model**-0.5 if self.config.is_tied else 1.0)
        return drop(x, self.config.dropout_rate, rngs)

    def output(self) -> Embedding:
        return self.embedding if self.output_embedding is None else self.output_embedding


class T5Encoder(nnx.Module):
    """The encoder of a T5 without its decoder: a vector for each token."""

    def __init__(self, config: T5Config, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters; arguments and errors are those of a `T5`."""
        model = T5(config, attention_fn=attention_fn, rngs=rngs)
        self.embedding, self.encoder_bias = model.embedding, model.encoder_bias
        self.encoder_summary_bias = model.encoder_summary_bias
        self.encoder_layers, self.encoder_norm = model.encoder_layers, model.encoder_norm
        self.config = model.config

    embed, layer_biases, encoder_output = T5.embed, T5.layer_biases, T5.encoder_output

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Encodes texts; every token sees all tokens of its sequence.

        Args:
          tokens: token ids, [B, T].
          token_mask: [B, T], True where a token exists; padding may be on either side. None: all tokens but
            `config.pad_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          [B, T, D]; with `return_attention` the pair (vectors, maps), where maps has the keys "encoder/0/self"
          [B, N, T, T] and so on. The vectors of padding are arbitrary.
        """
        check_tokens(tokens=tokens)
        mask = tokens != self.config.pad_id if token_mask is None else token_mask
        x, maps = run_encoder(self, hide_padding(tokens, mask), mask[:, None, None, :], rngs, return_attention)
        return (x, maps) if return_attention else x


class T5Classifier(EncoderDecoderClassifier):
    """T5 as a classifier with BART's head; logits [B, C], C = number of labels. The output layer does not exist."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        """Initializes a T5 without an output layer, and a head of two linear layers.

        Raises:
          ValueError: as `T5`, and if there are no labels.
        """

        def make_body() -> T5:
            # The decoder's vectors are scaled for a tied output layer only, and here is none.
            body = T5(dataclasses.replace(config, is_tied=False), rngs=rngs)
            body.output_embedding = None
            return body

        super().__init__(config, make_body, rngs=rngs)


class T5Tagger(nnx.Module):
    """Classifies every token into `config.labels` by the vectors of T5's encoder."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        """Initializes a `T5Encoder` and a linear layer.

        Raises:
          ValueError: as `T5`, and if there are no labels.
        """
        if not config.labels:
            raise ValueError("a tagger needs labels, got none: set labels to the names of the classes")
        self.transformer = T5Encoder(config, rngs=rngs)
        self.classifier = Linear(config.d_model, len(config.labels), rngs=rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T C"]:
        """Returns float32 logits, C = number of labels; arguments are those of `T5Encoder`."""
        x = self.transformer(tokens, token_mask=token_mask, rngs=rngs)
        return self.classifier(drop(x.astype(jnp.float32), self.config.head_dropout_rate, rngs))
