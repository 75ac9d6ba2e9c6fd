"""Cosine attention: lengths of vectors, the gradient of tau, where it starts, and errors."""

import functools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.cosine import TAU, cosine_weights
from tests.functional.attention.oracles.dense import mixed
from tfx_jax.functional import cosine_attention
from tfx_jax.functional.attention import SPECS

B, T, S, N, K, H, U = 2, 5, 7, 4, 2, 8, 3


def _inputs():
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, U)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def test_lengths_of_vectors_do_not_matter():
    query, key, value = _inputs()
    random = np.random.default_rng(1)
    lengths = (random.uniform(0.01, 100, (*x.shape[:3], 1)).astype(np.float32) for x in (query, key))
    attend = jax.jit(cosine_attention)
    got = [attend(*x, value, tau_scale=TAU) for x in ((query, key), (query * next(lengths), key * next(lengths)))]
    np.testing.assert_allclose(*got, atol=1e-4)


def test_vectors_of_zeros_have_logits_of_zero_and_finite_gradients():
    query, key, value = _inputs()
    query[:, 1] = key[:, 2] = 0

    def attend(query, key):
        out, weights = cosine_attention(query, key, value, tau_scale=TAU, return_weights=True)
        return out.sum(), weights

    gradients, weights = jax.jit(jax.grad(attend, argnums=(0, 1), has_aux=True))(query, key)
    np.testing.assert_allclose(weights[:, :, 1], np.full((B, N, S), 1 / S), atol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients)


def test_gradient_of_tau_is_that_of_the_oracle_and_zero_below_its_least():
    query, key, value = _inputs()
    cotangent = np.random.default_rng(2).normal(size=(B, T, N, U)).astype(np.float32)

    def oracle(tau):
        return (mixed(cosine_weights(query, key, tau=tau), value) * cotangent).sum()

    steps = 1e-6 * np.eye(N)
    want = [(oracle(TAU + step) - oracle(TAU - step)) / 2e-6 for step in steps]
    got = jax.jit(jax.grad(lambda tau: (cosine_attention(query, key, value, tau_scale=tau) * cotangent).sum()))(TAU)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert got[1] == 0
    assert np.abs(np.delete(got, 1)).min() > 1e-3


def test_scale_multiplies_the_logits():
    query, key, value = _inputs()
    attend = jax.jit(functools.partial(cosine_attention, return_weights=True), static_argnames="scale")
    _, weights = attend(query, key, value, tau_scale=np.full(N, 0.5, np.float32), scale=0.25)
    np.testing.assert_allclose(weights, cosine_weights(query, key, tau=np.full(N, 2.0)), atol=1e-5)


def test_tau_starts_at_a_tenth_for_each_query_head():
    arrays = SPECS["cosine"].parameters(jax.random.key(0), num_heads=N, num_kv_heads=K, d_k=H, dtype="float32")
    assert {name: x.tolist() for name, x in arrays.items()} == {"tau_scale": [np.float32(0.1)] * N}


def test_errors_say_what_to_do():
    query, key, value = _inputs()
    with pytest.raises(ValueError, match=r"tau_scale must have shape \[N\] = \(4,\), got \(2,\)"):
        cosine_attention(query, key, value, tau_scale=TAU[:K])
    with pytest.raises(ValueError, match=r"tau_scale must hold floating-point numbers, got int32"):
        cosine_attention(query, key, value, tau_scale=np.ones(N, np.int32))
