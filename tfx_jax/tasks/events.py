"""Classification of event records: irregular time series with a label."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.data.batching.batches import BatchSpec, ExampleList, LoaderOptions
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.data.sources.tables import Table, read_table
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.metrics.ranking import auroc, average_precision, with_interval
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.classification import LABEL_ARRAYS, ClassificationBase, class_loss, label_arrays
from tfx_jax.tasks.files import FileData, check_batch, few_boundaries, split_path
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig

_PROBABILITIES = np.linspace(0.0, 1.0, 101)  # of the quantiles that `fit_scales` computes


class Record(NamedTuple):
    """The events of a record and its label.

    Attributes:
      variables: index of the variable of each event, int [T].
      values: measured values, float [T].
      times: times of the events, float [T] in [0, 1].
      label: 0 or 1.
    """

    variables: np.ndarray
    values: np.ndarray
    times: np.ndarray
    label: int


class Records(Protocol):
    """Random access to records; the number of events of each is known before the record is created.

    Attributes:
      source: name of the records in messages.
      names: names of the variables.
    """

    source: str
    names: tuple[str, ...]

    @property
    def lengths(self) -> np.ndarray:
        """Number of events of each record, [number of records] int."""
        ...

    def __len__(self) -> int:
        """The number of records."""
        ...

    def __getitem__(self, index: int) -> Record:
        """Returns the record with this index."""
        ...


@documented
@dataclasses.dataclass
class EventData(FileData):
    """Source of the records, and size of a batch.

    "files": each row of a table is a record, each column a variable, and each cell with a number an event; an empty
    cell is no event. A table does not say when its numbers were measured, so the time of every event is 0. Columns with
    statistics of one series, such as "HR_first" and "HR_last", are separate variables, and the model must learn that
    "last" is later.

    "synthetic": records that are generated at access. Events of `num_variables` variables have values of the standard
    normal distribution and random times in [0, 1). The label is 1 if and only if variable 0 has a value above
    `threshold` at a time from `window_start` to `window_end`. All other events are distractors.
    """

    dataset: str = one_of(("synthetic", "files"), "synthetic")
    data_dir: str = ""  # files: folder to which the file names below are relative
    train_file: str = ""  # files: comma-separated values, plain or .gz, with column names in the first line
    validation_file: str = ""
    test_file: str = ""
    label_column: str = ""  # files: name of the column with the label, 0 or 1
    exclude_columns: str = ""  # files: columns that are not inputs, separated by commas
    seed: int = at_least(0, 0)  # synthetic (this and the following): seed of the records, independent of config.seed
    num_train: int = at_least(1, 20_000)
    num_heldout: int = at_least(1, 1_000)  # records of the validation split and of the test split
    num_variables: int = at_least(2, 20)
    min_events: int = at_least(1, 30)  # minimum number of events of a record
    cause_rate: float = fraction(0.15)  # expected fraction of events of variable 0, which can cause label 1
    threshold: float = 0.5
    window_start: float = fraction(0.3)
    window_end: float = fraction(0.6)
    max_length: int = at_least(1, 50)  # maximum number of events of a record
    tokens_per_batch: int = at_least(1, 3_200)  # events of a global batch, including padding

    def load(self, split: Split) -> Records:
        """Reads the records of a split; synthetic records are generated at access.

        Raises:
          UserError: if they cannot be read, or a row of a file has more than `max_length` numbers.
        """
        if self.dataset == "synthetic":
            return Cohort(self, split)
        path = split_path(self, split)
        exclude = [name.strip() for name in self.exclude_columns.split(",") if name.strip()]
        rows = TableRows(read_table(path, label_column=self.label_column, exclude=exclude), str(path))
        if (most := rows.lengths.max()) > self.max_length:
            raise UserError(f"{path} has a row of {most} numbers: raise config.task.data.max_length={self.max_length}")
        return rows

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        del model
        name = "config.task.data"
        check_batch(self, what="record")
        if self.dataset == "files" and not self.label_column:
            raise UserError(f'{name}.label_column must name a column for {name}.dataset="files"')
        if self.dataset == "synthetic" and self.max_length < self.min_events:
            raise UserError(f"{name}.max_length={self.max_length} must be at least min_events={self.min_events}")
        if not self.window_start < self.window_end:
            raise UserError(f"{name}.window_end={self.window_end} must be after window_start={self.window_start}")

    def tiny(self) -> None:
        """Sets a small synthetic data set."""
        self.dataset, self.num_train, self.num_heldout, self.num_variables = "synthetic", 256, 64, 5
        self.min_events, self.max_length, self.tokens_per_batch = 6, 8, 256


class TableRows:
    """The rows of a table as records."""

    def __init__(self, table: Table, source: str):
        """Wraps a table; `source` is its name in messages."""
        self.source, self.names, self.table = source, table.columns, table
        self._is_measured = ~np.isnan(table.values)

    @property
    def lengths(self) -> np.ndarray:
        """Number of values of each row."""
        return self._is_measured.sum(axis=1)

    def __len__(self) -> int:
        return len(self.table.labels)

    def __getitem__(self, index: int) -> Record:
        variables = np.flatnonzero(self._is_measured[index])
        values = self.table.values[index, variables]
        return Record(variables, values, np.zeros(len(variables)), int(self.table.labels[index]))


class Cohort:
    """Synthetic records; each depends only on the seed, the split and its index. See `EventData`."""

    def __init__(self, data: EventData, split: Split):
        """Samples the number of events of each record; the events are generated at access."""
        self._data, self._split = data, SPLITS.index(split)
        self.source = f"the cohort's {split} split"
        self.names = tuple(f"variable {number}" for number in range(data.num_variables))
        count = data.num_train if split == "train" else data.num_heldout
        rng = np.random.default_rng((data.seed, self._split))
        self.lengths = rng.integers(data.min_events, data.max_length, count, endpoint=True)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Record:
        """Generates record `index`, whose label is whether any of its events is a cause."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        data, count = self._data, self.lengths[index]
        rng = np.random.default_rng((data.seed, self._split, index))
        # Variable 0, which can cause label 1, or a distractor.
        variables = np.where(rng.random(count) < data.cause_rate, 0, rng.integers(1, data.num_variables, count))
        values, times = rng.standard_normal(count), rng.random(count)
        return Record(variables, values, times, int(is_cause(data, variables, values, times).any()))


