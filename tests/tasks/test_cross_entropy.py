"""Sums of cross entropies against float64, prediction by prediction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.tasks.loss import is_first_choice, summed_cross_entropy


def draw(shape, num_classes, seed=0):
    """Logits, targets (half of them the first choice) and weights, some of which are 0."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(*shape, num_classes))
    targets = np.where(rng.random(shape) < 0.5, logits.argmax(axis=-1), rng.integers(num_classes, size=shape))
    weights = rng.choice([0.0, 0.0, 0.25, 1.0, 2.0], shape)
    return logits.astype(np.float32), targets.astype(np.int32), weights.astype(np.float32)


SHAPES = [(11,), (4, 5), (2, 3, 4)]
OPTIONS = [(0.0, 0.0), (0.1, 0.0), (0.2, 0.3)]
# Each shape and each options once are quick.
SUMS = [
    pytest.param(shape, *options, marks=() if number == place else pytest.mark.slow)
    for number, shape in enumerate(SHAPES)
    for place, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("shape", "smoothing", "z_loss_weight"), SUMS)
def test_sums(shape, smoothing, z_loss_weight, expected_loss, assert_losses):
    options = {"label_smoothing": smoothing, "z_loss_weight": z_loss_weight}
    example = draw(shape, 7)
    found = jax.jit(functools.partial(summed_cross_entropy, **options))(*example)
    expected = expected_loss(*example, smoothing, z_loss_weight)
    assert 0 < expected.metrics["accuracy"].sum < expected.weight
    assert_losses(found, expected)


def test_sums_add():
    example = draw((8, 5), 7)

    @jax.jit
    def whole_and_halves(*example):
        loss = functools.partial(summed_cross_entropy, z_loss_weight=0.1)
        return [loss(*(array[rows] for array in example)) for rows in (slice(8), slice(3), slice(3, 8))]

    whole, *halves = jax.device_get(whole_and_halves(*example))
    added = jax.tree.map(np.add, *halves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), added, whole)


def test_what_has_no_weight_does_not_matter():
    logits, targets, weights = draw((8, 5), 7)
    unseen = weights == 0
    changed = np.where(unseen[..., None], -5 * logits, logits), np.where(unseen, 6 - targets, targets)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda logits, targets: summed_cross_entropy(logits, targets, weights).loss)
    )
    (value, gradient), (other, other_gradient) = value_and_grad(logits, targets), value_and_grad(*changed)
    assert value == other
    np.testing.assert_array_equal(gradient, other_gradient)
    assert np.all((np.asarray(gradient) != 0).any(axis=-1) == ~unseen)


def test_bfloat16_logits_are_summed_in_float32():
    """4,096 equal losses: bfloat16 would stop counting at 256."""
    example = np.zeros((64, 64, 2), jnp.bfloat16), np.zeros((64, 64), np.int32), np.ones((64, 64), np.float32)
    output = jax.jit(summed_cross_entropy)(*example)
    np.testing.assert_allclose(output.loss, 4096 * np.log(2), rtol=1e-6)
    assert output.metrics["accuracy"] == (4096, 4096) == (output.weight, output.num_tokens)


def test_the_first_choice_is_an_argmax_but_for_ties():
    logits, targets, _ = draw((50,), 7)
    logits[0], targets[0] = 0.0, 2  # a tie
    found = jax.jit(is_first_choice)(logits, targets)
    np.testing.assert_array_equal(found, (logits.argmax(axis=-1) == targets) | (np.arange(50) == 0))
