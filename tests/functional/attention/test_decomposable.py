"""Decomposable attention against equations 15.46 to 15.53 of Murphy (2022)."""

import functools

import jax
import numpy as np
import pytest

from tests.functional.attention.oracles.decomposable import decomposable
from tfx_jax.functional import attend_both, decomposable_attention

B, T, S, D, F, G, CLASSES = 3, 5, 4, 6, 7, 8, 3


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


KERNELS = {"f": _normal(0, D, F) / 3, "g": _normal(1, 2 * D, G) / 3, "h": _normal(2, 2 * G, CLASSES) / 3}
PREMISE, HYPOTHESIS = np.float32(_normal(3, B, T, D)), np.float32(_normal(4, B, S, D))
LENGTHS = (5, 2, 3), (4, 3, 1)


def _layer(name):
    return lambda x: jax.nn.relu(x @ np.float32(KERNELS[name]) + 0.1)


F_FN, G_FN = _layer("f"), _layer("g")
_scores = jax.jit(
    functools.partial(
        decomposable_attention, attend_fn=F_FN, compare_fn=G_FN, aggregate_fn=lambda x: x @ np.float32(KERNELS["h"])
    )
)
_sums = jax.jit(functools.partial(decomposable_attention, attend_fn=F_FN, compare_fn=G_FN, aggregate_fn=lambda x: x))
_attend_both = jax.jit(functools.partial(attend_both, attend_fn=F_FN))
MASKS = tuple(
    np.arange(size)[None, None, None] < np.array(lengths)[:, None, None, None]
    for lengths, size in zip(LENGTHS, (T, S), strict=True)
)
EVERYTHING, NOTHING = (tuple(np.full_like(mask, seen) for mask in MASKS) for seen in (True, False))


def test_equals_its_equations_for_sentences_of_any_length():
    got = _scores(PREMISE, HYPOTHESIS, *MASKS)

    def layer(name):
        return lambda x: np.maximum(x @ KERNELS[name] + 0.1, 0.0)

    for b, (t, s) in enumerate(zip(*LENGTHS, strict=True)):
        want = decomposable(PREMISE[b, :t], HYPOTHESIS[b, :s], layer("f"), layer("g"), lambda x: x @ KERNELS["h"])
        np.testing.assert_allclose(got[b], want, atol=1e-4, rtol=1e-5)


def test_swapping_the_sentences_swaps_what_they_get():
    there, back = _sums(PREMISE, HYPOTHESIS, *MASKS), _sums(HYPOTHESIS, PREMISE, *reversed(MASKS))
    np.testing.assert_allclose(np.roll(there, G, axis=-1), back, atol=1e-5)
    beta, alpha, *_ = _attend_both(PREMISE, HYPOTHESIS, *MASKS)
    alpha_, beta_, *_ = _attend_both(HYPOTHESIS, PREMISE, *reversed(MASKS))
    np.testing.assert_allclose(beta, beta_, atol=1e-6)
    np.testing.assert_allclose(alpha, alpha_, atol=1e-6)


def test_the_order_of_words_does_not_matter():
    order = np.array([3, 0, 4, 1, 2])
    other, one = (_sums(premise, HYPOTHESIS, *EVERYTHING) for premise in (PREMISE[:, order], PREMISE))
    np.testing.assert_allclose(other, one, atol=1e-5)
    np.testing.assert_allclose(_sums(PREMISE, HYPOTHESIS), one, atol=1e-6)  # no mask hides nothing


def test_maps_mix_the_words_of_the_other_sentence():
    beta, alpha, beta_weights, alpha_weights = map(np.asarray, _attend_both(PREMISE, HYPOTHESIS, *MASKS))
    np.testing.assert_allclose(beta, beta_weights @ HYPOTHESIS, atol=1e-5)
    np.testing.assert_allclose(alpha, alpha_weights @ PREMISE, atol=1e-5)
    np.testing.assert_allclose(beta_weights.sum(axis=-1), 1.0, atol=1e-6)
    assert (beta_weights[1, :, 3:] == 0).all()
    assert (alpha_weights[1, :, 2:] == 0).all()


def test_padding_changes_nothing_bit_for_bit():
    seen = [mask[:, 0, 0, :, None] for mask in MASKS]
    before = _scores(PREMISE, HYPOTHESIS, *MASKS)
    for junk in np.array([7, -1e3], np.float32):
        sentences = (np.where(s, x, junk) for s, x in zip(seen, (PREMISE, HYPOTHESIS), strict=True))
        np.testing.assert_array_equal(before, _scores(*sentences, *MASKS))


def test_a_pair_of_nothing_but_padding_is_zero_with_finite_gradients():
    np.testing.assert_array_equal(_sums(PREMISE, HYPOTHESIS, *NOTHING), 0)
    one_sided = _sums(PREMISE, HYPOTHESIS, EVERYTHING[0], NOTHING[1])
    assert (np.asarray(one_sided)[:, :G] > 0).any()
    gradients = jax.jit(jax.grad(lambda *x: _sums(*x, *NOTHING).sum(), argnums=(0, 1)))(PREMISE, HYPOTHESIS)
    assert all(np.isfinite(g).all() for g in gradients)


def test_sentences_of_different_batches():
    with pytest.raises(ValueError, match="batch"):
        attend_both(PREMISE, HYPOTHESIS[:2], attend_fn=lambda x: x)
