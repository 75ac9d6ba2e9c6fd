"""What parts of a model say of a training step besides their outputs, such as the losses of a router.

A part writes into a Variable of its own when it is called in training; the train step reads it after the loss of the
task, so that neither the layers between nor the tasks know of it.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class AuxiliaryLoss(nnx.Variable[Array]):
    """A scalar, weighted already, that the train step adds to the mean loss of a prediction."""


class StepMetric(nnx.Variable[Array]):
    """A scalar of this step: the trainer tells the mean over all that have the same name."""


def record_masked_mean(
    loss: AuxiliaryLoss,
    metric: StepMetric,
    values: Float[Array, "*shape"],
    exists: Float[Array, "*shape"],
    *,
    scale: float,
) -> None:
    """Leaves the mean of the values that exist, 0 if none does: in the metric as it is, in the loss times `scale`."""
    mean = (values * exists).sum() / jnp.maximum(exists.sum(), 1)
    loss[...], metric[...] = scale * mean, mean
