"""WikiText: its articles, their running text, and passages as byte ids."""

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
_MAX_LINES = 1 << 24  # maximum number of lines of an article, a thousand times those of a book
_JOINT = re.compile(r" @([-,.])@ ")  # WikiText's spelling of a hyphen, comma or point inside a word or number


class Article(NamedTuple):
    """An article of Wikipedia.

    Attributes:
      title: text of its heading.
      lines: all its lines, heading and empty lines included, so that the articles' lines together are the file, whose
        tokens language models count. For sentence pairs, use the lines with text only.
    """

    title: str
    lines: list[str]


def read_articles(path: epath.PathLike) -> Iterator[Article]:
    """Yields the articles of a UTF-8 file, plain or `.gz`, split at lines " = Title = " between empty lines.

    Headings of sections have more "=", and formulas of that form are not between empty lines. Empty lines at the
    beginning of the file belong to the first article.

    Raises:
      UserError: if the file cannot be read, is empty or not UTF-8, has text before the first title, or has 16 million
        lines without a title.
    """
    article, lines = None, []
    was_blank = True  # whether the previous line is blank; the file begins as if after an empty line
    # Each line with the following one; the last line is followed by an empty one.
    line_pairs = itertools.pairwise(itertools.chain(read_lines(path), [""]))
    for number, (line, following) in enumerate(line_pairs, start=1):
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
    r"""Returns an article's text without headings, empty lines and the data set's markup.

    "twenty @-@ one" becomes "twenty-one", and the same for commas and points in numbers. "<unk>", which replaces rare
    words, becomes "[UNK]", BERT's unknown token, so that tokenizers do not learn its letters.

    >>> running_text(" = Title = \n \n They sold 1 @,@ 000 <unk> . ")
    'They sold 1,000 [UNK] .'
    """
    lines = (line.strip() for line in text.split("\n") if not is_blank(line) and not _HEADING.fullmatch(line))
    return "\n".join(_JOINT.sub(r"\1", line).replace("<unk>", "[UNK]") for line in lines)


NUM_BYTE_IDS = 257
"""Number of ids of `byte_ids`: 256 bytes, and 0 for padding."""

_SECTION = re.compile(r" ?= = ([^=].*[^=]) = = ?")


def byte_ids(text: str) -> UInt16[np.ndarray, " T"]:
    """Returns the UTF-8 bytes of a text, each plus 1, because id 0 is padding.

    >>> byte_ids("é!").tolist()
    [196, 170, 34]
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1


def sections(article: Article) -> list[tuple[str, str]]:
    r"""Returns (heading, running text) of each section of an article.

    The text of a section includes its subsections without their headings. The text before the first section is left
    out.

    >>> article = Article("A", [" = A = ", "It is .", " = = Plot = = ", "He goes .", " = = = End = = = ", "He stays ."])
    >>> sections(article)
    [('Plot', 'He goes .\nHe stays .')]
    """
    parts: list[tuple[str, list[str]]] = []
    for line in article.lines:
        heading = _SECTION.fullmatch(line)
        if heading:
            parts.append((heading[1], []))
        elif parts:
            _, section_lines = parts[-1]
            section_lines.append(line)
    return [(heading, running_text("\n".join(lines))) for heading, lines in parts]


def cut_passages(text: str, *, min_length: int, max_length: int) -> list[UInt16[np.ndarray, " T"]]:
    """Splits a text into consecutive passages of `max_length` bytes, also inside words.

    Args:
      text: any text.
      min_length: minimum length of the last passage in bytes; a shorter one is dropped.
      max_length: length of all other passages in bytes.

    Returns:
      The `byte_ids` of each passage.
    """
    ids = byte_ids(text)
    pieces = (ids[start : start + max_length] for start in range(0, len(ids), max_length))
    return [piece for piece in pieces if len(piece) >= min_length]


def draw_pair(
    articles: Sequence[Sequence[np.ndarray]], key: Sequence[int], *, is_same: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Samples two different passages, from the same article or from two articles.

    Args:
      articles: passages of each article; at least two articles with at least two passages each.
      key: seed, non-negative integers.
      is_same: whether both passages are from the same article.

    Returns:
      (first passage, second passage).
    """
    rng = np.random.default_rng(tuple(key))
    first_article, second_article = rng.choice(len(articles), 2, replace=False)
    if is_same:
        first, second = rng.choice(len(articles[first_article]), 2, replace=False)
        return articles[first_article][first], articles[first_article][second]
    first, second = (rng.integers(len(articles[article])) for article in (first_article, second_article))
    return articles[first_article][first], articles[second_article][second]
