"""Tasks as text to text in the trainer: answers are scored as they should be, rows and labels, and a training."""

import dataclasses

import chex
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tests.training.tasks.told import Told, no_answer
from tfx_jax.cli import main
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.objectives.span_corruption import sentinel_ids
from tfx_jax.data.sources.conll import TaggedSentence
from tfx_jax.data.sources.labeled import LabeledText
from tfx_jax.errors import UserError
from tfx_jax.models import T5Config, TransformerConfig
from tfx_jax.tasks.text.classification import LabeledData
from tfx_jax.tasks.text.question_answering import QuestionData
from tfx_jax.tasks.text.tagging import TaggedData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig, TextToTextTask
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, save_config, tiny_variant, validate
from tfx_jax.training.init_from import adopt_pretrained_config
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

DATA = {
    "texts": LabeledData(),
    "pairs": LabeledData(first_column="a", second_column="b", label_column="c"),
    "tags": TaggedData(),
    "answers": QuestionData(),
}


def tiny_config(data, **changes):
    task = TextToTextConfig(dataclasses.replace(data))
    config = tiny_variant(ExperimentConfig(model=T5Config(), task=task))
    task.data = dataclasses.replace(task.data, **{"tokenizer": "words"} | changes)
    task.decoding.beam_size, config.mesh.data = 1, 1
    config.model.dropout_rate = 0.0  # compiles sooner
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    return config


@pytest.fixture(scope="module", params=list(DATA))
def run(request, tmp_path_factory):
    config = tiny_config(DATA[request.param], tokenizer="unigram", max_length=128)
    run = make_run(validate(config), tmp_path_factory.mktemp(request.param))
    assert type(run.task) is TextToTextTask
    return run


def examples_of(run, split):
    return run.config.task.splits()[split]


def answering(run, answer_of):
    """A model that is a function from the encoded examples of the validation split and an index to tokens."""
    examples = run.task.encode(examples_of(run, "validation"))
    index_of = {example["source"].tobytes(): index for index, example in enumerate(examples)}
    width = max(len(example["target"]) for example in examples) + 1

    def answer(batch):
        found = np.zeros((len(batch["source"]), width), np.int32)
        for row, source in enumerate(batch["source"]):
            if source.any():
                tokens = answer_of(examples, index_of[source[source != 0].tobytes()])
                found[row, : len(tokens)] = tokens
        return found

    return Told(answer)


def test_right_answers_score_100_and_wrong_ones_less(run, monkeypatch):
    """Through tokenizer, batches and back: the targets themselves score 100 %."""
    task = run.task
    monkeypatch.setattr(task, "target_length", 64)  # nothing is cut, whatever training had
    metrics, summary = task.evaluate(answering(run, lambda examples, index: examples[index]["target"]))
    assert metrics == pytest.approx(dict.fromkeys((metric.name for metric in task.metrics), 100.0))
    assert "100.00 %" in summary
    first = task.metrics[0].name
    others = answering(run, lambda examples, index: examples[(index + 1) % len(examples)]["target"])
    assert task.evaluate(others).metrics[first] < 60
    for nothing in ([1], [7, 7, 7, 1], [sentinel_ids(task.tokenizer.vocab_size)[5], 1]):
        found = task.evaluate(answering(run, lambda examples, index, nothing=nothing: nothing))
        assert found.metrics[first] < 5


def test_examples_end_and_are_cut(run):
    task, raw = run.task, examples_of(run, "train")
    render = task._format.render
    for encoded, example in zip(task.encode(raw[:50]), raw[:50], strict=True):
        for side, text in zip(("source", "target"), render(example), strict=True):
            assert encoded[side].tolist() == [*task.tokenizer.encode(text), 1]
    assert task.target_length == max(len(task.tokenizer.encode(render(example).target)) + 1 for example in raw)


