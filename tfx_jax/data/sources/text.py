"""Parallel text in files, which need not fit into memory: one scan finds the lines, which are then read on access.

A source of pairs is anything with `__len__` and `__getitem__(i) -> {"source": str, "target": str}`: the files of this
module, a generated grammar, a TFDS data set. Later stages (tokenizing, bucketing) need nothing else.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from etils import epath

from tfx_jax.data.sources.disk_array import DiskArray, UnnamedFile
from tfx_jax.data.sources.lines import BYTE_ORDER_MARK, Block, is_blank, is_gzip, read_blocks
from tfx_jax.errors import UserError
from tfx_jax.files import is_local

Pair = dict[str, str]

_PAIRS_PER_READ = 4096
_LINES_PER_CHECK = 1 << 20  # lines whose blank flags are compared in one call


class PairSource(Protocol):
    """Random access to sentence pairs."""

    def __len__(self) -> int:
        """Returns the number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> Pair:
        """Returns a pair, {"source": str, "target": str}."""
        ...


def get_pairs(pairs: PairSource, indices: Sequence[int] | np.ndarray) -> Sequence[Pair]:
    """Returns several pairs, in one call if the source has `__getitems__`, because single reads may be slow."""
    if hasattr(pairs, "__getitems__"):
        return pairs.__getitems__(indices)  # pyright: ignore[reportAttributeAccessIssue]
    return [pairs[index] for index in indices]


