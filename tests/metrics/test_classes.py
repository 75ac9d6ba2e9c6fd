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
    scores = right / len(references), sum(f1s) / len(labels), sum(recalls) / len(recalls)
    return [100 * score for score in (*scores, correlation(predictions, references, labels))]


def correlation(predictions, references, labels):
    """Covariances of the one-hot rows of both sides, summed over classes, as Gorodkin (2004) defines them."""
    x, y = (np.array([[label == one for label in labels] for one in side], float) for side in (predictions, references))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = np.sqrt((x * x).sum() * (y * y).sum())
    return (x * y).sum() / spread if spread > 1e-9 else 0.0


def test_scores():
    rng = np.random.default_rng(1)
    for _ in range(300):
        size, names = rng.integers(1, 20), LABELS[: rng.integers(1, 5)]
        references = rng.choice(names, size)
        predictions = np.where(rng.random(size) < 0.6, references, rng.choice(names, size))
        expected = scores_by_counting(predictions.tolist(), references.tolist(), names)
        np.testing.assert_allclose(class_scores(predictions.tolist(), references.tolist(), names), expected, atol=1e-12)
        ids = [[names.index(name) for name in side] for side in (predictions, references)]
        np.testing.assert_allclose(class_scores(*map(np.array, ids), range(len(names))), expected, atol=1e-12)


def test_a_majority_guess_scores_low_but_for_accuracy():
    """9 of 10 right, but F1 is 18 / 19 for the one class and 0 for the other, recall 1 and 0, and no correlation."""
    accuracy, macro_f1, balanced_accuracy, correlation = class_scores(["a"] * 10, ["a"] * 9 + ["b"], LABELS[:2])
    assert (accuracy, round(macro_f1, 3), balanced_accuracy, correlation) == (90.0, 47.368, 50.0, 0.0)


def test_matthews_correlation_by_hand():
    """Of 20 examples 9 and 3 right, 1 and 7 wrong: (9 * 3 - 1 * 7) / sqrt(10 * 16 * 4 * 10) is 1/4."""
    references, predictions = ["a"] * 10 + ["b"] * 10, ["a"] * 9 + ["b"] + ["b"] * 3 + ["a"] * 7
    assert class_scores(predictions, references, LABELS).matthews_correlation == 25.0
    swapped = class_scores(["b" if label == "a" else "a" for label in references], references, LABELS[:2])
    assert (swapped.accuracy, swapped.matthews_correlation) == (0.0, -100.0)


def test_matthews_correlation_of_many_examples_does_not_overflow():
    """Squares of the number of examples, multiplied, are beyond 64 bits."""
    references = np.arange(300_000) % 3
    assert class_scores(references, references, range(3)).matthews_correlation == 100.0


def test_classes_that_never_occur_lower_macro_f1():
    assert class_scores(["a"], ["a"], LABELS) == (100.0, 25.0, 100.0, 0.0)  # nothing varies, nothing correlates
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
        sklearn.matthews_corrcoef(references, predictions),
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
