"""Checks that parameters are finite: one NaN or infinity makes all outputs of a model useless."""

from collections.abc import Collection
from typing import Any

import numpy as np

from tfx_jax.errors import UserError

_BLOCK = 1 << 16  # elements per check, which fit into a core's cache


def is_finite(array: np.ndarray) -> bool:
    """Returns whether no element is NaN or infinite.

    A sum of squares is faster than a check of each element, and is finite only if all elements are. Elements are
    checked one by one if the sum of a block is not finite (it may overflow), and for dtypes other than float32 and
    float64.

    >>> is_finite(np.array([1.0, 3e38], np.float32)), is_finite(np.array([1.0, np.nan], np.float32))
    (True, False)
    """
    flat = array.reshape(-1)
    return all(_is_finite(flat[start : start + _BLOCK]) for start in range(0, flat.size, _BLOCK))


def _is_finite(block: np.ndarray) -> bool:
    """Returns whether all elements of a flat array are finite."""
    if block.dtype.type in (np.float32, np.float64):
        with np.errstate(all="ignore"):
            if np.isfinite(np.dot(block, block)):
                return True
    return bool(np.isfinite(block).all())


def nonfinite(names: Collection[str], place: Any) -> UserError:
    """Returns the error for non-finite parameters of these names; `place` is their file or folder."""
    first, others = next(iter(names)), len(names) - 1
    more = f", and {others:,} more have" if others else ""
    return UserError(
        f"{place}: {first} has values that are NaN or infinite{more}: take another copy of the model, "
        "or load it anyway with --allow-nonfinite (allow_nonfinite=True)"
    )
