"""Sequence to vector with attention: classifies health records by pooling their events with learned queries."""

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
from tfx_jax.functional.attention.signature import Mask
from tfx_jax.functional.attention.structured import redundancy_penalty, structured_pooling
from tfx_jax.functional.layers import lookup
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric, record_masked_mean
from tfx_jax.nn.basic import Linear, drop

POOLINGS = ("additive", "dot", "mean", "structured")


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class Seq2VecConfig:
    """Configuration of a model in the spirit of Rajkomar et al. (2018, https://doi.org/10.1038/s41746-018-0029-1).

    The paper's "attention-based, time-aware" network classifies a weighted mean of the embedded events of a health
    record. Its features, functions of time and sizes depend on records that are not public; they are not reproduced
    here. `pooling` chooses the weights: "additive" and "dot" score events against one learned query. "mean" weights all
    events equally: the model without attention. "structured" computes `num_hops` weighted means and classifies their
    concatenation; `penalty` makes their weights differ (Lin et al., 2017, https://arxiv.org/abs/1703.03130).
    """

    vocab_size: int = at_least(0, 0)  # number of variables; set by the task
    d_model: int = at_least(1, 32)  # size of the vector of an event and of a pooled vector
    d_ff: int = at_least(1, 32)  # hidden units of the additive or structured score and of the classifier
    num_knots: int = at_least(2, 9)  # knots of the encodings of values and times, equally spaced in [0, 1]
    num_classes: int = at_least(2, 2)
    pooling: str = one_of(POOLINGS, "additive")
    num_hops: int = at_least(1, 4)  # for "structured": number of weighted means, the paper's r
    penalty: float = at_least(0, 1.0)  # for "structured": weight of ||A A^T - I||_F^2 in the training loss; 0: none
    dropout_rate: float = fraction(0.3)  # dropout of the pooled vectors and of the classifier's hidden layer
    event_dropout_rate: float = fraction(0.0)  # probability of hiding a whole event in training
    dtype: str = one_of(DTYPES, "float32")  # dtype of the computation; parameters, weights, logits: float32

    kind: ClassVar[str] = "events"

    def validate(self) -> None:
        """Accepts any combination of sizes."""

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # there may be any number of events
        self.d_model, self.d_ff, self.num_knots = 16, 8, 5

    def make(self, *, rngs: nnx.Rngs) -> "Seq2Vec":
        return Seq2Vec(self, rngs=rngs)

    @property
    def rows_pooled(self) -> int:
        """The number of weighted means of the events that are classified together."""
        return self.num_hops if self.pooling == "structured" else 1

    @property
    def is_penalised(self) -> bool:
        """Whether training adds the penalty to the loss."""
        return self.pooling == "structured" and self.penalty > 0


