"""The record of data files: what was changed between two starts is refused by name, and nothing is read twice."""

import os
import pathlib
import types
from unittest import mock

import numpy as np
import pytest
from etils import epath

from tests.training import tiny
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import data_files
from tfx_jax.training.checkpoint.data_files import check_data_files


@pytest.fixture
def data(tmp_path):
    """Pairs of files and a folder of images, and the workdir of a run that has a checkpoint."""
    for name, content in (
        ("a.en", "x\ny\n"),
        ("a.de", "u\nv\n"),
        ("b.en", "1\n"),
        ("b.de", "2\n"),
        ("val/c/1.png", "p"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    names = {"train_source": "a.en,b.en", "train_target": "*.de", "validation_folder": "val", "test_file": "none"}
    return types.SimpleNamespace(dataset="files", data_dir=str(tmp_path), **names)


def start(data, tmp_path, *, has_checkpoint=True):
    workdir = epath.Path(tmp_path / "workdir")
    if has_checkpoint:
        (workdir / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)
    workdir.mkdir(exist_ok=True)
    check_data_files(data, workdir)


@pytest.mark.parametrize(
    ("name", "content", "field", "part"),
    [
        ("a.en", "x\nz\n", "train_source", "content"),
        ("b.de", "3\n", "train_target", "content"),
        ("b.de", "33\n", "train_target", "size"),
        ("val/c/1.png", "q", "validation_folder", "content"),
        ("val/d/2.png", "q", "validation_folder", "size"),
    ],
)
def test_a_changed_file_is_refused_by_name(data, tmp_path, name, content, field, part):
    start(data, tmp_path)
    start(data, tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    listed = tmp_path / ("val" if "/" in name else name)
    with pytest.raises(UserError) as caught:
        start(data, tmp_path)
    assert str(caught.value).startswith(f"config.task.data.{field}: {listed} was changed (its {part} differs): ")
    assert "\n" not in str(caught.value)


def test_files_that_come_and_go_are_refused(data, tmp_path):
    start(data, tmp_path)
    (tmp_path / "c.de").write_text("w\n")
    with pytest.raises(UserError, match=r"train_target: .*c\.de is new: restore the old data"):
        start(data, tmp_path)
    (tmp_path / "c.de").rename(tmp_path / "c.old")
    start(data, tmp_path)
    (tmp_path / "b.en").rename(tmp_path / "b.old")
    with pytest.raises(UserError, match=r"train_source: .*b\.en is missing: restore the old data"):
        start(data, tmp_path)


def test_a_copy_of_the_same_content_is_fine_and_what_is_unchanged_is_not_read_again(data, tmp_path, monkeypatch):
    start(data, tmp_path)
    os.utime(tmp_path / "a.en", ns=(1, 1))
    start(data, tmp_path)
    monkeypatch.setattr(data_files, "_blocks", lambda *_: pytest.fail("read again"))
    start(data, tmp_path)


def test_without_a_checkpoint_or_files_anything_goes(data, tmp_path):
    start(data, tmp_path, has_checkpoint=False)
    (tmp_path / "a.en").write_text("x\nz\n")
    start(data, tmp_path, has_checkpoint=False)
    start(data, tmp_path)  # which was recorded
    check_data_files(types.SimpleNamespace(dataset="grammar"), epath.Path(tmp_path / "other"))


def test_a_record_that_is_damaged_is_named(data, tmp_path):
    start(data, tmp_path)
    (tmp_path / "workdir" / "data.json").write_text("{}")
    with pytest.raises(UserError, match=r"data\.json cannot be used \(.*\): delete it"):
        start(data, tmp_path)


def test_a_data_file_that_cannot_be_read_is_no_damaged_record(data, tmp_path, monkeypatch):
    start(data, tmp_path)
    monkeypatch.setattr(data_files, "_record", mock.Mock(side_effect=PermissionError(13, "Permission denied", "a.en")))
    with pytest.raises(PermissionError):
        start(data, tmp_path)


@pytest.mark.parametrize("sizes", [[0], [7], [16, 16], [5, 0, 40, 3], [1, 1, 1], [64, 64]])
def test_few_bytes_are_all_read_and_of_many_evenly_spaced_blocks(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(data_files, "_BLOCK", 8)
    monkeypatch.setattr(data_files, "_NUM_BLOCKS", 6)
    content = np.random.default_rng(0).bytes(sum(sizes))
    paths, begin = [], 0
    for number, size in enumerate(sizes):
        paths.append(pathlib.Path(tmp_path / str(number)))
        paths[-1].write_bytes(content[begin : begin + size])
        begin += size
    step = max(8, len(content) // 6)
    want = b"".join(content[start : start + 8] for start in range(0, len(content), step))
    assert b"".join(data_files._blocks(paths, sizes)) == want


def test_a_run_that_goes_on_needs_the_same_data(tmp_path):
    tiny.write_text(tmp_path)
    config = tiny.tiny_config(tmp_path, num_steps=1)
    tiny.train(config, tmp_path / "run")
    path = tmp_path / "train.tsv"
    path.write_text(path.read_text().replace("w7", "w8"))  # as many examples of as many bytes
    config.num_steps = 2
    with pytest.raises(UserError, match=r"config\.task\.data\.train_source: .*train\.tsv was changed .its content"):
        tiny.train(config, tmp_path / "run")
