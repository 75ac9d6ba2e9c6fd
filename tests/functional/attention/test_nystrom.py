"""Nyström attention against Xiong et al. (2021), beyond what test_contract.py asks of every attention."""

import functools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.nystrom import iterated_inverse, nystrom_weights
from tfx_jax.functional import nystrom_attention
from tfx_jax.functional.attention.nystrom import pseudo_inverse


def _inputs(b=3, t=23, n=4, k=2, seed=0):
    random = np.random.default_rng(seed)
    shapes = (b, t, n, 8), (b, t, k, 8), (b, t, k, 6)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.cache
def _jitted(**options):
    return jax.jit(functools.partial(nystrom_attention, **options))


def _mask(*lengths, t=23):
    return (np.arange(t) < np.array(lengths)[:, None])[:, None, None]


HOLES = _mask(23, 17, 3) & (np.arange(23) % 5 != 1)
"""Tokens that are hidden behind, between and, of the last row, around two that are fewer than the landmarks."""


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "scale": 1.0}, {"num_iterations": 0}], ids=str)
def test_equals_the_papers_formula_after_any_number_of_rounds(options):
    query, key, value = _inputs()
    out, weights = _jitted(num_landmarks=5, return_weights=True, **options)(query, key, value, mask=HOLES)
    want = nystrom_weights(query, key, mask=HOLES, num_landmarks=5, **{"num_iterations": 6} | options)
    np.testing.assert_allclose(weights, want, atol=1e-5)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


def test_in_float64_the_rounds_come_to_the_pseudo_inverse():
    """Of equation 13, by singular values; and where each token is a landmark that is softmax attention (lemma 2)."""
    with jax.enable_x64(True):
        query, key, value = (x.astype(np.float64) for x in _inputs())
        attend = _jitted(num_landmarks=5, num_iterations=24, return_weights=True)
        out, weights = attend(query, key, value, mask=HOLES)
        want = nystrom_weights(query, key, mask=HOLES, num_landmarks=5)
        np.testing.assert_allclose(weights, want, atol=1e-11)
        np.testing.assert_allclose(out, mixed(want, value), atol=1e-11)
        assert np.abs(want - dense_weights(query, key, mask=HOLES)).max() > 0.1  # and that is something else
        attend = _jitted(num_landmarks=23, num_iterations=24, return_weights=True)
        for mask in (HOLES, np.ones((1, 1, 1, 23), bool)):
            out, weights = attend(query, key, value, mask=mask)
            want = dense_weights(query, key, mask=mask)
            np.testing.assert_allclose(weights, want, atol=1e-9)
            np.testing.assert_allclose(out, mixed(want, value), atol=1e-9)


def test_hidden_tokens_are_as_if_they_were_not_there():
    """Neither as queries nor as keys, nor by their number: rows are those of the visible tokens alone."""
    query, key, value = _inputs()
    out = np.asarray(_jitted(num_landmarks=5)(query, key, value, mask=HOLES))
    junk = [np.where(HOLES[:, 0, 0, :, None, None], x, 50 + 9 * x) for x in (query, key, value)]
    visible = HOLES[:, 0, 0]
    np.testing.assert_array_equal(np.asarray(_jitted(num_landmarks=5)(*junk, mask=HOLES))[visible], out[visible])
    wide = [np.pad(x, ((0, 0), (4, 8), (0, 0), (0, 0)), constant_values=7) for x in (query, key, value)]
    wide_mask = np.pad(HOLES, ((0, 0), (0, 0), (0, 0), (4, 8)))
    wider = np.asarray(_jitted(num_landmarks=5)(*wide, mask=wide_mask))[:, 4:-8]
    np.testing.assert_allclose(wider[visible], out[visible], atol=2e-6)
    alone = [x[:1, visible[0]] for x in (query, key, value)]
    np.testing.assert_allclose(_jitted(num_landmarks=5)(*alone)[0], out[0, visible[0]], atol=2e-6)


def test_rows_do_not_change_each_other():
    """As they would with the largest norm of the batch, which the authors' code takes."""
    inputs = _inputs()
    steep = [np.concatenate([x[:1], 5 * x[1:]]) for x in inputs]
    attend = _jitted(num_landmarks=5, num_iterations=1)
    np.testing.assert_array_equal(np.asarray(attend(*steep))[0], np.asarray(attend(*inputs))[0])


@jax.jit
def _inverses(matrix):
    return pseudo_inverse(matrix, 12)


def test_the_pseudo_inverse_is_that_of_a_matrix_alone():
    """Of another size and condition each, with zeros around it: what stands for landmarks that are not there."""
    random = np.random.default_rng(0)
    matrices = np.zeros((4, 6, 6), np.float32)
    for matrix, size in zip(matrices, (6, 3, 1, 0), strict=True):
        matrix[:size, :size] = np.eye(size) + random.uniform(0, 0.2, (size, size))
    found = np.asarray(_inverses(matrices))
    np.testing.assert_allclose(found, np.linalg.pinv(matrices.astype(np.float64)), atol=1e-5)
    assert (found[matrices == 0] == 0).all()
    np.testing.assert_allclose(found[0], iterated_inverse(matrices[0].astype(np.float64), 12), atol=1e-5)


def test_tokens_that_are_all_alike_get_the_mean():
    """The matrix of landmarks then has rank 1, and rounds have to leave alone what it maps to zero."""
    _, _, value = _inputs(k=4)
    out = _jitted(num_landmarks=5)(*[np.ones((3, 23, 4, 8), np.float32)] * 2, value)
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(axis=1, keepdims=True), out.shape), atol=1e-3)


def test_errors_say_what_to_do():
    query, key, value = _inputs(b=1)
    attend = functools.partial(nystrom_attention, query, key, value)
    with pytest.raises(ValueError, match="takes no bias"):
        attend(np.zeros((1, 1, 1, 23), np.float32))
    with pytest.raises(ValueError, match=r"only a padding mask.*\(1, 1, 23, 23\).*give each sequence its own row"):
        attend(mask=np.ones((1, 1, 23, 23), bool))
    with pytest.raises(ValueError, match="has no causal form, because landmarks are means that include future"):
        attend(is_causal=True)
    with pytest.raises(ValueError, match=r"no weights to drop, got dropout_rate=0\.1; drop the output"):
        attend(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="needs as many keys as queries, got 23 queries and 22 keys"):
        nystrom_attention(query, key[:, 1:], value[:, 1:])
    for options in ({"num_landmarks": 0}, {"num_iterations": -1}):
        with pytest.raises(ValueError, match="num_landmarks must be at least 1 and num_iterations at least 0"):
            attend(**options)
