"""Deletes what a run wrote to its workdir before it was rejected, so that the corrected command starts afresh."""

import contextlib
from collections.abc import Collection, Iterator

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint.artifacts import has_checkpoints
from tfx_jax.training.guards.lock import LOCK_NAME
from tfx_jax.training.reporting.progress import read_history

_WRITTEN = {
    # the trainer
    *("config.json", "artifacts.json", "data.json", "checkpoints", "tensorboard", "profile"),
    *("report.md", "learning_curves.png", "loggers.json", "wandb"),
    # the tasks, see `tfx_jax.tasks.artifacts`
    *("tokenizer", "labels.json", "symbols.json", "targets.json", "characters.json", "variables.json"),
}


@contextlib.contextmanager
def removes_rejected_run(workdir: epath.Path, *, is_new: bool) -> Iterator[None]:
    """Deletes what a run wrote to the workdir if it ends with a UserError before its first checkpoint.

    The corrected command then finds a workdir without configuration and tokenizer of the rejected one. Files that
    existed before or that the library does not write stay, and so do the records in `tensorboard`, `wandb` and
    `profile` if steps were logged. A run that an earlier start left without a checkpoint is not touched. After an error
    of any other class all files stay.

    Args:
      workdir: folder of the run, which the caller has locked.
      is_new: whether this run created the folder, which is deleted too if it would be empty.
    """
    before = {path.name for path in workdir.iterdir()} if workdir.exists() else set()  # a store has no empty folders
    try:
        yield
    except UserError:
        with contextlib.suppress(Exception):  # the error of the run is the one to report
            if "config.json" not in before and not has_checkpoints(workdir):
                _remove_new(workdir, before, is_new=is_new)
        raise


def _remove_new(workdir: epath.Path, before: Collection[str], *, is_new: bool) -> None:
    """Deletes the files and folders that a run writes and whose names are not in `before`."""
    kept = {*before}
    if read_history(workdir).points:
        kept |= {"tensorboard", "wandb", "profile"}
    for path in workdir.iterdir():
        if path.name in kept or path.name not in _WRITTEN:
            continue
        if path.is_dir():
            path.rmtree()
        else:
            path.unlink()
    if is_new and {path.name for path in workdir.iterdir()} <= {LOCK_NAME}:
        (workdir / LOCK_NAME).unlink(missing_ok=True)
        workdir.rmdir()  # fails if it is not empty
