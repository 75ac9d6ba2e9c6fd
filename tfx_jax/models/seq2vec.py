"""Sequence to vector with attention: events of a record, pooled by learned queries, and what became of it."""

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
from tfx_jax.functional.attention.additive import additive_attention
from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.masks import Mask
from tfx_jax.functional.attention.structured import redundancy_penalty, structured_pooling
from tfx_jax.functional.layers import lookup
from tfx_jax.models.config import DTYPES
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric, record_masked_mean
from tfx_jax.nn.basic import Linear, drop

POOLINGS = ("additive", "dot", "mean", "structured")


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class Seq2VecConfig:
    """Sizes of a model in the spirit of Rajkomar et al. (2018, https://doi.org/10.1038/s41746-018-0029-1).

    The paper's "attention-based, time-aware" network pools embedded events of a health record in one weighted mean, and
    classifies that; its features, its functions of time and its sizes are those of records that are not public, and are
    not copied here. `pooling` says where the weights come from: "additive" and "dot" are scores against one learned
    query, "mean" gives all events the same weight, which is the model without attention. "structured" has
    `num_hops` rows of weights, each with a mean of its own, all of which are classified together, and `penalty` has
    training keep the rows apart: Lin et al. (2017, https://arxiv.org/abs/1703.03130).
    """

    vocab_size: int = at_least(0, 0)  # variables; the task sets how many there are
    d_model: int = at_least(1, 32)  # of an event, and of what is pooled
    d_ff: int = at_least(1, 32)  # of the hidden layers of a score, additive or structured, and of the classifier
    num_knots: int = at_least(2, 9)  # of values and of times, equally far apart in [0, 1]
    num_classes: int = at_least(2, 2)
    pooling: str = one_of(POOLINGS, "additive")
    num_hops: int = at_least(1, 4)  # of "structured": rows of attention, the paper's r
    penalty: float = at_least(0, 1.0)  # of "structured": weight of ||A A^T - I||_F^2 in the loss of training; 0: none
    dropout_rate: float = fraction(0.3)  # of what is pooled and of the classifier's hidden layer
    event_dropout_rate: float = fraction(0.0)  # of whole events, as if they had not been measured
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, weights, logits: float32

    kind: ClassVar[str] = "events"

    def validate(self) -> None:
        """See `tfx_jax.models.config.ModelConfig`; any sizes go together."""

    def tiny(self, *, max_length: int) -> None:
        """See `tfx_jax.models.config.ModelConfig`; there may be any number of events."""
        del max_length
        self.d_model, self.d_ff, self.num_knots = 16, 8, 5

    def make(self, *, rngs: nnx.Rngs) -> "Seq2Vec":
        return Seq2Vec(self, rngs=rngs)

    @property
    def rows_pooled(self) -> int:
        """How many means of the events are classified."""
        return self.num_hops if self.pooling == "structured" else 1

    @property
    def is_penalised(self) -> bool:
        """Whether training adds the penalty to the loss."""
        return self.pooling == "structured" and self.penalty > 0


