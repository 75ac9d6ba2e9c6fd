"""Classification of records of events, such as a patient's measurements, into two classes by a score."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.data.batching import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import documented
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.seq2vec import Seq2VecConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.event_data import EventData, Record, Records, fit_scales, rank_values
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.ranking_scores import auroc, average_precision, with_interval
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask
from tfx_jax.tasks.text_files import few_boundaries


@documented
@dataclasses.dataclass
class EventClassificationConfig:
    """To tell from its events whether the label of a record is 1."""

    data: EventData = dataclasses.field(default_factory=EventData)

    def validate(self, model: ModelConfig) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        require_kind(model, "events", "event classification")
        self.data.validate(model)

    def tiny(self) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        self.data.tiny()

    def splits(self) -> Splits[Records]:
        """Returns the records of each split."""
        return Splits(self.data.has_split, self.data.load)

    def setup(self, model: Seq2VecConfig, splits: Splits[Records], artifacts: Artifacts) -> "EventClassificationTask":
        """See `tfx_jax.tasks.task.TaskConfig`; the model gets as many variables as the training split has."""
        scales = setup_json(artifacts, "variables.json", lambda: fit_scales(splits["train"]))
        model = dataclasses.replace(model, vocab_size=len(scales), num_classes=2)
        return EventClassificationTask(self, model, splits, scales)

    def planned(self, model: Seq2VecConfig, options: LoaderOptions) -> PlannedTask:
        """See `tfx_jax.tasks.task.TaskConfig`; a table is taken to have `max_length` variables."""
        num_variables = self.data.num_variables if self.data.dataset == "synthetic" else self.data.max_length
        batch = planned_batch(
            self.data,
            options,
            dtypes={"variable": np.int32, "value": np.float32, "time": np.float32, "event_mask": np.bool_},
            scalars={"label": np.int32, "row_weights": np.float32},
        )
        model = dataclasses.replace(model, vocab_size=num_variables, num_classes=2)
        return PlannedTask(EventClassificationTask(self, model, NO_DATA, NO_DATA), batch)


class EventShare(NamedTuple):
    """An event and its share in each row of attention, of which only "structured" has several."""

    name: str
    value: float
    time: float
    hops: tuple[float, ...]

    @property
    def weight(self) -> float:
        """The share in what is pooled, the mean of all rows; those of a record sum to 1."""
        return sum(self.hops) / len(self.hops)


class EventClassificationTask:
    """Classification of records of events.

    Attributes:
      scales: of each variable its name, and how its values are ranked; see `fit_scales`.
    """

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
        """Takes what `EventClassificationConfig.setup` made."""
        self.config, self.model_config, self.scales = config, model_config, scales
        self._splits = splits

    def make_model(self, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs) -> Any:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.make(shard_attention=shard_attention, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: those with about as many events together."""
        data = self.config.data
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """See `tfx_jax.tasks.task.Task`."""
        examples = ExampleList(self.encode(self._splits["train"]), by="variable")
        return train_batches(lambda epoch: examples, self.batch_spec, options)

    def encode(self, records: Records) -> list[Example]:
        """Returns an example for each record.

        Raises:
          UserError: if their variables are not those of the training split.
        """
        number = self._check_names(records)
        everything = [records[index] for index in range(len(records))]
        edges = np.cumsum([len(record.variables) for record in everything])[:-1]
        variables = number[np.concatenate([record.variables for record in everything])]
        values = rank_values(self.scales, variables, np.concatenate([record.values for record in everything]))
        return [
            {
                "variable": variable,
                "value": value,
                "time": record.times.astype(np.float32),
                "event_mask": np.ones(len(variable), bool),
                "label": np.array(record.label, np.int32),
                "row_weights": np.array(1, np.float32),
            }
            for variable, value, record in zip(
                np.split(variables, edges), np.split(values, edges), everything, strict=True
            )
        ]

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `event_loss`."""
        return event_loss(model, batch, rngs)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.training_flops(*shapes["variable"])

    def predict(self, model: TrainedModel, records: Records) -> list[float]:
        """Returns the log-odds of each record's label being 1; the true one is not looked at."""
        return model.predict(predict_log_odds, ExampleList(self.encode(records), by="variable"), self.batch_spec)

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Scores every record of a split, with what 95 % of 1,000 bootstrap samples of them give.

        Raises:
          UserError: if all of its labels are equal: nothing is ranked then.
        """
        records = self._splits[split]
        labels = np.array([records[index].label for index in range(len(records))])
        if len({*labels.tolist()}) < 2:
            raise UserError(f"{records.source} has the label {labels[0]} alone: its AUROC needs records of both")
        log_odds = self.predict(model, records)
        found = [with_interval(scorer, log_odds, labels) for scorer in (auroc, average_precision)]
        told = ", ".join(f"{metric.title} {interval}" for metric, interval in zip(self.metrics, found, strict=True))
        metrics = {metric.name: interval.value for metric, interval in zip(self.metrics, found, strict=True)}
        return EvalResult(metrics, f"{told}, {len(labels):,} records, {labels.sum():,} of label 1")

    def attention(self, model: TrainedModel, split: Split, index: int) -> tuple[float, int, list[EventShare]]:
        """Says which events of a record its score is made of.

        Args:
          model: the trained one.
          split: where the record is.
          index: of the record, from 0.

        Returns:
          The probability that the model gives to label 1, the true label, and the events by falling share.

        Raises:
          UserError: if the split has no such record.
        """
        records = self._splits[split]
        if not 0 <= index < len(records):
            raise UserError(f"{records.source} has no record {index + 1}: it has {len(records):,}")
        record = records[index]
        examples = ExampleList(self.encode(_One(records, record)), by="variable")
        ((log_odds, shares),) = model.predict(predict_shares, examples, self.batch_spec)
        names = [records.names[number] for number in record.variables]
        columns = (names, record.values.tolist(), record.times.tolist(), zip(*shares, strict=True))
        events = [EventShare(*event) for event in zip(*columns, strict=False)]  # behind the events, shares of padding
        return 1 / (1 + math.exp(-log_odds)), record.label, sorted(events, key=lambda event: -event.weight)

    def _check_names(self, records: Records) -> np.ndarray:
        """Returns the number of each variable of the records; raises UserError unless they are the known ones."""
        number = {scale["name"]: place for place, scale in enumerate(self.scales)}
        for name in records.names:
            if name not in number:
                raise UserError(f"{records.source}: the training split has no column {name!r}: exclude it")
        for name in number:
            if name not in records.names:
                raise UserError(f"{records.source}: no column {name!r}, which the training split has")
        return np.array([number[name] for name in records.names], np.int32)


class _One:
    """One record of many, alone."""

    def __init__(self, records: Records, record: Record):
        self.source, self.names, self._record = records.source, records.names, record

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(self._record.variables)])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Record:
        return [self._record][index]


def event_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the labels of records.

    Args:
      model: of the kind "events": `model(variable, value, time, event_mask, rngs=...)` gives the logits of classes.
      batch: "variable" [B, T] int32, "value" and "time" [B, T] float32, "event_mask" [B, T] bool, "label" [B] int32
        and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      What `summed_cross_entropy` gives for records; `num_tokens` counts the events read.
    """
    output = summed_cross_entropy(_logits(model, batch, rngs=rngs), batch["label"], batch["row_weights"])
    return output._replace(num_tokens=batch["event_mask"].sum(dtype=jnp.float32))


def predict_log_odds(model: Any, batch: dict[str, Array]) -> Float[Array, " B"]:
    """The log-odds of label 1; for `TrainedModel.predict`."""
    return _log_odds(_logits(model, batch))


def predict_shares(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, " B"], Float[Array, "B N T"]]:
    """The log-odds of label 1, and the share of each event in each mean that is pooled; for `TrainedModel.predict`."""
    logits, maps = _logits(model, batch, return_attention=True)
    (weights,) = maps.values()
    return _log_odds(logits), weights[:, :, 0]


def _logits(model: Any, batch: dict[str, Array], **options: Any) -> Any:
    return model(batch["variable"], batch["value"], batch["time"], batch["event_mask"], **options)


def _log_odds(logits: Float[Array, "B 2"]) -> Float[Array, " B"]:
    return logits[:, 1] - logits[:, 0]
