"""Articles of WikiText (Merity et al., 2017, https://arxiv.org/abs/1609.07843): plain text, headings marked by "="."""

import re
from typing import NamedTuple

from etils import epath

from tfx_jax.data.text import read_lines
from tfx_jax.errors import UserError

_TITLE = re.compile(r" ?= ([^=].*) = ?")
_HEADING = re.compile(r" ?(=(?: =)*) .* \1 ?")
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


def read_articles(path: epath.PathLike) -> list[Article]:
    """Reads a UTF-8 file, plain or `.gz`, and cuts it at each " = Title = " between empty lines.

    Headings of sections have more "=", and formulas with one stand between other lines. Empty lines at the very
    beginning belong to the first article.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, and for text before the first title.
    """
    lines = read_lines(path)
    blank = [True, *(not line.strip() for line in lines), True]
    articles: list[Article] = []
    before = 0  # empty lines at the beginning
    for number, line in enumerate(lines):
        title = _TITLE.fullmatch(line) if blank[number] and blank[number + 2] else None
        if title:
            articles.append(Article(title[1], lines[:before] if not articles else []))
        if articles:
            articles[-1].lines.append(line)
        elif blank[number + 1]:
            before += 1
        else:
            raise UserError(f"{path}, line {number + 1}: text before the first title; a title is ' = Title = '")
    if not articles:
        raise UserError(f"{path} has no article: a title is a line ' = Title = ' between empty ones")
    return articles


def running_text(text: str) -> str:
    r"""What people would read of an article: no headings and no empty lines, and marks of the data set undone.

    "twenty @-@ one" is "twenty-one", and likewise commas and points of numbers; a word that the data set left out,
    "<unk>", is "[UNK]", as BERT's tokenizers spell it, so that nobody learns its letters.

    >>> running_text(" = Title = \n \n They sold 1 @,@ 000 <unk> . ")
    'They sold 1,000 [UNK] .'
    """
    lines = (line.strip() for line in text.split("\n") if line.strip() and not _HEADING.fullmatch(line))
    return "\n".join(_JOINT.sub(r"\1", line).replace("<unk>", "[UNK]") for line in lines)
