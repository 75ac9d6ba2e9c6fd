"""BERT, an encoder of texts and of pairs of texts (Devlin et al., 2019); what scores its output is in `bert_heads`."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.linear import add_bias
from tfx_jax.functional.longformer import longformer_attention
from tfx_jax.models.config import DTYPES, layer_pattern
from tfx_jax.models.flops import stack_flops
from tfx_jax.models.padding import count, hide_padding
from tfx_jax.nn.attention import MultiHeadAttention, ShardAttention
from tfx_jax.nn.cores import AttentionConfig, AttentionFn
from tfx_jax.nn.dropout import drop
from tfx_jax.nn.embedding import Embedding, LearnedPositions
from tfx_jax.nn.feed_forward import ACTIVATIONS, FeedForward
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.linear import Linear
from tfx_jax.nn.normalization import LayerNorm
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers

INITS = ("paper", "matching")
"""Ways to draw the parameters, see `BertConfig.init`."""

# Vocabulary, layers, width and heads of each published model; a head has 64 numbers and d_ff is 4 * d_model in all.
# Base and large: Devlin et al. (2019), section 3. The small ones: Turc et al. (2019), table 1, with the names that
# Google gave them afterwards. The vocabularies are those of the released files.
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
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps a copy of its own, as a static part
class BertConfig:
    """Sizes of a BERT; the defaults are those of the uncased base model.

    `init` says how parameters are drawn, offsets 0 and gains 1 in any case. "paper" is the authors' program: normal,
    deviation 0.02, matrices cut off at two deviations. "matching" is for a model that has little text to learn from,
    above all one that compares two texts: from the start, every head attends to what is like the token itself. The
    deviation is d_model**-0.5, which keeps the size of what goes through a matrix; the keys' matrices are the queries';
    and positions and segments have a fifth of it, so that they do not hide the tokens.
    """

    vocab_size: int = at_least(0, 30_522)
    num_segments: int = at_least(0, 2)
    max_length: int = at_least(1, 512)  # tokens: the learned positions
    first_position: int = at_least(0, 0)  # row of the table of positions that the first token has; 2 in Longformer
    num_layers: int = at_least(1, 12)
    d_model: int = at_least(1, 768)
    num_heads: int = at_least(1, 12)
    d_ff: int | None = at_least(1, None)  # None: 4 * d_model
    dropout_rate: float = fraction(0.1)  # of each sublayer's output and of the sums of the three embeddings
    attention_dropout_rate: float = fraction(0.1)  # of the attention weights
    head_dropout_rate: float | None = fraction(None)  # of what classifiers read; None: dropout_rate
    activation: str = one_of(ACTIVATIONS, "gelu")  # "gelu" is the exact one
    layer_norm_epsilon: float = at_least(0, 1e-12)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # of every layer
    max_global_tokens: int = at_least(0, 0)  # beside "window" attention, with projections of their own: Longformer
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # names of the classes, for models that classify
    problem_type: str | None = None  # Hugging Face's word for the loss of a classifier; nothing here depends on it
    dtype: str = one_of(DTYPES, "float32")  # of the computation; parameters, logits and statistics stay float32
    init: str = one_of(INITS, "paper")  # how parameters are drawn, see above
    remat: str = one_of(REMATS, "none")  # what the backward pass computes again: "full" layers, all but "dots"
    unroll: bool = False  # whether layers are compiled one by one: slow to compile, faster on a TPU, see `scan_layers`

    kind: ClassVar[str] = "bert"
    is_causal: ClassVar[bool] = False
    has_position_bias: ClassVar[bool] = False

    @classmethod
    def published(cls, name: str, **overrides: Any) -> "BertConfig":
        """The sizes of a published model: "bert-tiny", "bert-base-uncased", "bert-large-cased" and so on.

        Raises:
          ValueError: for another name.
        """
        if name not in _SIZES:
            raise ValueError(f"no published BERT is called {name!r}; there are {', '.join(_SIZES)}")
        vocab_size, num_layers, d_model, num_heads = _SIZES[name]
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "num_layers": num_layers}
        sizes |= {"d_model": d_model, "num_heads": num_heads}
        return cls(**sizes | overrides)

    def validate(self) -> None:
        """See `tfx_jax.models.config.ModelConfig`."""
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}")
        if self.max_global_tokens and self.attention.name != "window":
            raise ValueError(
                f"max_global_tokens={self.max_global_tokens} is for window attention, not for {self.attention.name}"
            )

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`."""
        self.vocab_size, self.num_layers, self.d_model, self.num_heads, self.d_ff = 1_000, 1, 32, 2, 64
        self.max_length = max_length

    def training_flops(self, rows: int, length: int, *, num_predicted: int) -> int:
        """See `tfx_jax.models.flops.stack_flops`."""
        return stack_flops(
            rows=rows,
            length=length,
            num_predicted=num_predicted,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_k=None,
            d_ff=self.d_ff,
        )


