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
