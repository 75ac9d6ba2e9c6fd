"""Batches of examples that are made anew for every epoch: text masked elsewhere, cut elsewhere, paired with other text.

An epoch is a function of its number, so the state of the iterator is a few integers. Its examples are shuffled, sorted
into buckets of similar length and cut into batches of static shapes, as `tfx_jax.data.bucketing` does it with sentence
pairs. Every process makes the same plan and takes its own examples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import grain
import numpy as np

from tfx_jax.data.bucketing import Bucket, bucket_shapes, plan_batches, training_buckets
from tfx_jax.data.prefetch import PrefetchedIterator
from tfx_jax.data.process_shard import WHOLE, ProcessShard
from tfx_jax.errors import UserError

Example = dict[str, np.ndarray]
"""Arrays [T, ...] of a length of their own, such as tokens or frames of sound, and scalars []."""
Batch = dict[str, np.ndarray]
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
    """Random access to the examples of an epoch, and their lengths."""

    @property
    def lengths(self) -> np.ndarray:
        """What examples are sorted by, [number of examples] int."""
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
        """Takes the examples; the length of one is that of its array `by`."""
        self._examples = examples
        self.lengths = np.array([len(example[by]) for example in examples], np.int64)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class BatchSpec(NamedTuple):
    """How examples become arrays of one shape.

    Attributes:
      boundaries: lengths that batches may have, increasing.
      tokens_per_batch: rows * length <= tokens_per_batch, padding counted, over all processes.
      pad_values: what padding is, by the name of the array; 0 where it is not said.
      fixed_lengths: of arrays whose length has nothing to do with that of the example, by their names.
    """

    boundaries: Sequence[int]
    tokens_per_batch: int
    pad_values: Mapping[str, int] = {}
    fixed_lengths: Mapping[str, int] = {}

    def collate(self, examples: ExampleSource, members: Sequence[int] | np.ndarray, bucket: Bucket) -> Batch:
        """The examples `members`, padding behind and below, as arrays [bucket.rows, length, ...] and [bucket.rows]."""
        chosen = [examples[int(index)] for index in members]
        batch = {}
        # A shard of a batch that has no example of its own still has the arrays that examples have.
        for name, array in (chosen[0] if chosen else examples[0]).items():
            pad_value = self.pad_values.get(name, 0)
            if not array.ndim:
                batch[name] = np.full(bucket.rows, pad_value, array.dtype)
                batch[name][: len(chosen)] = [example[name] for example in chosen]
                continue
            length = self.fixed_lengths.get(name, bucket.length)
            batch[name] = np.full((bucket.rows, length, *array.shape[1:]), pad_value, array.dtype)
            for row, example in enumerate(chosen):
                batch[name][row, : len(example[name])] = example[name]
        return batch


def train_batches(
    make_epoch: Callable[[int], ExampleSource],
    spec: BatchSpec,
    options: LoaderOptions,
    *,
    prefetch: int = 8,
) -> grain.IterDataset[Batch]:
    """Endless training batches: every example of an epoch once, then those of the next one.

    In one batch of an epoch the last rows may be all padding.

    Args:
      make_epoch: the examples of the epoch with this number; the same number, the same examples.
      spec: the shapes.
      options: the order, and how devices and processes share; `length_multiple` is not for these batches.
      prefetch: how many batches a thread prepares ahead, 0 for none.

    Returns:
      A data set whose iterators have a small JSON state, that of the last batch taken, whatever was prefetched.

    Raises:
      UserError: if a batch cannot hold `batch_multiple` rows, or they cannot be shared equally; while iterating, if an
        epoch has no examples or examples longer than the last boundary.
    """
    buckets = training_buckets(spec.boundaries, spec.tokens_per_batch, options.batch_multiple, options.shard)
    return _EpochDataset(make_epoch, spec, buckets, seed=options.seed, shard=options.shard, prefetch=prefetch)


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


class _EpochDataset(grain.IterDataset[Batch]):
    """The batches of all epochs, one after the other, without end."""

    def __init__(
        self,
        make_epoch: Callable[[int], ExampleSource],
        spec: BatchSpec,
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        shard: ProcessShard,
        prefetch: int,
    ):
        super().__init__()
        self._make_epoch, self._spec, self._buckets = make_epoch, spec, buckets
        self._seed, self._shard, self._prefetch = seed, shard, prefetch

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_EpochIterator(self), self._prefetch)

    def load(self, number: int) -> "_Epoch":
        """Makes and plans an epoch."""
        examples = self._make_epoch(number)
        if not len(examples):
            raise UserError("there are no examples to train on")
        lengths = examples.lengths
        _check_lengths(lengths, self._buckets[-1].length)
        rng = np.random.default_rng((self._seed, number))
        order = rng.permutation(len(examples))
        plan = [(bucket, order[members]) for bucket, members in plan_batches(lengths[order], self._buckets)]
        return _Epoch(examples, [plan[place] for place in rng.permutation(len(plan))])

    def collate(self, epoch: "_Epoch", number: int) -> Batch:
        """The examples of one batch of an epoch that belong to this process."""
        bucket, members = epoch.plan[number]
        mine = self._shard.block(bucket.rows)
        return self._spec.collate(epoch.examples, members[mine], Bucket(bucket.length, mine.stop - mine.start))


class _Epoch(NamedTuple):
    examples: ExampleSource
    plan: list[tuple[Bucket, np.ndarray]]


class _EpochIterator(grain.DatasetIterator[Batch]):
    """Remembers the next batch as (epoch, batch); an epoch is made again when the iteration is resumed inside it."""

    def __init__(self, dataset: _EpochDataset):
        super().__init__()
        self._dataset = dataset
        self._epoch = self._batch = 0
        self._expected_examples: int | None = None
        self._loaded: _Epoch | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._loaded is None:
            self._loaded = self._dataset.load(self._epoch)
            self._check(len(self._loaded.examples))
        batch = self._dataset.collate(self._loaded, self._batch)
        self._batch += 1
        if self._batch == len(self._loaded.plan):
            self._epoch, self._batch, self._loaded = self._epoch + 1, 0, None
        return batch

    def get_state(self) -> dict[str, int]:
        """Where the next batch is and, inside an epoch, how many examples that has."""
        state = {"epoch": self._epoch, "batch": self._batch}
        return state if self._loaded is None else state | {"num_examples": len(self._loaded.examples)}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues with the batch that would have come next when `get_state` gave `state`."""
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._expected_examples, self._loaded = state.get("num_examples"), None

    def _check(self, num_examples: int) -> None:
        if self._expected_examples not in (None, num_examples):
            raise UserError(
                f"the checkpoint belongs to an epoch of {self._expected_examples:,} examples, but there are "
                f"{num_examples:,}: bring the old data back or train in a new working directory"
            )
        self._expected_examples = None
