"""BERT (Devlin et al., 2019), the encoders that differ from it by options, and their heads.

These are RoBERTa, DistilBERT, MPNet, ELECTRA, ALBERT and ModernBERT, and Longformer and BigBird with their sparse
attention.
"""

import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.longformer import longformer_attention
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.positions import relative_position_bias
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.models.padding import check_tokens, hide_padding, positions_from_mask
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention, RotaryConfig
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, LearnedPositions, Linear, drop
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

POOLINGS = ("first", "mean")
POOLERS = {"tanh": jnp.tanh, "gelu": ACTIVATIONS["gelu"], "relu": ACTIVATIONS["relu"]}
"""Activations of the layer over the first token's vector: of BERT, ELECTRA and DistilBERT."""

INITS = ("paper", "matching")
"""Schemes of initialization, see `BertConfig`."""

# vocab_size, num_layers, d_model and num_heads of each published model; heads have size 64 and d_ff is 4 * d_model.
# Base and large: Devlin et al. (2019), section 3. Smaller models: Turc et al. (2019), table 1, with the names that
# Google gave them later. Vocabulary sizes are those of the released files.
_SIZES = {
    "bert-tiny": (30_522, 2, 128, 2),
    "bert-mini": (30_522, 4, 256, 4),
    "bert-small": (30_522, 4, 512, 8),
    "bert-medium": (30_522, 8, 512, 8),
    "bert-base-uncased": (30_522, 12, 768, 12),
    "bert-base-cased": (28_996, 12, 768, 12),
    "bert-base-multilingual-uncased": (105_879, 12, 768, 12),
    "bert-base-multilingual-cased": (119_547, 12, 768, 12),
    "bert-large-uncased": (30_522, 24, 1024, 16),
    "bert-large-cased": (28_996, 24, 1024, 16),
}


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class BertConfig:
    """Configuration of a BERT; the defaults are the uncased base model.

    `init` chooses the initialization; biases start at 0 and norm scales at 1 in both schemes. "paper" follows the
    authors' program: normal with standard deviation 0.02, matrices truncated at two standard deviations. "matching" is
    for models trained on little text, above all those that compare two texts: from the start, each head attends to
    tokens that resemble the query's token. Its standard deviation is d_model**-0.5, so that a matrix preserves the norm
    of its input. Key matrices are copies of the query matrices. Position and segment vectors have a fifth of that
    deviation, so that token vectors dominate their sum.
    """

    vocab_size: int = at_least(0, 30_522)
    num_segments: int = at_least(0, 2)  # number of token types; 0: the model has no token_type_ids, as DistilBERT
    max_length: int = at_least(1, 512)  # longest sequence in tokens; positions are learned
    rotary: RotaryConfig | None = None  # rotates queries and keys instead of learned positions: ModernBERT
    window_rotary_base: float | None = None  # rotary base of layers with window attention; None: as the others
    first_position: int = at_least(0, 0)  # index of the first token in the table of positions; 2 in Longformer
    relative_buckets: int = at_least(0, 0)  # above 0: attention logits get a bias for each bucket of distances: MPNet
    num_layers: int = at_least(1, 12)
    first_layer: bool = False  # whether one more layer is in front, dense and without a norm before its attention
    pre_norm: bool = False  # norm(x + f(x)), or x + f(norm(x)) with one more norm at the end
    use_bias: bool = True  # whether linear layers and norms have offsets; logits have in any case
    is_gated: bool = False  # whether hidden units are multiplied by a second projection (Shazeer, 2020)
    share_layers: bool = False  # whether all layers have the same parameters: ALBERT
    d_model: int = at_least(1, 768)
    embedding_size: int | None = at_least(1, None)  # of embeddings, below a projection to d_model; None: d_model
    num_heads: int = at_least(1, 12)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # dropout of each sublayer's output and of the sum of the three embeddings
    attention_dropout_rate: float = fraction(0.1)  # dropout of attention weights
    has_pooler: bool = True  # whether a model without a head has a linear layer over the first token's vector
    pooler_activation: str = one_of(POOLERS, "tanh")  # activation of that layer, also where it is part of a head
    pooling: str = one_of(POOLINGS, "first")  # what that layer reads: the first token's vector, or the mean of all
    head_norm: bool = False  # whether a classifier or tagger normalizes what its last layer reads: ModernBERT
    is_tied: bool = True  # true: logits of masked tokens use the embedding; false: a separate output matrix
    head_dropout_rate: float | None = fraction(None)  # dropout before a classifier or tagger; None: dropout_rate
    activation: str = one_of(ACTIVATIONS, "gelu")  # "gelu" is exact; "gelu_tanh" approximates it
    layer_norm_epsilon: float = at_least(0, 1e-12)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # attention of every layer
    max_global_tokens: int = at_least(0, 0)  # above 0: a Longformer, "window" attention plus so many global tokens
    sep_id: int | None = at_least(0, None)  # Longformer for questions: tokens before the first of these are global
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # names of the classes, for models that classify
    problem_type: str | None = None  # kept for export to Hugging Face, which chooses a loss by it; unused here
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    init: str = one_of(INITS, "paper")  # initialization, see above
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "bert"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "BertConfig":
        """Returns the configuration of a published model such as "bert-tiny", "bert-base-uncased", "bert-large-cased".

        Raises:
          ValueError: if `name` is unknown; the message lists the names.
        """
        if name not in _SIZES:
            raise ValueError(f"no published BERT is called {name!r}; there are {', '.join(_SIZES)}")
        vocab_size, num_layers, d_model, num_heads = _SIZES[name]
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "num_layers": num_layers}
        sizes |= {"d_model": d_model, "num_heads": num_heads}
        return cls(**sizes | overrides)

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.max_global_tokens and self.attention.name != "window":
            raise ValueError(
                f"max_global_tokens={self.max_global_tokens} needs attention.name='window', got {self.attention.name!r}"
            )

        if self.rotary is not None:
            self.rotary.validate()
        elif self.window_rotary_base is not None:
            raise ValueError(f"window_rotary_base={self.window_rotary_base} needs rotary")
        if self.relative_buckets and not 4 <= self.relative_buckets < 512:
            raise ValueError(f"relative_buckets={self.relative_buckets} must be 0 or from 4 to 511")
        if self.first_layer and not self.pre_norm:
            raise ValueError("first_layer=True needs pre_norm=True")
        if self.share_layers and len(self.attention.names) > 1:
            raise ValueError(f"share_layers is for layers of one attention, not for {self.attention.name}")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.max_length = max_length


