"""Tagged sentences become rows and tags of words again; entities are scored; a pre-trained body is taken over."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.tasks.tagging import IGNORED, entity_scores
from tfx_jax.toy_grammar import grammar_documents
from tfx_jax.training.checkpoint import Checkpoints, load_params
from tfx_jax.training.config import ExperimentConfig, TaggedData, TextData, save_config
from tfx_jax.training.experiments import make_experiment
from tfx_jax.training.experiments.tagging import TaggingExperiment
from tfx_jax.training.initial import initial_state, with_initial_sizes
from tfx_jax.training.program import lay_out
from tfx_jax.training.sharding import make_mesh
from tfx_jax.training.validation import validate

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "bert_wnut17.py"
LABELS = ["O", *(f"{prefix}-{label}" for label in ("animal", "person", "place", "thing", "time") for prefix in "BI")]


def tiny_config(**data):
    model = BertConfig(200, max_length=64, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    config = ExperimentConfig(model=model, data=TaggedData(**{"max_length": 16, "tokens_per_batch": 96} | data))
    config.task.label_smoothing = 0.0
    return validate(config)


def opened(workdir, **data):
    experiment = make_experiment(tiny_config(**data))
    assert type(experiment) is TaggingExperiment
    experiment.open(workdir)
    return experiment


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("workdir")


@pytest.fixture(scope="module")
def experiment(workdir):
    """Words have several pieces, and some sentences are too long."""
    return opened(workdir)


def test_rows_are_words_between_special_tokens(experiment):
    tokenizer, examples = experiment.tokenizer, experiment.split("validation")
    rows = experiment.rows(examples)
    assert len(rows) == len(examples) == 200
    assert list(experiment.labels) == LABELS
    cut = 0
    for example, row in zip(examples, rows, strict=True):
        pieces = [tokenizer.encode(word) for word in example.words]
        tokens = [token for word in pieces for token in word][:14]
        assert row["tokens"].tolist() == [tokenizer.cls_id, *tokens, tokenizer.sep_id]
        assert row["targets"].shape == row["is_token"].shape == row["segments"].shape == row["tokens"].shape
        assert row["is_token"].all()
        assert not row["segments"].any()
        starts = np.cumsum([1, *map(len, pieces[:-1])])
        wanted = {start: tag for start, tag in zip(starts.tolist(), example.tags, strict=True) if start < 15}
        found = np.flatnonzero(row["targets"] != IGNORED)
        assert {place: LABELS[row["targets"][place]] for place in found.tolist()} == wanted
        cut += len(wanted) < len(example.words)
    assert 20 < cut < 180


def telling(experiment, monkeypatch, predict):
    """The experiment with another model."""
    monkeypatch.setattr(experiment, "predict_batch", predict)
    experiment.__dict__.pop("predictor", None)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(experiment.make_model)))
    scores, text = experiment.evaluate(jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes))
    experiment.__dict__.pop("predictor", None)
    return scores, text


def test_what_the_model_says_is_scored(experiment, workdir, monkeypatch):
    examples = experiment.split("validation")
    rows = experiment.rows(examples)
    # Of a sentence that is cut, what was cut off is outside.
    read = [(row["targets"] != IGNORED).sum() for row in rows]
    left = [
        example.tags[:count] + ["O"] * (len(example.tags) - count)
        for example, count in zip(examples, read, strict=True)
    ]
    best = entity_scores(left, [example.tags for example in examples])
    support = sum(tag.startswith("B") for example in examples for tag in example.tags)
    assert 50 < best.recall < 99 > best.precision - 1

    def truth(model, batch):
        return jnp.where(batch["targets"] == IGNORED, 3, batch["targets"])  # what others say must not count

    scores, text = telling(experiment, monkeypatch, truth)
    assert scores == {"f1": best.f1, "precision": best.precision, "recall": best.recall}
    assert text.startswith(f"entity F1 {best.f1:.2f} %, precision ")
    assert text.endswith(f", {support} entities")
    assert telling(experiment, monkeypatch, lambda _, batch: 0 * batch["targets"])[0] == dict.fromkeys(scores, 0.0)
    roomy = opened(workdir, max_length=64)
    assert max(len(row["tokens"]) for row in roomy.rows(examples)) < 64
    assert telling(roomy, monkeypatch, truth)[0] == dict.fromkeys(scores, 100.0)


def test_tags_do_not_depend_on_the_size_of_batches(experiment, workdir, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(experiment.make_model))))
    rows = [row for row in experiment.rows(experiment.split("validation")) if len(row["tokens"]) <= 12]
    assert len(rows) > 20
    found = experiment.predict(params, rows)
    assert len({tag for tags in found for tag in tags}) > 3
    other = opened(workdir, tokens_per_batch=700).predict(params, rows)
    for mine, its, row in zip(found, other, rows, strict=True):
        assert mine[: len(row["tokens"])] == its[: len(row["tokens"])]


def test_padding_has_no_tag(experiment):
    iterator = iter(experiment.batches(make_mesh(data=1)))
    for _ in range(20):
        batch = next(iterator)
        assert (batch["targets"][~batch["is_token"]] == IGNORED).all()
        assert (batch["targets"] != IGNORED).any()
    iterator.close()


def write(path, *sentences):
    path.write_text("\n".join("".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in sentences))


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "train.conll", [("Ann", "I-person"), ("Lee", "I-person")], [("in", "O"), ("Rome", "B-place")])
    write(tmp_path / "dev.conll", [("Ann", "B-person"), ("Inc", "I-group")])
    return {"dataset": "files", "data_dir": str(tmp_path), "train_file": "train.conll"}


def test_tags_of_files_are_mended(files, tmp_path):
    experiment = opened(tmp_path / "workdir", **files)
    assert not experiment.has_validation
    assert experiment.labels == ("O", "B-person", "I-person", "B-place", "I-place")
    assert [example.tags for example in experiment.split("train")] == [["B-person", "I-person"], ["O", "B-place"]]


def test_unknown_tag_is_refused(files, tmp_path):
    experiment = opened(tmp_path / "workdir", validation_file="dev.conll", **files)
    with pytest.raises(UserError, match=r"^the tag 'B-group' is none of the 5 of the training split$"):
        experiment.evaluate({})


def first_training(config, workdir):
    """An experiment, and the states and steps of its training."""
    experiment = make_experiment(validate(with_initial_sizes(config)))
    save_config(experiment.config, epath.Path(workdir))
    experiment.open(workdir)
    return experiment, lay_out(experiment.config, experiment.make_model, experiment.loss, make_mesh(data=1))


def test_a_pretrained_body_is_taken_and_its_heads_are_not(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(document) for document in grammar_documents("train", 30)))
    model = BertConfig(250, max_length=24, num_layers=2, d_model=16, num_heads=2, d_ff=32)
    config = ExperimentConfig(model=model, data=TextData("files", str(tmp_path), "text.txt", max_length=24))
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    source, training = first_training(config, pretrained)
    with Checkpoints(pretrained) as checkpoints:
        checkpoints.save(jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), training.abstract_state), {})
    config = tiny_config(max_length=24)
    config.init_from, config.seed = str(pretrained), 1
    (tmp_path / "run").mkdir()
    experiment, training = first_training(config, tmp_path / "run")
    assert (experiment.sizes.num_layers, experiment.sizes.labels) == (2, tuple(LABELS))
    assert experiment.tokenizer.vocab_size == source.tokenizer.vocab_size == 250
    assert experiment.tokenizer.encode("my mother 's bag") == source.tokenizer.encode("my mother 's bag")
    state, message = jax.device_get(initial_state(training, config.init_from))
    count = len(jax.tree.leaves(state.params))
    head = "classifier/bias, classifier/kernel"
    assert message == f"starts from {pretrained}: {count - 2} of {count} arrays; drawn: {head}"
    found = load_params(pretrained)
    assert found["bert"].keys() - state.params["bert"].keys() == {"pooler"}
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(state.params["bert"]))
    assert 0 < np.abs(state.params["classifier"]["kernel"]).max() < 0.05
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.slow
def test_training_learns_on_the_command_line(tmp_path, capsys):
    """Most words of the grammar have one tag only. One length, on one device: little to compile."""
    workdir = str(tmp_path / "run")
    changes = ["data.max_length=8", "mesh.data=1", "optimizer.peak_learning_rate=0.01", "optimizer.warmup_steps=5"]
    overrides = [
        f"--config.{change}"
        for change in (*changes, "num_steps=60", "eval_every=20", "checkpoint_every=60", "log_every=20")
    ]
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={workdir}", *overrides]) == 0
    printed = re.findall(r"step \d+: validation entity F1 ([\d.]+) %", capsys.readouterr().err)
    first, _, last = map(float, printed)
    assert last > first + 10
    assert evaluate_cli.run([f"--workdir={workdir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores.keys() == {"f1", "precision", "recall"}
    assert f"{scores['f1']:.2f}" == f"{last:.2f}"
    assert scores["precision"] > 50  # of words that fit
    assert "Words" in (tmp_path / "run" / "report.md").read_text()
