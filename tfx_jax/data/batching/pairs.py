"""Sentence pairs as examples: a training reads them a sort buffer at a time, an evaluation all at once.

The pairs of an epoch, shuffled, are tokenized a buffer at a time, and each buffer is a portion for
`tfx_jax.data.batching.batches`. A buffer depends on nothing but the seed and its number.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import grain
import grain.experimental
import numpy as np

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, LoaderOptions, length_boundaries, train_batches
from tfx_jax.data.sources.text import PairSource, get_pairs
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError

_CHUNK = 4096  # pairs tokenized in one call


def pair_batches(
    pairs: PairSource,
    tokenizer: HFTokenizer,
    options: LoaderOptions,
    *,
    tokens_per_batch: int,
    max_length: int,
    sort_buffer: int = 65_536,
    prefetch: int = 32,
) -> grain.IterDataset[Batch]:
    """Endless training batches: every pair once an epoch, in an order that differs from epoch to epoch.

    Each batch is {"source": [rows, length], "target": [rows, length]}, int32; both sides end with the end of sentence,
    the rest is padding, both the tokenizer's. The model shifts the target behind its start token.

    Args:
      pairs: random access to the text.
      tokenizer: one tokenizer for both sides.
      options: the order, and how devices and processes share.
      tokens_per_batch: rows * length <= tokens_per_batch, padding counted, over all processes.
      max_length: see `PairBuffers`.
      sort_buffer: likewise.
      prefetch: how many batches a thread prepares ahead, 0 for none; a few dozen cover the loading of the next buffer.

    Returns:
      What `train_batches` gives.

    Raises:
      UserError: as `PairBuffers` and `train_batches` do.
    """
    buffers = PairBuffers(pairs, tokenizer, max_length=max_length, seed=options.seed, sort_buffer=sort_buffer)
    boundaries = length_boundaries(max_length, options.length_multiple)
    spec = BatchSpec(boundaries, tokens_per_batch, dict.fromkeys(("source", "target"), cast(int, tokenizer.pad_id)))
    return train_batches(buffers, spec, options, num_examples=len(pairs), is_shuffled=True, prefetch=prefetch)


class EncodedPairs:
    """Tokens of pairs, an `ExampleSource`: {"source" [S], "target" [T]}, int32, each with its end.

    They are in one array: a buffer of Python lists would take ten times the memory.

    Attributes:
      lengths: of the longer side of each, [number of pairs] int; -1 for one that a training is to skip.
    """

    def __init__(self, ids: np.ndarray, sizes: np.ndarray, lengths: np.ndarray):
        """Wraps the output of `encode_pairs` or `PairBuffers`.

        Args:
          ids: of all sources and then of all targets, [number of tokens] int32.
          sizes: how many tokens each side has, [number of pairs, 2] int.
          lengths: see the attribute.
        """
        ends = np.cumsum(sizes.T).reshape(2, -1).T
        self._ids, self._edges, self.lengths = ids, np.concatenate([ends - sizes, ends], axis=1), lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        source, target, source_end, target_end = self._edges[index].tolist()
        return {"source": self._ids[source:source_end], "target": self._ids[target:target_end]}


def encode_pairs(pairs: PairSource, tokenizer: HFTokenizer, *, max_length: int | None = None) -> EncodedPairs:
    """Tokenizes pairs to evaluate on, a list of {"source": str, "target": str} or any source; an empty side is fine.

    Args:
      pairs: the text.
      tokenizer: one tokenizer for both sides.
      max_length: longer sides are cut to so many tokens, the end included, as no line may be lost; None cuts none.
    """
    ids, sizes = _encode(pairs, range(len(pairs)), tokenizer, max_length)
    return EncodedPairs(ids, sizes, sizes.max(axis=1))


class PairBuffers:
    """The sort buffers of all epochs by number, as `train_batches` takes them."""

    def __init__(
        self, pairs: PairSource, tokenizer: HFTokenizer, *, max_length: int, seed: int, sort_buffer: int = 65_536
    ):
        """Reads nothing yet.

        Args:
          pairs: random access to the text.
          tokenizer: one tokenizer for both sides.
          max_length: longest side, the end included. Longer pairs, and those with a side of no token, are skipped.
          seed: decides which pairs are in which buffer.
          sort_buffer: how many pairs, at most, are sorted together. More means less padding, above all with large
            batches.

        Raises:
          UserError: if there are no pairs.
        """
        if not len(pairs):
            raise UserError("there are no training pairs")
        self._pairs, self._tokenizer, self._max_length, self._seed = pairs, tokenizer, max_length, seed
        # Buffers end with the epoch, or a sentence could meet itself in a batch; equal ones, or the last could be tiny.
        self._buffers_per_epoch = math.ceil(len(pairs) / sort_buffer)

    def __call__(self, number: int) -> EncodedPairs:
        """Reads and tokenizes the buffer with this number, counted from the start of training; its order is random.

        Raises:
          UserError: if all pairs are too long or have an empty side.
        """
        epoch, part = divmod(number, self._buffers_per_epoch)
        begin, end = (len(self._pairs) * edge // self._buffers_per_epoch for edge in (part, part + 1))
        indices = _shuffled_indices(len(self._pairs), self._seed, epoch, range(begin, end))
        ids, sizes = _encode(self._pairs, indices, self._tokenizer)
        longer, shorter = sizes.max(axis=1), sizes.min(axis=1)
        is_kept = (longer <= self._max_length) & (shorter > 1)  # 1: nothing but the end
        if not is_kept.any():
            raise UserError(
                f"of {len(indices)} training pairs in a row, none has 1 to {self._max_length - 1} tokens on both "
                "sides: look at the text, or raise max_length"
            )
        return EncodedPairs(ids, sizes, np.where(is_kept, longer, -1))


def _encode(
    pairs: PairSource, indices: Sequence[int], tokenizer: HFTokenizer, max_length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids and sizes that `EncodedPairs` takes, each side with its end; longer ones are cut to `max_length`."""
    ends: Any = tokenizer.eos_id, max_length
    chunks = {side: [_pack([], *ends)] for side in ("source", "target")}  # there may be no pairs
    for start in range(0, len(indices), _CHUNK):
        found = get_pairs(pairs, indices[start : start + _CHUNK])
        for side, packed in chunks.items():  # one after the other: twice the lists are garbage to collect
            packed.append(_pack(tokenizer.encode_batch([pair[side] for pair in found]), *ends))
    (sources, source_sizes), (targets, target_sizes) = (
        map(np.concatenate, zip(*packed, strict=True)) for packed in chunks.values()
    )
    return np.concatenate([sources, targets]), np.stack([source_sizes, target_sizes], axis=1)


def _pack(sequences: list[list[int]], eos_id: int, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """All ids one behind the other, int32, and how many each sequence has, int64."""
    for ids in sequences:
        if max_length is not None:
            del ids[max_length - 1 :]
        ids.append(eos_id)
    sizes = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return np.fromiter(itertools.chain.from_iterable(sequences), np.int32, count=sizes.sum()), sizes


def _shuffled_indices(size: int, seed: int, epoch: int, places: range) -> list[int]:
    """A part of the permutation of an epoch, computed without the rest of it: sources may be endless in practice."""
    epoch_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    shuffle = grain.experimental.index_shuffle
    return [shuffle(place, max_index=size - 1, seed=epoch_seed, rounds=4) for place in places]
