"""Reader of tables with named columns: TSV and CSV with a header line, JSON lines, and Parquet."""

import csv
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from tfx_jax.data.sources.bad_rows import parse_rows
from tfx_jax.data.sources.lines import MAX_LINE_BYTES, is_blank, read_first_lines, read_lines
from tfx_jax.data.sources.parquet import columnar_rows, is_columnar
from tfx_jax.errors import UserError
from tfx_jax.files import parse_json

# Numbered rows, and the function that returns the values of the columns of a row.
_Rows = tuple[Iterator[tuple[int, Any]], Callable[[Any], list[str]]]


def read_columns(
    path: epath.PathLike,
    names: Sequence[str],
    *,
    allow_blank: bool = False,
    check: Callable[[list[str]], object] = lambda values: None,
) -> Iterator[list[str]]:
    """Reads columns of a `.parquet`, or of UTF-8, plain or `.gz`: `.csv` (RFC 4180), `.jsonl`, otherwise TSV.

    Args:
      path: path of the file.
      names: names of the columns to read.
      allow_blank: whether values may be blank; a value that is missing in Parquet is refused in any case.
      check: called with the values of each row; raises UserError with the problem of a bad one.

    Yields:
      The values of each row in the order of `names`. White space around values is removed. In JSON and Parquet,
      numbers, true and false become their JSON text.

    Raises:
      UserError: if the file cannot be read, is empty or not UTF-8, a column is missing or named twice, or a row has
        another number of columns or, without `allow_blank`, a blank value; and as for
        `tfx_jax.data.sources.parquet.read_columnar`. The first bad rows are named together.
    """
    if is_columnar(path):
        unit, open_rows = "row", columnar_rows
    else:
        unit, open_rows = "line", {"csv": _csv, "jsonl": _json_lines}.get(table_kind(path), _tsv)
    rows, parse = open_rows(path, names)

    def checked(row: Any) -> list[str]:
        """Returns the values of a row without white space around them."""
        values = parse(row)
        for name, value in zip(names, values, strict=True):
            if is_blank(value) and not allow_blank:
                raise UserError(f"the column {name!r} is blank")
        values = [value.strip() for value in values]
        check(values)
        return values

    for _, values in parse_rows(path, unit, rows, checked):
        yield values


def is_table(path: epath.PathLike, names: Sequence[str] = ()) -> bool:
    """Returns whether a file has named columns: by its suffix, or because its first line has TABs and one of `names`.

    >>> [is_table(name) for name in ("a.csv", "a.tsv.gz", "a.JSONL", "a.parquet", "a.txt")]
    [True, True, True, True, False]
    """
    if is_columnar(path) or table_kind(path) in ("csv", "tsv", "jsonl"):
        return True
    fields = [field.strip() for field in read_first_lines(path)[0].split("\t")]
    return len(fields) > 1 and any(name in fields for name in names)


def describe_columns(path: epath.PathLike) -> str | None:
    """Describes the format and the columns of a text file, such as "CSV with columns text, stars".

    Returns None if line 1 does not have several columns or, in a `.jsonl`, is no JSON object.

    Raises:
      UserError: if the file cannot be read, is empty or not UTF-8.
    """
    kind = table_kind(path)
    first_line = next(read_lines(path))
    if kind == "jsonl":
        try:
            row = parse_json(first_line)
        except ValueError:
            return None
        return f"JSON lines with fields {', '.join(row)}" if isinstance(row, dict) else None
    delimiter, name = ("\t", "TSV") if kind != "csv" and "\t" in first_line else (",", "CSV")
    try:
        columns = next(csv.reader([first_line], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return None
    return f"{name} with columns {', '.join(map(str.strip, columns))}" if len(columns) > 1 else None


def table_kind(path: epath.PathLike) -> str:
    """Returns the suffix of a name without ".gz", in lower case and without its dot."""
    return str(path).removesuffix(".gz").rpartition(".")[2].lower()


def csv_rows(path: epath.PathLike) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of its first line, fields) of each row of a UTF-8 CSV file, plain or `.gz`, that is not empty.

    Raises:
      UserError: while iterating, if the file cannot be read, is empty or not UTF-8, or quotation marks are not those of
        RFC 4180.
    """
    # `csv.reader` also ends lines at a lone "\r". Without `strict`, a mark that nothing closes takes all rows after it.
    lines = itertools.chain.from_iterable(io.StringIO(line, newline="") for line in read_lines(path, keep_ends=True))
    csv.field_size_limit(MAX_LINE_BYTES)  # of all readers; it is 128 KiB by default
    reader = csv.reader(lines, strict=True)
    begin = 1  # first line of the next row, which may span several lines
    try:
        for row in reader:
            if row:  # not an empty line
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {begin}: {error}") from None


def _tsv(path: epath.PathLike, names: Sequence[str]) -> _Rows:
    """Opens a TSV file."""
    rows = ((number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1))
    _, header = next(rows)  # `read_lines` raises for an empty file
    return rows, _selection(path, header, names)


def _csv(path: epath.PathLike, names: Sequence[str]) -> _Rows:
    """Opens a CSV file, whose rows have the numbers of their first lines."""
    rows = csv_rows(path)
    _, header = next(rows, (1, []))
    return rows, _selection(path, header, names)


def _selection(
    path: epath.PathLike, header: Sequence[str], names: Sequence[str]
) -> Callable[[Sequence[str]], list[str]]:
    """Returns a function that selects the columns `names` of a row whose columns are named by `header`."""
    columns = [name.strip() for name in header]
    for name in names:
        if columns.count(name) != 1:
            raise UserError(
                f"{path}, line 1: {columns.count(name)} columns named {name!r}; there are {', '.join(columns)}"
            )
    indices = [columns.index(name) for name in names]

    def select(row: Sequence[str]) -> list[str]:
        """Returns the values of the columns of a row."""
        if len(row) != len(columns):
            raise UserError(f"{len(row)} columns, but line 1 names {len(columns)}")
        return [row[index] for index in indices]

    return select


def _json_lines(path: epath.PathLike, names: Sequence[str]) -> _Rows:
    """Opens a file whose lines are JSON objects with the fields `names`."""
    return enumerate(read_lines(path), start=1), functools.partial(_json_values, names)


def _json_values(names: Sequence[str], line: str) -> list[str]:
    """Returns the values of the fields `names` of a JSON object."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"must be a JSON object, got a {type(row).__name__}")
    values = []
    for name in names:
        if name not in row:
            raise UserError(f"no field {name!r}; there are {', '.join(row)}")
        if not isinstance(row[name], (str, int, float)):
            raise UserError(
                f"the field {name!r} must be text, a number, true or false, got {json.dumps(row[name])[:40]}"
            )
        values.append(row[name] if isinstance(row[name], str) else json.dumps(row[name]))
    return values
