"""Files that the checkpoints of a workdir need, such as the tokenizer: created once, verified at each use.

    artifacts = WorkdirArtifacts(workdir, can_make=is_training)
    with artifacts.checked("labels.json") as is_new:
        ...  # creates the file if is_new, then reads it

`artifacts.json` lists the SHA-256 of each file. A file that is not listed (because the list is lost, or an older
version created the workdir) is used with a warning; the next training run lists it.
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
_REMEDY = "restore a copy, or use the file that the same training command creates in a new workdir"


class WorkdirArtifacts:
    """Files of a workdir with their checksums; implements `tfx_jax.tasks.task.Artifacts`.

    Attributes:
      folder: the workdir.
      starts_from_model: whether the run starts from the parameters of another model.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        *,
        can_make: bool,
        find_tokenizer: Callable[[], epath.Path] | None = None,
    ):
        """Opens a workdir; nothing is written yet.

        Args:
          workdir: local or gs://.
          can_make: whether missing files may be created: True for training. A run that has a checkpoint already creates
            nothing either, because a new file might differ from the one that the checkpoint was trained with.
          find_tokenizer: returns the tokenizer folder of the model that the run starts from; None if it starts from
            random parameters.
        """
        self.folder = epath.Path(workdir)
        self.starts_from_model = find_tokenizer is not None
        self._can_make = can_make
        self._find_tokenizer = find_tokenizer

    def initial_tokenizer(self) -> epath.Path:
        """Returns the tokenizer folder of the model that the run starts from."""
        if self._find_tokenizer is None:
            raise ValueError("the run starts from random parameters: there is no initial tokenizer")
        return self._find_tokenizer()

    @contextlib.contextmanager
    def checked(self, name: str) -> Iterator[bool]:
        """Verifies a file or folder of the workdir before the block reads it.

        All processes of a run call this. Process 0 runs the block first; the others then find the files it created.

        Args:
          name: name of the file or folder.

        Yields:
          Whether the block must create what is missing. It must write each file atomically.

        Raises:
          UserError: if a file is missing or differs from the listed checksum.
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
    """Compares a file of a workdir, or the files of a folder there, with their listed checksums; warns if not listed.

    Raises:
      UserError: if a file is missing (unless `may_be_missing`) or differs from its checksum.
    """
    folder = epath.Path(workdir)
    files = _listed(folder, name)
    for file in files or [name]:
        path = folder / file
        if not path.exists():
            if may_be_missing:
                continue
            if not has_checkpoints(folder):
                raise UserError(f"{path} is missing: run tfx-jax train with this --workdir first")
            raise UserError(f"{path} is missing, but the checkpoints need it: {_REMEDY}")
        if files and _checksum(path) != files[file]:
            remedy = _REMEDY if has_checkpoints(folder) else "delete it and rerun the training command to create it"
            raise UserError(f"{path} is damaged: its SHA-256 is not the one in {_MANIFEST}; {remedy}")
    if not files and not may_be_missing and is_primary():
        logging.warning("%s is not verified, because it is not listed in %s", folder / name, folder / _MANIFEST)


def listed_artifacts(workdir: epath.PathLike) -> str:
    """Returns the content of `artifacts.json`, as this process sees it, to compare processes."""
    return json.dumps(_read_manifest(epath.Path(workdir)), sort_keys=True)


def has_checkpoints(folder: epath.Path) -> bool:
    """Returns whether a workdir has a checkpoint."""
    return newest_step(folder) is not None


def newest_step(folder: epath.Path) -> int | None:
    """Returns the step of the newest checkpoint of a workdir, readable or not; None if there is none."""
    checkpoints = folder / "checkpoints"
    paths = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return max((int(path.name) for path in paths if path.name.isdecimal()), default=None)


def _listed(folder: epath.Path, name: str) -> dict[str, str]:
    """Returns the listed checksums of the file `name`, or of the files in the folder `name`."""
    return {
        file: checksum
        for file, checksum in _read_manifest(folder).items()
        if file == name or file.startswith(f"{name}/")
    }


def _read_manifest(folder: epath.Path) -> dict[str, str]:
    """Returns the checksums in `artifacts.json` by file name; {} if it does not exist.

    Raises:
      UserError: if it cannot be read, is damaged, or names a file outside the workdir.
    """
    path = folder / _MANIFEST
    if not path.exists():
        return {}
    try:
        values = read_sealed(path)
        if values.keys() != {"files"}:
            raise ValueError('it has no "files"')
        files = dict(values["files"])
        for name in files:
            parts = pathlib.PurePosixPath(name).parts
            if not parts or ".." in parts or name != "/".join(parts) or name.startswith("/"):
                raise ValueError(f"{name!r} is not the path of a file inside the workdir")
        return files
    except OSError as error:
        raise _unreadable(path, error) from None
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): restore a copy, or delete it to continue without verification"
        ) from None


def _add(folder: epath.Path, name: str) -> None:
    """Adds the checksums of the file `name`, or of the files in the folder `name`, to `artifacts.json`."""
    path = folder / name
    names = [f"{name}/{file.name}" for file in path.iterdir() if file.is_file()] if path.is_dir() else [name]
    # A file that ends with ".partial" is the remains of an interrupted write.
    new_checksums = {file: _checksum(folder / file) for file in names if not file.endswith(".partial")}
    files = _read_manifest(folder) | new_checksums
    write_sealed(folder / _MANIFEST, {"files": dict(sorted(files.items()))})


def _checksum(path: epath.Path) -> str:
    """Returns the SHA-256 of a file, hexadecimal; raises UserError if it cannot be read."""
    try:
        return hashlib.sha256(read_small_file(path)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: epath.Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or one_line(error)}")


def write_sealed(path: epath.Path, values: dict[str, Any]) -> None:
    """Writes a JSON object with its own checksum on the first line."""
    write_file(path, (json.dumps({_SEAL: _seal(values)} | values, indent=2) + "\n").encode())


def read_sealed(path: epath.Path) -> dict[str, Any]:
    """Reads an object that `write_sealed` wrote; an object without a checksum is accepted.

    Raises:
      OSError: if it cannot be read.
      UserError: if it is a pipe, device or socket.
      ValueError: if it is not a JSON object, or differs from its checksum.
    """
    values = parse_json(read_small_file(path))
    if not isinstance(values, dict):
        raise ValueError(f"it must hold a JSON object, got a {type(values).__name__}")
    if values.pop(_SEAL, None) not in (None, _seal(values)):
        raise ValueError(f'its values do not match its checksum; after an intended edit, delete its line "{_SEAL}"')
    return values


def _seal(values: dict[str, Any]) -> str:
    """Returns the checksum of a JSON object, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