class BertOutput(NamedTuple):
    """What a text becomes.

    Attributes:
      sequence: a vector for each token, [B, T, D].
      pooled: one for the whole text, made from that of its first token, [B, D]; None without a pooler.
    """

    sequence: Float[Array, "B T D"]
    pooled: Any


class GlobalAttention(MultiHeadAttention):
    """Attention in a window, beside global tokens that have projections of their own (Beltagy et al., 2020)."""

    def __init__(self, d_model: int, num_heads: int, *, max_global_tokens: int, window: int, **options: Any):
        """Draws the projections; options are those of `MultiHeadAttention`."""
        attend = functools.partial(longformer_attention, window=window, max_global_tokens=max_global_tokens)
        super().__init__(d_model, num_heads, attention_fn=attend, **options)
        again = MultiHeadAttention(d_model, num_heads, **options)
        self.global_query, self.global_key, self.global_value = again.query, again.key, again.value

    def attend(self, x: Array, key: Array, value: Array, *, global_mask: Any = None, **options: Any) -> Any:
        """As of `MultiHeadAttention`, with the tokens that are global, [B, T]; None means none."""
        if global_mask is not None:
            projected = {name: getattr(self, name)(x) for name in ("global_query", "global_key", "global_value")}
            options |= {"global_mask": global_mask, **projected}
        return super().attend(x, key, value, **options)


