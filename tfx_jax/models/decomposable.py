"""Decomposable attention: two sentences, compared word by aligned word (Parikh et al., 2016)."""

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
from tfx_jax.models.config import DTYPES
from tfx_jax.models.padding import padding_last
from tfx_jax.nn.basic import Embedding, Linear, drop

INITS = ("plain", "matching")
"""Ways to draw the parameters, see `DecomposableConfig.init`."""


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class DecomposableConfig:
    """Sizes of a decomposable attention model; the defaults are the paper's (https://arxiv.org/abs/1606.01933).

    Without the vectors of words these are 381,803 parameters, and 582,226 with `intra_attention`, the 382 k and 582 k
    of the paper's table 2. The projection has no offset, each of F, G, H and F_intra has two layers, H is followed by a
    linear layer, and there are 23 biases of distances: 10 words to either side, none, and farther to either side.

    What differs from the paper: its vectors of words are GloVe's and stay as they are; here, they are learned with the
    rest. `init` says how parameters are drawn. "matching" is for who has few pairs to learn from: vectors of words are
    three times as long, so that equal words are aligned from the start, and the first layer of G reads both halves of
    [word; what it is aligned with] with the same matrix and opposite signs, that is, their difference.
    """

    vocab_size: int = at_least(0, 30_000)
    d_embedding: int = at_least(1, 300)  # of the vector of a word
    d_model: int = at_least(1, 200)  # of a projected word
    d_ff: int = at_least(1, 200)  # of both layers of F, G, H and F_intra
    intra_attention: bool = False  # whether words are joined by what they attend to in their own sentence
    max_distance: int = at_least(0, 10)  # of words in a sentence, beyond which all share a bias
    dropout_rate: float = fraction(0.2)  # of what each layer of F, G, H and F_intra reads
    init: str = one_of(INITS, "plain")
    labels: tuple[str, ...] = ()  # the classes; a task sets them
    pad_id: int = at_least(0, 0)  # the token that fills a row
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, weights, logits: float32

    kind: ClassVar[str] = "sentence_pair"

    def validate(self) -> None:
        """See `tfx_jax.models.config.ModelConfig`; any sizes go together."""

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`; sentences may have any length."""
        del max_length
        self.vocab_size, self.d_embedding, self.d_model, self.d_ff = 500, 32, 16, 16

    def make(self, *, rngs: nnx.Rngs) -> "DecomposableAttention":
        return DecomposableAttention(self, rngs=rngs)


class TwoLayers(nnx.Module):
    """Two linear maps, each followed by a ReLU and preceded by dropout: the paper's F, G, H and F_intra."""

    def __init__(self, in_features: int, config: DecomposableConfig, *, rngs: nnx.Rngs):
        init, dtype = nnx.initializers.he_normal(), jnp.dtype(config.dtype)
        self.first = Linear(in_features, config.d_ff, kernel_init=init, dtype=dtype, rngs=rngs)
        self.second = Linear(config.d_ff, config.d_ff, kernel_init=init, dtype=dtype, rngs=rngs)
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Float[Array, "*batch D"], rngs: nnx.Rngs | None = None) -> Float[Array, "*batch F"]:
        """Transforms every vector alone; `rngs=None` means evaluation."""
        for layer in (self.first, self.second):
            x = jax.nn.relu(layer(drop(x, self.dropout_rate, rngs)))
        return x


class DecomposableAttention(nnx.Module):
    """Projected words; attend (F), compare (G), aggregate (H); logits of the labels."""

    def __init__(self, config: DecomposableConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: if there are no labels.
        """
        c = config
        c.validate()
        if not c.labels:
            raise ValueError("a classifier needs labels, of which the configuration has none")
        dtype, width = jnp.dtype(c.dtype), 2 * c.d_model if c.intra_attention else c.d_model
        norm = 3.0 if c.init == "matching" else 1.0
        stddev = norm * c.d_embedding**-0.5
        self.embedding = Embedding(c.vocab_size, c.d_embedding, init_stddev=stddev, dtype=dtype, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.projection = Linear(c.d_embedding, c.d_model, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)
        if c.intra_attention:
            self.intra = TwoLayers(c.d_model, c, rngs=rngs)
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
          premise: tokens, [B, T], `config.pad_id` where there is none.
          hypothesis: likewise, [B, S].
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return the alignments.

        Returns:
          Logits of the labels, float32 [B, labels]; with `return_attention` a pair of these and the weights by which
          the words of each sentence are aligned with those of the other, {"decoder/0/cross": [B, 1, S, T],
          "encoder/0/cross": [B, 1, T, S]}: the premise is read as a source is, and the hypothesis as a target;
          the columns of padding are last.
        """
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
        *_, of_premise, of_hypothesis = attend_both(a, b, *masks, attend_fn=attend)
        return logits, {"decoder/0/cross": of_hypothesis[:, None], "encoder/0/cross": of_premise[:, None]}

    def _words(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B 1 1 T"], rngs: nnx.Rngs | None
    ) -> Float[Array, "B T D"]:
        """Projects words; with intra-sentence attention, joins each with what it attends to (section 3.4)."""
        words = self.projection(self.embedding(tokens))
        if not self.config.intra_attention:
            return words
        # f_ij = F_intra(a_i) . F_intra(a_j) and a'_i = sum_j softmax_j(f_ij + d_{i-j}) a_j.
        scored = self.intra(words, rngs)[:, :, None]
        most, places = self.config.max_distance + 1, jnp.arange(tokens.shape[1])
        distance = jnp.clip(places[:, None] - places[None], -most, most)
        bias = jnp.take(self.distance_bias[...], distance + most, axis=0)[None, None]
        own: Any = dot_product_attention(scored, scored, words[:, :, None], bias, mask, scale=1.0)
        return jnp.concatenate([words, own[:, :, 0]], axis=-1)
