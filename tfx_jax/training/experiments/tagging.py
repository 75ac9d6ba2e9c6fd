"""Tagging of words, such as finding the names in a sentence, with a BERT (Devlin et al., 2019, section 5.3)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching import Example
from tfx_jax.data.conll import TaggedSentence, read_tagged
from tfx_jax.data.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.models.bert_heads import BertTagger
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.tagging import (
    IGNORED,
    align_tags,
    entity_scores,
    predict_tags,
    repair_tags,
    tag_names,
    tagging_loss,
    tags_of_words,
)
from tfx_jax.toy_grammar import grammar_tagged
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.bert import BertExperiment, text_row
from tfx_jax.training.experiments.examples import GRAMMAR_SIZES
from tfx_jax.training.step import Params


class TaggingExperiment(BertExperiment[TaggedSentence]):
    """A BERT that gives each word a BIO tag, read off its first subword."""

    scores = (
        Score("f1", "entity F1", " %", note="exact entities of all labels"),
        Score("precision", "precision", " %"),
        Score("recall", "recall", " %"),
    )
    token = "word"
    model_class = BertTagger
    pad_values: ClassVar[Mapping[str, int]] = {"targets": IGNORED}

    def load_split(self, split: Split) -> Sequence[TaggedSentence]:
        """Words and their tags; an entity that begins with I begins with B."""
        data = self.config.data
        if data.dataset == "grammar":
            return grammar_tagged(split, GRAMMAR_SIZES[split])
        sentences = read_tagged(epath.Path(data.data_dir) / getattr(data, f"{split}_file"))
        return [TaggedSentence(sentence.words, repair_tags(sentence.tags)) for sentence in sentences]

    def texts(self, examples: Sequence[TaggedSentence]) -> Iterable[str]:
        """The words of each sentence, with blanks between them."""
        return (" ".join(example.words) for example in examples)

    def labels_of(self, examples: Sequence[TaggedSentence]) -> tuple[str, ...]:
        """All tags: "O", and B and I of each label of an entity."""
        return tuple(tag_names(tag[2:] for example in examples for tag in example.tags if tag != "O"))

    def rows(self, examples: Sequence[TaggedSentence]) -> list[Example]:
        """A row for each sentence, as much of it as `max_length` holds."""
        number = {label: index for index, label in enumerate(self.labels)}
        for tag in (tag for example in examples for tag in example.tags):
            if tag not in number:
                raise UserError(f"the tag {tag!r} is none of the {len(number)} of the training split")
        pieces = iter(self.tokenizer.encode_batch([word for example in examples for word in example.words]))
        max_length, rows = self.config.data.max_length, []
        for example in examples:
            tokens, targets = align_tags(
                [next(pieces) for _ in example.words],
                [number[tag] for tag in example.tags],
                unk_id=cast(int, self.tokenizer.unk_id),
                max_length=max_length - 2,
            )
            row = text_row(self.tokenizer, tokens.tolist(), [], max_length)
            rows.append(row | {"targets": np.pad(targets, 1, constant_values=IGNORED)})
        return rows

    def predict_batch(self, model: BertTagger, batch: dict[str, Array]) -> Array:
        """The likeliest tag of each token."""
        return predict_tags(model, batch)

    def loss(self, model: BertTagger, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `tagging_loss`."""
        return tagging_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Tags every sentence; words that did not fit into the row are outside of entities."""
        examples = self.split(split)
        rows = self.rows(examples)
        predicted = [
            self._tags_of_words(tags, row, len(example.words))
            for tags, row, example in zip(self.predict(params, rows), rows, examples, strict=True)
        ]
        precision, recall, f1, support = entity_scores(predicted, [example.tags for example in examples])
        text = f"entity F1 {f1:.2f} %, precision {precision:.2f} %, recall {recall:.2f} %, {support:,} entities"
        return Evaluation({"f1": f1, "precision": precision, "recall": recall}, text)

    def _tags_of_words(self, predicted: Sequence[int], row: Example, num_words: int) -> list[str]:
        targets = row["targets"]
        found = tags_of_words(np.array(predicted)[: len(targets)], targets, num_words)
        return [self.labels[tag] for tag in found]
