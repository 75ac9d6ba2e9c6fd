"""Pre-training of BERT: masked language model and next sentence prediction (Devlin et al., 2019, section 3.1)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.data.batching.batches import BatchSpec, ExampleSource, LoaderOptions
from tfx_jax.data.objectives.bert_pretraining import PretrainingExamples, make_examples, split_sentences
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.sources.wikitext import running_text
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction
from tfx_jax.models.bert import BertConfig, BertPretraining
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.tasks.artifacts import require_tokens, setup_tokenizer
from tfx_jax.tasks.loss import LossOutput, Metric, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.token_prediction import TokenPredictionBase

_RATE = 0.15  # fraction of tokens to predict
_MIN_LENGTH = 8  # [CLS], two [SEP] and a few tokens of each segment

Documents = list[list[str]]
"""Sentences of each document."""


@documented
@dataclasses.dataclass
class BertPretrainingConfig(TaskConfig):
    """Predicts masked tokens, and whether two segments of text are consecutive.

    A document is an article, a line, or the text between empty lines of a file, according to `data.documents`.
    """

    data: TextData = dataclasses.field(default_factory=TextData)
    label_smoothing: float = fraction(0.0)  # label smoothing of masked tokens
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of masked tokens

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is a BERT, and that a pair of segments fits into the maximum length."""
        require_kind(model, "bert", "BERT's pre-training")
        self.data.validate(model)
        if self.data.max_length < _MIN_LENGTH:
            raise UserError(
                f"config.task.data.max_length={self.data.max_length} must be at least {_MIN_LENGTH}, for pairs of "
                "segments"
            )

    def splits(self) -> Splits[Documents]:
        """Returns the sentences of each document of each split, cut by `split_sentences`."""
        return Splits(self.data.has_split, self._load)

    def setup(self, model: BertConfig, splits: Splits[Documents], artifacts: Artifacts) -> "BertPretrainingTask":
        """Trains or loads the tokenizer, which needs [MASK]."""
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: map("\n".join, splits["train"]), kind=self.data.tokenizer, family="bert"
        )
        require_tokens(tokenizer, artifacts, "mask_id")
        return BertPretrainingTask(self, model, splits, tokenizer)

    def planned(self, model: BertConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(("tokens", "token_type_ids", "targets"), (np.int32, LENGTH))
        arrays |= {"token_mask": (np.bool_, LENGTH), "weights": (np.float32, LENGTH)}
        arrays |= {"next_sentence_label": (np.int32,), "row_weights": (np.float32,)}
        batch = planned_batch(self.data, options, arrays)
        return PlannedTask(BertPretrainingTask(self, model, NO_DATA, NO_DATA), batch)

    def _load(self, split: Split) -> Documents:
        """Reads the sentences of each document of a split; raises UserError if there are too few for pairs."""
        texts = ["".join(document) for document in self.data.load(split).by_document()]
        kind = self.data.documents
        if kind == "articles":
            texts = [running_text(text) for text in texts]
        elif kind == "file":
            texts = [part for text in texts for part in _between_blank_lines(text)]
        documents = [split_sentences(text, is_tokenized=kind == "articles") for text in texts]
        num_documents = sum(map(bool, documents))  # without empty ones
        if num_documents < 2 or max(map(len, documents)) < 2:
            raise UserError(
                f"next sentence prediction needs two documents, one of two sentences or more, in the {split} split: "
                f'config.task.data.documents="{kind}" finds {num_documents}{", none with two" * (num_documents > 1)}'
            )
        return documents


def _between_blank_lines(text: str) -> Iterator[str]:
    """Yields the parts of a text that blank lines separate."""
    for lines_are_blank, lines in itertools.groupby(text.split("\n"), is_blank):
        if not lines_are_blank:
            yield "\n".join(lines)


class BertPretrainingTask(TokenPredictionBase[BertPretrainingConfig, BertConfig, Documents]):
    """Pre-training of a BERT on a text; every epoch has new masks and new pairs."""

    metrics = (
        MetricInfo("loss", "masked LM loss", " nats", digits=4, is_loss=True, note="a fixed choice of masked tokens"),
        MetricInfo("masked_accuracy", "masked accuracy", " %"),
        MetricInfo("next_sentence_accuracy", "next sentence accuracy", " %"),
    )

    def make_model(self, *, rngs: nnx.Rngs) -> BertPretraining:
        return BertPretraining(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches, with three lengths: each is compiled, and nine in ten examples are full."""
        data = self.config.data
        boundaries = (data.max_length // 4, data.max_length // 2, data.max_length)
        pad_values = {"tokens": cast(int, self.tokenizer.pad_id)}
        return BatchSpec(boundaries, data.tokens_per_batch, pad_values=pad_values)

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns `epoch_examples(epoch)`: every epoch has new pairs and masks."""
        encoded = self._encode("train")
        return lambda epoch: self._examples(encoded, np.random.default_rng((seed, epoch, 1)))

    def loss(self, model: BertPretraining, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return pretraining_loss(
            model, batch, rngs, rate=_RATE, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def make_eval_examples(self, split: Split) -> ExampleSource:
        """Returns a split with the same pairs and masks each time."""
        return self._examples(self._encode(split), np.random.default_rng(0))

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the metrics of masked tokens and next sentences."""
        masked, pairs = sums["accuracy"], sums["next_sentence_accuracy"]
        values = {
            "loss": float(sums["nll"].mean),
            "masked_accuracy": 100 * float(masked.mean),
            "next_sentence_accuracy": 100 * float(pairs.mean),
        }
        return eval_result(self.metrics, values, f"{masked.weight:,.0f} masked tokens of {pairs.weight:,.0f} pairs")

    def _examples(self, documents: list[list[list[int]]], rng: np.random.Generator) -> PretrainingExamples:
        """Returns pairs of segments of the documents, which are tokens of sentences, with masks drawn from `rng`."""
        tokenizer, ids = self.tokenizer, cast(dict[str, int], self._special_ids)
        never_masked = {*ids.values(), *({tokenizer.unk_id} - {None})}  # a tokenizer may have no unknown token
        return make_examples(
            documents,
            rng,
            max_length=self.config.data.max_length,
            vocab_size=tokenizer.vocab_size,
            special_ids=cast(set[int], never_masked),
            rate=_RATE,
            **ids,
        )

    def _encode(self, split: Split) -> list[list[list[int]]]:
        """Returns the tokens of each sentence of each document of a split."""
        documents = self._splits[split]
        # One call for all sentences, whose results are then grouped by document again.
        encoded = iter(self.tokenizer.encode_batch([sentence for document in documents for sentence in document]))
        return [[next(encoded) for _ in document] for document in documents]

    @property
    def _special_ids(self) -> dict[str, int | None]:
        """Special tokens, by the names of the arguments of `make_examples`."""
        return {name: getattr(self.tokenizer, name) for name in ("cls_id", "sep_id", "pad_id", "mask_id")}


def pretraining_loss(
    model: Any,
    batch: dict[str, Array],
    rngs: nnx.Rngs | None,
    *,
    rate: float = 0.15,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> LossOutput:
    """Computes the loss of the masked tokens and of next sentence prediction.

    The paper's loss is the sum of two means, over masked tokens and over examples. The returned loss divided by its
    weight is exactly that for the given batch, because next sentences are weighted by tokens / examples. If gradients
    are accumulated over parts of a batch or over replicas of `jax.pmap`, each part is such a batch: its mean over
    examples is weighted by its share of masked tokens, not of examples. Both agree if all parts have equally
    many masked tokens per example. A part without masked tokens leaves its next sentences out.

    Args:
      model: a `BertPretraining`, or a `BertMaskedLM`, whose loss has no next sentence prediction.
      batch: "tokens" and "token_type_ids" [B, T] int32, "token_mask" [B, T] bool; "targets" [B, T] int32 and
        "weights" [B, T] float32, 1 at masked tokens, as from `tfx_jax.data.objectives.masked_lm.mask_tokens`; for next
        sentences "next_sentence_label" [B] int32, 1 if the second text is not the next one, and "row_weights" [B]
        float32, 0 for padding examples.
      rngs: stream `dropout`; None means evaluation.
      rate: rate of `mask_tokens`, which limits the masked tokens per example, see `max_predictions`. An example with
        more of them makes the loss NaN.
      label_smoothing: for masked tokens, see `summed_cross_entropy`.
      z_loss_weight: for masked tokens, see `summed_cross_entropy`.

    Returns:
      The output of `summed_cross_entropy` over masked tokens; `num_tokens` counts the tokens read. If the model
      predicts next sentences, there is the metric "next_sentence_accuracy" over examples.
    """
    encoded = model.bert(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"], rngs=rngs)
    positions = masked_positions(batch["weights"], max_predictions(batch["tokens"].shape[1], rate))
    # Only masked tokens get logits, of which there is one for each id of the vocabulary: [B, T] -> [B, P].
    targets = jnp.take_along_axis(batch["targets"], positions, axis=1)
    weights = jnp.take_along_axis(batch["weights"], positions, axis=1)
    sequence = jnp.take_along_axis(encoded.sequence, positions[:, :, None], axis=1)  # [B, P, D]
    output = summed_cross_entropy(
        model.masked_lm(sequence, model.bert.embedding),
        targets,
        weights,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
    )
    # False if an example has more masked tokens than positions were gathered for.
    is_complete = jnp.count_nonzero(weights) == jnp.count_nonzero(batch["weights"])
    total, metrics = output.loss + jnp.where(is_complete, 0.0, jnp.nan), output.metrics
    if hasattr(model, "next_sentence"):
        logits = model.next_sentence(encoded.pooled)
        next_sentence = summed_cross_entropy(logits, batch["next_sentence_label"], batch["row_weights"])
        # Divided by the weight of the result, this is the mean over examples.
        total = total + next_sentence.loss * output.weight / jnp.maximum(next_sentence.weight, 1.0)
        metrics = metrics | {"next_sentence_accuracy": next_sentence.metrics["accuracy"]}
    return LossOutput(total, output.weight, metrics, num_tokens=batch["token_mask"].sum(dtype=jnp.float32))


def max_predictions(length: int, rate: float) -> int:
    """Returns the maximum number of tokens that `mask_tokens` masks in an example of `length` tokens.

    It masks max(1, round(rate * n)) of the n maskable tokens, with ties to even. This does not decrease with n, and n
    is at most `length`.

    >>> max_predictions(128, 0.15)
    19
    """
    return max(1, round(rate * length))


def masked_positions(weights: Float[Array, "B T"], count: int) -> Int[Array, "B P"]:
    """Returns P = `count` positions of each example: first those with a weight, in order, then those without.

    Uses a stable sort, because `jax.lax.top_k` would gather all examples on every device.

    >>> masked_positions(jnp.array([[0.0, 1.0, 0.0, 1.0]]), 3).tolist()
    [[1, 3, 0]]
    """
    return jnp.argsort(weights == 0, axis=1, stable=True)[:, :count]  # False, a position with a weight, sorts first
