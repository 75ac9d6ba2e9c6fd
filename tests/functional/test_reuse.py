"""One function, any framework: attention trains alike in bare JAX, Flax Linen, Equinox and Haiku."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jaxtyping import Array

from tfx_jax.functional import dot_product_attention

B, T, D, N, H, U = 16, 5, 6, 2, 3, 4
# In the order in which every framework lists its parameters: sorted by name.
SHAPES = {"key": (D, N, H), "query": (D, N, H), "value": (D, N, U)}
SCALE = 0.4
INIT = jax.nn.initializers.normal(SCALE)
STEPS, LEARNING_RATE = 60, 2.0


def _attend(x, key, query, value):
    """Causal self-attention of [B, T, D] under three projections of shape [D, N, H or U]."""
    keys, queries, values = (jnp.einsum("BTD,DNH->BTNH", x, kernel) for kernel in (key, query, value))
    return dot_product_attention(queries, keys, values, is_causal=True)


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return _attend(x, **{name: self.param(name, INIT, shape) for name, shape in SHAPES.items()})


class HaikuAttention(hk.Module):
    def __call__(self, x):
        init = hk.initializers.RandomNormal(SCALE)
        return _attend(x, **{name: hk.get_parameter(name, shape, init=init) for name, shape in SHAPES.items()})


class EquinoxAttention(eqx.Module):
    """In the manner of that library: one sequence, [T, D], and no batch."""

    key: Array
    query: Array
    value: Array

    def __init__(self, rng):
        self.key, self.query, self.value = map(INIT, jax.random.split(rng, 3), SHAPES.values())

    def __call__(self, x):
        return _attend(x[None], self.key, self.query, self.value)[0]


def _bare(rng, x):
    kernels = map(INIT, jax.random.split(rng, 3), SHAPES.values())
    return dict(zip(SHAPES, kernels, strict=True)), lambda kernels, x: _attend(x, **kernels)


def _linen(rng, x):
    return LinenAttention().init(rng, x), LinenAttention().apply


def _haiku(rng, x):
    model = hk.without_apply_rng(hk.transform(lambda x: HaikuAttention()(x)))
    return model.init(rng, x), model.apply


def _equinox(rng, x):
    return EquinoxAttention(rng), lambda model, x: jax.vmap(model)(x)


def _train(parameters, predict, x, target):
    """Gradient descent under jit; returns the final parameters and the loss before each step."""

    @jax.jit
    def step(parameters):
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - target) ** 2))(parameters)
        return jax.tree.map(lambda leaf, slope: leaf - LEARNING_RATE * slope, parameters, gradient), loss

    losses = []
    for _ in range(STEPS):
        parameters, loss = step(parameters)
        losses.append(float(loss))
    return parameters, losses


@pytest.mark.parametrize("framework", [_bare, _linen, _haiku, _equinox])
def test_trains_alike_in_every_framework(framework):
    teacher_rng, student_rng, data_rng = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(data_rng, (B, T, D))
    teacher, attend = _bare(teacher_rng, x)
    target = attend(teacher, x)

    parameters, predict = framework(student_rng, x)
    kernels = dict(zip(SHAPES, jax.tree.leaves(parameters), strict=True))
    trained, losses = _train(parameters, predict, x, target)
    expected, expected_losses = _train(kernels, attend, x, target)

    assert losses[-1] < 0.05 * losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, want in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, want, atol=1e-5)
