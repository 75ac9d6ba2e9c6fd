"""Parsing in the trainer: a little treebank is learned, scored, and parsed with from the command line."""

import io
import json
import sys
import types

import pytest

from tfx_jax.cli import main
from tfx_jax.data.sources.trees import parse_tree
from tfx_jax.errors import UserError
from tfx_jax.models import TransformerConfig
from tfx_jax.tasks.text.parsing import ParsingConfig, ParsingTask
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run

NOUNS, VERBS = ("dog", "cat", "man"), ("sees", "likes")
TREES = [
    *(
        f"(TOP (S (NP (NN {noun})) (VP (VB {verb}) (NP (NN {other})))))"
        for noun in NOUNS
        for verb in VERBS
        for other in NOUNS
    ),
    *(f"(TOP (NP (NN {noun})))" for noun in NOUNS),
]


def tiny_config(folder):
    task = ParsingConfig()
    config = tiny_variant(ExperimentConfig(TransformerConfig(), task))
    task.data.dataset, task.data.data_dir, task.data.tokenizer = "files", str(folder), "words"
    task.data.train_file, task.data.validation_file = "train.ptb", "dev.ptb"
    task.data.max_length, task.data.tokens_per_batch = 16, 256
    task.decoding.beam_size, task.decoding.extra_length = 1, 14
    config.model.dropout_rate, config.mesh.data = 0.0, 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.ptb").write_text("\n".join(TREES * 20) + "\n")
    (folder / "dev.ptb").write_text("\n".join(TREES) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("work")
    config = tiny_config(folder)
    config.num_steps = config.checkpoint_every = 60
    return workdir, train(config, workdir)


@pytest.mark.slow
def test_training_learns(trained):
    _, result = trained
    last = result.evaluations[-1]
    assert last["f1"] > 90
    assert last["repaired"] < 10


def test_command_line_evaluates_and_parses(trained, capsysbinary, monkeypatch):
    workdir, result = trained
    assert main(["evaluate", f"--workdir={workdir}", "--json"]) == 0
    values = json.loads(capsysbinary.readouterr().out)
    assert values == {name: result.evaluations[-1][name] for name in values}
    assert list(values) == ["f1", "precision", "recall", "exact_match", "repaired"]
    lines = ["dog sees cat", "", "( dog", "dog " * 20, "man likes man"]
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("\n".join(lines).encode())))
    assert main(["translate", f"--workdir={workdir}", "--beam=3"]) == 0
    out = capsysbinary.readouterr().out.decode().splitlines()
    assert [parse_tree(line).words if line else [] for line in out] == [
        line.replace("(", "-LRB-").split() for line in lines
    ]
    assert out[0] == "(TOP (S (NP (XX dog)) (VP (XX sees) (NP (XX cat)))))"
    assert out[3] == f"(TOP {' '.join(['(XX dog)'] * 20)})"


def test_a_workdir_needs_no_training_data_to_parse(trained):
    run = load_run(trained[0], ParsingTask)
    size = run.task.tokenizer.vocab_size
    assert run.task.model_config.vocab_size == size + len(run.task.symbols) == size + 9
    assert run.task.predict(run.trained(load_params(trained[0])), ["cat"]) == ["(TOP (NP (XX cat)))"]
    assert run.task._splits._loaded == {}


def test_the_files_of_all_parts_are_read_before_the_first_step(folder, tmp_path):
    config = tiny_config(folder)
    config.task.data.test_file = "none.ptb"
    with pytest.raises(UserError, match=r"none\.ptb does not exist"):
        train(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_only_what_has_tokens_for_symbols_can_be_started_from(trained, tmp_path):
    config = tiny_config("nowhere")
    config.init_from = str(trained[0])
    (tmp_path / "symbols.json").write_text(json.dumps([f"(X{number}" for number in range(99)]))
    with pytest.raises(
        UserError,
        match=r"^the model of config.init_from has vocab_size=\d+, but parsing needs \d+ \(\d+ word pieces and 99",
    ):
        make_run(adopt_pretrained_config(config), tmp_path)
