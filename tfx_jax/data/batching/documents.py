"""Plain text as documents that are streamed from files, and their tokens on disk; both may be larger than memory.

A document is read as consecutive *pieces*, so that a long one is never in memory as a whole.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from etils import epath

from tfx_jax.data.sources.disk_array import DiskArray
from tfx_jax.data.sources.lines import read_blocks
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer

_PIECE = 1 << 16  # characters of a piece of a long text
_BATCH_CHARACTERS = 1 << 21  # characters tokenized in one call, which takes some 200 times as much memory
_BATCH_PIECES = 1 << 16  # pieces tokenized in one call, if they are tiny
_CONTEXT = 256  # characters on each side of a cut that are tokenized to check it
# Where nearly all tokenizers begin a new token: before the space before a word, and before a word that begins a line.
_CUT = re.compile(r"(?<=\S)(?= \w)|(?<=\S\n)(?=\w)")
_MAX_UNCUT = 64 * _PIECE  # a text without such a position is cut anywhere after this number of characters


class TextDocuments:
    """Documents of a corpus in their order, read again at each iteration.

    >>> texts = TextDocuments(lambda: iter([["a long ", "text"], ["a short one"]]))
    >>> list(texts)
    ['a long ', 'text', 'a short one']
    >>> ["".join(document) for document in texts.by_document()]
    ['a long text', 'a short one']
    """

    def __init__(self, read: Callable[[], Iterator[Iterable[str]]], *, locate: Callable[[int], str] | None = None):
        """Stores functions.

        Args:
          read: starts a new pass over the documents; yields for each document an iterable of its pieces.
          locate: returns the file and line of a document, numbered from 1, for messages.
        """
        self._read, self._locate = read, locate

    def locate(self, number: int, what: str) -> str:
        """Returns where a document is, numbered from 1: its file and line, or `what` and its number if unknown."""
        return f"{what} {number}" if self._locate is None else self._locate(number)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._read())

    def to_train(self, kind: str) -> Iterator[str]:
        """Yields the texts for training a tokenizer of a kind: pieces, but whole documents for the kind "unigram".

        "unigram" depends on the context of words, and keeps all text in memory anyway.
        """
        return map("".join, self._read()) if kind == "unigram" else iter(self)

    def by_document(self) -> Iterator[Iterable[str]]:
        """Yields each document as an iterable of pieces, to be consumed before the next document."""
        return self._read()


def count_characters(path: epath.PathLike) -> int:
    """Returns the number of characters of a file; each line end, CRLF too, counts as one.

    Raises:
      UserError: if the file is missing, empty, not UTF-8 or a damaged `.gz`.
    """
    return sum(map(len, _texts(path)))


def read_pieces(path: epath.PathLike, begin: int, end: int) -> Iterator[str]:
    r"""Yields characters begin .. end - 1 of a UTF-8 file, plain or `.gz`, in pieces cut where tokens begin.

    Nearly all tokenizers give the same tokens for the pieces as for the whole. Line ends are included, as "\n".

    Args:
      path: path of the file.
      begin: index of the first character.
      end: index after the last character.

    Raises:
      UserError: while iterating, if the file is missing, empty, not UTF-8 or a damaged `.gz`.
    """
    return cut_pieces(_characters(path, begin, end))


def document_lines(texts: TextDocuments) -> Iterator[str]:
    """Yields the lines of all documents, without line ends."""
    for document in texts.by_document():
        rest = ""
        for piece in document:
            *lines, rest = (rest + piece).split("\n")
            yield from lines
        yield rest


def _characters(path: epath.PathLike, begin: int, end: int) -> Iterator[str]:
    """Yields the characters begin .. end - 1 of a file in parts, cut anywhere."""
    offset = 0
    for part in _texts(path):
        # Indices relative to this part; the slice is empty if the part ends before `begin`.
        yield part[max(0, begin - offset) : max(0, end - offset)]
        offset += len(part)
        if offset >= end:
            return


def _texts(path: epath.PathLike) -> Iterator[str]:
    r"""Yields the text of a file in parts, with "\n" for every kind of line end."""
    rest = ""
    for block in read_blocks(path, cut_lines=True):
        text = rest + block.data.decode()
        rest = "\r" if text.endswith("\r") else ""  # "\n" may begin the next block
        yield text.removesuffix("\r").replace("\r\n", "\n")
    yield rest


def cut_pieces(parts: Iterable[str]) -> Iterator[str]:
    """Yields the text of `parts` in pieces of at least 65,536 characters, cut where tokens begin."""
    rest = ""
    for part in parts:
        text, begin = rest + part, 0
        while len(text) - begin >= 2 * _PIECE and (match := _CUT.search(text, begin + _PIECE)):
            yield text[begin : match.start()]
            begin = match.start()
        rest = text[begin:]
        if len(rest) > _MAX_UNCUT:
            yield rest
            rest = ""
    if rest:
        yield rest


class TokenDocuments(NamedTuple):
    """The concatenated tokens of documents, on disk.

    Attributes:
      tokens: tokens of all documents, [number of tokens] int32.
      ends: index after the last token of each document, [number of documents] int64.
    """

    tokens: np.ndarray
    ends: np.ndarray


def encode_documents(tokenizer: HFTokenizer, texts: TextDocuments, *, eos_id: int | None = None) -> TokenDocuments:
    """Tokenizes documents onto disk, with the same tokens as if each were tokenized as a whole.

    Args:
      tokenizer: any tokenizer; one whose tokens change at every cut gets whole documents, which takes memory.
      texts: the documents.
      eos_id: token appended to each document; None appends nothing.

    Raises:
      UserError: if a text cannot be read, or the disk is full.
    """
    tokens, ends = DiskArray(np.int32), DiskArray(np.int64)
    num_tokens = 0
    for pieces in _batched(_pieces(tokenizer, texts)):
        encoded = tokenizer.encode_batch([text for text, _ in pieces])
        is_last = np.array([last for _, last in pieces])
        if eos_id is not None:
            for ids, last in zip(encoded, is_last, strict=True):
                if last:
                    ids.append(eos_id)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        tokens.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int32, sizes.sum()))
        ends.append(num_tokens + np.cumsum(sizes)[is_last])  # of the documents whose last piece is in this batch
        num_tokens += int(sizes.sum())
    return TokenDocuments(tokens.mapped(), ends.mapped())


def _pieces(tokenizer: HFTokenizer, texts: TextDocuments) -> Iterator[tuple[str, bool]]:
    """Yields (piece, whether it is the last of its document); pieces are joined where a cut would change tokens."""
    for document in texts.by_document():
        pending = ""
        for piece in document:
            if pending and _is_clean_cut(tokenizer, pending[-_CONTEXT:], piece[:_CONTEXT]):
                yield pending, False
                pending = piece
            else:
                pending += piece
        yield pending, True


def _is_clean_cut(tokenizer: HFTokenizer, before: str, after: str) -> bool:
    """Returns whether two texts have the same tokens separately and together, so that no token depends on both."""
    return tokenizer.encode(before + after) == [*tokenizer.encode(before), *tokenizer.encode(after)]


def _batched(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Groups the results of `_pieces` into batches, each for one call of the tokenizer."""
    batch, size = [], 0
    for text, is_last in pieces:
        batch.append((text, is_last))
        size += len(text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
