"""The encoder of Long Range Arena, a classifier of long sequences and of pairs of sequences (Tay et al., 2020)."""

import copy
import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.models.config import DTYPES, checked, layer_pattern
from tfx_jax.models.padding import check_tokens, padding_last
from tfx_jax.nn.attention import AttentionConfig, AttentionFn, MultiHeadAttention
from tfx_jax.nn.basic import ACTIVATIONS, Embedding, FeedForward, LayerNorm, Linear, drop, mean_over_tokens
from tfx_jax.nn.layers import EncoderLayer, Residual
from tfx_jax.nn.stack import REMATS, scan_layers, stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class LongEncoderConfig:
    """Configuration of an encoder of long sequences; the defaults are the authors' for ListOps.

    https://github.com/google-research/long-range-arena: pre-norm layers over tokens and fixed sinusoids, then a hidden
    layer of d_ff units. A pair of sequences with vectors u and v is classified from [u, v, u * v, u - v], by two hidden
    layers. Two differences: the vector of a sequence is the mean over its tokens, where the authors take a class token
    or a mean that includes padding; and attention weights are not dropped, because linear attentions have none.
    """

    vocab_size: int = at_least(1, 257)  # ids of tokens, padding (0) included; set by the task
    num_layers: int = at_least(1, 6)
    d_model: int = at_least(1, 512)
    num_heads: int = at_least(1, 8)
    d_ff: int = at_least(2, 2_048)
    dropout_rate: float = fraction(0.1)  # dropout of embeddings, sublayers' outputs and hidden feed-forward units
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)  # attention of every layer
    is_causal: bool = False  # a token sees earlier tokens only, for attentions with no other form (delta_rule, ...)
    num_sequences: int = at_least(1, 1)  # sequences of an example: 2 for tasks that compare pairs; set by the task
    labels: tuple[str, ...] = ()  # names of the classes; set by the task
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, logits, statistics: float32
    remat: str = one_of(REMATS, "none")  # recomputed in backward: "full" layers, or all but matrix products ("dots")
    unroll: bool = False  # compile layers one by one, not as a loop: slower to compile, faster on TPU

    kind: ClassVar[str] = "long_sequence"
    has_position_bias: ClassVar[bool] = False
    attention_dropout_rate: ClassVar[float] = 0.0
    can_shard_positions: ClassVar[bool] = True

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % self.num_heads or self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even and divisible by num_heads={self.num_heads}")

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # sequences may have any length
        self.num_layers, self.d_model, self.num_heads, self.d_ff = 1, 16, 2, 32

    def make(self, *, rngs: nnx.Rngs) -> "LongEncoder":
        return LongEncoder(self, rngs=rngs)


class LongEncoder(nnx.Module):
    """Pre-norm encoder layers, the mean over tokens, hidden layers with ReLU, and a linear layer to the labels."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: LongEncoderConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention of every layer, with the signature of `dot_product_attention`; None uses
            `config.attention`.
          rngs: stream `params`.

        Raises:
          ValueError: if sizes contradict each other, or there are no labels.
        """
        c = checked(config)
        c.attention.check(is_causal=c.is_causal, num_heads=c.num_heads, d_k=c.d_model // c.num_heads)
        if not c.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        dtype = jnp.dtype(c.dtype)
        residual = functools.partial(Residual, c.d_model, dropout_rate=c.dropout_rate, pre_norm=True)

        def make_layer(layer_attention: AttentionConfig, rngs: nnx.Rngs) -> EncoderLayer:
            """Makes a layer with this attention."""
            core = attention_fn or layer_attention.make(c.num_heads, c.d_model // c.num_heads, rngs=rngs)
            attention = MultiHeadAttention(c.d_model, c.num_heads, attention_fn=core, dtype=dtype, rngs=rngs)
            options: dict[str, Any] = {"activation_fn": ACTIVATIONS["gelu_tanh"], "dropout_rate": c.dropout_rate}
            feed_forward = FeedForward(c.d_model, c.d_ff, **options, dtype=dtype, rngs=rngs)
            return EncoderLayer(attention, feed_forward, residual)

        self.embedding = Embedding(c.vocab_size, c.d_model, init_stddev=1.0, dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(layer_pattern(make_layer, c.attention), c.num_layers, rngs)
        self.norm = LayerNorm(c.d_model)
        sizes = [c.d_model, c.d_ff] if c.num_sequences == 1 else [4 * c.d_model, c.d_ff, c.d_ff // 2]
        dense = functools.partial(Linear, kernel_init=nnx.initializers.lecun_normal(), rngs=rngs)
        self.hidden = nnx.List([dense(d_in, d_out) for d_in, d_out in itertools.pairwise(sizes)])
        self.classifier = dense(sizes[-1], len(c.labels))
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        other_tokens: Int[Array, "B T"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Classifies sequences, or pairs of sequences that the same layers encode separately.

        Args:
          tokens: ids, [B, T]; padding, 0, may be anywhere.
          other_tokens: the second sequences of pairs, [B, T]; None if `config.num_sequences` is 1.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits of the labels, [B, number of labels]; with `return_attention` the pair (logits, maps), maps
          being {"encoder/0/self": [B, N, T, T], ...}. Maps of pairs are [2 B, N, T, T]: index 2 b is the first sequence
          of pair b and 2 b + 1 the second. In the maps, padding comes after the tokens. A sequence without tokens is
          encoded as a vector of zeros.

        Raises:
          ValueError: if the number of sequences is not `config.num_sequences`.
        """
        check_tokens(tokens=tokens)
        if other_tokens is not None:
            check_tokens(other_tokens=other_tokens)
        num_sequences = 1 if other_tokens is None else 2
        if num_sequences != self.config.num_sequences:
            raise ValueError(
                f"the model has num_sequences={self.config.num_sequences}, got {num_sequences} sequences per example"
            )
        if other_tokens is None:
            vectors, maps = self._encode(tokens, rngs, return_attention)
        else:
            sequences = jnp.stack([tokens, other_tokens], axis=1).reshape(-1, tokens.shape[1])  # [2 B, T]
            vectors, maps = self._encode(sequences, rngs, return_attention)
            u, v = vectors[0::2], vectors[1::2]
            vectors = jnp.concatenate([u, v, u * v, u - v], axis=-1)
        for layer in self.hidden:
            vectors = jax.nn.relu(layer(vectors))
        logits = self.classifier(vectors)
        return (logits, maps) if return_attention else logits

    def _encode(
        self, tokens: Int[Array, "B T"], rngs: nnx.Rngs | None, return_attention: bool
    ) -> tuple[Float[Array, "B D"], Any]:
        """Returns the mean over the tokens of each sequence, float32, and its attention maps or None."""
        c, tokens = self.config, padding_last(tokens, 0)  # so that array indices are positions
        token_mask = tokens != 0
        x = add_bias(self.embedding(tokens), sinusoidal_positions(jnp.arange(tokens.shape[1]), c.d_model))
        x = drop(x, c.dropout_rate, rngs)
        mask = token_mask[:, None, None, :]

        def encode(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            return layer(x, mask=mask, is_causal=c.is_causal, rngs=rngs, return_weights=return_attention)

        x, maps = scan_layers(encode, self.encoder_layers, x, rngs, remat=c.remat, unroll=c.unroll)
        pooled = mean_over_tokens(self.norm(x), token_mask)
        if not return_attention:
            return pooled, None
        return pooled, {f"encoder/{index}/self": weights for index, weights in enumerate(maps["self"])}
