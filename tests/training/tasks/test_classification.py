"""Labelled texts become the right rows; scores are those of what the model says; trainings from the command line."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.training.config import ExperimentConfig, LabelledData
from tfx_jax.training.experiments import make_experiment
from tfx_jax.training.experiments.classification import ClassificationExperiment
from tfx_jax.training.sharding import make_mesh
from tfx_jax.training.validation import validate

EXPERIMENTS = pathlib.Path(__file__).parents[3] / "experiments"


def tiny_config(**data):
    model = BertConfig(600, max_length=32, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    config = ExperimentConfig(model=model, data=LabelledData(**{"max_length": 12, "tokens_per_batch": 96} | data))
    config.task.label_smoothing = 0.0
    return validate(config)


def opened(workdir, **data):
    experiment = make_experiment(tiny_config(**data))
    assert type(experiment) is ClassificationExperiment
    experiment.open(workdir)
    return experiment


@pytest.fixture(scope="module", params=["grammar", "grammar_pairs"])
def experiment(request, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("workdir"), dataset=request.param)


def params_of(experiment):
    """Zeros, for models whose parameters do not matter; to draw some would take seconds."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(experiment.make_model)))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def test_rows_are_the_texts_between_special_tokens(experiment):
    tokenizer, examples = experiment.tokenizer, experiment.split("validation")
    rows = experiment.rows(examples)
    assert len(rows) == len(examples) == 200
    assert experiment.labels == tuple(sorted({example.label for example in experiment.split("train")}))
    cut = 0
    for example, row in zip(examples, rows, strict=True):
        sides = [tokenizer.encode(text) for text in example[:-1]]
        while sum(map(len, sides)) + len(sides) + 1 > 12:
            max(reversed(sides), key=len).pop()  # the second where both are as long
            cut += 1
        wanted = [tokenizer.cls_id]
        types = [0]
        for number, side in enumerate(sides):
            wanted += [*side, tokenizer.sep_id]
            types += [number] * (len(side) + 1)
        assert row["tokens"].tolist() == wanted
        assert row["segments"].tolist() == types
        assert row["is_token"].all()
        assert len(row["is_token"]) == len(wanted)
        assert experiment.labels[row["label"]] == example.label
        assert row["row_weights"] == 1
    assert cut > 20


def test_what_the_model_says_is_scored(experiment, monkeypatch):
    examples = experiment.split("validation")
    monkeypatch.setattr(experiment, "predict_batch", lambda model, batch: batch["label"])
    experiment.__dict__.pop("predictor", None)
    scores, text = experiment.evaluate(params_of(experiment))
    assert scores == {"accuracy": 100, "macro_f1": 100}
    assert text == "accuracy 100.00 %, macro F1 100.00 %, 200 texts"
    monkeypatch.setattr(experiment, "predict_batch", lambda model, batch: 0 * batch["label"])
    experiment.__dict__.pop("predictor", None)
    scores, _ = experiment.evaluate(params_of(experiment))
    share = np.mean([example.label == experiment.labels[0] for example in examples])
    assert 0 < share < 1
    assert scores["accuracy"] == pytest.approx(100 * share)
    assert scores["macro_f1"] == pytest.approx(200 * share / (1 + share) / len(experiment.labels))
    experiment.__dict__.pop("predictor")


def test_scores_do_not_depend_on_the_size_of_batches(experiment, tmp_path, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(experiment.make_model))))
    found = experiment.predict(params, experiment.rows(experiment.split("validation")))
    assert len(set(found)) > 1
    model = nnx.merge(experiment.graphdef, jax.device_put(params))
    row = experiment.rows(experiment.split("validation")[:1])[0]
    assert found[0] == np.asarray(jax.jit(model)(row["tokens"][None], row["segments"][None])).argmax()
    one_by_one = opened(tmp_path, dataset=experiment.config.task.data.dataset, tokens_per_batch=12)
    assert one_by_one.labels == experiment.labels
    assert one_by_one.predict(params, one_by_one.rows(one_by_one.split("validation"))) == found


