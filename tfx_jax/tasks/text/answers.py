"""Predictions for new inputs: lines of text, or files of images and sound."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tfx_jax.tasks.prediction import TrainedModel

Prediction = dict[str, Any]
"""Prediction for one input, as a JSON object; its first value is the one to print."""

NO_CLASS: Prediction = {"label": "", "probability": 0.0, "probabilities": {}}
"""Empty answer of a classifier."""


@runtime_checkable
class AnsweringTask(Protocol):
    """A task that answers lines of text, or files.

    A task whose inputs are files also has `suffixes`, the ends of their names, such as (".wav",). Its `answer` takes
    rows of one path or array.

    Attributes:
      inputs: names of the strings of an input, such as ("question", "context").
      empty_answer: answer to an input with a string without visible characters, see `is_blank`.
    """

    empty_answer: Prediction

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the strings of an input."""
        ...

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[Any]]) -> list[Prediction]:
        """Returns the answer to each input, in order."""
        ...


def class_predictions(labels: Sequence[str], probabilities: Sequence[Sequence[float]]) -> list[Prediction]:
    """Returns, for each row of probabilities, the most likely label and all probabilities.

    >>> class_predictions(("no", "yes"), [[0.25, 0.75]])
    [{'label': 'yes', 'probability': 0.75, 'probabilities': {'no': 0.25, 'yes': 0.75}}]
    """
    predictions: list[Prediction] = []
    for row in probabilities:
        by_label = dict(zip(labels, row, strict=True))
        label = max(by_label, key=lambda name: by_label[name])
        predictions.append({"label": label, "probability": by_label[label], "probabilities": by_label})
    return predictions
