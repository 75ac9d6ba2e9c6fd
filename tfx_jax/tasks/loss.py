"""What the loss of every task gives back, so that one training step serves all of them."""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Metric(NamedTuple):
    """A mean whose sum and weight are still apart, so that those of parts of a batch can be added up.

    Both are scalar arrays in a program, and numbers outside.
    """

    sum: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """The sum over the weight; of no weight, the sum, which is then 0."""
        return self.sum / (max(self.weight, 1.0) if isinstance(self.weight, float) else jnp.maximum(self.weight, 1))


class LossOutput(NamedTuple):
    """The loss of a batch, and what is told of it."""

    loss: Float[Array, ""]
    """Summed over predictions; a step goes down the gradient of its quotient by `weight`."""
    weight: Float[Array, ""]
    """How many predictions count."""
    metrics: dict[str, Metric]
    """Whatever else is worth a curve, by name."""
    num_tokens: Float[Array, ""]
    """How many tokens, or other units, were read: of these the throughput is."""
    carry: Any = None
    """What the next batch begins with, such as memories: arrays [B, ...]; None for examples that do not go on."""


def add_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Adds the metrics, which are numbers, of parts of the examples by name."""
    columns = collections.defaultdict(list)
    for part in parts:
        for name, metric in part.items():
            columns[name].append(metric)
    return {name: Metric(*map(math.fsum, zip(*column, strict=True))) for name, column in columns.items()}
