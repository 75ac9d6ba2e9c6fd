"""WikiText: articles, their running text, and passages of them as bytes."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from jaxtyping import UInt16

from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.errors import UserError

_TITLE = re.compile(r" ?= ([^=].*) = ?")
_HEADING = re.compile(r" ?(=(?: =)*) .* \1 ?")
_MAX_LINES = 1 << 24  # of an article: whole books have a thousandth
_JOINT = re.compile(r" @([-,.])@ ")  # inside a word or a number


class Article(NamedTuple):
    """A document of some text.

    Attributes:
      title: from its heading.
      lines: all its lines, the heading and empty ones too: those of all articles make up the file, as language models
        count its tokens. For sentence pairs, take the lines with text.
    """

    title: str
    lines: list[str]


def read_articles(path: epath.PathLike) -> Iterator[Article]:
    """Reads a UTF-8 file, plain or `.gz`, and cuts it at each " = Title = " between empty lines.

    Headings of sections have more "=", and formulas with one stand between other lines. Empty lines at the very
    beginning belong to the first article.

    Yields:
      The articles in their order.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, for text before the first title, and for more
        lines without a title than are an article.
    """
    article, lines, was_blank = None, [], True
    for number, (line, following) in enumerate(itertools.pairwise(itertools.chain(read_lines(path), [""])), start=1):
        title = _TITLE.fullmatch(line) if was_blank and is_blank(following) else None
        was_blank = is_blank(line)
        if title:
            if article:
                yield article
                lines = []
            article = Article(title[1], lines)
        elif not article and not was_blank:
            raise UserError(f"{path}, line {number}: text before the first title; a title is ' = Title = '")
        lines.append(line)
        if len(lines) > _MAX_LINES:
            raise UserError(f"{path}, line {number}: {_MAX_LINES:,} lines without a title; a title is ' = Title = '")
    if not article:
        raise UserError(f"{path} has no article: a title is a line ' = Title = ' between empty ones")
    yield article


def running_text(text: str) -> str:
    r"""What people would read of an article: no headings and no empty lines, and marks of the data set undone.

    "twenty @-@ one" is "twenty-one", and likewise commas and points of numbers; a word that the data set left out,
    "<unk>", is "[UNK]", as BERT's tokenizers spell it, so that no one learns its letters.

    >>> running_text(" = Title = \n \n They sold 1 @,@ 000 <unk> . ")
    'They sold 1,000 [UNK] .'
    """
    lines = (line.strip() for line in text.split("\n") if not is_blank(line) and not _HEADING.fullmatch(line))
    return "\n".join(_JOINT.sub(r"\1", line).replace("<unk>", "[UNK]") for line in lines)


NUM_BYTE_IDS = 257
"""Of 256 bytes and, as 0, of padding."""

_SECTION = re.compile(r" ?= = ([^=].*[^=]) = = ?")


def byte_ids(text: str) -> UInt16[np.ndarray, " T"]:
    """Returns the bytes of a text in UTF-8, each one higher: 0 is for padding.

    >>> byte_ids("é!").tolist()
    [196, 170, 34]
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1


def sections(article: Article) -> list[tuple[str, str]]:
    r"""Cuts an article at the headings of its sections, of which those of subsections are no part.

    Returns:
      Of each section its heading and its running text, without any headings; the lead has no heading and is left out.

    >>> article = Article("A", [" = A = ", "It is .", " = = Plot = = ", "He goes .", " = = = End = = = ", "He stays ."])
    >>> sections(article)
    [('Plot', 'He goes .\nHe stays .')]
    """
    found: list[tuple[str, list[str]]] = []
    for line in article.lines:
        heading = _SECTION.fullmatch(line)
        if heading:
            found.append((heading[1], []))
        elif found:
            found[-1][1].append(line)
    return [(heading, running_text("\n".join(lines))) for heading, lines in found]


def cut_passages(text: str, *, min_length: int, max_length: int) -> list[UInt16[np.ndarray, " T"]]:
    """Cuts a text into passages that follow one another, without regard to words.

    Args:
      text: any.
      min_length: bytes that a passage has at least; what is left at the end and shorter is dropped.
      max_length: bytes of every other passage.

    Returns:
      The ids of the bytes of each passage, see `byte_ids`.
    """
    ids = byte_ids(text)
    pieces = (ids[start : start + max_length] for start in range(0, len(ids), max_length))
    return [piece for piece in pieces if len(piece) >= min_length]


def draw_pair(
    articles: Sequence[Sequence[np.ndarray]], key: Sequence[int], *, is_same: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Draws two passages: different ones of the same article, or ones of two articles.

    Args:
      articles: passages of each, of which there are at least two articles and two passages in each.
      key: numbers, not negative; the same, the same pair.
      is_same: whether both are of one article.
    """
    rng = np.random.default_rng(tuple(key))
    first, second = rng.choice(len(articles), 2, replace=False)
    if is_same:
        here, there = rng.choice(len(articles[first]), 2, replace=False)
        return articles[first][here], articles[first][there]
    return tuple(articles[article][rng.integers(len(articles[article]))] for article in (first, second))
