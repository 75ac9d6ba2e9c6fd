"""Parallel text from files: read once to find its lines, then line by line on access, so it need not fit in memory.

A source of pairs is anything with `__len__` and `__getitem__(i) -> {"source": str, "target": str}`: the files of this
module, a generated grammar, a TFDS data set. Everything after it (tokenizing, bucketing) asks for nothing more.
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

_MANY = 4096  # pairs read in one call
_MANY_LINES = 1 << 20  # whose blanks are compared at once


class PairSource(Protocol):
    """Random access to sentence pairs."""

    def __len__(self) -> int:
        """The number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> Pair:
        """The pair with this index: {"source": str, "target": str}."""
        ...


def get_pairs(pairs: PairSource, indices: Sequence[int] | np.ndarray) -> Sequence[Pair]:
    """Reads many pairs, in one call where the source has `__getitems__` (reading records one by one is slow)."""
    if hasattr(pairs, "__getitems__"):
        return pairs.__getitems__(indices)  # pyright: ignore[reportAttributeAccessIssue]
    return [pairs[index] for index in indices]


def lines_of(pairs: PairSource, max_pairs: int | None = None) -> Iterator[str]:
    """Both sides of all pairs, to train a joint tokenizer on.

    Args:
      pairs: any source of pairs.
      max_pairs: takes only so many, evenly spaced; a million is plenty for SentencePiece, which keeps them in memory.

    >>> pairs = [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}]
    >>> list(lines_of(pairs))
    ['a', 'b', 'c', 'd']
    >>> list(lines_of(pairs, max_pairs=1))
    ['a', 'b']
    """
    count = len(pairs) if max_pairs is None else min(max_pairs, len(pairs))
    for start in range(0, count, _MANY):
        places = range(start, min(start + _MANY, count))
        for pair in get_pairs(pairs, [place * len(pairs) // count for place in places]):
            yield pair["source"]
            yield pair["target"]


def join_subwords(text: str) -> str:
    """Joins subwords marked with "@@" (Sennrich et al., 2016) to words; a mark at the very end is dropped.

    >>> join_subwords("ein spiel@@ haus aus h@@")
    'ein spielhaus aus h'
    """
    return text.replace("@@ ", "").removesuffix("@@")


class PairSubset:
    """Some of the pairs of a source, in an order of one's own."""

    def __init__(self, pairs: PairSource, indices: Sequence[int] | np.ndarray):
        """Takes the places of the pairs in `pairs`."""
        self._pairs, self._indices = pairs, np.asarray(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[int(self._indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        return get_pairs(self._pairs, self._indices[np.asarray(indices, np.int64)])


class JoinedPairs:
    """The pairs of several sources, one behind the other."""

    def __init__(self, sources: Sequence[PairSource]):
        """Takes the sources in their order."""
        self._sources, self._ends = sources, np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        places = np.asarray(indices, np.int64)
        if places.size and not (places.min() >= 0 and places.max() < len(self)):
            raise IndexError(f"there are {len(self)} pairs, and none at {places.max()}")
        number = np.searchsorted(self._ends, places, side="right")
        found: list[Pair] = [{}] * len(places)
        for source, part in enumerate(self._sources):
            mine = np.flatnonzero(number == source)
            begin = self._ends[source] - len(part)
            for place, pair in zip(mine, get_pairs(part, places[mine] - begin), strict=True):
                found[place] = pair
        return found


def join_pairs(sources: Sequence[PairSource]) -> PairSource:
    """Returns one source of the pairs of several, one behind the other.

    >>> [pair["source"] for pair in join_pairs([[{"source": "a", "target": "b"}], [{"source": "c", "target": "d"}]])]
    ['a', 'c']
    """
    return sources[0] if len(sources) == 1 else JoinedPairs(sources)


def split_pairs(pairs: PairSource, max_held_out: int) -> tuple[PairSubset, PairSubset]:
    """Sets pairs aside to evaluate on: evenly spaced, as a corpus is seldom the same from beginning to end.

    Args:
      pairs: the source.
      max_held_out: how many, but no more than a tenth.

    Returns:
      The pairs that are left, and those set aside.

    >>> left, held_out = split_pairs([{"source": str(i), "target": ""} for i in range(20)], max_held_out=5)
    >>> len(left), [pair["source"] for pair in held_out]
    (18, ['5', '15'])
    """
    size = len(pairs)
    count = min(max_held_out, size // 10)
    places = (2 * np.arange(count) + 1) * size // (2 * max(count, 1))  # the middle of each of so many stretches
    is_held_out = np.zeros(size, bool)
    is_held_out[places] = True
    return PairSubset(pairs, np.flatnonzero(~is_held_out)), PairSubset(pairs, places)


class TextPairs:
    """Pairs of lines that stay in their files, of which only the places are known.

    Attributes:
      num_dropped: how many pairs were left out because a side has no text.
    """

    def __init__(self, source: "_Side", target: "_Side", *, keep_empty: bool = False):
        """Pairs line i of `source` with line i of `target`; both must have as many lines."""
        self._sides = {"source": source, "target": target}
        self._kept = None if keep_empty else _both_with_text(source, target)
        self._count = len(source) if self._kept is None else len(self._kept)
        self.num_dropped = len(source) - self._count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Pair]:
        lines = np.asarray(indices, np.int64)
        if self._kept is not None:
            lines = self._kept[lines]
        source, target = (side.texts(lines) for side in self._sides.values())
        return [{"source": one, "target": other} for one, other in zip(source, target, strict=True)]


def read_pairs(source_path: epath.PathLike, target_path: epath.PathLike, *, keep_empty: bool = False) -> TextPairs:
    """Reads a text and its translation: two UTF-8 files with one sentence a line, in the same order.

    Args:
      source_path: plain or `.gz` file, local or `gs://`.
      target_path: the same for the other language.
      keep_empty: keeps the pairs of which a side is blank, see `tfx_jax.data.sources.lines.is_blank`. They are left
      out by
        default, as nothing is learned from them; an evaluation, where every line counts, wants them.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, and for files with different numbers of lines.
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
      UserError: for a file that cannot be read, is empty or not UTF-8, and for a line without exactly one TAB.
    """
    source, target = _scan(path, is_tsv=True)
    return _require_pairs(TextPairs(source, target, keep_empty=keep_empty), str(path))


class _Side:
    """The texts of one language; text i is what stands from `starts[i]` to `ends[i]`, without its line end.

    Attributes:
      blank: which texts show nothing, see `tfx_jax.data.sources.lines.is_blank`, [number of texts] bool.
    """

    def __init__(self, content: "_Content", starts: np.ndarray, ends: np.ndarray, blank: np.ndarray):
        self._content, self._starts, self._ends, self.blank = content, starts, ends, blank

    def __len__(self) -> int:
        return len(self._starts)

    def texts(self, lines: np.ndarray) -> list[str]:
        starts, ends = self._starts[lines].tolist(), self._ends[lines].tolist()
        return [data.rstrip(b"\r\n").decode() for data in self._content.read(starts, ends)]


class _Content:
    """The bytes of a file by their places: the file itself where it is plain and local, else an unpacked copy."""

    def __init__(self, path: epath.PathLike):
        self._path, self._copy, self._size = path, None, 0
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
        """Takes what follows in the file; returns where it begins."""
        place = self._size
        if self._copy is not None:
            self._copy.write(data)
        self._size += len(data)
        return place

    def read(self, starts: list[int], ends: list[int]) -> list[bytes]:
        """The bytes from each start to its end.

        Raises:
          UserError: if another program has written to the file since it was opened.
        """
        found = [os.pread(self._file, end - start, start) for start, end in zip(starts, ends, strict=True)]
        if self._current_version() != self._version:
            raise UserError(f"{self._path} was changed while it was in use: start again, and leave it as it is")
        return found

    def _current_version(self) -> tuple[int, int] | None:
        """Changes with the content of a file of others; a copy is ours alone."""
        if self._copy is not None:
            return None
        found = os.fstat(self._file)
        return found.st_mtime_ns, found.st_size


def _scan(path: epath.PathLike, *, is_tsv: bool = False) -> tuple[_Side, ...]:
    """Reads and checks a whole file once; returns its lines, or both sides of them."""
    content, columns = None, [[DiskArray(dtype) for dtype in (np.int64, np.int64, bool)] for _ in range(1 + is_tsv)]
    for block in read_blocks(path):
        content = content or _Content(path)
        ends = _positions(block.data, "\n") + 1
        if not block.data.endswith(b"\n"):
            ends = np.append(ends, len(block.data))
        starts = np.append(0, ends[:-1])
        tabs = _single_tabs(block, ends, path) if is_tsv else ends
        place = content.append(block.data)
        for column, begin, end in zip(columns, (starts, tabs + 1), (tabs, ends), strict=False):
            column[0].append(begin + place)
            column[1].append(end + place)
            column[2].append(_blank(block.data, begin, end))
    assert content is not None  # an empty file is an error
    return tuple(_Side(content, *(array.mapped() for array in column)) for column in columns)


def _single_tabs(block: Block, ends: np.ndarray, path: epath.PathLike) -> np.ndarray:
    """Where the TAB of each line stands.

    Raises:
      UserError: for a line without exactly one.
    """
    tabs = _positions(block.data, "\t")
    num_tabs = np.diff(np.searchsorted(tabs, ends), prepend=0)
    if np.any(num_tabs != 1):
        line = int(np.argmax(num_tabs != 1))
        raise UserError(
            f"{path}, line {block.number + line}: {num_tabs[line]} TABs; a line must be the source, one TAB, the target"
        )
    return tabs


def _positions(data: bytes, character: str) -> np.ndarray:
    """Where an ASCII character stands in `data`, int64."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == ord(character))


def _blank(data: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which of some texts are blank, see `is_blank`, [number of texts] bool."""
    # A blank text begins with white space, a control character or outside ASCII: its first byte settles most.
    first = np.frombuffer(data, np.uint8)[np.minimum(starts, len(data) - 1)]
    blank = (first <= ord(" ")) | (first >= 0x7F)
    for index in np.flatnonzero(blank & (first != ord("\n"))):
        blank[index] = is_blank(data[starts[index] : ends[index]].decode())
    return blank


def _both_with_text(source: _Side, target: _Side) -> np.ndarray:
    """The pairs of which neither side is blank, in their order."""
    kept = DiskArray(np.int64)
    for start in range(0, len(source), _MANY_LINES):
        part = slice(start, start + _MANY_LINES)
        kept.append(start + np.flatnonzero(~(source.blank[part] | target.blank[part])))
    return kept.mapped()


def _require_pairs(pairs: TextPairs, name: str) -> TextPairs:
    if len(pairs) == 0:
        raise UserError(f"{name}: none of the {pairs.num_dropped:,} pairs has text on both sides")
    return pairs
