"""Plain text as documents that are read again each time, and their tokens on disk: neither has to fit into memory."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from etils import epath

from tfx_jax.data.sources.disk_array import DiskArray
from tfx_jax.data.sources.lines import read_blocks
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer

# Characters of a piece of a long text; of what is tokenized at once, which takes some 200 times as much; and of what is
# looked at around an end of a piece.
_PIECE, _AT_ONCE, _AROUND = 1 << 16, 1 << 21, 256
_MANY = 1 << 16  # documents that are tokenized at once, should they be tiny
# Where nearly all tokenizers begin a new token: before the space before a word, and before a word that begins a line.
_CUT = re.compile(r"(?<=\S)(?= \w)|(?<=\S\n)(?=\w)")
_MAX_UNCUT = 64 * _PIECE  # what has no such place is cut anywhere


class TextDocuments:
    """Documents of a corpus, in their order.

    >>> texts = TextDocuments(lambda: iter([["a long ", "text"], ["a short one"]]))
    >>> list(texts)
    ['a long ', 'text', 'a short one']
    >>> ["".join(document) for document in texts.by_document()]
    ['a long text', 'a short one']
    """

    def __init__(self, read: Callable[[], Iterator[Iterable[str]]]):
        """Takes what begins to read: documents, each in pieces, of which a short one has one."""
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._read())

    def to_train(self, kind: str) -> Iterator[str]:
        """The parts to train a tokenizer of a kind on.

        They are whole documents for "unigram", to which it matters what a word stands beside; it takes memory anyway.
        """
        return map("".join, self._read()) if kind == "unigram" else iter(self)

    def by_document(self) -> Iterator[Iterable[str]]:
        """Each document in pieces, which have to be taken before the next document."""
        return self._read()


def count_characters(path: epath.PathLike) -> int:
    """Counts the characters of a file, of which a line end is one, CRLF too.

    Raises:
      UserError: as `read_pieces`.
    """
    return sum(map(len, _texts(path)))


def read_pieces(path: epath.PathLike, begin: int, end: int) -> Iterator[str]:
    """Reads a UTF-8 file, plain or `.gz`, in pieces that nearly every tokenizer reads as the whole.

    Line ends are included, each as one newline.

    Args:
      path: of the file.
      begin: the first character.
      end: the one behind the last.

    Raises:
      UserError: while iterating, as `tfx_jax.data.sources.lines.read_blocks`.
    """
    return _cut(_characters(path, begin, end))


def document_lines(texts: TextDocuments) -> Iterator[str]:
    """The lines of all documents, without line ends."""
    for document in texts.by_document():
        rest = ""
        for piece in document:
            *lines, rest = (rest + piece).split("\n")
            yield from lines
        yield rest


def _characters(path: epath.PathLike, begin: int, end: int) -> Iterator[str]:
    place = 0
    for part in _texts(path):
        yield part[max(0, begin - place) : max(0, end - place)]
        place += len(part)
        if place >= end:
            return


def _texts(path: epath.PathLike) -> Iterator[str]:
    """The parts of a file, with the line ends of all systems as one."""
    rest = ""
    for block in read_blocks(path, cut_lines=True):
        text = rest + block.data.decode()
        rest = "\r" if text.endswith("\r") else ""  # "\n" may begin the next block
        yield text.removesuffix("\r").replace("\r\n", "\n")
    yield rest


def _cut(parts: Iterable[str]) -> Iterator[str]:
    rest = ""
    for part in parts:
        text, begin = rest + part, 0
        while len(text) - begin >= 2 * _PIECE and (place := _CUT.search(text, begin + _PIECE)):
            yield text[begin : place.start()]
            begin = place.start()
        rest = text[begin:]
        if len(rest) > _MAX_UNCUT:
            yield rest
            rest = ""
    if rest:
        yield rest


class TokenDocuments(NamedTuple):
    """The tokens of documents, one behind the other, on disk.

    Attributes:
      tokens: [number of tokens] int32.
      ends: how many tokens there are up to the end of each document, [number of documents] int64.
    """

    tokens: np.ndarray
    ends: np.ndarray


def encode_documents(tokenizer: HFTokenizer, texts: TextDocuments, *, eos_id: int | None = None) -> TokenDocuments:
    """Tokenizes documents, each exactly as if it were tokenized as a whole.

    Args:
      tokenizer: any; one that takes no piece of a text for itself gets documents as wholes, which takes memory.
      texts: the documents.
      eos_id: stands behind each document, if there is such a token.

    Raises:
      UserError: if a text cannot be read, or the disk is full.
    """
    tokens, ends, size = DiskArray(np.int32), DiskArray(np.int64), 0
    for pieces in _at_once(_pieces(tokenizer, texts)):
        encoded = tokenizer.encode_batch([text for text, _ in pieces])
        is_last = np.array([last for _, last in pieces])
        if eos_id is not None:
            for ids, last in zip(encoded, is_last, strict=True):
                if last:
                    ids.append(eos_id)
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        tokens.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int32, sizes.sum()))
        ends.append(size + np.cumsum(sizes)[is_last])
        size += int(sizes.sum())
    return TokenDocuments(tokens.mapped(), ends.mapped())


def _pieces(tokenizer: HFTokenizer, texts: TextDocuments) -> Iterator[tuple[str, bool]]:
    """Pieces that are tokenized as in the whole, and whether each is the last of its document."""
    for document in texts.by_document():
        pending = ""
        for piece in document:
            if pending and _is_cut(tokenizer, pending[-_AROUND:], piece[:_AROUND]):
                yield pending, False
                pending = piece
            else:
                pending += piece
        yield pending, True


def _is_cut(tokenizer: HFTokenizer, before: str, behind: str) -> bool:
    """Whether two texts have the same tokens apart and together, so that none spans them or depends on both."""
    return tokenizer.encode(before + behind) == [*tokenizer.encode(before), *tokenizer.encode(behind)]


def _at_once(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    some, size = [], 0
    for piece in pieces:
        some.append(piece)
        size += len(piece[0])
        if size >= _AT_ONCE or len(some) == _MANY:
            yield some
            some, size = [], 0
    if some:
        yield some