def lines_of(pairs: PairSource, max_pairs: int | None = None) -> Iterator[str]:
    """Yields source and target of pairs, all or an evenly spaced sample, for training a joint tokenizer.

    Args:
      pairs: any source of pairs.
      max_pairs: maximum number of pairs to read, evenly spaced over the source; None reads all. A million is plenty
        for SentencePiece, which keeps all lines in memory.

    >>> pairs = [{"source": letter, "target": letter.upper()} for letter in "abcd"]
    >>> list(lines_of(pairs, max_pairs=2))
    ['a', 'A', 'c', 'C']
    """
    count = len(pairs) if max_pairs is None else min(max_pairs, len(pairs))
    for start in range(0, count, _PAIRS_PER_READ):
        indices = range(start, min(start + _PAIRS_PER_READ, count))
        # Evenly spaced: `count` of all pairs, or each pair if `count` is their number.
        for pair in get_pairs(pairs, [index * len(pairs) // count for index in indices]):
            yield pair["source"]
            yield pair["target"]


def join_subwords(text: str) -> str:
    """Joins subwords marked with "@@" (Sennrich et al., 2016) to words; a mark at the end of the text is removed.

    >>> join_subwords("ein spiel@@ haus aus h@@")
    'ein spielhaus aus h'
    """
    return text.replace("@@ ", "").removesuffix("@@")


class PairSubset:
    """The pairs of a source at given indices, in that order."""

    def __init__(self, pairs: PairSource, indices: Sequence[int] | np.ndarray):
        self._pairs, self._indices = pairs, np.asarray(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[int(self._indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        return get_pairs(self._pairs, self._indices[np.asarray(indices, np.int64)])


class JoinedPairs:
    """Concatenation of several sources of pairs."""

    def __init__(self, sources: Sequence[PairSource]):
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])  # index after the last pair of each source

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        """Returns several pairs in the order of `indices`, with one read of each source."""
        requested = np.asarray(indices, np.int64)
        if requested.size and not (requested.min() >= 0 and requested.max() < len(self)):
            raise IndexError(f"indices must be in 0 .. {len(self) - 1}, got {requested.min()} to {requested.max()}")
        source_numbers = np.searchsorted(self._ends, requested, side="right")  # source of each requested pair
        pairs: list[Pair] = [{}] * len(requested)  # replaced below, in the order of `indices`
        for number, source in enumerate(self._sources):  # one read of each source
            positions = np.flatnonzero(source_numbers == number)
            begin = self._ends[number] - len(source)  # index of the source's first pair
            for position, pair in zip(positions, get_pairs(source, requested[positions] - begin), strict=True):
                pairs[position] = pair
        return pairs


def join_pairs(sources: Sequence[PairSource]) -> PairSource:
    """Returns the concatenation of several sources of pairs.

    >>> [pair["source"] for pair in join_pairs([[{"source": "a", "target": "b"}], [{"source": "c", "target": "d"}]])]
    ['a', 'c']
    """
    return sources[0] if len(sources) == 1 else JoinedPairs(sources)


def split_pairs(pairs: PairSource, max_held_out: int) -> tuple[PairSubset, PairSubset]:
    """Holds out pairs for evaluation, evenly spaced because a corpus may change from beginning to end.

    Args:
      pairs: the source.
      max_held_out: maximum number of held-out pairs; never more than a tenth of all.

    Returns:
      (remaining pairs, held-out pairs).

    >>> remaining, held_out = split_pairs([{"source": str(i), "target": ""} for i in range(20)], max_held_out=5)
    >>> len(remaining), [pair["source"] for pair in held_out]
    (18, ['5', '15'])
    """
    size = len(pairs)
    count = min(max_held_out, size // 10)
    held_out = (2 * np.arange(count) + 1) * size // (2 * max(count, 1))  # centers of `count` equal stretches
    is_held_out = np.zeros(size, bool)
    is_held_out[held_out] = True
    return PairSubset(pairs, np.flatnonzero(~is_held_out)), PairSubset(pairs, held_out)


class TextPairs:
    """Pairs of lines that stay in their files; only the offsets of lines are kept.

    Attributes:
      num_lines: number of pairs in the files.
      num_with_text: number of those without a blank side.
    """

    def __init__(self, source: "_Side", target: "_Side", *, keep_empty: bool = False):
        """Pairs line i of `source` with line i of `target`; both must have the same number of lines.

        Pairs with a blank side are dropped unless `keep_empty`.
        """
        self._sides = {"source": source, "target": target}
        with_text = _both_with_text(source, target)
        self.num_lines, self.num_with_text = len(source), len(with_text)
        self._line_numbers = None if keep_empty else with_text  # of the pairs; None means all

    def __len__(self) -> int:
        return self.num_lines if self._line_numbers is None else self.num_with_text

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        """Returns several pairs, with one read of each side."""
        lines = np.asarray(indices, np.int64)
        if self._line_numbers is not None:
            lines = self._line_numbers[lines]
        source, target = (side.texts(lines) for side in self._sides.values())
        return [{"source": text, "target": translation} for text, translation in zip(source, target, strict=True)]


def read_pairs(source_path: epath.PathLike, target_path: epath.PathLike, *, keep_empty: bool = False) -> TextPairs:
    """Reads a text and its translation from two UTF-8 files with one sentence per line, in the same order.

    Args:
      source_path: plain or `.gz` file, local or `gs://`.
      target_path: the same for the other language.
      keep_empty: whether to keep pairs with a blank side (`tfx_jax.data.sources.lines.is_blank`): needed in evaluation,
        where every line counts, but useless in training.

    Raises:
      UserError: if a file cannot be read, is empty or not UTF-8, or the files differ in their number of lines.
    """
    (source,), (target,) = _scan(source_path), _scan(target_path)
    if len(source) != len(target):
        raise UserError(
            f"{source_path} has {len(source):,} lines and {target_path} has {len(target):,}: "
            "line i of one must be the translation of line i of the other"
        )
    return _require_pairs(TextPairs(source, target, keep_empty=keep_empty), f"{source_path} and {target_path}")


def read_tsv(path: epath.PathLike, *, keep_empty: bool = False) -> TextPairs:
    """Reads pairs from one UTF-8 file, plain or `.gz`, with lines of the form source, TAB, target.

    Raises:
      UserError: if the file cannot be read, is empty or not UTF-8, or a line does not have exactly one TAB.
    """
    source, target = _scan(path, is_tsv=True)
    return _require_pairs(TextPairs(source, target, keep_empty=keep_empty), str(path))


class _Side:
    """The texts of one language: text i is bytes `starts[i]` to `ends[i] - 1` of the content, without its line end.

    Attributes:
      blank: whether each text is blank (`tfx_jax.data.sources.lines.is_blank`), [number of texts] bool.
    """

    def __init__(self, content: "_Content", starts: np.ndarray, ends: np.ndarray, blank: np.ndarray):
        self._content, self._starts, self._ends, self.blank = content, starts, ends, blank

    def __len__(self) -> int:
        return len(self._starts)

    def texts(self, lines: np.ndarray) -> list[str]:
        """Returns the texts with these indices, [number of texts] int64."""
        starts, ends = self._starts[lines].tolist(), self._ends[lines].tolist()
        return [data.rstrip(b"\r\n").decode() for data in self._content.read(starts, ends)]


class _Content:
    """Random access to the bytes of a file: a plain local file is read in place, others from an unpacked copy."""

    def __init__(self, path: epath.PathLike):
        self._path, self._copy = path, None
        self._size = 0  # bytes of the content so far, a byte order mark included
        if is_gzip(path) or not is_local(path):
            self._copy = UnnamedFile()
            self._file = self._copy.descriptor
        else:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            if os.pread(self._file, len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK:
                self._size = len(BYTE_ORDER_MARK)
        self._version = self._current_version()

    def append(self, data: bytes) -> int:
        """Adds the next bytes of the file (to the copy, if any); returns their offset."""
        offset = self._size
        if self._copy is not None:
            self._copy.write(data)
        self._size += len(data)
        return offset

    def read(self, starts: list[int], ends: list[int]) -> list[bytes]:
        """Returns the bytes from each start to its end.

        Raises:
          UserError: if another program has written to the file since it was opened.
        """
        texts = [os.pread(self._file, end - start, start) for start, end in zip(starts, ends, strict=True)]
        if self._current_version() != self._version:
            raise UserError(f"{self._path} was changed while it was in use: start again, and do not edit it meanwhile")
        return texts

    def _current_version(self) -> tuple[int, int] | None:
        """Returns modification time and size of the file; None for a private copy, which no one else changes."""
        if self._copy is not None:
            return None
        status = os.fstat(self._file)
        return status.st_mtime_ns, status.st_size


def _scan(path: epath.PathLike, *, is_tsv: bool = False) -> tuple[_Side, ...]:
    """Reads and checks a whole file once.

    Returns:
      (lines,) or, with `is_tsv`, (sources, targets), each a `_Side`.
    """
    content = None
    # Starts, ends and blank flags of the texts of each column; a plain text has one column, TSV has two.
    columns = [[DiskArray(dtype) for dtype in (np.int64, np.int64, bool)] for _ in range(1 + is_tsv)]
    for block in read_blocks(path):
        content = content or _Content(path)
        # Starts and ends of the lines, line ends included, as indices in the block.
        ends = _positions(block.data, "\n") + 1
        if not block.data.endswith(b"\n"):
            ends = np.append(ends, len(block.data))
        starts = np.append(0, ends[:-1])
        tabs = _tab_of_each_line(block, ends, path) if is_tsv else ends
        offset = content.append(block.data)
        # The first column is from the line's start to the TAB (or line end), the second one from there to the line end.
        # `strict=False` ignores the second one for plain text.
        for (column_starts, column_ends, column_blank), begin, end in zip(
            columns, (starts, tabs + 1), (tabs, ends), strict=False
        ):
            column_starts.append(begin + offset)
            column_ends.append(end + offset)
            column_blank.append(_blank(block.data, begin, end))
    assert content is not None  # because `read_blocks` raises for an empty file
    return tuple(_Side(content, *(array.mapped() for array in column)) for column in columns)


def _tab_of_each_line(block: Block, ends: np.ndarray, path: epath.PathLike) -> np.ndarray:
    """Returns where the one TAB of each line is: indices in `block.data`, [number of lines] int64.

    Args:
      block: lines of the form source, TAB, target.
      ends: index after the end of each line, [number of lines].
      path: path of the file, for messages.

    Raises:
      UserError: if a line does not have exactly one TAB.
    """
    tabs = _positions(block.data, "\t")
    # The number of TABs before the end of each line; the differences are the numbers of TABs within the lines.
    num_tabs = np.diff(np.searchsorted(tabs, ends), prepend=0)
    if np.any(num_tabs != 1):
        line = int(np.argmax(num_tabs != 1))
        raise UserError(
            f"{path}, line {block.first_line + line}: {num_tabs[line]} TABs; a line must be the source, one TAB, the "
            "target"
        )
    return tabs


def _positions(data: bytes, character: str) -> np.ndarray:
    """Returns the indices of an ASCII character in `data`, int64."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == ord(character))


def _blank(data: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns whether each text data[start:end] is blank (`is_blank`), [number of texts] bool."""
    # A blank text begins with white space, a control character or a non-ASCII one, so most texts need no further check.
    first = np.frombuffer(data, np.uint8)[np.minimum(starts, len(data) - 1)]
    blank = (first <= ord(" ")) | (first >= 0x7F)
    # Texts that begin with "\n" are empty lines and need no check either.
    for index in np.flatnonzero(blank & (first != ord("\n"))):
        blank[index] = is_blank(data[starts[index] : ends[index]].decode())
    return blank


def _both_with_text(source: _Side, target: _Side) -> np.ndarray:
    """Returns the indices of the pairs without a blank side, ascending."""
    indices = DiskArray(np.int64)
    for start in range(0, len(source), _LINES_PER_CHECK):
        part = slice(start, start + _LINES_PER_CHECK)
        has_blank_side = source.blank[part] | target.blank[part]
        indices.append(start + np.flatnonzero(~has_blank_side))
    return indices.mapped()


def _require_pairs(pairs: TextPairs, name: str) -> TextPairs:
    """Returns the pairs; raises UserError if none has text on both sides. `name` names the files in the message."""
    if not pairs.num_with_text:
        raise UserError(f"{name}: none of the {pairs.num_lines:,} pairs has text on both sides")
    return pairs
