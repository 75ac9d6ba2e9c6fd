"""Eight-bit products against float64, and the bound on what rounding costs."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import int8_product, quantize_rows
from tfx_jax.functional.layers import Int8Matrix, linear

_linear = jax.jit(linear, static_argnames="num_axes")
_quantize = jax.jit(quantize_rows)
_product = jax.jit(int8_product)


@settings(max_examples=50, deadline=None)
@given(size=st.sampled_from([1, 5, 40]), exponent=st.integers(-20, 20), seed=st.integers(0, 10**6))
def test_rounding_is_within_half_a_level(size, exponent, seed):
    rows = 3
    matrix = np.random.default_rng(seed).normal(0, 10.0**exponent, (rows, size)).astype(np.float32)
    values, scales = (np.asarray(x, np.float64) for x in _quantize(matrix))
    assert np.abs(values).max() <= 127
    assert (np.abs(values * scales[:, None] - matrix) <= 0.501 * scales[:, None]).all()
    largest = np.abs(matrix).argmax(axis=1)
    assert (np.abs(values[np.arange(rows), largest]) == 127).all()


@pytest.mark.parametrize(
    ("rows", "dtype"), [((2, 3), jnp.float32), ((2, 3), jnp.bfloat16), ((1, 1), jnp.float32), ((), jnp.float32)]
)
def test_product_is_that_of_the_rounded_matrices(rows, dtype):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(*rows, 64)).astype(dtype), rng.normal(size=(48, 64)).astype(np.float32)
    out = np.asarray(_product(x, *_quantize(weights)))
    assert (out.shape, out.dtype) == ((*rows, 48), jnp.float32)
    rounded_x, rounded_w = (
        np.asarray(values, np.float64) * np.asarray(scales, np.float64)[..., None]
        for values, scales in (_quantize(x), _quantize(weights))
    )
    np.testing.assert_allclose(out, rounded_x @ rounded_w.T, rtol=2e-6, atol=1e-5)
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    assert np.sqrt(np.square(out - exact).mean() / np.square(exact).mean()) < 0.02


@pytest.mark.parametrize(("inputs", "outputs"), [((12,), (4, 5)), ((4, 5), (12,)), ((6,), (7,))])
def test_linear_takes_a_matrix_of_eight_bits(inputs, outputs):
    """x [*batch, *in] and W [*in, *out] with several axes, as for heads: the product of matrices, and its bias."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, *inputs)).astype(np.float32)
    weights, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((*inputs, *outputs), outputs))
    d, n = math.prod(inputs), math.prod(outputs)
    values, scales = _quantize(weights.reshape(d, n).T)
    matrix = Int8Matrix(values.reshape(*outputs, d), scales.reshape(outputs))
    out = _linear(x, matrix, bias, num_axes=len(inputs))
    want = np.asarray(_product(x.reshape(6, d), values, scales)) + bias.reshape(n)
    np.testing.assert_allclose(out, want.reshape(2, 3, *outputs), atol=1e-5)
    chex.assert_type([out, _linear(x.astype(jnp.bfloat16), matrix, num_axes=len(inputs))], [jnp.float32, jnp.bfloat16])


def test_derivatives_are_those_of_the_matrix_that_was_rounded():
    """As if x were not: that of the rounding is 0 almost everywhere."""
    rng = np.random.default_rng(0)
    x, weights = (rng.normal(size=(rows, 16)).astype(np.float32) for rows in (3, 5))
    cotangent = rng.normal(size=(3, 5)).astype(np.float32)
    values, scales = _quantize(weights)

    def loss(x, scales):
        return (int8_product(x, values, scales) * cotangent).sum()

    def derivatives(x, scales):
        along_x = jax.jvp(lambda x: loss(x, scales), (x,), (jnp.ones_like(x),))[1]
        return *jax.grad(loss, argnums=(0, 1))(x, scales), along_x

    of_x, of_scales, along_x = jax.jit(derivatives)(x, scales)
    matrix = np.asarray(values, np.float64) * np.asarray(scales)[:, None]
    np.testing.assert_allclose(of_x, cotangent @ matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(along_x, (cotangent @ matrix).sum(), rtol=1e-5)
    products, scales = np.asarray(_product(x, values, scales)), np.asarray(scales)
    np.testing.assert_allclose(of_scales, (cotangent * products / scales).sum(axis=0), rtol=1e-4, atol=1e-4)


def test_rows_too_small_for_a_normal_scale_are_zeros():
    values, scales = map(np.asarray, _quantize(np.array([[1e-37, -5e-38]], np.float32)))
    assert (values.tolist(), scales.tolist()) == ([[0, 0]], [1.0])


def test_rows_of_zeros_stay_zeros():
    values, scales = map(np.asarray, _quantize(np.zeros((2, 5), np.float32)))
    assert not values.any()
    assert scales.tolist() == [1.0, 1.0]
    assert not np.asarray(_product(np.zeros((1, 5), np.float32), values, scales)).any()


def test_what_is_not_finite_shows():
    """An integer has no NaN: the scale of its row says so, on either side of a product."""
    finite = np.ones((1, 2), np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        row = np.array([[bad, 1]], np.float32)
        assert not np.isfinite(_product(finite, *_quantize(row))).any()
        assert not np.isfinite(_product(row, *_quantize(finite))).any()


def test_sums_are_exact_for_long_rows():
    """Of extreme values, sums of 4,096 products need 26 bits: more than float32 has."""
    values = np.full((1, 4096), 127, np.int8)
    values[0, 0] = 126
    out = _product(np.ones((1, 4096), np.float32), values, np.ones(1, np.float32))
    assert out.item() == np.float32(np.float32(127 * (127 * 4095 + 126)) * np.float32(1 / 127))
