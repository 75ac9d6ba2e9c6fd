"""A reversible stack is the plain one, with the gradients of the plain one, in the memory of one layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.oracles.reversible import reversible
from tfx_jax.functional import dot_product_attention, dropout, reversible_stack

DEPTH, WIDTH = 6, 8


def _attend(weight, x, rng, memory, mask):
    """Attention from x to a memory, with dropout."""
    q, m = ((a @ weight)[None, :, None] for a in (x, memory))
    out = dot_product_attention(q, m, m, mask=mask, dropout_rate=0.3, dropout_rng=rng)
    return out[0, :, 0]


def _feed_forward(params, x, rng, memory, mask):
    del memory, mask
    return dropout(jnp.tanh(x @ params["in"]), 0.3, rng) @ params["out"]


def _plain(f, g, params, x1, x2, *shared, rng=None):
    """The same, layer after layer, left to automatic differentiation."""
    rngs = None if rng is None else jax.random.split(rng, (DEPTH, 2))

    def layer(streams, params_and_rngs):
        (x1, x2), ((f_params, g_params), rngs) = streams, params_and_rngs
        f_rng, g_rng = (None, None) if rngs is None else (rngs[0], rngs[1])
        x1 = x1 + f(f_params, x2, f_rng, *shared)
        return (x1, x2 + g(g_params, x1, g_rng, *shared)), None

    return jax.lax.scan(layer, (x1, x2), (params, rngs))[0]


def _ones(*shape):
    return np.ones(shape, np.float32)


def _inputs():
    random = np.random.default_rng(0)

    def normal(*shape):
        return (random.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    params = normal(DEPTH, WIDTH, WIDTH), {"in": normal(DEPTH, WIDTH, 16), "out": normal(DEPTH, 16, WIDTH)}
    mask = random.random((1, 1, 5, 7)) < 0.7
    return (params, normal(5, WIDTH), normal(5, WIDTH), normal(7, WIDTH)), mask


@pytest.mark.parametrize(
    "rng",
    [None, jax.random.key(4), pytest.param(jax.random.PRNGKey(4), marks=pytest.mark.slow)],
    ids=["none", "key", "legacy key"],
)
def test_gradients_equal_those_of_the_plain_stack(rng):
    inputs, mask = _inputs()

    def loss(inputs, mask, stack):
        params, x1, x2, memory = inputs
        y1, y2 = stack(_attend, _feed_forward, params, x1, x2, memory, mask, rng=rng)
        return jnp.square(y1 - 0.5).sum() + jnp.sin(y2).sum(), (y1, y2)

    # The gradient of a compiled function whose mask is an argument, which a closure over the mask would not survive.
    (outputs, got), (want_outputs, want) = (
        jax.jit(jax.grad(jax.jit(functools.partial(loss, stack=stack)), has_aux=True))(inputs, mask)[::-1]
        for stack in (reversible_stack, _plain)
    )
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(want_outputs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(got))


def test_forward_mode_is_refused_as_the_documentation_says():
    (params, x1, x2, memory), mask = _inputs()

    def stack(x1):
        return reversible_stack(_attend, _feed_forward, params, x1, x2, memory, mask)

    run = jax.jit(lambda x1: jax.jvp(stack, (x1,), (x1,)))
    with pytest.raises(TypeError, match="forward-mode"):
        run.lower(x1)


def test_equals_its_oracle_and_the_differences_of_it():
    random = np.random.default_rng(1)
    arrays = [random.normal(size=shape) / 2 for shape in ((3, 4, 4), (3, 4, 4), (5, 4), (5, 4))]
    directions, cotangent = [random.normal(size=x.shape) for x in arrays], random.normal(size=(2, 5, 4))

    def layer(matrix, x, rng):
        return jnp.tanh(x @ matrix)

    def loss(a, b, x1, x2):
        out = jnp.stack(reversible_stack(layer, layer, (a, b), x1, x2))
        return (out * cotangent.astype(np.float32)).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*map(np.float32, arrays))

    def moved(step):
        a, b, x1, x2 = (x + step * direction for x, direction in zip(arrays, directions, strict=True))
        return np.stack(reversible(zip(a, b, strict=True), x1, x2))

    np.testing.assert_allclose(out, moved(0.0), atol=1e-5)
    want = ((moved(1e-6) - moved(-1e-6)) * cotangent).sum() / 2e-6
    got = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_activation_memory_does_not_grow_with_depth():
    activation = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    size = 4 * 512 * 256

    def dense(weight, x, rng):
        del rng
        return jnp.tanh(x @ weight[0]) @ weight[1]

    def scanned(params, x1, x2):
        def layer(streams, params):
            y1 = streams[0] + dense(params[0], streams[1], None)
            return (y1, streams[1] + dense(params[1], y1, None)), None

        return jax.lax.scan(layer, (x1, x2), params)[0]

    def used(stack, depth):
        weight = jax.ShapeDtypeStruct((depth, 256, 8), jnp.float32), jax.ShapeDtypeStruct((depth, 8, 256), jnp.float32)
        loss = lambda *inputs: sum(jnp.square(y).sum() for y in stack(*inputs))  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower((weight, weight), activation, activation).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    reversible = functools.partial(reversible_stack, dense, dense)
    assert used(reversible, 32) - used(reversible, 4) < size
    assert used(scanned, 32) - used(scanned, 4) > 28 * size  # so the measurement sees what it should


def test_keeps_the_streams_precision_whatever_the_functions_compute_in():
    inputs, _ = _inputs()
    (weight, _), x1, x2, _ = inputs
    low = lambda w, x, rng: jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))  # noqa: E731
    y1, y2 = jax.jit(functools.partial(reversible_stack, low, low))((weight, weight), x1, x2)
    assert (y1.dtype, y2.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize(
    ("params", "x2", "message"),
    [
        ((_ones(3), _ones(4)), _ones(2), r"\[\(3,\), \(4,\)\]"),
        ((_ones(3), _ones()), _ones(2), r"\[\(\), \(3,\)\]"),
        ((_ones(3), _ones(3)), _ones(5), r"float32 \(2,\) and float32 \(5,\)"),
    ],
)
def test_errors_say_what_is_wrong(params, x2, message):
    scaled = lambda weight, x, rng: weight * x  # noqa: E731
    with pytest.raises(ValueError, match=message):
        reversible_stack(scaled, scaled, params, _ones(2), x2)
