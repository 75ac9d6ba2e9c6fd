"""Classification of texts and of pairs of texts with a BERT (Devlin et al., 2019, section 4.1)."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Float, Int

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, ExampleList, LoaderOptions, train_batches
from tfx_jax.data.sources.labeled import (
    LabeledPair,
    LabeledText,
    check_repeated,
    read_labeled,
    read_labeled_columns,
    read_labeled_pairs,
)
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.bert import BertClassifier, BertConfig
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.synthetic.grammar import grammar_labeled, grammar_labeled_pairs
from tfx_jax.tasks.artifacts import setup_json
from tfx_jax.tasks.files import GRAMMAR_SIZES, check_files, few_boundaries, has_file, split_paths
from tfx_jax.tasks.loss import LossOutput, summed_cross_entropy
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask
from tfx_jax.tasks.text.answers import NO_CLASS, Prediction, class_predictions
from tfx_jax.tasks.text.bert_examples import bert_example, setup_bert_tokenizer

LabeledTexts = Sequence[LabeledText] | Sequence[LabeledPair]


@documented
@dataclasses.dataclass
class LabeledData:
    """Where labeled texts, or pairs of texts, come from, and how much of them makes an example and a batch."""

    dataset: str = one_of(("grammar", "grammar_pairs", "files"), "grammar")  # built-in texts, or pairs of them
    # files: the folder of those below, of which each may be several: "a.txt,b.txt", or "part-*.txt" in their order
    data_dir: str = ""
    # Lines of label, TAB, text; or, with names of columns below, TSV, .csv or .jsonl.
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    first_column: str = ""  # of the text, or of the first of a pair
    second_column: str = ""  # of a pair; empty for single texts
    label_column: str = ""
    tokenizer: str = "wordpiece"  # or another of `tfx_jax.data.tokenizers.train.KINDS`; without effect with init_from
    max_length: int = at_least(1, 128)  # tokens of an input, special ones included; longer texts are cut
    tokens_per_batch: int = at_least(1, 2_048)  # positions of a global batch, padding included

    def has_split(self, split: Split) -> bool:
        """Tells whether the configuration names a split."""
        return has_file(self, split)

    def load(self, split: Split) -> LabeledTexts:
        """Reads the texts or pairs of a split, and their labels.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return grammar_labeled(split, GRAMMAR_SIZES[split])
        if self.dataset == "grammar_pairs":
            return grammar_labeled_pairs(split, GRAMMAR_SIZES[split])
        paths = split_paths(self, split)
        texts = cast(LabeledTexts, [text for path in paths for text in self._read(path)])
        if split == "train":
            check_repeated(texts, paths[0])
        return texts

    def _read(self, path: epath.Path) -> LabeledTexts:
        first, second, label = self.first_column, self.second_column, self.label_column
        if second:
            return read_labeled_pairs(path, first_column=first, second_column=second, label_column=label)
        if first:
            return read_labeled_columns(path, text_column=first, label_column=label)
        return read_labeled(path)

    def validate(self, model: ModelConfig) -> None:
        """Checks how fields go together.

        Raises:
          UserError: if they do not.
        """
        check_files(self, model, what="row")
        if bool(self.first_column) != bool(self.label_column) or (self.second_column and not self.first_column):
            raise UserError(
                "config.task.data.first_column, second_column and label_column go together, or all are empty; single "
                "texts have no second_column"
            )

    def tiny(self) -> None:
        """Sets a little built-in text."""
        self.dataset = "grammar_pairs" if self.second_column else "grammar"
        self.max_length, self.tokens_per_batch = 64, 512


CLASS_METRICS = (MetricInfo("accuracy", "accuracy", " %"), MetricInfo("macro_f1", "macro F1", " %"))
"""The fields of `ClassScores`."""


