"""Classification of pairs of sentences by a model of two inputs, such as decomposable attention.

The first sentence of a pair is the premise, the second the hypothesis; in attention maps they are source and target.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.data.batching.batches import BatchSpec, Example, ExampleList, LoaderOptions
from tfx_jax.data.sources.labeled import LabeledPair
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import documented, fraction
from tfx_jax.models.config import MakesModel, ModelConfig, require_kind
from tfx_jax.tasks.artifacts import setup_json, setup_tokenizer
from tfx_jax.tasks.classification import LABEL_ARRAYS, check_labels, class_loss, label_arrays, labels_of
from tfx_jax.tasks.files import few_boundaries
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import PairAttention, TrainedModel, drawable_pair, pair_attention
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, PlannedTask, TaskConfig
from tfx_jax.tasks.text.classification import LabeledData, TextLabelTask

Pairs = Sequence[LabeledPair]


class SentencePairModelConfig(MakesModel, Protocol):
    """Configuration of a model of the kind "sentence_pair".

    Attributes:
      labels: classes, set by the task.
      pad_id: padding token, set by the task.
    """

    labels: tuple[str, ...]
    pad_id: int


def _pair_data() -> LabeledData:
    return LabeledData(dataset="grammar_pairs", tokenizer="words")


@documented
@dataclasses.dataclass
class SentencePairConfig(TaskConfig):
    """Predicts how two sentences are related."""

    data: LabeledData = dataclasses.field(default_factory=_pair_data)
    lowercase: bool = False  # whether to lower-case texts before tokenization
    swapped_labels: str = ""  # labels whose pairs are also learned in reverse order, separated by commas
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model compares two sentences, and that the data have two."""
        require_kind(model, "sentence_pair", "classification of sentence pairs")
        self.data.validate(model)
        if self.data.dataset == "grammar" or (self.data.dataset == "files" and not self.data.second_column):
            raise UserError(
                'config.task.data has single texts: choose config.task.data.dataset="grammar_pairs", or name '
                "first_column, second_column and label_column of files"
            )

    def tiny(self) -> None:
        self.data.tiny()
        self.data.dataset, self.swapped_labels = "grammar_pairs", ""

    def setup(self, model: SentencePairModelConfig, splits: Splits[Pairs], artifacts: Artifacts) -> "SentencePairTask":
        """Trains or loads the tokenizer, and collects the labels of the training split."""
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: self.texts(splits["train"]), kind=self.data.tokenizer, family="bert"
        )
        labels = setup_json(artifacts, "labels.json", lambda: labels_of(splits["train"]))
        model = dataclasses.replace(cast(Any, model), labels=tuple(labels), pad_id=tokenizer.pad_id)
        return SentencePairTask(self, model, splits, tokenizer)

    def planned(self, model: SentencePairModelConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(("premise", "hypothesis"), (np.int32, LENGTH))
        batch = planned_batch(self.data, options, LABEL_ARRAYS | arrays)
        model = dataclasses.replace(cast(Any, model), labels=("one", "other"))
        return PlannedTask(SentencePairTask(self, model, NO_DATA, NO_DATA), batch)

    def plain(self, text: str) -> str:
        """Returns a text as it is passed to the tokenizer."""
        return text.lower() if self.lowercase else text

    def texts(self, pairs: Pairs) -> Iterator[str]:
        """Yields both sentences of all pairs as they are passed to the tokenizer."""
        return (self.plain(text) for pair in pairs for text in (pair.first, pair.second))


def _logits(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None = None) -> Float[Array, "B C"]:
    return model(batch["premise"], batch["hypothesis"], rngs=rngs)


class SentencePairTask(TextLabelTask[SentencePairConfig, SentencePairModelConfig]):
    """Classification of sentence pairs."""

    logits = staticmethod(_logits)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: examples of similar length together."""
        data, pad_id = self.config.data, self.model_config.pad_id
        pad_values = {"premise": pad_id, "hypothesis": pad_id}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values=pad_values)

    def rows(self, split: Split) -> Pairs:
        """Returns the pairs of a split; training adds those of `swapped_labels` in reverse order.

        Raises:
          UserError: if a swapped label does not occur in the training split.
        """
        pairs = self._splits[split]
        if split != "train":
            return pairs
        swapped = {label.strip() for label in self.config.swapped_labels.split(",") if label.strip()}
        if unknown := swapped - {*self.labels}:
            raise UserError(
                f"config.task.swapped_labels: {min(unknown)!r} must be one of the labels {', '.join(self.labels)}"
            )
        swapped_pairs = [LabeledPair(pair.second, pair.first, pair.label) for pair in pairs if pair.label in swapped]
        return [*pairs, *swapped_pairs]

    def encode(self, rows: Pairs) -> ExampleList:
        """Returns one example per pair; its sentences are cut, then padded to the longer one.

        Raises:
          UserError: if a label does not occur in the training split.
        """
        check_labels(rows, self.labels)
        firsts = self.tokenizer.encode_batch([self.config.plain(pair.first) for pair in rows])
        seconds = self.tokenizer.encode_batch([self.config.plain(pair.second) for pair in rows])
        warn_shortened(
            [*firsts, *seconds], self.config.data.max_length, what="sentences", effect="only their beginnings are read"
        )
        examples = [
            self._padded(first, second) | label_arrays(self.label_ids[pair.label])
            for first, second, pair in zip(firsts, seconds, rows, strict=True)
        ]
        return ExampleList(examples, by="premise")

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return sentence_pair_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def attention_example(self, model: TrainedModel) -> PairAttention | None:
        texts = ((pair.first, pair.second) for pair in self._splits["validation"])
        pair = drawable_pair(texts, lambda text: self.tokenizer.encode(self.config.plain(text)))
        return None if pair is None else self.attention(model, *pair)

    def attention(self, model: TrainedModel, source: str, target: str | None = None) -> PairAttention:
        """Computes the attention maps of one pair.

        Args:
          model: the trained model.
          source: the first sentence, or premise.
          target: the second sentence, or hypothesis.

        Returns:
          The maps of `pair_attention`, float32 with one head, [1, S, T] and [1, T, S], and the tokens of each sentence.
          Sentences longer than `max_length` are cut, with a warning.

        Raises:
          UserError: if the second sentence is missing or blank.
        """
        if target is None or is_blank(target):
            raise UserError("a pair needs a second sentence: give --target=SENTENCE")
        limit = self.config.data.max_length
        token_ids = self.tokenizer.encode_batch([self.config.plain(text) for text in (source, target)])
        warn_shortened(token_ids, limit, what="sentences", effect="only their beginnings are read")
        first, second = (ids[:limit] for ids in token_ids)
        pieces = self.tokenizer.pieces
        return PairAttention(pair_attention(model, first, second), pieces(first), pieces(second))

    def _padded(self, first: Sequence[int], second: Sequence[int]) -> Example:
        """Returns the tokens of both sentences, cut to `max_length` and padded to the longer one, each [T] int32."""
        sentences = [list(tokens)[: self.config.data.max_length] for tokens in (first, second)]
        padded = np.full((2, max(map(len, sentences))), self.model_config.pad_id, np.int32)
        for row, tokens in zip(padded, sentences, strict=True):
            row[: len(tokens)] = tokens
        premise, hypothesis = padded
        return {"premise": premise, "hypothesis": hypothesis}


def sentence_pair_loss(
    model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the labels of pairs.

    Args:
      model: model of the kind "sentence_pair": `model(premise, hypothesis, rngs=...)` returns the logits of the labels
        of each pair; `model.config.pad_id` is padding.
      batch: "premise" and "hypothesis" [B, T] int32, "label" [B] int32 and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      The output of `class_loss`; `num_tokens` counts the tokens of both sentences.
    """
    is_read = jnp.stack([batch["premise"], batch["hypothesis"]]) != model.config.pad_id
    return class_loss(_logits(model, batch, rngs), batch, is_read, label_smoothing=label_smoothing)
