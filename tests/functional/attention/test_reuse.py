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

from tests.functional.attention.test_contract import ATTENTIONS, one_of_each_kind
from tests.tiers import slow_but
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


# Each gives the parameters of its framework, drawn by `_drawn`, and the function that predicts with them.


def _drawn(parameters, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (SCALE * random.normal(size=leaf.shape)).astype(np.float32), parameters)


def _bare(attention_fn, x):
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    return shapes, lambda kernels, x: _attend(attention_fn, x, **kernels)


def _linen(attention_fn, x):
    model = LinenAttention(attention_fn)
    return jax.eval_shape(model.init, jax.random.key(0), x), model.apply


def _haiku(attention_fn, x):
    model = hk.without_apply_rng(hk.transform(lambda x: HaikuAttention(attention_fn)(x)))
    return jax.eval_shape(model.init, jax.random.key(0), x), model.apply


def _equinox(attention_fn, x):
    model = eqx.filter_eval_shape(EquinoxAttention, attention_fn, jax.random.key(0))
    return model, lambda model, x: jax.vmap(model)(x)


def _train(framework, parameters, x, target):
    """Gradient descent under jit; returns the final parameters and the loss before each step."""
    structure, predict = framework(CAUSAL, x)
    parameters = jax.tree.unflatten(jax.tree.structure(structure), parameters)

    @jax.jit
    def step(parameters):
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - target) ** 2))(parameters)
        return jax.tree.map(lambda leaf, slope: leaf - LEARNING_RATE * slope, parameters, gradient), loss

    losses = []
    for _ in range(STEPS):
        parameters, loss = step(parameters)
        losses.append(float(loss))
    return jax.tree.leaves(parameters), losses


@functools.cache
def _lesson():
    """Inputs, targets, and what training in bare JAX comes to from the parameters that every framework starts with."""
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    structure, attend = _bare(CAUSAL, x)
    target = jax.jit(attend)(_drawn(structure, 1), x)
    start = jax.tree.leaves(_drawn(structure, 2))
    return x, target, start, _train(_bare, start, x, target)


@pytest.mark.parametrize("framework", slow_but([_linen, _haiku, _equinox], _linen))
def test_trains_alike_in_every_framework(framework):
    x, target, start, (expected, expected_losses) = _lesson()
    trained, losses = _train(framework, start, x, target)
    assert losses[-1] < 0.05 * losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, want in zip(trained, expected, strict=True):
        np.testing.assert_allclose(leaf, want, atol=1e-5)


@one_of_each_kind(ATTENTIONS)
def test_every_attention_gives_the_same_in_every_framework(case):
    x = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)
    attend = jax.jit(case.attend)  # traced once for all that call it alike
    frameworks = [_bare, _linen, _haiku, _equinox]
    structures, predictors = zip(*(framework(attend, x) for framework in frameworks), strict=True)
    models = [_drawn(structure, 2) for structure in structures]
    predict = jax.jit(lambda models, x: [predict(model, x) for predict, model in zip(predictors, models, strict=True)])
    expected, *got = predict(models, x)
    assert np.abs(expected).max() > 0.1
    for framework, out in zip(frameworks[1:], got, strict=True):
        np.testing.assert_allclose(out, expected, atol=1e-5, err_msg=framework.__name__)
