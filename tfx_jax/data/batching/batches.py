"""Batches of static shapes: padding, length buckets, prefetching, and sharding over processes.

`train_batches` reads numbered portions: epochs, whose examples may differ (masking, cropping, pairing), or sort
buffers, of which an epoch has several. A portion is a function of its number, so the state of the iterator is a few
integers. The examples of a portion are sorted into buckets of similar length and split into batches, and the batches
are shuffled. Every process makes the same plan and loads only its own examples. `eval_batches` yields each example
once.
"""

import atexit
import concurrent.futures
import dataclasses
import functools
import logging
import math
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import grain
import grain.experimental
import numpy as np

from tfx_jax.errors import UserError


class ProcessShard(NamedTuple):
    """Shard `index` of `count` equal shards. Processes whose devices hold the same examples have the same shard."""

    index: int
    count: int

    def block(self, rows: int) -> slice:
        """Returns the contiguous slice of a batch's rows that belongs to this shard; `rows` counts all of them."""
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = ProcessShard(index=0, count=1)
"""The only shard: all examples."""


T = TypeVar("T")


class PrefetchedIterator(grain.experimental.ThreadPrefetchDatasetIterator[T]):
    """Runs another iterator in a thread, some elements ahead; its state is that after the last element consumed.

    The thread is stopped before the interpreter exits: a daemon thread that is inside SentencePiece when Python shuts
    down would abort the process.
    """

    def __init__(self, parent: grain.DatasetIterator[T], num_elements: int):
        super().__init__(parent, num_elements)
        _open_iterators.add(self)

    def close(self) -> None:
        """Stops the thread; a second call, possibly during shutdown, does nothing."""
        if not self._closed:
            super().close()


_open_iterators: weakref.WeakSet[PrefetchedIterator[Any]] = weakref.WeakSet()


