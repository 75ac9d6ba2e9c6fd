"""Tagged sentences in CoNLL's formats: a line for each word and its tag, a blank line between sentences."""

import re
from typing import NamedTuple

from etils import epath

from tfx_jax.data.sources.lines import is_blank, read_lines, split_words
from tfx_jax.errors import UserError

_DOCUMENT = re.compile(r" *-DOCSTART-(?![^ \t])")


class TaggedSentence(NamedTuple):
    """Words and their BIO tags: "O", "B-label" or "I-label"."""

    words: list[str]
    tags: list[str]


def read_tagged(path: epath.PathLike) -> list[TaggedSentence]:
    """Reads the sentences of a UTF-8 file, plain or `.gz`; spaces around words and tags are trimmed.

    A line is a word, one TAB and its tag; or, if there is no TAB in the first, it has columns with spaces between, as
    many in each, of which the first is the word and the last the tag. That is CoNLL-2003's format (Tjong Kim Sang and
    De Meulder, 2003). Lines whose word is "-DOCSTART-" begin a document in either and are no words.

    The tags are checked one by one. Whether an I follows its B is not: such files are common, and
    `tfx_jax.tasks.text.tagging.repair_tags` fixes them.

    Raises:
      UserError: for a file that cannot be read, is not UTF-8 or has no sentence, and for a line that has no word, no
        BIO tag, or other columns than these.
    """
    sentences: list[TaggedSentence] = []
    open_sentence = TaggedSentence([], [])
    num_columns = None  # with spaces between
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


def _split(line: str, num_columns: int, where: str) -> tuple[str, str]:
    """The word and the tag of a line; `num_columns` of those with spaces between, at most 1 of a file with TABs."""
    if num_columns > 1:
        fields = split_words(line)
        if len(fields) != num_columns:
            raise UserError(f"{where}: {len(fields)} columns, but the first line has {num_columns}")
    else:
        fields = [field.strip(" ") for field in line.split("\t")]
        if len(fields) != 2 or not fields[0]:
            raise UserError(f"{where}: {line[:40]!r} is not a word, one TAB and its tag")
    word, tag = fields[0], fields[-1]
    prefix, _, label = tag.partition("-")
    if tag != "O" and (prefix not in ("B", "I") or not label):
        raise UserError(f"{where}: the tag {tag!r} is not O, B-label or I-label; convert the file to BIO tags")
    return word, tag
