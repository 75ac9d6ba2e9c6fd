"""Batches of sentences of about the same length, cut by a budget of tokens (Vaswani et al., 2017, section 5.1).

The examples of an epoch, shuffled, are taken a sort buffer at a time. In the buffer they are sorted into buckets by
length, each bucket is cut into batches of one static shape, and the batches are shuffled. A buffer depends on nothing
but the seed and its number, so the state of the iterator is a few integers, and every process computes the same plan
and takes its own rows.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import grain
import grain.experimental
import numpy as np

from tfx_jax.data.prefetch import PrefetchedIterator
from tfx_jax.data.process_shard import WHOLE, ProcessShard
from tfx_jax.data.text import PairSource, get_pairs
from tfx_jax.data.tokenizer import EOS_ID, PAD_ID, Tokenizer
from tfx_jax.errors import UserError

Batch = dict[str, np.ndarray]

_CHUNK = 4096  # texts tokenized in one call


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a batch, [rows, length]."""

    length: int
    rows: int


def batches(
    pairs: PairSource,
    tokenizer: Tokenizer,
    *,
    tokens_per_batch: int,
    max_length: int,
    seed: int,
    boundaries: Sequence[int] | None = None,
    sort_buffer: int = 65_536,
    batch_multiple: int = 1,
    length_multiple: int = 1,
    shard: ProcessShard = WHOLE,
    prefetch: int = 32,
) -> grain.IterDataset[Batch]:
    """Endless training batches: every pair once an epoch, in an order that differs from epoch to epoch.

    Each batch is {"source": [rows, length], "target": [rows, length]}, int32; both sides end with EOS_ID, the rest is
    PAD_ID. The model prepends BOS_ID by shifting the target. In one batch of a buffer the last rows may be all padding.

    Args:
      pairs: random access to the text.
      tokenizer: one tokenizer for both sides.
      tokens_per_batch: rows * length <= tokens_per_batch, padding counted, over all processes.
      max_length: longest side, EOS_ID included. Longer pairs, and those with a side of no token at all, are skipped and
        counted in the state of the iterator, as "skipped".
      seed: decides the order of everything.
      boundaries: the lengths that batches may have, increasing; `length_boundaries(max_length)` by default.
      sort_buffer: how many examples, at most, are sorted together. More means less padding, above all with large
        batches.
      batch_multiple: rows are a multiple of it: the number of shards that devices divide the rows into.
      length_multiple: likewise of lengths, for devices that divide the positions; without effect on given `boundaries`.
      shard: which block of the rows of each batch this process gets. The plan does not depend on it.
      prefetch: how many batches a thread prepares ahead, 0 for none; a few dozen cover the loading of the next buffer.

    Returns:
      A dataset whose iterators have a small JSON state, that of the last batch taken, whatever was prefetched.

    Raises:
      UserError: if there are no pairs, if a batch cannot hold `batch_multiple` rows of the longest length, or if the
        rows cannot be shared equally.
    """
    if len(pairs) == 0:
        raise UserError("there are no training pairs")
    if boundaries is None:
        boundaries = length_boundaries(max_length, length_multiple)
    if list(boundaries) != sorted(set(boundaries)) or boundaries[-1] < max_length:
        raise UserError(f"boundaries={tuple(boundaries)} must increase up to max_length={max_length} or more")
    return _BucketedDataset(
        pairs,
        tokenizer,
        buckets=training_buckets(boundaries, tokens_per_batch, batch_multiple, shard),
        max_length=max_length,
        seed=seed,
        sort_buffer=sort_buffer,
        shard=shard,
        prefetch=prefetch,
    )


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
      UserError: if `batch_multiple` rows of the longest length exceed the budget, or cannot be shared equally.
    """
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


class EncodedPairs:
    """Tokens of pairs, to evaluate on: random access to {"source" [S], "target" [T]}, int32, each with its EOS_ID.

    Attributes:
      lengths: of the longer side of each, [number of pairs] int.
    """

    def __init__(self, pairs: PairSource, tokenizer: Tokenizer, *, max_length: int | None = None):
        """Tokenizes pairs, a list of {"source": str, "target": str} or any source of them; an empty side is fine.

        Args:
          pairs: the text.
          tokenizer: one tokenizer for both sides.
          max_length: longer sides are cut to so many tokens, EOS_ID included, as no line may be lost; None cuts none.
        """
        sides = _encode(pairs, range(len(pairs)), tokenizer, max_length)
        self.lengths = _longer_side(sides)
        self._sides = {side: (ids, np.append(0, np.cumsum(lengths))) for side, (ids, lengths) in sides.items()}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {side: ids[edges[index] : edges[index + 1]] for side, (ids, edges) in self._sides.items()}


class _Sequences(NamedTuple):
    """Many short lists of ids in one array: a buffer of Python lists would take ten times the memory."""

    ids: np.ndarray  # [sum of lengths] int32
    lengths: np.ndarray  # [number of sequences] int64

    @classmethod
    def pack(cls, sequences: list[list[int]], max_length: int | None) -> "_Sequences":
        for ids in sequences:
            if max_length is not None:
                del ids[max_length - 1 :]
            ids.append(EOS_ID)
        lengths = np.array([len(ids) for ids in sequences], np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(sequences), np.int32, count=lengths.sum()), lengths)

    def pad(self, members: np.ndarray, rows: int, length: int) -> np.ndarray:
        """A row for each member, PAD_ID behind it and in the rows that are left, [rows, length] int32."""
        starts = np.cumsum(self.lengths) - self.lengths
        columns = np.arange(length)
        inside = columns < self.lengths[members, np.newaxis]
        padded = np.full((rows, length), PAD_ID, np.int32)
        padded[: len(members)][inside] = self.ids[(starts[members, np.newaxis] + columns)[inside]]
        return padded


class _BucketedDataset(grain.IterDataset[Batch]):
    """The batches of all sort buffers, one after the other, without end."""

    def __init__(
        self,
        pairs: PairSource,
        tokenizer: Tokenizer,
        *,
        buckets: tuple[Bucket, ...],
        max_length: int,
        seed: int,
        sort_buffer: int,
        shard: ProcessShard,
        prefetch: int,
    ):
        super().__init__()
        self._pairs, self._tokenizer = pairs, tokenizer
        self._buckets, self._max_length, self._seed = buckets, max_length, seed
        self._shard, self._prefetch = shard, prefetch
        # Buffers end with the epoch, or a sentence could meet itself in a batch; equal ones, or the last could be tiny.
        self.num_pairs = len(pairs)
        self._buffers_per_epoch = math.ceil(self.num_pairs / sort_buffer)

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return PrefetchedIterator(_BucketedIterator(self), self._prefetch)

    def load_buffer(self, number: int) -> "_SortBuffer":
        """Reads, tokenizes and plans the buffer with this number, counted from the start of training."""
        epoch, part = divmod(number, self._buffers_per_epoch)
        begin, end = (self.num_pairs * edge // self._buffers_per_epoch for edge in (part, part + 1))
        indices = _shuffled_indices(self.num_pairs, self._seed, epoch, range(begin, end))
        examples = _encode(self._pairs, indices, self._tokenizer)
        lengths = _longer_side(examples)
        shorter = np.minimum(examples["source"].lengths, examples["target"].lengths)
        keep = np.flatnonzero((lengths <= self._max_length) & (shorter > 1))  # 1: nothing but EOS_ID
        if not keep.size:
            raise UserError(
                f"of {len(indices)} training pairs in a row, none has 1 to {self._max_length - 1} tokens on both "
                "sides: look at the text, or raise max_length"
            )
        plan = [(bucket, keep[members]) for bucket, members in plan_batches(lengths[keep], self._buckets)]
        order = np.random.default_rng((self._seed, number)).permutation(len(plan))
        return _SortBuffer(examples, [plan[place] for place in order], num_skipped=len(indices) - len(keep))

    def collate(self, buffer: "_SortBuffer", number: int) -> Batch:
        """The rows of one batch of a buffer that belong to this process."""
        return _collate(buffer.examples, *buffer.plan[number], self._shard)


class _SortBuffer(NamedTuple):
    """Tokenized examples and the batches they will form."""

    examples: dict[str, _Sequences]
    plan: list[tuple[Bucket, np.ndarray]]
    num_skipped: int


class _BucketedIterator(grain.DatasetIterator[Batch]):
    """Remembers the next batch as (buffer, batch); a buffer is loaded again when the iteration is resumed inside it."""

    def __init__(self, dataset: _BucketedDataset):
        super().__init__()
        self._dataset = dataset
        self._buffer = self._batch = self._skipped = 0
        self._loaded: _SortBuffer | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._loaded is None:
            self._loaded = self._dataset.load_buffer(self._buffer)
        batch = self._dataset.collate(self._loaded, self._batch)
        self._batch += 1
        if self._batch == len(self._loaded.plan):
            self._buffer, self._batch, self._skipped = self._buffer + 1, 0, self._skipped + self._loaded.num_skipped
            self._loaded = None
        return batch

    def get_state(self) -> dict[str, int]:
        """Where the next batch is, how many pairs were skipped in the buffers before, and how many pairs there are."""
        num_pairs = self._dataset.num_pairs
        return {"buffer": self._buffer, "batch": self._batch, "skipped": self._skipped, "num_pairs": num_pairs}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues with the batch that would have come next when `get_state` gave `state`.

        Raises:
          UserError: if the state belongs to another number of pairs.
        """
        if state["num_pairs"] != self._dataset.num_pairs:
            raise UserError(
                f"the checkpoint belongs to {state['num_pairs']:,} training pairs, but there are "
                f"{self._dataset.num_pairs:,}: bring the old data back or train in a new working directory"
            )
        self._buffer, self._batch, self._skipped = state["buffer"], state["batch"], state["skipped"]
        self._loaded = None