@atexit.register
def _close_iterators() -> None:
    for iterator in list(_open_iterators):
        iterator.close()


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a batch, [rows, length]."""

    length: int
    rows: int


def length_boundaries(max_length: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns bucket lengths: 8 to 32 in steps of 4, then four per doubling, and finally `max_length`.

    All are rounded up to a multiple of `multiple`, so the last one may exceed `max_length`. Few lengths save
    compilations, and closely spaced ones save padding.

    >>> length_boundaries(100)
    (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100)
    >>> length_boundaries(100, multiple=8)
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 104)
    """
    boundaries, length = [], 8
    while length < max_length:
        boundaries.append(length)
        power_of_two = 1 << (length.bit_length() - 1)  # the largest one that is <= length
        length += max(4, power_of_two // 4)
    boundaries.append(max_length)
    # A set, because several boundaries may be rounded up to the same length.
    return tuple(sorted({math.ceil(boundary / multiple) * multiple for boundary in boundaries}))


def bucket_shapes(boundaries: Sequence[int], tokens_per_batch: int, batch_multiple: int = 1) -> tuple[Bucket, ...]:
    """Returns the shape of the batches of each length in `boundaries`.

    The number of rows is the largest multiple of `batch_multiple` with rows * length <= `tokens_per_batch`, but at
    least `batch_multiple`.

    >>> bucket_shapes((8, 24), tokens_per_batch=100, batch_multiple=2)
    (Bucket(length=8, rows=12), Bucket(length=24, rows=4))
    """
    buckets = []
    for length in boundaries:
        rows = tokens_per_batch // length // batch_multiple * batch_multiple  # rounded down to the multiple
        buckets.append(Bucket(length, max(batch_multiple, rows)))
    return tuple(buckets)


def training_buckets(
    boundaries: Sequence[int], tokens_per_batch: int, batch_multiple: int, shard: ProcessShard
) -> tuple[Bucket, ...]:
    """Returns the `bucket_shapes` after checking that they respect `tokens_per_batch` and divide among processes.

    Raises:
      UserError: if boundaries do not increase, if `batch_multiple` rows of the longest length exceed
        `tokens_per_batch`, or if `batch_multiple` is not divisible by the number of shards.
    """
    if list(boundaries) != sorted(set(boundaries)):
        raise UserError(f"boundaries={tuple(boundaries)} must increase: sort them and remove repetitions")
    if tokens_per_batch < batch_multiple * boundaries[-1]:
        raise UserError(
            f"tokens_per_batch={tokens_per_batch} cannot hold {batch_multiple} rows of {boundaries[-1]} tokens: "
            "raise it or lower max_length"
        )
    if batch_multiple % shard.count:
        raise UserError(f"batch_multiple={batch_multiple} must be a multiple of the {shard.count} processes")
    return bucket_shapes(boundaries, tokens_per_batch, batch_multiple)


def plan_batches(lengths: np.ndarray, buckets: Sequence[Bucket]) -> list[tuple[Bucket, np.ndarray]]:
    """Assigns examples, in the given order, to batches of the shortest bucket that holds them.

    Examples that do not fill a batch of their bucket move to the next longer bucket, up to the longest one in use. So
    at most one batch is not full.

    Args:
      lengths: length of each example, [number of examples] int.
      buckets: shapes in order of length.

    Returns:
      (shape, indices of at most `rows` examples) of each batch; examples longer than the last bucket are left out.
    """
    # Index of each example's bucket, len(buckets) if it is too long.
    bucket_indices = np.searchsorted([bucket.length for bucket in buckets], lengths)
    plan: list[tuple[Bucket, np.ndarray]] = []
    waiting = np.empty(0, np.int64)  # indices of examples that are not yet in a batch
    num_buckets_in_use = bucket_indices.max(initial=-1) + 1
    for bucket_index, bucket in enumerate(buckets[:num_buckets_in_use]):
        waiting = np.concatenate([waiting, np.flatnonzero(bucket_indices == bucket_index)])
        num_batched = len(waiting) // bucket.rows * bucket.rows
        plan += [(bucket, members) for members in waiting[:num_batched].reshape(-1, bucket.rows)]
        waiting = waiting[num_batched:]
    if waiting.size:
        plan.append((buckets[bucket_indices[waiting].max()], waiting))
    return plan


Example = dict[str, Any]
"""Nested dictionary of arrays: [T, ...] of variable length, such as tokens or audio frames, and scalars []."""
Batch = dict[str, Any]
"""The same dictionaries with the arrays of several examples, [rows, length, ...] and [rows]."""


class LoaderOptions(NamedTuple):
    """Options of batching that the trainer sets; see `BatchSpec` for those that a task sets.

    Attributes:
      seed: seed of the order of examples and batches.
      batch_multiple: the number of rows is a multiple of it; the number of shards of the batch axis over devices.
      length_multiple: lengths are a multiple of it, for sequence parallelism.
      shard: block of the rows of each batch that this process loads. The plan does not depend on it.
    """

    seed: int
    batch_multiple: int = 1
    length_multiple: int = 1
    shard: ProcessShard = WHOLE


class ExampleSource(Protocol):
    """Random access to the examples of a portion, and their lengths."""

    @property
    def lengths(self) -> np.ndarray:
        """Lengths for bucketing, [number of examples] int; -1 for examples that training skips."""
        ...

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Returns the example with this index."""
        ...


class ExampleList:
    """Examples in memory, such as a small data set for fine-tuning."""

    def __init__(self, examples: Sequence[Example], *, by: str = "tokens"):
        """Wraps examples.

        Args:
          examples: the examples.
          by: path of the array that determines the length of an example, such as "inputs/tokens".
        """
        self._examples = examples
        # The array at the path `by` in the nested dictionaries of each example.
        arrays = [functools.reduce(operator.getitem, by.split("/"), example) for example in examples]
        self.lengths = np.array([len(array) for array in arrays], np.int64)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class LazyExamples:
    """Examples computed on access as `make(items[index])`.

    Attributes:
      lengths: lengths of the examples, [number of examples] int.
    """

    def __init__(self, items: Any, make: Callable[[Any], Example], lengths: np.ndarray, *, reads_files: bool = False):
        """Wraps items; with `reads_files`, several threads read and decode those of a batch."""
        self._items, self._make, self.lengths, self._reads_files = items, make, lengths, reads_files

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Example:
        return self._make(self._items[index])

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Returns the examples with these indices."""
        return [*(_file_readers().map if self._reads_files else map)(self.__getitem__, indices)]


@functools.cache
def _file_readers() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the threads that read files for all sources; decoding an image or a sound leaves Python's lock."""
    return concurrent.futures.ThreadPoolExecutor(min(32, max(2, os.cpu_count() or 1)), "tfx_jax-reader")


class BatchSpec(NamedTuple):
    """Shapes and padding of batches.

    Attributes:
      boundaries: lengths that batches may have, increasing.
      tokens_per_batch: upper limit of rows * length, padding included, over all processes.
      pad_values: value of the padding by the path of the array, such as "inputs/frames"; default 0.
      fixed_lengths: lengths of arrays whose length is independent of the bucket, by path of the array.
    """

    boundaries: Sequence[int]
    tokens_per_batch: int
    pad_values: Mapping[str, int] = {}
    fixed_lengths: Mapping[str, int] = {}

    def collate(self, examples: ExampleSource, members: Sequence[int] | np.ndarray, bucket: Bucket) -> Batch:
        """Returns a batch with arrays of [bucket.rows, length, ...] and [bucket.rows], padded at the end.

        Args:
          examples: all examples.
          members: indices of the examples of the batch, at most `bucket.rows`.
          bucket: shape of the batch.
        """
        indices = np.asarray(members, int).tolist()
        is_lazy = isinstance(examples, LazyExamples)
        batch = examples.read(indices) if is_lazy else [examples[index] for index in indices]
        # A shard without examples needs the structure of an example to return padding.
        return self._collate("", batch[0] if batch else examples[0], batch, bucket)

    def _collate(self, path: str, like: Any, parts: list[Any], bucket: Bucket) -> Any:
        """Stacks the values `parts` of the examples of a batch at a path and pads them.

        `like` is a value of the same structure, shape and dtype as the parts, for batches without examples.
        """
        if isinstance(like, dict):
            within = f"{path}/" if path else ""
            return {
                name: self._collate(f"{within}{name}", value, [part[name] for part in parts], bucket)
                for name, value in like.items()
            }
        pad_value = self.pad_values.get(path, 0)
        if not like.ndim:
            padded = np.full(bucket.rows, pad_value, like.dtype)  # [rows]
            padded[: len(parts)] = parts
            return padded
        length = self.fixed_lengths.get(path, bucket.length)
        padded = np.full((bucket.rows, length, *like.shape[1:]), pad_value, like.dtype)  # [rows, length, ...]
        if parts:  # one assignment for all rows, because a loop takes three times as long
            sizes = np.fromiter(map(len, parts), np.int64, len(parts))
            is_filled = np.arange(length) < sizes[:, np.newaxis]  # [len(parts), length], False at padding
            padded[: len(parts)][is_filled] = np.concatenate(parts)
        return padded


def train_batches(
    make_portion: Callable[[int], ExampleSource],
    spec: BatchSpec,
    options: LoaderOptions,
    *,
    num_examples: int | None = None,
    is_shuffled: bool = False,
    prefetch: int = 8,
) -> grain.IterDataset[Batch]:
    """Returns endless training batches: every example of a portion once, then those of the next portion.

    At most one batch of a portion ends with rows of padding.

    Args:
      make_portion: returns the examples of the portion with a given number, such as an epoch; must be deterministic.
      spec: shapes and padding.
      options: seed, row multiple and shard; `length_multiple` must already be part of `spec`.
      num_examples: number of all examples, if known in advance. A checkpoint of other data is then rejected when it is
        restored; otherwise only when its portion is made, and only if it is in the middle of a portion.
      is_shuffled: whether the examples of a portion are already in random order. Batches are always shuffled.
      prefetch: number of batches that a thread prepares ahead, 0 for none.

    Returns:
      A data set whose iterators have a small JSON state, which describes the position after the last batch consumed,
      however many batches are prefetched. Its "skipped" is the number of examples skipped in previous portions.

    Raises:
      UserError: if `spec` and `options` do not fit, see `training_buckets`; while iterating, if a portion has no
        examples or one longer than the last boundary.
    """
    buckets = training_buckets(spec.boundaries, spec.tokens_per_batch, options.batch_multiple, options.shard)
    return _TrainDataset(
        make_portion,
        spec,
        buckets,
        seed=options.seed,
        num_examples=num_examples,
        is_shuffled=is_shuffled,
        shard=options.shard,
        prefetch=prefetch,
    )


def eval_batches(examples: ExampleSource, spec: BatchSpec, *, shard: ProcessShard = WHOLE) -> Iterator[Batch]:
    """Yields batches with every example once, short examples first, for evaluation.

    Args:
      examples: examples to evaluate on.
      spec: shapes and padding; an example that alone exceeds `tokens_per_batch` is a batch of one row.
      shard: shard of this process, which makes its own batches of every `count`-th example from `index` on, without
        waiting for other processes.

    Yields:
      Batches of `BatchSpec.collate`, with an additional array "index", [rows] int32: the index of the example, or -1
      for padding.

    Raises:
      UserError: if an example is longer than the last boundary.
    """
    lengths = examples.lengths
    _check_lengths(lengths, spec.boundaries[-1])
    shard_indices = np.arange(shard.index, len(examples), shard.count)
    order = shard_indices[np.argsort(lengths[shard_indices], kind="stable")]  # this shard's examples by length
    for bucket, members in plan_batches(lengths[order], bucket_shapes(spec.boundaries, spec.tokens_per_batch)):
        index = np.full(bucket.rows, -1, np.int32)
        index[: len(members)] = order[members]
        yield {**spec.collate(examples, order[members], bucket), "index": index}


def _check_lengths(lengths: np.ndarray, max_length: int) -> None:
    """Raises UserError if an example is longer than `max_length`."""
    if (longest := lengths.max(initial=0)) > max_length:
        raise UserError(
            f"an example has {longest} tokens, but must have at most {max_length}: shorten it, or raise max_length"
        )


class _TrainDataset(grain.IterDataset[Batch]):
    """Endless batches of consecutive portions."""

    def __init__(
        self,
        make_portion: Callable[[int], ExampleSource],
        spec: BatchSpec,
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        num_examples: int | None,
        is_shuffled: bool,
        shard: ProcessShard,
        prefetch: int,
    ):
        super().__init__()
        self._make_portion, self._spec, self._buckets = make_portion, spec, buckets
        self._seed, self._is_shuffled, self.num_examples = seed, is_shuffled, num_examples
        self._shard, self._prefetch = shard, prefetch

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_TrainIterator(self), self._prefetch)

    @property
    def shapes(self) -> list[list[int]]:
        """The buckets as JSON: length and rows of each."""
        return [[bucket.length, bucket.rows] for bucket in self._buckets]

    def load(self, number: int, earlier: Sequence[tuple[list[list[int]], int]] = ()) -> "_Portion":
        """Makes the portion with this number and plans its batches.

        `earlier` has the shapes and the number of batches that were read of the portion when other devices, or another
        accumulation, had other shapes. Their examples are left out.
        """
        examples = self._make_portion(number)
        lengths = examples.lengths
        _check_lengths(lengths, self._buckets[-1].length)
        rng = np.random.default_rng((self._seed, number))
        order = np.arange(len(lengths)) if self._is_shuffled else rng.permutation(len(lengths))
        order = order[lengths[order] >= 0]  # without skipped examples, whose length is -1
        if not order.size:
            raise UserError("there are no examples to train on: all are empty or too long")
        num_skipped = len(lengths) - len(order)
        if num_skipped and not number:
            logging.warning(
                "%s of the first %s training examples are left out: they are empty or do not fit, see "
                "config.task.data.max_length",
                *(f"{count:,}" for count in (num_skipped, len(lengths))),
            )

        def shuffled_plan(buckets: Sequence[Bucket]) -> list[tuple[Bucket, np.ndarray]]:
            # The plan's members are positions in `order`; turn them into indices of `examples`.
            plan = [(bucket, order[members]) for bucket, members in plan_batches(lengths[order], buckets)]
            return [plan[index] for index in rng.permutation(len(plan))]

        for shapes, count in earlier:
            done = shuffled_plan([Bucket(*shape) for shape in shapes])[:count]
            order = order[~np.isin(order, np.concatenate([members for _, members in done]))]
        return _Portion(examples, shuffled_plan(self._buckets), num_skipped)

    def collate(self, portion: "_Portion", number: int) -> Batch:
        """Returns the rows of one batch of a portion that belong to this process."""
        bucket, members = portion.plan[number]
        rows = self._shard.block(bucket.rows)
        return self._spec.collate(portion.examples, members[rows], Bucket(bucket.length, rows.stop - rows.start))


