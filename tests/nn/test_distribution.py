"""The context that says how attention and experts run: who follows it, and that no cache of JAX mixes two of them."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, jitted, normal
from tfx_jax.nn import Distribution, MixtureOfExperts, MultiHeadAttention, distributed
from tfx_jax.nn.distribution import DIRECT, current_distribution

B, T, D, N, F, E = 2, 4, 6, 2, 10, 4
X = normal(1, B, T, D)


def scaled(factor):
    """Calls any attention and multiplies what it answers."""

    def attend(attention_fn, *args, **options):
        return factor * attention_fn(*args, **options)

    return Distribution(attend=attend)


@functools.cache
def attention():
    return draw(lambda: MultiHeadAttention(D, N, rngs=nnx.Rngs(0)))


def test_attention_follows_the_innermost_context_and_no_program_serves_another():
    """A second call with the same distribution is no second trace."""
    traces = []

    def read(layer, x):
        traces.append(current_distribution())
        return layer(x)

    read = jitted(read)
    twice, thrice = scaled(2), scaled(3)
    plain = np.asarray(read(attention(), X))
    for _ in range(2):
        with distributed(twice):
            np.testing.assert_allclose(read(attention(), X), 2 * plain, rtol=1e-5)
            with distributed(thrice):
                np.testing.assert_allclose(read(attention(), X), 3 * plain, rtol=1e-5)
            np.testing.assert_allclose(read(attention(), X), 2 * plain, rtol=1e-5)
        np.testing.assert_array_equal(read(attention(), X), plain)
    assert traces == [DIRECT, twice, thrice]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: lambda x: jax.lax.scan(fn, 0.0, x)[1]])
def test_functions_traced_inside_others_are_traced_for_each_distribution(wrap):
    """JAX keeps what it has traced of a function inside a program, by its identity."""

    def groups(*args):
        number = args[-1] * 0 + current_distribution().num_groups
        return number if len(args) == 1 else (args[0], number)

    inner = wrap(groups)

    def program(num_groups):
        def outer(x):
            with distributed(Distribution(num_groups=num_groups)):
                return inner(x)

        return jax.jit(outer)

    x = np.ones(3, np.float32)
    assert [program(number)(x).max() for number in (2, 3)] == [2, 3]
    assert jax.jit(inner)(x).max() == 1


def test_a_context_ends_with_an_error_too():
    with pytest.raises(RuntimeError, match="inside"), distributed(scaled(2)):
        raise RuntimeError("inside")
    assert current_distribution() is DIRECT


def test_experts_take_groups_and_exchange_from_the_context_in_training_alone():
    asked = []

    def doubled(num_groups, num_experts):
        asked.append((num_groups, num_experts))
        return lambda buffers: buffers, lambda buffers: 2 * buffers

    def layer(**options):
        return draw(lambda: MixtureOfExperts(D, F, E, capacity_factor=0.5, **options, rngs=nnx.Rngs(0)))

    train = jitted(lambda layer, x: layer(x, rngs=nnx.Rngs(dropout=0)))
    read = jitted(lambda layer, x: layer(x))
    two_groups, evaluated = train(layer(num_groups=2), X), read(layer(), X)
    assert np.abs(two_groups - train(layer(), X)).max() > 1e-3  # in one group, other tokens are dropped
    with distributed(Distribution(num_groups=2)):
        np.testing.assert_allclose(train(layer(), X), two_groups, atol=1e-6)
    with distributed(Distribution(num_groups=8, exchange=doubled)):
        np.testing.assert_allclose(train(layer(num_groups=2), X), 2 * two_groups, atol=1e-5)
        np.testing.assert_allclose(read(layer(), X), evaluated, atol=1e-6)
    assert asked == [(2, E)]