def test_answers_are_no_longer_than_the_configuration_says(tmp_path):
    run = make_run(tiny_config(QuestionData(), max_answer_length=1, max_length=16), tmp_path)
    assert run.task.target_length == 2
    examples = run.task.encode(examples_of(run, "validation"))
    assert max(len(example["source"]) for example in examples) == 16
    assert {example[side][-1] for example in examples for side in ("source", "target")} == {1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [f"{label}\t{word} {label[-1]} thing" for word in "abcdefghij" for label in ("Is_x", "is_Y", "is_z")]
    (folder / "train.tsv").write_text("\n".join(lines * 10) + "\n")
    (folder / "dev.tsv").write_text("\n".join(lines) + "\n")
    return folder


def files(folder, **names):
    return LabeledData(
        dataset="files", data_dir=str(folder), **{"train_file": "train.tsv", "validation_file": "dev.tsv", **names}
    )


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Labels that stand in the text, as words: a few steps are enough."""
    workdir = tmp_path_factory.mktemp("work")
    config = tiny_config(LabeledData())
    config.task.data = files(folder, tokenizer="words", max_length=16, tokens_per_batch=256)
    config.num_steps, config.checkpoint_every = 60, 60
    return workdir, train(config, workdir)


@pytest.mark.slow
def test_training_learns(trained):
    _, result = trained
    assert result.evaluations[-1]["accuracy"] > 90


@pytest.mark.slow
def test_command_line_evaluates(trained, capsys):
    workdir, result = trained
    assert main(["evaluate", f"--workdir={workdir}"]) == 0
    last = result.evaluations[-1]
    lines = [f"accuracy: {last['accuracy']:.2f} %", f"macro F1: {last['macro_f1']:.2f} %"]
    lines.append(f"balanced accuracy: {last['balanced_accuracy']:.2f} %")
    lines.append(f"Matthews correlation: {last['matthews_correlation']:.2f} %")
    assert capsys.readouterr().out.splitlines() == lines


def test_a_workdir_needs_no_training_data_to_evaluate(trained):
    run = load_run(trained[0], TextToTextTask)
    assert run.task.labels == ["Is_x", "is_Y", "is_z"]
    assert run.task.target_length == 3
    assert run.task._splits._loaded == {}
    model = run.trained(load_params(trained[0]))
    assert run.task.predict(model, [LabeledText("a x thing", "?")]) == ["is x"]


def test_a_beam_answers_too(trained):
    run = load_run(trained[0], TextToTextTask)
    run.config.task.decoding.beam_size = 3
    model = run.trained(load_params(trained[0]))
    assert run.task.predict(model, examples_of(run, "validation")[:6]) == ["is x", "is y", "is z"] * 2


def test_starts_from_another_training(trained, tmp_path):
    """A model's tokenizer and sizes are taken, labels and lengths are those of the new task."""
    config = tiny_config(QuestionData(), tokenizer="unigram")
    config.model.d_model, config.init_from = 64, str(trained[0])
    config = adopt_pretrained_config(config)
    run = make_run(config, tmp_path)
    files = ["tokenizer.json", "tokenizer_config.json"]
    texts = [[(work / "tokenizer" / name).read_text() for name in files] for work in (trained[0], tmp_path)]
    assert texts[0] == texts[1]
    old, new = (nnx.eval_shape(one.make_model) for one in (load_run(trained[0]), run))
    chex.assert_trees_all_equal_shapes_and_dtypes(nnx.to_pure_dict(nnx.state(old)), nnx.to_pure_dict(nnx.state(new)))
    assert run.task.labels == []


def test_labels_that_answers_cannot_tell_apart_are_refused(tmp_path):
    for number, (lines, message) in enumerate(
        [
            ("a_b\tt\nA b\tu\n", "the labels 'A b' and 'a_b' are both written as 'a b': rename one"),
            # The tokenizer of the training split knows neither character: both are unknown.
            ("a\tt u v w\n①\tt\n1\tu\n", "the tokenizer writes the label '.' like another one: rename it"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.tsv").write_text(lines * 5)
        config = tiny_config(LabeledData())
        config.task.data = files(folder, tokenizer="unigram", validation_file="")
        assert "validation" not in config.task.splits()
        with pytest.raises(UserError, match=message):
            make_run(config, folder / "work")


def test_a_label_that_training_does_not_have_is_refused(folder, trained):
    task = load_run(trained[0], TextToTextTask).task
    with pytest.raises(UserError, match="the label 'new' does not occur in the training split"):
        task.score(["is x"], [LabeledText("t", "new")])
    (folder / "new.tsv").write_text("is_Y\tt\nnew\tt\n")
    task.config.data.validation_file = "new.tsv"
    with pytest.raises(
        UserError, match=r"^the validation split, text 2: the label 'new' does not occur in the training"
    ):
        task.train_data(LoaderOptions(seed=0))  # before the first step, not at the first evaluation


def test_a_split_that_is_not_named_is_refused(trained):
    task = load_run(trained[0], TextToTextTask).task
    with pytest.raises(UserError, match=r"config.task.data.test_file is not set: the test split needs a file"):
        task.evaluate(Told(no_answer), "test")


def test_a_workdir_is_of_one_kind_of_data(trained):
    """Though a configuration of tags has no field that one of labels has not."""
    config = load_run(trained[0]).config
    values = dataclasses.asdict(config.task.data)
    names = [field.name for field in dataclasses.fields(TaggedData)]
    config.task.data = TaggedData(**{name: values[name] for name in names})
    with pytest.raises(UserError, match=r"was made with task\.data='LabeledData', not 'TaggedData': restore"):
        save_config(config, epath.Path(trained[0]))


def test_what_does_not_fit_is_refused(tmp_path):
    config = tiny_config(LabeledData())
    config.task.data.first_column = "a"
    with pytest.raises(
        UserError, match=r"config\.task\.data\.first_column, second_column and label_column must be given together"
    ):
        validate(config)
    for data in DATA.values():
        config = tiny_config(data, tokens_per_batch=63)
        with pytest.raises(
            UserError,
            match=r"^config\.task\.data\.tokens_per_batch=63 must be at least max_length=64, the size of one row$",
        ):
            validate(config)
    config = tiny_config(QuestionData())
    config.model = TransformerConfig(start_id=0, eos_id=1, learned_positions=63)
    with pytest.raises(
        UserError, match=r"data\.max_length=64 is more than config\.model\.learned_positions=63: set --config"
    ):
        validate(config)
    config.task.data.max_length, config.model.learned_positions = 2, 2
    with pytest.raises(
        UserError, match=r"^the longest target has \d+ tokens, .* at most config\.model\.learned_positions=2$"
    ):
        make_run(validate(config), tmp_path)


def test_batches_have_static_widths(run):
    batches = iter(run.train_data(make_mesh(1)))
    found = [next(batches) for _ in range(60)]
    assert {batch["target"].shape[1] for batch in found} == {run.task.target_length}
    assert {batch["source"].shape[1] for batch in found} <= {16, 24, 32, 48, 64, 96, 128}
    assert all(len(batch["source"]) == len(batch["target"]) for batch in found)


def test_sentinels_are_spelled_out(run):
    task = run.task
    first, second = sentinel_ids(task.tokenizer.vocab_size)[:2]
    assert task.spell([first, second, first, 1, first, 0]) == "<extra_id_0> <extra_id_1> <extra_id_0>"
    if task.labels:
        text = next(iter(task.labels_as_written))
        ids = task.tokenizer.encode(text)
        assert task.spell([first, *ids, second, *ids, 1]) == f"<extra_id_0> {text} <extra_id_1> {text}"


def test_long_sentences_are_tagged_as_far_as_they_are_read(tmp_path):
    task = make_run(tiny_config(TaggedData(), max_length=16), tmp_path).task
    sentence = TaggedSentence(["the"] * 120, ["O"] * 119 + ["B-person"])
    assert task.encode([sentence])[0]["target"].tolist() == [1]
    assert "recall 0.00 %" in task.score([""], [sentence]).summary
