"""Pre-training of a BERT: epochs that differ and repeat, metrics against the logits themselves, whole trainings."""

import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.synthetic.grammar import grammar_documents
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig, BertPretrainingTask, max_predictions
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "bert_wikitext2.py"
ARRAYS = {"tokens", "token_type_ids", "token_mask", "targets", "weights", "next_sentence_label", "row_weights"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts in files, with empty lines between the documents, or in lines."""
    folder = tmp_path_factory.mktemp("text")
    for split, size in (("train", 60), ("validation", 20)):
        documents = grammar_documents(split, size)
        (folder / f"{split}.txt").write_text("\n \n\n".join("\n".join(document) for document in documents) + "\n")
        (folder / f"{split}.lines").write_text("".join(" ".join(document) + "\n" for document in documents))
    return folder


def tiny_config(folder, **changes):
    model = BertConfig(300, max_length=32, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    data = TextData("files", str(folder), "train.txt", "validation.txt", max_length=32, tokens_per_batch=256)
    config = ExperimentConfig(model=model, task=BertPretrainingConfig(data))
    owners = {"data": config.task.data, "model": config.model, "": config}
    for name, value in changes.items():
        owner, _, leaf = name.rpartition("__")
        setattr(owners[owner], leaf, value)
    return validate(config)


def opened(folder, workdir, **changes):
    run = make_run(tiny_config(folder, **changes), workdir)
    assert type(run.task) is BertPretrainingTask
    return run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("workdir")


@pytest.fixture(scope="module")
def run(folder, workdir):
    return opened(folder, workdir)


def take_epochs(run, count):
    """The batches of the first epochs, and the state before each."""
    iterator = iter(run.train_data(make_mesh(data=1)))
    epochs = [[] for _ in range(count)]
    while (state := iterator.get_state())["portion"] < count:
        epochs[state["portion"]].append((state, next(iterator)))
    iterator.close()
    return epochs


def rows_in(epoch, *names):
    """What some arrays of all rows say where there are tokens, row by row."""
    found = []
    for _, batch in epoch:
        for place in np.flatnonzero(batch["row_weights"]):
            token_mask = batch["token_mask"][place]
            found.append(tuple(tuple(batch[name][place][token_mask].tolist()) for name in names))
    return found


@pytest.mark.parametrize("documents", ["file", "lines"])
def test_documents_and_their_sentences(folder, documents):
    suffix = {"file": "txt", "lines": "lines"}[documents]
    changes = {"data__train_file": f"train.{suffix}", "data__validation_file": f"validation.{suffix}"}
    splits = tiny_config(folder, data__documents=documents, **changes).task.splits()
    wanted = [
        [end for sentence in document for end in sentence.replace("? ", "?\n").split("\n")]
        for document in grammar_documents("train", 60)
    ]
    assert splits["train"] == wanted


@pytest.mark.parametrize("documents", ["file", "lines", "articles"])
def test_documents_of_the_grammar(folder, documents):
    changes = {"data__train_file": "", "data__validation_file": ""}
    splits = tiny_config(folder, data__dataset="grammar", data__documents=documents, **changes).task.splits()
    sentences = [sentence for document in grammar_documents("validation", 100) for sentence in document]
    if documents == "lines":  # each is a sentence: no pairs
        with pytest.raises(UserError, match=r'validation split: .*="lines" finds 616, none with two$'):
            splits["validation"]
    else:
        found = splits["validation"]
        assert len(found) == 100
        assert [sentence for document in found for sentence in document] == sentences


def test_rows_of_a_batch(run):
    (epoch,) = take_epochs(run, 1)
    tokenizer = run.task.tokenizer
    specials = [tokenizer.cls_id, tokenizer.sep_id]
    shapes = set()
    for _, batch in epoch:
        assert batch.keys() == ARRAYS
        shapes.add(batch["tokens"].shape)
        assert batch["tokens"].size <= 256
        chosen = (batch["weights"] > 0).sum(axis=1)
        assert chosen.max() <= max_predictions(batch["tokens"].shape[1], 0.15)  # or the loss would be NaN
        np.testing.assert_array_equal(chosen > 0, batch["row_weights"] > 0)
        np.testing.assert_array_equal(batch["token_mask"], batch["tokens"] != tokenizer.pad_id)
        assert not batch["weights"][np.isin(batch["targets"], specials)].any()
    assert (8, 32) in shapes
    assert {length for _, length in shapes} <= {8, 16, 32}  # few to compile


def test_every_epoch_is_another_and_comes_again(folder, workdir, run):
    first, second = take_epochs(run, 2)
    again = take_epochs(opened(folder, workdir), 2)
    for epoch, repeated in zip((first, second), again, strict=True):
        assert len(epoch) == len(repeated) > 10
        for (state, batch), (same_state, same) in zip(epoch, repeated, strict=True):
            assert state == same_state
            jax.tree.map(np.testing.assert_array_equal, batch, same)
    texts, hidden = (
        [set(rows_in(epoch, *names)) for epoch in (first, second)] for names in (["targets"], ["targets", "tokens"])
    )
    assert len(texts[0] & texts[1]) < 0.2 * len(texts[0])
    assert len(hidden[0] & hidden[1]) < 0.02 * len(hidden[0])
    (other,) = take_epochs(opened(folder, workdir, seed=1), 1)
    assert len(set(rows_in(other, "targets", "tokens")) & hidden[0]) < 0.02 * len(hidden[0])
    # Every epoch has about the whole text, and what random second segments repeat.
    sentences = [tuple(ids) for document in run.task._encode("train") for ids in document]
    for epoch in (first, second):
        read = sum(batch["token_mask"].sum() - 3 * batch["row_weights"].sum() for _, batch in epoch)
        assert read > 0.9 * sum(map(len, sentences))


def test_labels_of_next_sentences(tmp_path):
    """Every word names its document."""
    rng = np.random.default_rng(0)
    documents = [
        "\n".join(" ".join(f"{document}/{word}" for word in rng.integers(9, size=6)) for _ in range(8))
        for document in range(50)
    ]
    (tmp_path / "train.txt").write_text("\n\n".join(documents))
    changes = {"data__validation_file": "", "data__tokenizer": "words", "model__vocab_size": 1_000}
    run = opened(tmp_path, tmp_path, **changes)
    assert "validation" not in run.config.task.splits()
    (epoch,) = take_epochs(run, 1)
    rows = [
        row
        for _, batch in epoch
        for row in zip(batch["targets"], batch["next_sentence_label"], strict=True)
        if row[0].any()
    ]
    for targets, next_sentence_label in rows:
        middle, end = np.flatnonzero(targets == run.task.tokenizer.sep_id)
        first, second = (
            {piece.split("/")[0] for piece in run.task.tokenizer.pieces(side)}
            for side in (targets[1:middle], targets[middle + 1 : end])
        )
        assert (len(first), len(second)) == (1, 1)
        assert next_sentence_label == (first != second)
    assert np.mean([next_sentence_label for _, next_sentence_label in rows]) == pytest.approx(
        0.5, abs=1.5 / np.sqrt(len(rows))
    )


def test_resuming_inside_an_epoch(folder, workdir, run):
    epochs = take_epochs(run, 2)
    taken = [pair for epoch in epochs for pair in epoch]
    for start in (3, len(epochs[0]) - 1, len(epochs[0]) + 4):
        iterator = iter(opened(folder, workdir).train_data(make_mesh(data=1)))
        iterator.set_state(json.loads(json.dumps(taken[start][0])))
        for _, batch in taken[start : start + 4]:
            jax.tree.map(np.testing.assert_array_equal, next(iterator), batch)
        iterator.close()


def test_evaluation_is_that_of_the_logits(folder, workdir, run, draw_model):
    """Row by row, without batches, padding or a choice of places."""
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    metrics, summary = run.evaluate(params)
    model = jax.jit(nnx.merge(run.graphdef, jax.device_put(params)).__call__)
    rows = run.task.eval_examples("validation")
    nll, correct, tokens, next_correct = 0.0, 0, 0, 0
    for index in range(len(rows)):
        row, length = rows[index], rows.lengths[index]
        names = "tokens", "token_type_ids", "targets", "weights"
        padded = {name: np.pad(row[name], (0, 32 - length)) for name in names}  # one length: compiled once
        token_mask = np.arange(32) < length
        logits, next_sentence = model(
            padded["tokens"][None], padded["token_type_ids"][None], token_mask=token_mask[None]
        )
        chosen = padded["weights"] > 0
        found = np.asarray(logits[0], np.float64)[chosen]
        wanted = padded["targets"][chosen]
        nll += (np.log(np.exp(found).sum(axis=-1)) - found[np.arange(len(wanted)), wanted]).sum()
        correct += (found.argmax(axis=-1) == wanted).sum()
        tokens += chosen.sum()
        next_correct += int(next_sentence[0].argmax() == row["next_sentence_label"])
    assert metrics["loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert metrics["masked_accuracy"] == pytest.approx(100 * correct / tokens)
    assert metrics["next_sentence_accuracy"] == pytest.approx(100 * next_correct / len(rows))
    assert summary.endswith(f"{tokens:,} masked tokens of {len(rows):,} pairs")
    assert run.evaluate(params).metrics == metrics
    # Neither on the size of batches nor on the seed does it depend.
    other, _ = opened(folder, workdir, data__tokens_per_batch=40, seed=5).evaluate(params)
    assert other == pytest.approx(metrics, rel=1e-6)


@pytest.mark.slow
def test_training_learns_on_the_command_line(tmp_path, capsys):
    """Rows so short that all have one length, on one device: little to compile."""
    workdir = str(tmp_path / "run")
    changes = ["task.data.max_length=8", "mesh.data=1", "optimizer.peak_learning_rate=0.01", "optimizer.warmup_steps=5"]
    overrides = [
        f"--config.{change}"
        for change in (*changes, "num_steps=80", "eval_every=40", "checkpoint_every=80", "log_every=40")
    ]
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={workdir}", *overrides]) == 0
    printed = re.findall(r"step \d+: validation masked LM loss ([\d.]+) nats", capsys.readouterr().err)
    first, last = map(float, printed)
    assert last < first - 0.05
    assert first < math.log(load_run(workdir, BertPretrainingTask).task.tokenizer.vocab_size) - 0.5
    assert "masked LM loss" in (tmp_path / "run" / "report.md").read_text()
    assert evaluate_cli.run([f"--workdir={workdir}"]) == 0
    loss, *lines = capsys.readouterr().out.splitlines()
    assert loss == f"masked LM loss: {last:.4f} nats"
    assert [line.partition(":")[0] for line in lines] == ["masked accuracy", "next sentence accuracy"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("One line. Two.\n", r'^next sentence prediction needs two documents, .* the train split: .*="file" finds 1$'),
        ("One line.\n\nTwo.\n", r"finds 2, none with two$"),
        ("\n", "the train split has no text, only blank lines: name another file"),
    ],
)
def test_text_without_pairs_is_refused(tmp_path, text, message):
    (tmp_path / "train.txt").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, tmp_path / "workdir")
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"^config.task.data.max_length=7 must be at least 8, for pairs of segments$"):
        opened(folder, tmp_path, data__max_length=7)
    run = opened(folder, tmp_path, data__validation_file="")
    with pytest.raises(UserError, match=r"^config.task.data.test_file is not set: the test split needs a file$"):
        run.evaluate(nnx.to_pure_dict(nnx.state(nnx.eval_shape(run.make_model))), "test")
