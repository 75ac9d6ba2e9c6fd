"""Record of the data files of a run, so that a resumed run cannot continue with different files.

`data.json` in the workdir lists each file or folder that the configuration names for training and validation, with the
size and a BLAKE2b checksum of names, sizes and contents. Contents are read once: a later start that finds the same
names, sizes and modification times takes the checksum from `data.json`. Of files larger than 1 GiB, 1,024 evenly spaced
blocks of 1 MiB are read. In a store (gs://, s3://) only sizes are compared. For a table of images or sounds, the table
is recorded, but not the files that it names.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import is_local
from tfx_jax.tasks.files import FILE_FIELDS, FROM_FILES, named_paths
from tfx_jax.training.checkpoint.artifacts import has_checkpoints, read_sealed, write_sealed
from tfx_jax.training.sharding.distributed import is_primary, process0_first

_RECORD = "data.json"
_BLOCK, _NUM_BLOCKS = 1 << 20, 1 << 10

_Record = dict[str, Any]
"""Record of a file or folder: "size", "checksum" and "stamp", a hash of names, sizes and modification times."""


def check_data_files(data: Any, workdir: epath.Path) -> None:
    """Records the data files of a run; if the run has checkpoints, checks that the files match the record.

    Args:
      data: `config.task.data`.
      workdir: folder of the run. Process 0 does the work.

    Raises:
      UserError: if a file was changed, added or removed.
    """
    with process0_first(_RECORD):
        if is_primary():
            _check(data, workdir)


def _check(data: Any, workdir: epath.Path) -> None:
    """Does the work of `check_data_files` in process 0."""
    path = workdir / _RECORD
    try:
        saved = read_sealed(path)["files"] if path.exists() else {}
        known: dict[str, _Record] = {name: dict(record) for name, record in saved.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be used ({error}): delete it to resume with the current data") from None
    current = {name: _record(file, known.get(name, {})) for name, file in _named(data).items()}
    if known and has_checkpoints(workdir):
        remedy = f"restore the old data, or use a new workdir: the checkpoints in {workdir} belong to the old data"
        known_fields = {name.partition(":")[0] for name in known}  # names are "FIELD: PATH"
        for name in sorted(known.keys() | current.keys()):
            old, new = known.get(name), current.get(name)
            # A field without any recorded file is accepted: a validation split may be added to a run.
            if old is None and name.partition(":")[0] in known_fields:
                raise UserError(f"config.task.data.{name} is new: {remedy}")
            if new is None:
                raise UserError(f"config.task.data.{name} is missing: {remedy}")
            if old is not None and any(old.get(part) != new[part] for part in ("size", "checksum")):
                part = "size" if old.get("size") != new["size"] else "content"
                raise UserError(f"config.task.data.{name} was changed (its {part} differs): {remedy}")
    if current != known:
        write_sealed(path, {"files": current})


def _named(data: Any) -> dict[str, epath.Path]:
    """Returns the existing files and folders that the configuration names, by keys such as "train_file: a.txt"."""
    if getattr(data, "dataset", "") not in FROM_FILES:
        return {}
    fields = {field: getattr(data, field, "") for field in FILE_FIELDS if not field.startswith("test_")}
    return {
        f"{field}: {os.fspath(path)}": path
        for field, names in fields.items()
        if names
        for path in named_paths(data.data_dir, names)
        if path.exists()
    }


def _record(path: epath.Path, known: _Record) -> _Record:
    """Returns the record of a file or folder: the `known` one, without reading contents, if its stamp is right."""
    if not is_local(path):
        return {"size": path.stat().length, "checksum": "", "stamp": ""}
    files = list(_files(pathlib.Path(path)))
    described = [(name, stat.st_size, stat.st_mtime_ns) for name, _, stat in files]
    stamp = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
    if known.get("stamp") == stamp:
        return known
    sizes = [stat.st_size for _, _, stat in files]
    digest = hashlib.blake2b(json.dumps([(name, size) for name, size, _ in described]).encode(), digest_size=16)
    for block in _blocks([file for _, file, _ in files], sizes):
        digest.update(block)
    return {"size": sum(sizes), "checksum": digest.hexdigest(), "stamp": stamp}


def _files(path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, os.stat_result]]:
    """Yields relative name, path and status of a file, or of all files of a folder."""
    if not path.is_dir():
        yield "", path, path.stat()
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = pathlib.Path(folder) / name
            if file.is_file():
                yield os.fspath(file.relative_to(path)), file, file.stat()


def _blocks(files: list[pathlib.Path], sizes: list[int]) -> Iterator[bytes]:
    """Yields the bytes of the concatenated files or, if they are large, evenly spaced blocks of them."""
    # All positions count bytes of the concatenated files. Each block begins at a multiple of `step`; for small files,
    # `step` is the block size, so there are no gaps. A block that extends over two files is read in two parts.
    step = max(_BLOCK, sum(sizes) // _NUM_BLOCKS)
    file_begin = 0
    for path, size in zip(files, sizes, strict=True):
        with path.open("rb") as file:
            block_begin = file_begin - file_begin % step
            while block_begin < file_begin + size:
                begin, end = max(block_begin, file_begin), min(block_begin + _BLOCK, file_begin + size)
                if end > begin:
                    file.seek(begin - file_begin)
                    yield file.read(end - begin)
                block_begin += step
        file_begin += size
