"""Normalization against its formulas in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import layer_norm, rms_norm

B, T, D = 2, 3, 7

_layer_norm = jax.jit(layer_norm, static_argnames="epsilon")
_rms_norm = jax.jit(rms_norm, static_argnames="epsilon")


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _oracle(x, scale=None, bias=None, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for token in np.ndindex(x.shape[:-1]):
        features = x[token]
        mean = sum(features) / len(features)
        variance = sum((feature - mean) ** 2 for feature in features) / len(features)
        out[token] = (features - mean) / np.sqrt(variance + epsilon)
    out = out if scale is None else out * np.asarray(scale, np.float64)
    return out if bias is None else out + np.asarray(bias, np.float64)


@pytest.mark.parametrize("shape", [(D,), (T, D), (B, T, D)])
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_oracle(shape, has_scale, has_bias):
    scale, bias = _random(D, seed=1) if has_scale else None, _random(D, seed=2) if has_bias else None
    out = _layer_norm(_random(*shape), scale, bias)
    assert (out.shape, out.dtype) == (shape, jnp.float32)
    np.testing.assert_allclose(out, _oracle(_random(*shape), scale, bias), atol=2e-6)


@settings(deadline=None, max_examples=20)
@given(shift=st.floats(-10, 10), stretch=st.floats(0.5, 10), seed=st.integers(0, 100))
def test_does_not_see_shift_and_stretch(shift, stretch, seed):
    x = _random(T, D, seed=seed)
    moved = (x * stretch + shift).astype(np.float32)
    np.testing.assert_allclose(_layer_norm(moved, epsilon=0.0), _layer_norm(x, epsilon=0.0), atol=1e-4)


def test_gradient_equals_the_chain_rule_by_hand():
    x, scale, bias, cotangent = _random(B, T, D), _random(D, seed=1), _random(D, seed=2), _random(B, T, D, seed=3)
    d_x, d_scale, d_bias = jax.jit(lambda *x: jax.vjp(layer_norm, *x)[1](cotangent))(x, scale, bias)

    y, upstream = _oracle(x), np.asarray(cotangent, np.float64)
    deviation = np.sqrt(np.asarray(x, np.float64).var(axis=-1, keepdims=True) + 1e-6)
    d_y = upstream * np.asarray(scale, np.float64)
    want = (d_y - d_y.mean(axis=-1, keepdims=True) - y * (d_y * y).mean(axis=-1, keepdims=True)) / deviation
    np.testing.assert_allclose(d_x, want, atol=1e-5)
    np.testing.assert_allclose(d_scale, (upstream * y).sum(axis=(0, 1)), atol=1e-5)
    np.testing.assert_allclose(d_bias, upstream.sum(axis=(0, 1)), atol=1e-5)


def test_tokens_do_not_see_each_other():
    x = _random(B, T, D)
    before = np.asarray(_layer_norm(x))
    x[1, 2] += 5 * _random(D, seed=4)
    after = np.asarray(_layer_norm(x))
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1, :2], after[1, :2])
    assert np.abs(before[1, 2] - after[1, 2]).max() > 0.1


def test_large_mean_loses_no_variance():
    """E[x^2] - E[x]^2 in float32 would be noise here, even negative."""
    x = 4096 + _random(T, 64)
    np.testing.assert_allclose(_layer_norm(x), _oracle(x), atol=2e-3)


def test_constant_token_is_zero_with_finite_gradient():
    x = np.full((T, D), 3, np.float32)
    np.testing.assert_allclose(_layer_norm(x), 0, atol=1e-3)  # a rounding error of the mean over sqrt(epsilon)
    chex.assert_tree_all_finite(jax.jit(jax.grad(lambda x: (layer_norm(x) * _random(T, D)).sum()))(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_has_float32_statistics(dtype):
    """300^2 times 400 features overflows float16, and bfloat16 cannot count beyond 256."""
    x = (300 * _random(T, 400)).astype(dtype)
    scale, bias = _random(400, seed=1), _random(400, seed=2)
    out = np.asarray(_layer_norm(x, scale, bias))
    assert out.dtype == dtype
    want = _oracle(x.astype(np.float32), scale, bias)
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2.0**-8, atol=1e-4)


def test_float64_is_float64_throughout():
    with jax.enable_x64(True):
        x = np.random.default_rng(5).normal(size=(T, D))
        out = _layer_norm(x, epsilon=1e-3)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, _oracle(x, epsilon=1e-3), atol=1e-14)


def _rms_oracle(x, scale=None, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for token in np.ndindex(x.shape[:-1]):
        out[token] = x[token] / np.sqrt(sum(feature**2 for feature in x[token]) / x.shape[-1] + epsilon)
    return out if scale is None else out * np.asarray(scale, np.float64)


@pytest.mark.parametrize("shape", [(D,), (T, D), (B, T, D)])
@pytest.mark.parametrize("has_scale", [False, True])
def test_rms_norm_equals_oracle(shape, has_scale):
    scale = _random(D, seed=1) if has_scale else None
    out = _rms_norm(_random(*shape), scale, epsilon=1e-2)
    assert (out.shape, out.dtype) == (shape, jnp.float32)
    np.testing.assert_allclose(out, _rms_oracle(_random(*shape), scale, 1e-2), atol=2e-6)


def test_rms_norm_of_zeros_is_zero_with_finite_gradient():
    x = np.zeros((T, D), np.float32)
    np.testing.assert_array_equal(_rms_norm(x), 0)
    chex.assert_tree_all_finite(jax.jit(jax.grad(lambda x: (rms_norm(x) * _random(T, D)).sum()))(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rms_norm_in_half_precision_has_float32_statistics(dtype):
    x, scale = (300 * _random(T, 400)).astype(dtype), _random(400, seed=1)
    out = np.asarray(_rms_norm(x, scale))
    assert out.dtype == dtype
    want = _rms_oracle(x.astype(np.float32), scale)
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2.0**-8, atol=1e-4)
