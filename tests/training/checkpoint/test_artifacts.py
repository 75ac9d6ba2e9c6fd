"""What checkpoints need beside them: made once, by trainings alone, listed, and never read when it is another file."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil

import pytest
from etils import epath

from tests.tiers import slow_but
from tests.training.configs import TRAININGS, default_config, title
from tfx_jax.errors import UserError
from tfx_jax.tasks.sequence.duplication import DuplicationConfig
from tfx_jax.tasks.sequence.long_range import LongRangeConfig
from tfx_jax.tasks.sequence.recall import RecallConfig
from tfx_jax.training.checkpoint import artifacts
from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts, check_artifact, read_sealed, write_sealed
from tfx_jax.training.config import save_config, tiny_variant
from tfx_jax.training.run import load_run, make_run

# Of these nothing is kept: symbols and bytes are their own ids.
KEEPING_NOTHING = (DuplicationConfig, LongRangeConfig, RecallConfig)
KEEPING = [classes for classes in TRAININGS if classes[1] not in KEEPING_NOTHING]

FILES = {"labels.json": b'["no", "yes"]\n', "tokenizer/a.json": b"{}", "tokenizer/b.txt": b"a\nb\n"}


def make(workdir, names=("labels.json", "tokenizer")):
    """What a training does when it starts; returns which it had to make."""
    made = []
    for name in names:
        with WorkdirArtifacts(workdir, can_make=True).checked(name) as is_new:
            for file in (file for file in FILES if is_new and file.startswith(name)):
                (workdir / file).parent.mkdir(exist_ok=True)
                if not (workdir / file).exists():
                    (workdir / file).write_bytes(FILES[file])
                    made.append(file)
    return made


def read(workdir, name):
    """What every other verb does."""
    with WorkdirArtifacts(workdir, can_make=False).checked(name) as is_new:
        assert not is_new


@pytest.fixture
def young(tmp_path):
    """The workdir of a training that has saved no checkpoint yet."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    assert make(workdir) == list(FILES)
    return workdir


@pytest.fixture
def workdir(young):
    (young / "checkpoints" / "4").mkdir(parents=True)
    return young


def contents(workdir):
    return {str(path.relative_to(workdir)): path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def listed(workdir):
    return json.loads((workdir / "artifacts.json").read_text())["files"]


def test_the_list_has_the_sha256_of_each_file(workdir):
    assert listed(workdir) == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert contents(workdir).keys() == {*FILES, "artifacts.json"}


def test_what_is_there_is_neither_made_nor_listed_again(workdir):
    before = contents(workdir), (workdir / "artifacts.json").stat().st_mtime_ns
    assert make(workdir) == []
    for name in ("labels.json", "tokenizer"):
        read(workdir, name)
    assert before == (contents(workdir), (workdir / "artifacts.json").stat().st_mtime_ns)


@pytest.mark.parametrize("file", FILES)
def test_any_damage_is_refused_with_the_name_of_the_file(workdir, file):
    path, name = workdir / file, file.partition("/")[0]
    whole = path.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]
    for content in [*flipped, *(whole[:size] for size in range(len(whole))), whole + b"\n"]:
        path.write_bytes(content)
        for use in (lambda: read(workdir, name), lambda: make(workdir, [name]), lambda: check_artifact(workdir, name)):
            with pytest.raises(
                UserError, match=rf"{file} is damaged: .* restore a copy, or use the file that the same"
            ):
                use()
    assert path.read_bytes() == whole + b"\n"


def test_damage_to_the_list_is_not_taken_for_that_of_a_file(workdir):
    path = workdir / "artifacts.json"
    whole = path.read_bytes()
    for place in range(len(whole) - 1):  # the last is a line break
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"run/artifacts.json is damaged \("):
            read(workdir, "labels.json")


@pytest.mark.parametrize("file", FILES)
def test_nobody_makes_what_a_checkpoint_was_trained_with(workdir, file):
    (workdir / file).unlink()
    before = contents(workdir)
    for use in (make, lambda workdir: read(workdir, file.partition("/")[0])):
        with pytest.raises(UserError, match=f"run/{file} is missing, but the checkpoints need it: restore"):
            use(workdir)
    (workdir / "artifacts.json").unlink()  # without it a training knows no better
    if "/" not in file:
        with pytest.raises(UserError, match=f"{file} is missing"):
            make(workdir)
    assert contents(workdir).items() <= before.items()


def test_only_a_training_makes_anything(tmp_path):
    with pytest.raises(UserError, match=r"labels\.json is missing: run tfx-jax train with this --workdir first$"):
        read(tmp_path, "labels.json")
    assert list(tmp_path.iterdir()) == []