class _Portion(NamedTuple):
    """Examples of a portion, its batches as (shape, indices of the examples), and the number of skipped examples."""

    examples: ExampleSource
    plan: list[tuple[Bucket, np.ndarray]]
    num_skipped: int


class _TrainIterator(grain.DatasetIterator[Batch]):
    """Iterator whose state has the numbers of the portion and batch to yield next.

    Resuming inside a portion makes the portion again.
    """

    def __init__(self, dataset: _TrainDataset):
        super().__init__()
        self._dataset = dataset
        self._portion = self._batch = self._skipped = 0
        self._earlier: list[tuple[list[list[int]], int]] = []  # see `_TrainDataset.load`
        self._num_examples = dataset.num_examples
        self._loaded: _Portion | None = None

    def __next__(self) -> Batch:
        """Returns the next batch; loads the next portion first if all batches of the last one are done."""
        self._assert_not_closed()
        if self._loaded is None:
            self._loaded = self._dataset.load(self._portion, self._earlier)
            if self._dataset.num_examples is None:
                self._expect(len(self._loaded.examples))
        batch = self._dataset.collate(self._loaded, self._batch)
        self._batch += 1
        if self._batch == len(self._loaded.plan):
            self._portion += 1
            self._batch, self._earlier = 0, []
            self._skipped += self._loaded.num_skipped
            self._num_examples = self._dataset.num_examples
            self._loaded = None
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns portion and number of the next batch, skipped examples of previous portions, and `num_examples`.

        `num_examples` counts all data or, if that is unknown, the current portion; it is then None between portions.
        "shapes" are those of the batches, and "earlier" others that the portion began with.
        """
        return {
            "portion": self._portion,
            "batch": self._batch,
            "skipped": self._skipped,
            "num_examples": self._num_examples,
            "shapes": self._dataset.shapes,
            "earlier": [*self._earlier],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batch that followed when `get_state` returned `state`.

        If batches have other shapes now, because of other devices or another accumulation, the rest of the portion is
        planned again: each example is still read once.

        Raises:
          UserError: if the state belongs to another number of examples; without a `num_examples` of all data, the next
            batch raises it.
        """
        self._portion, self._batch, self._skipped = state["portion"], state["batch"], state["skipped"]
        self._num_examples, self._loaded = state["num_examples"], None
        self._earlier = [*state["earlier"]]
        if self._batch and state["shapes"] != self._dataset.shapes:
            self._earlier.append((state["shapes"], self._batch))
            self._batch = 0
        if self._dataset.num_examples is not None:
            self._expect(self._dataset.num_examples)

    def _expect(self, num_examples: int) -> None:
        """Stores the number of examples; raises UserError if the restored state has another number."""
        if self._num_examples not in (None, num_examples):
            raise UserError(
                f"the checkpoint belongs to {self._num_examples:,} training examples, but there are {num_examples:,}: "
                "bring the old data back or train in a new working directory"
            )
        self._num_examples = num_examples