def test_batches_hold_every_text_once_an_epoch(experiment):
    iterator = iter(experiment.batches(make_mesh(data=1)))
    wanted = sorted((row["tokens"].tolist(), int(row["label"])) for row in experiment.rows(experiment.split("train")))
    found = []
    while len(found) < len(wanted):
        batch = next(iterator)
        assert batch["tokens"].size <= 96
        for tokens, is_token, label, weight in zip(
            batch["tokens"], batch["is_token"], batch["label"], batch["row_weights"], strict=True
        ):
            assert weight == is_token.any()
            if weight:
                found.append((tokens[is_token].tolist(), int(label)))
    iterator.close()
    assert sorted(found) == wanted


@pytest.fixture
def files(tmp_path):
    """A folder with texts, of which the validation split has a label of its own, and pairs."""
    (tmp_path / "train.tsv").write_text("good\tfine words\nbad\tpoor words\n")
    (tmp_path / "dev.tsv").write_text("good\tfine\nugly\tpoor\n")
    (tmp_path / "pairs.tsv").write_text("label\tone\ttwo\nyes\tfine words\tpoor words\nno\tpoor\tfine\n")
    return {"dataset": "files", "data_dir": str(tmp_path), "train_file": "train.tsv"}


def test_unknown_label_is_refused(files, tmp_path):
    experiment = opened(tmp_path / "workdir", validation_file="dev.tsv", **files)
    with pytest.raises(UserError, match=r"^the label 'ugly' is none of the 2 of the training split$"):
        experiment.evaluate(params_of(experiment))


def test_parts_that_are_named(files, tmp_path):
    experiment = opened(tmp_path / "workdir", **files)
    assert not experiment.has_validation
    with pytest.raises(UserError, match=r"^config.task.data.validation_file names no file for the validation split$"):
        experiment.evaluate(params_of(experiment))
    columns = {"first_column": "one", "second_column": "two", "label_column": "label"}
    named = files | columns | {"train_file": "pairs.tsv", "validation_file": "pairs.tsv"}
    experiment = opened(tmp_path / "pairs", **named)
    assert experiment.has_validation
    assert experiment.labels == ("no", "yes")
    assert [row["segments"].max() for row in experiment.rows(experiment.split("train"))] == [1, 1]


def test_unknown_data_set_is_refused():
    with pytest.raises(UserError, match=r'dataset must be "grammar" or "grammar_pairs" or "files", got \'sick\'$'):
        tiny_config(dataset="sick")


def run_test_variant(name, workdir, capsys, *options):
    """Trains and evaluates on the command line, with one length and one device: that is one program to compile."""
    quick = ["--config.task.data.max_length=8", "--config.mesh.data=1", *options]
    assert train_cli.run([f"--config={EXPERIMENTS / name}.py:test", f"--workdir={workdir}", *quick]) == 0
    told = capsys.readouterr().err
    assert evaluate_cli.run([f"--workdir={workdir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert f"validation accuracy {scores['accuracy']:.2f} %" in told
    assert scores.keys() == {"accuracy", "macro_f1"}
    return scores


@pytest.mark.slow
def test_pairs_on_the_command_line(tmp_path, capsys):
    scores = run_test_variant("bert_sick", tmp_path / "run", capsys)
    assert 20 < scores["accuracy"] < 60
    assert evaluate_cli.run([f"--workdir={tmp_path / 'run'}", "--split=test"]) == 0
    assert capsys.readouterr().out.startswith("accuracy: ")


@pytest.mark.slow  # one of the test variants that `make smoke` trains, for longer
def test_training_on_the_command_line_learns(tmp_path, capsys):
    """Kinds of sentences, which single words give away for the most part."""
    fast = [f"--config.{change}" for change in ("optimizer.peak_learning_rate=0.01", "optimizer.warmup_steps=5")]
    longer = ["--config.num_steps=60", "--config.checkpoint_every=60"]
    scores = run_test_variant("bert_banking77", tmp_path / "run", capsys, *fast, *longer)
    assert scores["accuracy"] > 25  # by chance, 10
