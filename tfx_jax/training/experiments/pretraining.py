"""Pre-training of a BERT on plain text: hidden tokens and next sentences (Devlin et al., 2019, section 3.1)."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching import BatchSpec, ExampleSource
from tfx_jax.data.pretraining import PretrainingExamples, make_examples, split_sentences
from tfx_jax.data.splits import Split
from tfx_jax.data.wikitext import running_text
from tfx_jax.errors import UserError
from tfx_jax.models.bert_heads import BertPretraining
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.pretraining import num_chosen, pretraining_loss
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.texts import TextExperiment, read_documents
from tfx_jax.training.flops import stack_flops
from tfx_jax.training.step import Params

_RATE = 0.15  # of the tokens that are to be predicted
_LEAST_LENGTH = 8  # [CLS], two [SEP] and a few tokens of each segment


class PretrainingExperiment(TextExperiment[list[list[str]]]):
    """A BERT and plain text, of which it learns hidden tokens and whether two segments are neighbours.

    Every epoch hides other tokens and makes other pairs. A document is an article, a line, or what stands between empty
    lines of a file, as `config.data.documents` says; a split of the data is the sentences of each document, those of
    `split_sentences`.
    """

    scores = (
        Score("loss", "masked LM loss", " nats", digits=4, is_loss=True, note="a fixed choice of hidden tokens"),
        Score("masked_accuracy", "masked accuracy", " %"),
        Score("next_sentence_accuracy", "next sentence accuracy", " %"),
    )
    model_class = BertPretraining
    family = "bert"

    def load_split(self, split: Split) -> list[list[str]]:
        """The sentences of each document of a split.

        Raises:
          UserError: if it cannot be read, or it has no pairs of sentences.
        """
        texts = read_documents(self.data, split)
        is_tokenised = self.data.documents == "articles"
        if self.data.documents == "articles":
            texts = [running_text(text) for text in texts]
        elif self.data.documents == "file":
            texts = [part for text in texts for part in re.split(r"\n\s*\n", text)]
        documents = [split_sentences(text, is_tokenised=is_tokenised) for text in texts]
        found = sum(map(bool, documents))
        if found < 2 or max(map(len, documents)) < 2:
            raise UserError(
                f"next sentence prediction needs two documents, one of two sentences or more, in the {split} split: "
                f'config.data.documents="{self.data.documents}" finds {found}{", none with two" * (found > 1)}'
            )
        return documents

    def tokenizer_text(self) -> Iterable[str]:
        """The documents of the training split."""
        return map("\n".join, self.split("train"))

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training split and saves it there."""
        if self.data.max_length < _LEAST_LENGTH:
            raise UserError(
                f"config.data.max_length={self.data.max_length} is too short for pairs: {_LEAST_LENGTH} will do"
            )
        super().open(workdir, can_make=can_make)
        if None in self._specials.values():
            raise UserError(f"the tokenizer of {workdir} has not all of BERT's special tokens")

    def make_epochs(self) -> Callable[[int], ExampleSource]:
        """Other pairs and other hidden tokens in each epoch."""
        encoded, seed = self._encode("train"), self.config.seed
        return lambda epoch: self._examples(encoded, np.random.default_rng((seed, epoch, 1)))

    @property
    def batch_spec(self) -> BatchSpec:
        """Three lengths: each is compiled, and nine rows in ten are full."""
        length = self.data.max_length
        boundaries = (length // 4, length // 2, length)
        return BatchSpec(boundaries, self.data.tokens_per_batch, {"tokens": cast(int, self.tokenizer.pad_id)})

    def loss(self, model: BertPretraining, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `pretraining_loss`."""
        config = self.config
        return pretraining_loss(
            model, batch, rngs, rate=_RATE, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, length = shapes["tokens"]
        return stack_flops(self.sizes, rows, length, num_predicted=num_chosen(length, _RATE))

    def make_evaluation_rows(self, split: Split) -> ExampleSource:
        """A split once, with the same pairs and the same hidden tokens each time."""
        return self._examples(self._encode(split), np.random.default_rng(0))

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Predicts the hidden tokens and the next sentences of a split."""
        metrics = self.metrics(params, split)
        hidden, pairs = metrics["accuracy"], metrics["next_sentence_accuracy"]
        scores = {
            "loss": float(metrics["nll"].mean),
            "masked_accuracy": 100 * float(hidden.mean),
            "next_sentence_accuracy": 100 * float(pairs.mean),
        }
        spelled = ", ".join(f"{score.title} {score.spell(scores[score.name])}" for score in self.scores)
        return Evaluation(scores, f"{spelled}, {hidden.weight:,.0f} hidden tokens of {pairs.weight:,.0f} pairs")

    def _examples(self, documents: list[list[list[int]]], rng: np.random.Generator) -> PretrainingExamples:
        tokenizer, ids = self.tokenizer, cast(dict[str, int], self._specials)
        special = {*ids.values(), *({tokenizer.unk_id} - {None})}
        return make_examples(
            documents,
            rng,
            max_length=self.data.max_length,
            vocab_size=tokenizer.vocab_size,
            special_ids=cast(set[int], special),
            rate=_RATE,
            **ids,
        )

    def _encode(self, split: Split) -> list[list[list[int]]]:
        """The tokens of each sentence of each document."""
        documents = self.split(split)
        encoded = iter(self.tokenizer.encode_batch([sentence for document in documents for sentence in document]))
        return [[next(encoded) for _ in document] for document in documents]

    @property
    def _specials(self) -> dict[str, int | None]:
        return {name: getattr(self.tokenizer, name) for name in ("cls_id", "sep_id", "pad_id", "mask_id")}
