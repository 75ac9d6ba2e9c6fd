"""The models of the page, the cells that are planned and those that are there already, and a table from end to end."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from benchmarks import pod
from tfx_jax.errors import UserError
from tfx_jax.planning.chips import CHIPS
from tfx_jax.training.config import validate
from tfx_jax.training.reporting.meter import _PEAK_FLOPS


@pytest.mark.parametrize(
    ("name", "millions"),
    [("base", 63), ("big", 214), ("1b", 1040), ("gpt2", 124), ("gpt2-xl", 1558), ("t5-base", 223), ("bert-base", 110)],
)
def test_models_are_as_large_as_said(name, millions):
    """Counted by hand: matrices of a layer, tables of tokens and of positions."""
    model = pod.CASES[name].model
    width, hidden = model.d_model, getattr(model, "d_ff", None) or 4 * model.d_model
    layer = 4 * width**2 + 2 * width * hidden
    num_layers = model.num_layers
    if name in ("base", "big", "1b", "t5-base"):  # two stacks, one with a second attention
        layer, num_layers = 2 * layer + 4 * width**2, model.num_layers
    tables = (model.vocab_size + (getattr(model, "max_length", 0) or 0)) * width
    assert np.isclose(num_layers * layer + tables, millions * 1e6, rtol=0.02)


@pytest.mark.parametrize("name", pod.CASES)
def test_every_cell_is_a_training_on_all_devices(name):
    case = pod.CASES[name]
    for strategy in case.strategies:
        for num_devices in (16, 64, 256):
            sizes = vars(pod.mesh(strategy, num_devices))
            assert np.prod(list(sizes.values())) == num_devices
            assert sizes["tensor"] == 1 or case.model.num_heads % sizes["tensor"] == 0
            config = case.config(num_devices)
            config.mesh = pod.mesh(strategy, num_devices)
            validate(config)
            assert config.task.data.tokens_per_batch == 4096 * num_devices


@pytest.fixture
def small(monkeypatch):
    """A small model for eight devices of a machine that has none of a pod."""
    model = pod.TransformerConfig(64, num_layers=1, d_model=16, num_heads=8, d_ff=32)
    case = pod.Case(model, pod.TranslationConfig, 16, ("data", "data x fsdp 8"), "small")
    monkeypatch.setattr(pod, "CASES", {"small": case})
    monkeypatch.setattr(pod, "PODS", {"few": "cpu:8", "many": "cpu:64"})
    monkeypatch.setattr(pod, "TOKENS", 32)
    monkeypatch.setitem(CHIPS, "cpu", CHIPS["NVIDIA H200"])
    monkeypatch.setitem(_PEAK_FLOPS, "cpu", 1e15)
    planned, absent = [], pod.absent_devices

    def devices(topology):
        planned.append(topology)
        return jax.devices() if topology == "cpu:8" else absent("v0:1x1")

    monkeypatch.setattr(pod, "absent_devices", devices)
    monkeypatch.setattr(pod, "apart", lambda cell: pod.planned(*cell))
    return planned


@pytest.mark.slow
def test_what_is_there_is_not_planned_again(small, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{pod._BEGIN}old\n{pod._END}after\n")
    arguments = [f"--output={tmp_path}", f"--page={page}"]
    pod.main([*arguments, "--only=small/few/data"])
    assert small == ["cpu:8"]
    (name,) = found = json.loads((tmp_path / "pod.json").read_text())
    assert name == "small/few/data"
    assert found[name]["fits"]
    found["small/many/data"] = {"fits": False, "error": "needs more"}
    (tmp_path / "pod.json").write_text(json.dumps(found))
    capsys.readouterr()
    pod.main([*arguments, "--only=*/data"])
    assert small == ["cpu:8"]
    out, err = capsys.readouterr()
    assert err == ""
    header, _, few, many = [line.split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert len(header) == len(few) == len(many)
    assert few[:2] == ["| few", "data"]
    assert few[3].startswith("all-reduce ")
    assert few[7].startswith(">= ")
    assert few[8].startswith("<= ")
    assert many[:3] == ["| many", "data", "needs more"]
    before, _, after = page.read_text().partition(out.strip())
    assert before == f"before\n\n{pod._BEGIN}\n"
    assert after == f"\n\n{pod._END}after\n"


def test_the_page_has_the_tables_of_its_plans(tmp_path, capsys):
    docs = pathlib.Path(pod.__file__).parents[1] / "docs"
    shutil.copy(docs / "pod.json", tmp_path)
    pod.main([f"--output={tmp_path}", "--only="])
    tables = (docs / "pod_on_paper.md").read_text().partition(pod._BEGIN)[2].partition(pod._END)[0]
    assert tables.strip() == capsys.readouterr().out.strip() != ""


def test_without_a_compiler_a_cell_is_left_out(small, tmp_path, capsys):
    pod.main([f"--output={tmp_path}", "--only=small/many/data"])
    assert small == ["cpu:64"]
    out, err = capsys.readouterr()
    assert out.strip() == ""
    assert err.startswith("small/many/data\n  left out: unknown topology v0:1x1")
    assert not (tmp_path / "pod.json").exists()


def test_a_compiler_that_crashes_is_a_cell_too(monkeypatch):
    monkeypatch.setattr(pod, "planned", os._exit)
    assert pod.apart((1,)) == {"fits": False, "error": "the compiler crashes"}


@pytest.mark.aot
@pytest.mark.parametrize("name", pod.PODS)
def test_pods_have_the_devices_of_their_names(tpu_devices, name):
    try:
        devices = pod.absent_devices(pod.PODS[name])
    except UserError as error:
        pytest.skip(str(error))
    assert len(devices) == int(name.rpartition("-")[2])
