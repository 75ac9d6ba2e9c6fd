"""The position-wise network as a module: its parameters, its start, its dtype; the formula is tested in functional."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.nn.programs import draw, initial, jitted, normal, params_of
from tfx_jax.nn import FeedForward

B, T, D, F = 2, 3, 6, 10
X = normal(1, B, T, D)

_apply = jitted(lambda layer, x: layer(x))


def _layer(**options):
    return draw(lambda: FeedForward(D, F, **options, rngs=nnx.Rngs(0)))


def test_equals_equation_2():
    layer = _layer()
    p, x = params_of(layer, np.float64), np.float64(X)
    want = np.maximum(0, x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    np.testing.assert_allclose(_apply(layer, X), want, atol=1e-5)


def test_gate_multiplies_the_hidden_units():
    layer = _layer(is_gated=True, use_bias=False, activation_fn=jax.nn.silu)
    assert layer.up_bias is None
    assert layer.down_bias is None
    p, x = params_of(layer, np.float64), np.float64(X)
    hidden = x @ p["up"]
    np.testing.assert_allclose(
        _apply(layer, X), (hidden / (1 + np.exp(-hidden)) * (x @ p["gate"])) @ p["down"], atol=1e-5
    )


def test_activation_can_be_changed():
    assert np.abs(_apply(_layer(activation_fn=jax.nn.gelu), X) - _apply(_layer(), X)).max() > 1e-2


def test_positions_do_not_see_each_other():
    changed = X.copy()
    changed[:, 1] += 1.0
    before, after = (_apply(_layer(), x) for x in (X, changed))
    np.testing.assert_array_equal(after[:, [0, 2]], before[:, [0, 2]])
    assert (after[:, 1] != before[:, 1]).any()


def test_starts_glorot_uniform_without_offsets():
    layer = params_of(initial(lambda: FeedForward(64, 256, is_gated=True, rngs=nnx.Rngs(0))))
    limit = math.sqrt(6 / (64 + 256))
    for kernel in (layer["up"], layer["gate"], layer["down"]):
        assert 0.99 * limit < np.abs(kernel).max() <= limit
    assert not layer["up_bias"].any()
    assert not layer["down_bias"].any()
    for first, second in ((layer["up"], layer["down"].T), (layer["up"], layer["gate"])):
        assert np.abs(first - second).max() > 0.1 * limit, "each is drawn again"


def test_drops_hidden_units_only_with_rngs():
    @jitted
    def run(layer, dropping):
        return layer(X), dropping(X), layer(X, rngs=nnx.Rngs(params=0)), dropping(X, rngs=nnx.Rngs(0))

    plain, silent, without_rate, dropped = run(_layer(), _layer(dropout_rate=0.5))
    np.testing.assert_array_equal(silent, plain)
    np.testing.assert_array_equal(without_rate, plain)
    assert np.abs(dropped - plain).max() > 1e-2


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
    layer = _layer(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(layer)), jnp.float32)
    out = _apply(layer, X)
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_allclose(out.astype(np.float32), _apply(_layer(), X), atol=0.06)
