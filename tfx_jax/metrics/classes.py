"""Scores of predicted classes: accuracy, macro F1, balanced accuracy, Matthews correlation; and by class."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class ClassScores(NamedTuple):
    """Classification scores in percent.

    Attributes:
      accuracy: share of the predictions that are right.
      macro_f1: unweighted mean over classes of F1, the harmonic mean of precision and recall.
      balanced_accuracy: unweighted mean of recall over the classes that occur.
      matthews_correlation: correlation of predicted with correct classes, from -100 to 100; see `class_scores`.
    """

    accuracy: float
    macro_f1: float
    balanced_accuracy: float
    matthews_correlation: float


class ScoresOfClass(NamedTuple):
    """Scores of one class, in percent but for the number of examples.

    Attributes:
      label: the class.
      precision: share of the predictions of the class that are right; 0 if there are none.
      recall: share of the examples of the class that are recognized; 0 if there are none.
      f1: harmonic mean of precision and recall.
      support: number of examples of the class.
    """

    label: Any
    precision: float
    recall: float
    f1: float
    support: int


def confusion_matrix(
    predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]
) -> Int[np.ndarray, "C C"]:
    """Counts the examples of each class (rows) by their predicted class (columns), in the order of `labels`.

    >>> confusion_matrix(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"]).tolist()
    [[2, 1], [0, 1]]
    """
    label_ids = {label: index for index, label in enumerate(labels)}
    counts = np.zeros((len(label_ids), len(label_ids)), np.int64)
    expected = np.array([label_ids[label] for label in references], int)
    predicted = np.array([label_ids[label] for label in predictions], int)
    np.add.at(counts, (expected, predicted), 1)  # counts[expected, predicted] += 1 would count equal pairs once
    return counts


def scores_by_class(counts: Int[np.ndarray, "C C"], labels: Sequence[Any]) -> list[ScoresOfClass]:
    """Returns the scores of each class from a `confusion_matrix`, in the order of `labels`.

    >>> [(one.label, one.recall, one.support) for one in scores_by_class(np.array([[3, 1], [0, 1]]), ["a", "b"])]
    [('a', 75.0, 4), ('b', 100.0, 1)]
    """
    # By class, [C]: numbers of right predictions, of all predictions, and of examples.
    correct, predicted, expected = np.diag(counts), counts.sum(axis=0), counts.sum(axis=1)
    precision = 100 * correct / np.maximum(predicted, 1)
    recall = 100 * correct / np.maximum(expected, 1)
    f1 = 200 * correct / np.maximum(predicted + expected, 1)
    columns = (column.tolist() for column in (precision, recall, f1, expected))
    return [ScoresOfClass(*row) for row in zip(labels, *columns, strict=True)]


def class_scores(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> ClassScores:
    """Scores predicted classes.

    The values are those of scikit-learn's `accuracy_score`, of its `f1_score` with `labels` and average="macro", of its
    `balanced_accuracy_score`, and of its `matthews_corrcoef`, times 100. A class that neither occurs nor is predicted
    has an F1 of 0. A class that does not occur in `references` is left out of the balanced accuracy.

    Matthews correlation is that of K classes, R_K of "Comparing two K-category assignments by a K-category correlation
    coefficient" (Gorodkin, 2004, https://doi.org/10.1016/j.compbiolchem.2004.09.006). It is 0 if the predictions, or
    the references, are all of one class.

    Args:
      predictions: predicted class of each example, as name or id.
      references: correct class of each example. (scikit-learn takes them first.)
      labels: all classes, each once.

    Raises:
      ValueError: if the numbers of predictions and references differ or are 0, or a class is not in `labels`.

    >>> [round(score, 1) for score in class_scores(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"])]
    [75.0, 73.3, 83.3, 57.7]
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(
            f"{len(predictions)} predictions cannot be scored by {len(references)} references: pass one prediction "
            "for each reference, at least one"
        )
    label_ids = {label: index for index, label in enumerate(labels)}
    unknown = {*predictions, *references} - label_ids.keys()
    if unknown:
        raise ValueError(f"the label {min(unknown, key=str)!r} is not one of the {len(label_ids)} labels")
    predicted = np.array([label_ids[label] for label in predictions])
    expected = np.array([label_ids[label] for label in references])
    is_correct = predicted == expected
    # By class, [C]: numbers of right predictions, of all predictions, and of examples.
    num_correct = np.bincount(predicted[is_correct], minlength=len(label_ids))
    num_predicted = np.bincount(predicted, minlength=len(label_ids))
    num_expected = np.bincount(expected, minlength=len(label_ids))
    f1 = 2 * num_correct / np.maximum(num_predicted + num_expected, 1)
    recall = num_correct[num_expected > 0] / num_expected[num_expected > 0]
    return ClassScores(
        accuracy=100 * float(is_correct.mean()),
        macro_f1=100 * float(f1.mean()),
        balanced_accuracy=100 * float(recall.mean()),
        matthews_correlation=100 * _correlation(num_correct.tolist(), num_predicted.tolist(), num_expected.tolist()),
    )


def _correlation(num_correct: list[int], num_predicted: list[int], num_expected: list[int]) -> float:
    """Returns Matthews correlation, from numbers by class: of right predictions, of all predictions, of examples."""
    total = sum(num_expected)

    def covariance(left: list[int], right: list[int], num_both: int) -> int:
        return total * num_both - sum(a * b for a, b in zip(left, right, strict=True))

    variances = [covariance(counts, counts, total) for counts in (num_predicted, num_expected)]
    # Integers of Python do not overflow, and the root of an exact square is exact: right predictions score 1.
    spread = math.sqrt(math.prod(variances))
    return covariance(num_predicted, num_expected, sum(num_correct)) / spread if spread else 0.0
