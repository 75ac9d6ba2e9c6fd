"""Labelled texts and pairs of texts, in files of columns separated by TABs."""

from collections.abc import Collection
from typing import NamedTuple

from etils import epath

from tfx_jax.data.text import read_lines
from tfx_jax.errors import UserError


class LabelledText(NamedTuple):
    """A text and what it is."""

    text: str
    label: str


class LabelledPair(NamedTuple):
    """Two texts and how they are related."""

    first: str
    second: str
    label: str


def read_labelled(path: epath.PathLike, labels: Collection[str] | None = None) -> list[LabelledText]:
    """Reads lines of the form label, TAB, text from a UTF-8 file, plain or `.gz`.

    Args:
      path: of the file.
      labels: the labels there may be, those of the training split, say; None allows any.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, for a line without exactly one TAB or with
        nothing on a side of it, and for another label.
    """
    examples = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{where}: {line[:40]!r} is not a label, one TAB and its text")
        label, text = fields
        examples.append(LabelledText(text, _known(label, labels, where)))
    return examples


def read_labelled_pairs(
    path: epath.PathLike,
    labels: Collection[str] | None = None,
    *,
    first_column: str = "sentence_A",
    second_column: str = "sentence_B",
    label_column: str = "entailment_judgment",
) -> list[LabelledPair]:
    """Reads pairs from a UTF-8 file, plain or `.gz`, whose first line names its columns; those of SICK by default.

    Args:
      path: of the file.
      labels: the labels there may be; None allows any.
      first_column: name of the column of the first text, of the premise, say.
      second_column: name of the column of the second text.
      label_column: name of the column of the label.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, for a column that is missing or named twice, and
        for a line with another number of columns, an empty text or another label.
    """
    header, *lines = read_lines(path)
    names = [name.strip() for name in header.split("\t")]
    wanted = (first_column, second_column, label_column)
    for name in wanted:
        if names.count(name) != 1:
            raise UserError(f"{path}, line 1: {names.count(name)} columns named {name!r}; there are {', '.join(names)}")
    if not lines:
        raise UserError(f"{path} has no pairs, only a line of column names")
    places = [names.index(name) for name in wanted]
    pairs = []
    for number, line in enumerate(lines, start=2):
        where = f"{path}, line {number}"
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != len(names):
            raise UserError(f"{where}: {len(fields)} columns, but line 1 names {len(names)}")
        for name, place in zip(wanted, places, strict=True):
            if not fields[place]:
                raise UserError(f"{where}: nothing in the column {name!r}")
        first, second, label = (fields[place] for place in places)
        pairs.append(LabelledPair(first, second, _known(label, labels, where)))
    return pairs


def _known(label: str, labels: Collection[str] | None, where: str) -> str:
    if labels is not None and label not in labels:
        raise UserError(f"{where}: the label {label!r} is none of the {len(labels)} known ones")
    return label
