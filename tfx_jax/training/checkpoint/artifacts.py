"""Files that the checkpoints of a workdir are of no use without, such as the tokenizer: made once, checked when read.

    artifacts = WorkdirArtifacts(workdir, can_make=is_training)
    with artifacts.checked("labels.json") as is_new:
        ...  # makes the file if is_new, then reads it

`artifacts.json` lists the SHA-256 of each. A file that is not listed, because the list is lost or older versions made
the workdir, is used as it is, with a warning; the next training lists it.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.errors import UserError, one_line
from tfx_jax.files import parse_json, read_small_file
from tfx_jax.training.sharding.distributed import is_primary, process0_first

_MANIFEST = "artifacts.json"
_SEAL = "sha256"
_REMEDY = "put back a copy, or the file that the same training makes in another --workdir"


class WorkdirArtifacts:
    """The artifacts of a workdir, see `tfx_jax.tasks.task.Artifacts`.

    Attributes:
      folder: the workdir.
      starts_from_model: whether the training starts from the parameters of another model.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        *,
        can_make: bool,
        find_tokenizer: Callable[[], epath.Path] | None = None,
    ):
        """Opens the workdir of a training, where nothing is written yet.

        Args:
          workdir: local or gs://.
          can_make: whether this is a training. Nothing else makes anything in a workdir, and neither does a training
            that has a checkpoint already: what it made now might not be what the checkpoint was trained with.
          find_tokenizer: returns the folder of the tokenizer of the model that the training starts from; None if it
            starts from none.
        """
        self.folder, self._can_make = epath.Path(workdir), can_make
        self.starts_from_model, self._find_tokenizer = find_tokenizer is not None, find_tokenizer

    def initial_tokenizer(self) -> epath.Path:
        """Returns the folder of the tokenizer of the model that the training starts from."""
        if self._find_tokenizer is None:
            raise ValueError("the training starts from no model")
        return self._find_tokenizer()

    @contextlib.contextmanager
    def checked(self, name: str) -> Iterator[bool]:
        """Checks a file of the workdir, or the files of a folder there, before the block reads them.

        Where several processes train, all of them call this; process 0 goes first, and the others find what it made.

        Args:
          name: of the file or the folder.

        Yields:
          Whether the block is to make what is missing; it writes each file at once or not at all.

        Raises:
          UserError: if a file is missing, or is another one than was listed.
        """
        folder = self.folder
        with process0_first(name):
            files = _listed(folder, name)
            is_there = bool(files) and all((folder / file).exists() for file in files)
            is_new = self._can_make and not is_there and not has_checkpoints(folder)
            check_artifact(folder, name, may_be_missing=is_new)
            yield is_new
            if self._can_make and not is_there and is_primary():
                _add(folder, name)


def check_artifact(workdir: epath.PathLike, name: str, *, may_be_missing: bool = False) -> None:
    """Compares a file of a workdir, or the files of a folder there, with the list; warns if they are not in it.

    Raises:
      UserError: if a file is missing (unless it may be), or is another one than was listed.
    """
    folder = epath.Path(workdir)
    files = _listed(folder, name)
    for file in files or [name]:
        path = folder / file
        if not path.exists():
            if may_be_missing:
                continue
            if not has_checkpoints(folder):
                raise UserError(f"{path} is missing: train there first")
            raise UserError(f"{path} is missing, and the checkpoints beside it need it: {_REMEDY}")
        if files and _checksum(path) != files[file]:
            remedy = _REMEDY if has_checkpoints(folder) else "delete it, and the training's command makes it again"
            raise UserError(f"{path} is damaged: its SHA-256 is not the one in {_MANIFEST}; {remedy}")
    if not files and not may_be_missing and is_primary():
        logging.warning("%s is used unchecked: it is not listed in %s", folder / name, folder / _MANIFEST)


def listed_artifacts(workdir: epath.PathLike) -> str:
    """What `artifacts.json` says of all files, as this process sees it."""
    return json.dumps(_read_manifest(epath.Path(workdir)), sort_keys=True)


def has_checkpoints(folder: epath.Path) -> bool:
    """Whether a workdir has a checkpoint."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def _listed(folder: epath.Path, name: str) -> dict[str, str]:
    """The checksums of the file with this name, or of the files in the folder with it."""
    return {
        file: checksum
        for file, checksum in _read_manifest(folder).items()
        if file == name or file.startswith(f"{name}/")
    }


def _read_manifest(folder: epath.Path) -> dict[str, str]:
    path = folder / _MANIFEST
    if not path.exists():
        return {}
    try:
        values = read_sealed(path)
        if values.keys() != {"files"}:
            raise ValueError("it has no files")
        files = dict(values["files"])
        for name in files:
            parts = pathlib.PurePosixPath(name).parts
            if not parts or ".." in parts or name != "/".join(parts) or name.startswith("/"):
                raise ValueError(f"{name!r} is no file of the workdir")
        return files
    except OSError as error:
        raise _unreadable(path, error) from None
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): put back a copy, or delete it to go on unchecked") from None


def _add(folder: epath.Path, name: str) -> None:
    path = folder / name
    found = [f"{name}/{file.name}" for file in path.iterdir() if file.is_file()] if path.is_dir() else [name]
    files = _read_manifest(folder) | {file: _checksum(folder / file) for file in found if not file.endswith(".partial")}
    write_sealed(folder / _MANIFEST, {"files": dict(sorted(files.items()))})


def _checksum(path: epath.Path) -> str:
    try:
        return hashlib.sha256(read_small_file(path)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: epath.Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or one_line(error)}")


def write_sealed(path: epath.Path, values: dict[str, Any]) -> None:
    """Writes a JSON object that holds its own checksum, on its first line: without this line it still is JSON."""
    write_file(path, (json.dumps({_SEAL: _seal(values)} | values, indent=2) + "\n").encode())


def read_sealed(path: epath.Path) -> dict[str, Any]:
    """Reads what `write_sealed` wrote; an object without a checksum is taken as it is.

    Raises:
      OSError: if it cannot be read.
      UserError: if it is a pipe, a device or the like.
      ValueError: if it is no JSON object, or not the one that was written.
    """
    values = parse_json(read_small_file(path))
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}, not an object")
    if values.pop(_SEAL, None) not in (None, _seal(values)):
        raise ValueError(f'its values are not those that were saved; after an intended edit, delete its line "{_SEAL}"')
    return values


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
