"""The protocols of a task: an objective with its data, loss and metrics, for any model of the required kind.

A task has two parts, as a model has. Its configuration, `config.task`, is a dataclass that says where examples come
from and how they are learned; `config.task.setup(...)` makes the task itself, which has read what it needs. A task
knows neither the trainer nor the other tasks. Base classes are `classification.ClassificationBase` and
`token_prediction.TokenPredictionBase`; whatever else two tasks share is a function.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import jax
from etils import epath
from flax import nnx

from tfx_jax.data.batching.batches import Batch, LoaderOptions
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.models.config import ModelConfig
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.prediction import TrainedModel


class PlannedTask(NamedTuple):
    """A task without data; its loss and its model need none.

    Attributes:
      task: builds the model and computes the loss.
      batch: shapes and dtypes of the largest training batch of all processes together.
    """

    task: "Task"
    batch: dict[str, jax.ShapeDtypeStruct]


class MetricInfo(NamedTuple):
    """How a metric is displayed and compared.

    Attributes:
      name: key of the metric in evaluations, such as "bleu".
      title: name for display, such as "BLEU".
      unit: text after a value, such as " %".
      digits: decimals of a displayed value.
      is_loss: whether lower values are better.
      note: how the metric is computed, if that is not obvious.
    """

    name: str
    title: str
    unit: str = ""
    digits: int = 2
    is_loss: bool = False
    note: str = ""

    def format(self, value: float) -> str:
        """Returns a value with its unit."""
        return f"{value:.{self.digits}f}{self.unit}"


class EvalResult(NamedTuple):
    """Result of an evaluation.

    Attributes:
      metrics: values of all metrics of the task, by name.
      summary: the same as one line of text.
    """

    metrics: dict[str, float]
    summary: str


class ReportTable(NamedTuple):
    """A table of `report.md`.

    Attributes:
      title: heading.
      header: names of the columns.
      rows: cells of each row.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Artifacts(Protocol):
    """Files of a workdir that its checkpoints need, such as the tokenizer and the labels.

    Attributes:
      folder: the workdir.
      starts_from_model: whether the run starts from the parameters of another model, whose tokenizer it uses.
    """

    folder: epath.Path
    starts_from_model: bool

    def initial_tokenizer(self) -> epath.Path:
        """Returns the folder of the tokenizer of the initial model.

        Raises:
          UserError: if the model does not exist, or its tokenizer is damaged.
        """
        ...

    def checked(self, name: str) -> AbstractContextManager[bool]:
        """Verifies the checksum of a file or folder of the workdir before the block reads it.

        Yields:
          Whether the block must create it, because this is the first run in the workdir.

        Raises:
          UserError: if it is missing and must not be created, or is damaged.
        """
        ...


@runtime_checkable
class TaskConfig(Protocol):
    """Configuration of a task: a dataclass, defined above the task in the same file.

    A subclass inherits `tiny` and `splits` if its data defines `tiny`, `has_split` and `load`.

    Attributes:
      data: dataclass that says where examples come from and how they are batched; it always has the fields `max_length`
        and `tokens_per_batch`.
    """

    data: Any

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent, and that the task can train the model.

        Raises:
          UserError: if not.
        """
        ...

    def tiny(self) -> None:
        """Changes the configuration to train in seconds on one CPU with built-in data."""
        self.data.tiny()

    def splits(self) -> Splits[Any]:
        """Returns the splits of the data; nothing is read yet."""
        return Splits(self.data.has_split, self.data.load)

    def setup(self, model: Any, splits: Any, artifacts: Artifacts) -> "Task":
        """Creates the task: reads its artifacts, or creates them from the training split.

        Args:
          model: configuration of the model.
          splits: the splits that `splits` returned.
          artifacts: files of the workdir.

        Raises:
          UserError: if an artifact is missing and must not be created, is damaged or does not fit, or the data cannot
            be read.
        """
        ...

    def planned(self, model: Any, options: LoaderOptions) -> "PlannedTask":
        """Returns the task without data, as it would train a model, and the shapes of its largest batch.

        Args:
          model: configuration of the model, including its vocabulary size.
          options: options of the trainer's batches.
        """
        ...


def eval_result(metrics: Sequence[MetricInfo], values: Mapping[str, float], counted: str) -> EvalResult:
    """Returns metrics as an evaluation result; its summary ends with `counted`, such as "3 texts"."""
    values = {metric.name: values[metric.name] for metric in metrics}
    shown = [f"{metric.title} {metric.format(values[metric.name])}" for metric in metrics]
    return EvalResult(values, ", ".join([*shown, counted]))


class Task(Protocol):
    """A task that is set up for training.

    A task whose examples continue from batch to batch also has `make_carry()`, which returns the carry of the first
    batch, arrays [B, ...]. Its loss takes the carry as an optional fourth argument and returns the next carry;
    `tfx_jax.tasks.text.recurrent_language_modeling` is an example.

    A task that can show more than its metrics also has `report_tables(model)`. It takes a `TrainedModel` and returns
    tables about the validation split, such as sample predictions; all processes call it.

    A task whose models can return attention maps also has `attention_example(model)`. It takes a `TrainedModel` and
    returns the `PairAttention` or `ImageAttention` of one fixed example of the validation split, or None if no example
    is short enough. All processes call it.

    Attributes:
      metrics: metrics of evaluations; the first decides which checkpoint is best, unless `config.best_metric` names
        another.
      unit: unit over which the loss is a mean, and which the throughput counts.
      model_config: configuration of the model with the real vocabulary size and labels.
    """

    model_config: Any

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """Metrics of evaluations."""
        ...

    @property
    def unit(self) -> str:
        """Unit of the loss and the throughput, such as "token"."""
        ...

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        """Builds the model with initialized parameters."""
        ...

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns endless training batches; their iterators are `PrefetchedIterator`s."""
        ...

    def loss(self, model: Any, batch: dict[str, Any], rngs: nnx.Rngs | None) -> LossOutput:
        """Computes the loss of a batch; see `tfx_jax.training.step.update`."""
        ...

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Computes the metrics of a model on a split; processes share the work, and each returns the full result.

        Raises:
          UserError: if there is no such split, or it cannot be read.
        """
        ...
