"""Layer normalisation as a module; the formula itself is tested in functional."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.nn import LayerNorm

D = 6


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_equals_formula_with_gain_and_offset(epsilon):
    layer = LayerNorm(D, epsilon=epsilon)
    layer.scale[...], layer.bias[...] = jnp.linspace(0.5, 2.0, D), jnp.linspace(-1.0, 1.0, D)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, D)), np.float64)
    centred = x - x.mean(-1, keepdims=True)
    normalised = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    want = normalised * np.linspace(0.5, 2.0, D) + np.linspace(-1.0, 1.0, D)
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), want, atol=1e-5)


def test_starts_as_plain_normalisation_and_keeps_the_dtype():
    layer = LayerNorm(D)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(layer)), {"scale": jnp.ones(D), "bias": jnp.zeros(D)})
    out = layer(jnp.arange(D, dtype=jnp.bfloat16))
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_allclose(out.astype(jnp.float32), (np.arange(D) - 2.5) / np.arange(D).std(), atol=0.01)
