"""Batches of static shapes, for training without end and for evaluation.

A training reads numbered portions: epochs, whose examples may be made anew (text masked elsewhere, cut elsewhere,
paired with other text), or sort buffers, of which an epoch has several. A portion is a function of its number, so the
state of the iterator is a few integers. Its examples are sorted into buckets of similar length and cut into batches,
and the batches are shuffled. Every process makes the same plan and takes its own examples.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from tfx_jax.data.bucketing import Bucket, bucket_shapes, plan_batches, training_buckets
from tfx_jax.data.prefetch import PrefetchedIterator
from tfx_jax.data.process_shard import WHOLE, ProcessShard
from tfx_jax.errors import UserError

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