@documented
@dataclasses.dataclass
class ClassificationConfig:
    """To give each text, or each pair of texts, a label."""

    data: LabeledData = dataclasses.field(default_factory=LabeledData)
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "bert", "classification")
        self.data.validate(model)

    def tiny(self) -> None:
        self.data.tiny()

    def splits(self) -> Splits[LabeledTexts]:
        """Returns the texts and labels of each split."""
        return Splits(self.data.has_split, self.data.load)

    def setup(self, model: BertConfig, splits: Splits[LabeledTexts], artifacts: Artifacts) -> "ClassificationTask":
        tokenizer, model = setup_bert_tokenizer(
            artifacts,
            model,
            lambda: (text for example in splits["train"] for text in example[:-1]),
            kind=self.data.tokenizer,
        )
        labels = setup_json(artifacts, "labels.json", lambda: labels_of(splits["train"]))
        return ClassificationTask(self, dataclasses.replace(model, labels=tuple(labels)), splits, tokenizer)

    def planned(self, model: BertConfig, options: LoaderOptions) -> PlannedTask:
        batch = planned_batch(
            self.data,
            options,
            dtypes=dict.fromkeys(("tokens", "token_type_ids"), np.int32) | {"token_mask": np.bool_},
            scalars={"label": np.int32, "row_weights": np.float32},
        )
        model = dataclasses.replace(model, labels=("one", "other"))
        return PlannedTask(ClassificationTask(self, model, NO_DATA, NO_DATA), batch)


