"""Reader of columns of Parquet files, which needs pyarrow, with a few rows in memory at a time."""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from tfx_jax.data.sources.lines import MAX_LINE_BYTES
from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.files import open_regular

_BATCH_ROWS = 64  # rows in memory; each value may have MAX_LINE_BYTES
_BUFFER_BYTES = 1 << 20  # of each column: by default pyarrow reads a whole row group, which may be the whole file


def is_parquet(path: epath.PathLike) -> bool:
    """Returns whether a file is read as Parquet, because of its name.

    >>> [is_parquet(name) for name in ("a.parquet", "a.PARQUET", "a.parquet.gz", "parquet", "a.tsv")]
    [True, True, True, False, False]
    """
    return os.fspath(path).removesuffix(".gz").lower().endswith(".parquet")


def read_parquet(
    path: epath.PathLike, names: Sequence[str], *, text_only: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yields (row number from 1, values in the order of `names`) of each row of a Parquet file.

    Numbers, true and false become their JSON text, as those of JSON lines do. Texts may be categories (dictionaries).

    Args:
      path: local or `gs://`.
      names: names of the columns to read.
      text_only: whether columns must be text, and may not be numbers, true or false.

    Raises:
      UserError: while iterating, if pyarrow is missing, the file is missing, not a regular file, damaged or without
        rows, if a column is missing, named twice or of another type, or if a value is missing, not UTF-8 or longer
        than MAX_LINE_BYTES.
    """
    number = 0
    for number, values in enumerate(_rows(path, list(names), text_only), start=1):
        where = f"{path}, row {number}"
        for name, value in zip(names, values, strict=True):
            if value is None or value != value:  # pandas writes NaN for a number that is missing
                raise UserError(f"{where}: the column {name!r} has no value: fill it or leave out the row")
            if isinstance(value, str) and len(value.encode()) > MAX_LINE_BYTES:
                raise UserError(f"{where}: the column {name!r} is longer than {MAX_LINE_BYTES:,} bytes: split the text")
        yield number, [value if isinstance(value, str) else json.dumps(value) for value in values]
    if not number:
        raise UserError(f"{path} has no rows")


def _rows(path: epath.PathLike, names: list[str], text_only: bool) -> Iterator[tuple[Any, ...]]:
    if os.fspath(path).endswith(".gz"):
        raise UserError(f"{path} is packed: unpack it with gunzip (what Parquet holds is compressed already)")
    arrow, parquet = _import_pyarrow(path)
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory: name the files in it, such as {path}/*.parquet") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    with opened:
        try:
            file = parquet.ParquetFile(
                opened, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
            )
            _check_columns(path, arrow.types, file.schema_arrow, names, text_only)
            begin = 1
            for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                columns = [_values(batch.column(name), f"{path}, row", begin, name) for name in names]
                yield from zip(*columns, strict=True)
                begin += batch.num_rows
        except UserError:
            raise
        except Exception as error:  # pyarrow's are of many types: ArrowInvalid, OSError, OverflowError, MemoryError
            raise UserError(f"{path} is not a whole Parquet file ({one_line(error)}): copy or write it again") from None


def _values(column: Any, where: str, begin: int, name: str) -> list[Any]:
    """Returns the values of a column, whose UTF-8 pyarrow does not check when it reads a file."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for number, value in enumerate(column, start=begin):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} {number}: the column {name!r} is not UTF-8 ({error.reason}): write the file again"
                ) from None
        raise


def _check_columns(path: epath.PathLike, types: Any, schema: Any, names: Sequence[str], text_only: bool) -> None:
    for name in names:
        if schema.names.count(name) != 1:
            raise UserError(
                f"{path}: {schema.names.count(name)} columns named {name!r}; there are {', '.join(schema.names)}"
            )
        kind = schema.field(name).type
        value_kind = kind.value_type if types.is_dictionary(kind) else kind
        is_text = types.is_string(value_kind) or types.is_large_string(value_kind) or types.is_string_view(value_kind)
        is_number = types.is_integer(value_kind) or types.is_floating(value_kind) or types.is_boolean(value_kind)
        if not (is_text or (is_number and not text_only)):
            wanted = "text" if text_only else "text, numbers, or true and false"
            raise UserError(f"{path}: the column {name!r} must be {wanted}, got {str(kind)[:40]}")


def _import_pyarrow(path: epath.PathLike) -> tuple[Any, Any]:
    """Returns the modules `pyarrow` and `pyarrow.parquet`, imported at first use: it is an optional package."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow ({one_line(error)}): {install_command('parquet')}") from None
