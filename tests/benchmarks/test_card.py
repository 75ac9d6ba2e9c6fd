"""The ten minutes on a GPU, rehearsed: its sections, what happens when they fail, and the oracle of its first one."""

import ast
import json
import pathlib
import time

import jax
import numpy as np
import pytest

from benchmarks.card import __main__ as card
from benchmarks.card import correctness, sections, wheels
from benchmarks.peers.measure import Result, Row, Side
from benchmarks.peers.rows import all_rows
from tfx_jax.cli import bench
from tfx_jax.cli.train import load_config_file
from tfx_jax.functional import dot_product_attention
from tfx_jax.training.config import validate

ROOT = pathlib.Path(card.__file__).parents[2]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "card.jsonl").read_text().splitlines()]


def test_a_section_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "_SECTIONS", "tests.benchmarks.card_sections")
    monkeypatch.setattr(card, "SHARES", {"machine": 1, "correctness": 1, "prediction": 1, "runs": 20})
    assert card.main([f"--output={tmp_path}", "--minutes=0.5"]) == 0
    found = rows_of(tmp_path)
    outcomes = {row["section"]: row["outcome"] for row in found if row["row"] == "section"}
    assert outcomes["correctness"] == "failed: ValueError: something is wrong"
    assert outcomes["prediction"].startswith("stopped at its limit of 1 s")
    assert outcomes["machine"] == outcomes["runs"] == "complete"
    assert {row["size"] for row in found if "size" in row} == {"auto", "full"}
    last = found[-2]
    assert last["told"] == "NVIDIA H100 80GB HBM3"
    assert 20 < last["seconds"] < 30  # what the others left
    table = (tmp_path / "card.md").read_text()
    assert capsys.readouterr().out == table
    assert "Failed: ValueError: something is wrong, after" in table
    assert "| second |" in table


@pytest.mark.slow
def test_what_a_stopped_section_started_has_time_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "_SECTIONS", "tests.benchmarks.card_sections")
    options = {"size": "saves", "output": str(tmp_path), "device": ""}
    card.run_section("runs", options, 2.0, tmp_path, card.Results(tmp_path))
    assert rows_of(tmp_path)[-1]["outcome"] == "stopped at its limit of 2 s"
    assert (tmp_path / "saved").exists()


def test_memory_is_that_of_one_program_or_none(monkeypatch):
    found = {
        "predicted_step_seconds": 1.0,
        "median_step_seconds": 2.0,
        "prediction_is_bound": True,
        "target_tokens_per_second": 3.0,
        "utilization": 0.5,
        "compile_seconds": 4.0,
        "peak_memory_bytes": 2**31,
    }
    for source, memory in (("compiled program", 2.0), ("device", None)):
        monkeypatch.setattr(
            bench, "run", lambda _, source=source: print(json.dumps(found | {"peak_memory_source": source}))
        )
        (row,) = sections.prediction({"size": "tiny"})
        assert (row.get("GiB"), row["matmul utilization"], row["outcome"]) == (memory, 0.5, "measured")


def test_sides_that_are_left_out_exist(monkeypatch, tmp_path):
    left_out = set()
    monkeypatch.setattr(
        sections, "_compared", lambda section, options, unneeded=(): left_out.update(unneeded) or iter(())
    )
    for section in ("training", "decoding", "attention"):
        list(sections.SECTIONS[section]({}))
    assert left_out
    labels = {side.label for device in ("cpu", "gpu") for row in all_rows(device, "", tmp_path) for side in row.sides}
    assert left_out <= labels


def test_sections_are_chosen_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "_SECTIONS", "tests.benchmarks.card_sections")
    card.main([f"--output={tmp_path}", "--only=runs", "--size=tiny"])
    assert {row["section"]: row.get("size") for row in rows_of(tmp_path) if "size" in row} == {
        "machine": "tiny",
        "runs": "tiny",
    }
    for arguments in (["--only=run"], ["--minutes=0"]):
        with pytest.raises(SystemExit):
            card.main([f"--output={tmp_path}", *arguments])
    assert "unknown section run; there are machine, correctness" in capsys.readouterr().err


def test_every_section_has_a_function_and_a_share():
    assert list(card.SHARES) == list(sections.SECTIONS)


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_programs_and_rows_of_both_sizes_exist(size, tmp_path):
    commands = [*sections.PROGRAMS[size], *((config,) for config, *_ in sections.RUNS[size])]
    for config, *overrides in commands:
        experiment = load_config_file(config, overrides)
        validate(experiment)
        assert experiment.model.vocab_size or hasattr(experiment.model, "image_size")
    for section in ("training", "decoding", "attention"):
        for row in sections.compared_rows(section, size, tmp_path):
            for side in row.sides:
                module, function = side.build.split(":")
                (definition,) = (
                    node
                    for node in ast.parse((ROOT / "benchmarks" / "peers" / f"{module}.py").read_text()).body
                    if isinstance(node, ast.FunctionDef) and node.name == function
                )
                assert side.options.keys() <= {argument.arg for argument in definition.args.kwonlyargs}


