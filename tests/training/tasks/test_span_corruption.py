"""T5's pre-training in the trainer: what an epoch is, what evaluation says, and what is refused."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.cli import main
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.objectives.span_corruption import sentinel_ids, span_corruption_lengths
from tfx_jax.errors import UserError
from tfx_jax.models import T5Config, TransformerConfig
from tfx_jax.synthetic.grammar import grammar_documents
from tfx_jax.tasks.text.span_corruption import SpanCorruptionConfig, SpanCorruptionTask
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh


def tiny_config(**data):
    config = tiny_variant(ExperimentConfig(model=T5Config(), task=SpanCorruptionConfig(TextData(documents="lines"))))
    for name, value in {"tokenizer": "words", "max_length": 32, **data}.items():
        setattr(config.task.data, name, value)
    config.mesh.data = 1
    config.model.dropout_rate = 0.0  # compiles sooner
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("work")
    for split, size in (("train", 60), ("validation", 10)):
        lines = [" ".join(sentences) for sentences in grammar_documents(split, size)]
        (workdir / f"{split}.txt").write_text("\n".join(lines) + "\n")
    files = {"train_file": "train.txt", "validation_file": "validation.txt"}
    config = tiny_config(dataset="files", data_dir=str(workdir), **files)
    config.num_steps, config.eval_every, config.checkpoint_every = 20, 10, 10
    return workdir, train(config, workdir)


@pytest.fixture(scope="module")
def run(trained):
    return load_run(trained[0], SpanCorruptionTask)


def epoch_of(task, number):
    rows = task.make_epochs(0)(number)
    return [rows[index] for index in range(len(rows))]


def restored(task, rows):
    """The stream, from sources and targets alone."""
    pad, eos, sentinels = task.model_config.pad_id, task.model_config.eos_id, sentinel_ids(task.tokenizer.vocab_size)
    found = []
    for row in rows:
        source, target = ([token for token in row[side].tolist() if token != pad] for side in ("source", "target"))
        assert source.pop() == target.pop() == eos
        places = [place for place, token in enumerate(target) if token in sentinels] + [len(target)]
        spans = {target[a]: target[a + 1 : b] for a, b in itertools.pairwise(places)}
        found += [piece for token in source for piece in spans.get(token, [token])]
    return found


@pytest.mark.slow
def test_training_learns_and_evaluates(trained):
    workdir, result = trained
    first, last = result.evaluations
    assert last["loss"] < first["loss"] < math.log(500)
    assert 0 < last["accuracy"] < 100
    assert f"**{last['loss']:.4f} nats** | {last['accuracy']:.2f} %" in (workdir / "report.md").read_text()


@pytest.mark.slow
def test_evaluation_is_the_mean_over_all_targets(trained, run):
    """Against the logits themselves, one row at a time; the same spans as always."""
    workdir, result = trained
    params = load_params(workdir)
    lines = run.config.task.data.load("validation")
    stream = np.array([token for line in lines for token in run.task.tokenizer.encode(line)])
    rows = run.task._corrupted(stream, (0,))
    model = nnx.merge(run.graphdef, jax.device_put(params))
    logits_fn = jax.jit(model.__call__)
    nll, correct, count = 0.0, 0, 0
    for index in range(len(rows)):
        row = rows[index]
        logits = np.asarray(logits_fn(row["source"][None], row["target"][None])[0], np.float64)
        target = row["target"][row["target"] != 0]
        logits = logits[: len(target)]
        log_z = np.log(np.exp(logits).sum(axis=-1))
        nll += (log_z - logits[np.arange(len(target)), target]).sum()
        correct += (logits.argmax(axis=-1) == target).sum()
        count += len(target)
    assert result.evaluations[-1]["loss"] == pytest.approx(nll / count, rel=1e-5)
    assert result.evaluations[-1]["accuracy"] == pytest.approx(100 * correct / count, abs=0.1)


def test_an_epoch_has_every_token_once_and_is_cut_elsewhere(run):
    task, documents = run.task, [*run.config.task.data.load("train")]
    stream = [token for ids in task.tokenizer.encode_batch(documents) for token in ids]
    epochs = [epoch_of(task, number) for number in (0, 1, 2)]
    for rows in epochs:
        assert restored(task, rows) == stream
        shapes = {(row["source"].shape, row["target"].shape) for row in rows}
        assert shapes == {tuple((n,) for n in span_corruption_lengths(task.config.text_length))}
    firsts = {row["source"].tobytes() for row in epochs[0]}
    assert not any(row["source"].tobytes() in firsts for rows in epochs[1:] for row in rows)
    for row, again in zip(epochs[1], epoch_of(task, 1), strict=True):
        np.testing.assert_array_equal(row["source"], again["source"])
        np.testing.assert_array_equal(row["target"], again["target"])


def test_batches_have_one_shape(run):
    batches = iter(run.train_data(make_mesh(1)))
    found = [next(batches) for _ in range(30)]  # more than an epoch
    source_length, target_length = span_corruption_lengths(run.task.config.text_length)
    assert source_length == 32
    assert {batch["source"].shape for batch in found} == {(16, source_length)}
    assert {batch["target"].shape for batch in found} == {(16, target_length)}


def test_half_of_the_tokens_can_be_dropped(run):
    config = dataclasses.replace(run.task.config, noise_density=0.5, mean_span_length=4.0)
    task = SpanCorruptionTask(config, run.task.model_config, run.task._splits, run.task.tokenizer)
    source_length, target_length = config.lengths
    assert source_length <= 32 < target_length
    rows = epoch_of(task, 0)
    assert {(len(row["source"]), len(row["target"])) for row in rows} == {config.lengths}
    assert restored(task, rows) == restored(run.task, epoch_of(run.task, 0))
    planned = config.planned(task.model_config, LoaderOptions(0))
    assert planned.batch["target"].shape == (planned.batch["source"].shape[0], target_length)


def test_the_whole_text_can_be_the_target(run):
    config = dataclasses.replace(run.task.config, targets="text")
    task = SpanCorruptionTask(config, run.task.model_config, run.task._splits, run.task.tokenizer)
    rows, others = epoch_of(task, 0), epoch_of(run.task, 0)
    assert {(len(row["source"]), len(row["target"])) for row in rows} == {(32, config.text_length + 1)}
    assert [row["source"].tolist() for row in rows] == [row["source"].tolist() for row in others]
    targets = [[token for token in row["target"].tolist() if token != 0] for row in rows]
    assert [token for target in targets for token in target[:-1]] == restored(run.task, others)
    assert {target[-1] for target in targets} == {task.model_config.eos_id}
    planned = config.planned(task.model_config, LoaderOptions(0))
    assert planned.batch["target"].shape == (planned.batch["source"].shape[0], config.text_length + 1)


def test_command_line_evaluates(trained, capsys):
    workdir, result = trained
    assert main(["evaluate", f"--workdir={workdir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores == {name: pytest.approx(result.evaluations[-1][name]) for name in ("loss", "accuracy")}


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("data", "max_length", 2, "config.task.data.max_length=2 is too short for a span"),
        ("data", "max_length", 4096, "needs 228 sentinels in a target, but T5's tokenizers have 100: lower max_length"),
        ("task", "noise_density", 0.0, "config.task.noise_density=0.0 drops nothing that could be predicted"),
        ("task", "mean_span_length", 0.5, "config.task.mean_span_length must be at least 1, got 0.5"),
        ("model", "num_buckets", 3, "config.model.num_buckets=3 must be at least 4"),
        ("model", "max_distance", 16, "less than twice max_distance=16"),
    ],
)
def test_what_does_not_fit_is_refused(section, field, value, message):
    config = tiny_config()
    config.task.data.tokens_per_batch = 8_192
    setattr({"data": config.task.data, "model": config.model, "task": config.task}[section], field, value)
    with pytest.raises(UserError, match=message):
        validate(config)


def test_documents_cannot_be_packed():
    with pytest.raises(UserError, match=r"config has no field task\.is_packed"):
        load_config_file("t5_wikitext2", ["--config.task.is_packed=true"])


def test_learned_positions_that_are_too_few_are_refused():
    config = tiny_config()
    config.model = TransformerConfig(learned_positions=31, start_id=0, eos_id=1)
    with pytest.raises(
        UserError,
        match=r"^config.task.data.max_length=32 is more than config.model.learned_positions=31: "
        r"set --config.task.data.max_length=31 or less$",
    ):
        validate(config)
    config.model.learned_positions = 32
    validate(config)
    config.task.noise_density, config.task.mean_span_length = 0.8, 10
    with pytest.raises(
        UserError, match=r"^sources and targets have \(32, 1\d\d\) tokens with .*noise_density=0\.8, more"
    ):
        validate(config)


def test_a_validation_text_that_is_too_short_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "train.txt").write_text("the dog runs to the house\n" * 40)
    (tmp_path / "dev.txt").write_text("the dog\n")
    config = tiny_config()
    data = config.task.data
    data.dataset, data.data_dir, data.documents = "files", str(tmp_path), "lines"
    data.train_file, data.validation_file = "train.txt", "dev.txt"
    with pytest.raises(
        UserError, match=r"^the validation split has \d+ tokens, but must have at least \d+, for one row"
    ):
        train(config, tmp_path / "run")


def test_other_special_tokens_are_refused(trained):
    config = tiny_config()
    config.model.eos_id = 2
    with pytest.raises(UserError, match=r"config.model.eos_id is 2, but the tokenizer of .* has 1: set"):
        make_run(config, trained[0])


def test_a_tokenizer_without_sentinels_is_refused(trained, tmp_path):
    folder = trained[0] / "tokenizer"
    (tmp_path / "tokenizer").mkdir()
    for file in folder.iterdir():
        text = file.read_text().replace("<extra_id_7>", "<other>")
        (tmp_path / "tokenizer" / file.name).write_text(text)
    with pytest.raises(UserError, match=r"the last 100 tokens of the tokenizer of .* must be T5's sentinels"):
        make_run(tiny_config(), tmp_path)