class BertOutput(NamedTuple):
    """Outputs of the encoder.

    Attributes:
      sequence: the last layer's vector of each token, [B, T, D].
      pooled: output of the pooler, by default tanh of a linear map of the first token's vector, [B, D]; None without a
        pooler.
    """

    sequence: Float[Array, "B T D"]
    pooled: Any


class GlobalAttention(MultiHeadAttention):
    """Sliding-window attention plus global tokens with separate projections (Beltagy et al., 2020)."""

    def __init__(self, d_model: int, num_heads: int, *, max_global_tokens: int, window: int, **options: Any):
        """Initializes both sets of projections; `options` are those of `MultiHeadAttention`."""
        attend = functools.partial(longformer_attention, window=window, max_global_tokens=max_global_tokens)
        super().__init__(d_model, num_heads, attention_fn=attend, **options)
        global_attention = MultiHeadAttention(d_model, num_heads, **options)
        self.global_query, self.global_key = global_attention.query, global_attention.key
        self.global_value = global_attention.value

    def attend(self, x: Array, key: Array, value: Array, *, global_mask: Any = None, **options: Any) -> Any:
        """Adds `global_mask` to `MultiHeadAttention.attend`: True for global tokens, [B, T]; None means none."""
        if global_mask is not None:
            projected = {name: getattr(self, name)(x) for name in ("global_query", "global_key", "global_value")}
            options |= {"global_mask": global_mask, **projected}
        return super().attend(x, key, value, **options)


