"""Reads inputs in chunks: many at a time from files, one by one from a user who types lines."""

import collections
import itertools
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TextIO

from tfx_jax.data.sources.lines import BYTE_ORDER_MARK, is_gzip, read_lines
from tfx_jax.errors import UserError, printable

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters except TAB and line feed
_BLOCK = 1 << 16  # bytes per read; the capacity of a pipe


class LineReader:
    """Reads the lines of a stream in chunks and waits only if no complete line is available.

    Attributes:
      is_terminal: whether standard input is a terminal; then a prompt is written to stderr.
    """

    def __init__(
        self, stream: BinaryIO, *, pause: float = 0.05, screen: TextIO | None = None, name: str = "standard input"
    ):
        """Sets up the reader; nothing is read yet.

        Args:
          stream: a binary stream, such as standard input; one without a file descriptor is treated as a file.
          pause: seconds without input after which the available lines form a chunk. A program that writes quickly to
            a pipe makes shorter pauses.
          screen: stream for the prompt; None means stderr.
          name: name of the stream in messages.
        """
        self.name = name
        self._stream, self._pause, self._screen = stream, pause, screen or sys.stderr
        self.is_terminal = stream.isatty()
        self._lines: collections.deque[bytes] = collections.deque()
        self._pieces: list[bytes] = []  # the beginning of a line whose end has not arrived
        self._is_over = False
        self._num_taken = 0
        self._is_first = True  # whether the first line, which may begin with a byte order mark, is still to come

    def take(self, max_lines: int) -> list[str]:
        """Returns the next lines, decoded, without line ends and byte order mark; none at the end of the stream.

        Lines before one that cannot be decoded are returned first, so that they are answered; the next call raises.

        Raises:
          UserError: at a line that is not UTF-8.
        """
        if self.is_terminal and not self._is_over and not self._lines:
            self._ask("> ")
        while not self._is_over and len(self._lines) < max_lines and (not self._lines or self._has_more()):
            self._read()
        if self.is_terminal and self._is_over and not self._lines:
            self._ask("\n")
        taken: list[str] = []
        while self._lines and len(taken) < max_lines:
            try:
                taken.append(self._lines[0].rstrip(b"\r").decode())
            except UnicodeDecodeError as error:
                if taken:
                    break
                number = self._num_taken + 1
                raise UserError(f"{self.name}, line {number}: not UTF-8 ({error.reason})") from None
            self._lines.popleft()
            self._num_taken += 1
        return taken

    def _read(self) -> None:
        """Waits for input and cuts it into lines. After the end of a terminal's input, it is not read again."""
        data = self._stream.read1(_BLOCK)  # pyright: ignore[reportAttributeAccessIssue]
        self._is_over = not data
        parts = data.split(b"\n")  # the first ends the line begun before; the last begins a line whose end is to come
        self._pieces.append(parts[0])
        if len(parts) == 1 and not self._is_over:
            return
        line = b"".join(self._pieces)
        if self._is_first:
            line, self._is_first = line.removeprefix(BYTE_ORDER_MARK), False
        if line or len(parts) > 1:
            self._lines.append(line)
        self._lines.extend(parts[1:-1])
        self._pieces = [parts[-1]]

    def _has_more(self) -> bool:
        """Returns whether the stream has, or gets within `pause` seconds, more input or its end."""
        descriptor = _descriptor(self._stream)
        if descriptor is None:
            return True
        if sys.platform == "darwin":  # whose `poll` does not support terminals
            return bool(select.select([descriptor], [], [], self._pause)[0])
        poll = select.poll()  # `select.select` fails for descriptors from 1024 on
        poll.register(descriptor, select.POLLIN)  # an end of the stream is always reported
        return bool(poll.poll(1_000 * self._pause))

    def _ask(self, prompt: str) -> None:
        """Writes a prompt, if the screen is a terminal."""
        if self._screen.isatty():
            self._screen.write(prompt)
            self._screen.flush()


class RowReader:
    """Reads rows of a table, or lines of a packed file, in chunks, with the interface of `LineReader`."""

    is_terminal = False

    def __init__(self, rows: Iterable[Sequence[str] | str], *, name: str):
        """Sets up the reader; `name` is the file in messages."""
        self.name = name
        self._rows = iter(rows)
        self._error: UserError | None = None  # raised by the next call of `take`

    def take(self, max_rows: int) -> list[Sequence[str] | str]:
        """Returns the next rows; those before a bad one first, so that they are answered, as by `LineReader.take`."""
        if self._error is not None:
            raise self._error
        taken: list[Sequence[str] | str] = []
        try:
            taken.extend(itertools.islice(self._rows, max_rows))  # keeps those before an error
        except UserError as error:
            if not taken:
                raise
            self._error = error
        return taken


def open_readers(
    files: Sequence[str], read_table: Callable[[str], Iterable[Sequence[str]] | None] = lambda path: None
) -> Iterator[LineReader | RowReader]:
    """Yields a reader of each file, plain or `.gz`, or of standard input if there are none.

    Args:
      files: paths of files.
      read_table: returns the rows of a file, or None if each of its lines is an input.

    Raises:
      UserError: if a file cannot be read.
    """
    if not files:
        yield LineReader(sys.stdin.buffer)
    for file in files:
        try:
            with open(file, "rb") as stream:
                rows = read_table(file)
                if rows is None and is_gzip(file):
                    rows = read_lines(file)
                yield LineReader(stream, name=file) if rows is None else RowReader(rows, name=file)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def answered(lines: list[Any], answer: Callable[[list[Any], int], list[str]], number: int) -> Iterator[list[str]]:
    """Answers all lines together or, if one of them raises UserError, all lines before it and then raises.

    Args:
      lines: lines or rows to answer.
      answer: returns the answers, given the lines and the number of the first; raises UserError for a bad line.
      number: number of the first line, from 0.

    Raises:
      UserError: the error of `answer` for the first bad line.
    """
    try:
        answers = answer(lines, number)
    except UserError:
        if len(lines) < 2:
            raise
        half = len(lines) // 2
        yield from answered(lines[:half], answer, number)
        yield from answered(lines[half:], answer, number + half)
        return
    yield answers


def shown(answer: str) -> str:
    """Escapes the control characters of an answer if standard output is a terminal, which would obey them.

    The answers of a model are not trusted. Invisible letters stay, because some languages need them.
    """
    return _OBEYED.sub(lambda match: printable(match[0]), answer) if sys.stdout.isatty() else answer


def count_lines(stream: BinaryIO) -> int | None:
    """Counts the remaining lines of a file without consuming them; returns None for a pipe or a terminal."""
    descriptor = _descriptor(stream)
    if descriptor is None or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    count, last_byte = 0, b"\n"
    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
    while block := os.pread(descriptor, 1 << 20, offset):
        count += block.count(b"\n")
        last_byte = block[-1:]
        offset += len(block)
    return count + (last_byte != b"\n")  # the last line may have no line feed


def _descriptor(stream: BinaryIO) -> int | None:
    """Returns the file descriptor of a stream; None for a stream in memory."""
    try:
        return stream.fileno()
    except OSError:  # io.UnsupportedOperation
        return None
