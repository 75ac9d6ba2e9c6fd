"""Scores of predicted classes: accuracy, macro F1 and balanced accuracy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class ClassScores(NamedTuple):
    """Classification scores in percent.

    Attributes:
      accuracy: share of the predictions that are right.
      macro_f1: unweighted mean over classes of F1, the harmonic mean of precision and recall.
      balanced_accuracy: unweighted mean of recall over the classes that occur.
    """

    accuracy: float
    macro_f1: float
    balanced_accuracy: float


def class_scores(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> ClassScores:
    """Scores predicted classes.

    The values are those of scikit-learn's `accuracy_score`, of its `f1_score` with `labels` and average="macro", and of
    its `balanced_accuracy_score`, times 100. A class that neither occurs nor is predicted has an F1 of 0. A class that
    does not occur in `references` is left out of the balanced accuracy.

    Args:
      predictions: predicted class of each example, as name or id.
      references: correct class of each example. (scikit-learn takes them first.)
      labels: all classes, each once.

    Raises:
      ValueError: if the numbers of predictions and references differ or are 0, or a class is not in `labels`.

    >>> class_scores(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"])
    ClassScores(accuracy=75.0, macro_f1=73.33333333333334, balanced_accuracy=83.33333333333333)
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(
            f"{len(predictions)} predictions cannot be scored by {len(references)} references: both must be equally "
            "many, and at least one"
        )
    label_ids = {label: index for index, label in enumerate(labels)}
    unknown = {*predictions, *references} - label_ids.keys()
    if unknown:
        raise ValueError(f"the label {min(unknown, key=str)!r} is not one of the {len(label_ids)} labels")
    predicted, expected = (np.array([label_ids[label] for label in side]) for side in (predictions, references))
    is_correct = predicted == expected
    num_correct, num_predicted, num_expected = (
        np.bincount(classes, minlength=len(label_ids)) for classes in (predicted[is_correct], predicted, expected)
    )
    f1 = 2 * num_correct / np.maximum(num_predicted + num_expected, 1)
    recall = num_correct[num_expected > 0] / num_expected[num_expected > 0]
    return ClassScores(*(100 * float(score) for score in (is_correct.mean(), f1.mean(), recall.mean())))