class Bert(nnx.Module):
    """Post-norm encoder layers over the sum of token, segment and position vectors (Devlin et al., 2019, figure 2).

    With `max_global_tokens` it is a Longformer (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150), with "bigbird"
    attention a BigBird (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062).

    Attributes:
      name_below_heads: by which the models of `tfx_jax.models.bert_heads` have it.
    """

    name_below_heads = "bert"

    def __init__(
        self,
        config: BertConfig,
        *,
        use_pooler: bool = True,
        attention_fn: AttentionFn | None = None,
        shard_attention: ShardAttention | None = None,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters.

        Args:
          config: the sizes.
          use_pooler: whether there is a linear layer with tanh over the first token's vector.
          attention_fn: the attention of every layer, with the signature of `dot_product_attention`; None means what
            `config.attention` names.
          shard_attention: calls it on a mesh, see `tfx_jax.nn.MultiHeadAttention`.
          rngs: stream `params`.

        Raises:
          ValueError: if the sizes contradict each other, or there is no such activation or init.
        """
        c = config
        c.validate()
        c.attention.check()
        if c.init not in INITS:
            raise ValueError(f"init={c.init!r} is none of {', '.join(INITS)}")
        if c.activation not in ACTIVATIONS:
            raise ValueError(f"activation={c.activation!r} is none of {', '.join(ACTIVATIONS)}")
        dtype = jnp.dtype(c.dtype)
        residual = functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate, epsilon=c.layer_norm_epsilon)

        def make_layer(own: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            options: dict[str, Any] = {"use_bias": True, "dropout_rate": c.attention_dropout_rate}
            options |= {"shard_attention": shard_attention, "dtype": dtype, "rngs": rngs}
            if c.max_global_tokens:
                window = {"window": own.options.window or 0, "max_global_tokens": c.max_global_tokens}
                attention = GlobalAttention(c.d_model, c.num_heads, **window, **options)
            else:
                core = attention_fn or own.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs)
                attention = MultiHeadAttention(c.d_model, c.num_heads, attention_fn=core, **options)
            d_ff = 4 * c.d_model if c.d_ff is None else c.d_ff
            feed_forward = FeedForward(c.d_model, d_ff, activation_fn=ACTIVATIONS[c.activation], dtype=dtype, rngs=rngs)
            projections = [layer for layer in vars(attention).values() if isinstance(layer, Linear)]
            for param in (*(layer.kernel for layer in projections), feed_forward.up, feed_forward.down):
                param[...] = _matrix_init(c)(rngs.params(), param.shape, param.dtype)
            if c.init == "matching":
                attention.key.kernel[...] = attention.query.kernel[...]
            return EncoderLayer(attention, feed_forward, residual)

        of_tokens = _init_stddev(c)
        beside = {"init_stddev": of_tokens / 5 if c.init == "matching" else of_tokens, "rngs": rngs}
        self.embedding = Embedding(c.vocab_size, c.d_model, scale=1.0, init_stddev=of_tokens, dtype=dtype, rngs=rngs)
        self.token_types = Embedding(c.num_segments, c.d_model, scale=1.0, dtype=dtype, **beside)
        self.positions = LearnedPositions(c.first_position + c.max_length, c.d_model, **beside)
        self.norm = LayerNorm(c.d_model, epsilon=c.layer_norm_epsilon)
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), c.num_layers, rngs)
        self.pooler = make_dense(c, c.d_model, dtype=dtype, rngs=rngs) if use_pooler else None
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
        """Reads texts; every token sees all those of its row.

        Args:
          tokens: ids, [B, T]: "[CLS] a text [SEP]" or "[CLS] a text [SEP] another [SEP]".
          token_type_ids: 0 for the tokens of the first text and 1 for those of the second; None means one text.
          token_mask: which of the tokens exist, padding may be on either side; None means all.
          positions: of each token; None counts the tokens that exist.
          global_mask: which tokens see all and are seen by all, where `config.max_global_tokens` says that some may;
            None means none.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return every attention map.

        Returns:
          A `BertOutput`; with `return_attention` a pair of it and {"encoder/0/self": [B, N, T, T], ...}. The vectors
          of padding are arbitrary. The pooler takes the first token of each row.

        Raises:
          ValueError: if T is more than the model's max_length, or there cannot be global tokens.
        """
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(f"{tokens.shape[1]} tokens, but the model has max_length={self.config.max_length}")
        if global_mask is not None and not self.config.max_global_tokens:
            raise ValueError("there is a global_mask, but the model has max_global_tokens=0")
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else count(token_mask)
        token_type_ids = jnp.zeros_like(tokens) if token_type_ids is None else hide_padding(token_type_ids, token_mask)
        x = self.embedding(hide_padding(tokens, token_mask)) + self.token_types(token_type_ids)
        x = self.norm(add_bias(x, self.positions(self.config.first_position + hide_padding(positions, token_mask))))
        x = drop(x, self.config.dropout_rate, rngs)
        mask = None if token_mask is None else token_mask[:, None, None, :]

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            options: dict[str, Any] = {} if global_mask is None else {"global_mask": global_mask}
            return layer(x, mask=mask, rngs=rngs, return_weights=return_attention, **options)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=self.config.remat, unroll=self.config.unroll)
        output = BertOutput(x, None if self.pooler is None else jnp.tanh(self.pooler(_first(x, token_mask))))
        if not return_attention:
            return output
        return output, {f"encoder/{index}/self": weights for index, weights in enumerate(maps["self"])}


def _first(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"] | None) -> Float[Array, "B D"]:
    """Returns the vector of the first token of each row."""
    if token_mask is None:
        return x[:, 0]
    return jnp.take_along_axis(x, jnp.argmax(token_mask, axis=1)[:, None, None], axis=1)[:, 0]


def make_dense(config: BertConfig, d_out: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> Linear:
    """A linear layer over the model's vectors that starts as all others of it."""
    return Linear(config.d_model, d_out, kernel_init=_matrix_init(config), dtype=dtype, rngs=rngs)


def _init_stddev(config: BertConfig) -> float:
    return 0.02 if config.init == "paper" else config.d_model**-0.5


def _matrix_init(config: BertConfig) -> nnx.Initializer:
    return nnx.initializers.truncated_normal(_init_stddev(config))
