"""Articles of WikiText (Merity et al., 2017, https://arxiv.org/abs/1609.07843): plain text, headings marked by "="."""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from etils import epath

from tfx_jax.data.lines import is_blank, read_lines
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
    "<unk>", is "[UNK]", as BERT's tokenizers spell it, so that nobody learns its letters.

    >>> running_text(" = Title = \n \n They sold 1 @,@ 000 <unk> . ")
    'They sold 1,000 [UNK] .'
    """
    lines = (line.strip() for line in text.split("\n") if not is_blank(line) and not _HEADING.fullmatch(line))
    return "\n".join(_JOINT.sub(r"\1", line).replace("<unk>", "[UNK]") for line in lines)
