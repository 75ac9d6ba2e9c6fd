"""Learning rate and Adam against the paper's formulas in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import inverse_sqrt_schedule, learning_rate, make_optimizer


def equation_3(step, d_model, warmup_steps):
    """Vaswani et al. (2017), equation 3; steps count from 1."""
    step = np.asarray(step, np.float64)
    return d_model**-0.5 * np.minimum(step**-0.5, step * warmup_steps**-1.5)


@pytest.mark.parametrize("d_model", [128, 512, 1024, 33])
@pytest.mark.parametrize("warmup_steps", [1, 400, 4_000, 16_000])
def test_schedule_is_equation_3(d_model, warmup_steps):
    steps = np.concatenate([np.arange(1, 50), np.geomspace(1, 3e6, 400).astype(int), [warmup_steps, 100_000]])
    schedule = learning_rate(OptimizerConfig(warmup_steps=warmup_steps), d_model)
    rates = schedule(jnp.asarray(steps - 1, jnp.int32))  # the counter is 0 at the first update
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, equation_3(steps, d_model, warmup_steps), rtol=5e-7)


def test_peak_of_the_base_model():
    """At the 4000th update: 6.9877e-4 = (512 * 4000)^-0.5, and lower on both sides."""
    schedule = learning_rate(OptimizerConfig(), d_model=512)
    before, peak, after = (float(schedule(step - 1)) for step in (3_999, 4_000, 4_001))
    assert peak == pytest.approx(6.9877e-4, abs=5e-9)
    assert before < peak > after
    assert float(schedule(0)) == pytest.approx(peak / 4_000, rel=1e-6)


def test_peak_of_ones_own():
    schedule = learning_rate(OptimizerConfig(warmup_steps=100, peak_learning_rate=2e-3), d_model=512)
    rates = [float(schedule(step - 1)) for step in (1, 50, 100, 400)]
    assert rates == pytest.approx([2e-5, 1e-3, 2e-3, 1e-3], rel=1e-6)
    peak_of_zero = learning_rate(OptimizerConfig(peak_learning_rate=0.0), d_model=512)
    assert float(peak_of_zero(3_999)) == 0.0


def test_schedule_is_the_same_when_jitted():
    schedule = inverse_sqrt_schedule(0.5, 10)
    counts = jnp.arange(40)
    np.testing.assert_allclose(jax.jit(schedule)(counts), schedule(counts), rtol=2e-7)


def numpy_adam(weights, grads, rates, b1, b2, epsilon):
    """Kingma and Ba (2015), algorithm 1, in float64."""
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad**2
        weights = weights - rate * (mean / (1 - b1**step)) / (np.sqrt(square / (1 - b2**step)) + epsilon)
    return weights


@pytest.mark.parametrize("settings", [{}, {"b1": 0.8, "b2": 0.95, "epsilon": 0.1}])
def test_adam_equals_float64_numpy(settings):
    """Seven updates, over the peak of the schedule; by default with the paper's 0.9, 0.98 and 1e-9."""
    config = OptimizerConfig(warmup_steps=3, **settings)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(4, 3))
    grads = rng.normal(size=(7, 4, 3)) * 10.0 ** rng.integers(-4, 3, (7, 4, 3))
    expected = numpy_adam(
        weights,
        grads,
        equation_3(np.arange(1, 8), 16, 3),
        b1=settings.get("b1", 0.9),
        b2=settings.get("b2", 0.98),
        epsilon=settings.get("epsilon", 1e-9),
    )
    optimizer = make_optimizer(config, d_model=16)
    params = {"weights": jnp.asarray(weights, jnp.float32)}
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for grad in grads:
        updates, state = step({"weights": jnp.asarray(grad, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    assert np.abs(expected - weights).max() > 0.1
    np.testing.assert_allclose(params["weights"], expected, rtol=1e-6, atol=1e-6)
