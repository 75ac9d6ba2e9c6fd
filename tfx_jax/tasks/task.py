"""What a task is: an objective with its data, its loss and its metrics, for any model of the kind that it needs.

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
    """A task that has nothing to read; its loss and its model do not ask for that.

    Attributes:
      task: makes the model and computes the loss.
      batch: shapes and dtypes of the largest training batch, of all processes together.
    """

    task: "Task"
    batch: dict[str, jax.ShapeDtypeStruct]


class MetricInfo(NamedTuple):
    """How a metric of an evaluation is shown and compared.

    Attributes:
      name: the key by which evaluations have it, such as "bleu".
      title: the same for a person, such as "BLEU".
      unit: what stands behind a value.
      digits: how many stand after the point.
      is_loss: whether lower values are better.
      note: how it is computed, where that has to be said.
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
    """What an evaluation found.

    Attributes:
      metrics: the values of all metrics of the task, by name.
      summary: the same for a person, on one line.
    """

    metrics: dict[str, float]
    summary: str


class Artifacts(Protocol):
    """The files of a workdir that its checkpoints are of no use without, such as the tokenizer and the labels.

    Attributes:
      folder: the workdir.
      starts_from_model: whether the training starts from the parameters of another model, whose tokenizer it takes.
    """

    folder: epath.Path
    starts_from_model: bool

    def initial_tokenizer(self) -> epath.Path:
        """Returns the folder of that tokenizer.

        Raises:
          UserError: if the model is not there, or its tokenizer is damaged.
        """
        ...

    def checked(self, name: str) -> AbstractContextManager[bool]:
        """Verifies the checksum of a file or folder of the workdir before the block reads it.

        Yields:
          Whether the block is to make it, because this is the first training there.

        Raises:
          UserError: if it is missing and may not be made, or is damaged.
        """
        ...


@runtime_checkable
class TaskConfig(Protocol):
    """The configuration of a task: a dataclass, which stands above the task in the same file.

    A class that derives from it has `tiny` and `splits` if its data has `tiny`, `has_split` and `load`.

    Attributes:
      data: where examples come from and how they become batches, a dataclass: `max_length` and `tokens_per_batch` are
        fields of each.
    """

    data: Any

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together, and that the task can train the model.

        Raises:
          UserError: if not.
        """
        ...

    def tiny(self) -> None:
        """Sets what trains in seconds on one CPU, on built-in data."""
        self.data.tiny()

    def splits(self) -> Splits[Any]:
        """Returns the splits of the data, of which nothing is read yet."""
        return Splits(self.data.has_split, self.data.load)

    def setup(self, model: Any, splits: Any, artifacts: Artifacts) -> "Task":
        """Makes the task: reads its artifacts, or makes them of the training split.

        Args:
          model: the configuration of the model.
          splits: what `splits` gave.
          artifacts: of the workdir.

        Raises:
          UserError: if an artifact is missing and may not be made, is damaged or does not fit, or the data cannot be
            read.
        """
        ...

    def planned(self, model: Any, options: LoaderOptions) -> "PlannedTask":
        """Returns the task as it would train a model, without any data, and the shapes of its largest batch.

        Args:
          model: the configuration of the model, whose vocabulary is taken as it is said there.
          options: how the trainer wants its batches.
        """
        ...


def eval_result(metrics: Sequence[MetricInfo], values: Mapping[str, float], counted: str) -> EvalResult:
    """Returns the values of metrics as an evaluation, whose summary ends with what was counted: "3 texts"."""
    values = {metric.name: values[metric.name] for metric in metrics}
    shown = [f"{metric.title} {metric.format(values[metric.name])}" for metric in metrics]
    return EvalResult(values, ", ".join([*shown, counted]))


class Task(Protocol):
    """A task that is ready to train.

    A task whose examples go on from one batch to the next has `make_carry()` besides: what the first batch begins with,
    arrays [B, ...]. Its loss takes the carry as a fourth argument, which may be left out, and returns the next one;
    `tfx_jax.tasks.text.recurrent_language_modeling` is an example.

    A task whose models have attention that one can look at has `attention_example(model)` besides, of a `TrainedModel`:
    the `PairAttention` or `ImageAttention` of one example of the validation split, always the same, or None where none
    is short enough. All processes call it.

    Attributes:
      metrics: what evaluations measure; the first decides which checkpoint is best.
      unit: what the throughput counts, and the loss is a mean over.
      model_config: the configuration of the model with the vocabulary and the labels that it really has.
    """

    model_config: Any

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        """What evaluations measure."""
        ...

    @property
    def unit(self) -> str:
        """What the throughput counts."""
        ...

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        """Makes the model, its parameters drawn."""
        ...

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """Returns endless training batches; their iterators are `PrefetchedIterator`s."""
        ...

    def loss(self, model: Any, batch: dict[str, Any], rngs: nnx.Rngs | None) -> LossOutput:
        """Computes what is to be lowered, of a batch; see `tfx_jax.training.step.update`."""
        ...

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Measures a model on a split; several processes share the work, and each returns the whole.

        Raises:
          UserError: if there is no such split, or it cannot be read.
        """
        ...