class ClassificationTask:
    """Classification with a BERT.

    Attributes:
      tokenizer: turns text into tokens.
      labels: those of the training split, in the order of their ids.
    """

    metrics = CLASS_METRICS
    unit = "token"

    def __init__(
        self,
        config: ClassificationConfig,
        model_config: BertConfig,
        splits: Splits[LabeledTexts],
        tokenizer: HFTokenizer,
    ):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.labels = model_config.labels
        self._splits = splits

    def make_model(self, *, rngs: nnx.Rngs) -> BertClassifier:
        return BertClassifier(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: those of similar length together."""
        data, pad_values = self.config.data, {"tokens": cast(int, self.tokenizer.pad_id)}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        check_validation(self._splits, self.labels)
        examples = ExampleList(self.encode(self._splits["train"]))
        return train_batches(lambda epoch: examples, self.batch_spec, options)

    def encode(self, texts: LabeledTexts) -> list[Example]:
        """Returns an example for each text or pair.

        Raises:
          UserError: for a label that the training split has not.
        """
        number = {label: index for index, label in enumerate(self.labels)}
        check_labels(texts, self.labels)
        sides = zip(*(text[:-1] for text in texts), strict=True)
        firsts, *seconds = (self.tokenizer.encode_batch(side) for side in sides)
        limit = self.config.data.max_length - 2 - len(seconds)
        whole = [list(itertools.chain(*parts)) for parts in zip(firsts, *seconds, strict=True)]
        warn_shortened(whole, limit, what="texts", effect="only their beginnings are read")
        return [
            bert_example(self.tokenizer, first, second, self.config.data.max_length)
            | {"label": np.array(number[text.label], np.int32), "row_weights": np.array(1, np.float32)}
            for first, second, text in zip(firsts, *(seconds or [[[]] * len(firsts)]), texts, strict=True)
        ]

    def loss(self, model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return classification_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return self.model_config.training_flops(*shapes["tokens"], num_predicted=0)

    def predict(self, model: TrainedModel, texts: LabeledTexts) -> list[str]:
        """Returns the likeliest label of each text or pair."""
        found = model.predict(predict_classes, ExampleList(self.encode(texts)), self.batch_spec)
        return [self.labels[index] for index in found]

    empty_answer = NO_CLASS

    @property
    def inputs(self) -> tuple[str, ...]:
        return inputs_of(self.config.data)

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns the likeliest label of each text or pair, and the probabilities of all."""
        examples = ExampleList(self.encode(unlabeled(rows, self.labels[0])))
        return class_predictions(self.labels, model.predict(class_probabilities, examples, self.batch_spec))

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Classifies every text of a split."""
        texts = self._splits[split]
        return class_result(
            class_scores(self.predict(model, texts), [text.label for text in texts], self.labels), len(texts)
        )


class ClassScores(NamedTuple):
    """How well texts are classified, in percent.

    Attributes:
      accuracy: share of the predictions that are right.
      macro_f1: mean over classes of the harmonic mean of precision and recall, each class alike however rare.
    """

    accuracy: float
    macro_f1: float


def inputs_of(data: LabeledData) -> tuple[str, ...]:
    """Returns what an input consists of, by the names of its columns where it has two."""
    if data.second_column:
        return data.first_column, data.second_column
    return ("first text", "second text") if data.dataset == "grammar_pairs" else (data.first_column or "text",)


def unlabeled(rows: Sequence[Sequence[str]], label: str) -> LabeledTexts:
    """Returns texts or pairs as those of the data, with a label that means nothing."""
    texts: list[Any] = [(LabeledText if len(row) == 1 else LabeledPair)._make((*row, label)) for row in rows]
    return texts


def labels_of(texts: LabeledTexts) -> list[str]:
    """Returns the labels of some texts, in alphabetical order."""
    return sorted({text.label for text in texts})


def check_validation(splits: Splits[Any], labels: Sequence[str]) -> None:
    """Checks before the first step what the first evaluation would stumble over.

    Raises:
      UserError: if the validation split has a label that the training split has not.
    """
    if "validation" in splits:
        check_labels(splits["validation"], labels, "the validation split")


def check_labels(texts: LabeledTexts, labels: Sequence[str], where: str = "") -> None:
    """Checks that all labels are among those of the training split.

    Raises:
      UserError: if one is not; the message names the text by its number in `where`, from 1, if that is given.
    """
    known = set(labels)
    for number, text in enumerate(texts, 1):
        if text.label not in known:
            place = f"{where}, text {number}: " if where else ""
            raise UserError(f"{place}the label {text.label!r} is none of the {len(known)} of the training split")


def class_result(scores: ClassScores, count: int, what: str = "texts") -> EvalResult:
    """Returns what an evaluation of `count` texts, or of what else, found."""
    accuracy, macro_f1 = scores
    return EvalResult(scores._asdict(), f"accuracy {accuracy:.2f} %, macro F1 {macro_f1:.2f} %, {count:,} {what}")


def classification_loss(
    model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the classes of texts.

    Args:
      model: gives each row the logits of its classes.
      batch: "tokens" and "token_type_ids" [B, T] int32, "token_mask" [B, T] bool, "label" [B] int32, the id of
        a class, and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      What `summed_cross_entropy` gives for rows; `num_tokens` counts those read.
    """
    logits = model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"], rngs=rngs)
    output = summed_cross_entropy(logits, batch["label"], batch["row_weights"], label_smoothing=label_smoothing)
    return output._replace(num_tokens=batch["token_mask"].sum(dtype=jnp.float32))


def predict_classes(model: BertClassifier, batch: dict[str, Array]) -> Int[Array, " B"]:
    """The id of each row's likeliest class; for `TrainedModel.predict`.

    `batch` as for `classification_loss`, without labels.
    """
    return model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"]).argmax(axis=-1)


def class_probabilities(model: BertClassifier, batch: dict[str, Array]) -> Float[Array, "B C"]:
    """The probabilities of each row's classes; otherwise as `predict_classes`."""
    logits = model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"])
    return jax.nn.softmax(logits.astype(jnp.float32))


def class_scores(predictions: Sequence[Any], references: Sequence[Any], labels: Sequence[Any]) -> ClassScores:
    """Scores predicted classes.

    The values are those of scikit-learn's `accuracy_score` and of its `f1_score` with `labels` and average="macro",
    times 100: a class that neither occurs nor is predicted has an F1 of 0.

    Args:
      predictions: a class for each text, as its name or its id.
      references: the classes that they should have. (scikit-learn takes them first.)
      labels: all classes there are, each once.

    Raises:
      ValueError: if the sides differ in length or are empty, or a class is none of the labels.

    >>> class_scores(["b", "a", "b", "a"], ["b", "a", "a", "a"], labels=["a", "b"]).accuracy
    75.0
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions cannot be scored by {len(references)} references")
    number = {label: index for index, label in enumerate(labels)}
    strange = {*predictions, *references} - number.keys()
    if strange:
        raise ValueError(f"{min(strange, key=str)!r} is none of the {len(number)} labels")
    found, wanted = (np.array([number[label] for label in side]) for side in (predictions, references))
    correct, predicted, true = (
        np.bincount(classes, minlength=len(number)) for classes in (found[found == wanted], found, wanted)
    )
    f1 = 2 * correct / np.maximum(predicted + true, 1)
    return ClassScores(100 * float((found == wanted).mean()), 100 * float(f1.mean()))
