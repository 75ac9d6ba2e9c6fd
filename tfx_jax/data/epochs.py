"""Batches of rows that are made anew for every epoch: text masked elsewhere, cut elsewhere, paired with other text.

An epoch is a function of its number, so the state of the iterator is a few integers. Its rows are shuffled, sorted into
buckets of similar length and cut into batches of static shapes, as `tfx_jax.data.bucketing` does it with sentence
pairs. Every process makes the same plan and takes its own rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import grain
import numpy as np

from tfx_jax.data.bucketing import Bucket, bucket_shapes, plan_batches, training_buckets
from tfx_jax.data.prefetch import PrefetchedIterator
from tfx_jax.data.process_shard import WHOLE, ProcessShard
from tfx_jax.errors import UserError

Row = dict[str, np.ndarray]
"""An example: arrays [T] of its own length, and scalars []."""
Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Random access to the examples of an epoch, and their lengths, [number of rows] int."""

    @property
    def lengths(self) -> np.ndarray:
        """What rows are sorted by, [number of rows] int."""
        ...

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """The row with this index."""
        ...


class RowList:
    """Rows that are all there, such as a small data set for fine-tuning."""

    def __init__(self, rows: Sequence[Row], *, by: str = "tokens"):
        """Takes the rows; the length of one is that of its array `by`."""
        self._rows = rows
        self.lengths = np.array([len(row[by]) for row in rows], np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class Layout(NamedTuple):
    """How rows become arrays of one shape.

    Attributes:
      boundaries: lengths that batches may have, increasing.
      tokens_per_batch: rows * length <= tokens_per_batch, padding counted, over all processes.
      fills: what padding is, by the name of the array; 0 where it is not said.
      widths: the width of arrays whose length has nothing to do with that of the row, by their names.
    """

    boundaries: Sequence[int]
    tokens_per_batch: int
    fills: Mapping[str, int] = {}
    widths: Mapping[str, int] = {}

    def assemble(self, rows: Rows, members: Sequence[int] | np.ndarray, bucket: Bucket) -> Batch:
        """The rows `members`, padding behind and below them, as arrays [bucket.rows, length] and [bucket.rows]."""
        found = [rows[int(index)] for index in members]
        # A share of a batch that has no row of its own still has the arrays that rows have.
        example = found[0] if found else {name: array[:0] if array.ndim else array for name, array in rows[0].items()}
        batch = {}
        for name, array in example.items():
            fill = self.fills.get(name, 0)
            if not array.ndim:
                batch[name] = np.full(bucket.rows, fill, array.dtype)
                batch[name][: len(found)] = [row[name] for row in found]
                continue
            batch[name] = np.full((bucket.rows, self.widths.get(name, bucket.length)), fill, array.dtype)
            for place, row in enumerate(found):
                batch[name][place, : len(row[name])] = row[name]
        return batch


def epoch_batches(
    make_epoch: Callable[[int], Rows],
    layout: Layout,
    *,
    seed: int,
    rows_multiple: int = 1,
    shard: ProcessShard = WHOLE,
    prefetch: int = 8,
) -> grain.IterDataset[Batch]:
    """Endless training batches: every row of an epoch once, then those of the next one.

    In one batch of an epoch the last rows may be all padding.

    Args:
      make_epoch: the rows of the epoch with this number; the same number, the same rows.
      layout: the shapes.
      seed: decides the order.
      rows_multiple: rows are a multiple of it: the number of parts that devices divide the rows into.
      shard: which block of the rows of each batch this process gets. The plan does not depend on it.
      prefetch: how many batches a thread prepares ahead, 0 for none.

    Returns:
      A data set whose iterators have a small JSON state, that of the last batch taken, whatever was prefetched.

    Raises:
      UserError: if a batch cannot hold `rows_multiple` rows, or the rows cannot be shared equally; while iterating, if
        an epoch has no rows or rows longer than the last boundary.
    """
    buckets = training_buckets(layout.boundaries, layout.tokens_per_batch, rows_multiple, shard)
    return _EpochDataset(make_epoch, layout, buckets, seed=seed, shard=shard, prefetch=prefetch)


def one_pass(rows: Rows, layout: Layout, *, shard: ProcessShard = WHOLE) -> Iterator[Batch]:
    """Every row once, short ones first, for evaluation.

    Args:
      rows: those to evaluate on.
      layout: the shapes; a row that alone exceeds the budget of tokens makes a batch.
      shard: of processes that do not wait for each other, such as a search: this one gets batches of its own, made of
        every `count`-th row from row `index` on.

    Yields:
      What `Layout.assemble` gives, and besides "index" [rows] int32: which row it is, or -1 for padding.

    Raises:
      UserError: if a row is longer than the last boundary.
    """
    lengths = rows.lengths
    _check_lengths(lengths, layout.boundaries[-1])
    mine = np.arange(shard.index, len(rows), shard.count)
    order = mine[np.argsort(lengths[mine], kind="stable")]
    for bucket, members in plan_batches(lengths[order], bucket_shapes(layout.boundaries, layout.tokens_per_batch)):
        places = order[members]
        index = np.full(bucket.rows, -1, np.int32)
        index[: len(places)] = places
        yield {**layout.assemble(rows, places, bucket), "index": index}


def _check_lengths(lengths: np.ndarray, max_length: int) -> None:
    if (longest := lengths.max(initial=0)) > max_length:
        raise UserError(f"a row of {longest} tokens is longer than {max_length}")


class _EpochDataset(grain.IterDataset[Batch]):
    """The batches of all epochs, one after the other, without end."""

    def __init__(
        self,
        make_epoch: Callable[[int], Rows],
        layout: Layout,
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        shard: ProcessShard,
        prefetch: int,
    ):
        super().__init__()
        self._make_epoch, self._layout, self._buckets = make_epoch, layout, buckets
        self._seed, self._shard, self._prefetch = seed, shard, prefetch

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_EpochIterator(self), self._prefetch)

    def load(self, number: int) -> "_Epoch":
        """Makes and plans an epoch."""
        rows = self._make_epoch(number)
        if not len(rows):
            raise UserError("there are no rows to train on")
        _check_lengths(rows.lengths, self._buckets[-1].length)
        rng = np.random.default_rng((self._seed, number))
        order = rng.permutation(len(rows))
        plan = [(bucket, order[members]) for bucket, members in plan_batches(rows.lengths[order], self._buckets)]
        return _Epoch(rows, [plan[place] for place in rng.permutation(len(plan))])

    def assemble(self, epoch: "_Epoch", number: int) -> Batch:
        """The rows of one batch of an epoch that belong to this process."""
        bucket, members = epoch.plan[number]
        mine = self._shard.block(bucket.rows)
        return self._layout.assemble(epoch.rows, members[mine], Bucket(bucket.length, mine.stop - mine.start))