def is_cause(data: EventData, variables: np.ndarray, values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns which events of a synthetic record cause label 1, bool [T]."""
    return (variables == 0) & (values > data.threshold) & (data.window_start <= times) & (times < data.window_end)


def fit_scales(records: Records) -> list[dict[str, Any]]:
    """Builds, for each variable, the table from which `rank_values` interpolates the rank (0 to 1) of a value.

    Returns:
      For each variable a dictionary: its "name", "values", up to 101 quantiles in increasing order, and their "ranks",
      the fraction of values below each, with equal values counted half. A variable without values has rank 0.5
      everywhere.
    """
    all_records = [records[index] for index in range(len(records))]
    variables = np.concatenate([record.variables for record in all_records])
    values = np.concatenate([record.values for record in all_records])
    scales = []
    for index, name in enumerate(records.names):
        values_of_variable = values[variables == index]
        is_measured = len(values_of_variable) > 0
        quantiles = np.quantile(values_of_variable, _PROBABILITIES) if is_measured else np.zeros(1)
        probabilities = _PROBABILITIES if is_measured else np.full(1, 0.5)
        # Of equal quantiles, only one is kept; its rank is the mean of their probabilities.
        distinct_values, value_index = np.unique(quantiles, return_inverse=True)
        ranks = np.bincount(value_index, weights=probabilities) / np.bincount(value_index)
        scales.append({"name": name, "values": distinct_values.tolist(), "ranks": ranks.tolist()})
    return scales


def rank_values(scales: Sequence[Mapping[str, Any]], variables: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Scales values to [0, 1] by rank, linearly interpolated between the values of `fit_scales`.

    Args:
      scales: result of `fit_scales`.
      variables: index in `scales` of the variable of each value, int [T].
      values: the values, float [T].

    Returns:
      Ranks, float32 [T].

    >>> scales = [{"name": "pH", "values": [7.0, 7.4], "ranks": [0.0, 1.0]}]
    >>> rank_values(scales, np.array([0, 0]), np.array([7.1, 9.0])).round(2).tolist()
    [0.25, 1.0]
    """
    ranks = np.zeros(len(values), np.float32)
    for index in np.unique(variables):
        has_variable, scale = variables == index, scales[index]
        ranks[has_variable] = np.interp(values[has_variable], scale["values"], scale["ranks"])
    return ranks


@documented
@dataclasses.dataclass
class EventClassificationConfig(TaskConfig):
    """Predicts from the events of a record whether its label is 1."""

    data: EventData = dataclasses.field(default_factory=EventData)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "events", "event classification")
        self.data.validate(model)

    def setup(self, model: Seq2VecConfig, splits: Splits[Records], artifacts: Artifacts) -> "EventClassificationTask":
        """Sets up the task; the model gets as many variables as the training split has."""
        scales = setup_json(artifacts, "variables.json", lambda: fit_scales(splits["train"]))
        model = dataclasses.replace(model, vocab_size=len(scales), num_classes=2)
        return EventClassificationTask(self, model, splits, scales)

    def planned(self, model: Seq2VecConfig, options: LoaderOptions) -> PlannedTask:
        """Plans the task; a table is assumed to have `max_length` variables."""
        num_variables = self.data.num_variables if self.data.dataset == "synthetic" else self.data.max_length
        dtypes = {"variable": np.int32, "value": np.float32, "time": np.float32, "event_mask": np.bool_}
        arrays = {name: (dtype, LENGTH) for name, dtype in dtypes.items()}
        batch = planned_batch(self.data, options, LABEL_ARRAYS | arrays)
        model = dataclasses.replace(model, vocab_size=num_variables, num_classes=2)
        return PlannedTask(EventClassificationTask(self, model, NO_DATA, NO_DATA), batch)