def _shuffled_indices(size: int, seed: int, epoch: int, places: range) -> list[int]:
    """A part of the permutation of an epoch, computed without the rest of it: sources may be endless in practice."""
    epoch_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    shuffle = grain.experimental.index_shuffle
    return [shuffle(place, max_index=size - 1, seed=epoch_seed, rounds=4) for place in places]


def _encode(
    pairs: PairSource, indices: Sequence[int], tokenizer: Tokenizer, max_length: int | None = None
) -> dict[str, _Sequences]:
    """The ids of both sides, each with EOS_ID at the end; longer sides are cut to `max_length`."""
    chunks = {side: [_Sequences.pack([], max_length)] for side in ("source", "target")}  # there may be no pairs
    for start in range(0, len(indices), _CHUNK):
        found = get_pairs(pairs, indices[start : start + _CHUNK])
        for side, packed in chunks.items():
            packed.append(_Sequences.pack(tokenizer.encode_batch([pair[side] for pair in found]), max_length))
    return {side: _Sequences(*map(np.concatenate, zip(*packed, strict=True))) for side, packed in chunks.items()}


def _longer_side(examples: dict[str, _Sequences]) -> np.ndarray:
    return np.maximum(examples["source"].lengths, examples["target"].lengths)


def _collate(examples: dict[str, _Sequences], bucket: Bucket, members: np.ndarray, shard: ProcessShard) -> Batch:
    """The rows of one batch that belong to this process."""
    rows = range(bucket.rows)[shard.block(bucket.rows)]
    mine = members[rows.start : rows.stop]
    return {side: sequences.pad(mine, len(rows), bucket.length) for side, sequences in examples.items()}
