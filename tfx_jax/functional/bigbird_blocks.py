"""The blocks that see each other in BigBird's attention."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def bigbird_block_mask(
    num_blocks: int,
    *,
    num_global_blocks: int,
    num_window_blocks: int,
    num_random_blocks: int,
    num_last_global_blocks: int = 0,
    seed: int = 0,
) -> Bool[np.ndarray, "blocks blocks"]:
    """Tells which blocks see which in `bigbird_attention`, row sees column, for tests and pictures.

    Args:
      num_blocks: of the sequence, its length over `block_size`, rounded up.
      num_global_blocks: as in `bigbird_attention`, like the rest.
      num_window_blocks: odd.
      num_random_blocks: drawn for each row.
      num_last_global_blocks: at the end.
      seed: of the random blocks.

    Returns:
      bool [num_blocks, num_blocks], a NumPy array.

    Raises:
      ValueError: if a number is negative or the window even.

    >>> blocks = bigbird_block_mask(5, num_global_blocks=1, num_window_blocks=3, num_random_blocks=0)
    >>> print(blocks.astype(int))
    [[1 1 1 1 1]
     [1 1 1 0 0]
     [1 1 1 1 0]
     [1 0 1 1 1]
     [1 0 0 1 1]]
    """
    num_global = num_global_blocks + num_last_global_blocks
    numbers = num_global, num_window_blocks, num_random_blocks
    check_blocks(*numbers)
    window, random = (x[0] for x in list_blocks(num_blocks, np.array([num_blocks]), *numbers, seed, numpy=np))
    num_global = num_blocks - len(window)
    seen = np.zeros((num_blocks, num_blocks + 1), bool)  # the empty slots, -1, fall into the last column
    seen[:num_global] = True
    seen[:, :num_global] = True
    np.put_along_axis(seen[num_global:], np.concatenate([window, random], axis=1), True, axis=1)
    return np.roll(seen[:, :-1], (-num_last_global_blocks, -num_last_global_blocks), axis=(0, 1))


def check_blocks(num_global: int, num_window: int, num_random: int) -> None:
    """Raises ValueError if a number of blocks is negative or the window even."""
    if min(num_global, num_random) < 0:
        raise ValueError(f"there cannot be {num_global} global and {num_random} random blocks: both are at least 0")
    if num_window < 1 or num_window % 2 == 0:
        raise ValueError(f"num_window_blocks must be odd, the block itself in the middle, got {num_window}")


def list_blocks(
    num_array_blocks: int,
    num_blocks: Int[Array, "#B"] | Int[np.ndarray, "#B"],
    num_global: int,
    num_window: int,
    num_random: int,
    seed: int,
    numpy: Any = jnp,
) -> tuple[Any, Any]:
    """Lists the window and the random blocks of each block that is not global; -1 where there is none.

    Args:
      num_array_blocks: blocks that an array has, the most of any row.
      num_blocks: blocks of the text of each row, on which alone its random blocks depend.
      num_global: blocks that come first and are global.
      num_window: odd.
      num_random: drawn for each block.
      seed: of the random blocks.
      numpy: the module that computes, `jax.numpy` or NumPy.

    Returns:
      int32 [#B, rows, window] and [#B, rows, random].
    """
    num_global = min(num_global, num_array_blocks)
    side = min(num_window // 2, num_array_blocks - 1)
    rows = numpy.arange(num_global, num_array_blocks, dtype=np.int32)[None, :, None]
    num_blocks = num_blocks.astype(np.int32)[:, None, None]
    window = rows + numpy.arange(-side, side + 1, dtype=np.int32)[None, None]
    window = numpy.where((window >= num_global) & (window < num_blocks), window, -1)

    first, end = numpy.maximum(rows - side, num_global), numpy.minimum(rows + side + 1, num_blocks)
    others = numpy.maximum(num_blocks - num_global - (end - first), 0)
    # Floyd's sampling without repetition: each number is drawn from 0 .. last, and is `last` if it was there before.
    random = numpy.zeros((*np.broadcast_shapes(num_blocks.shape, rows.shape)[:2], 0), np.int32)
    most = min(num_random, max(rows.size - 1, 0))  # there are no more others than that
    for k in range(most, 0, -1):
        last = others - k
        drawn = (_hash(seed, rows, k, numpy) % numpy.maximum(last + 1, 1).astype(np.uint32)).astype(np.int32)
        drawn = numpy.where((random == drawn).any(axis=-1, keepdims=True), last, drawn)
        random = numpy.concatenate([random, numpy.where(last < 0, -1, drawn)], axis=-1)
    # Drawn among the others as if the window were not there.
    random = numpy.where(random < 0, -1, num_global + random)
    random = numpy.where(random < first, random, random + end - first)
    return window, numpy.where(rows < num_blocks, random, -1)


def _hash(seed: int, row: Any, k: int, numpy: Any) -> Any:
    """Pseudo-random uint32 of each row: rounds of the finalizer of MurmurHash3."""
    x = numpy.zeros(row.shape, np.uint32)
    for number in (np.uint32(seed % 2**32), row.astype(np.uint32), np.uint32(k)):
        x = (x ^ number) + np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        x = x ^ (x >> np.uint32(16))
    return x