def test_gradients_of_the_oracle_are_those_of_differences():
    rng = np.random.default_rng(0)
    shapes = (1, 3, 4, 2), (1, 3, 2, 2), (1, 3, 2, 2), (1, 3, 4, 2)
    *inputs, gradient = (rng.normal(size=shape) for shape in shapes)
    visible = np.tril(np.ones((3, 3), bool))[None, None]
    found = correctness.reference(*inputs, gradient, visible)
    for index, name in enumerate(("query", "key", "value")):
        direction = rng.normal(size=inputs[index].shape)
        moved = [
            correctness.reference(
                *inputs[:index], inputs[index] + step * direction, *inputs[index + 1 :], gradient, visible
            )
            for step in (1e-4, -1e-4)
        ]
        slope = ((moved[0]["output"] - moved[1]["output"]) * gradient).sum() / 2e-4
        assert np.isclose(slope, (found[name] * direction).sum(), rtol=1e-6)


def test_an_error_of_attention_is_seen(monkeypatch):
    def wrong(*arrays, **options):
        return 1.001 * dot_product_attention(*arrays, **options)

    monkeypatch.setattr(correctness, "dot_product_attention", wrong)
    monkeypatch.setattr(correctness, "IMPLEMENTATIONS", ("xla", "splash"))
    monkeypatch.setattr(correctness, "LIMITS", {"float32": 1e-4})
    first, second = correctness.rows("tiny")
    assert first["outcome"] == "WRONG: above 0.0001"
    assert np.isclose(first["output"], 1e-3, rtol=0.01)
    assert second["outcome"].startswith("not here: implementation='splash' needs a TPU")


def test_a_row_has_utilization_ratio_and_the_reason_for_what_is_missing():
    sides = (Side("ours", ""), Side("peer", ""), Side("absent", ""), Side("broken", ""))
    samples = {"ours": [[0.5], [0.5]], "peer": [[1.0], [2.0]]}
    result = Result(
        Row("name", "title", "tokens", sides),
        samples,
        {"ours": 10.0, "peer": 10.0},
        {"ours": {"flops": 4.0}},
        {"absent": "torch not installed", "broken": "out of memory"},
        {},
    )
    ours, peer, absent, broken = sections.sides_of(result, peak=16.0)
    assert (ours["units/s"], ours["ms"], ours["MFU"], ours["outcome"]) == (20.0, 500.0, 0.5, "measured")
    assert (peer["ours / this"], peer["range"]) == (3.0, "2.00 to 4.00")
    assert (absent["outcome"], broken["outcome"]) == ("no PyTorch", "out of memory")
    assert "MFU" not in next(iter(sections.sides_of(result, peak=None)))


def test_a_run_without_its_data_says_so(tmp_path):
    options = {"size": "full", "output": str(tmp_path), "data_dir": str(tmp_path), "ends": time.time() + 1}
    assert [row["outcome"] for row in sections.runs(options)] == [
        "not run: no input.txt in --data-dir",
        "not run: no train.en.gz in --data-dir",
    ]


def test_wheels_are_what_the_lock_says_for_python_312():
    lock = (ROOT / "requirements.lock").read_text()
    found = wheels.needed(lock, ["flax>=0.12.8; python_version < '3.12'", "orbax-checkpoint>=0.12.8"], {"jax", "numpy"})
    assert "tensorstore" in found
    assert "jaxlib" not in found
    assert "pytest" not in found
    assert "flax" not in found
    versions = wheels.needed(lock, ["jax>=0.10", "flax"])
    assert versions["jax"].startswith("0.12")
    assert {"jaxlib", "ml-dtypes", "orbax-checkpoint", "treescope"} <= versions.keys()


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path):
    assert card.main([f"--output={tmp_path}", "--size=tiny", "--minutes=20"]) == 0
    found = rows_of(tmp_path)
    ends = {row["section"]: row["outcome"] for row in found if row["row"] == "section"}
    assert ends == dict.fromkeys(card.SHARES, "complete")
    rows = [row for row in found if row["row"] != "section"]
    assert {row["section"] for row in rows} == set(card.SHARES)
    allowed = ("correct", "not here: ", "measured", "complete", "no PyTorch", "transformers not installed")
    assert [row for row in rows if not row.get("outcome", "measured").startswith(allowed)] == []
    ours = [row for row in rows if row.get("side") == "ours"]
    assert len(ours) == 6
    assert all(row["units/s"] > 0 for row in ours)
    assert jax.default_backend() == "cpu"
