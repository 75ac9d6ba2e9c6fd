r"""Streaming readers of UTF-8 text files, plain or `.gz`, with a few megabytes in memory at a time.

All readers of text and all commands follow three rules. A byte order mark at the beginning is not text. Lines end with
"\n" or "\r\n" only, not with Unicode's other line separators. A line without visible content (`is_blank`) counts as
empty.
"""

import gzip
import itertools
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
"""Longest line that is accepted. Longer ones are not lines of text, and may be an attack on the memory."""

_BLOCK_BYTES = 4 << 20  # bytes read at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Limit of the size of an unpacked `.gz`: 200 times the packed size, or 256 MiB if that is more. Text shrinks to a
# third, repetitive text to a tenth, but zeros to a thousandth.
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
    r"""Returns whether a text is empty or all white space, control characters and invisible characters.

    >>> [is_blank(text) for text in ("", " \t\u3000", "\u200b\u00ad\x01\ufeff", "a", "\u200b.")]
    [True, True, True, False, False]
    """
    return all(
        character.isspace() or character in _INVISIBLE or unicodedata.category(character) in ("Cc", "Cs")
        for character in text
    )


def list_of_texts(texts: Iterable[T], name: str) -> list[T]:
    """Returns texts as a list; `name` is the argument's name in the error message.

    Raises:
      UserError: if `texts` is a single string, which would be read as a list of characters.
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
    """Consecutive whole lines of a file.

    Attributes:
      data: UTF-8 bytes with line ends; the last line of a file may have none.
      first_line: line number of the first line, from 1.
    """

    data: bytes
    first_line: int


def is_gzip(path: epath.PathLike) -> bool:
    """Returns whether a file is unpacked when it is read, because its name ends with `.gz`."""
    return epath.Path(path).suffix == ".gz"


def read_lines(path: epath.PathLike, *, keep_ends: bool = False) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 file, plain or `.gz`, empty ones included.

    Args:
      path: local or `gs://`.
      keep_ends: whether lines keep their line ends; otherwise "\r" and "\n" at the end are removed.

    Raises:
      UserError: while iterating, if the file cannot be read, is empty or not UTF-8, or a line is too long, see
        `read_blocks`.
    """
    for block in read_blocks(path):
        *lines, last = block.data.decode().split("\n")
        for line in lines:
            yield f"{line}\n" if keep_ends else line.rstrip("\r")
        if last:  # the last line of a file without a line end
            yield last if keep_ends else last.rstrip("\r")


def read_first_lines(path: epath.PathLike) -> list[str]:
    """Returns the lines in the first 64 kB of a file on this machine, plain or `.gz`, to find out its format.

    The first line is the first with visible characters, and the last may be cut off. Returns [""] if there is none, or
    if the path is not a regular file, which could be read only once.

    Raises:
      UserError: if a `.gz` is damaged.
    """
    if not os.path.isfile(path):
        return [""]
    beginning = b"".join(itertools.islice(_parts(path), 2))[: 1 << 16].decode(errors="replace")
    lines = (line.rstrip("\r") for line in beginning.split("\n"))
    return list(itertools.dropwhile(is_blank, lines)) or [""]


def read_text(path: epath.PathLike, max_bytes: int) -> str:
    """Returns the whole text of a small UTF-8 file, plain or `.gz`, line ends included.

    Raises:
      UserError: if the file is missing, empty, not UTF-8, a damaged `.gz`, or larger than `max_bytes`.
    """
    parts, size = [], 0
    for part in _parts(path):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise UserError(
                f"{path} has more than {max_bytes:,} bytes, the limit for files that are read as a whole: split it "
                "into several files"
            )
    if not size:
        raise UserError(f"{path} is empty")
    return _checked(Block(b"".join(parts), 1), path).data.decode()


def read_blocks(path: epath.PathLike, *, cut_lines: bool = False) -> Iterator[Block]:
    """Yields a UTF-8 file, plain or `.gz`, in blocks of some megabytes of whole lines, without its byte order mark.

    Args:
      path: local or `gs://`.
      cut_lines: whether to split very long lines, between characters, into several blocks; for text without lines.

    Raises:
      UserError: while iterating, if the file is missing, not a regular file, empty or not UTF-8, if a `.gz` is damaged,
        incomplete or unpacks to implausibly many bytes, or if a line is longer than MAX_LINE_BYTES.
    """
    rest = b""  # the beginning of a line whose end has not been read yet
    number = 1  # line number of the next block
    is_empty = True
    for part in _parts(path):
        data = rest + part
        # Only the first complete line, which began in `rest`, can be longer than a part.
        first_end = data.find(b"\n")
        if not cut_lines and (first_end if first_end >= 0 else len(data)) > MAX_LINE_BYTES:
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
    """Returns where the last UTF-8 character, possibly incomplete, begins; len(data) if the bytes are not UTF-8."""
    # A character has at most four bytes, so search the last four backward.
    for index in range(len(data) - 1, max(len(data) - 5, -1), -1):
        if data[index] & 0xC0 != 0x80:  # not of the form 0b10xxxxxx, which all bytes but a character's first one have
            return index
    return len(data)


def _checked(block: Block, path: epath.PathLike) -> Block:
    """Returns the block after checking that it is UTF-8, so that no line fails later during training."""
    try:
        block.data.decode()
    except UnicodeDecodeError as error:
        line = block.first_line + block.data.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file, e.g. with iconv") from None
    return block


def _parts(path: epath.PathLike) -> Iterator[bytes]:
    """Yields the unpacked content of a file without its byte order mark; all text files are read here."""
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
                        f"{path} unpacks to more than {_MAX_RATIO} times its size, which text does not do; if it is "
                        "text, unpack it yourself"
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
