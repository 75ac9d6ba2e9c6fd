"""Classification of long sequences and of pairs of them, token by token or byte by byte, as in Long Range Arena.

Tay et al. (2020, https://arxiv.org/abs/2011.04006): ListOps, classes of texts, and whether two texts belong together.
Every sequence is padded to the greatest length, as there, so that attentions are compared on one shape of a batch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import grain
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.data.batching import Batch, BatchSpec, Example, LoaderOptions, train_batches
from tfx_jax.data.splits import Split, Splits
from tfx_jax.fields import documented, fraction
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.classification import CLASS_METRICS, class_result, class_scores
from tfx_jax.tasks.cross_entropy import summed_cross_entropy
from tfx_jax.tasks.long_range_data import LabelledSequences, ListOpsData, PassagePairData, SectionData
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask

_ARRAYS = ("tokens", "other_tokens")


@documented
@dataclasses.dataclass
class LongRangeConfig:
    """To give each long sequence, or each pair of them, a label."""

    data: ListOpsData | SectionData | PassagePairData = dataclasses.field(default_factory=ListOpsData)
    label_smoothing: float = fraction(0.0)

    can_shard_positions: ClassVar[bool] = True

    def validate(self, model: ModelConfig) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        require_kind(model, "long_sequence", "classification of long sequences")
        self.data.validate()

    def tiny(self) -> None:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        self.data.tiny()

    def splits(self) -> Splits[LabelledSequences]:
        """Returns the sequences and labels of each split."""
        return Splits(self.data.has_split, self.data.load)

    def setup(
        self, model: LongEncoderConfig, splits: Splits[LabelledSequences], artifacts: Artifacts
    ) -> "LongRangeTask":
        """See `tfx_jax.tasks.task.TaskConfig`; there are no artifacts: ids and labels follow from the configuration."""
        del artifacts
        return LongRangeTask(self, self._fitted(model), splits)

    def planned(self, model: LongEncoderConfig, options: LoaderOptions) -> PlannedTask:
        """See `tfx_jax.tasks.task.TaskConfig`."""
        batch = planned_batch(
            self.data,
            options,
            dtypes=dict.fromkeys(_ARRAYS[: self.data.num_sequences], np.int32),
            scalars={"label": np.int32, "row_weights": np.float32},
        )
        return PlannedTask(LongRangeTask(self, self._fitted(model), NO_DATA), batch)

    def _fitted(self, model: LongEncoderConfig) -> LongEncoderConfig:
        data = self.data
        sizes = {"vocab_size": data.vocab_size, "num_sequences": data.num_sequences}
        return dataclasses.replace(model, labels=data.labels, **sizes)


class SequenceExamples:
    """Sequences as an `ExampleSource`: arrays are made when they are asked for, since many of them are long."""

    def __init__(self, sequences: LabelledSequences, labels: tuple[str, ...]):
        """Takes the sequences, and all labels in the order of their ids."""
        self._sequences, self._number = sequences, {label: index for index, label in enumerate(labels)}
        self.lengths = np.array([max(map(len, one.sequences)) for one in sequences], np.int64)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Example:
        arrays, label = self._sequences[index]
        tokens = {name: array.astype(np.int32) for name, array in zip(_ARRAYS, arrays, strict=False)}
        return tokens | {"label": np.array(self._number[label], np.int32), "row_weights": np.array(1, np.float32)}


class LongRangeTask:
    """Classification of long sequences.

    Attributes:
      labels: all of them, in the order of their ids.
    """

    metrics: tuple[MetricInfo, ...] = CLASS_METRICS
    unit = "token"

    def __init__(self, config: LongRangeConfig, model_config: LongEncoderConfig, splits: Splits[LabelledSequences]):
        """Takes what `LongRangeConfig.setup` made."""
        self.config, self.model_config = config, model_config
        self.labels = model_config.labels
        self._splits = splits

    def make_model(self, *, shard_attention: ShardAttention | None = None, rngs: nnx.Rngs) -> Any:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.make(shard_attention=shard_attention, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all padded to the greatest length."""
        return BatchSpec((self.config.data.max_length,), self.config.data.tokens_per_batch)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        """See `tfx_jax.tasks.task.Task`."""
        examples, multiple = self.encode(self._splits["train"]), options.length_multiple
        length = -(-self.config.data.max_length // multiple) * multiple
        return train_batches(lambda epoch: examples, self.batch_spec._replace(boundaries=(length,)), options)

    def encode(self, sequences: LabelledSequences) -> SequenceExamples:
        """Returns an example for each sequence or pair."""
        return SequenceExamples(sequences, self.labels)

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `long_range_loss`."""
        return long_range_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `tfx_jax.tasks.task.Task`."""
        return self.model_config.training_flops(*shapes["tokens"])

    def predict(self, model: TrainedModel, sequences: LabelledSequences) -> list[str]:
        """Returns the likeliest label of each sequence or pair; the true one is not looked at."""
        found = model.predict(predict_labels, self.encode(sequences), self.batch_spec)
        return [self.labels[index] for index in found]

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Classifies everything in a split."""
        sequences = self._splits[split]
        references = [one.label for one in sequences]
        return class_result(class_scores(self.predict(model, sequences), references, self.labels), len(sequences))


def long_range_loss(
    model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the labels of sequences.

    Args:
      model: of the kind "long_sequence": `model(tokens, other_tokens, rngs=...)` gives each row the logits of its
        labels.
      batch: "tokens" and, of pairs, "other_tokens" [B, T] int32, 0 for padding, "label" [B] int32 and "row_weights"
        [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives for rows; `num_tokens` counts those read.
    """
    sides = [batch[name] for name in _ARRAYS if name in batch]
    output = summed_cross_entropy(
        model(*sides, rngs=rngs), batch["label"], batch["row_weights"], label_smoothing=label_smoothing
    )
    return output._replace(num_tokens=(jnp.stack(sides) != 0).sum(dtype=jnp.float32))


def predict_labels(model: Any, batch: dict[str, Array]) -> Int[Array, " B"]:
    """The id of each row's likeliest label; for `TrainedModel.predict`."""
    return model(*(batch[name] for name in _ARRAYS if name in batch)).argmax(axis=-1)
