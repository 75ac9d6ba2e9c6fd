"""Sums of cross entropies against float64, prediction by prediction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.tasks.cross_entropy import is_first_choice, summed_cross_entropy


def draw(shape, num_classes, seed=0):
    """Logits, targets (half of them the first choice) and weights, some of which are 0."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(*shape, num_classes))
    targets = np.where(rng.random(shape) < 0.5, logits.argmax(axis=-1), rng.integers(num_classes, size=shape))
    weights = rng.choice([0.0, 0.0, 0.25, 1.0, 2.0], shape)
    return logits.astype(np.float32), targets.astype(np.int32), weights.astype(np.float32)


@pytest.mark.parametrize("shape", [(11,), (4, 5), (2, 3, 4)])
@pytest.mark.parametrize(("smoothing", "z_loss_weight"), [(0.0, 0.0), (0.1, 0.0), (0.2, 0.3)])
def test_sums(shape, smoothing, z_loss_weight, sums_of, assert_sums):
    options = {"label_smoothing": smoothing, "z_loss_weight": z_loss_weight}
    example = draw(shape, 7)
    found = jax.jit(functools.partial(summed_cross_entropy, **options))(*example)
    expected = sums_of(*example, smoothing, z_loss_weight)
    assert 0 < expected[1]["correct"] < expected[1]["tokens"]
    assert_sums(found, expected)


def test_sums_add():
    logits, targets, weights = draw((8, 5), 7)
    whole, halves = (
        [summed_cross_entropy(logits[rows], targets[rows], weights[rows], z_loss_weight=0.1) for rows in parts]
        for parts in ([slice(8)], [slice(3), slice(3, 8)])
    )
    added = jax.tree.map(jnp.add, *halves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), added, whole[0])


def test_what_has_no_weight_does_not_matter():
    logits, targets, weights = draw((8, 5), 7)
    unseen = weights == 0
    changed = np.where(unseen[..., None], -5 * logits, logits), np.where(unseen, 6 - targets, targets)
    value_and_grad = jax.value_and_grad(lambda logits, targets: summed_cross_entropy(logits, targets, weights)[0])
    (value, gradient), (other, other_gradient) = value_and_grad(logits, targets), value_and_grad(*changed)
    assert value == other
    np.testing.assert_array_equal(gradient, other_gradient)
    assert np.all((np.asarray(gradient) != 0).any(axis=-1) == ~unseen)


def test_bfloat16_logits_are_summed_in_float32():
    """4,096 equal losses: bfloat16 would stop counting at 256."""
    logits = jnp.zeros((64, 64, 2), jnp.bfloat16)
    total, sums = summed_cross_entropy(logits, jnp.zeros((64, 64), jnp.int32), jnp.ones((64, 64)))
    np.testing.assert_allclose(total, 4096 * np.log(2), rtol=1e-6)
    assert (float(sums["tokens"]), float(sums["correct"])) == (4096, 4096)


def test_the_first_choice_is_an_argmax_but_for_ties():
    logits, targets, _ = draw((50,), 7)
    np.testing.assert_array_equal(is_first_choice(logits, targets), logits.argmax(axis=-1) == targets)
    assert is_first_choice(jnp.zeros((1, 3)), jnp.array([2])).item()
