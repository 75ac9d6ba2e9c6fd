"""Classification of texts and of pairs of texts with a BERT (Devlin et al., 2019, section 4.1)."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.data.batching.batches import BatchSpec, ExampleList, LoaderOptions
from tfx_jax.data.sources.columns import is_table, read_columns
from tfx_jax.data.sources.labeled import (
    LabeledPair,
    LabeledText,
    check_repeated,
    is_labeled,
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
from tfx_jax.tasks.artifacts import setup_json, setup_tokenizer
from tfx_jax.tasks.classification import (
    LABEL_ARRAYS,
    ClassificationBase,
    check_labels,
    class_loss,
    label_arrays,
    labels_of,
)
from tfx_jax.tasks.files import (
    GRAMMAR_SIZES,
    FileData,
    check_files,
    check_share,
    few_boundaries,
    split_paths,
    split_rows,
)
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.shortened import warn_shortened
from tfx_jax.tasks.task import Artifacts, PlannedTask, TaskConfig
from tfx_jax.tasks.text.answers import NO_CLASS, Prediction, class_predictions
from tfx_jax.tasks.text.bert_examples import bert_example
from tfx_jax.tasks.text.text_attention import TextAttention

LabeledTexts = Sequence[LabeledText] | Sequence[LabeledPair]
Config = TypeVar("Config")
Model = TypeVar("Model")


@documented
@dataclasses.dataclass
class LabeledData(FileData):
    """Source of labeled texts or pairs of texts, and size of examples and batches."""

    dataset: str = one_of(
        ("grammar", "grammar_pairs", "files"), "grammar"
    )  # grammar: built-in texts; grammar_pairs: pairs of them
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    # files: lines of label, TAB, text, or fastText's `__label__NAME text`; or, with the column names below, TSV, .csv,
    # .jsonl or .parquet.
    train_file: str = ""
    validation_file: str = ""
    validation_share: float = fraction(0.0)  # without validation_file: fraction of the training rows held out for it
    test_file: str = ""
    first_column: str = ""  # files: column of the text, or of the first text of a pair
    second_column: str = ""  # files: column of the second text of a pair; empty for single texts
    label_column: str = ""
    tokenizer: str = "wordpiece"  # characters, words, wordpiece, bpe or unigram; ignored with init_from
    max_length: int = at_least(1, 128)  # tokens of an input, including special tokens; longer texts are cut
    tokens_per_batch: int = at_least(1, 2_048)  # positions of a global batch, including padding

    def load(self, split: Split) -> LabeledTexts:
        """Reads the texts or pairs of a split with their labels.

        Raises:
          UserError: if it cannot be read.
        """
        if self.dataset == "grammar":
            return grammar_labeled(split, GRAMMAR_SIZES[split])
        if self.dataset == "grammar_pairs":
            return grammar_labeled_pairs(split, GRAMMAR_SIZES[split])
        texts = cast(LabeledTexts, split_rows(self, split, self._read_files))
        if split == "train":
            check_repeated(texts, split_paths(self, split)[0])
        return texts

    def _read_files(self, paths: Sequence[epath.Path]) -> list[LabeledText | LabeledPair]:
        """Reads the texts or pairs of several files."""
        return [text for path in paths for text in self._read(path)]

    def _read(self, path: epath.Path) -> LabeledTexts:
        """Reads a file in the format that the names of columns imply; see the fields."""
        first, second, label = self.first_column, self.second_column, self.label_column
        if second:
            return read_labeled_pairs(path, first_column=first, second_column=second, label_column=label)
        if first:
            return read_labeled_columns(path, text_column=first, label_column=label)
        return read_labeled(path)

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        if self.first_column:
            names = inputs_of(self)
            return read_columns(path, names, allow_blank=True) if is_table(path, names) else None
        return (row[:-1] for row in read_labeled(path)) if is_labeled(path, labels) else None

    def validate(self, model: ModelConfig) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        check_files(self, model, what="row")
        check_share(self)
        if bool(self.first_column) != bool(self.label_column) or (self.second_column and not self.first_column):
            raise UserError(
                "config.task.data.first_column, second_column and label_column must be given together, or all be "
                "empty; only second_column stays empty for single texts"
            )

    def tiny(self) -> None:
        """Sets a small built-in data set."""
        self.dataset = "grammar_pairs" if self.second_column else "grammar"
        self.max_length, self.tokens_per_batch = 64, 512


@documented
@dataclasses.dataclass
class ClassificationConfig(TaskConfig):
    """Predicts the label of each text, or of each pair of texts."""

    data: LabeledData = dataclasses.field(default_factory=LabeledData)
    label_smoothing: float = fraction(0.0)

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "bert", "classification")
        self.data.validate(model)

    def setup(self, model: BertConfig, splits: Splits[LabeledTexts], artifacts: Artifacts) -> "ClassificationTask":
        """Trains or loads the tokenizer, and collects the labels of the training split."""
        tokenizer, model = setup_tokenizer(
            artifacts,
            model,
            lambda: (text for example in splits["train"] for text in example[:-1]),
            kind=self.data.tokenizer,
            family="bert",
        )
        labels = setup_json(artifacts, "labels.json", lambda: labels_of(splits["train"]))
        return ClassificationTask(self, dataclasses.replace(model, labels=tuple(labels)), splits, tokenizer)

    def planned(self, model: BertConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(("tokens", "token_type_ids"), (np.int32, LENGTH)) | {"token_mask": (np.bool_, LENGTH)}
        batch = planned_batch(self.data, options, LABEL_ARRAYS | arrays)
        model = dataclasses.replace(model, labels=("one", "other"))
        return PlannedTask(ClassificationTask(self, model, NO_DATA, NO_DATA), batch)


class TextLabelTask(TextAttention, ClassificationBase[Config, Model, Any]):
    """Base class of the tasks that classify texts or pairs of them.

    Attributes:
      tokenizer: turns text into tokens.
    """

    unit = "token"
    empty_answer = NO_CLASS

    def __init__(self, config: Config, model_config: Model, splits: Splits[Any], tokenizer: HFTokenizer):
        super().__init__(config, model_config, splits)
        self.tokenizer = tokenizer

    def check_validation(self) -> None:
        """Raises UserError if the validation split has a label that the training split lacks."""
        check_labels(self._splits["validation"], self.labels, "the validation split")

    @property
    def inputs(self) -> tuple[str, ...]:
        return inputs_of(cast(Any, self.config).data)

    def describe_row(self, row: Any, index: int) -> str:
        return " / ".join(row[:-1])[:200]

    def attention_inputs(self) -> Iterator[Sequence[str]]:
        return (row[:-1] for row in self._splits["validation"])

    def answer(self, model: TrainedModel, rows: Sequence[Sequence[str]]) -> list[Prediction]:
        """Returns the most likely label of each text or pair, and all probabilities."""
        examples = self.encode(unlabeled(rows, self.labels[0]))
        return class_predictions(self.labels, model.predict(self.probabilities, examples, self.batch_spec))


def _logits(model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None = None) -> Float[Array, "B C"]:
    return model(batch["tokens"], batch["token_type_ids"], token_mask=batch["token_mask"], rngs=rngs)


class ClassificationTask(TextLabelTask[ClassificationConfig, BertConfig]):
    """Classification with a BERT."""

    logits = staticmethod(_logits)

    def make_model(self, *, rngs: nnx.Rngs) -> BertClassifier:
        return BertClassifier(self.model_config, rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: those of similar length together."""
        data = self.config.data
        pad_values = {"tokens": cast(int, self.tokenizer.pad_id)}
        return BatchSpec(few_boundaries(data.max_length), data.tokens_per_batch, pad_values=pad_values)

    def encode(self, rows: LabeledTexts) -> ExampleList:
        """Returns an example for each text or pair.

        Raises:
          UserError: if a label does not occur in the training split.
        """
        check_labels(rows, self.labels)
        sides = zip(*(row[:-1] for row in rows), strict=True)  # all first texts and, for pairs, all second texts
        firsts, *seconds = (self.tokenizer.encode_batch(side) for side in sides)
        limit = self.config.data.max_length - 2 - len(seconds)  # without [CLS] and a [SEP] after each text
        token_ids = [list(itertools.chain(*texts)) for texts in zip(firsts, *seconds, strict=True)]
        warn_shortened(token_ids, limit, what="texts", effect="only their beginnings are read")
        second_texts = seconds[0] if seconds else [[]] * len(firsts)
        examples = []
        for first, second, row in zip(firsts, second_texts, rows, strict=True):
            arrays = bert_example(self.tokenizer, first, second, self.config.data.max_length)
            examples.append(arrays | label_arrays(self.label_ids[row.label]))
        return ExampleList(examples)

    def loss(self, model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return classification_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)


def inputs_of(data: LabeledData) -> tuple[str, ...]:
    """Returns the names of the one or two texts of an input: those of their columns, if the configuration has any."""
    if data.second_column:
        return data.first_column, data.second_column
    return ("first text", "second text") if data.dataset == "grammar_pairs" else (data.first_column or "text",)


def unlabeled(rows: Sequence[Sequence[str]], label: str) -> LabeledTexts:
    """Returns texts (rows of one string) or pairs (rows of two) as examples with an arbitrary `label`."""
    texts: list[Any] = []
    for row in rows:
        example_type = LabeledText if len(row) == 1 else LabeledPair
        texts.append(example_type._make((*row, label)))
    return texts


def classification_loss(
    model: BertClassifier, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the classes of texts.

    Args:
      model: `model(tokens, token_type_ids, token_mask=..., rngs=...)` returns the logits of the classes, [B, C].
      batch: "tokens" and "token_type_ids" [B, T] int32, "token_mask" [B, T] bool, "label" [B] int32, the id of
        a class, and "row_weights" [B] float32, 0 for padding.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      The output of `class_loss`; `num_tokens` counts the tokens read.
    """
    return class_loss(_logits(model, batch, rngs), batch, batch["token_mask"], label_smoothing=label_smoothing)
