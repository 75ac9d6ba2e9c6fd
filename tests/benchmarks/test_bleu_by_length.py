"""BLEU by length, of translations that are known and of models that are trained here."""

import itertools

import numpy as np
import pytest

from benchmarks import bleu_by_length
from tfx_jax.models import Seq2SeqConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant
from tfx_jax.training.loop import train


def test_every_sentence_is_in_one_group_and_lengths_do_not_overlap():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, size=97)
    groups = bleu_by_length.groups_by_length([" ".join("w" * length) for length in lengths], 4)
    assert sorted(np.concatenate([group.indices for group in groups])) == list(range(97))
    for group in groups:
        assert (lengths[group.indices].min(), lengths[group.indices].max()) == (group.shortest, group.longest)
        assert 97 / 8 < len(group.indices) < 97 / 2
    assert all(before.longest < after.shortest for before, after in itertools.pairwise(groups))


def test_one_length_is_one_group():
    (group,) = bleu_by_length.groups_by_length(["a b", "c d"], 5)
    assert group.title == "2"


def _translated(hypotheses, sources=("a b", "a b c d e f")):
    references = ["one two three four five", "six seven eight nine ten"]
    return bleu_by_length.Translated(list(sources), hypotheses, references, ("en", True))


def test_the_table_and_the_figure_have_what_was_translated(tmp_path, monkeypatch, capsys):
    right = ["one two three four five", "six seven eight nine ten"]
    found = {"here": _translated(right), "there": _translated([right[0], "six seven eight ten nine"])}
    monkeypatch.setattr(bleu_by_length, "translate", lambda workdir, *_: found[workdir])
    output = tmp_path / "new" / "figure.png"
    assert not bleu_by_length.main(["--workdirs", "A=here", "B=there", "--output", str(output), "--groups=2"])
    lines = output.with_suffix(".md").read_text().splitlines()
    assert lines[0] == "| words | sentences | A | B |"
    assert lines[2:] == ["| 2 | 1 | 100.00 | 100.00 |", "| 6 | 1 | 100.00 | 0.00 |"]  # no four words in a row
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workdirs", "A=here", "B=other"], "do not have the same sentences"),
        (["--workdirs", "here"], "takes NAME=DIR"),
        (["--workdirs", "A=here", "--groups=0"], "--groups must be at least 1"),
    ],
)
def test_what_cannot_be_compared_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    texts = ["one two three four five"] * 2
    found = {"here": _translated(texts), "other": _translated(texts, sources=("x", "y z"))}
    monkeypatch.setattr(bleu_by_length, "translate", lambda workdir, *_: found[workdir])
    with pytest.raises(SystemExit):
        bleu_by_length.main([*options, "--output", str(tmp_path / "figure.png")])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.nightly
def test_from_a_training_to_the_figure(tmp_path, capsys):
    config = tiny_variant(ExperimentConfig(Seq2SeqConfig(variant="bahdanau"), TranslationConfig()))
    config.num_steps, config.mesh.data = 1, 1
    train(config, tmp_path / "run")
    bleu_by_length.main(["--workdirs", f"one={tmp_path / 'run'}", "--output", str(tmp_path / "figure.png")])
    counts = [int(line.split("|")[2]) for line in capsys.readouterr().out.splitlines() if line[2:3].isdigit()]
    assert sum(counts) == len(config.task.splits()["validation"])
