"""Tasks as text to text in the trainer: answers are scored as they should be, rows and labels, and a training."""

import chex
import numpy as np
import pytest
from flax import nnx

from tfx_jax.cli import main
from tfx_jax.data.conll import TaggedSentence
from tfx_jax.data.labelled import LabelledText
from tfx_jax.errors import UserError
from tfx_jax.models.t5 import T5Config
from tfx_jax.training.checkpoint import load_params
from tfx_jax.training.config import (
    ExperimentConfig,
    LabelledData,
    QuestionData,
    TaggedData,
    tiny_variant,
)
from tfx_jax.training.experiments import load_experiment, make_experiment
from tfx_jax.training.experiments.text_to_text import ClassificationAsTextExperiment, TextToTextExperiment
from tfx_jax.training.initial import with_initial_sizes
from tfx_jax.training.loop import train
from tfx_jax.training.sharding import make_mesh

DATA = {
    "texts": LabelledData(),
    "pairs": LabelledData(first_column="a", second_column="b", label_column="c"),
    "tags": TaggedData(),
    "answers": QuestionData(),
}


def tiny_config(data, **changes):
    config = tiny_variant(ExperimentConfig(model=T5Config(), data=data))
    config.task.data.tokenizer = "words"
    for name, value in changes.items():
        setattr(config.task.data, name, value)
    config.task.label_smoothing, config.task.decoding.beam_size, config.mesh.data = 0.0, 1, 1
    config.model.dropout_rate = 0.0  # compiles sooner
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    return config


@pytest.fixture(scope="module", params=list(DATA))
def opened(request, tmp_path_factory):
    experiment = make_experiment(tiny_config(DATA[request.param], tokenizer="unigram", max_length=128))
    assert isinstance(experiment, TextToTextExperiment)
    experiment.open(tmp_path_factory.mktemp(request.param))
    return experiment


def answering(experiment, answer_of, monkeypatch):
    """Puts a function from a row's index to tokens in the place of the model."""
    rows = experiment.rows(experiment.split("validation"))
    index_of = {row["source"].tobytes(): index for index, row in enumerate(rows)}
    width = max(len(row["target"]) for row in rows) + 1

    def predictor(params, batches):
        for batch in batches:
            found = np.zeros((len(batch["source"]), width), np.int32)
            for place, source in enumerate(batch["source"]):
                if source.any():
                    answer = answer_of(rows, index_of[source[source != 0].tobytes()])
                    found[place, : len(answer)] = answer
            yield found

    monkeypatch.setattr(experiment, "predictor", predictor)


def test_right_answers_score_100_and_wrong_ones_less(opened, monkeypatch):
    """Through tokenizer, batches and back: whoever writes the targets has everything right."""
    monkeypatch.setattr(opened, "target_length", 64)  # nothing is cut, whatever training had
    answering(opened, lambda rows, index: rows[index]["target"], monkeypatch)
    scores, text = opened.evaluate({})
    assert scores == pytest.approx(dict.fromkeys((score.name for score in opened.scores), 100.0))
    assert "100.00 %" in text
    answering(opened, lambda rows, index: rows[(index + 1) % len(rows)]["target"], monkeypatch)
    assert opened.evaluate({}).scores[opened.scores[0].name] < 60
    for nothing in ([1], [7, 7, 7, 1], [opened.specials.sentinels[5], 1]):
        answering(opened, lambda rows, index, nothing=nothing: nothing, monkeypatch)
        assert opened.evaluate({}).scores[opened.scores[0].name] < 5


def test_rows_end_and_are_cut(opened):
    examples = opened.split("train")[:50]
    for row, example in zip(opened.rows(examples), examples, strict=True):
        for side, text in zip(("source", "target"), opened.render(example), strict=True):
            assert row[side].tolist() == [*opened.tokenizer.encode(text), 1]
    assert opened.target_length == max(
        len(opened.tokenizer.encode(opened.render(example).target)) + 1 for example in opened.split("train")
    )


