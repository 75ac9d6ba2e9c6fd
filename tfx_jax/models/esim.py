"""ESIM, LSTMs and alignment for natural language inference (Chen et al., 2017), without its tree-LSTMs.

The premise is the paper's sentence a, the hypothesis its sentence b; words are the tokens of a sentence.
"""

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
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.padding import check_tokens
from tfx_jax.nn.basic import Embedding, Linear, drop, max_over_tokens, mean_over_tokens
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class EsimConfig:
    """Configuration of an ESIM; the defaults are the paper's (https://arxiv.org/abs/1609.06038, section 4).

    They give 4,326,303 parameters without word vectors, the 4.3 M of the paper's table 1. One difference: the paper
    initializes word vectors from GloVe; here, they are random.
    """

    vocab_size: int = at_least(0, 30_000)
    d_embedding: int = at_least(1, 300)  # size of a word vector
    d_model: int = at_least(1, 300)  # size of each direction of both LSTMs, of the projection and of the tanh layer
    dropout_rate: float = fraction(0.5)  # dropout of the inputs of both LSTMs, the tanh layer and the classifier
    labels: tuple[str, ...] = ()  # names of the classes; set by the task
    pad_id: int = at_least(0, 0)  # id of the padding token
    dtype: str = one_of(DTYPES, "float32")  # dtype of matrix products; all else is float32

    kind: ClassVar[str] = "sentence_pair"

    def validate(self) -> None:
        """Accepts any combination of sizes."""

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # a recurrent network has no maximum length
        self.vocab_size, self.d_embedding, self.d_model = 500, 32, 16

    def make(self, *, rngs: nnx.Rngs) -> "Esim":
        return Esim(self, rngs=rngs)


class Esim(nnx.Module):
    """Input encoding, local inference, inference composition (sections 3.1 to 3.3) and a classifier."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: EsimConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.

        Raises:
          ValueError: if there are no labels.
        """
        c, d, dtype = checked(config), config.d_model, jnp.dtype(config.dtype)
        if not c.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        make_lstm = functools.partial(BidirectionalLayer, CELLS["lstm"], 2 * d, dtype=dtype, rngs=rngs)
        dense = functools.partial(Linear, kernel_init=nnx.initializers.glorot_uniform(), rngs=rngs)
        self.embedding = Embedding(c.vocab_size, c.d_embedding, scale=math.sqrt(c.d_embedding), dtype=dtype, rngs=rngs)
        self.encoder = make_lstm(input_size=c.d_embedding)
        self.projection = dense(8 * d, d, dtype=dtype)
        self.composition = make_lstm(input_size=d)
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
          hypothesis: tokens, [B, S], padded with `config.pad_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the alignment weights.

        Returns:
          float32 logits of the labels, [B, number of labels]; with `return_attention` the pair (logits, maps), maps
          being {"decoder/0/cross": [B, 1, S, T], "encoder/0/cross": [B, 1, T, S]}: from the words of the hypothesis to
          those of the premise, and the reverse.
        """
        check_tokens(premise=premise, hypothesis=hypothesis)
        rate = self.config.dropout_rate
        masks = [tokens != self.config.pad_id for tokens in (premise, hypothesis)]
        # Outputs of the first LSTM, [B, T, 2 D] and [B, S, 2 D].
        a, b = (
            self.encoder(drop(self.embedding(tokens), rate, rngs), mask)[0]
            for tokens, mask in zip((premise, hypothesis), masks, strict=True)
        )
        aligned_b, aligned_a, premise_weights, hypothesis_weights = attend_both(
            a, b, *(mask[:, None, None] for mask in masks), attend_fn=lambda x: x
        )
        vectors = self._compose(a, aligned_b, masks[0], rngs), self._compose(b, aligned_a, masks[1], rngs)
        hidden = jnp.tanh(self.hidden(drop(jnp.concatenate(vectors, axis=-1), rate, rngs)))
        logits = self.classifier(drop(hidden, rate, rngs).astype(jnp.float32))
        if not return_attention:
            return logits
        return logits, {"decoder/0/cross": hypothesis_weights[:, None], "encoder/0/cross": premise_weights[:, None]}

    def _compose(
        self,
        words: Float[Array, "B T 2*D"],
        aligned: Float[Array, "B T 2*D"],
        mask: Bool[Array, "B T"],
        rngs: nnx.Rngs | None,
    ) -> Float[Array, "B 4*D"]:
        """Compares each word with its aligned vector, runs the composition LSTM, and pools by mean and maximum."""
        compared = jnp.concatenate([words, aligned, words - aligned, words * aligned], axis=-1)
        projected = drop(jax.nn.relu(self.projection(compared)), self.config.dropout_rate, rngs)
        outputs, _ = self.composition(projected, mask)
        return jnp.concatenate([mean_over_tokens(outputs, mask), max_over_tokens(outputs, mask)], axis=-1)
