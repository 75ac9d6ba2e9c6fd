"""Passages of articles as bytes: by the section that they are from, and in pairs of one article or of two."""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt16

from tfx_jax.data.wikitext import Article, running_text

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
