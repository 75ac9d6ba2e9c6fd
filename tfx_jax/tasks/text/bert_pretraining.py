"""The pre-training of BERT: masked language model and next sentence prediction (Devlin et al., 2019, section 3.1)."""

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
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.token_prediction import TokenPredictionBase

_RATE = 0.15  # of the tokens that are to be predicted
_LEAST_LENGTH = 8  # [CLS], two [SEP] and a few tokens of each segment

Documents = list[list[str]]
"""The sentences of each document."""


@documented
@dataclasses.dataclass
class BertPretrainingConfig(TaskConfig):
    """To predict masked tokens, and whether two segments of plain text are neighbors.

    A document is an article, a line, or what stands between empty lines of a file, as `data.documents` says.
    """

    data: TextData = dataclasses.field(default_factory=TextData)
    label_smoothing: float = fraction(0.0)  # of the masked tokens, as the next
    z_loss: float = at_least(0, 0.0)  # weight of log^2 Z in the loss of a token

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "bert", "BERT's pre-training")
        self.data.validate(model)
        if self.data.max_length < _LEAST_LENGTH:
            raise UserError(
                f"config.task.data.max_length={self.data.max_length} is too short for pairs: {_LEAST_LENGTH} will do"
            )

    def splits(self) -> Splits[Documents]:
        """Returns the sentences of each document of each split, those of `split_sentences`."""
        return Splits(self.data.has_split, self._load)

    def setup(self, model: BertConfig, splits: Splits[Documents], artifacts: Artifacts) -> "BertPretrainingTask":
        tokenizer, model = setup_tokenizer(
            artifacts, model, lambda: map("\n".join, splits["train"]), kind=self.data.tokenizer, family="bert"
        )
        require_tokens(tokenizer, artifacts, "mask_id")
        return BertPretrainingTask(self, model, splits, tokenizer)

    def planned(self, model: BertConfig, options: LoaderOptions) -> PlannedTask:
        dtypes = dict.fromkeys(("tokens", "token_type_ids", "targets"), np.int32)
        batch = planned_batch(
            self.data,
            options,
            dtypes=dtypes | {"token_mask": np.bool_, "weights": np.float32},
            scalars={"next_sentence_label": np.int32, "row_weights": np.float32},
        )
        return PlannedTask(BertPretrainingTask(self, model, NO_DATA, NO_DATA), batch)

    def _load(self, split: Split) -> Documents:
        texts = ["".join(document) for document in self.data.load(split).by_document()]
        kind = self.data.documents
        if kind == "articles":
            texts = [running_text(text) for text in texts]
        elif kind == "file":
            texts = [part for text in texts for part in _between_blank_lines(text)]
        documents = [split_sentences(text, is_tokenized=kind == "articles") for text in texts]
        found = sum(map(bool, documents))
        if found < 2 or max(map(len, documents)) < 2:
            raise UserError(
                f"next sentence prediction needs two documents, one of two sentences or more, in the {split} split: "
                f'config.task.data.documents="{kind}" finds {found}{", none with two" * (found > 1)}'
            )
        return documents


def _between_blank_lines(text: str) -> Iterator[str]:
    for is_between, lines in itertools.groupby(text.split("\n"), is_blank):
        if not is_between:
            yield "\n".join(lines)


