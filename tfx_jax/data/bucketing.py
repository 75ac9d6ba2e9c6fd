"""Shapes of batches: examples of similar length, as many as a budget of tokens allows (Vaswani et al., 2017, 5.1)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfx_jax.data.process_shard import ProcessShard
from tfx_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a batch, [rows, length]."""

    length: int
    rows: int


def length_boundaries(max_length: int, multiple: int = 1) -> tuple[int, ...]:
    """Few lengths that waste little: four for each doubling, multiples of 4, and `max_length` at the end.

    All of them rounded up to multiples of `multiple`.

    >>> length_boundaries(100)
    (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100)
    >>> length_boundaries(100, multiple=8)
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 104)
    """
    boundaries, length = [], 8
    while length < max_length:
        boundaries.append(length)
        doubling = 1 << (length.bit_length() - 1)
        length += max(4, doubling // 4)
    return tuple(sorted({math.ceil(length / multiple) * multiple for length in (*boundaries, max_length)}))


def bucket_shapes(boundaries: Sequence[int], tokens_per_batch: int, batch_multiple: int = 1) -> tuple[Bucket, ...]:
    """As many rows as the budget of tokens allows for each length, but at least `batch_multiple`.

    >>> bucket_shapes((8, 24), tokens_per_batch=100, batch_multiple=2)
    (Bucket(length=8, rows=12), Bucket(length=24, rows=4))
    """
    return tuple(
        Bucket(length, max(batch_multiple, tokens_per_batch // length // batch_multiple * batch_multiple))
        for length in boundaries
    )


def training_buckets(
    boundaries: Sequence[int], tokens_per_batch: int, batch_multiple: int, shard: ProcessShard
) -> tuple[Bucket, ...]:
    """The `bucket_shapes` of batches that keep to the budget and that processes share equally.

    Raises:
      UserError: if boundaries do not increase, or if `batch_multiple` rows of the longest length exceed the budget or
        cannot be shared equally.
    """
    if list(boundaries) != sorted(set(boundaries)):
        raise UserError(f"boundaries={tuple(boundaries)} must increase")
    if tokens_per_batch < batch_multiple * boundaries[-1]:
        raise UserError(
            f"tokens_per_batch={tokens_per_batch} cannot hold {batch_multiple} rows of {boundaries[-1]} tokens: "
            "raise it or lower max_length"
        )
    if batch_multiple % shard.count:
        raise UserError(f"batch_multiple={batch_multiple} must be a multiple of the {shard.count} processes")
    return bucket_shapes(boundaries, tokens_per_batch, batch_multiple)


def plan_batches(lengths: np.ndarray, buckets: Sequence[Bucket]) -> list[tuple[Bucket, np.ndarray]]:
    """Assigns examples to batches, each in the shortest bucket that holds it, in the order given.

    Those that do not fill a batch of their bucket move up to the next one, but not to shapes that no example needs. So
    at most one of all batches is not full.

    Args:
      lengths: length of each example, [number of examples] int.
      buckets: shapes in order of length.

    Returns:
      For each batch its shape and the indices of its examples, at most `rows`; none of an example that is longer than
      the last bucket.
    """
    bucket_of = np.searchsorted([bucket.length for bucket in buckets], lengths)
    plan: list[tuple[Bucket, np.ndarray]] = []
    waiting = np.empty(0, np.int64)
    for number, bucket in enumerate(buckets[: bucket_of.max(initial=-1) + 1]):
        waiting = np.concatenate([waiting, np.flatnonzero(bucket_of == number)])
        full = len(waiting) // bucket.rows * bucket.rows
        plan += [(bucket, members) for members in waiting[:full].reshape(-1, bucket.rows)]
        waiting = waiting[full:]
    if waiting.size:
        plan.append((buckets[bucket_of[waiting].max()], waiting))
    return plan
