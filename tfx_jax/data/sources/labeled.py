"""Readers of labeled texts and of labeled pairs of texts."""

import itertools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from etils import epath

from tfx_jax.data.sources.bad_rows import parse_rows
from tfx_jax.data.sources.columns import describe_columns, read_columns
from tfx_jax.data.sources.lines import is_blank, read_first_lines, read_lines
from tfx_jax.data.sources.parquet import is_columnar
from tfx_jax.errors import UserError

_PREFIX = "__label__"  # of labels in the format of fastText


class LabeledText(NamedTuple):
    """A text and its label."""

    text: str
    label: str


class LabeledPair(NamedTuple):
    """Two texts and the label of their relation."""

    first: str
    second: str
    label: str


def read_labeled(path: epath.PathLike, labels: Collection[str] | None = None) -> list[LabeledText]:
    """Reads lines of the form label, TAB, text from a UTF-8 file, plain or `.gz`.

    If the first line begins with `__label__`, all lines have the format of fastText instead: `__label__NAME text`.

    Args:
      path: path of the file.
      labels: allowed labels, such as those of the training split; None allows any.

    Raises:
      UserError: if the file cannot be read, is empty, not UTF-8, a `.parquet` or an `.arrow`, a line is not a label,
        one TAB and a text, or is not one label and a text in fastText's format, or a label is not allowed. The first
        bad lines are named together.
    """
    if is_columnar(path):
        raise UserError(f"{path} has columns: name two as config.task.data.first_column and label_column")
    lines = read_lines(path)
    first_line = next(lines)
    split = _fasttext if first_line.lstrip().startswith(_PREFIX) else _label_and_text

    def parse(line: str) -> LabeledText:
        """Returns the text of a line with its label."""
        label, text = split(line)
        _check_label(label, labels)
        return LabeledText(text, label)

    if split is _label_and_text:
        _check_no_table(path, first_line)
    rows = enumerate(itertools.chain([first_line], lines), start=1)
    return [example for _, example in parse_rows(path, "line", rows, parse)]


def is_labeled(path: epath.PathLike, labels: Collection[str]) -> bool:
    """Returns whether one of a file's first lines begins with `__label__`, or with one of `labels` and a TAB."""
    parts = (line.partition("\t") for line in read_first_lines(path))
    return any(label.lstrip().startswith(_PREFIX) or (bool(tab) and label.strip() in labels) for label, tab, _ in parts)


def _label_and_text(line: str) -> tuple[str, str]:
    """Returns label and text of a line with one TAB between them."""
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != 2 or any(map(is_blank, fields)):
        raise UserError(f"{line[:40]!r} is not a label, one TAB and its text")
    return fields[0], fields[1]


def _check_no_table(path: epath.PathLike, first_line: str) -> None:
    """Raises UserError if the first line is not a label and a text but may name columns."""
    try:
        _label_and_text(first_line)
    except UserError as error:
        if columns := describe_columns(path):
            raise UserError(
                f"{path}, line 1: {error}; if it is {columns}, set config.task.data.first_column and label_column to "
                "two of them"
            ) from None


def _fasttext(line: str) -> tuple[str, str]:
    """Returns label and text of a line in the format of fastText, in which each word with the prefix is a label."""
    word, *rest = re.split("[ \t]+", line.strip(), maxsplit=1)
    label, text = word.removeprefix(_PREFIX), "".join(rest)
    others = [other for other in text.split() if other.startswith(_PREFIX)]
    if word.startswith(_PREFIX) and others:
        raise UserError(f"{word} and {', '.join(others)[:40]}: a text must have one label, so keep one of them")
    if not word.startswith(_PREFIX) or is_blank(label) or is_blank(text):
        raise UserError(f"{line[:40]!r} is not {_PREFIX}NAME, a space and its text, as line 1 begins")
    return label, text


def read_labeled_columns(
    path: epath.PathLike, labels: Collection[str] | None = None, *, text_column: str, label_column: str
) -> list[LabeledText]:
    """Reads texts and labels from a file with named columns, see `tfx_jax.data.sources.columns.read_columns`.

    Args:
      path: path of the file.
      labels: allowed labels; None allows any.
      text_column: name of the column of the text.
      label_column: name of the column of the label.

    Raises:
      UserError: as for `read_columns`, and if there are no rows or a label is not allowed. The first bad rows are named
        together.
    """
    rows = list(read_columns(path, (text_column, label_column), check=lambda row: _check_label(row[-1], labels)))
    if not rows:
        raise UserError(f"{path} has no texts, only a line of column names")
    return [LabeledText(text, label) for text, label in rows]


def read_labeled_pairs(
    path: epath.PathLike,
    labels: Collection[str] | None = None,
    *,
    first_column: str = "sentence_A",
    second_column: str = "sentence_B",
    label_column: str = "entailment_judgment",
) -> list[LabeledPair]:
    """Reads pairs from a file with named columns, by default those of SICK; see `read_columns`.

    Args:
      path: path of the file.
      labels: allowed labels; None allows any.
      first_column: name of the column of the first text, such as the premise.
      second_column: name of the column of the second text.
      label_column: name of the column of the label.

    Raises:
      UserError: as for `read_columns`, and if there are no rows or a label is not allowed. The first bad rows are named
        together.
    """
    names = (first_column, second_column, label_column)
    rows = list(read_columns(path, names, check=lambda row: _check_label(row[-1], labels)))
    if not rows:
        raise UserError(f"{path} has no pairs, only a line of column names")
    return [LabeledPair(first, second, label) for first, second, label in rows]


def check_repeated(texts: Sequence[LabeledText] | Sequence[LabeledPair], path: epath.PathLike) -> None:
    """Checks that the labels of a training split repeat; otherwise they are probably not labels.

    Raises:
      UserError: if there are at least 20 texts and more than half as many labels.
    """
    labels = {text.label for text in texts}
    if len(texts) >= 20 and 2 * len(labels) > len(texts):
        raise UserError(
            f"{path} has {len(texts):,} texts with {len(labels):,} different labels, for example the label "
            f"{min(labels)[:40]!r}: are the columns swapped? A line is label, TAB, text or "
            "__label__NAME text, unless config.task.data.label_column names a column"
        )


def _check_label(label: str, labels: Collection[str] | None) -> None:
    """Raises UserError if `labels` is given and does not contain the label."""
    if labels is not None and label not in labels:
        raise UserError(f"the label {label!r} is not one of the {len(labels)} known ones")
