"""Cross-validation of a table: each row is scored by models that have not seen it, and differences have intervals."""

import sys

import numpy as np
import pytest

from benchmarks import cross_validation as cross
from tfx_jax.metrics import auroc

LABELS = (np.arange(103) % 7 == 0).astype(int)


def test_parts_have_the_same_share_of_each_label():
    parts = cross.parts_of(LABELS, 5)
    for label in (0, 1):
        counts = np.bincount(parts[label == LABELS], minlength=5)
        assert counts.sum() == (label == LABELS).sum()
        assert np.ptp(counts) <= 1
    np.testing.assert_array_equal(parts, cross.parts_of(LABELS, 5))
    assert (parts != cross.parts_of(LABELS, 5, seed=1)).any()


def test_scores_of_different_parts_are_not_compared():
    """A shift of all scores of a part changes their order among others, and nothing here."""
    parts, scores = cross.parts_of(LABELS, 3), np.random.default_rng(0).normal(size=len(LABELS))
    shifted = scores + 10 * parts
    assert cross.mean_auroc(shifted, LABELS, parts) == pytest.approx(cross.mean_auroc(scores, LABELS, parts))
    assert auroc(shifted, LABELS) != pytest.approx(auroc(scores, LABELS))


def test_intervals_hold_the_difference_and_tell_noise_from_signal():
    rng = np.random.default_rng(0)
    labels = np.tile(LABELS, 5)
    parts = cross.parts_of(labels, 5)
    good, other = (labels + rng.normal(size=len(labels)) for _ in range(2))
    noise = rng.normal(size=len(labels))
    value, low, high = cross.difference(good, noise, labels, parts)
    assert 0 < low < value < high
    value, low, high = cross.difference(good, other, labels, parts)
    assert low < min(value, 0)
    assert high > max(value, 0)
    assert cross.difference(good, good, labels, parts) == (0, 0, 0)


def table(folder):
    """A table whose label is whether the first number is positive; some numbers are missing."""
    values = np.random.default_rng(0).normal(size=(120, 2))
    lines = [f"{int(a > 0)},{a},{'' if i % 9 == 0 else b},{i}\n" for i, (a, b) in enumerate(values)]
    (folder / "a.csv").write_text("y,a,b,id\n" + "".join(lines))
    data = {"data_dir": folder, "train_file": "a.csv", "label_column": "y", "exclude_columns": "id"}
    fields = data | {"tokens_per_batch": 128, "max_length": 2}
    return ["--config=seq2vec_icu2012", *(f"--config.task.data.{name}={value}" for name, value in fields.items())]


@pytest.mark.slow
@pytest.mark.compiles(80, "two trainings of each of two parts")
def test_all_models_are_trained_on_the_other_parts(tmp_path, capsys):
    pytest.importorskip("sklearn")
    flags = [*table(tmp_path), f"--output={tmp_path / 'out'}", "--folds=2", "--seeds=2", "--config.num_steps=60"]
    assert cross.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith("120 rows, ")]
    models = {line.rsplit("  ", 2)[0].strip(): float(line.split("  ")[-2]) for line in lines[start + 1 :]}
    assert {"ours, seed 0", "ours, seed 1", "ours, mean of the seeds", "gradient boosting"} < models.keys()
    assert min(models.values()) > 0.9
    assert cross.main(flags) == 0  # goes on with what was trained
    again = capsys.readouterr().out.splitlines()
    assert again[-len(models) :] == lines[-len(models) :]
    for part in range(2):
        seen, own = (set((tmp_path / "out" / f"part-{part}" / name).read_text().splitlines()[1:]) for name in FILES)
        assert not seen & own
        assert len(seen | own) == 120


FILES = ("others.csv", "part.csv")


def test_what_cannot_be_compared_costs_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert cross.main([*table(tmp_path), f"--output={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err == "scikit-learn is not installed: pip install scikit-learn\n"
    assert cross.main(["--config=seq2vec_cohort", f"--output={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err.startswith("parts are of a table: ")
    for folds, message in (("1", "--folds=1: there must be 2 or more"), ("70", "--folds=70: a label has only ")):
        assert cross.main([*table(tmp_path), f"--output={tmp_path / 'out'}", f"--folds={folds}"]) == 2
        assert capsys.readouterr().err.startswith(message)
