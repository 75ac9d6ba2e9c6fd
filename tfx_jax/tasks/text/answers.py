"""What a model that has learned a task says of new inputs, for the tasks whose inputs are lines of text."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tfx_jax.tasks.prediction import TrainedModel

Prediction = dict[str, Any]
"""The prediction for one input, ready for JSON; the first value is the one to print."""

NO_CLASS: Prediction = {"label": "", "probability": 0.0, "probabilities": {}}
"""The empty answer of a classifier."""


@runtime_checkable
class AnsweringTask(Protocol):
    """A task that answers lines of text.

    Attributes:
      inputs: what an input consists of, such as ("question", "context"): so many strings.
      empty_answer: to an input of which a string shows nothing, see `tfx_jax.data.sources.lines.is_blank`.
    """

    empty_answer: Prediction

    @property
    def inputs(self) -> tuple[str, ...]:
        """What an input consists of."""
        ...

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns an answer to each input, in their order."""
        ...


def class_predictions(labels: Sequence[str], probabilities: Sequence[Sequence[float]]) -> list[Prediction]:
    """Returns the likeliest label of each row of probabilities, and all of them.

    >>> class_predictions(("no", "yes"), [[0.25, 0.75]])
    [{'label': 'yes', 'probability': 0.75, 'probabilities': {'no': 0.25, 'yes': 0.75}}]
    """
    found = []
    for row in probabilities:
        named = dict(zip(labels, row, strict=True))
        label = max(named, key=lambda name: named[name])
        found.append({"label": label, "probability": named[label], "probabilities": named})
    return found
