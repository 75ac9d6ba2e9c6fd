"""Table 2 of the Reformer: its command trains with each attention, evaluates with all of them, and goes on."""

import re

import pytest

from benchmarks import reformer_duplication as benchmark
from tfx_jax.training.config import load_config


def rows_of(text):
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_percentages_of_the_paper_stand_beside_ours():
    found = {name: {other: 12.345 for other in benchmark.ATTENTIONS} for name in ("full", "lsh-8", "lsh-1")}
    rows = rows_of(benchmark.table(found))
    assert rows["trained \\ evaluated"] == ["full", "lsh-8", "lsh-4", "lsh-2", "lsh-1"]
    assert rows["full"] == ["12.35 (100.0)", "12.35 (94.8)", "12.35 (92.5)", "12.35 (76.9)", "12.35 (52.5)"]
    assert rows["lsh-8"] == ["12.35"] * 5
    assert rows["lsh-1"][0] == "12.35 (0.8)"


@pytest.mark.nightly
def test_each_model_is_evaluated_with_all_attentions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "ATTENTIONS", {"full": 0, "lsh-1": 1})
    monkeypatch.setattr(benchmark, "PAPER", {})
    flags = ["--config.mesh.data=1", "--config.task.data.num_symbols=5", "--config.model.num_buckets=2"]
    flags += ["--config.num_steps=40", "--config.optimizer.peak_learning_rate=0.01"]
    arguments = [f"--workdir={tmp_path}", "--variant=test", *flags]
    benchmark.main(arguments)
    first = (tmp_path / "test" / "table.md").read_text()
    assert first in capsys.readouterr().out
    rows = rows_of(first)
    assert set(rows) == {"trained \\ evaluated", "---", "full", "lsh-1"}
    assert rows["full"][0] != rows["full"][1]  # the same parameters, other attentions
    for cell in (*rows["full"], *rows["lsh-1"]):
        assert 0 <= float(re.fullmatch(r"[\d.]+", cell)[0]) <= 100
    models = [load_config(tmp_path / "test" / name).model for name in ("full", "lsh-1")]
    assert [(model.full_attention, model.num_hashes) for model in models] == [(True, 1), (False, 1)]

    benchmark.main(arguments)
    assert (tmp_path / "test" / "table.md").read_text() == first
    assert "step 2/" not in capsys.readouterr().err  # nothing was trained again


def test_a_wrong_field_is_told_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([f"--workdir={tmp_path}", "--variant=test", "--config.model.num_rounds=3"])
    assert "num_rounds" in capsys.readouterr().err.splitlines()[-1]