class Seq2Vec(nnx.Module):
    """Events embedded by variable, value and time; their weighted means; a hidden layer and the logits of classes."""

    def __init__(self, config: Seq2VecConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          rngs: stream `params`.
        """
        c = config
        c.validate()
        dtype = jnp.dtype(c.dtype)
        # Nearly nothing: what a hundred events say at random is noise, which a small table of records never unlearns.
        normal = nnx.initializers.normal(0.02 * c.d_model**-0.5)
        self.values = nnx.Param(normal(rngs.params(), (c.vocab_size, c.num_knots, c.d_model), jnp.float32))
        self.times = nnx.Param(normal(rngs.params(), (c.num_knots, c.d_model), jnp.float32))
        init = nnx.initializers.lecun_normal()
        # A score of zero for each event: all begin as the mean.
        if c.pooling == "additive":
            self.query = nnx.Param(jnp.zeros(c.d_ff))
            self.key = nnx.Param(init(rngs.params(), (c.d_model, c.d_ff), jnp.float32))
            self.score = nnx.Param(jnp.zeros(c.d_ff))
        elif c.pooling == "dot":
            self.query = nnx.Param(jnp.zeros(c.d_model))
        elif c.pooling == "structured":
            self.key = nnx.Param(init(rngs.params(), (c.d_model, c.d_ff), jnp.float32))
            self.score = nnx.Param(jnp.zeros((c.d_ff, c.num_hops)))
        self.hidden = Linear(c.rows_pooled * c.d_model, c.d_ff, kernel_init=init, dtype=dtype, rngs=rngs)
        self.classifier = Linear(c.d_ff, c.num_classes, kernel_init=init, rngs=rngs)
        self.auxiliary_loss = AuxiliaryLoss(jnp.zeros(())) if c.is_penalised else None
        self.redundancy = StepMetric(jnp.zeros(())) if c.is_penalised else None
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        variable: Int[Array, "B T"],
        value: Float[Array, "B T"],
        time: Float[Array, "B T"],
        event_mask: Bool[Array, "B T"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Classifies records; the order of their events means nothing.

        In training, the penalty is left in `auxiliary_loss`, weighted, for the train step to add.

        Args:
          variable: what was measured, [B, T] in 0 .. vocab_size - 1.
          value: what was found, scaled to [0, 1], [B, T]; what is outside counts as the nearer end.
          time: when, scaled to [0, 1], [B, T]; likewise.
          event_mask: True for events, False for padding, [B, T].
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return the attention map.

        Returns:
          Logits of the classes, float32 [B, num_classes]; with `return_attention` a pair of these and
          {"pool/0/cross": [B, N, 1, T]}, the share of each event in each of N means, of which only "structured" has
          several. A row without events pools zeros.
        """
        c = self.config
        rate = 0.0 if rngs is None else c.event_dropout_rate
        if rate and rngs is not None:
            event_mask = event_mask & jax.random.bernoulli(rngs.dropout(), 1.0 - rate, event_mask.shape)
        variable = jnp.where(event_mask, variable, 0)
        events = _between_knots(self.values[...], variable, value) + _between_knots(self.times[...][None], None, time)
        events = (math.sqrt(c.d_model) * events).astype(c.dtype)  # as words are, see `tfx_jax.nn.Embedding`
        pooled, weights = self._pool(events[:, :, None], event_mask[:, None, None])
        if rngs is not None:
            self._learn_penalty(weights, event_mask)
        hidden = jax.nn.relu(self.hidden(drop(pooled.reshape(len(pooled), -1), self.config.dropout_rate, rngs)))
        logits = self.classifier(drop(hidden, self.config.dropout_rate, rngs).astype(jnp.float32))
        return (logits, {"pool/0/cross": weights}) if return_attention else logits

    def _pool(self, events: Float[Array, "B T 1 D"], mask: Mask) -> tuple[Float[Array, "B 1 N D"], Array]:
        """Attends to events from the one query, or from each of several, which are those of every row."""
        c, rows = self.config, len(events)
        if c.pooling == "mean":
            scores = jnp.zeros((rows, 1, 1, events.shape[1]), jnp.float32)
            pooled, weights = attention_from_logits(scores, events, None, mask)
            return pooled.astype(events.dtype), weights
        if c.pooling == "structured":
            pooled, weights = structured_pooling(events[:, :, 0], self.key[...], self.score[...], mask[:, 0, 0])
            return pooled[:, None], weights[:, :, None]
        attend: Any = dot_product_attention
        if c.pooling == "additive":
            attend = functools.partial(additive_attention, w_query=None, w_key=self.key[...], v=self.score[...])
        query = jnp.broadcast_to(self.query[...].astype(events.dtype), (rows, 1, 1, len(self.query)))
        return attend(query, events, events, mask=mask, return_weights=True)

    def _learn_penalty(self, weights: Float[Array, "B N 1 T"], event_mask: Bool[Array, "B T"]) -> None:
        """Leaves the penalty, a mean over the records that have events, where the train step finds it."""
        if self.auxiliary_loss is not None and self.redundancy is not None:
            exists = event_mask.any(axis=1).astype(jnp.float32)
            penalties = redundancy_penalty(weights[:, :, 0])
            record_masked_mean(self.auxiliary_loss, self.redundancy, penalties, exists, scale=self.config.penalty)


def _between_knots(
    tables: Float[Array, "V K D"], index: Int[Array, "B T"] | None, place: Float[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Interpolates linearly between the two knots of a table around each place in [0, 1]; None means the only table.

    A number is thus neither one input, with which every effect would be linear, nor a bin, whose edges would be cliffs:
    the piecewise linear encoding of Gorishniy et al. (2022, https://arxiv.org/abs/2203.05556), then a linear layer.
    """
    num_tables, num_knots, size = tables.shape
    place = jnp.clip(place, 0.0, 1.0) * (num_knots - 1)
    below = jnp.minimum(place.astype(jnp.int32), num_knots - 2)
    share = (place - below.astype(place.dtype))[..., None]
    rows = tables.reshape(num_tables * num_knots, size)
    first = below if index is None else below + index * num_knots
    return (1.0 - share) * lookup(rows, first) + share * lookup(rows, first + 1)