class _Epoch(NamedTuple):
    rows: Rows
    plan: list[tuple[Bucket, np.ndarray]]


class _EpochIterator(grain.DatasetIterator[Batch]):
    """Remembers the next batch as (epoch, batch); an epoch is made again when the iteration is resumed inside it."""

    def __init__(self, dataset: _EpochDataset):
        super().__init__()
        self._dataset = dataset
        self._epoch = self._batch = 0
        self._expected_rows: int | None = None
        self._loaded: _Epoch | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._loaded is None:
            self._loaded = self._dataset.load(self._epoch)
            self._check(len(self._loaded.rows))
        batch = self._dataset.assemble(self._loaded, self._batch)
        self._batch += 1
        if self._batch == len(self._loaded.plan):
            self._epoch, self._batch, self._loaded = self._epoch + 1, 0, None
        return batch

    def get_state(self) -> dict[str, int]:
        """Where the next batch is and, inside an epoch, how many rows that has."""
        state = {"epoch": self._epoch, "batch": self._batch}
        return state if self._loaded is None else state | {"num_rows": len(self._loaded.rows)}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues with the batch that would have come next when `get_state` gave `state`."""
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._expected_rows, self._loaded = state.get("num_rows"), None

    def _check(self, num_rows: int) -> None:
        if self._expected_rows not in (None, num_rows):
            raise UserError(
                f"the checkpoint belongs to an epoch of {self._expected_rows:,} rows, but there are {num_rows:,}: "
                "bring the old data back or train in a new working directory"
            )
        self._expected_rows = None
