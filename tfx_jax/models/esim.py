"""ESIM: two sentences, read by LSTMs, aligned, compared and read again (Chen et al., 2017), without its trees."""

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.decomposable import attend_both
from tfx_jax.models.config import DTYPES
from tfx_jax.nn.basic import Embedding, Linear, drop, max_over_tokens, mean_over_tokens
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class EsimConfig:
    """Sizes of an ESIM; the defaults are the paper's (https://arxiv.org/abs/1609.06038, section 4).

    Without the vectors of words these are 4,326,303 parameters, the 4.3 M of the paper's table 1. What differs from the
    paper: its vectors of words begin as GloVe's; here, they are drawn.
    """

    vocab_size: int = at_least(0, 30_000)
    d_embedding: int = at_least(1, 300)  # of the vector of a word
    d_model: int = at_least(1, 300)  # of either direction of both LSTMs, of a projected comparison, of the tanh layer
    dropout_rate: float = fraction(0.5)  # of what both LSTMs, the tanh layer and the classifier read
    labels: tuple[str, ...] = ()  # the classes; a task sets them
    pad_id: int = at_least(0, 0)  # the token that fills a row
    dtype: str = one_of(DTYPES, "float32")  # of products; parameters, states, weights and logits stay float32

    kind: ClassVar[str] = "sentence_pair"

    def validate(self) -> None:
        """See `tfx_jax.models.config.ModelConfig`; any sizes go together."""

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`; a recurrence has no end."""
        del max_length
        self.vocab_size, self.d_embedding, self.d_model = 500, 32, 16

    def make(self, *, rngs: nnx.Rngs) -> "Esim":
        return Esim(self, rngs=rngs)


class Esim(nnx.Module):
    """Input encoding, local inference and inference composition (sections 3.1 to 3.3); logits of the labels."""

    def __init__(self, config: EsimConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.

        Raises:
          ValueError: if there are no labels.
        """
        c, d, dtype = config, config.d_model, jnp.dtype(config.dtype)
        c.validate()
        if not c.labels:
            raise ValueError("a classifier needs labels, of which the configuration has none")
        read = functools.partial(BidirectionalLayer, CELLS["lstm"], 2 * d, dtype=dtype, rngs=rngs)
        dense = functools.partial(Linear, kernel_init=nnx.initializers.glorot_uniform(), rngs=rngs)
        self.embedding = Embedding(c.vocab_size, c.d_embedding, scale=math.sqrt(c.d_embedding), dtype=dtype, rngs=rngs)
        self.encoder = read(input_size=c.d_embedding)
        self.projection = dense(8 * d, d, dtype=dtype)
        self.composition = read(input_size=d)
        self.hidden = dense(8 * d, d, dtype=dtype)
        self.classifier = dense(d, len(c.labels))
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
          premise: tokens, [B, T], padded with `config.pad_id`.
          hypothesis: likewise, [B, S].
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return the alignments.

        Returns:
          Logits of the labels, float32 [B, labels]; with `return_attention` a pair of these and the weights by which
          the words of each sentence are aligned with those of the other, {"decoder/0/cross": [B, 1, S, T],
          "encoder/0/cross": [B, 1, T, S]}: the premise is read as a source is, and the hypothesis as a target.
        """
        rate = self.config.dropout_rate
        masks = [tokens != self.config.pad_id for tokens in (premise, hypothesis)]
        a, b = (
            self.encoder(drop(self.embedding(tokens), rate, rngs), mask)[0]
            for tokens, mask in zip((premise, hypothesis), masks, strict=True)
        )
        of_b, of_a, *weights = attend_both(a, b, *(mask[:, None, None] for mask in masks), attend_fn=lambda x: x)
        vectors = self._compose(a, of_b, masks[0], rngs), self._compose(b, of_a, masks[1], rngs)
        hidden = jnp.tanh(self.hidden(drop(jnp.concatenate(vectors, axis=-1), rate, rngs)))
        logits = self.classifier(drop(hidden, rate, rngs).astype(jnp.float32))
        if not return_attention:
            return logits
        of_premise, of_hypothesis = weights
        return logits, {"decoder/0/cross": of_hypothesis[:, None], "encoder/0/cross": of_premise[:, None]}

    def _compose(
        self, words: Array, aligned: Array, mask: Bool[Array, "B T"], rngs: nnx.Rngs | None
    ) -> Float[Array, "B 4*D"]:
        """Compares the words of a sentence with what they are aligned with, and reads and pools the comparisons."""
        compared = jnp.concatenate([words, aligned, words - aligned, words * aligned], axis=-1)
        projected = drop(jax.nn.relu(self.projection(compared)), self.config.dropout_rate, rngs)
        read, _ = self.composition(projected, mask)
        return jnp.concatenate([mean_over_tokens(read, mask), max_over_tokens(read, mask)], axis=-1)
