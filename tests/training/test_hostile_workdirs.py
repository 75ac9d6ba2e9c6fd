"""Workdirs from elsewhere: no file of theirs hangs a verb, fills the memory, or has others overwritten."""

import json
import os
import pathlib
import shutil
import signal

import pytest

from tests.training.tiny import tiny_config, train, write_text
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint.artifacts import check_artifact, write_sealed
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints, load_best_params, load_params
from tfx_jax.training.guards.lock import locked
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.reporting.progress import read_history
from tfx_jax.training.run import load_run
from tfx_jax.training.workdir import make_workdir


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    train(tiny_config(folder, validation="validation.tsv", num_steps=3), folder / "workdir")
    average_checkpoints(folder / "workdir", 1)
    return folder / "workdir"


@pytest.fixture
def workdir(trained, tmp_path):
    def fail(*_):
        raise AssertionError("it waits for ever")

    shutil.copytree(trained, tmp_path / "workdir")
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield tmp_path / "workdir"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fails(use):
    """The line that is raised, or None; anything else is a traceback."""
    try:
        use()
    except UserError as error:
        return str(error)
    return None


def read_all(workdir):
    """What the verbs read."""
    uses = (
        lambda: load_run(workdir),
        lambda: load_best_params(workdir),
        lambda: load_params(workdir, 3),
        lambda: load_params(workdir, "average"),
        lambda: read_history(workdir),
        lambda: adopt_pretrained_config(tiny_config(workdir, init_from=str(workdir))),
    )
    return [line for line in map(fails, uses) if line]


def put_pipe(path):
    os.mkfifo(path)


def put_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.slow
def test_every_file_as_a_pipe_or_a_device(workdir):
    files = [path for path in sorted(workdir.rglob("*")) if path.is_file() and path.stat().st_size]
    assert {
        "config.json",
        "artifacts.json",
        "tokenizer.json",
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "manifest.ocdbt",
    } <= {path.name for path in files}
    used = ("report.md", "learning_curves.png", "train.lock", "data.json")  # not read by these
    for number, path in enumerate(path for path in files if path.name not in used):
        path.rename(workdir.with_name("kept"))
        (put_pipe, put_device)[number % 2](path)
        lines = read_all(workdir)
        assert lines, path
        assert any("is a pipe, a device or a socket" in line and path.name in line for line in lines), (path, lines)
        path.unlink()
        workdir.with_name("kept").rename(path)
    assert read_all(workdir) == []


@pytest.mark.parametrize(
    "name", ["config.json", "artifacts.json", "tokenizer/tokenizer.json", "checkpoints/3/_METADATA"]
)
def test_files_without_end(workdir, name):
    path = workdir / name
    path.touch()
    os.truncate(path, 1 << 40)  # without a block on the disk
    assert any(name in line and "1,099,511,627,776 bytes; such a file may have" in line for line in read_all(workdir))


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_place_of_the_newest_checkpoint(workdir, is_link):
    """An older one must not be taken for it."""
    path = workdir / "checkpoints" / "7"
    if is_link:
        path.symlink_to(workdir / "config.json")
    else:
        path.write_text("text")
    for read in (lambda: load_best_params(workdir), lambda: average_checkpoints(workdir, 1)):
        with pytest.raises(UserError, match=r"checkpoints/7 must be a checkpoint's folder, but is a file: delete it"):
            read()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "tokenizer/../../secret", "tokenizer//x", "", "./a"])
def test_lists_that_name_other_files(workdir, name):
    files = json.loads((workdir / "artifacts.json").read_text())["files"]
    write_sealed(workdir / "artifacts.json", {"files": files | {name: "0" * 64}})
    with pytest.raises(
        UserError, match=r"artifacts.json is damaged \(.* is not the path of a file inside the workdir\)"
    ):
        check_artifact(workdir, "tokenizer")


@pytest.mark.parametrize("files", [[["a", "b"], [1, 2]], "ab", 3, None, [[]]])
def test_lists_that_are_none(workdir, files):
    write_sealed(workdir / "artifacts.json", {"files": files})
    with pytest.raises(UserError, match=r"artifacts\.json is damaged"):
        check_artifact(workdir, "tokenizer")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "tokenizer", "profile", "wandb"])
def test_a_training_writes_through_no_link(workdir, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(workdir / name, ignore_errors=True)
    (workdir / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"workdir/{name} is a symbolic link, and tfx_jax does not write through"):
        make_workdir(workdir)
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, pathlib.Path.touch], ids=["a pipe", "a file"])
def test_an_average_replaces_folders_only(workdir, make):
    shutil.rmtree(workdir / "average")
    make(workdir / "average")
    with pytest.raises(UserError, match="workdir/average must be a folder, but is a file: delete it"):
        average_checkpoints(workdir, 1)


def test_a_checkpoint_that_is_no_folder_is_reported(workdir):
    (workdir / "checkpoints" / "99").touch()
    with pytest.raises(UserError, match="checkpoints/99 must be a checkpoint's folder, but is a file"):
        load_params(workdir)


def test_an_average_writes_through_no_link(workdir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    shutil.rmtree(workdir / "average")
    (workdir / "average").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="workdir/average is a symbolic link"):
        average_checkpoints(workdir, 1)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nowhere", "pipe", "folder", "device"])
def test_a_lock_overwrites_no_other_file(workdir, tmp_path, kind):
    lock, secret = workdir / "train.lock", tmp_path / "secret"
    lock.unlink()
    secret.write_text("of somebody")
    {
        "link": lambda: lock.symlink_to(secret),
        "hard link": lambda: lock.hardlink_to(secret),
        "link to nowhere": lambda: lock.symlink_to(tmp_path / "new"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "device": lambda: lock.symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises(UserError, match=r"train\.lock is not a lock file of tfx_jax: delete it"), locked(workdir):
        pass
    assert secret.read_text() == "of somebody"
    assert not (tmp_path / "new").exists()
