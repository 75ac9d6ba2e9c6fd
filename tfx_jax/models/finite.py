"""Whether parameters are numbers: of a NaN or an infinity in one of them, everything that a model says is made."""

from collections.abc import Collection
from typing import Any

import numpy as np

from tfx_jax.errors import UserError

_BLOCK = 1 << 16  # elements: what a core's cache holds


def is_finite(array: np.ndarray) -> bool:
    """Whether no element is NaN or infinite.

    Squares are summed, which reads an array faster than looking at each element does: a NaN or an infinity makes the
    sum one, too. Only where the sum of a block is none, or the dtype has no such product, elements are looked at.

    >>> is_finite(np.array([1.0, 3e38], np.float32)), is_finite(np.array([1.0, np.nan], np.float32))
    (True, False)
    """
    flat = array.reshape(-1)
    return all(_is_finite(flat[start : start + _BLOCK]) for start in range(0, flat.size, _BLOCK))


def _is_finite(block: np.ndarray) -> bool:
    if block.dtype.type in (np.float32, np.float64):
        with np.errstate(all="ignore"):
            if np.isfinite(np.dot(block, block)):
                return True
    return bool(np.isfinite(block).all())


def nonfinite(names: Collection[str], place: Any) -> UserError:
    """The error for parameters of these names, in a file or folder."""
    first, others = next(iter(names)), len(names) - 1
    more = f", and {others:,} more have" if others else ""
    return UserError(
        f"{place}: {first} has values that are NaN or infinite{more}: take another copy of the model, "
        "or go on with --allow-nonfinite (allow_nonfinite=True)"
    )
