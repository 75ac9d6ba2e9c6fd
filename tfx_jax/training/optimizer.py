"""The paper's optimizer and learning-rate schedule."""

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from tfx_jax.training.config import OptimizerConfig


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """Rises linearly to `peak` at step `warmup_steps`, then falls as the inverse square root of the step.

    Equation 3 of Vaswani et al. (2017), d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), is the one whose peak is
    (d_model * warmup_steps)^-0.5. Steps count from 1: the first update is made at 1 / warmup_steps of the peak.
    """

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1.0
        return peak * jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / step))

    return schedule


def learning_rate(config: OptimizerConfig, d_model: int) -> optax.Schedule:
    """The schedule of an experiment; without a peak of its own, the paper's.

    >>> f"{learning_rate(OptimizerConfig(warmup_steps=4_000), d_model=512)(3_999):.4e}"
    '6.9877e-04'
    """
    peak = config.peak_learning_rate
    return inverse_sqrt_schedule((d_model * config.warmup_steps) ** -0.5 if peak is None else peak, config.warmup_steps)


def make_optimizer(config: OptimizerConfig, d_model: int) -> optax.GradientTransformation:
    """Adam with b1 = 0.9, b2 = 0.98, epsilon = 1e-9 (section 5.3 of Vaswani et al., 2017)."""
    return optax.adam(learning_rate(config, d_model), b1=config.b1, b2=config.b2, eps=config.epsilon)
