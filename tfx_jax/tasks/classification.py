"""Single-label classification: base class of the tasks that assign one of a few classes to each example.

Texts, sentence pairs, long sequences, images and event records share it. A task defines how examples are made
(`encode`, `batch_spec`) and how the model is called (`logits`, `loss`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleSource, LoaderOptions, train_batches
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.metrics.classes import ClassScores, class_scores, confusion_matrix, scores_by_class
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import EvalResult, MetricInfo, ReportTable, eval_result

Config = TypeVar("Config")
Model = TypeVar("Model")
Rows = TypeVar("Rows")

CLASS_METRICS = (
    MetricInfo("accuracy", "accuracy", " %"),
    MetricInfo("macro_f1", "macro F1", " %"),
    MetricInfo("balanced_accuracy", "balanced accuracy", " %", note="mean recall of the classes that occur"),
    MetricInfo("matthews_correlation", "Matthews correlation", " %", note="0 is chance"),
)
"""Metrics of all classification tasks: the fields of `ClassScores`."""

LABEL_ARRAYS: dict[str, tuple[Any, ...]] = {"label": (np.int32,), "row_weights": (np.float32,)}
"""Arrays [B] in the batches of all these tasks: the id of the class, and the weight, 0 for padding examples."""


def label_arrays(label: int) -> Example:
    """Returns the arrays of `LABEL_ARRAYS` for one example."""
    return {"label": np.array(label, np.int32), "row_weights": np.array(1, np.float32)}


def class_loss(
    logits: Float[Array, "B C"],
    batch: dict[str, Array],
    is_read: Bool[Array, "..."] | Float[Array, "..."],
    *,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Sums the cross entropy of the classes of a batch.

    Args:
      logits: logits of the classes, [B, C].
      batch: contains the arrays of `LABEL_ARRAYS`.
      is_read: 1 or True for each token, or other unit, that the model reads; `num_tokens` counts them.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      The output of `summed_cross_entropy` over examples.
    """
    output = summed_cross_entropy(logits, batch["label"], batch["row_weights"], label_smoothing=label_smoothing)
    return output._replace(num_tokens=is_read.sum(dtype=jnp.float32))


_MOST_CLASSES, _MOST_COLUMNS = 30, 12  # rows and columns of tables in reports


