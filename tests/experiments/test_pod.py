"""Published speeds, sizes of models, and a table from end to end; the reader of programs: tests/bench."""

import functools

import jax
import numpy as np
import pytest

from experiments.benchmarks import pod


def test_a_group_inside_a_node_is_fast():
    h100 = pod.PODS["h100-64"]
    assert h100.bandwidth(range(8, 16)) == h100.near_bandwidth
    assert h100.bandwidth((0, 8)) == h100.bandwidth(range(64)) == h100.far_bandwidth


@pytest.mark.parametrize("name", pod.MODELS)
def test_models_are_as_large_as_said(name):
    config = pod.MODELS[name]
    attention = 4 * config.d_model**2
    feed_forward = 2 * config.d_model * config.d_ff
    matrices = config.num_layers * (3 * attention + 2 * feed_forward) + config.vocab_size * config.d_model
    assert np.isclose(matrices, {"big": 214e6, "1b": 1.04e9}[name], rtol=0.01)


@pytest.mark.parametrize("others", [[], pytest.param(["fsdp x tensor 8"], marks=pytest.mark.slow)])
def test_table(monkeypatch, tmp_path, capsys, others):
    small = pod.TransformerConfig(64, num_layers=1, d_model=16, num_heads=8, d_ff=32)
    few = pod.Pod(8, 1e12, 1e9, 1e11, near=4, near_bandwidth=1e10, far_bandwidth=1e9)
    monkeypatch.setattr(pod, "MODELS", {"small": small})
    monkeypatch.setattr(pod, "PODS", {"few": few})
    monkeypatch.setattr(jax.config, "update", functools.partial(_ignore_device_count, jax.config.update))
    strategies = ",".join(["data", *others])
    pod.main([f"--output={tmp_path}", f"--strategies={strategies}", "--tokens=32", "--length=16"])
    header, _, data, *more = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert header.startswith("| strategy | state GiB")
    cells = dict(zip(header.split(" | "), data.split(" | "), strict=True))
    assert cells["all-gather"] == ""
    assert cells["all-reduce"].split(" / ")[0] != "0"
    assert [line.split(" | ")[0] for line in more] == [f"| {other}" for other in others]
    assert (tmp_path / "pod.md").read_text().count("\n| ") == 2 + len(others)


def _ignore_device_count(update, name, value):
    if name != "jax_num_cpu_devices":  # the tests have theirs already
        update(name, value)
