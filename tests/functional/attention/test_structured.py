"""Structured self-attention against equations 6 to 8 of Lin et al. (2017) in float64 NumPy."""

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import softmax_over
from tests.nn.programs import jitted
from tfx_jax.functional import additive_attention, redundancy_penalty, structured_pooling

B, S, D, F, N = 4, 6, 5, 7, 3
RNG = np.random.default_rng(0)
X, W_1, W_2 = (RNG.normal(size=shape).astype(np.float32) for shape in ((B, S, D), (D, F), (F, N)))
LENGTHS = np.array([6, 3, 1, 0])
MASK = np.arange(S) < LENGTHS[:, None]
_pool, _penalty = jitted(structured_pooling), jitted(redundancy_penalty)


def oracle(x, w_1, w_2):
    """M and A of a sequence H without padding, with the matrices as the paper has them."""
    h, w_s1, w_s2 = (np.asarray(array, np.float64) for array in (x, w_1.T, w_2.T))
    a = softmax_over(w_s2 @ np.tanh(w_s1 @ h.T), np.ones((len(w_s2), len(h)), bool))
    return a @ h, a


def penalty(a):
    """The squared Frobenius norm, pair of rows by pair of rows."""
    pairs = np.ndindex(len(a), len(a))
    return sum((sum(x * y for x, y in zip(a[i], a[j], strict=True)) - (i == j)) ** 2 for i, j in pairs)


def test_equals_the_equations_at_every_length():
    pooled, weights = _pool(X, W_1, W_2, MASK)
    for row, length in enumerate(LENGTHS[:3]):
        want, want_weights = oracle(X[row, :length], W_1, W_2)
        np.testing.assert_allclose(pooled[row], want, atol=1e-5)
        np.testing.assert_allclose(weights[row, :, :length], want_weights, atol=1e-6)
        assert not weights[row, :, length:].any()
    assert not pooled[3].any()
    assert not weights[3].any()


def test_without_a_mask_there_is_no_padding():
    jax.tree.map(np.testing.assert_array_equal, _pool(X, W_1, W_2), _pool(X, W_1, W_2, np.ones_like(MASK)))


def test_padding_changes_nothing_bit_for_bit():
    changed = np.where(MASK[..., None], X, 1e30).astype(np.float32)
    jax.tree.map(np.testing.assert_array_equal, _pool(changed, W_1, W_2, MASK), _pool(X, W_1, W_2, MASK))


def test_a_row_is_additive_attention_from_a_query_of_zeros():
    _, weights = _pool(X, W_1, W_2, MASK)
    attend = jax.jit(
        lambda query, x, mask: additive_attention(
            query, x, x, mask=mask, w_query=None, w_key=W_1, v=W_2.T, return_weights=True
        )[1]
    )
    query = np.zeros((B, 1, N, F), np.float32)
    np.testing.assert_allclose(attend(query, X[:, :, None], MASK[:, None, None])[:, :, 0], weights, atol=1e-6)


def test_scores_and_weights_of_bfloat16_are_float32():
    x = X.astype(jax.numpy.bfloat16)
    pooled, weights = _pool(x, W_1, W_2, MASK)
    assert (pooled.dtype, weights.dtype) == (x.dtype, np.float32)
    np.testing.assert_allclose(weights.sum(axis=-1)[:3], 1, atol=1e-6)
    np.testing.assert_allclose(weights[0], oracle(X[0], W_1, W_2)[1], atol=0.05)


def test_the_penalty_is_that_of_all_pairs_of_rows():
    weights = RNG.dirichlet(np.ones(S), (B, N)).astype(np.float32)
    np.testing.assert_allclose(_penalty(weights), [penalty(a) for a in weights.astype(np.float64)], rtol=1e-5)
    assert _penalty(np.zeros((N, S), np.float32)) == N


@pytest.mark.parametrize("name", ["x", "w_1", "w_2"])
def test_gradients_are_those_of_differences(name):
    """Of both results and the penalty, padding and the sequence without elements included."""
    arrays, cotangent = {"x": X, "w_1": W_1, "w_2": W_2}, RNG.normal(size=(B, N, D))

    def total(arrays):
        pooled, weights = structured_pooling(**arrays, mask=MASK)
        return (pooled * cotangent.astype(np.float32)).sum() + redundancy_penalty(weights).sum()

    def want(arrays):
        rows = [
            oracle(arrays["x"][row, :length], arrays["w_1"], arrays["w_2"]) for row, length in enumerate(LENGTHS[:3])
        ]
        return sum((m * c).sum() + penalty(a) for (m, a), c in zip(rows, cotangent[:3], strict=True))

    direction = RNG.normal(size=arrays[name].shape)
    ends = [want(arrays | {name: arrays[name] + step * direction}) for step in (1e-5, -1e-5)]
    gradient = np.asarray(jax.jit(jax.grad(total))(arrays)[name])
    assert np.isfinite(gradient).all()
    assert np.vdot(gradient, direction) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)
