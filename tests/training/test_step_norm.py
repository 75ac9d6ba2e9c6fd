"""The norm of the gradient: what it is of, and what a step does where it is no number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.step import init_state, update


class Weights(nnx.Module):
    def __init__(self):
        self.weights = nnx.Param(jnp.ones(2))


def product_loss(model, batch, _):
    """Its gradient is the batch."""
    one = jnp.ones(())
    return LossOutput((model.weights[...] * batch["x"][0]).sum(), one, {}, num_tokens=one)


@functools.cache
def taken(*gradient):
    """The parameters after one guarded step of a quarter of this gradient, and the metrics."""
    optimizer = optax.sgd(0.25)
    graphdef, first_state = init_state(Weights, optimizer)
    step = jax.jit(functools.partial(update, graphdef, product_loss, optimizer, skip_bad_steps=True))
    state, metrics = step(jax.jit(first_state)(), {"x": np.float32([gradient])}, jax.random.key(0))
    return np.asarray(state.params["weights"]), metrics


def test_the_norm_is_that_of_the_gradient_not_of_the_update():
    parameters, metrics = taken(3.0, 4.0)
    assert metrics.numbers["grad_norm"] == 5
    np.testing.assert_array_equal(parameters, [0.25, 0])


def test_a_gradient_without_a_norm_is_bad_though_its_loss_is_finite_and_spikes_are_taken():
    parameters, metrics = taken(2e38, -2e38)
    assert metrics.means["loss"].mean == 0
    assert np.isposinf(metrics.numbers["grad_norm"])
    assert metrics.numbers["bad"] == 1
    np.testing.assert_array_equal(parameters, [1, 1])


def test_the_moving_average_forgets_the_initial_values():
    """Five steps in float64 NumPy: the decay is (1 + n) / (10 + n) until it reaches the maximum, 0.25 here."""
    optimizer = optax.sgd(1.0)
    graphdef, first_state = init_state(Weights, optimizer, has_ema=True)
    step = jax.jit(functools.partial(update, graphdef, product_loss, optimizer, ema_decay=0.25), donate_argnums=0)
    state = jax.jit(first_state)()
    gradients = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    params = mean = np.float64(state.params["weights"])
    for number, gradient in enumerate(gradients, 1):
        state, _ = step(state, {"x": gradient[None]}, jax.random.key(0))
        params = params - gradient
        decay = min(0.25, (1 + number) / (10 + number))
        mean = decay * mean + (1 - decay) * params
    np.testing.assert_allclose(state.params["weights"], params, rtol=1e-5)
    np.testing.assert_allclose(state.variables["weights"], mean, rtol=1e-5)