class EventShare(NamedTuple):
    """An event and its weight in each hop of attention; only "structured" attention has several hops."""

    name: str
    value: float
    time: float
    hops: tuple[float, ...]

    @property
    def weight(self) -> float:
        """Mean weight over all hops; the weights of a record sum to 1."""
        return sum(self.hops) / len(self.hops)


def _logits(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None = None, **options: Any) -> Any:
    return model(batch["variable"], batch["value"], batch["time"], batch["event_mask"], rngs=rngs, **options)


class EventClassificationTask(ClassificationBase[EventClassificationConfig, Seq2VecConfig, Records]):
    """Classification of event records.

    Attributes:
      scales: name of each variable and how its values are ranked; see `fit_scales`.
    """

    logits = staticmethod(_logits)
    metrics = (
        MetricInfo("auroc", "AUROC", digits=4, note="ties count half"),
        MetricInfo("average_precision", "average precision", digits=4),
    )
    unit = "event"

    def __init__(
        self,
        config: EventClassificationConfig,
        model_config: Seq2VecConfig,
        splits: Splits[Records],
        scales: Sequence[Mapping[str, Any]],
    ):
        super().__init__(config, model_config, splits)
        self.scales = scales

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: examples of similar length together."""
        data = self.config.data
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch)

    def encode(self, rows: Records) -> ExampleList:
        """Returns one example per record.

        Raises:
          UserError: if the variables differ from those of the training split.
        """
        variable_ids = self._variable_ids(rows)
        all_records = [rows[index] for index in range(len(rows))]
        # All events are ranked at once, then split into records again.
        record_ends = np.cumsum([len(record.variables) for record in all_records])[:-1]
        all_variables = variable_ids[np.concatenate([record.variables for record in all_records])]
        all_values = np.concatenate([record.values for record in all_records])
        all_ranks = rank_values(self.scales, all_variables, all_values)
        examples = []
        for record, variables, ranks in zip(
            all_records, np.split(all_variables, record_ends), np.split(all_ranks, record_ends), strict=True
        ):
            arrays = {
                "variable": variables,
                "value": ranks,
                "time": record.times.astype(np.float32),
                "event_mask": np.ones(len(variables), bool),
            }
            examples.append(arrays | label_arrays(record.label))
        return ExampleList(examples, by="variable")

    def check_validation(self) -> None:
        """Raises UserError if the variables or labels of the validation split cannot be scored."""
        self._variable_ids(self._splits["validation"])
        self._labels("validation")

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return event_loss(model, batch, rngs)

    def predict(self, model: TrainedModel, rows: Records) -> list[float]:
        """Returns the log-odds of label 1 for each record."""
        return model.predict(predict_log_odds, self.encode(rows), self.batch_spec)

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Scores every record of a split, with 95 % confidence intervals from 1,000 bootstrap samples.

        Raises:
          UserError: if all labels are equal, because there is nothing to rank then.
        """
        labels = self._labels(split)
        log_odds = self.predict(model, self._splits[split])
        intervals = [with_interval(scorer, log_odds, labels) for scorer in (auroc, average_precision)]
        texts = ", ".join(
            f"{metric.title} {interval}" for metric, interval in zip(self.metrics, intervals, strict=True)
        )
        metrics = {metric.name: interval.value for metric, interval in zip(self.metrics, intervals, strict=True)}
        return EvalResult(metrics, f"{texts}, {len(labels):,} records, {labels.sum():,} of label 1")

    def event_attention(self, model: TrainedModel, split: Split, index: int) -> tuple[float, int, list[EventShare]]:
        """Returns the weights of the events of a record in the model's prediction.

        Args:
          model: the trained model.
          split: split of the record.
          index: index of the record, from 0.

        Returns:
          A triple: the model's probability of label 1, the true label, and the events by decreasing weight.

        Raises:
          UserError: if the split has no such record.
        """
        records = self._splits[split]
        if not 0 <= index < len(records):
            raise UserError(f"{records.source} has no record {index + 1}: it has {len(records):,}, counted from 1")
        record = records[index]
        ((log_odds, shares),) = model.predict(
            predict_shares, self.encode(_SingleRecord(records, record)), self.batch_spec
        )
        names = [records.names[variable] for variable in record.variables]
        weights_of_events = zip(*shares, strict=True)  # for each event, padding included, its weight in each hop
        fields = (names, record.values.tolist(), record.times.tolist(), weights_of_events)
        events = [EventShare(*event) for event in zip(*fields, strict=False)]  # drops the weights of padding
        probability = 1 / (1 + math.exp(-log_odds))
        return probability, record.label, sorted(events, key=lambda event: -event.weight)

    def _labels(self, split: Split) -> np.ndarray:
        """Returns the labels of a split, [number of records] int; raises UserError if they are all equal."""
        records = self._splits[split]
        labels = np.array([records[index].label for index in range(len(records))])
        if len({*labels.tolist()}) < 2:
            raise UserError(
                f"{records.source} has only records of label {labels[0]}: AUROC needs records of both labels"
            )
        return labels

    def _variable_ids(self, records: Records) -> np.ndarray:
        """Returns the index in `scales` of each variable of the records, int32 [number of variables].

        Raises:
          UserError: if the variables differ from those of the training split.
        """
        ids = {scale["name"]: index for index, scale in enumerate(self.scales)}
        for name in records.names:
            if name not in ids:
                raise UserError(
                    f"{records.source}: column {name!r} does not occur in the training split: exclude it with "
                    "exclude_columns"
                )
        for name in ids:
            if name not in records.names:
                raise UserError(f"{records.source}: column {name!r} of the training split is missing")
        return np.array([ids[name] for name in records.names], np.int32)


