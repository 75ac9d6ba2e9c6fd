"""Tables of numbers with a label for each row, in files of comma-separated values."""

import csv
import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from tfx_jax.data.sources.columns import csv_lines
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.errors import UserError

_INDEX = re.compile(r"Unnamed: \d+")  # what pandas calls a column without a name


class Table(NamedTuple):
    """Rows of measurements.

    Attributes:
      columns: the name of each column, without the label and those that were left out.
      values: float64 [rows, columns]; NaN where nothing was measured.
      labels: 0 or 1, int64 [rows].
    """

    columns: tuple[str, ...]
    values: np.ndarray
    labels: np.ndarray


def read_table(path: epath.PathLike, *, label_column: str, exclude: Collection[str] = ()) -> Table:
    """Reads comma-separated values (RFC 4180) from a UTF-8 file, plain or `.gz`, whose first line names the columns.

    Args:
      path: of the file.
      label_column: name of the column that says 0 or 1.
      exclude: names of columns that are not read, whatever they hold.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, has no rows or no column that is left, for a
        column that is missing, without a name or named twice, for a row with another number of cells, for a cell that
        is no finite number, and for a label that is neither 0 nor 1. An empty cell, or one that says NaN, was not
        measured.
    """
    reader = csv.reader(csv_lines(path))
    try:
        return _read_table(reader, path, label_column, exclude)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _read_table(reader: Any, path: epath.PathLike, label_column: str, exclude: Collection[str]) -> Table:
    names = [name.strip() for name in next(reader)]
    for number, name in enumerate(names, 1):
        if is_blank(name) or (_INDEX.fullmatch(name) and name not in exclude):
            raise UserError(
                f"{path}, line 1: column {number} has no name ({name!r}), like the row numbers that pandas writes: "
                "remove it (index=False) or name it"
            )
    for name in dict.fromkeys((label_column, *exclude, *names)):
        if names.count(name) != 1:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise UserError(f"{path}, line 1: {names.count(name)} columns named {name!r}; there are {shown}")
    places = [place for place, name in enumerate(names) if name not in {label_column, *exclude}]
    if not places:
        raise UserError(f"{path}, line 1: no column is left beside the label and those that are excluded")
    label_place, values, labels = names.index(label_column), [], []
    for cells in reader:
        if not cells:  # a blank line
            continue
        where = f"{path}, line {reader.line_num}"
        if len(cells) != len(names):
            raise UserError(f"{where}: {len(cells)} cells, but line 1 names {len(names)} columns")
        labels.append(_label(cells[label_place], label_column, where))
        values.append([_number(cells[place], names[place], where) for place in places])
    if not values:
        raise UserError(f"{path} has no rows, only a line of column names")
    return Table(tuple(names[place] for place in places), np.array(values, np.float64), np.array(labels, np.int64))


def _number(cell: str, column: str, where: str) -> float:
    if is_blank(cell):
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        raise UserError(
            f"{where}, column {column!r}: {cell[:40]!r} is no number; exclude the column, or code it"
        ) from None
    if math.isinf(number):
        raise UserError(f"{where}, column {column!r}: {cell!r} is not finite")
    return number


def _label(cell: str, column: str, where: str) -> int:
    label = _number(cell, column, where)
    if label not in (0.0, 1.0):
        raise UserError(f"{where}, column {column!r}: the label {cell!r} is neither 0 nor 1")
    return int(label)
