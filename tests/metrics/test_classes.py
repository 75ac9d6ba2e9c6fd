"""Scores of classes against counts made pair by pair."""

import numpy as np
import pytest

from tfx_jax.metrics import class_scores

LABELS = ("a", "b", "c", "d")


def scores_by_counting(predictions, references, labels):
    f1s, recalls = [], []
    for label in labels:
        hits = sum(p == r == label for p, r in zip(predictions, references, strict=True))
        precision, recall = (hits / max(1, list(side).count(label)) for side in (predictions, references))
        recalls += [recall] if label in references else []
        f1s.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    right = sum(p == r for p, r in zip(predictions, references, strict=True))
    return 100 * right / len(references), 100 * sum(f1s) / len(labels), 100 * sum(recalls) / len(recalls)


def test_scores():
    rng = np.random.default_rng(1)
    for _ in range(300):
        size, names = rng.integers(1, 20), LABELS[: rng.integers(1, 5)]
        references = rng.choice(names, size)
        predictions = np.where(rng.random(size) < 0.6, references, rng.choice(names, size))
        expected = scores_by_counting(predictions.tolist(), references.tolist(), names)
        np.testing.assert_allclose(class_scores(predictions.tolist(), references.tolist(), names), expected)
        ids = [[names.index(name) for name in side] for side in (predictions, references)]
        np.testing.assert_allclose(class_scores(*map(np.array, ids), range(len(names))), expected)


def test_a_majority_guess_has_a_low_macro_f1_and_balanced_accuracy():
    """9 of 10 right, but F1 is 18 / 19 for the one class and 0 for the other, and recall 1 and 0."""
    accuracy, macro_f1, balanced_accuracy = class_scores(["a"] * 10, ["a"] * 9 + ["b"], LABELS[:2])
    assert (accuracy, round(macro_f1, 3), balanced_accuracy) == (90.0, 47.368, 50.0)


def test_classes_that_never_occur_lower_macro_f1_alone():
    assert class_scores(["a"], ["a"], LABELS) == (100.0, 25.0, 100.0)
    # c is said of an a, and is no class of the references: recall is 1/2 of a and 1 of b.
    assert class_scores(["a", "c", "b"], ["a", "a", "b"], LABELS).balanced_accuracy == 75.0


def test_scores_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    references, predictions = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    wanted = (
        sklearn.accuracy_score(references, predictions),
        sklearn.f1_score(references, predictions, labels=range(4), average="macro", zero_division=0),
        sklearn.balanced_accuracy_score(references, predictions),
    )
    np.testing.assert_allclose(class_scores(predictions, references, range(4)), 100 * np.array(wanted))


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a"], ["a", "b"], "1 predictions"),
        ([], [], "0 predictions"),
        (["e"], ["a"], "the label 'e' is not one of the 4 labels"),
    ],
)
def test_what_cannot_be_scored(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        class_scores(predictions, references, LABELS)
