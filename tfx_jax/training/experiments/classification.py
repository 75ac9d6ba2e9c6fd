"""Classification of texts and of pairs of texts with a BERT (Devlin et al., 2019, section 4.1)."""

from collections.abc import Iterable, Sequence

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching import Example
from tfx_jax.data.labelled import LabelledPair, LabelledText, read_labelled, read_labelled_pairs
from tfx_jax.data.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.models.bert_heads import BertClassifier
from tfx_jax.tasks.classification import class_scores, classification_loss, predict_classes
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.toy_grammar import grammar_labelled, grammar_labelled_pairs
from tfx_jax.training.config import LabelledConfig
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.bert import BertExperiment, text_row
from tfx_jax.training.experiments.examples import GRAMMAR_SIZES
from tfx_jax.training.step import Params


class ClassificationExperiment(BertExperiment[LabelledText | LabelledPair]):
    """A BERT that gives each text, or each pair of texts, a label."""

    scores = (Score("accuracy", "accuracy", " %"), Score("macro_f1", "macro F1", " %"))
    model_class = BertClassifier

    def load_split(self, split: Split) -> Sequence[LabelledText | LabelledPair]:
        """Texts or pairs and their labels."""
        return load_labelled_split(self.config.data, split)

    def texts(self, examples: Sequence[LabelledText | LabelledPair]) -> Iterable[str]:
        """All text of some examples."""
        return (text for example in examples for text in example[:-1])

    def labels_of(self, examples: Sequence[LabelledText | LabelledPair]) -> tuple[str, ...]:
        """The labels of some examples, in alphabetical order."""
        return tuple(sorted({example.label for example in examples}))

    def rows(self, examples: Sequence[LabelledText | LabelledPair]) -> list[Example]:
        """A row for each text or pair."""
        number = {label: index for index, label in enumerate(self.labels)}
        for example in examples:
            if example.label not in number:
                raise UserError(f"the label {example.label!r} is none of the {len(number)} of the training split")
        texts = zip(*(example[:-1] for example in examples), strict=True)
        firsts, *seconds = (self.tokenizer.encode_batch(side) for side in texts)
        return [
            text_row(self.tokenizer, first, second, self.config.data.max_length)
            | {"label": np.array(number[example.label], np.int32), "row_weights": np.array(1, np.float32)}
            for first, second, example in zip(firsts, *(seconds or [[[]] * len(firsts)]), examples, strict=True)
        ]

    def predict_batch(self, model: BertClassifier, batch: dict[str, Array]) -> Array:
        """The likeliest class of each row."""
        return predict_classes(model, batch)

    def loss(self, model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `classification_loss`."""
        return classification_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Classifies every text."""
        examples = self.split(split)
        labels = [self.labels[index] for index in self.predict(params, self.rows(examples))]
        accuracy, macro_f1 = class_scores(labels, [example.label for example in examples], self.labels)
        text = f"accuracy {accuracy:.2f} %, macro F1 {macro_f1:.2f} %, {len(examples):,} texts"
        return Evaluation({"accuracy": accuracy, "macro_f1": macro_f1}, text)


def load_labelled_split(data: LabelledConfig, split: Split) -> Sequence[LabelledText | LabelledPair]:
    """Reads a split of labelled texts or pairs; labels that training does not have are refused.

    Raises:
      UserError: if it cannot be read.
    """
    if data.dataset == "grammar":
        return grammar_labelled(split, GRAMMAR_SIZES[split])
    if data.dataset == "grammar_pairs":
        return grammar_labelled_pairs(split, GRAMMAR_SIZES[split])
    path = epath.Path(data.data_dir) / getattr(data, f"{split}_file")
    if not data.second_column:
        return read_labelled(path)
    return read_labelled_pairs(
        path, first_column=data.first_column, second_column=data.second_column, label_column=data.label_column
    )
