"""Span corruption: spans of a text are dropped, and the model generates them (Raffel et al., 2020, section 3.1.4)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching.batches import BatchSpec, LoaderOptions
from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.objectives.span_corruption import (
    MEAN_SPAN_LENGTH,
    NOISE_DENSITY,
    NUM_SENTINELS,
    CorruptedTexts,
    Noise,
    longest_text,
    num_sentinels,
    sentinel_ids,
    span_corruption_lengths,
)
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.config import EncoderDecoderConfig, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_tokenizer
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.tasks.token_prediction import TokenPredictionBase, first_cut

_EVALUATION_SEED = 0  # seed of the spans, the same for all runs, so that their losses are comparable


@documented
@dataclasses.dataclass
class SpanCorruptionConfig(TaskConfig):
    """Generates the spans that are dropped from plain text, or the whole text.

    All documents form one stream without separators, as in the authors' program (`reduce_concat_tokens`). It is cut
    into texts whose sources, after dropping spans, have `data.max_length` tokens.
    """

    data: TextData = dataclasses.field(default_factory=TextData)
    # Fraction of the tokens that are dropped, above 0. With more, a step predicts more tokens; the paper saw little
    # difference between 0.1 and 0.25, and worse results with 0.5 (section 3.3.3)
    noise_density: float = fraction(NOISE_DENSITY)
    mean_span_length: float = at_least(1, MEAN_SPAN_LENGTH)  # of the dropped spans, in tokens
    # What is generated: the dropped "spans", or the whole "text" as in BART, which is several times as many tokens
    targets: str = one_of(("spans", "text"), "spans")
    label_smoothing: float = fraction(0.0)
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is an encoder-decoder, and that the length needs no more sentinels than T5 has."""
        require_kind(model, "encoder_decoder", "span corruption")
        self.data.validate(model)
        if not self.noise_density:
            raise UserError("config.task.noise_density=0.0 drops nothing that could be predicted: set it to 0.15")
        length = self.data.max_length
        if length < 3:
            raise UserError(
                f"config.task.data.max_length={length} is too short for a span, its surroundings and EOS: raise it"
            )
        needed = num_sentinels(self.text_length, **self.noise)
        if needed > NUM_SENTINELS:
            raise UserError(
                f"config.task.data.max_length={length} needs {needed} sentinels in a target, but T5's tokenizers have "
                f"{NUM_SENTINELS}: lower max_length or noise_density, or raise mean_span_length"
            )
        if 0 < (positions := getattr(model, "learned_positions", 0)) < max(self.lengths):
            raise UserError(
                f"sources and targets have {self.lengths} tokens with config.task.noise_density={self.noise_density}, "
                f"more than config.model.learned_positions={positions}: lower noise_density or max_length"
            )

    @property
    def noise(self) -> Noise:
        """Density and mean length of the spans, as arguments of `tfx_jax.data.objectives.span_corruption`."""
        return Noise(noise_density=self.noise_density, mean_span_length=self.mean_span_length)

    @property
    def text_length(self) -> int:
        """Tokens of a text before spans are dropped."""
        return longest_text(self.data.max_length, **self.noise)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a source and of a target, EOS included."""
        return span_corruption_lengths(self.text_length, **self.noise, whole_text=self.targets == "text")

    def setup(
        self, model: EncoderDecoderConfig, splits: Splits[TextDocuments], artifacts: Artifacts
    ) -> "SpanCorruptionTask":
        """Trains or loads the tokenizer, which has T5's sentinels."""
        kind = self.data.tokenizer
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: splits["train"].to_train(kind), kind=kind, family="t5"
        )
        return SpanCorruptionTask(self, model, splits, tokenizer)

    def planned(self, model: EncoderDecoderConfig, options: LoaderOptions) -> PlannedTask:
        source_length, target_length = self.lengths
        arrays = {"source": (np.int32, LENGTH), "target": (np.int32, target_length)}
        batch = planned_batch(self.data, options, arrays, length=source_length)
        return PlannedTask(SpanCorruptionTask(self, model, NO_DATA, NO_DATA), batch)


class SpanCorruptionTask(TokenPredictionBase[SpanCorruptionConfig, EncoderDecoderConfig, TextDocuments]):
    """Span corruption of a text; every epoch has new cuts and new spans."""

    metrics = (
        MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
        MetricInfo("accuracy", "token accuracy", " %"),
    )
    unit = "target token"

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all sources have one length, and all targets another."""
        source_length, target_length = self.config.lengths
        pad_values = {"source": self.model_config.pad_id, "target": self.model_config.pad_id}
        return BatchSpec(
            (source_length,),
            self.config.data.tokens_per_batch,
            pad_values=pad_values,
            fixed_lengths={"target": target_length},
        )

    def make_epochs(self, seed: int) -> Callable[[int], CorruptedTexts]:
        """Returns `epoch_examples(epoch)`: every epoch has new cuts and new spans."""
        stream = self._stream("train")

        def cut(epoch: int) -> CorruptedTexts:
            return self._corrupted(stream, (seed, epoch), start=first_cut(seed, epoch, self.config.text_length))

        return cut

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return translation_loss(model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss)

    def make_eval_examples(self, split: Split) -> CorruptedTexts:
        """Returns the texts of a split, with the same spans each time."""
        return self._corrupted(self._stream(split), (_EVALUATION_SEED,))

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the metrics of all target tokens."""
        values = {"loss": float(sums["nll"].mean), "accuracy": 100 * float(sums["accuracy"].mean)}
        return eval_result(self.metrics, values, f"{sums['nll'].weight:,.0f} target tokens")

    def _corrupted(self, stream: np.ndarray, seed: tuple[int, ...], *, start: int = 0) -> CorruptedTexts:
        """Returns the texts of a stream, from position `start` on, with spans that depend on `seed`."""
        return CorruptedTexts(
            stream,
            self.config.text_length,
            seed,
            start=start,
            sentinels=sentinel_ids(self.tokenizer.vocab_size),
            eos_id=self.model_config.eos_id,
            pad_id=self.model_config.pad_id,
            **self.config.noise,
            whole_text=self.config.targets == "text",
        )

    def _stream(self, split: Split) -> np.ndarray:
        """Returns the tokens of all documents of a split, [number of tokens] int32; raises UserError for too few."""
        tokens, length = encode_documents(self.tokenizer, self._splits[split]).tokens, self.config.text_length
        if len(tokens) < length:
            raise UserError(
                f"the {split} split has {len(tokens):,} tokens, but must have at least {length:,}, for one row: name "
                "more text, or lower config.task.data.max_length or config.task.noise_density"
            )
        return tokens