class _SingleRecord:
    """A single record as `Records`."""

    def __init__(self, records: Records, record: Record):
        self.source, self.names, self._record = records.source, records.names, record

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(self._record.variables)])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Record:
        return [self._record][index]  # raises IndexError for any other index than 0


def event_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the labels of records.

    Args:
      model: model of the kind "events": `model(variable, value, time, event_mask, rngs=...)` returns class logits.
      batch: "variable" [B, T] int32, "value" and "time" [B, T] float32, "event_mask" [B, T] bool, "label" [B] int32
        and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The output of `class_loss`; `num_tokens` counts the events.
    """
    return class_loss(_logits(model, batch, rngs), batch, batch["event_mask"])


def predict_log_odds(model: Any, batch: dict[str, Array]) -> Float[Array, " B"]:
    """Returns the log-odds of label 1, for `TrainedModel.predict`."""
    return _log_odds(_logits(model, batch))


def predict_shares(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, " B"], Float[Array, "B N T"]]:
    """Returns the pair (log-odds of label 1, weight of each event in each of N hops), for `TrainedModel.predict`."""
    logits, maps = _logits(model, batch, return_attention=True)
    (weights,) = maps.values()
    return _log_odds(logits), weights[:, :, 0]  # [B, N, 1, T]: one query, which pools the record


def _log_odds(logits: Float[Array, "B 2"]) -> Float[Array, " B"]:
    return logits[:, 1] - logits[:, 0]
