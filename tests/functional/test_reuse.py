"""Any function, any framework: attention is the same in bare JAX, Flax Linen, Equinox and Haiku."""

import functools
from collections.abc import Callable

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jaxtyping import Array

from tests.functional.test_contract import ATTENTIONS
from tfx_jax.functional import dot_product_attention

B, T, D, N, H, U = 16, 12, 5, 4, 8, 6
# In the order in which every framework lists its parameters: sorted by name.
SHAPES = {"key": (D, N, H), "query": (D, N, H), "value": (D, N, U)}
SCALE = 0.4
INIT = jax.nn.initializers.normal(SCALE)
STEPS, LEARNING_RATE = 60, 2.0


CAUSAL = functools.partial(dot_product_attention, is_causal=True)


def _attend(attention_fn, x, key, query, value):
    """Self-attention of [B, T, D] under three projections of shape [D, N, H or U]."""
    keys, queries, values = (jnp.einsum("BTD,DNH->BTNH", x, kernel) for kernel in (key, query, value))
    return attention_fn(queries, keys, values)


class LinenAttention(linen.Module):
    attention_fn: Callable

    @linen.compact
    def __call__(self, x):
        kernels = {name: self.param(name, INIT, shape) for name, shape in SHAPES.items()}
        return _attend(self.attention_fn, x, **kernels)


class HaikuAttention(hk.Module):
    def __init__(self, attention_fn):
        super().__init__()
        self.attention_fn = attention_fn

    def __call__(self, x):
        init = hk.initializers.RandomNormal(SCALE)
        kernels = {name: hk.get_parameter(name, shape, init=init) for name, shape in SHAPES.items()}
        return _attend(self.attention_fn, x, **kernels)


class EquinoxAttention(eqx.Module):
    """In the manner of that library: one sequence, [T, D], and no batch."""

    key: Array
    query: Array
    value: Array
    attention_fn: Callable = eqx.field(static=True)

    def __init__(self, attention_fn, rng):
        self.key, self.query, self.value = map(INIT, jax.random.split(rng, 3), SHAPES.values())
        self.attention_fn = attention_fn

    def __call__(self, x):
        return _attend(self.attention_fn, x[None], self.key, self.query, self.value)[0]


def _bare(attention_fn, rng, x):
    kernels = map(INIT, jax.random.split(rng, 3), SHAPES.values())
    return dict(zip(SHAPES, kernels, strict=True)), lambda kernels, x: _attend(attention_fn, x, **kernels)


def _linen(attention_fn, rng, x):
    return jax.jit(LinenAttention(attention_fn).init)(rng, x), LinenAttention(attention_fn).apply


def _haiku(attention_fn, rng, x):
    model = hk.without_apply_rng(hk.transform(lambda x: HaikuAttention(attention_fn)(x)))
    return jax.jit(model.init)(rng, x), model.apply


def _equinox(attention_fn, rng, x):
    return EquinoxAttention(attention_fn, rng), lambda model, x: jax.vmap(model)(x)


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
    teacher, attend = _bare(CAUSAL, teacher_rng, x)
    target = attend(teacher, x)

    parameters, predict = framework(CAUSAL, student_rng, x)
    kernels = dict(zip(SHAPES, jax.tree.leaves(parameters), strict=True))
    trained, losses = _train(parameters, predict, x, target)
    expected, expected_losses = _train(kernels, attend, x, target)

    assert losses[-1] < 0.05 * losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, want in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, want, atol=1e-5)


@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: case.name)
def test_every_attention_gives_the_same_in_every_framework(case):
    data_rng, rng = jax.random.split(jax.random.key(1))
    x = jax.random.normal(data_rng, (2, T, D))
    for framework in (_linen, _haiku, _equinox):
        parameters, predict = framework(case.attend, rng, x)
        kernels = dict(zip(SHAPES, jax.tree.leaves(parameters), strict=True))
        expected = jax.jit(functools.partial(_attend, case.attend))(x, **kernels)
        got = jax.jit(predict)(parameters, x)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=framework.__name__)
