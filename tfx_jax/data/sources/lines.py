r"""Files of UTF-8 text, plain or `.gz`, read as a stream: a few megabytes are in memory, whatever a file holds.

All readers of text and all verbs agree on three things. A byte order mark at the beginning is not text. A line ends
with "\n" or "\r\n", and with none of Unicode's other line separators. A line without visible content, see `is_blank`,
is treated as an empty one.
"""

import gzip
import os
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import check_regular

T = TypeVar("T")

MAX_LINE_BYTES = 16 << 20
"""A line of a text is far below it; what is above is no text of lines, or was made to fill the memory."""

_BLOCK_BYTES = 4 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Text shrinks to a third, or to a tenth where it says the same again and again, and zeros to a thousandth.
_MAX_RATIO, _MAX_SMALL = 200, 256 << 20


# Unicode's Default_Ignorable_Code_Point (soft hyphens, joiners, variation selectors, ...), marks of annotations, and
# the empty cell of Braille.
_INVISIBLE = frozenset(
    chr(point)
    for first, last in (
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
        *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x2800, 0x2800), (0x3164, 0x3164), (0xFE00, 0xFE0F)),
        *((0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
        (0xE0000, 0xE0FFF),
    )
    for point in range(first, last + 1)
)


def is_blank(text: str) -> bool:
    r"""Returns whether a text shows nothing: it is empty, or all white space, controls and invisible characters.

    >>> [is_blank(text) for text in ("", " \t\u3000", "\u200b\u00ad\x01\ufeff", "a", "\u200b.")]
    [True, True, True, False, False]
    """
    return all(
        character.isspace() or character in _INVISIBLE or unicodedata.category(character) in ("Cc", "Cs")
        for character in text
    )


def list_of_texts(texts: Iterable[T], name: str) -> list[T]:
    """Returns texts as a list.

    Raises:
      UserError: for a single string, whose characters would be taken for texts.
    """
    if isinstance(texts, str | bytes):
        raise UserError(f"{name} must be a list of strings, not a single string: put it into [...]")
    return list(texts)


def split_words(line: str) -> list[str]:
    r"""Splits a line at spaces, TABs and line ends; any other white space, such as U+00A0, is part of a word.

    >>> split_words(" 1\u00a0000  euros\t.")
    ['1\xa0000', 'euros', '.']
    """
    return [word for word in re.split("[ \t\r\n]+", line) if word]


class Block(NamedTuple):
    """Some whole lines of a file.

    Attributes:
      data: UTF-8, with line ends; the last line of a file may have none.
      number: of the first line, from 1.
    """

    data: bytes
    number: int


def is_gzip(path: epath.PathLike) -> bool:
    """Tells by its name whether a file is unpacked as it is read."""
    return epath.Path(path).suffix == ".gz"


def read_lines(path: epath.PathLike, *, keep_ends: bool = False) -> Iterator[str]:
    r"""Reads the lines of a UTF-8 file, plain or `.gz`, one after the other; empty lines are kept.

    Args:
      path: local or `gs://`.
      keep_ends: gives each line with its line break; without it, "\r" and "\n" are taken from its end.

    Raises:
      UserError: while iterating, as `read_blocks`.
    """
    for block in read_blocks(path):
        lines = block.data.decode().split("\n")
        last = lines.pop()
        for line in lines:
            yield f"{line}\n" if keep_ends else line.rstrip("\r")
        if last:
            yield last if keep_ends else last.rstrip("\r")


def read_text(path: epath.PathLike, max_bytes: int) -> str:
    """Reads a small UTF-8 file, plain or `.gz`, as one text, line ends included.

    Raises:
      UserError: as `read_blocks` for anything but a long line, and for more than `max_bytes`.
    """
    parts, size = [], 0
    for part in _parts(path):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise UserError(
                f"{path} has more than {max_bytes:,} bytes, too much to be read as a whole: divide it into "
                "several files"
            )
    if not size:
        raise UserError(f"{path} is empty")
    return _checked(Block(b"".join(parts), 1), path).data.decode()


def read_blocks(path: epath.PathLike, *, cut_lines: bool = False) -> Iterator[Block]:
    """Reads a UTF-8 file, plain or `.gz`, some megabytes of whole lines at a time, without its byte order mark.

    Args:
      path: local or `gs://`.
      cut_lines: gives a line that is longer than some megabytes in several blocks, between characters: of a text that
        need not have lines.

    Raises:
      UserError: while iterating, for a file that is missing, no file, empty or not UTF-8, for a damaged or incomplete
        `.gz` or one that unpacks to what no text is, and for a line longer than MAX_LINE_BYTES.
    """
    rest, number, is_empty = b"", 1, True
    for part in _parts(path):
        data = rest + part
        # Of all the lines that are complete, only the first may be longer than a part.
        first = data.find(b"\n")
        if not cut_lines and (first if first >= 0 else len(data)) > MAX_LINE_BYTES:
            raise UserError(f"{path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes: break it into lines")
        end = data.rfind(b"\n") + 1
        if cut_lines and not end:
            end = _last_character(data)
        if end:
            yield _checked(Block(data[:end], number), path)
            number += data.count(b"\n")
            is_empty = False
        rest = data[end:]
    if rest:
        yield _checked(Block(rest, number), path)
    elif is_empty:
        raise UserError(f"{path} is empty")


def _last_character(data: bytes) -> int:
    """Where the last character of UTF-8 begins, which may not be there as a whole; of other bytes, the end."""
    begins = (place for place in range(len(data) - 1, max(len(data) - 5, -1), -1) if data[place] & 0xC0 != 0x80)
    return next(begins, len(data))


def _checked(block: Block, path: epath.PathLike) -> Block:
    """Decodes everything once, so that no line fails later, in the middle of a training."""
    try:
        block.data.decode()
    except UnicodeDecodeError as error:
        line = block.number + block.data.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file, with iconv say") from None
    return block


def _parts(path: epath.PathLike) -> Iterator[bytes]:
    """The content of a file, unpacked, without its byte order mark; the one place that reads files of text."""
    try:
        check_regular(path)
        with epath.Path(path).open("rb") as packed:
            file = gzip.GzipFile(fileobj=packed) if is_gzip(path) else packed
            yield file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK)
            size = 0
            while part := file.read(_BLOCK_BYTES):
                size += len(part)
                if is_gzip(path) and size > max(_MAX_SMALL, _MAX_RATIO * packed.tell()):
                    raise UserError(
                        f"{path} unpacks to more than {_MAX_RATIO} times its size, as no text does; if it is one, "
                        "unpack it yourself"
                    )
                yield part
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory, not a text file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); a plain text must not be named .gz") from None
    except OSError as error:
        raise UserError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from None