def test_before_the_first_checkpoint_a_training_makes_what_is_missing(young):
    (young / "tokenizer" / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt is missing: run tfx-jax train with this --workdir first$"):
        read(young, "tokenizer")
    assert make(young) == ["tokenizer/b.txt"]
    read(young, "tokenizer")
    (young / "labels.json").write_bytes(b"[]")
    with pytest.raises(UserError, match=r"labels\.json is damaged: .*; delete it and rerun the training command"):
        make(young)
    (young / "labels.json").unlink()
    assert make(young) == ["labels.json"]


def test_what_nothing_vouches_for_is_read_with_a_warning_and_listed_by_the_next_training(workdir, caplog):
    (workdir / "artifacts.json").unlink()
    with caplog.at_level(logging.WARNING):
        read(workdir, "tokenizer")
    assert [record.getMessage() for record in caplog.records] == [
        f"{workdir}/tokenizer is not verified, because it is not listed in {workdir}/artifacts.json"
    ]
    assert contents(workdir).keys() == FILES.keys()
    assert make(workdir) == []
    assert listed(workdir).keys() == FILES.keys()
    caplog.clear()
    read(workdir, "tokenizer")
    assert caplog.text == ""


def test_an_interruption_between_a_file_and_the_list_costs_nothing(tmp_path):
    training = WorkdirArtifacts(tmp_path, can_make=True)
    with contextlib.suppress(KeyboardInterrupt), training.checked("labels.json") as is_new:
        assert is_new
        (tmp_path / "labels.json").write_bytes(FILES["labels.json"])
        raise KeyboardInterrupt
    assert make(tmp_path) == ["tokenizer/a.json", "tokenizer/b.txt"]
    assert listed(tmp_path).keys() == FILES.keys()


def test_what_an_interrupted_write_left_is_not_listed(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "a.json.0123.partial").write_bytes(b"{")
    make(tmp_path)
    assert listed(tmp_path).keys() == FILES.keys()


def test_of_several_processes_the_first_alone_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "is_primary", lambda: False)
    make(tmp_path)
    assert contents(tmp_path).keys() == FILES.keys()


def test_a_file_that_cannot_be_read_is_one_line(workdir):
    (workdir / "labels.json").unlink()
    (workdir / "labels.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*labels\.json: Is a directory$"):
        read(workdir, "labels.json")


@pytest.mark.slow
@pytest.mark.parametrize("classes", slow_but(KEEPING, *KEEPING[:2]), ids=title)
def test_all_that_a_task_keeps_is_vouched_for(tmp_path, classes):
    """Whoever adds a file to a task without `Artifacts.checked` sees it here."""
    config = tiny_variant(default_config(classes))
    if hasattr(config.task.data, "tokenizer"):
        config.task.data.tokenizer = "sentencepiece" if hasattr(config.task.data, "sort_buffer") else "words"
    if "max_length" in {field.name for field in dataclasses.fields(config.task.data)}:
        config.task.data.max_length = 128
        if hasattr(config.model, "max_length"):
            config.model.max_length = 128
    workdir = tmp_path / "run"
    workdir.mkdir()
    save_config(config, epath.Path(workdir))
    make_run(config, workdir)
    kept = contents(workdir).keys() - {"config.json", "artifacts.json"}
    assert kept == listed(workdir).keys()
    assert kept
    load_run(workdir)
    damaged = tmp_path / "damaged"
    for file in sorted(kept):  # a training that has not begun to save
        (workdir / file).rename(damaged)
        with pytest.raises(UserError, match=f"run/{file} is missing: run tfx-jax train with this"):
            load_run(workdir)
        damaged.rename(workdir / file)
    (workdir / "checkpoints" / "4").mkdir(parents=True)
    for file in sorted(kept):
        shutil.copytree(workdir, damaged)
        whole = (damaged / file).read_bytes()
        (damaged / file).write_bytes(whole[:-1])
        with pytest.raises(UserError, match=f"damaged/{file} is damaged"):
            load_run(damaged)
        (damaged / file).unlink()
        before = contents(damaged)
        for use in (lambda: load_run(damaged), lambda: make_run(config, damaged)):
            with pytest.raises(UserError, match=f"damaged/{file} is missing"):
                use()
        assert contents(damaged) == before
        shutil.rmtree(damaged)


def test_a_byte_order_mark_is_no_json(tmp_path):
    """An editor of Windows may put one in front of a config.json that is edited by hand."""
    path = epath.Path(tmp_path / "config.json")
    write_sealed(path, {"a": "é"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_sealed(path) == {"a": "é"}
