"""Whether arrays are all numbers, against a look at each element."""

import ml_dtypes
import numpy as np
import pytest

from tfx_jax.models import finite
from tfx_jax.models.finite import is_finite, nonfinite

DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_element_anywhere_is_noticed(monkeypatch, dtype, value):
    monkeypatch.setattr(finite, "_BLOCK", 7)
    array = np.random.default_rng(0).normal(size=(4, 5)).astype(dtype)
    assert is_finite(array)
    for place in np.ndindex(array.shape):
        before = array[place]
        array[place] = value
        assert not is_finite(array)
        array[place] = before
    assert not is_finite(np.array(value, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_largest_numbers_are_numbers(dtype):
    """Their squares are not, nor are the sums of these."""
    largest = np.full(100_000, ml_dtypes.finfo(dtype).max, dtype)
    assert is_finite(largest)
    assert is_finite(-largest[::2])
    largest[99_999] = np.nan
    assert not is_finite(largest)


@pytest.mark.parametrize("array", [np.zeros((0, 3), np.float32), np.arange(9), np.ones(3, bool), np.float32(2)])
def test_what_is_empty_or_no_fraction_is_finite(array):
    assert is_finite(np.asarray(array))


def test_the_error_counts():
    assert "f: a has values that are NaN or infinite: take" in str(nonfinite(["a"], "f"))
    assert "f: b has values that are NaN or infinite, and 2,000 more have: take" in str(nonfinite(["b"] * 2_001, "f"))
