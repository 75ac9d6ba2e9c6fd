"""The position-wise network as a module: its parameters, its start, its dtype; the formula is tested in functional."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfx_jax.nn import FeedForward

B, T, D, F = 2, 3, 6, 10


def _layer(**options):
    layer = FeedForward(D, F, **options, rngs=nnx.Rngs(0))
    layer.up_bias[...] = jnp.linspace(-1.0, 1.0, F)
    layer.down_bias[...] = jnp.linspace(2.0, 3.0, D)
    return layer


def _x():
    return jax.random.normal(jax.random.key(1), (B, T, D))


def test_equals_equation_2():
    layer = _layer()
    up, up_bias, down, down_bias = (
        np.asarray(param[...], np.float64) for param in (layer.up, layer.up_bias, layer.down, layer.down_bias)
    )
    want = np.maximum(0, np.asarray(_x(), np.float64) @ up + up_bias) @ down + down_bias
    np.testing.assert_allclose(layer(_x()), want, atol=1e-5)


def test_gate_multiplies_the_hidden_units():
    layer = FeedForward(D, F, is_gated=True, use_bias=False, activation_fn=jax.nn.silu, rngs=nnx.Rngs(0))
    assert layer.up_bias is None
    assert layer.down_bias is None
    up, gate, down = (np.asarray(param[...], np.float64) for param in (layer.up, layer.gate, layer.down))
    x = np.asarray(_x(), np.float64)
    want = (x @ up / (1 + np.exp(-(x @ up))) * (x @ gate)) @ down
    np.testing.assert_allclose(layer(_x()), want, atol=1e-5)
    assert np.abs(up - gate).max() > 0.1  # drawn apart


def test_activation_can_be_changed():
    assert jnp.abs(_layer(activation_fn=jax.nn.gelu)(_x()) - _layer()(_x())).max() > 1e-2


def test_positions_do_not_see_each_other():
    x = _x()
    changed = _layer()(x.at[:, 1].add(1.0))
    np.testing.assert_array_equal(changed[:, [0, 2]], _layer()(x)[:, [0, 2]])


def test_starts_glorot_uniform_without_offsets():
    layer = FeedForward(64, 256, rngs=nnx.Rngs(0))
    limit = math.sqrt(6 / (64 + 256))
    for kernel in (layer.up, layer.down):
        assert 0.99 * limit < jnp.abs(kernel[...]).max() <= limit
    assert not layer.up_bias[...].any()
    assert not layer.down_bias[...].any()
    assert jnp.abs(layer.up[...] - layer.down[...].T).max() > 0.1 * limit


def test_drops_hidden_units_only_with_rngs():
    layer, dropping = _layer(), _layer(dropout_rate=0.5)
    np.testing.assert_array_equal(dropping(_x()), layer(_x()))
    np.testing.assert_array_equal(layer(_x(), rngs=nnx.Rngs(params=0)), layer(_x()))
    assert jnp.abs(dropping(_x(), rngs=nnx.Rngs(0)) - layer(_x())).max() > 1e-2


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
    layer = _layer(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(layer)), jnp.float32)
    out = layer(_x())
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_allclose(out.astype(jnp.float32), _layer()(_x()), atol=0.06)
