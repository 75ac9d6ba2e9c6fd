"""Reader of columns of Parquet and Arrow files, which needs pyarrow, with few rows in memory at a time.

An Arrow file has one of the two IPC formats: "stream", which Hugging Face datasets write, or "file" (Feather 2). Of a
Parquet file a few rows are in memory, of an Arrow file a whole record batch.
"""

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from etils import epath

from tfx_jax.data.sources.bad_rows import parse_rows
from tfx_jax.data.sources.lines import MAX_LINE_BYTES
from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.files import open_regular

_ARROW_MAGIC = b"ARROW1"  # of the format "file"
_BATCH_ROWS = 64  # rows in memory; each value may have MAX_LINE_BYTES
_BUFFER_BYTES = 1 << 20  # of each column: by default pyarrow reads a whole row group, which may be the whole file


def is_columnar(path: epath.PathLike) -> bool:
    """Returns whether a file is read as Parquet or Arrow, because of its name.

    >>> [is_columnar(name) for name in ("a.parquet", "a.ARROW", "a.parquet.gz", "parquet", "a.tsv")]
    [True, True, True, False, False]
    """
    return os.fspath(path).removesuffix(".gz").lower().endswith((".parquet", ".arrow"))


def read_columnar(
    path: epath.PathLike, names: Sequence[str], *, kinds: Sequence[str] = ("text", "numbers")
) -> Iterator[tuple[int, list[str]]]:
    """Yields (row number from 1, values in the order of `names`) of each row of a Parquet or Arrow file.

    Numbers, true and false become their JSON text, as those of JSON lines do, and so do lists. Texts may be categories
    (dictionaries).

    Args:
      path: local or `gs://`.
      names: names of the columns to read.
      kinds: what columns may be: "text", "numbers" (which include true and false) or "lists".

    Raises:
      UserError: while iterating, if pyarrow is missing, the file is missing, not a regular file, damaged or without
        rows, if a column is missing, named twice or of another type, or if a value is missing, not UTF-8, not
        expressible in JSON or longer than MAX_LINE_BYTES. The first bad rows are named together.
    """
    yield from parse_rows(path, "row", *columnar_rows(path, names, kinds))


def columnar_rows(
    path: epath.PathLike, names: Sequence[str], kinds: Sequence[str] = ("text", "numbers")
) -> tuple[Iterator[tuple[int, tuple[Any, ...]]], Callable[[tuple[Any, ...]], list[str]]]:
    """Returns the numbered rows of a file, and the function that turns a row into texts; see `read_columnar`."""
    return enumerate(_rows(path, list(names), kinds), start=1), functools.partial(_texts, names)


def _texts(names: Sequence[str], values: tuple[Any, ...]) -> list[str]:
    """Returns the values of the columns `names` of a row as texts or JSON."""
    texts = []
    for name, value in zip(names, values, strict=True):
        if value is None or value != value:  # pandas writes NaN for a number that is missing
            raise UserError(f"the column {name!r} has no value: fill it or leave out the row")
        try:
            text = value if isinstance(value, str) else json.dumps(value)
        except TypeError as error:  # of times, decimals and bytes in lists
            raise UserError(f"the column {name!r} is no JSON ({one_line(error)}): write it as text") from None
        if len(text.encode()) > MAX_LINE_BYTES:
            raise UserError(f"the column {name!r} is longer than {MAX_LINE_BYTES:,} bytes: split the text")
        texts.append(text)
    return texts


def _rows(path: epath.PathLike, names: list[str], kinds: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields the Python values of the columns `names` of each row; turns all errors into UserError."""
    if os.fspath(path).endswith(".gz"):
        raise UserError(f"{path} is packed: unpack it with gunzip (Parquet and Arrow compress what they hold)")
    is_parquet = os.fspath(path).lower().endswith(".parquet")
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
            if is_parquet:
                file = parquet.ParquetFile(
                    opened, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
                )
                schema = file.schema_arrow
                batches = file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False)
            else:
                schema, batches = _arrow_batches(arrow, opened)
            _check_columns(path, arrow.types, schema, names, kinds)
            begin = 1
            for batch in batches:
                columns = [_values(batch.column(name), f"{path}, row", begin, name) for name in names]
                yield from zip(*columns, strict=True)
                begin += batch.num_rows
            if begin == 1:
                raise UserError(f"{path} has no rows")
        except UserError:
            raise
        except Exception as error:  # pyarrow's are of many types: ArrowInvalid, OSError, OverflowError, MemoryError
            kind = "Parquet" if is_parquet else "Arrow"
            raise UserError(f"{path} is not a whole {kind} file ({one_line(error)}): copy or write it again") from None


def _arrow_batches(arrow: Any, opened: BinaryIO) -> tuple[Any, Iterator[Any]]:
    """Returns the schema and the batches of an Arrow file of either format, each of at most `_BATCH_ROWS` rows."""
    ipc: Any = importlib.import_module("pyarrow.ipc")
    is_file_format = opened.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    opened.seek(0)
    reader = ipc.open_file(opened) if is_file_format else ipc.open_stream(opened)

    def batches() -> Iterator[Any]:
        """Yields the batches, checked and cut to at most `_BATCH_ROWS` rows."""
        whole = map(reader.get_batch, range(reader.num_record_batches)) if is_file_format else iter(reader)
        for batch in whole:
            batch.validate(full=True)  # pyarrow trusts the offsets of texts in a file
            for begin in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(begin, _BATCH_ROWS)

    return reader.schema, batches()


def _values(column: Any, where: str, begin: int, name: str) -> list[Any]:
    """Returns the values of a column, whose UTF-8 pyarrow does not check when it reads a file.

    `where` and `begin`, the number of the first row, locate a value that is not UTF-8 in the UserError.
    """
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


def _check_columns(path: epath.PathLike, types: Any, schema: Any, names: Sequence[str], kinds: Sequence[str]) -> None:
    """Raises UserError unless each column exists once and has a type of `kinds`; `types` is `pyarrow.types`."""
    for name in names:
        if schema.names.count(name) != 1:
            raise UserError(
                f"{path}: {schema.names.count(name)} columns named {name!r}; there are {', '.join(schema.names)}"
            )
        column_type = schema.field(name).type
        # A dictionary type stores each distinct value once, and a number for each row.
        value_type = column_type.value_type if types.is_dictionary(column_type) else column_type
        is_kind = {
            "text": types.is_string(value_type)
            or types.is_large_string(value_type)
            or types.is_string_view(value_type),
            "numbers": types.is_integer(value_type) or types.is_floating(value_type) or types.is_boolean(value_type),
            "lists": types.is_list(column_type) or types.is_large_list(column_type),
        }
        if not any(is_kind[kind] for kind in kinds):
            expected = ", ".join("numbers, or true and false" if kind == "numbers" else kind for kind in kinds)
            raise UserError(f"{path}: the column {name!r} must be {expected}, got {str(column_type)[:40]}")


def _import_pyarrow(path: epath.PathLike) -> tuple[Any, Any]:
    """Returns the modules `pyarrow` and `pyarrow.parquet`, imported at first use: it is an optional package."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow ({one_line(error)}): {install_command('parquet')}") from None
