"""Tagged sentences in CoNLL's format: a line for each word, a TAB, its tag; an empty line between sentences."""

from typing import NamedTuple

from etils import epath

from tfx_jax.data.text import read_lines
from tfx_jax.errors import UserError


class TaggedSentence(NamedTuple):
    """Words and their BIO tags: "O", "B-label" or "I-label"."""

    words: list[str]
    tags: list[str]


def read_tagged(path: epath.PathLike) -> list[TaggedSentence]:
    """Reads the sentences of a UTF-8 file, plain or `.gz`; blanks around words and tags are trimmed.

    The tags are checked one by one. Whether an I follows its B is not: such files are common, and
    `tfx_jax.tasks.tagging.repair_tags` mends them.

    Raises:
      UserError: for a file that cannot be read, is not UTF-8 or has no sentence, and for a line that is not a word, one
        TAB and a BIO tag.
    """
    sentences: list[TaggedSentence] = []
    open_sentence = TaggedSentence([], [])
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            word, tag = _split(line, f"{path}, line {number}")
            open_sentence.words.append(word)
            open_sentence.tags.append(tag)
        elif open_sentence.words:
            sentences.append(open_sentence)
            open_sentence = TaggedSentence([], [])
    if open_sentence.words:
        sentences.append(open_sentence)
    if not sentences:
        raise UserError(f"{path} has no sentences, only empty lines")
    return sentences


def _split(line: str, where: str) -> tuple[str, str]:
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != 2 or not fields[0]:
        raise UserError(f"{where}: {line[:40]!r} is not a word, one TAB and its tag")
    word, tag = fields
    prefix, _, label = tag.partition("-")
    if tag != "O" and (prefix not in ("B", "I") or not label):
        raise UserError(f"{where}: the tag {tag!r} is not O, B-label or I-label; convert the file to BIO tags")
    return word, tag
