"""Normalizations other than softmax: their limits, sparsity and errors, and the package entmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights
from tests.functional.attention.oracles.normalizations import row_weights, stick_breaking
from tfx_jax.functional import (
    entmax_attention,
    sigmoid_attention,
    stick_breaking_attention,
    synthesizer_attention,
    topk_attention,
)

B, T, N, H = 2, 33, 2, 8


def _normal(seed, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=(B, T, N, H))).astype(np.float32)


QUERY, KEY, VALUE = _normal(0, 2), _normal(1), _normal(2)


def _weights(function, **options):
    return np.asarray(jax.jit(functools.partial(function, return_weights=True, **options))(QUERY, KEY, VALUE)[1])


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_entmax_is_sparse_and_sparsemax_more_so(alpha):
    number = (_weights(entmax_attention, alpha=alpha) > 0).sum(axis=-1).mean()
    assert 1 < number < (0.5 if alpha == 1.5 else 0.2) * T


@pytest.mark.parity
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_weights_and_gradients_are_those_of_the_package_entmax(alpha):
    torch, entmax = pytest.importorskip("torch"), pytest.importorskip("entmax")
    query, key, value = (torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE))
    logits = torch.einsum("btnh,bsnh->bnts", query, key) * H**-0.5
    weights = (entmax.entmax15 if alpha == 1.5 else entmax.sparsemax)(logits, dim=-1)
    out = torch.einsum("bnts,bsnh->btnh", weights, value)
    (out * torch.tensor(_normal(3))).sum().backward()
    np.testing.assert_allclose(_weights(entmax_attention, alpha=alpha), weights.detach(), atol=1e-5)
    attend = functools.partial(entmax_attention, alpha=alpha)
    loss = jax.jit(jax.grad(lambda x: (attend(*x) * _normal(3)).sum()))
    for got, want in zip(loss((QUERY, KEY, VALUE)), (query, key, value), strict=True):
        np.testing.assert_allclose(got, want.grad, atol=1e-4)


def test_second_derivatives_of_entmax_are_those_of_differences():
    """Also at weights of 0, where the square root in the first derivative has no derivative."""
    logits, eye = 3 * np.random.default_rng(5).normal(size=6), np.eye(6)

    def loss(logits):
        keys, values = logits.reshape(1, 6, 1, 1), jnp.asarray(eye).reshape(1, 6, 1, 6)
        return jnp.square(entmax_attention(jnp.ones((1, 1, 1, 1)), keys, values, scale=1.0)).sum()

    with jax.enable_x64(True):
        hessian, gradient = jax.jit(jax.hessian(loss))(logits), jax.jit(jax.grad(loss))
        differences = [(gradient(logits + 1e-5 * row) - gradient(logits - 1e-5 * row)) / 2e-5 for row in eye]
    np.testing.assert_allclose(hessian, differences, atol=1e-6)
    assert (np.abs(hessian).sum(axis=0) == 0).any()  # some weights are 0


def test_top_k_counts_only_the_keys_that_a_query_sees():
    weights = _weights(topk_attention, num_keys=5, is_causal=True)
    assert ((weights > 0).sum(axis=-1) == np.minimum(np.arange(T) + 1, 5)).all()
    dense = dense_weights(QUERY, KEY, is_causal=True)
    kept = np.where(weights > 0, dense, 0)
    np.testing.assert_allclose(weights, kept / kept.sum(axis=-1, keepdims=True), atol=1e-5)


def test_sigmoid_with_an_offset_weighs_each_key_by_itself():
    logits = np.einsum("btnh,bsnh->bnts", QUERY.astype(np.float64), KEY) * H**-0.5
    want = 1 / (1 + np.exp(-(logits - 1.5)))
    np.testing.assert_allclose(_weights(sigmoid_attention, offset=-1.5), want, atol=1e-5)


def test_sticks_break_before_the_query_under_the_mask_of_the_paper():
    mask = np.tril(np.ones((1, 1, T, T), bool), -1)
    want = row_weights(stick_breaking, QUERY, KEY, mask=mask)
    np.testing.assert_allclose(_weights(stick_breaking_attention, mask=mask), want, atol=1e-5)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"alpha must be 1\.5 or 2, .* got 1\.7"):
        entmax_attention(QUERY, KEY, VALUE, alpha=1.7)
    with pytest.raises(ValueError, match="num_keys must be at least 1, got 0"):
        topk_attention(QUERY, KEY, VALUE, num_keys=0)
    with pytest.raises(ValueError, match=r"stick-breaking attention is causal only.*pass is_causal=True"):
        stick_breaking_attention(QUERY, KEY, VALUE, is_causal=False)


def test_a_synthesizer_refuses_what_has_no_logits():
    logits = np.zeros((N, T - 1, T - 1), np.float32)
    with pytest.raises(ValueError, match=r"at most max_length=32 tokens, .* got 33"):
        synthesizer_attention(QUERY, KEY, VALUE, logits=logits)
    with pytest.raises(ValueError, match=r"logits must have shape \[N, L, L\] with N = 2, got \(2, 32, 31\)"):
        synthesizer_attention(QUERY, KEY, VALUE, logits=logits[..., 1:])