class Bert(nnx.Module):
    """Encoder layers over the sum of token, segment and position vectors (Devlin et al., 2019, figure 2).

    By default layers are post-norm and positions learned; with `pre_norm` and `rotary` it is a ModernBERT, and other
    options of `BertConfig` make it an ALBERT, an ELECTRA or an MPNet. With `max_global_tokens` it is a Longformer
    (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150), with "bigbird" attention a BigBird (Zaheer et al., 2020,
    https://arxiv.org/abs/2007.14062).

    Attributes:
      base_model_prefix: the attribute under which `BertWithHead` holds its encoder.
    """

    base_model_prefix = "bert"

    def __init__(
        self,
        config: BertConfig,
        *,
        attention_fn: AttentionFn | None = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or `activation`, `init` or the attention's options are invalid.
        """
        c = checked(config)
        c.attention.check(has_bias=bool(c.relative_buckets), num_heads=c.num_heads, d_k=c.d_model // c.num_heads)
        dtype = jnp.dtype(c.dtype)
        make_norm = functools.partial(LayerNorm, epsilon=c.layer_norm_epsilon, use_bias=c.use_bias)
        residual = functools.partial(
            Residual,
            c.d_model,
            dropout_rate=c.dropout_rate,
            pre_norm=c.pre_norm,
            epsilon=c.layer_norm_epsilon,
            make_norm=make_norm,
        )

        def make_layer(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes a layer with this attention and initializes its matrices by `config.init`."""
            options: dict[str, Any] = {"use_bias": c.use_bias, "dropout_rate": c.attention_dropout_rate}
            is_window = layer_attention.name == "window" and c.window_rotary_base is not None
            options["rotary"] = RotaryConfig(base=c.window_rotary_base or 0.0) if is_window else c.rotary
            options |= {"dtype": dtype, "rngs": rngs}
            if c.max_global_tokens:
                window = {"window": layer_attention.options.window or 0, "max_global_tokens": c.max_global_tokens}
                attention = GlobalAttention(c.d_model, c.num_heads, **window, **options)
            else:
                core = attention_fn or layer_attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs)
                attention = MultiHeadAttention(c.d_model, c.num_heads, attention_fn=core, **options)
            d_ff = 4 * c.d_model if c.d_ff is None else c.d_ff
            feed_forward = FeedForward(
                c.d_model,
                d_ff,
                activation_fn=ACTIVATIONS[c.activation],
                use_bias=c.use_bias,
                is_gated=c.is_gated,
                dtype=dtype,
                rngs=rngs,
            )
            projections = [layer for layer in vars(attention).values() if isinstance(layer, Linear)]
            gates = [] if feed_forward.gate is None else [feed_forward.gate]
            for param in (*(layer.kernel for layer in projections), feed_forward.up, *gates, feed_forward.down):
                param[...] = _matrix_init(c)(rngs.params(), param.shape, param.dtype)
            if c.init == "matching":
                attention.key.kernel[...] = attention.query.kernel[...]
            return EncoderLayer(attention, feed_forward, residual)

        token_stddev = _init_stddev(c)
        # Options of the embeddings that are added to those of tokens.
        init_options = {"init_stddev": token_stddev / 5 if c.init == "matching" else token_stddev, "rngs": rngs}
        size = c.embedding_size or c.d_model
        self.embedding = Embedding(c.vocab_size, size, init_stddev=token_stddev, dtype=dtype, rngs=rngs)
        self.token_types = Embedding(c.num_segments, size, dtype=dtype, **init_options) if c.num_segments else None
        learned = functools.partial(LearnedPositions, c.first_position + c.max_length, size, **init_options)
        self.positions = learned() if c.rotary is None else None
        # One table for all layers, as in T5.
        relative_shape = (c.relative_buckets, c.num_heads)
        draw = nnx.initializers.normal(token_stddev)
        self.relative_bias = nnx.Param(draw(rngs.params(), relative_shape)) if c.relative_buckets else None
        self.norm = make_norm(size)
        project = functools.partial(Linear, size, c.d_model, kernel_init=_matrix_init(c), dtype=dtype, rngs=rngs)
        self.projection = None if c.embedding_size is None else project()
        self.first_layer = make_layer(AttentionConfig(), rngs) if c.first_layer else None
        if self.first_layer is not None:
            self.first_layer.self_attention_residual.norm = None
        num_layers = 1 if c.share_layers else c.num_layers
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), num_layers, rngs)
        self.last_norm = make_norm(c.d_model) if c.pre_norm else None
        self.pooler = make_dense(c, c.d_model, use_bias=c.use_bias, dtype=dtype, rngs=rngs) if c.has_pooler else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        global_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Encodes sequences with bidirectional self-attention.

        Args:
          tokens: ids, [B, T]: "[CLS] text [SEP]" or "[CLS] text [SEP] second text [SEP]".
          token_type_ids: 0 for tokens of the first text and 1 for tokens of the second, [B, T]; None means all 0.
          token_mask: True for tokens, False for padding (on either side), [B, T]; None means no padding.
          positions: position of each token, [B, T]; None counts tokens from 0, without padding.
          global_mask: True for tokens that attend to all tokens and that all tokens attend to, [B, T]: at most
            `config.max_global_tokens` in a row. None means none.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          A `BertOutput`; with `return_attention` the pair (output, {"encoder/0/self": [B, N, T, T], ...}). Vectors at
          padding are arbitrary. The pooler reads the first token that is not padding.

        Raises:
          ValueError: if T exceeds `config.max_length`, or `global_mask` is given and `config.max_global_tokens` is 0
            or, unless JAX traces the call, exceeded: in a traced call, further tokens of a row are not global.
        """
        check_tokens(self.config.max_length, tokens=tokens)
        if global_mask is not None:
            _check_global(global_mask, self.config.max_global_tokens)
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else positions_from_mask(token_mask)
        if token_type_ids is not None and self.token_types is None:
            raise ValueError("token_type_ids need a model with num_segments above 0: leave them out")
        token_type_ids = jnp.zeros_like(tokens) if token_type_ids is None else hide_padding(token_type_ids, token_mask)
        x = self.embedding(hide_padding(tokens, token_mask))
        x = x if self.token_types is None else x + self.token_types(token_type_ids)
        positions = hide_padding(positions, token_mask)
        if self.positions is not None:
            x = add_bias(x, self.positions(self.config.first_position + positions))
        x = self.norm(x)
        x = drop(x, self.config.dropout_rate, rngs)
        x = x if self.projection is None else self.projection(x)
        mask = None if token_mask is None else token_mask[:, None, None, :]

        bias = None
        if self.relative_bias is not None:
            bias = relative_position_bias(self.relative_bias[...], tokens.shape[1])

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            """Runs one layer; returns its output and its attention weights, if requested."""
            options: dict[str, Any] = {} if global_mask is None else {"global_mask": global_mask}
            options |= {} if bias is None else {"bias": bias}
            options |= {} if self.config.rotary is None else {"positions": positions}
            return layer(x, mask=mask, rngs=rngs, return_weights=return_attention, **options)

        x, first_maps = (x, None) if self.first_layer is None else encode(self.first_layer, x, rngs)
        options: dict[str, Any] = {"remat": self.config.remat, "unroll": self.config.unroll}
        if self.config.share_layers:
            options["repeats"] = self.config.num_layers
        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, **options)
        x = x if self.last_norm is None else self.last_norm(x)
        output = BertOutput(sequence=x, pooled=None)
        if self.pooler is not None:
            pool = _mean_of_tokens if self.config.pooling == "mean" else _first_token
            pooled = POOLERS[self.config.pooler_activation](self.pooler(pool(x, token_mask)))
            output = BertOutput(sequence=x, pooled=pooled)
        if not return_attention:
            return output
        maps_of_layers = list(maps["self"]) if first_maps is None else [first_maps["self"], *maps["self"]]
        return output, {f"encoder/{index}/self": weights for index, weights in enumerate(maps_of_layers)}


def _first_token(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"] | None) -> Float[Array, "B D"]:
    """Returns the vector of the first token of each sequence that is not padding."""
    if token_mask is None:
        return x[:, 0]
    return jnp.take_along_axis(x, jnp.argmax(token_mask, axis=1)[:, None, None], axis=1)[:, 0]


def _mean_of_tokens(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"] | None) -> Float[Array, "B D"]:
    """Returns the mean vector of the tokens of each sequence that are not padding."""
    if token_mask is None:
        return x.mean(axis=1)
    total = jnp.where(token_mask[..., None], x, 0).sum(axis=1)
    return total / jnp.maximum(token_mask.sum(axis=1, keepdims=True), 1).astype(x.dtype)


def make_dense(
    config: BertConfig, d_out: int, *, use_bias: bool = True, dtype: Any = jnp.float32, rngs: nnx.Rngs
) -> Linear:
    """Returns a linear layer from `config.d_model` to `d_out`, initialized like the encoder's matrices."""
    init = _matrix_init(config)
    return Linear(config.d_model, d_out, use_bias=use_bias, kernel_init=init, dtype=dtype, rngs=rngs)


