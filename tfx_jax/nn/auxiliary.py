"""Auxiliary losses and metrics recorded by modules, such as the losses of a router.

A module writes into its own Variables when it is called in training. The training step reads them after the loss of
the task, so that the layers in between and the tasks need not pass them on.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class AuxiliaryLoss(nnx.Variable[Array]):
    """A scalar, already weighted, that the training step adds to the mean loss of the task."""


class ExpertLoad(nnx.Variable[Array]):
    """Tokens of this step that chose each expert, [E], summed over the parts of the batch."""


class StepMetric(nnx.Variable[Array]):
    """A scalar of this step; the trainer logs the mean over all metrics with the same name."""


def record_masked_mean(
    loss: AuxiliaryLoss,
    metric: StepMetric,
    values: Float[Array, "*shape"],
    exists: Float[Array, "*shape"],
    *,
    scale: float,
) -> None:
    """Writes the mean of `values` where `exists` is 1 to `metric`, and this mean times `scale` to `loss`.

    The mean of no values is 0.
    """
    mean = (values * exists).sum() / jnp.maximum(exists.sum(), 1)
    loss[...], metric[...] = scale * mean, mean