class ClassificationBase(Generic[Config, Model, Rows]):
    """Base class of the classification tasks; see `tfx_jax.tasks.task.Task`.

    Attributes:
      labels: labels of the training split, in the order of their ids.
    """

    logits: ClassVar[Callable[..., Any]]
    """`logits(model, batch)` returns the logits of the classes of each example, [B, C]."""
    metrics: tuple[MetricInfo, ...] = CLASS_METRICS
    row_name = "texts"
    """Name of the examples in the summary of an evaluation."""

    def __init__(self, config: Config, model_config: Model, splits: Splits[Rows]):
        self.config, self.model_config = config, model_config
        self.labels: tuple[str, ...] = getattr(model_config, "labels", ("0", "1"))
        self._splits = splits

    @functools.cached_property
    def label_ids(self) -> dict[str, int]:
        """Maps each label to its id."""
        return {label: index for index, label in enumerate(self.labels)}

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return cast(Any, self.model_config).make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches."""
        raise NotImplementedError

    def encode(self, rows: Any) -> ExampleSource:
        """Returns one example per row of the data, with the arrays of `LABEL_ARRAYS`."""
        raise NotImplementedError

    def rows(self, split: Split) -> Rows:
        """Returns the rows of a split of the data.

        Raises:
          UserError: if they cannot be read.
        """
        return self._splits[split]

    def check_validation(self) -> None:
        """Raises UserError if the validation split cannot be scored."""
        self.rows("validation")

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns the training data, after `check_validation`: here rather than at the first evaluation.

        Raises:
          UserError: if a split cannot be used.
        """
        if "validation" in self._splits:
            self.check_validation()
        examples = self.encode(self.rows("train"))
        return train_batches(lambda epoch: examples, self.batch_spec, options)  # the same examples in every epoch

    def predict(self, model: TrainedModel, rows: Rows) -> list[str]:
        """Returns the most likely label of each row."""
        return self._classified(model, rows)[0]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Classifies every row of a split."""
        predicted, expected = self._classified(model, self.rows(split))
        return class_result(class_scores(predicted, expected, self.labels), len(predicted), self.row_name)

    def _classified(self, model: TrainedModel, rows: Rows) -> tuple[list[str], list[str]]:
        """Returns the most likely label and the true label of each row."""
        id_pairs = model.predict(self.classify, self.encode(rows), self.batch_spec)
        predicted = [self.labels[predicted_id] for predicted_id, _ in id_pairs]
        expected = [self.labels[true_id] for _, true_id in id_pairs]
        return predicted, expected

    def report_tables(self, model: TrainedModel) -> list[ReportTable]:
        """Returns the scores of each class, which classes are confused, and sample predictions, mistakes first."""
        rows = self.rows("validation")
        predicted, expected = self._classified(model, rows)
        counts = confusion_matrix(predicted, expected, self.labels)  # [true class, predicted class]
        by_class = sorted(scores_by_class(counts, self.labels), key=lambda scores: scores.f1)
        title = "Classes of the validation split"
        if len(by_class) > _MOST_CLASSES:
            title = f"The {_MOST_CLASSES} classes of the validation split with the lowest F1"
            by_class = by_class[:_MOST_CLASSES]
        class_rows = []
        for scores in by_class:
            percentages = [f"{value:.1f} %" for value in (scores.precision, scores.recall, scores.f1)]
            class_rows.append((str(scores.label), *percentages, f"{scores.support:,}"))
        tables = [ReportTable(title, ("class", "precision", "recall", "F1", "examples"), class_rows)]
        if len(self.labels) <= _MOST_COLUMNS:
            cells = [(str(label), *map(str, row)) for label, row in zip(self.labels, counts.tolist(), strict=True)]
            tables.append(ReportTable("Confusion matrix", ("true, predicted:", *map(str, self.labels)), cells))
        else:
            mistakes = np.where(np.eye(len(counts), dtype=bool), 0, counts)  # without the diagonal
            worst = np.argsort(-mistakes, axis=None, kind="stable")[:10]  # indices of the flattened matrix
            cells = [
                (str(self.labels[row]), str(self.labels[column]), str(mistakes[row, column]))
                for row, column in zip(*np.unravel_index(worst, counts.shape), strict=True)
                if mistakes[row, column]
            ]
            tables.append(ReportTable("Most frequent confusions", ("true", "predicted", "examples"), cells))
        # Mistakes first, then the first examples.
        order = sorted(range(len(predicted)), key=lambda index: (predicted[index] == expected[index], index))
        shown = dict.fromkeys([*order[:5], *range(min(5, len(predicted)))])  # each index once
        samples = [
            (self.describe_row(cast(Any, rows)[index], index), str(expected[index]), str(predicted[index]))
            for index in shown
        ]
        return [*tables, ReportTable("Sample predictions, mistakes first", ("input", "true", "predicted"), samples)]

    def describe_row(self, row: Any, index: int) -> str:
        """Returns the text of a row for reports; by default its number in the split, from 1."""
        del row
        return f"number {index + 1}"

    def classify(self, model: Any, batch: dict[str, Array]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Returns the pair (id of the most likely class, id of the true class), for `TrainedModel.predict`."""
        return self.logits(model, batch).argmax(axis=-1), batch["label"]

    def probabilities(self, model: Any, batch: dict[str, Array]) -> Float[Array, "B C"]:
        """Returns the probabilities of all classes, for `TrainedModel.predict`."""
        return jax.nn.softmax(self.logits(model, batch).astype(jnp.float32))


def class_result(scores: ClassScores, count: int, what: str = "texts") -> EvalResult:
    """Returns scores as an evaluation result; its summary ends with the number of examples, as in "3 texts"."""
    return eval_result(CLASS_METRICS, scores._asdict(), f"{count:,} {what}")


def labels_of(rows: Sequence[Any]) -> list[str]:
    """Returns the distinct labels of some rows, in alphabetical order."""
    return sorted({row.label for row in rows})


def check_labels(rows: Sequence[Any], labels: Sequence[str], where: str = "") -> None:
    """Checks that all labels are among those of the training split.

    Raises:
      UserError: if a label is unknown; if `where` is given, the message names it and the number of the row, from 1.
    """
    known = set(labels)
    for number, row in enumerate(rows, 1):
        if row.label not in known:
            location = f"{where}, text {number}: " if where else ""
            raise UserError(
                f"{location}the label {row.label!r} does not occur in the training split ({len(known)} labels)"
            )
