"""Dropout: who is zeroed, by what the rest is multiplied, and when nothing happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfx_jax.functional import dropout

LEVELS = 65_536

_drop = jax.jit(dropout, static_argnums=1)  # the rate is checked, so it cannot be traced


def _ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(("rate", "rng"), [(0.7, None), (0.0, jax.random.key(0)), (1e-9, jax.random.key(0))])
def test_unchanged_without_rng_or_rate(rate, rng):
    x = _ones(3, 5)
    assert dropout(x, rate, rng) is x


@pytest.mark.parametrize("rate", [0.01, 1 / 3, 0.5000076, 0.7, 0.99])
def test_scale_keeps_the_expectation_exactly(rate):
    """Probability of survival times scale is 1, whatever the rate."""
    out = np.unique(_drop(_ones(40, 50), rate, jax.random.key(1)))
    keep_probability = (LEVELS - round(rate * LEVELS)) / LEVELS
    assert set(out) <= {np.float32(0), np.float32(1 / keep_probability)}


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_fraction_and_mean(rate):
    out = np.asarray(_drop(_ones(300, 500), rate, jax.random.key(3)))
    sigma = np.sqrt(rate * (1 - rate) / out.size)
    assert abs((out == 0).mean() - rate) < 3 * sigma
    assert abs(out.mean() - 1) < 3 * sigma / (1 - rate)


def test_elements_are_independent():
    """Neighbors in either direction, and the same element under another key, agree as often as chance has it."""
    first, other = (np.asarray(_drop(_ones(300, 500), 0.5, jax.random.key(seed))) == 0 for seed in (4, 5))
    for a, b in ((first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first, other)):
        assert abs((a == b).mean() - 0.5) < 4 * 0.5 / np.sqrt(a.size)


def _z(a, b, rate):
    """Of the correlation of two sets of masks: standard normal, were all their elements drawn by themselves."""
    return ((a - rate) * (b - rate)).sum() / (rate * (1 - rate) * np.sqrt(a.size))


def test_masks_of_a_training_are_like_drawn_ones():
    """Sixty-four masks of successive steps: neighbors at every distance, rows and columns, one step and the next."""
    rate = LEVELS // 8 / LEVELS

    @jax.jit
    @jax.vmap
    def masks(step):
        return dropout(_ones(128, 256), rate, jax.random.fold_in(jax.random.key(11), step))

    masks = masks(np.arange(64))
    zeroed = (np.asarray(masks) == 0).astype(np.float64)
    scores = [_z(zeroed[:, :, lag:], zeroed[:, :, :-lag], rate) for lag in (1, 2, 3, 4, 8, 16, 32, 64, 128)]
    scores += [_z(zeroed[:, lag:], zeroed[:, :-lag], rate) for lag in (1, 2, 3, 4, 8, 16, 32, 64)]
    scores += [_z(zeroed[lag:], zeroed[:-lag], rate) for lag in (1, 2, 4, 32)]
    assert np.abs(scores).max() < 4
    assert 0.3 < np.square(scores).mean() < 2.5
    for axis in (0, 1, 2):
        counts = zeroed.sum(axis=axis)
        ratio = counts.var() / (zeroed.shape[axis] * rate * (1 - rate))  # of a binomial distribution
        assert abs(ratio - 1) < 5 * np.sqrt(2 / counts.size)


def test_mask_does_not_depend_on_the_mesh():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    drop = jax.jit(lambda x: dropout(x, 0.4, jax.random.key(12)))
    sharded = jax.device_put(_ones(8, 6, 10), NamedSharding(mesh, PartitionSpec("a", None, "b")))
    np.testing.assert_array_equal(drop(sharded), drop(_ones(8, 6, 10)))
    compiled = drop.lower(sharded).compile().as_text()
    assert "all-" not in compiled


def test_same_rng_same_elements_in_every_dtype():
    rng = jax.random.key(6)
    whole = np.asarray(_drop(_ones(7, 11), 0.4, rng))
    half = np.asarray(_drop(_ones(7, 11).astype(jnp.bfloat16), 0.4, rng))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(whole == 0, half == 0)


def test_bfloat16_is_scaled_before_it_is_rounded():
    """A scale rounded to bfloat16, 1.109375 for 1.1111, would shrink every activation of a model by 0.16 %."""
    x = np.linspace(1.0, 2.0, 20_000).astype(jnp.bfloat16)
    out = np.asarray(_drop(x, 0.1, jax.random.key(7)), np.float32)
    kept = out != 0
    ratio = out[kept].mean() / x.astype(np.float32)[kept].mean()
    np.testing.assert_allclose(ratio, LEVELS / (LEVELS - round(0.1 * LEVELS)), rtol=2e-4)


def test_rate_close_to_one_is_finite():
    out = np.asarray(_drop(_ones(100, 100), 1 - 1e-12, jax.random.key(8)))
    assert set(np.unique(out)) <= {0, LEVELS}


def test_gradient_is_the_mask():
    rng = jax.random.key(9)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    gradient = jax.jit(jax.grad(lambda x: dropout(x, 0.25, rng).sum()))(x)
    np.testing.assert_array_equal(gradient, _drop(_ones(3, 4), 0.25, rng))


def test_vmap_over_keys_draws_independently():
    draw = jax.jit(jax.vmap(lambda rng: dropout(_ones(50), 0.5, rng)))
    masks = draw(jax.random.split(jax.random.key(10), 3))
    assert len(np.unique(masks, axis=0)) == 3


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rate_out_of_range(rate):
    with pytest.raises(ValueError, match=r"dropout rate must be in \[0, 1\), got"):
        dropout(_ones(2), rate, None)
