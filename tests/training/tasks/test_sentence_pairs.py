"""Pairs become the right rows; scores are those of what the model says; alignments, and a training that learns."""

import copy
import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tasks.told import Told
from tests.training.tiny import pictures
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.models.decomposable import DecomposableConfig
from tfx_jax.models.esim import EsimConfig
from tfx_jax.tasks.text.classification import LabeledData
from tfx_jax.tasks.text.sentence_pairs import SentencePairConfig, SentencePairTask
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import make_mesh

EXPERIMENTS = pathlib.Path(__file__).parents[3] / "experiments"
MODELS = {
    "decomposable": DecomposableConfig(600, d_embedding=8, d_model=6, d_ff=5),
    "esim": EsimConfig(600, d_embedding=8, d_model=6),
}
PAIRS = "A\tB\trelation\nThe dog runs fast\tA Dog runs\tyes\nA dog\tThe dog runs\tmaybe\nA dog runs\tNo dog\tno\n"


def opened(workdir, *, model="decomposable", lowercase=True, swapped_labels="", **data):
    data = {"dataset": "grammar_pairs", "tokenizer": "words", "max_length": 9, "tokens_per_batch": 90} | data
    task = SentencePairConfig(LabeledData(**data), lowercase, swapped_labels)
    run = make_run(validate(ExperimentConfig(model=copy.copy(MODELS[model]), task=task)), workdir)
    assert type(run.task) is SentencePairTask
    return run


@pytest.fixture
def files(tmp_path):
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    names = {"first_column": "A", "second_column": "B", "label_column": "relation"}
    paths = {"train_file": "pairs.tsv", "validation_file": "pairs.tsv"}
    return {"dataset": "files", "data_dir": str(tmp_path), "max_length": 3} | names | paths


def test_examples_are_both_sentences(files, tmp_path):
    task = opened(tmp_path / "run", **files).task
    examples = task.encode(task.config.splits()["train"])
    assert task.labels == ("maybe", "no", "yes")
    assert [task.labels[example["label"]] for example in examples] == ["yes", "maybe", "no"]
    spelled = [
        [task.tokenizer.pieces(example[side].tolist()) for side in ("premise", "hypothesis")] for example in examples
    ]
    assert spelled == [
        [["the", "dog", "runs"], ["a", "dog", "runs"]],  # cut, and in small letters
        [["a", "dog", "[PAD]"], ["the", "dog", "runs"]],
        [["a", "dog", "runs"], ["no", "dog", "[PAD]"]],
    ]
    cased = opened(tmp_path / "cased", lowercase=False, **files).task
    assert cased.tokenizer.vocab_size == task.tokenizer.vocab_size + 1  # "Dog"


@pytest.mark.parametrize(("labels", "swapped"), [("", ()), ("no, maybe", ("no", "maybe"))])
def test_batches_hold_every_pair_once_an_epoch_and_some_the_other_way_round(files, tmp_path, labels, swapped):
    run = opened(tmp_path / "run", swapped_labels=labels, **files)
    examples = run.task.encode(run.task.config.splits()["train"])
    sides = [(e["premise"].tolist(), e["hypothesis"].tolist(), int(e["label"])) for e in examples]
    wanted = sides + [(b, a, label) for a, b, label in sides if run.task.labels[label] in swapped]
    iterator, found = iter(run.train_data(make_mesh(data=1))), []
    while len(found) < len(wanted):
        batch = next(iterator)
        for premise, hypothesis, label, weight in zip(
            *(batch[name] for name in ("premise", "hypothesis", "label", "row_weights")), strict=True
        ):
            assert weight == (premise != run.task.model_config.pad_id).any()
            if weight:
                found.append((premise.tolist(), hypothesis.tolist(), int(label)))
    iterator.close()
    assert sorted(found) == sorted(wanted)


def test_what_cannot_be_swapped_or_is_no_pair_is_refused(files, tmp_path):
    run = opened(tmp_path / "run", swapped_labels="maybe,never", **files)
    with pytest.raises(UserError, match=r"swapped_labels: 'never' must be one of the labels maybe, no, yes$"):
        run.train_data(make_mesh(data=1))
    with pytest.raises(UserError, match=r"^config\.task\.data has single texts"):
        opened(tmp_path, dataset="grammar")


def test_what_the_model_says_is_scored(files, tmp_path):
    task = opened(tmp_path / "run", **files).task
    metrics, summary = task.evaluate(Told(lambda batch: (batch["label"], batch["label"])))
    assert metrics == {"accuracy": 100, "macro_f1": 100, "balanced_accuracy": 100, "matthews_correlation": 100}
    scores = "accuracy 100.00 %, macro F1 100.00 %, balanced accuracy 100.00 %, Matthews correlation 100.00 %"
    assert summary == f"{scores}, 3 texts"
    metrics, _ = task.evaluate(Told(lambda batch: (0 * batch["label"], batch["label"])))
    assert metrics["accuracy"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("model", MODELS)
def test_alignments_are_those_of_the_pair_alone(model, files, tmp_path, draw_model):
    run = opened(tmp_path / "run", model=model, **files)
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    maps, first, second = run.task.attention(run.trained(params), "The dog runs away", "a DOG")
    assert (first, second) == (["the", "dog", "runs"], ["a", "dog"])
    assert {name: weights.shape for name, weights in maps.items()} == {
        "decoder/0/cross": (1, 2, 3),
        "encoder/0/cross": (1, 3, 2),
    }
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    for target in (None, " "):
        with pytest.raises(UserError, match="second sentence"):
            run.task.attention(run.trained(params), "a dog", target)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decomposable_sick", "esim_sick"])
def test_training_on_the_command_line_learns_and_draws(name, tmp_path, capsys):
    """Word by word, built-in pairs are told apart far better than by chance: contradictions have negations."""
    workdir, picture = tmp_path / "run", tmp_path / "pair.png"
    more = ["--config.num_steps=300", "--config.eval_every=0", "--config.mesh.data=1"]
    assert main(["train", f"--config={EXPERIMENTS / name}.py:grammar", f"--workdir={workdir}", *more]) == 0
    capsys.readouterr()
    assert main(["evaluate", f"--workdir={workdir}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 60  # by chance, 33
    assert [step for step, _ in pictures(workdir)] == [300]
    pair = ["--source=the dog slept .", "--target=a dog slept .", f"--output={picture}"]
    assert main(["attend", f"--workdir={workdir}", *pair]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"drew 2 attention maps in {picture}\n"