def _init_stddev(config: BertConfig) -> float:
    """Returns the standard deviation of initial values for `config.init`."""
    return 0.02 if config.init == "paper" else config.d_model**-0.5


def _matrix_init(config: BertConfig) -> nnx.Initializer:
    """Returns the initializer of matrices for `config.init`."""
    return nnx.initializers.truncated_normal(_init_stddev(config))


class PretrainingLogits(NamedTuple):
    """Logits of the two pre-training tasks.

    Attributes:
      masked_lm: logits over the vocabulary at each position, [B, T, V].
      next_sentence: logits of class 0, the second text follows the first, and class 1, it is a random one, [B, 2].
    """

    masked_lm: Float[Array, "B T V"]
    next_sentence: Float[Array, "B 2"]


class SpanLogits(NamedTuple):
    """Logits of the answer's first token, [B, T], and of its last token (inclusive), [B, T]."""

    start: Float[Array, "B T"]
    end: Float[Array, "B T"]


class MaskedLMHead(nnx.Module):
    """Dense layer, activation and norm, then the product with the embedding plus a bias for each vocabulary entry.

    With `config.is_tied` the embedding is that of the tokens.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters as `Bert` does."""
        size = config.embedding_size or config.d_model
        dense = functools.partial(make_dense, config, size, use_bias=config.use_bias)
        self.dense = dense(dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.norm = LayerNorm(size, epsilon=config.layer_norm_epsilon, use_bias=config.use_bias)
        options: dict[str, Any] = {"init_stddev": _init_stddev(config), "dtype": jnp.dtype(config.dtype)}
        self.output_embedding = None if config.is_tied else Embedding(config.vocab_size, size, **options, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.activation_fn = ACTIVATIONS[config.activation]

    def __call__(self, x: Float[Array, "B T D"], embedding: Embedding) -> Float[Array, "B T V"]:
        """Returns logits over the vocabulary; `x` may hold only the positions to predict."""
        x = self.norm(self.activation_fn(self.dense(x)))
        output_embedding = embedding if self.output_embedding is None else self.output_embedding
        return output_embedding.attend(x) + self.bias[...][None, None]


class BertWithHead(nnx.Module):
    """A `Bert` encoder in `self.bert` with an output head: subclasses define `heads`, `_make_head` and `_score`.

    `tagger.load_encoder(masked_lm)` copies a pre-trained encoder into a model with another head.

    Attributes:
      heads: the attributes of the head's modules, which adapters leave trainable.
    """

    heads: ClassVar[tuple[str, ...]] = ()
    use_pooler = False  # whether the head reads the pooler's output

    def __init__(self, config: BertConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; `labels` are the classes of a classifier or tagger.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: as for `Bert`, and if a classifier or tagger has no `config.labels`.
        """
        encoder_config = dataclasses.replace(config, has_pooler=self.use_pooler)
        self.bert = Bert(encoder_config, attention_fn=attention_fn, rngs=rngs)
        self._make_head(config, rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        global_mask: Bool[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Returns float32 logits, whose shape the class states; with `return_attention` the pair (logits, maps).

        Arguments and maps are those of `Bert`. In a Longformer without `global_mask`, a classifier's first token is
        global, and the question of a model that answers questions: the tokens before the first `config.sep_id`.
        """
        if global_mask is None and self.config.max_global_tokens:
            global_mask = self._global_tokens(tokens, token_mask)
        result = self.bert(
            tokens,
            token_type_ids,
            token_mask=token_mask,
            positions=positions,
            global_mask=global_mask,
            rngs=rngs,
            return_attention=return_attention,
        )
        output, maps = result if return_attention else (result, None)
        logits = self._score(output, rngs)
        return (logits, maps) if return_attention else logits

    def _global_tokens(self, tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"] | None) -> Any:
        """Returns which tokens of a Longformer are global by default, [B, T]; None: none."""
        return None

    def load_encoder(self, other: "Bert | BertWithHead") -> None:
        """Copies the parameters of `other`'s encoder into `self.bert`; `other` is not changed.

        This model keeps its own dropout rates, dtype and attention. The pooler is copied only if both models have one;
        otherwise this model keeps its initial values.

        Args:
          other: an encoder of the same sizes, or a model with a head over one.

        Raises:
          ValueError: if the shapes of parameters differ.
        """
        encoder = other if isinstance(other, Bert) else other.bert
        own_params, other_params = (nnx.to_pure_dict(nnx.state(module)) for module in (self.bert, encoder))
        params = {name: other_params.get(name, own) for name, own in own_params.items()}
        if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, own_params):
            raise ValueError(
                f"the encoders must have parameters of the same shapes, got {encoder.config} for {self.bert.config}"
            )
        self.bert = nnx.merge(nnx.graphdef(self.bert), params)

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        """Sets the modules of the head as attributes."""
        raise NotImplementedError

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Any:
        """Returns the logits for the encoder's output."""
        raise NotImplementedError


class BertMaskedLM(BertWithHead):
    """Predicts the original token of each position, masked or not: logits [B, T, V]."""

    heads = ("masked_lm",)

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.masked_lm = MaskedLMHead(config, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B T V"]:
        return self.masked_lm(output.sequence, self.bert.embedding)


class BertNextSentence(BertWithHead):
    """Predicts whether the second text follows the first (class 0) or is a random one (class 1): logits [B, 2]."""

    heads = ("next_sentence",)
    use_pooler = True

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.next_sentence = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B 2"]:
        return self.next_sentence(output.pooled)


class BertPretraining(BertWithHead):
    """Masked language modeling and next-sentence prediction over one encoder; returns `PretrainingLogits`."""

    heads = ("masked_lm", "next_sentence")
    use_pooler = True

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.masked_lm = MaskedLMHead(config, rngs=rngs)
        self.next_sentence = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> PretrainingLogits:
        return PretrainingLogits(
            self.masked_lm(output.sequence, self.bert.embedding), self.next_sentence(output.pooled)
        )


class BertReplacedTokens(BertWithHead):
    """Predicts for each token whether a generator replaced it, ELECTRA's task: logits [B, T]."""

    heads = ("dense", "is_replaced")

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.dense = make_dense(config, config.d_model, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.is_replaced = make_dense(config, 1, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B T"]:
        return self.is_replaced(ACTIVATIONS[self.config.activation](self.dense(output.sequence)))[..., 0]


class BertClassifier(BertWithHead):
    """Classifies a text or a pair of texts into `config.labels`: logits [B, C], C = number of labels."""

    heads = ("norm", "classifier")
    use_pooler = True

    def _global_tokens(self, tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"] | None) -> Any:
        first: Any = 0 if token_mask is None else jnp.argmax(token_mask, 1, keepdims=True)  # that is no padding
        return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] == first, tokens.shape)

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.norm = _make_head_norm(config)
        self.classifier = _make_classifier(config, rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B C"]:
        x = output.pooled if self.norm is None else self.norm(output.pooled)
        return self.classifier(_drop(x, self.config, rngs))


class BertMultipleChoice(BertWithHead):
    """Scores each of several texts, such as a question with each of its answers: logits [B, C], C = number of texts."""

    heads = ("classifier",)
    use_pooler = True

    def __call__(
        self,
        tokens: Int[Array, "B C T"],
        token_type_ids: Int[Array, "B C T"] | None = None,
        *,
        token_mask: Bool[Array, "B C T"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B C"]:
        """Returns the logits; arguments are those of `Bert`, with an axis for the texts."""
        length = tokens.shape[-1]
        types, mask = (None if x is None else x.reshape(-1, length) for x in (token_type_ids, token_mask))
        logits = super().__call__(tokens.reshape(-1, length), types, token_mask=mask, rngs=rngs)
        return logits.reshape(tokens.shape[:2])

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.classifier = make_dense(config, 1, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "R 1"]:
        return self.classifier(_drop(output.pooled, self.config, rngs))


class BertTagger(BertWithHead):
    """Classifies every token into `config.labels`: logits [B, T, C], C = number of labels."""

    heads = ("dense", "norm", "classifier")

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        c = config
        make_layer = functools.partial(make_dense, c, c.d_model, use_bias=c.use_bias, dtype=jnp.dtype(c.dtype))
        self.dense = make_layer(rngs=rngs) if c.head_norm else None
        self.norm = _make_head_norm(c)
        self.classifier = _make_classifier(c, rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> Float[Array, "B T C"]:
        x = output.sequence
        if self.dense is not None and self.norm is not None:
            x = self.norm(POOLERS[self.config.pooler_activation](self.dense(x)))
        return self.classifier(_drop(x, self.config, rngs))


class BertQuestionAnswering(BertWithHead):
    """Finds the answer to a question as a span of the text's tokens; returns `SpanLogits`."""

    heads = ("span",)

    def _global_tokens(self, tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"] | None) -> Any:
        if self.config.sep_id is None:
            return None
        is_sep = tokens == self.config.sep_id
        if token_mask is not None:
            is_sep &= token_mask
        before = jnp.cumsum(is_sep, axis=1) == 0
        return before if token_mask is None else before & token_mask

    def _make_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        self.span = make_dense(config, 2, rngs=rngs)

    def _score(self, output: BertOutput, rngs: nnx.Rngs | None) -> SpanLogits:
        logits = self.span(output.sequence)
        return SpanLogits(logits[..., 0], logits[..., 1])


def _check_global(global_mask: Bool[Array, "B T"], limit: int) -> None:
    """Raises ValueError for global tokens where none may be, or for more than `limit` in a row, if they are known."""
    if not limit:
        raise ValueError("global_mask needs a model with max_global_tokens above 0, got max_global_tokens=0")
    try:
        most = int(np.asarray(global_mask).sum(axis=1).max(initial=0))
    except jax.errors.TracerArrayConversionError:
        return
    if most > limit:
        raise ValueError(
            f"a row has {most} global tokens, but config.max_global_tokens={limit}: build the model with more of them, "
            "which changes no parameter"
        )


def _make_head_norm(config: BertConfig) -> LayerNorm | None:
    """Returns the norm of a head with `head_norm`."""
    c = config
    return LayerNorm(c.d_model, epsilon=c.layer_norm_epsilon, use_bias=c.use_bias) if c.head_norm else None


def _make_classifier(config: BertConfig, rngs: nnx.Rngs) -> Linear:
    """Returns a linear layer to the labels; raises ValueError if there are none."""
    if not config.labels:
        raise ValueError("a classifier or tagger needs labels, got none: set labels to the names of the classes")
    return make_dense(config, len(config.labels), rngs=rngs)


def _drop(x: Float[Array, "*batch D"], config: BertConfig, rngs: nnx.Rngs | None) -> Float[Array, "*batch D"]:
    """Applies dropout before a classifier or tagger, at the rate `head_dropout_rate` or, if None, `dropout_rate`."""
    rate = config.dropout_rate if config.head_dropout_rate is None else config.head_dropout_rate
    return drop(x, rate, rngs)