class Seq2Vec(nnx.Module):
    """Embeds events by variable, value and time, pools them by weighted means, and classifies with a hidden layer."""

    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: Seq2VecConfig, *, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          rngs: stream `params`.
        """
        c = checked(config)
        dtype = jnp.dtype(c.dtype)
        # Nearly zero: random vectors of a hundred events would be noise that training on few records does not remove.
        normal = nnx.initializers.normal(0.02 * c.d_model**-0.5)
        self.values = nnx.Param(normal(rngs.params(), (c.vocab_size, c.num_knots, c.d_model), jnp.float32))
        self.times = nnx.Param(normal(rngs.params(), (c.num_knots, c.d_model), jnp.float32))
        init = nnx.initializers.lecun_normal()
        # Initial scores are zero, so that each pooling starts as the mean.
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
        """Classifies records; the order of events does not matter.

        In training, the weighted penalty is stored in `auxiliary_loss`, which the train step adds to the loss.

        Args:
          variable: id of the measured variable, 0 .. vocab_size - 1, [B, T].
          value: measured value scaled to [0, 1], [B, T]; clipped to that range.
          time: time of the measurement scaled to [0, 1], [B, T]; clipped to that range.
          event_mask: True for events, False for padding, [B, T].
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention weights.

        Returns:
          float32 logits, [B, num_classes]; with `return_attention` the pair (logits, {"pool/0/cross": [B, N, 1, T]}),
          the weights of events in each of N means (N = `num_hops` for "structured", otherwise 1). A record without
          events is pooled to zeros.
        """
        c = self.config
        rate = 0.0 if rngs is None else c.event_dropout_rate
        if rate and rngs is not None:
            event_mask = event_mask & jax.random.bernoulli(rngs.dropout(), 1.0 - rate, event_mask.shape)
        variable = jnp.where(event_mask, variable, 0)
        value_vectors = _between_knots(self.values[...], variable, value)
        events = value_vectors + _between_knots(self.times[...][None], index=None, x=time)
        events = (math.sqrt(c.d_model) * events).astype(c.dtype)  # scaled like word vectors in a Transformer
        pooled, weights = self._pool(events[:, :, None], event_mask[:, None, None])
        if rngs is not None:
            self._record_penalty(weights, event_mask)
        hidden = jax.nn.relu(self.hidden(drop(pooled.reshape(len(pooled), -1), self.config.dropout_rate, rngs)))
        logits = self.classifier(drop(hidden, self.config.dropout_rate, rngs).astype(jnp.float32))
        return (logits, {"pool/0/cross": weights}) if return_attention else logits

    def _pool(self, events: Float[Array, "B T 1 D"], mask: Mask) -> tuple[Float[Array, "B 1 N D"], Array]:
        """Returns the weighted means of events, [B, 1, N, D], and their weights, [B, N, 1, T]."""
        c, batch_size = self.config, len(events)
        if c.pooling == "mean":
            scores = jnp.zeros((batch_size, 1, 1, events.shape[1]), jnp.float32)
            pooled, weights = attention_from_logits(scores, events, mask=mask)
            return pooled.astype(events.dtype), weights
        if c.pooling == "structured":
            pooled, weights = structured_pooling(events[:, :, 0], self.key[...], self.score[...], mask[:, 0, 0])
            return pooled[:, None], weights[:, :, None]
        attend: Any = dot_product_attention
        if c.pooling == "additive":
            attend = functools.partial(additive_attention, w_query=None, w_key=self.key[...], v=self.score[...])
        query = jnp.broadcast_to(self.query[...].astype(events.dtype), (batch_size, 1, 1, len(self.query)))
        return attend(query, events, events, mask=mask, return_weights=True)

    def _record_penalty(self, weights: Float[Array, "B N 1 T"], event_mask: Bool[Array, "B T"]) -> None:
        """Records the penalty, a mean over the records that have events, for the train step."""
        if self.auxiliary_loss is not None and self.redundancy is not None:
            exists = event_mask.any(axis=1).astype(jnp.float32)
            penalties = redundancy_penalty(weights[:, :, 0])
            record_masked_mean(self.auxiliary_loss, self.redundancy, penalties, exists, scale=self.config.penalty)


def _between_knots(
    tables: Float[Array, "V K D"], index: Int[Array, "B T"] | None, x: Float[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Interpolates linearly between the two knots around x, clipped to [0, 1], in table `index` (None: the only one).

    This is the piecewise linear encoding of Gorishniy et al. (2022, https://arxiv.org/abs/2203.05556) with a linear
    layer: effects need not be linear in x, and there are no jumps as at the edges of bins.
    """
    num_tables, num_knots, size = tables.shape
    x = jnp.clip(x, 0.0, 1.0) * (num_knots - 1)  # in distances between knots
    below = jnp.minimum(x.astype(jnp.int32), num_knots - 2)  # index of the knot below x; x = 1 is in the last interval
    weight = (x - below.astype(x.dtype))[..., None]
    knots = tables.reshape(num_tables * num_knots, size)
    first = below if index is None else below + index * num_knots
    return (1.0 - weight) * lookup(knots, first) + weight * lookup(knots, first + 1)
