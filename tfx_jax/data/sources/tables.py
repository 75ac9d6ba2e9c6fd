"""Reader of CSV tables of numbers with a binary label for each row."""

import math
import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from etils import epath

from tfx_jax.data.sources.bad_rows import parse_rows
from tfx_jax.data.sources.columns import csv_rows
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.errors import UserError

_INDEX = re.compile(r"Unnamed: \d+")  # pandas's name for a column without a name


class Table(NamedTuple):
    """A table of measurements.

    Attributes:
      columns: names of the columns, without the label and excluded columns.
      values: float64 [rows, columns]; NaN for missing values.
      labels: 0 or 1, int64 [rows].
    """

    columns: tuple[str, ...]
    values: np.ndarray
    labels: np.ndarray


def read_table(path: epath.PathLike, *, label_column: str, exclude: Collection[str] = ()) -> Table:
    """Reads comma-separated values (RFC 4180) from a UTF-8 file, plain or `.gz`, whose first line names the columns.

    Args:
      path: path of the file.
      label_column: name of the column with the label, 0 or 1.
      exclude: names of columns to ignore.

    Raises:
      UserError: if the file cannot be read, is empty or not UTF-8, or has no rows or no columns left; if a column is
        missing, unnamed or named twice; if a row has another number of cells, a cell is not a finite number, or a label
        is not 0 or 1. Empty cells and NaN are missing values and allowed. The first bad rows are named together.
    """
    rows = csv_rows(path)
    _, header = next(rows, (1, []))
    names = [name.strip() for name in header]
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
    # Indices of the columns to keep as values.
    indices = [index for index, name in enumerate(names) if name not in {label_column, *exclude}]
    if not indices:
        raise UserError(f"{path}, line 1: no column is left besides the label and the excluded columns")
    label_index = names.index(label_column)

    def parse(cells: list[str]) -> tuple[list[float], int]:
        """Returns the values and the label of a row."""
        if len(cells) != len(names):
            raise UserError(f"{len(cells)} cells, but line 1 names {len(names)} columns")
        label = _label(cells[label_index], label_column)
        return [_number(cells[index], names[index]) for index in indices], label

    values, labels = [], []
    for _, (row_values, label) in parse_rows(path, "line", rows, parse):
        values.append(row_values)
        labels.append(label)
    if not values:
        raise UserError(f"{path} has no rows, only a line of column names")
    return Table(tuple(names[index] for index in indices), np.array(values, np.float64), np.array(labels, np.int64))


def _number(cell: str, column: str) -> float:
    """Returns the value of a cell, NaN for a blank one; raises UserError if it is not a finite number."""
    if is_blank(cell):
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        raise UserError(
            f"column {column!r}: {cell[:40]!r} is not a number; exclude the column or encode it as numbers"
        ) from None
    if math.isinf(number):
        raise UserError(f"column {column!r}: {cell[:40]!r} is not finite")
    return number


def _label(cell: str, column: str) -> int:
    """Returns the label in a cell, 0 or 1; raises UserError for any other value."""
    label = _number(cell, column)
    if label not in (0.0, 1.0):
        raise UserError(f"column {column!r}: the label must be 0 or 1, got {cell!r}")
    return int(label)
