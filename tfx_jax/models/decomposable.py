"""Decomposable attention, a classifier of sentence pairs that compares aligned words (Parikh et al., 2016)."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.decomposable import attend_both, decomposable_attention
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.padding import check_tokens, padding_last
from tfx_jax.nn.basic import Embedding, Linear, drop

INITS = ("plain", "matching")
"""Schemes of initialization, see `DecomposableConfig`."""


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class DecomposableConfig:
    """Configuration of a decomposable attention model; defaults are the paper's (https://arxiv.org/abs/1606.01933).

    They give 381,803 parameters without word vectors, or 582,226 with `intra_attention`: the 382 k and 582 k of the
    paper's table 2. The projection has no bias. F, G, H and F_intra have two layers each, and a linear layer follows H.
    There are 23 distance biases: distances -10 to 10, and one for all farther words on each side.

    One difference: the paper's word vectors are GloVe's and are not trained; here they are trained. `init` chooses the
    initialization. "matching" is for small training sets: word vectors are three times as long, so that equal words are
    aligned from the start, and the first layer of G starts as a function of the difference of a word and its aligned
    vector (same matrix for both, with opposite signs).
    """

    vocab_size: int = at_least(0, 30_000)
    d_embedding: int = at_least(1, 300)  # size of a word vector
    d_model: int = at_least(1, 200)  # size of a projected word vector
    d_ff: int = at_least(1, 200)  # units of both layers of F, G, H and F_intra
    intra_attention: bool = False  # whether to concatenate to each word its attention within the sentence
    max_distance: int = at_least(0, 10)  # distance of words in a sentence beyond which all share a bias
    dropout_rate: float = fraction(0.2)  # dropout of the inputs of each layer of F, G, H and F_intra
    init: str = one_of(INITS, "plain")  # initialization, see above
    labels: tuple[str, ...] = ()  # names of the classes; set by the task
    pad_id: int = at_least(0, 0)  # id of the padding token
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, weights, logits: float32

    kind: ClassVar[str] = "sentence_pair"

    def validate(self) -> None:
        """Accepts any combination of sizes."""

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # sentences may have any length
        self.vocab_size, self.d_embedding, self.d_model, self.d_ff = 500, 32, 16, 16

    def make(self, *, rngs: nnx.Rngs) -> "DecomposableAttention":
        return DecomposableAttention(self, rngs=rngs)


class TwoLayers(nnx.Module):
    """Two linear maps, each followed by a ReLU and preceded by dropout: the paper's F, G, H and F_intra."""

    def __init__(self, in_features: int, config: DecomposableConfig, *, rngs: nnx.Rngs):
        """Initializes both maps by He et al. (2015)."""
        init, dtype = nnx.initializers.he_normal(), jnp.dtype(config.dtype)
        self.first = Linear(in_features, config.d_ff, kernel_init=init, dtype=dtype, rngs=rngs)
        self.second = Linear(config.d_ff, config.d_ff, kernel_init=init, dtype=dtype, rngs=rngs)
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Float[Array, "*batch D"], rngs: nnx.Rngs | None = None) -> Float[Array, "*batch F"]:
        """Transforms each vector; `rngs=None` means evaluation."""
        for layer in (self.first, self.second):
            x = jax.nn.relu(layer(drop(x, self.dropout_rate, rngs)))
        return x


class DecomposableAttention(nnx.Module):
    """Projects words, attends (F), compares (G), aggregates (H) and classifies."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: DecomposableConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if there are no labels.
        """
        c = checked(config)
        if not c.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        dtype = jnp.dtype(c.dtype)
        width = 2 * c.d_model if c.intra_attention else c.d_model  # of a word's vector
        norm = 3.0 if c.init == "matching" else 1.0
        stddev = norm * c.d_embedding**-0.5
        self.embedding = Embedding(c.vocab_size, c.d_embedding, init_stddev=stddev, dtype=dtype, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.projection = Linear(c.d_embedding, c.d_model, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)
        if c.intra_attention:
            self.intra = TwoLayers(c.d_model, c, rngs=rngs)
            # Distances -max_distance .. max_distance, and one bias for farther words on each side.
            self.distance_bias = nnx.Param(jnp.zeros(2 * c.max_distance + 3))
        self.attend = TwoLayers(width, c, rngs=rngs)
        self.compare = TwoLayers(2 * width, c, rngs=rngs)
        if c.init == "matching":
            kernel = self.compare.first.kernel
            kernel[...] = jnp.concatenate([kernel[:width], -kernel[:width]])
        self.aggregate = TwoLayers(2 * c.d_ff, c, rngs=rngs)
        self.classifier = Linear(c.d_ff, len(c.labels), kernel_init=init, rngs=rngs)
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        premise: Int[Array, "B T"],
        hypothesis: Int[Array, "B S"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Classifies pairs of sentences.

        Args:
          premise: tokens, [B, T]; padding, `config.pad_id`, may be anywhere.
          hypothesis: tokens, [B, S]; padding as for `premise`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the alignment weights.

        Returns:
          float32 logits of the labels, [B, number of labels]; with `return_attention` the pair (logits, maps), maps
          being {"decoder/0/cross": [B, 1, S, T], "encoder/0/cross": [B, 1, T, S]}: from the words of the hypothesis to
          those of the premise, and the reverse. In the maps, padding comes after the words.
        """
        check_tokens(premise=premise, hypothesis=hypothesis)
        sentences = [padding_last(tokens, self.config.pad_id) for tokens in (premise, hypothesis)]
        masks = [(tokens != self.config.pad_id)[:, None, None] for tokens in sentences]
        a, b = (self._words(tokens, mask, rngs) for tokens, mask in zip(sentences, masks, strict=True))
        attend = functools.partial(self.attend, rngs=rngs)
        logits = decomposable_attention(
            a,
            b,
            *masks,
            attend_fn=attend,
            compare_fn=functools.partial(self.compare, rngs=rngs),
            aggregate_fn=lambda sums: self.classifier(self.aggregate(sums, rngs).astype(jnp.float32)),
        )
        if not return_attention:
            return logits
        *_, premise_weights, hypothesis_weights = attend_both(a, b, *masks, attend_fn=attend)
        return logits, {"decoder/0/cross": hypothesis_weights[:, None], "encoder/0/cross": premise_weights[:, None]}

    def _words(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B 1 1 T"], rngs: nnx.Rngs | None
    ) -> Float[Array, "B T D"]:
        """Projects words; with `intra_attention`, concatenates each with its self-attention output (section 3.4)."""
        words = self.projection(self.embedding(tokens))
        if not self.config.intra_attention:
            return words
        # f_ij = F_intra(a_i) . F_intra(a_j) and a'_i = sum_j softmax_j(f_ij + d_{i-j}) a_j.
        query_key = self.intra(words, rngs)[:, :, None]  # one head
        limit = self.config.max_distance + 1  # farther words share the bias of this distance
        positions = jnp.arange(tokens.shape[1])
        distance = jnp.clip(positions[:, None] - positions[None], -limit, limit)
        bias = jnp.take(self.distance_bias[...], distance + limit, axis=0)[None, None]  # [1, 1, T, T]
        attended: Any = dot_product_attention(query_key, query_key, words[:, :, None], bias, mask, scale=1.0)
        return jnp.concatenate([words, attended[:, :, 0]], axis=-1)
