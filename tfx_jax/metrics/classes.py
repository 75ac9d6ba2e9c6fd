"""Scores of predicted classes: accuracy, macro F1 and balanced accuracy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class ClassScores(NamedTuple):
    """How well texts are classified, in percent.

    Attributes:
      accuracy: share of the predictions that are right.
      macro_f1: mean over classes of the harmonic mean of precision and recall, each class alike however rare.
      balanced_accuracy: mean recall over the classes that occur, each alike however rare.
    """

    accuracy: float
    macro_f1: float
    balanced_accuracy: float


def class_scores(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> ClassScores:
    """Scores predicted classes.

    The values are those of scikit-learn's `accuracy_score`, of its `f1_score` with `labels` and average="macro", and of
    its `balanced_accuracy_score`, times 100: a class that neither occurs nor is predicted has an F1 of 0, and one that
    does not occur has no recall, and so no part in its mean.

    Args:
      predictions: a class for each text, as its name or its id.
      references: the classes that they should have. (scikit-learn takes them first.)
      labels: all classes there are, each once.

    Raises:
      ValueError: if the sides differ in length or are empty, or a class is none of the labels.

    >>> class_scores(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"])
    ClassScores(accuracy=75.0, macro_f1=73.33333333333334, balanced_accuracy=83.33333333333333)
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions cannot be scored by {len(references)} references")
    number = {label: index for index, label in enumerate(labels)}
    strange = {*predictions, *references} - number.keys()
    if strange:
        raise ValueError(f"{min(strange, key=str)!r} is none of the {len(number)} labels")
    found, wanted = (np.array([number[label] for label in side]) for side in (predictions, references))
    correct, predicted, true = (
        np.bincount(classes, minlength=len(number)) for classes in (found[found == wanted], found, wanted)
    )
    f1 = 2 * correct / np.maximum(predicted + true, 1)
    recall = correct[true > 0] / true[true > 0]
    return ClassScores(*(100 * float(score) for score in ((found == wanted).mean(), f1.mean(), recall.mean())))
