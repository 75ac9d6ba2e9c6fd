"""Batches of static shapes: padding, length buckets, prefetching, and the share of each process.

`train_batches` reads numbered portions: epochs, whose examples may differ (masking, cropping, pairing), or sort
buffers, of which an epoch has several. A portion is a function of its number, so the state of the iterator is a few
integers. Its examples are sorted into buckets of similar length and cut into batches, and the batches are shuffled.
Every process makes the same plan and takes its own examples. `eval_batches` gives each example once.
"""

import atexit
import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import grain
import grain.experimental
import numpy as np

from tfx_jax.errors import UserError


class ProcessShard(NamedTuple):
    """Shard `index` of `count` equal ones. Processes whose devices hold the same examples have the same shard."""

    index: int
    count: int

    def block(self, rows: int) -> slice:
        """Returns which of the rows of a batch belong to this shard: one block, as every other shard has."""
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


WHOLE = ProcessShard(0, 1)
"""All examples: what a process reads that shares them with no other."""


T = TypeVar("T")


class PrefetchedIterator(grain.experimental.ThreadPrefetchDatasetIterator[T]):
    """Runs another iterator in a thread, some elements ahead; its state is that of the last element taken.

    The thread ends before the interpreter does: a daemon thread that is still inside SentencePiece when Python shuts
    down aborts the process.
    """

    def __init__(self, parent: grain.DatasetIterator[T], num_elements: int):
        super().__init__(parent, num_elements)
        _open_iterators.add(self)

    def close(self) -> None:
        """Ends the thread; the second time, there is nothing to do, nor are the modules to do it with at shut-down."""
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


Example = dict[str, Any]
"""A tree: nested dictionaries of arrays [T, ...] of a length of their own, such as tokens or frames of sound, and of
scalars []."""
Batch = dict[str, Any]
"""The same of several examples, [rows, length, ...] and [rows]."""


class LoaderOptions(NamedTuple):
    """How a trainer wants its batches.

    Attributes:
      seed: decides the order.
      batch_multiple: the rows of a batch are a multiple of it: the number of shards that devices divide them into.
      length_multiple: the lengths are, for devices that divide the positions.
      shard: which block of the rows of each batch this process gets. The plan does not depend on it.
    """

    seed: int
    batch_multiple: int = 1
    length_multiple: int = 1
    shard: ProcessShard = WHOLE


class ExampleSource(Protocol):
    """Random access to the examples of a portion, and their lengths."""

    @property
    def lengths(self) -> np.ndarray:
        """What examples are sorted by, [number of examples] int; -1 for one that a training is to skip."""
        ...

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """The example with this index."""
        ...


class ExampleList:
    """Examples that are all there, such as a small data set for fine-tuning."""

    def __init__(self, examples: Sequence[Example], *, by: str = "tokens"):
        """Takes the examples; the length of one is that of its array `by`, a path such as "inputs/tokens"."""
        self._examples = examples
        arrays = [functools.reduce(operator.getitem, by.split("/"), example) for example in examples]
        self.lengths = np.array([len(array) for array in arrays], np.int64)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class LazyExamples:
    """Examples that are made of the items of a data set, each when it is read."""

    def __init__(self, items: Any, make: Callable[[Any], Example], lengths: np.ndarray):
        """Takes the items, the function that makes an example of one, and the lengths of the examples."""
        self._items, self._make, self.lengths = items, make, lengths

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Example:
        return self._make(self._items[index])


