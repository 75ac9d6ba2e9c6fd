"""Folders of checkpoints of which one is damaged or empty: it is met when it is loaded, and not when the others are."""

import datetime
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from tfx_jax.errors import UserError, one_line
from tfx_jax.files import parse_json, read_small_file


def check_metrics(directory: epath.Path) -> None:
    """Checks that the scores of all checkpoints can be read: Orbax reads them when it opens the folder.

    Raises:
      UserError: names the file that cannot be read.
    """
    for path in sorted(directory.glob("*/metrics/metrics")):
        try:
            if not isinstance(parse_json(read_small_file(path)), dict):
                raise ValueError("no object")
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}): delete the folder it is in, and choose checkpoints by number with --step"
            ) from None


def complete_steps(checkpointer: Any) -> list[int]:
    """Steps of the checkpoints, oldest first; an empty folder, which Orbax counts, is none."""
    steps = sorted(checkpoint.step for checkpoint in checkpointer.checkpoints)
    return [step for step in steps if any((checkpointer.directory / str(step)).iterdir())]


def clear_empty(directory: epath.Path) -> None:
    """Deletes empty folders that have the name of a checkpoint: they would take the place of one that is kept."""
    folders = [path for path in directory.iterdir() if path.name.isdigit()] if directory.is_dir() else []
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class ReadableSteps:
    """Orbax's names of the checkpoints in a folder, but that none is asked what it cannot say."""

    def __init__(self, names: Any):
        """Takes the names that Orbax would use."""
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, name)

    def find_all(self, base_path: epath.PathLike) -> Iterator[Any]:
        """All complete checkpoints."""
        for found in self._names.find_all(base_path):
            try:
                found.commit_timestamp  # noqa: B018  which is what Orbax is going to ask for
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                found = _Undated(found.step, found.path)
            yield found


class _Undated(NamedTuple):
    """A checkpoint that does not say when it was made; whoever loads it learns that it is damaged."""

    step: int
    path: epath.Path
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    commit_timestamp: datetime.datetime = datetime.datetime.fromtimestamp(0, datetime.UTC)