def test_answers_are_no_longer_than_the_configuration_says(tmp_path):
    experiment = make_experiment(tiny_config(QuestionData(), max_answer_length=1, max_length=16))
    experiment.open(tmp_path)
    assert experiment.target_length == 2
    rows = experiment.rows(experiment.split("validation"))
    assert max(len(row["source"]) for row in rows) == 16
    assert {row["source"][-1] for row in rows} == {row["target"][-1] for row in rows} == {1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [f"{label}\t{word} {label[-1]} thing" for word in "abcdefghij" for label in ("Is_x", "is_Y", "is_z")]
    (folder / "train.tsv").write_text("\n".join(lines * 10) + "\n")
    (folder / "dev.tsv").write_text("\n".join(lines) + "\n")
    return folder


def files(folder, **names):
    return LabelledData(
        dataset="files", data_dir=str(folder), **{"train_file": "train.tsv", "validation_file": "dev.tsv", **names}
    )


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Labels that stand in the text, as words: a few steps are enough."""
    workdir = tmp_path_factory.mktemp("work")
    config = tiny_config(LabelledData())
    config.task.data = files(folder, tokenizer="words", max_length=16, tokens_per_batch=256)
    config.num_steps, config.checkpoint_every = 60, 60
    return workdir, train(config, workdir)


def test_training_learns(trained):
    _, result = trained
    assert result.evaluations[-1]["accuracy"] > 90


def test_command_line_evaluates(trained, capsys):
    workdir, result = trained
    assert main(["evaluate", f"--workdir={workdir}"]) == 0
    last = result.evaluations[-1]
    assert capsys.readouterr().out == f"accuracy: {last['accuracy']:.2f} %\nmacro F1: {last['macro_f1']:.2f} %\n"


def test_a_workdir_needs_no_training_data_to_evaluate(trained, folder):
    experiment = load_experiment(trained[0], ClassificationAsTextExperiment)
    assert experiment.labels == ["Is_x", "is_Y", "is_z"]
    assert experiment.target_length == 3
    assert experiment._splits == {}
    assert experiment.answer(load_params(trained[0]), [LabelledText("a x thing", "?")]) == ["is x"]


def test_a_beam_answers_too(trained, folder):
    experiment = load_experiment(trained[0], ClassificationAsTextExperiment)
    experiment.config.task.decoding.beam_size = 3
    found = experiment.answer(load_params(trained[0]), experiment.split("validation")[:6])
    assert found == ["is x", "is y", "is z"] * 2


def test_starts_from_another_training(trained, tmp_path):
    """A model's tokenizer and sizes are taken, labels and lengths are those of the new task."""
    config = tiny_config(QuestionData(), tokenizer="unigram")
    config.model.d_model, config.init_from = 64, str(trained[0])
    config = with_initial_sizes(config)
    experiment = make_experiment(config)
    experiment.open(tmp_path)
    files = ["tokenizer.json", "tokenizer_config.json"]
    texts = [[(work / "tokenizer" / name).read_text() for name in files] for work in (trained[0], tmp_path)]
    assert texts[0] == texts[1]
    old, new = (nnx.eval_shape(make.make_model) for make in (load_experiment(trained[0]), experiment))
    chex.assert_trees_all_equal_shapes_and_dtypes(nnx.to_pure_dict(nnx.state(old)), nnx.to_pure_dict(nnx.state(new)))
    assert experiment.labels == []


def test_labels_that_answers_cannot_tell_apart_are_refused(tmp_path):
    for number, (lines, message) in enumerate(
        [
            ("a_b\tt\nA b\tu\n", "the labels 'A b' and 'a_b' read alike in words: rename one"),
            # The tokenizer of the training split knows neither character: both are unknown.
            ("a\tt u v w\n①\tt\n1\tu\n", "the tokenizer cannot spell the label '.' apart from others: rename it"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.tsv").write_text(lines * 5)
        config = tiny_config(files(folder))
        config.task.data = files(folder, tokenizer="unigram", validation_file="")
        experiment = make_experiment(config)
        assert not experiment.has_validation
        with pytest.raises(UserError, match=message):
            experiment.open(folder / "work")


def test_a_label_that_training_does_not_have_is_refused(trained, folder):
    experiment = load_experiment(trained[0], ClassificationAsTextExperiment)
    with pytest.raises(UserError, match="the label 'new' is none of the 3 of the training split"):
        experiment.score(["is x"], [LabelledText("t", "new")])


def test_a_part_that_is_not_named_is_refused(trained):
    experiment = load_experiment(trained[0], ClassificationAsTextExperiment)
    with pytest.raises(UserError, match=r"config.task.data.test_file names no file for the test split"):
        experiment.evaluate({}, "test")


def test_batches_have_static_widths(opened):
    batches = iter(opened.batches(make_mesh(1)))
    found = [next(batches) for _ in range(60)]
    assert {batch["target"].shape[1] for batch in found} == {opened.target_length}
    assert {batch["source"].shape[1] for batch in found} <= {16, 24, 32, 48, 64, 96, 128}
    assert all(len(batch["source"]) == len(batch["target"]) for batch in found)


def test_sentinels_are_spelled_out(opened):
    first, second = opened.specials.sentinels[:2]
    assert opened.spell([first, second, first, 1, first, 0]) == "<extra_id_0> <extra_id_1> <extra_id_0>"
    if opened.labels:
        text = next(iter(opened.labels_as_written))
        ids = opened.tokenizer.encode(text)
        assert opened.spell([first, *ids, second, *ids, 1]) == f"<extra_id_0> {text} <extra_id_1> {text}"


def test_long_sentences_are_tagged_as_far_as_they_are_read(tmp_path):
    experiment = make_experiment(tiny_config(TaggedData(), max_length=16))
    experiment.open(tmp_path)
    sentence = TaggedSentence(["the"] * 120, ["O"] * 119 + ["B-person"])
    assert experiment.rows([sentence])[0]["target"].tolist() == [1]
    assert "recall 0.00 %" in experiment.score([""], [sentence]).text
