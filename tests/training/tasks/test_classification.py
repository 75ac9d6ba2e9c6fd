"""Labeled texts become the right rows; scores are those of what the model says; trainings from the command line."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tasks.told import Told, no_answer
from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks.text.classification import ClassificationConfig, ClassificationTask, LabeledData
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import make_mesh

EXPERIMENTS = pathlib.Path(__file__).parents[3] / "experiments"


def tiny_config(**data):
    model = BertConfig(600, max_length=32, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    task = ClassificationConfig(LabeledData(**{"max_length": 12, "tokens_per_batch": 96} | data))
    return validate(ExperimentConfig(model=model, task=task))


def opened(workdir, **data):
    run = make_run(tiny_config(**data), workdir)
    assert type(run.task) is ClassificationTask
    return run


@pytest.fixture(scope="module", params=["grammar", "grammar_pairs"])
def run(request, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("workdir"), dataset=request.param)


def texts_of(run, split="validation"):
    return run.config.task.splits()[split]


def test_examples_are_the_texts_between_special_tokens(run):
    task, texts = run.task, texts_of(run)
    tokenizer, examples = task.tokenizer, task.encode(texts)
    assert len(examples) == len(texts) == 200
    assert task.labels == tuple(sorted({text.label for text in texts_of(run, "train")}))
    assert task.model_config.labels == task.labels
    cut = 0
    for text, example in zip(texts, examples, strict=True):
        sides = [tokenizer.encode(side) for side in text[:-1]]
        while sum(map(len, sides)) + len(sides) + 1 > 12:
            max(reversed(sides), key=len).pop()  # the second where both are as long
            cut += 1
        wanted = [tokenizer.cls_id]
        types = [0]
        for number, side in enumerate(sides):
            wanted += [*side, tokenizer.sep_id]
            types += [number] * (len(side) + 1)
        assert example["tokens"].tolist() == wanted
        assert example["token_type_ids"].tolist() == types
        assert example["token_mask"].all()
        assert len(example["token_mask"]) == len(wanted)
        assert task.labels[example["label"]] == text.label
        assert example["row_weights"] == 1
    assert cut > 20


def test_what_the_model_says_is_scored(run):
    task, texts = run.task, texts_of(run)
    metrics, summary = task.evaluate(Told(lambda batch: (batch["label"], batch["label"])))
    assert metrics == {"accuracy": 100, "macro_f1": 100, "balanced_accuracy": 100, "matthews_correlation": 100}
    scores = "accuracy 100.00 %, macro F1 100.00 %, balanced accuracy 100.00 %, Matthews correlation 100.00 %"
    assert summary == f"{scores}, 200 texts"
    metrics, _ = task.evaluate(Told(lambda batch: (0 * batch["label"], batch["label"])))
    share = np.mean([text.label == task.labels[0] for text in texts])
    assert 0 < share < 1
    assert metrics["accuracy"] == pytest.approx(100 * share)
    assert metrics["macro_f1"] == pytest.approx(200 * share / (1 + share) / len(task.labels))
    assert metrics["balanced_accuracy"] == pytest.approx(100 / len(task.labels))
    assert metrics["matthews_correlation"] == 0


def test_metrics_do_not_depend_on_the_size_of_batches(run, tmp_path, draw_model):
    params, texts = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model)))), texts_of(run)
    found = run.task.predict(run.trained(params), texts)
    assert len(set(found)) > 1
    model = nnx.merge(run.graphdef, jax.device_put(params))
    (example,) = run.task.encode(texts[:1])
    logits = np.asarray(jax.jit(model)(example["tokens"][None], example["token_type_ids"][None]))
    assert found[0] == run.task.labels[logits.argmax()]
    share = np.mean([label == text.label for label, text in zip(found, texts, strict=True)])
    assert run.evaluate(params).metrics["accuracy"] == pytest.approx(100 * share)
    one_by_one = opened(tmp_path, dataset=run.config.task.data.dataset, tokens_per_batch=12)
    assert one_by_one.task.labels == run.task.labels
    assert one_by_one.task.predict(one_by_one.trained(params), texts) == found


ATTENTIONS = {
    "lsh": {"num_buckets": 4, "chunk_size": 4},
    "local": {"block_size": 4},
    "window,relative": {"window": 2},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "lsh" else pytest.mark.slow) for n in ATTENTIONS])
def test_an_answer_does_not_depend_on_a_longer_text_beside_it(name, tmp_path, draw_model):
    config = tiny_config(dataset="grammar", max_length=32)
    config.model.attention = AttentionConfig(name, AttentionOptions(**ATTENTIONS[name]))
    config.model.num_layers = 2
    run = make_run(validate(config), tmp_path)
    assert isinstance(run.task, ClassificationTask)
    trained = run.trained(jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model)))))
    short, middle, long = ([text_of(count)] for count in (3, 8, 40))
    alone = [run.task.answer(trained, [row])[0] for row in (short, middle, long)]
    beside = run.task.answer(trained, [long, short, middle])
    for one, other in zip(alone, [beside[1], beside[2], beside[0]], strict=True):
        assert one["label"] == other["label"]
        np.testing.assert_allclose(
            list(one["probabilities"].values()), list(other["probabilities"].values()), atol=1e-5
        )


def text_of(num_words):
    return " ".join(("my aunt found the banana that you bought " * 5).split()[:num_words])


def test_batches_hold_every_text_once_an_epoch(run):
    iterator = iter(run.train_data(make_mesh(data=1)))
    wanted = sorted(
        (example["tokens"].tolist(), int(example["label"])) for example in run.task.encode(texts_of(run, "train"))
    )
    found = []
    while len(found) < len(wanted):
        batch = next(iterator)
        assert batch["tokens"].size <= 96
        for tokens, token_mask, label, weight in zip(
            batch["tokens"], batch["token_mask"], batch["label"], batch["row_weights"], strict=True
        ):
            assert weight == token_mask.any()
            if weight:
                found.append((tokens[token_mask].tolist(), int(label)))
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
    run = opened(tmp_path / "workdir", validation_file="dev.tsv", **files)
    with pytest.raises(UserError, match=r"^the label 'ugly' does not occur in the training split \(2 labels\)$"):
        run.task.evaluate(Told(no_answer))
    message = r"^the validation split, text 2: the label 'ugly' does not occur in the training split \(2 labels\)$"
    with pytest.raises(UserError, match=message):  # and not only after some hours
        run.train_data(make_mesh(data=1))


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_files_with_named_columns(tmp_path, name):
    texts = {"train.csv": 'what,is\n"fine, words",good\npoor,bad\n'}
    texts["train.jsonl"] = '{"is": "good", "what": "fine, words"}\n{"is": "bad", "what": "poor"}\n'
    (tmp_path / name).write_text(texts[name])
    columns = {"first_column": "what", "label_column": "is"}
    run = opened(tmp_path / "workdir", dataset="files", data_dir=str(tmp_path), train_file=name, **columns)
    assert run.task.labels == ("bad", "good")
    assert run.config.task.splits()["train"] == [("fine, words", "good"), ("poor", "bad")]
    assert run.task.inputs == ("what",)


def test_columns_that_are_turned_are_found_before_anything_is_made(tmp_path):
    (tmp_path / "train.tsv").write_text("".join(f"text {number}\tgood\n" for number in range(30)))
    with pytest.raises(
        UserError, match=r"train\.tsv has 30 texts with 30 different labels, for example the label 'text 0': are the"
    ):
        opened(tmp_path / "workdir", dataset="files", data_dir=str(tmp_path), train_file="train.tsv")


def test_splits_that_are_named(files, tmp_path):
    run = opened(tmp_path / "workdir", **files)
    assert "validation" not in run.config.task.splits()
    with pytest.raises(
        UserError, match=r"^config.task.data.validation_file is not set: the validation split needs a file$"
    ):
        run.task.evaluate(Told(no_answer))
    columns = {"first_column": "one", "second_column": "two", "label_column": "label"}
    named = files | columns | {"train_file": "pairs.tsv", "validation_file": "pairs.tsv"}
    run = opened(tmp_path / "pairs", **named)
    assert "validation" in run.config.task.splits()
    assert run.task.labels == ("no", "yes")
    assert [example["token_type_ids"].max() for example in run.task.encode(texts_of(run, "train"))] == [1, 1]


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
    assert scores.keys() == {"accuracy", "macro_f1", "balanced_accuracy", "matthews_correlation"}
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
