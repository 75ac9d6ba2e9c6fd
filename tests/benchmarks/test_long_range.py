"""The command of the long-range suite: it trains what it is asked for, goes on, and writes table and plots."""

import json
import math
import re
import types

import numpy as np
import pytest

from benchmarks import long_range
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.tasks.sequence.long_range import LabeledSequence
from tfx_jax.training.config import load_config, validate

NAMES = ("dense", "linear", "delta_rule")
CHOSEN = ["--variant=test", "--tasks=listops", "--attentions=delta_rule,linear,dense", "--config.mesh.data=1"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("suite")
    long_range.main([f"--workdir={workdir}", *CHOSEN])
    return workdir


@pytest.fixture(scope="module")
def measured(workdir):
    return {name: json.loads((workdir / "test" / "listops" / name / "measured.json").read_text()) for name in NAMES}


@pytest.mark.nightly
def test_the_table_has_a_row_for_each_training(workdir, measured):
    lines = (workdir / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| listops")]
    assert [row[1] for row in rows] == ["(commonest label)", "(naive Bayes)", "dense", "linear", "delta_rule"]
    assert [row[2] for row in rows] == ["", "", "", "", "yes"]
    for _, name, _, num_params, best, last, speed, memory in rows[2:]:
        one, dense = measured[name], measured["dense"]
        assert int(num_params.replace(",", "")) == one["num_params"]
        assert (float(best), float(last)) == pytest.approx(
            (max(one["accuracies"][1]), one["accuracies"][1][-1]), abs=0.01
        )
        assert float(re.findall(r"x ([\d.]+)", speed)[0]) == pytest.approx(one["speed"] / dense["speed"], abs=0.01)
        assert float(re.findall(r"x ([\d.]+)", memory)[0]) == pytest.approx(one["memory"] / dense["memory"], abs=0.01)
        assert one["memory"] > 1_000
        assert one["losses"][0] == [2, 4, 6]
    assert rows[3][6] != rows[2][6]


def test_baselines_are_those_of_counts():
    """Naive Bayes as by hand: shares of tokens with one added, 2 ids, and shares of labels."""
    ones = {
        "train": [("a", [1, 1, 1]), ("a", [1, 0]), ("b", [0, 0, 1])],
        "validation": [("a", [1]), ("b", [0, 0]), ("b", [1])],
    }
    splits = {split: [LabeledSequence((np.array(ids),), label) for label, ids in rows] for split, rows in ones.items()}
    data = types.SimpleNamespace(num_sequences=1, vocab_size=2, labels=("a", "b"))
    shares = {"a": (2 / 3, [2 / 7, 5 / 7]), "b": (1 / 3, [3 / 5, 2 / 5])}
    said = [
        max(shares, key=lambda name: shares[name][0] * math.prod(shares[name][1][token] for token in ids))
        for _, ids in ones["validation"]
    ]
    right = sum(guess == label for guess, (label, _) in zip(said, ones["validation"], strict=True))
    config = types.SimpleNamespace(task=types.SimpleNamespace(splits=lambda: splits, data=data))
    found = long_range.baselines(config)
    assert found == {"(commonest label)": pytest.approx(200 / 3), "(naive Bayes)": pytest.approx(100 * right / 3)}
    data.num_sequences = 2
    assert [*long_range.baselines(config)] == ["(commonest label)"]


@pytest.mark.nightly
def test_pictures_are_drawn(workdir):
    for name in ("accuracy_speed_memory.png", "learning_curves.png"):
        assert (workdir / name).read_bytes().startswith(b"\x89PNG")
        assert (workdir / name).stat().st_size > 10_000


@pytest.mark.nightly
def test_each_training_has_its_attention(workdir):
    models = [load_config(workdir / "test" / "listops" / name).model for name in NAMES]
    assert [(model.attention.name, model.is_causal) for model in models] == [
        ("dense", False),
        ("linear", False),
        ("delta_rule", True),
    ]


@pytest.mark.nightly
def test_what_is_done_is_not_done_again(workdir, monkeypatch, capsys):
    before = (workdir / "table.md").read_text()
    monkeypatch.setattr(long_range, "train", lambda *_: pytest.fail("it is trained again"))
    long_range.main([f"--workdir={workdir}", *CHOSEN])
    assert (workdir / "table.md").read_text() == before
    assert capsys.readouterr().out.strip() == before.strip()


@pytest.mark.nightly
def test_another_configuration_is_trained_and_not_taken_for_what_is_there(workdir, capsys):
    with pytest.raises(SystemExit):
        long_range.main([f"--workdir={workdir}", *CHOSEN, "--config.model.d_ff=8"])
    assert "was made with model.d_ff=32, not 8: restore these values" in " ".join(capsys.readouterr().err.split())


def test_an_interruption_ends_the_command_without_a_result(tmp_path, monkeypatch):
    stopped = lambda *_: long_range.Result(3, [], 15)  # noqa: E731
    monkeypatch.setattr(long_range, "train", stopped)
    with pytest.raises(SystemExit) as ended:
        long_range.main([f"--workdir={tmp_path}", *CHOSEN])
    assert ended.value.code == 143
    assert not list(tmp_path.rglob("measured.json"))


def test_only_kernels_and_sampled_attention_are_left_out():
    missing = SPECS.keys() - {attention for attention, _ in long_range.ATTENTIONS.values()}
    assert missing == {"splash", "flash", "cudnn", "hard"}
    assert long_range.OPTIONS.keys() <= SPECS.keys()


def test_an_attention_without_a_causal_form_does_not_become_causal():
    arguments = long_range.make_parser().parse_args(["--workdir=w", "--variant=test"])
    config = long_range.make_config("listops", "bigbird", arguments, ["--config.model.is_causal=true"])
    with pytest.raises(UserError, match="bigbird attention has no causal form, which this model needs"):
        validate(config)


@pytest.mark.parametrize(("task", "length"), [("listops", 64), ("text", 256), ("matching", 256)])
def test_every_attention_fits_every_experiment(task, length):
    for variant, longest in (("small", length), ("paper", 2_000 if task == "listops" else 4_000)):
        arguments = long_range.make_parser().parse_args(["--workdir=w", f"--variant={variant}", "--data_dir=DIR"])
        for name in long_range.ATTENTIONS:
            config = long_range.make_config(task, name, arguments, [])
            validate(config)
            assert config.task.data.max_length == longest
            assert getattr(config.task.data, "data_dir", "DIR") == "DIR"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*long_range.OPTIONS, "forgetting"])
def test_every_attention_with_options_of_its_own_trains(name, tmp_path):
    long_range.main([f"--workdir={tmp_path}", *CHOSEN, f"--attentions={name}"])
    assert (
        f"| listops | {name} | {'yes' if long_range.ATTENTIONS[name].is_causal else ''} |"
        in (tmp_path / "table.md").read_text()
    )


def test_names_that_are_not_known_are_refused(tmp_path, capsys):
    for option in ("--tasks=listops,pathfinder", "--attentions=denser"):
        with pytest.raises(SystemExit):
            long_range.main([f"--workdir={tmp_path}", option])
        assert re.search(r"unknown '(pathfinder|denser)'; there are", capsys.readouterr().err)
