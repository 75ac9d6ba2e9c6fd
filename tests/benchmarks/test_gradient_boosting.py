"""Gradient boosting beside our models: the same columns whatever their order, and one line where it cannot be."""

import sys

import numpy as np
import pytest

from benchmarks import gradient_boosting


@pytest.fixture
def flags(tmp_path):
    """A table whose label is whether the first number is positive, and another with its columns in another order."""
    values = np.random.default_rng(0).normal(size=(300, 2))
    rows = [(int(a > 0), a, b) for a, b in values]
    (tmp_path / "a.csv").write_text("y,a,b\n" + "".join(f"{y},{a},{b}\n" for y, a, b in rows[:200]))
    (tmp_path / "b.csv").write_text("b,y,a\n" + "".join(f"{b},{y},{a}\n" for y, a, b in rows[200:]))
    data = {"data_dir": tmp_path, "train_file": "a.csv", "validation_file": "b.csv", "label_column": "y"}
    fields = data | {"exclude_columns": ""}
    return ["--config=seq2vec_icu2012", *(f"--config.task.data.{name}={value}" for name, value in fields.items())]


def test_trees_rank_the_other_split(flags, capsys):
    pytest.importorskip("sklearn")
    assert gradient_boosting.main(flags) == 0
    told = capsys.readouterr().out
    assert told.startswith("AUROC 1.0000 (")
    assert told.endswith(", 100 records\n")


def test_what_cannot_be_compared_costs_one_line(flags, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert gradient_boosting.main(flags) == 2
    assert capsys.readouterr().err == "scikit-learn is not installed: pip install scikit-learn\n"
    assert gradient_boosting.main(["--config=seq2vec_cohort"]) == 2
    assert capsys.readouterr().err.startswith("trees are fitted to tables: ")
