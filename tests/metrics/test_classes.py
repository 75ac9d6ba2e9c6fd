"""Scores of classes against counts made pair by pair."""

import numpy as np
import pytest

from tfx_jax.metrics import class_scores

LABELS = ("a", "b", "c", "d")


def scores_by_counting(predictions, references, labels):
    f1s = []
    for label in labels:
        hits = sum(p == r == label for p, r in zip(predictions, references, strict=True))
        precision, recall = (hits / max(1, list(side).count(label)) for side in (predictions, references))
        f1s.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    right = sum(p == r for p, r in zip(predictions, references, strict=True))
    return 100 * right / len(references), 100 * sum(f1s) / len(labels)


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


def test_a_majority_guess_has_a_low_macro_f1():
    """9 of 10 right, but F1 is 18 / 19 for the one class and 0 for the other."""
    accuracy, macro_f1 = class_scores(["a"] * 10, ["a"] * 9 + ["b"], LABELS[:2])
    assert (accuracy, round(macro_f1, 3)) == (90.0, 47.368)
    assert class_scores(["a"], ["a"], LABELS).macro_f1 == 25.0  # of four classes, three never occur


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [(["a"], ["a", "b"], "1 predictions"), ([], [], "0 predictions"), (["e"], ["a"], "'e' is none of the 4 labels")],
)
def test_what_cannot_be_scored(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        class_scores(predictions, references, LABELS)
