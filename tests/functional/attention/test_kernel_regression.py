"""Kernel regression against the fraction of Nadaraya (1964) and Watson (1964), and what its figure shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import kernel_regression

_regression = jax.jit(kernel_regression, static_argnames="return_weights")


def _noisy_curve(seed, num_points=50):
    """The data of figure 15.17 in Murphy (2022)."""
    random = np.random.default_rng(seed)
    x = np.sort(random.uniform(0.0, 5.0, num_points))
    return x, _curve(x) + random.normal(0.0, 0.5, num_points)


def _curve(x):
    return 2 * np.sin(x) + x**0.8


def _nadaraya_watson(query_points, points, values, width):
    """sum_i K(x - x_i) y_i / sum_i K(x - x_i), K(u) = exp(-(u w)^2 / 2) w / sqrt(2 pi)."""
    estimates = []
    for x in query_points:
        kernels = [np.exp(-0.5 * np.sum(((x - x_i) * width) ** 2)) * width / np.sqrt(2 * np.pi) for x_i in points]
        estimates.append(sum(k * y for k, y in zip(kernels, values, strict=True)) / sum(kernels))
    return np.array(estimates)


@pytest.mark.parametrize("width", [0.5, 1.0, 4.0])
def test_equals_nadaraya_watson(width):
    arrays = [np.float32(array) for array in (np.arange(0.0, 5.0, 0.1), *_noisy_curve(0))]
    out, weights = _regression(*arrays, inverse_bandwidth=width, return_weights=True)
    at, x, y = np.float64(arrays[0]), np.float64(arrays[1]), np.float64(arrays[2])
    np.testing.assert_allclose(out, _nadaraya_watson(at, x, y, width), atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(out, np.asarray(weights, np.float64) @ y, atol=1e-6, rtol=1e-6)


def test_points_with_coordinates_and_values_with_several():
    random = np.random.default_rng(0)
    at, x, y = random.normal(size=(6, 3)), random.normal(size=(9, 3)), random.normal(size=(9, 2))
    width = np.array([0.5, 1.0, 2.0])
    out = _regression(*map(np.float32, (at, x, y)), inverse_bandwidth=np.float32(width))
    want = np.stack([_nadaraya_watson(at * width, x * width, column, 1.0) for column in y.T], axis=-1)
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_the_band_of_the_map_narrows_as_w_grows():
    x = np.float32(_noisy_curve(0)[0])
    distance = np.abs(x[:, None] - x[None])
    bands = []
    for width in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        _, weights = _regression(x, x, x, inverse_bandwidth=width, return_weights=True)
        bands.append((np.asarray(weights) * distance).sum(axis=-1).mean())
    assert (np.diff(bands) < 0).all()
    assert bands[-1] < bands[0] / 10


def test_limits():
    x, y = np.float32([1.0, 2.0, 4.0]), np.float32([3.0, 5.0, 10.0])
    np.testing.assert_allclose(_regression(x, x, y, inverse_bandwidth=0.0), 6.0, rtol=1e-6)
    np.testing.assert_array_equal(_regression(x, x, y, inverse_bandwidth=1e3), y)
    np.testing.assert_array_equal(_regression(np.float32([-1e6, 1e6]), x, y), [3.0, 10.0])  # 0 / 0 as a fraction
    far = np.float32(4096)  # where x^2 - 2 x x_i + x_i^2 would be off by 1
    np.testing.assert_array_equal(_regression(x + far, x + far, y), _regression(x, x, y))


def test_without_points_the_estimate_is_zero():
    assert _regression(np.zeros(2, np.float32), np.zeros(0, np.float32), np.zeros(0, np.float32)).tolist() == [0.0, 0.0]


def test_a_point_left_out_of_its_own_estimate():
    x, y = np.float32([0.0, 1.0]), np.float32([3.0, 5.0])
    np.testing.assert_array_equal(_regression(x, x, y, ~np.eye(2, dtype=bool)), [5.0, 3.0])
    np.testing.assert_array_equal(_regression(x, x, y, np.zeros((1, 2), bool)), [0.0, 0.0])


def test_learns_a_bandwidth_that_beats_one_and_the_mean():
    """By gradient descent on the error of points left out of their own estimates; on all of 20 data sets."""
    at = np.arange(0.0, 5.0, 0.1, dtype=np.float32)
    x, y = (np.float32(np.stack(column)) for column in zip(*map(_noisy_curve, range(20)), strict=True))

    def left_out_error(log_width, x, y):
        out = kernel_regression(x, x, y, ~np.eye(len(x), dtype=bool), inverse_bandwidth=jnp.exp(log_width))
        return jnp.square(out - y).mean()

    def learned(x, y):
        def step(log_width, _):
            return log_width - 0.5 * jax.grad(left_out_error)(log_width, x, y), None

        return jnp.exp(jax.lax.scan(step, 0.0, length=60)[0])

    def error(x, y, width):
        return jnp.square(kernel_regression(at, x, y, inverse_bandwidth=width) - _curve(at)).mean()

    widths = jax.jit(jax.vmap(learned))(x, y)
    errors = jax.jit(jax.vmap(error))
    ours, one, mean = (np.asarray(errors(x, y, w)) for w in (widths, np.ones(20, np.float32), np.zeros(20, np.float32)))
    assert (ours < one).all()
    assert (ours < mean).all()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2,), (3, 1), (3,)), r"points must have shapes .* got \(2,\) and \(3, 1\)"),
        (((2, 2), (3, 1), (3,)), r"points must have shapes .* got \(2, 2\) and \(3, 1\)"),
        (((2, 1, 1), (3, 1, 1), (3,)), "points must have shapes"),
        (((2,), (3,), (4,)), r"values must have shape .* S = 3, the number of points, got \(4,\)"),
        (((2,), (3,), (3, 1, 1)), "values must have shape"),
        (((2,), (3,), (3,), (3,)), r"mask must have rank 2, \[T, S\], got shape \(3,\)"),
        (((2,), (3,), (3,), (3, 2)), "mask must be broadcastable"),
    ],
)
def test_errors(shapes, message):
    arrays = [np.ones(shape, np.float32) for shape in shapes[:3]] + [np.ones(shape, bool) for shape in shapes[3:]]
    with pytest.raises(ValueError, match=message):
        kernel_regression(*arrays)
