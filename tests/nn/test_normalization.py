"""Normalizations as modules; the formula itself is tested in functional."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.programs import initial, jitted, normal, params_of
from tfx_jax.nn import LayerNorm, RMSNorm

D = 6


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_equals_formula_with_gain_and_offset(epsilon):
    gain, offset = np.linspace(0.5, 2.0, D, dtype=np.float32), np.linspace(-1.0, 1.0, D, dtype=np.float32)
    x = normal(0, 2, 3, D)

    @jitted
    def normalize(x):
        layer = LayerNorm(D, epsilon=epsilon)
        layer.scale[...], layer.bias[...] = gain, offset
        return layer(x)

    centerd = np.float64(x) - np.float64(x).mean(-1, keepdims=True)
    normalized = centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + epsilon)
    np.testing.assert_allclose(normalize(x), normalized * gain + offset, atol=1e-5)


def test_starts_as_plain_normalization_and_keeps_the_dtype():
    layer, x = initial(lambda: LayerNorm(D)), np.arange(D, dtype=jnp.bfloat16)
    chex.assert_trees_all_equal(params_of(layer), {"scale": np.ones(D), "bias": np.zeros(D)})
    out = jitted(lambda layer, x: layer(x))(layer, x)
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_allclose(out.astype(np.float32), (np.arange(D) - 2.5) / np.arange(D).std(), atol=0.01)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm_equals_its_formula_with_gain(epsilon):
    layer = initial(lambda: RMSNorm(D, epsilon=epsilon))
    layer.scale[...] = np.linspace(0.5, 2.0, D, dtype=np.float32)
    x = np.random.default_rng(0).normal(size=(2, 3, D))
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.linspace(0.5, 2.0, D)
    out = jitted(lambda layer, x: layer(x))(layer, x.astype(np.float32))
    np.testing.assert_allclose(out, want, atol=1e-5)
