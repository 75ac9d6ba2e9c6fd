"""Of a workdir in which a run was rejected, only what the library wrote is deleted."""

import pathlib
import re

import pytest
from etils import epath

import tfx_jax
from tfx_jax.errors import UserError
from tfx_jax.training.guards import rejected_run
from tfx_jax.training.guards.rejected_run import removes_rejected_run
from tfx_jax.training.reporting.progress import History, Point


def write_run(workdir):
    """What a rejected run may have written, in a folder that was given."""
    for name in ("config.json", "artifacts.json", "labels.json", "train.lock"):
        (workdir / name).write_text("{}")
    for name in ("tokenizer", "checkpoints"):
        (workdir / name).mkdir()
        (workdir / name / "file").write_text("x")


def reject(workdir, write, error=UserError, *, is_new):
    @removes_rejected_run(epath.Path(workdir), is_new=is_new)
    def run():
        write(workdir)
        raise error("rejected")

    with pytest.raises(error, match="rejected"):
        run()


def test_a_new_folder_goes_with_what_the_run_wrote(tmp_path):
    reject(tmp_path, write_run, is_new=True)
    assert not tmp_path.exists()


def test_what_someone_else_wrote_meanwhile_stays(tmp_path):
    def write(workdir):
        write_run(workdir)
        (workdir / "mine.txt").write_text("mine")
        (workdir / "data").mkdir()

    reject(tmp_path, write, is_new=True)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "data", "train.lock"}
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_rejected_command_leaves_an_earlier_run_alone(tmp_path):
    """Of a run that was killed before its first checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    reject(tmp_path, lambda workdir: (workdir / "tokenizer").mkdir(), is_new=False)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "tokenizer"}


def test_records_of_steps_stay(tmp_path, monkeypatch):
    """Of W&B without a network too, and a trace that was asked for; the corrected run starts with its own values."""

    def write(workdir):
        write_run(workdir)
        for name in ("tensorboard", "wandb", "profile"):
            (workdir / name).mkdir()

    monkeypatch.setattr(rejected_run, "read_history", lambda _: History([Point(900, {"train/loss": 1.0})], [], [1]))
    reject(tmp_path, write, is_new=True)
    assert {path.name for path in tmp_path.iterdir()} == {"tensorboard", "wandb", "profile", "train.lock"}


def test_after_another_error_everything_stays(tmp_path):
    reject(tmp_path, write_run, OSError, is_new=True)
    assert (tmp_path / "tokenizer" / "file").exists()


def test_the_error_of_the_run_is_reported_if_the_store_fails_too(tmp_path, monkeypatch):
    class StoreError(Exception):
        pass

    def fail(_):
        raise StoreError

    monkeypatch.setattr(rejected_run, "has_checkpoints", fail)
    reject(tmp_path, write_run, is_new=True)
    assert (tmp_path / "config.json").exists()


def test_all_files_of_tasks_are_known():
    tasks = pathlib.Path(tfx_jax.__file__).parent / "tasks"
    calls = "".join(path.read_text() for path in sorted(tasks.rglob("*.py")))
    names = set(re.findall(r'setup_json\(\s*artifacts,\s*"([^"]+)"', calls))
    assert "labels.json" in names
    assert names <= rejected_run._WRITTEN
