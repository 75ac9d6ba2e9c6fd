"""A new classification task: what it has to say, and what it has from its base class."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.tasks.told import Told
from tfx_jax.data.batching.batches import BatchSpec, LazyExamples, LoaderOptions
from tfx_jax.data.sources.splits import Splits
from tfx_jax.tasks import classification
from tfx_jax.tasks.classification import ClassificationBase, class_loss, label_arrays

LABELS = ("high", "low", "middle")


class Point(NamedTuple):
    place: np.ndarray
    label: str


POINTS = {
    "train": [Point(np.full(2, number, np.float32), LABELS[number % 3]) for number in range(7)],
    "validation": [Point(np.full(2, number, np.float32), LABELS[number % 2]) for number in range(4)],
}


class PointTask(ClassificationBase[Any, Any, list[Point]]):
    unit = row_name = "points"
    logits = staticmethod(lambda model, batch, rngs=None: model(batch["place"]))

    @property
    def batch_spec(self):
        return BatchSpec((1,), 4, fixed_lengths={"place": 2})

    def encode(self, rows):
        make = lambda row: {"place": row.place} | label_arrays(self.label_ids[row.label])  # noqa: E731
        return LazyExamples(rows, make, np.ones(len(rows), np.int64))

    def loss(self, model, batch, rngs):
        return class_loss(self.logits(model, batch, rngs), batch, batch["row_weights"])


@pytest.fixture
def task():
    return PointTask(None, types.SimpleNamespace(labels=LABELS), Splits(lambda split: split in POINTS, POINTS.get))


def test_batches_hold_every_row_and_its_label(task):
    iterator, found = iter(task.train_data(LoaderOptions(seed=0))), []
    while len(found) < 7:
        batch = next(iterator)
        assert batch["place"].shape == (4, 2)
        rows = zip(batch["place"].tolist(), batch["label"].tolist(), strict=True)
        found += [row for row, weight in zip(rows, batch["row_weights"], strict=True) if weight]
    iterator.close()
    assert sorted(found) == [([number] * 2, number % 3) for number in range(7)]


def test_predictions_are_labels_and_are_compared_with_those_of_the_split(task):
    said = Told(lambda batch: (batch["place"][:, 0].astype(int) // 2, batch["label"]))  # 0, 0, 1, 1 of 0, 1, 0, 1
    assert task.predict(said, POINTS["validation"]) == ["high", "high", "low", "low"]
    metrics, summary = task.evaluate(said)
    macro_f1 = pytest.approx(100 / 3)
    assert metrics == {"accuracy": 50.0, "macro_f1": macro_f1, "balanced_accuracy": 50.0, "matthews_correlation": 0.0}
    scores = "accuracy 50.00 %, macro F1 33.33 %, balanced accuracy 50.00 %, Matthews correlation 0.00 %"
    assert summary == f"{scores}, 4 points"


def test_a_report_shows_classes_confusions_and_samples(task, monkeypatch):
    # Predicted high, high, low, low; true high, low, high, low.
    said = Told(lambda batch: (batch["place"][:, 0].astype(int) // 2, batch["label"]))
    classes, confusions, samples = task.report_tables(said)
    assert classes.rows == [
        ("middle", "0.0 %", "0.0 %", "0.0 %", "0"),
        ("high", "50.0 %", "50.0 %", "50.0 %", "2"),
        ("low", "50.0 %", "50.0 %", "50.0 %", "2"),
    ]
    assert confusions.header == ("true, predicted:", *LABELS)
    assert confusions.rows == [("high", "1", "1", "0"), ("low", "1", "1", "0"), ("middle", "0", "0", "0")]
    assert samples.rows == [
        ("number 2", "low", "high"),
        ("number 3", "high", "low"),
        ("number 1", "high", "high"),
        ("number 4", "low", "low"),
    ]
    monkeypatch.setattr(classification, "_MOST_COLUMNS", 2)
    monkeypatch.setattr(classification, "_MOST_CLASSES", 1)
    classes, confusions, _ = task.report_tables(said)
    assert [row[0] for row in classes.rows] == ["middle"]
    assert confusions.rows == [("high", "low", "1"), ("low", "high", "1")]


def test_classes_and_probabilities_are_those_of_the_logits(task):
    batch = {"place": jnp.array([[0.0, 3.0], [2.0, 1.0]]), "label": jnp.array([2, 0]), "row_weights": jnp.ones(2)}
    model = lambda place: place.astype(jnp.bfloat16)  # noqa: E731
    classes, labels = task.classify(model, batch)
    assert (classes.tolist(), labels.tolist()) == ([1, 0], [2, 0])
    odds = np.exp(np.array([[0.0, 3.0], [2.0, 1.0]]))
    np.testing.assert_allclose(task.probabilities(model, batch), odds / odds.sum(axis=1, keepdims=True), rtol=1e-6)


def test_the_loss_leaves_padding_out_and_counts_what_was_read(task):
    place = np.array([[0.0, 3.0, 1.0], [2.0, 1.0, 0.0], [9.0, 9.0, 9.0]], np.float32)
    batch = {"place": place, "label": np.array([2, 0, 1]), "row_weights": np.array([1.0, 1.0, 0.0], np.float32)}
    output = jax.jit(lambda batch: task.loss(lambda place: place, batch, None))(batch)
    wanted = sum(np.log(np.exp(row).sum()) - row[label] for row, label in zip(place[:2], (2, 0), strict=True))
    np.testing.assert_allclose(output.loss, wanted, rtol=1e-6)
    assert (float(output.weight), float(output.num_tokens)) == (2, 2)
