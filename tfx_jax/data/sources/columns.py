"""Tables with named columns: TSV and CSV, whose first line names them, and JSON lines, each an object."""

import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence

from etils import epath

from tfx_jax.data.sources.lines import is_blank, read_lines
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json


def read_columns(path: epath.PathLike, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Reads columns of a UTF-8 file, plain or `.gz`: `.csv` with quotes as RFC 4180 has them, `.jsonl`, or else TSV.

    Args:
      path: of the file.
      names: of the columns.

    Yields:
      Where a row stands, for messages, and its values in the order of `names`, without white space around them. In
      JSON, numbers and truth values are taken for the text that they are written as.

    Raises:
      UserError: for a file that cannot be read, is empty or not UTF-8, for a column that is missing or named twice, and
        for a row with another number of columns or nothing in one of them.
    """
    kind = str(path).removesuffix(".gz").rpartition(".")[2].lower()
    rows = {"csv": _csv, "jsonl": _json_lines}.get(kind, _tsv)(path, names)
    for number, values in rows:
        where = f"{path}, line {number}"
        for name, value in zip(names, values, strict=True):
            if is_blank(value):
                raise UserError(f"{where}: nothing in the column {name!r}")
        yield where, [value.strip() for value in values]


def csv_lines(path: epath.PathLike) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or `.gz`, for `csv.reader`, to which a carriage return alone ends one too.

    Raises:
      UserError: while iterating, for a file that cannot be read, is empty or not UTF-8.
    """
    return itertools.chain.from_iterable(io.StringIO(line, newline="") for line in read_lines(path, keep_ends=True))


def _tsv(path: epath.PathLike, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    rows = ((number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1))
    _, header = next(rows)  # an empty file is an error
    return _chosen(path, header, rows, names)


def _csv(path: epath.PathLike, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(csv_lines(path), strict=True)

    def rows() -> Iterator[tuple[int, list[str]]]:
        begin = reader.line_num + 1
        try:
            for row in reader:
                if row:  # not an empty line
                    yield begin, row
                begin = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}, line {begin}: {error}") from None

    found = rows()
    _, header = next(found, (1, []))
    return _chosen(path, header, found, names)


def _chosen(
    path: epath.PathLike, header: Sequence[str], rows: Iterator[tuple[int, list[str]]], names: Sequence[str]
) -> Iterator[tuple[int, list[str]]]:
    """The columns of these names out of rows that have those of a header."""
    columns = [name.strip() for name in header]
    for name in names:
        if columns.count(name) != 1:
            raise UserError(
                f"{path}, line 1: {columns.count(name)} columns named {name!r}; there are {', '.join(columns)}"
            )
    places = [columns.index(name) for name in names]
    for number, row in rows:
        if len(row) != len(columns):
            raise UserError(f"{path}, line {number}: {len(row)} columns, but line 1 names {len(columns)}")
        yield number, [row[place] for place in places]


def _json_lines(path: epath.PathLike, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where}: no JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: a {type(row).__name__}, not an object")
        values = []
        for name in names:
            if name not in row:
                raise UserError(f"{where}: no field {name!r}; there are {', '.join(row)}")
            if not isinstance(row[name], (str, int, float)):
                raise UserError(f"{where}: the field {name!r} is no text but {json.dumps(row[name])[:40]}")
            values.append(row[name] if isinstance(row[name], str) else json.dumps(row[name]))
        yield number, values
