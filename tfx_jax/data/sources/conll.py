"""Reader of tagged sentences in CoNLL's formats: one line per word with its tag, blank lines between sentences."""

import re
from typing import NamedTuple

from etils import epath

from tfx_jax.data.sources.lines import is_blank, read_first_lines, read_lines, split_words
from tfx_jax.errors import UserError

_DOCUMENT = re.compile(r" *-DOCSTART-(?![^ \t])")
_TAG = re.compile(r"O|[BI]-.+", re.DOTALL)


class TaggedSentence(NamedTuple):
    """Words and their BIO tags: "O", "B-label" or "I-label"."""

    words: list[str]
    tags: list[str]


def read_tagged(path: epath.PathLike) -> list[TaggedSentence]:
    """Reads the sentences of a UTF-8 file, plain or `.gz`; spaces around words and tags are removed.

    Two formats are accepted. If the first line with text has a TAB, each line is a word, one TAB and its tag. Otherwise
    lines have columns separated by spaces, the same number in each line: the first is the word and the last the tag, as
    in CoNLL-2003 (Tjong Kim Sang and De Meulder, 2003). In both, lines that begin with "-DOCSTART-" are skipped.

    Each tag must be a BIO tag, but an I tag may follow a wrong tag, which is common in published files:
    `tfx_jax.metrics.entities.repair_tags` corrects that.

    Raises:
      UserError: if the file cannot be read, is not UTF-8 or has no sentence, or a line has no word, no BIO tag, or the
        wrong number of columns.
    """
    sentences: list[TaggedSentence] = []
    open_sentence = TaggedSentence([], [])
    num_columns = None  # of space-separated lines; 0 if separated by TABs; None before the first line with text
    for number, line in enumerate(read_lines(path), start=1):
        if not is_blank(line) and not _DOCUMENT.match(line):
            if num_columns is None:
                num_columns = 0 if "\t" in line else len(split_words(line))
            word, tag = _split(line, num_columns, f"{path}, line {number}")
            open_sentence.words.append(word)
            open_sentence.tags.append(tag)
        elif open_sentence.words:
            sentences.append(open_sentence)
            open_sentence = TaggedSentence([], [])
    if open_sentence.words:
        sentences.append(open_sentence)
    if not sentences:
        raise UserError(f"{path} has no sentences, only blank lines")
    return sentences


def is_tagged(path: epath.PathLike) -> bool:
    """Returns whether the first two words of a file have tags, or its first line begins with "-DOCSTART-"."""
    # One line alone may be a text, "My blood type is O"; a blank one is the end of a sentence of one word.
    lines = [line for index, line in enumerate(read_first_lines(path)) if not index or not is_blank(line)][:2]
    rows = [[field.strip(" ") for field in line.split("\t")] if "\t" in line else split_words(line) for line in lines]
    return bool(_DOCUMENT.match(lines[0])) or (
        len(rows) == 2
        and len(rows[0]) == len(rows[1]) > 1
        and all(_TAG.fullmatch(fields[-1]) is not None for fields in rows)
    )


def _split(line: str, num_columns: int, where: str) -> tuple[str, str]:
    """Returns (word, tag) of a line; `num_columns` above 1 means that columns are separated by spaces, else by TAB."""
    if num_columns > 1:
        fields = split_words(line)
        if len(fields) != num_columns:
            raise UserError(f"{where}: {len(fields)} columns, but the first line has {num_columns}")
    else:
        fields = [field.strip(" ") for field in line.split("\t")]
        if len(fields) != 2 or not fields[0]:
            raise UserError(f"{where}: {line[:40]!r} is not a word, one TAB and its tag")
    word, tag = fields[0], fields[-1]
    if not _TAG.fullmatch(tag):
        raise UserError(f"{where}: the tag {tag!r} is not O, B-label or I-label; convert the file to BIO tags")
    return word, tag