class BatchSpec(NamedTuple):
    """How examples become arrays of one shape.

    Attributes:
      boundaries: lengths that batches may have, increasing.
      tokens_per_batch: rows * length <= tokens_per_batch, padding counted, over all processes.
      pad_values: what padding is, by the path of the array, such as "inputs/frames"; 0 where it is not said.
      fixed_lengths: of arrays whose length has nothing to do with that of the example, by their paths.
    """

    boundaries: Sequence[int]
    tokens_per_batch: int
    pad_values: Mapping[str, int] = {}
    fixed_lengths: Mapping[str, int] = {}

    def collate(self, examples: ExampleSource, members: Sequence[int] | np.ndarray, bucket: Bucket) -> Batch:
        """The examples `members`, padding behind and below, as arrays [bucket.rows, length, ...] and [bucket.rows]."""
        chosen = [examples[index] for index in np.asarray(members, int).tolist()]
        # A shard of a batch that has no example of its own still has the arrays that examples have.
        return self._collate("", chosen[0] if chosen else examples[0], chosen, bucket)

    def _collate(self, path: str, like: Any, parts: list[Any], bucket: Bucket) -> Any:
        """Joins what examples have at a path, all of it as `like` is."""
        if isinstance(like, dict):
            within = f"{path}/" if path else ""
            return {
                name: self._collate(f"{within}{name}", value, [part[name] for part in parts], bucket)
                for name, value in like.items()
            }
        length = [self.fixed_lengths.get(path, bucket.length)] if like.ndim else []
        padded = np.full((bucket.rows, *length, *like.shape[1:]), self.pad_values.get(path, 0), like.dtype)
        if not like.ndim:
            padded[: len(parts)] = parts
        elif parts:  # all at once: assigning row by row takes three times as long
            sizes = np.fromiter(map(len, parts), np.int64, len(parts))
            padded[: len(parts)][np.arange(*length) < sizes[:, np.newaxis]] = np.concatenate(parts)
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
    """Endless training batches: every example of a portion once, then those of the next one.

    In one batch of a portion the last rows may be all padding.

    Args:
      make_portion: the examples of the portion with this number, such as an epoch; the same number, the same examples.
      spec: the shapes.
      options: the order, and how devices and processes share; `length_multiple` is for who makes `spec`.
      num_examples: of all the data, if it is known before a portion is made: a checkpoint of other data is then refused
        at once. It is otherwise when it is of the middle of a portion that had another number of examples.
      is_shuffled: whether the examples of a portion come in random order already. Its batches are shuffled anyway.
      prefetch: how many batches a thread prepares ahead, 0 for none.

    Returns:
      A data set whose iterators have a small JSON state, that of the last batch taken, whatever was prefetched. It
      counts the examples that were skipped in the portions before, as "skipped".

    Raises:
      UserError: if boundaries do not increase, if a batch cannot hold `batch_multiple` rows, or they cannot be shared
        equally; while iterating, if a portion has no examples or examples longer than the last boundary.
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
    """Every example once, short ones first, for evaluation.

    Args:
      examples: those to evaluate on.
      spec: the shapes; an example that alone exceeds the budget of tokens makes a batch.
      shard: of processes that do not wait for each other: this one gets batches of its own, made of every `count`-th
        example from the one at `index` on.

    Yields:
      What `BatchSpec.collate` gives, and besides "index" [rows] int32: which example it is, or -1 for padding.

    Raises:
      UserError: if an example is longer than the last boundary.
    """
    lengths = examples.lengths
    _check_lengths(lengths, spec.boundaries[-1])
    mine = np.arange(shard.index, len(examples), shard.count)
    order = mine[np.argsort(lengths[mine], kind="stable")]
    for bucket, members in plan_batches(lengths[order], bucket_shapes(spec.boundaries, spec.tokens_per_batch)):
        index = np.full(bucket.rows, -1, np.int32)
        index[: len(members)] = order[members]
        yield {**spec.collate(examples, order[members], bucket), "index": index}


def _check_lengths(lengths: np.ndarray, max_length: int) -> None:
    if (longest := lengths.max(initial=0)) > max_length:
        raise UserError(f"an example of {longest} tokens is longer than {max_length}")


class _TrainDataset(grain.IterDataset[Batch]):
    """The batches of all portions, one after the other, without end."""

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

    def load(self, number: int) -> "_Portion":
        """Makes and plans a portion."""
        examples = self._make_portion(number)
        lengths = examples.lengths
        _check_lengths(lengths, self._buckets[-1].length)
        rng = np.random.default_rng((self._seed, number))
        order = np.arange(len(lengths)) if self._is_shuffled else rng.permutation(len(lengths))
        order = order[lengths[order] >= 0]
        if not order.size:
            raise UserError("there are no examples to train on")
        plan = [(bucket, order[members]) for bucket, members in plan_batches(lengths[order], self._buckets)]
        return _Portion(examples, [plan[place] for place in rng.permutation(len(plan))], len(lengths) - len(order))

    def collate(self, portion: "_Portion", number: int) -> Batch:
        """The examples of one batch of a portion that belong to this process."""
        bucket, members = portion.plan[number]
        mine = self._shard.block(bucket.rows)
        return self._spec.collate(portion.examples, members[mine], Bucket(bucket.length, mine.stop - mine.start))


class _Portion(NamedTuple):
    examples: ExampleSource
    plan: list[tuple[Bucket, np.ndarray]]
    num_skipped: int


class _TrainIterator(grain.DatasetIterator[Batch]):
    """Remembers the next batch as (portion, batch); a portion is made again when the iteration is resumed inside it."""

    def __init__(self, dataset: _TrainDataset):
        super().__init__()
        self._dataset = dataset
        self._portion = self._batch = self._skipped = 0
        self._num_examples = dataset.num_examples
        self._loaded: _Portion | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._loaded is None:
            self._loaded = self._dataset.load(self._portion)
            if self._dataset.num_examples is None:
                self._expect(len(self._loaded.examples))
        batch = self._dataset.collate(self._loaded, self._batch)
        self._batch += 1
        if self._batch == len(self._loaded.plan):
            self._portion, self._batch, self._skipped = self._portion + 1, 0, self._skipped + self._loaded.num_skipped
            self._num_examples, self._loaded = self._dataset.num_examples, None
        return batch

    def get_state(self) -> dict[str, Any]:
        """Where the next batch is, how many examples were skipped in the portions before, and how many there are.

        That last number is of all the data or, where it is not known, of the portion that the batch is in the middle
        of; between two such portions it is None.
        """
        return {
            "portion": self._portion,
            "batch": self._batch,
            "skipped": self._skipped,
            "num_examples": self._num_examples,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batch that would have come next when `get_state` gave `state`.

        Raises:
          UserError: if the state is known to belong to another number of examples; the next batch may tell as well.
        """
        self._portion, self._batch, self._skipped = state["portion"], state["batch"], state["skipped"]
        self._num_examples, self._loaded = state["num_examples"], None
        if self._dataset.num_examples is not None:
            self._expect(self._dataset.num_examples)

    def _expect(self, num_examples: int) -> None:
        if self._num_examples not in (None, num_examples):
            raise UserError(
                f"the checkpoint belongs to {self._num_examples:,} training examples, but there are {num_examples:,}: "
                "bring the old data back or train in a new working directory"
            )
        self._num_examples = num_examples
