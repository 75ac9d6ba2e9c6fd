"""Parallel text from files, read once and decoded line by line on access.

A source of pairs is anything with `__len__` and `__getitem__(i) -> {"source": str, "target": str}`: the files of this
module, a generated grammar, a TFDS data set. Everything after it (tokenizing, bucketing) asks for nothing more.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from etils import epath

from tfx_jax.errors import UserError

Pair = dict[str, str]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MANY = 4096  # pairs read in one call
_SCAN_BYTES = 1 << 24  # files are scanned in blocks, so that a scan needs little memory beside the file


class PairSource(Protocol):
    """Random access to sentence pairs."""

    def __len__(self) -> int:
        """The number of pairs."""
        ...

    def __getitem__(self, index: int, /) -> Pair:
        """The pair with this index: {"source": str, "target": str}."""
        ...


def get_pairs(pairs: PairSource, indices: Sequence[int]) -> Sequence[Pair]:
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


class JoinedPairs:
    """The pairs of several sources, one after the other.

    >>> joined = JoinedPairs([[{"source": "a", "target": "b"}], [], [{"source": "c", "target": "d"}]])
    >>> len(joined), joined[1]["source"]
    (2, 'c')
    """

    def __init__(self, sources: Sequence[PairSource]):
        """Takes the sources."""
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[which][index - int(self._ends[which - 1] if which else 0)]


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
    """Pairs of lines held as the bytes of their files and one offset a line.

    Attributes:
      num_dropped: how many pairs were left out because a side has no text.
    """

    def __init__(self, source: "_Lines", target: "_Lines", *, keep_empty: bool = False):
        """Pairs line i of `source` with line i of `target`; both must have as many lines."""
        self._source, self._target = source, target
        empty = np.zeros(len(source), bool) if keep_empty else source.blank() | target.blank()
        self.num_dropped = int(empty.sum())
        self._kept = np.flatnonzero(~empty) if self.num_dropped else range(len(source))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Pair:
        line = self._kept[index]
        return {"source": self._source[line], "target": self._target[line]}


def read_pairs(source_path: epath.PathLike, target_path: epath.PathLike, *, keep_empty: bool = False) -> TextPairs:
    """Reads a text and its translation: two UTF-8 files with one sentence a line, in the same order.

    Args:
      source_path: plain or `.gz` file, local or `gs://`.
      target_path: the same for the other language.
      keep_empty: keeps the pairs of which a side is empty or white space. They are left out by default, as nothing is
        learnt from them; an evaluation, where every line counts, wants them.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, and for files with different numbers of lines.
    """
    source, target = _read(source_path), _read(target_path)
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
    lines = _read(path)
    tabs = _positions(lines.data, "\t")
    num_tabs = np.diff(np.searchsorted(tabs, lines.edges))
    if np.any(num_tabs != 1):
        line = int(np.argmax(num_tabs != 1))
        raise UserError(
            f"{path}, line {line + 1}: {num_tabs[line]} TABs; a line must be the source, one TAB, the target"
        )
    source, target = _Lines(lines.data, lines.starts, tabs), _Lines(lines.data, tabs + 1, lines.ends)
    return _require_pairs(TextPairs(source, target, keep_empty=keep_empty), str(path))


def read_lines(path: epath.PathLike) -> list[str]:
    """Reads the lines of a UTF-8 file, plain or `.gz`; empty lines are kept.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8.
    """
    lines = _read(path)
    return [lines[index] for index in range(len(lines))]


def read_text(path: epath.PathLike) -> str:
    """Reads a UTF-8 file, plain or `.gz`, as one text, line ends included.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8.
    """
    return _read(path).data.decode()


class _Lines:
    """Lines of a text that stays one byte string; line i is `data[starts[i]:ends[i]]` without its line end."""

    def __init__(self, data: bytes, starts: np.ndarray, ends: np.ndarray):
        self.data, self.starts, self.ends = data, starts, ends

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int | np.integer) -> str:
        return self.data[self.starts[index] : self.ends[index]].rstrip(b"\r\n").decode()

    @property
    def edges(self) -> np.ndarray:
        """Where each line starts, and where the last one ends."""
        return np.append(self.starts, self.ends[-1])

    def blank(self) -> np.ndarray:
        """Which lines hold nothing but white space, [number of lines] bool."""
        # A blank line begins with white space or outside ASCII: most lines are settled by their first byte.
        first = np.frombuffer(self.data, np.uint8)[np.minimum(self.starts, len(self.data) - 1)]
        blank = (first <= ord(" ")) | (first >= 0x80)
        for index in np.flatnonzero(blank):
            blank[index] = not self[index].strip()
        return blank


def _require_pairs(pairs: TextPairs, name: str) -> TextPairs:
    if len(pairs) == 0:
        raise UserError(f"{name}: none of the {pairs.num_dropped:,} pairs has text on both sides")
    return pairs


def _read(path: epath.PathLike) -> _Lines:
    """Reads, decompresses and checks a whole file; the one place that touches the disk."""
    data = _read_bytes(epath.Path(path)).removeprefix(_BYTE_ORDER_MARK)
    if not data:
        raise UserError(f"{path} is empty")
    ends = _positions(data, "\n") + 1
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    lines = _Lines(data, np.append(0, ends[:-1]), ends)
    _check_utf8(lines, path)
    return lines


def _read_bytes(path: epath.Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory, not a text file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); a plain text must not be named .gz") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _positions(data: bytes, character: str) -> np.ndarray:
    """Where an ASCII character stands in `data`, int64."""
    everything = np.frombuffer(data, np.uint8)
    found = [
        start + np.flatnonzero(everything[start : start + _SCAN_BYTES] == ord(character))
        for start in range(0, len(data), _SCAN_BYTES)
    ]
    return np.concatenate(found)


def _check_utf8(lines: _Lines, path: epath.PathLike) -> None:
    """Decodes everything once, some whole lines at a time, so that no line fails later, in the middle of a training."""
    first = 0
    while first < len(lines):
        last = max(first + 1, int(np.searchsorted(lines.ends, lines.starts[first] + _SCAN_BYTES)))
        begin, end = lines.starts[first], lines.ends[min(last, len(lines)) - 1]
        try:
            lines.data[begin:end].decode()
        except UnicodeDecodeError as error:
            line = first + 1 + lines.data.count(b"\n", begin, begin + error.start)
            raise UserError(
                f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file, with iconv say"
            ) from None
        first = last
