"""Losses of a batch and their metrics."""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.losses import label_smoothed_cross_entropy, z_loss


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
    """Loss of a batch and its metrics."""

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


def summed_cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Sums the label-smoothed cross entropy of predictions.

    Args:
      logits: unnormalized scores, [*batch, V].
      targets: class indices, [*batch]; one outside 0 .. V - 1 makes the loss NaN, whatever its weight.
      weights: how much each prediction counts, 0 for padding, float32 [*batch].
      label_smoothing: see `tfx_jax.functional.label_smoothed_cross_entropy`.
      z_loss_weight: of `tfx_jax.functional.z_loss` in the loss; 0 leaves it out.

    Returns:
      The summed loss in nats, the number of predictions that count as its weight and its number of tokens, and the
      metrics "nll" (cross entropy without smoothing), "accuracy" (how often the target is the first choice) and, if it
      has a weight, "z_loss" (its share of the loss); all float32 scalars.
    """
    loss = label_smoothed_cross_entropy(logits, targets, smoothing=label_smoothing)
    weight = weights.sum()
    metrics = {
        "nll": Metric((label_smoothed_cross_entropy(logits, targets) * weights).sum(), weight),
        "accuracy": Metric((is_first_choice(logits, targets) * weights).sum(), weight),
    }
    total = (loss * weights).sum()
    if z_loss_weight:
        share = z_loss_weight * (z_loss(logits) * weights).sum()
        metrics["z_loss"] = Metric(share, weight)
        total = total + share
    return LossOutput(total, weight, metrics, num_tokens=weight)


def is_first_choice(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Whether no class scores above the target; unlike an argmax, a maximum is vectorized on CPU (20 times faster)."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, wrap_negative_indices=False)[..., 0]
    return picked >= logits.max(axis=-1)
