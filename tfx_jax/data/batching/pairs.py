"""Sentence pairs as examples: training reads them one sort buffer at a time, evaluation all at once.

The shuffled pairs of an epoch are split into buffers. Each buffer is tokenized when it is needed and is a portion for
`tfx_jax.data.batching.batches`. A buffer depends only on the seed and its number.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import cast

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
    bpe_dropout: float = 0.0,
    prefetch: int = 32,
) -> grain.IterDataset[Batch]:
    """Returns endless training batches: every pair once per epoch, in an order that differs between epochs.

    Each batch is {"source": [rows, length], "target": [rows, length]}, int32. Both sides end with the tokenizer's EOS,
    followed by its padding. The model shifts the target right, after its start token.

    Args:
      pairs: random access to the text.
      tokenizer: one tokenizer for both sides.
      options: seed, shapes and shard of this process.
      tokens_per_batch: upper limit of rows * length, padding included, over all processes.
      max_length: longest side in tokens, EOS included; longer pairs, and pairs with an empty side, are skipped.
      sort_buffer: maximum number of pairs that are sorted by length together, see `PairBuffers`.
      bpe_dropout: probability that a merge is left out, see `PairBuffers`.
      prefetch: number of batches a thread prepares ahead, 0 for none; some dozens hide the loading of the next buffer.

    Returns:
      A data set whose iterators can be saved and restored, see `train_batches`.

    Raises:
      UserError: if there are no pairs, `tokens_per_batch` does not fit, see `train_batches`, or the tokenizer has no
        merges that could be left out.
    """
    buffers = PairBuffers(
        pairs,
        tokenizer,
        max_length=max_length,
        seed=options.seed,
        sort_buffer=sort_buffer,
        bpe_dropout=bpe_dropout,
    )
    boundaries = length_boundaries(max_length, options.length_multiple)
    spec = BatchSpec(boundaries, tokens_per_batch, dict.fromkeys(("source", "target"), cast(int, tokenizer.pad_id)))
    return train_batches(buffers, spec, options, num_examples=len(pairs), is_shuffled=True, prefetch=prefetch)


class EncodedPairs:
    """Tokenized pairs, an `ExampleSource` of {"source" [S], "target" [T]}, int32, each with EOS.

    All tokens are in one array: a buffer of Python lists would take ten times the memory.

    Attributes:
      lengths: length of the longer side of each pair, [number of pairs] int; -1 for pairs that training skips.
    """

    def __init__(self, ids: np.ndarray, sizes: np.ndarray, lengths: np.ndarray):
        """Wraps the output of `encode_pairs` or `PairBuffers`.

        Args:
          ids: tokens of all sources and then of all targets, [number of tokens] int32.
          sizes: number of tokens of each source and target, [number of pairs, 2] int.
          lengths: see the attribute.
        """
        # Indices after the last token of source and target, [pairs, 2]. The cumulative sum runs over all sources and
        # then over all targets, as in `ids`.
        ends = np.cumsum(sizes.T).reshape(2, -1).T
        self._edges = np.concatenate([ends - sizes, ends], axis=1)  # begins and ends, [pairs, 4]
        self._ids, self.lengths = ids, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        source_begin, target_begin, source_end, target_end = self._edges[index].tolist()
        return {"source": self._ids[source_begin:source_end], "target": self._ids[target_begin:target_end]}


def encode_pairs(pairs: PairSource, tokenizer: HFTokenizer, *, max_length: int | None = None) -> EncodedPairs:
    """Tokenizes pairs for evaluation; sides may be empty.

    Args:
      pairs: a list of {"source": str, "target": str} or any other source of pairs.
      tokenizer: one tokenizer for both sides.
      max_length: longer sides are cut to this number of tokens, EOS included, because evaluation may not drop lines;
        None for no limit.
    """
    eos_id = cast(int, tokenizer.eos_id)
    ids, sizes = _encode(pairs, range(len(pairs)), tokenizer.encode_batch, eos_id=eos_id, max_length=max_length)
    return EncodedPairs(ids, sizes, sizes.max(axis=1))


class PairBuffers:
    """The sort buffers of all epochs by number: the function `make_portion` of `train_batches`."""

    def __init__(
        self,
        pairs: PairSource,
        tokenizer: HFTokenizer,
        *,
        max_length: int,
        seed: int,
        sort_buffer: int = 65_536,
        bpe_dropout: float = 0.0,
    ):
        """Stores the arguments; nothing is read.

        Args:
          pairs: random access to the text.
          tokenizer: one tokenizer for both sides.
          max_length: longest side in tokens, EOS included. Longer pairs, and pairs with an empty side, are skipped.
          seed: seed of the assignment of pairs to buffers.
          sort_buffer: maximum number of pairs that are sorted together. More pairs mean less padding, above all with
            large batches.
          bpe_dropout: probability that a merge is left out, so that each epoch splits words differently, see
            `HFTokenizer.sample_batch`; 0 for none.

        Raises:
          UserError: if there are no pairs, or the tokenizer has no merges that could be left out.
        """
        if not len(pairs):
            raise UserError("there are no training pairs")
        if bpe_dropout:
            tokenizer.sample_batch([], bpe_dropout=bpe_dropout, rng=np.random.default_rng())  # raises here if ever
        self._pairs, self._tokenizer, self._max_length, self._seed = pairs, tokenizer, max_length, seed
        self._bpe_dropout = bpe_dropout
        # A buffer belongs to one epoch, so that no batch has a pair twice. Equal sizes avoid a tiny last buffer.
        self._buffers_per_epoch = math.ceil(len(pairs) / sort_buffer)

    def __call__(self, number: int) -> EncodedPairs:
        """Reads and tokenizes the buffer with this number, counted over all epochs; its pairs are in random order.

        Raises:
          UserError: if all pairs are too long or have an empty side.
        """
        epoch, buffer = divmod(number, self._buffers_per_epoch)
        begin = len(self._pairs) * buffer // self._buffers_per_epoch
        end = len(self._pairs) * (buffer + 1) // self._buffers_per_epoch
        indices = _shuffled_indices(len(self._pairs), self._seed, epoch, range(begin, end))
        encode = self._tokenizer.encode_batch
        if self._bpe_dropout:
            rng = np.random.default_rng((self._seed, number))
            encode = functools.partial(self._tokenizer.sample_batch, bpe_dropout=self._bpe_dropout, rng=rng)
        ids, sizes = _encode(self._pairs, indices, encode, eos_id=cast(int, self._tokenizer.eos_id))
        longer, shorter = sizes.max(axis=1), sizes.min(axis=1)
        is_kept = (longer <= self._max_length) & (shorter > 1)  # a side of size 1 is only EOS
        if not is_kept.any():
            raise UserError(
                f"of {len(indices)} training pairs in a row, none has 1 to {self._max_length - 1} tokens on both "
                "sides: check the text, or raise max_length"
            )
        return EncodedPairs(ids, sizes, np.where(is_kept, longer, -1))


def _encode(
    pairs: PairSource,
    indices: Sequence[int],
    encode: Callable[[list[str]], list[list[int]]],
    *,
    eos_id: int,
    max_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes the pairs at `indices` by `encode`, adds EOS to each side, and cuts each side to `max_length`.

    Returns:
      (ids, sizes), see `EncodedPairs`.
    """
    # Begin with an empty chunk, because `np.concatenate` needs at least one array.
    chunks = {side: [_pack([], eos_id, max_length)] for side in ("source", "target")}
    for start in range(0, len(indices), _CHUNK):
        chunk = get_pairs(pairs, indices[start : start + _CHUNK])
        for side, packed in chunks.items():  # one side at a time, to have fewer Python lists alive
            packed.append(_pack(encode([pair[side] for pair in chunk]), eos_id, max_length))
    # Join the ids of all chunks of a side, and so their sizes.
    sources, source_sizes = map(np.concatenate, zip(*chunks["source"], strict=True))
    targets, target_sizes = map(np.concatenate, zip(*chunks["target"], strict=True))
    return np.concatenate([sources, targets]), np.stack([source_sizes, target_sizes], axis=1)


def _pack(sequences: list[list[int]], eos_id: int, max_length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Adds EOS to each sequence, in place, and cuts it to `max_length` ids, EOS included.

    Returns:
      (ids of all sequences, [number of ids] int32; number of ids of each sequence, [number of sequences] int64).
    """
    for ids in sequences:
        if max_length is not None:
            del ids[max_length - 1 :]
        ids.append(eos_id)
    sizes = np.fromiter(map(len, sequences), np.int64, len(sequences))
    return np.fromiter(itertools.chain.from_iterable(sequences), np.int32, count=sizes.sum()), sizes


def _shuffled_indices(size: int, seed: int, epoch: int, positions: range) -> list[int]:
    """Returns the indices at some positions of an epoch's random permutation of 0 .. size - 1.

    The rest of the permutation is not computed, because a source may be huge.
    """
    epoch_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    shuffle = grain.experimental.index_shuffle
    return [shuffle(position, max_index=size - 1, seed=epoch_seed, rounds=4) for position in positions]