class BertPretrainingTask(TokenPredictionBase[BertPretrainingConfig, BertConfig, Documents]):
    """The pre-training of a BERT on a text; every epoch masks other tokens and makes other pairs."""

    metrics = (
        MetricInfo("loss", "masked LM loss", " nats", digits=4, is_loss=True, note="a fixed choice of masked tokens"),
        MetricInfo("masked_accuracy", "masked accuracy", " %"),
        MetricInfo("next_sentence_accuracy", "next sentence accuracy", " %"),
    )

    def make_model(self, *, rngs: nnx.Rngs) -> BertPretraining:
        return BertPretraining(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches, of three lengths: each is compiled, and nine examples in ten are full."""
        data = self.config.data
        boundaries = (data.max_length // 4, data.max_length // 2, data.max_length)
        return BatchSpec(boundaries, data.tokens_per_batch, {"tokens": cast(int, self.tokenizer.pad_id)})

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns the training examples by the number of the epoch: other pairs and other masked tokens in each."""
        encoded = self._encode("train")
        return lambda epoch: self._examples(encoded, np.random.default_rng((seed, epoch, 1)))

    def loss(self, model: BertPretraining, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        config = self.config
        return pretraining_loss(
            model, batch, rngs, rate=_RATE, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def make_eval_examples(self, split: Split) -> ExampleSource:
        """Returns a split with the same pairs and the same masked tokens each time."""
        return self._examples(self._encode(split), np.random.default_rng(0))

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the scores of the masked tokens and the next sentences."""
        masked, pairs = sums["accuracy"], sums["next_sentence_accuracy"]
        values = {
            "loss": float(sums["nll"].mean),
            "masked_accuracy": 100 * float(masked.mean),
            "next_sentence_accuracy": 100 * float(pairs.mean),
        }
        return eval_result(self.metrics, values, f"{masked.weight:,.0f} masked tokens of {pairs.weight:,.0f} pairs")

    def _examples(self, documents: list[list[list[int]]], rng: np.random.Generator) -> PretrainingExamples:
        tokenizer, ids = self.tokenizer, cast(dict[str, int], self._specials)
        special = {*ids.values(), *({tokenizer.unk_id} - {None})}
        return make_examples(
            documents,
            rng,
            max_length=self.config.data.max_length,
            vocab_size=tokenizer.vocab_size,
            special_ids=cast(set[int], special),
            rate=_RATE,
            **ids,
        )

    def _encode(self, split: Split) -> list[list[list[int]]]:
        """Returns the tokens of each sentence of each document."""
        documents = self._splits[split]
        encoded = iter(self.tokenizer.encode_batch([sentence for document in documents for sentence in document]))
        return [[next(encoded) for _ in document] for document in documents]

    @property
    def _specials(self) -> dict[str, int | None]:
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
    """Scores the chosen tokens, and no others, and whether the second text of each row follows the first.

    The paper's loss is the sum of two means, over chosen tokens and over rows. The loss returned here over its weight
    is exactly that for the batch given: next sentences are weighed by tokens / rows. If gradients are
    accumulated over parts of a batch, or over the replicas of `jax.pmap`, "batch" is a part: its mean over rows has the
    weight of its share of all chosen tokens, not of all rows, which is the same where the parts have equally many
    tokens per row. A part without any chosen token leaves its next sentences out.

    Args:
      model: a `BertPretraining`, or a `BertMaskedLM`, which has no next sentence prediction, so none is in its loss.
      batch: "tokens" and "token_type_ids" [B, T] int32, "token_mask" [B, T] bool; "targets" [B, T] int32 and
        "weights" [B, T] float32, 1 where a token was chosen, as `tfx_jax.data.objectives.masked_lm.mask_tokens` gives
        them; for
        the next sentences "next_sentence_label" [B] int32, 1 where the second text is another, and "row_weights" [B]
        float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      rate: of `mask_tokens`, which decides how many tokens of a row there is room for, see `max_predictions`. A row
        with more of them makes the loss NaN.
      label_smoothing: of the masked tokens, see `summed_cross_entropy`.
      z_loss_weight: of the masked tokens, see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives for chosen tokens; `num_tokens` counts those read; and, if the model predicts
      next sentences, there is the metric "next_sentence_accuracy" over rows.
    """
    encoded = model.bert(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"], rngs=rngs)
    places = masked_positions(batch["weights"], max_predictions(batch["tokens"].shape[1], rate))
    targets, weights = (jnp.take_along_axis(batch[name], places, axis=1) for name in ("targets", "weights"))
    sequence = jnp.take_along_axis(encoded.sequence, places[:, :, None], axis=1)
    output = summed_cross_entropy(
        model.masked_lm(sequence, model.bert.embedding),
        targets,
        weights,
        label_smoothing=label_smoothing,
        z_loss_weight=z_loss_weight,
    )
    is_complete = jnp.count_nonzero(weights) == jnp.count_nonzero(batch["weights"])
    total, metrics = output.loss + jnp.where(is_complete, 0.0, jnp.nan), output.metrics
    if hasattr(model, "next_sentence"):
        logits = model.next_sentence(encoded.pooled)
        other = summed_cross_entropy(logits, batch["next_sentence_label"], batch["row_weights"])
        total = total + other.loss * output.weight / jnp.maximum(other.weight, 1.0)
        metrics = metrics | {"next_sentence_accuracy": other.metrics["accuracy"]}
    return LossOutput(total, output.weight, metrics, num_tokens=batch["token_mask"].sum(dtype=jnp.float32))


def max_predictions(length: int, rate: float) -> int:
    """The most tokens that `mask_tokens` chooses in a row of `length` at a rate.

    It chooses max(1, round(rate * n)) of the n tokens that it may choose, with ties to even; that does not fall with n,
    and n is at most `length`.

    >>> max_predictions(128, 0.15)
    19
    """
    return max(1, round(rate * length))


def masked_positions(weights: Float[Array, "B T"], count: int) -> Int[Array, "B P"]:
    """The first P = `count` positions of each row that have a weight, then the first that have none.

    A stable sort: unlike `jax.lax.top_k`, which gathers all rows on every device, it leaves each row where it is.

    >>> masked_positions(jnp.array([[0.0, 1.0, 0.0, 1.0]]), 3).tolist()
    [[1, 3, 0]]
    """
    return jnp.argsort(weights == 0, axis=1, stable=True)[:, :count]
