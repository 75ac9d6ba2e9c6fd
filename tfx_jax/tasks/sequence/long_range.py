"""Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006): ListOps, byte-level texts, matching.

Sequences are classified token by token or byte by byte. Every sequence is padded to the maximum length, as in the
paper, so that attentions are compared on one batch shape.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import grain
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.data.batching.batches import Batch, BatchSpec, Example, LazyExamples, LoaderOptions, train_batches
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.data.sources.wikitext import (
    NUM_BYTE_IDS,
    byte_ids,
    cut_passages,
    draw_pair,
    read_articles,
    running_text,
    sections,
)
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.models.config import ModelConfig, require_kind
from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.synthetic.grammar import grammar_documents, grammar_labeled
from tfx_jax.synthetic.listops import VOCABULARY, draw_expression, evaluate
from tfx_jax.tasks.classification import LABEL_ARRAYS, ClassificationBase, class_loss, label_arrays
from tfx_jax.tasks.files import FileData, check_batch, split_paths
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.task import Artifacts, PlannedTask, TaskConfig

_GRAMMAR_SIZES: dict[Split, int] = {"train": 256, "validation": 64, "test": 64}
_GRAMMAR_LABELS = ("question", "statement")


class LabeledSequence(NamedTuple):
    """One sequence, or two that are compared, with its label.

    Attributes:
      sequences: one or two arrays of ids, [T] each, without padding (id 0).
      label: one of the labels of the data.
    """

    sequences: tuple[np.ndarray, ...]
    label: str


LabeledSequences = Sequence[LabeledSequence]


class SequenceData(Protocol):
    """Common interface of the data of long sequences.

    Attributes:
      vocab_size: number of ids, including padding.
      num_sequences: sequences per example, 1 or 2.
    """

    max_length: int
    tokens_per_batch: int
    vocab_size: ClassVar[int]
    num_sequences: ClassVar[int]

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in the order of their ids."""
        ...

    def has_split(self, split: Split) -> bool:
        """Returns whether the configuration has a split."""
        ...

    def load(self, split: Split) -> LabeledSequences:
        """Reads or generates a split.

        Raises:
          UserError: if that is not possible.
        """
        ...

    def validate(self) -> None:
        """Checks that the fields are consistent.

        Raises:
          UserError: if they are not.
        """
        ...

    def tiny(self) -> None:
        """Sets a small data set that needs no files and little time."""
        ...


@documented
@dataclasses.dataclass
class ListOpsData:
    """ListOps expressions, all generated before training: a minute for the published 100,000."""

    seed: int = at_least(0, 0)  # seed of the expressions, independent of config.seed
    max_depth: int = at_least(2, 10)  # this and the next three: as published
    max_args: int = at_least(2, 10)
    min_length: int = at_least(1, 500)  # minimum number of tokens of an expression
    max_length: int = at_least(1, 2_000)
    num_train: int = at_least(1, 96_000)
    num_heldout: int = at_least(1, 2_000)  # expressions of the validation split and of the test split
    tokens_per_batch: int = at_least(1, 64_000)  # positions of a global batch, including padding

    vocab_size: ClassVar[int] = len(VOCABULARY)
    num_sequences: ClassVar[int] = 1

    @property
    def labels(self) -> tuple[str, ...]:
        """The digits."""
        return tuple(map(str, range(10)))

    def has_split(self, split: Split) -> bool:
        """Returns True: all splits exist."""
        return split in SPLITS

    def load(self, split: Split) -> LabeledSequences:
        """Generates the expressions of a split, each labeled with its value."""
        names = ("max_depth", "max_args", "min_length", "max_length")
        limits: dict[str, int] = {name: getattr(self, name) for name in names}
        count = self.num_train if split == "train" else self.num_heldout
        expressions = (draw_expression(self.seed, split, index, **limits) for index in range(count))
        return [LabeledSequence((tokens,), str(evaluate(tokens))) for tokens in expressions]

    def validate(self) -> None:
        _check_lengths(self)

    def tiny(self) -> None:
        self.max_depth, self.max_args, self.min_length, self.max_length = 3, 4, 4, 24
        self.num_train, self.num_heldout, self.tokens_per_batch = 256, 64, 192


@documented
@dataclasses.dataclass
class SectionData(FileData):
    """Passages of articles as bytes, labeled with the heading of their section.

    "files" are articles in the format of WikiText, each in one split only; sections are cut into consecutive passages.
    "grammar", for tests, are built-in sentences labeled as questions or statements.
    """

    dataset: str = one_of(("grammar", "files"), "grammar")
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    # files: headings, separated by commas; other sections are left out
    headings: str = "Aftermath,Background,Description,History,Legacy,Plot,Production,Reception"
    min_length: int = at_least(1, 1_000)  # bytes; shorter passages are left out
    max_length: int = at_least(1, 4_000)
    tokens_per_batch: int = at_least(1, 128_000)  # positions of a global batch, including padding

    vocab_size: ClassVar[int] = NUM_BYTE_IDS
    num_sequences: ClassVar[int] = 1

    @property
    def labels(self) -> tuple[str, ...]:
        """The headings."""
        if self.dataset == "grammar":
            return _GRAMMAR_LABELS
        return tuple(heading.strip() for heading in self.headings.split(","))

    def load(self, split: Split) -> LabeledSequences:
        """Returns the passages of a split, each labeled with the heading of its section or the kind of its sentence."""
        if self.dataset == "grammar":
            question, statement = _GRAMMAR_LABELS
            sequences = []
            for text in grammar_labeled(split, _GRAMMAR_SIZES[split]):
                label = question if text.label.endswith("question") else statement
                sequences.append(LabeledSequence((byte_ids(text.text)[: self.max_length],), label))
            return sequences
        paths = split_paths(self, split)
        limits = {"min_length": self.min_length, "max_length": self.max_length}
        passages = [
            LabeledSequence((passage,), heading)
            for path in paths
            for article in read_articles(path)
            for heading, text in sections(article)
            if heading in self.labels
            for passage in cut_passages(text, **limits)
        ]
        if not passages:
            raise UserError(
                f"{paths[0]} has no passage of config.task.data.min_length={self.min_length} bytes under these "
                "headings: lower min_length or name other headings"
            )
        return passages

    def validate(self) -> None:
        """Checks the lengths of passages, and that there are two or more different headings."""
        _check_lengths(self)
        if len(set(self.labels)) < max(2, len(self.labels)) or not all(self.labels):
            raise UserError(
                f"config.task.data.headings={self.headings!r} must be at least two different headings, separated by "
                "commas"
            )

    def tiny(self) -> None:
        self.dataset, self.min_length, self.max_length, self.tokens_per_batch = "grammar", 8, 48, 384


@documented
@dataclasses.dataclass
class PassagePairData(FileData):
    """Pairs of passages as bytes; every second pair is from one article, the others from two.

    "files" are articles in the format of WikiText, each in one split only; "grammar", for tests, are built-in
    documents.
    """

    dataset: str = one_of(("grammar", "files"), "grammar")
    # files: folder of the files below; each field may list several, as "a.txt,b.txt" or "part-*.txt" (sorted)
    data_dir: str = ""
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    seed: int = at_least(0, 0)  # seed of the pairs, independent of config.seed
    num_train: int = at_least(2, 20_000)
    num_heldout: int = at_least(2, 2_000)  # pairs of the validation split and of the test split
    min_length: int = at_least(1, 1_000)  # bytes; shorter remainders of articles are dropped
    max_length: int = at_least(1, 4_000)  # bytes of each passage
    tokens_per_batch: int = at_least(1, 128_000)  # positions of each side of a global batch, including padding

    vocab_size: ClassVar[int] = NUM_BYTE_IDS
    num_sequences: ClassVar[int] = 2

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels: whether a pair is from two articles or from one."""
        return ("different", "same")

    def load(self, split: Split) -> LabeledSequences:
        """Returns pairs of passages of a split, labeled with whether both are from one article."""
        if self.dataset == "grammar":
            texts = [" ".join(lines) for lines in grammar_documents(split, _GRAMMAR_SIZES[split])]
            source = f"the built-in {split} split"
        else:
            paths = split_paths(self, split)
            source = str(paths[0])
            texts = [running_text("\n".join(article.lines)) for path in paths for article in read_articles(path)]
        limits = {"min_length": self.min_length, "max_length": self.max_length}
        passages_by_article = (cut_passages(text, **limits) for text in texts)
        articles = [passages for passages in passages_by_article if len(passages) > 1]
        if len(articles) < 2:
            raise UserError(
                f"{source} has {len(articles)} articles of at least two passages, but at least two such articles are "
                "needed"
            )
        count = self.num_train if split == "train" else self.num_heldout
        key = (self.seed, SPLITS.index(split))
        # Pairs alternate between "different" and "same".
        return [
            LabeledSequence(draw_pair(articles, (*key, index), is_same=index % 2 == 1), self.labels[index % 2])
            for index in range(count)
        ]

    def validate(self) -> None:
        _check_lengths(self)

    def tiny(self) -> None:
        self.dataset, self.min_length, self.max_length, self.tokens_per_batch = "grammar", 16, 48, 384
        self.num_train, self.num_heldout = 256, 64


def _check_lengths(data: Any) -> None:
    """Raises UserError unless a batch can hold a sequence, and `min_length` is at most `max_length`."""
    check_batch(data, what="sequence")
    if data.min_length > data.max_length:
        raise UserError(
            f"config.task.data.min_length={data.min_length} must be at most "
            f"config.task.data.max_length={data.max_length}"
        )


_ARRAYS = ("tokens", "other_tokens")  # arrays of a batch: the sequence, or the first and the second of a pair


@documented
@dataclasses.dataclass
class LongRangeConfig(TaskConfig):
    """Predicts the label of each long sequence, or pair of them."""

    data: ListOpsData | SectionData | PassagePairData = dataclasses.field(default_factory=ListOpsData)
    label_smoothing: float = fraction(0.0)

    can_shard_positions: ClassVar[bool] = True

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "long_sequence", "classification of long sequences")
        self.data.validate()

    def setup(
        self, model: LongEncoderConfig, splits: Splits[LabeledSequences], artifacts: Artifacts
    ) -> "LongRangeTask":
        """Sets up the task without artifacts: ids and labels follow from the configuration."""
        del artifacts
        return LongRangeTask(self, self._fitted(model), splits)

    def planned(self, model: LongEncoderConfig, options: LoaderOptions) -> PlannedTask:
        arrays = dict.fromkeys(_ARRAYS[: self.data.num_sequences], (np.int32, LENGTH))
        batch = planned_batch(self.data, options, LABEL_ARRAYS | arrays)
        return PlannedTask(LongRangeTask(self, self._fitted(model), NO_DATA), batch)

    def _fitted(self, model: LongEncoderConfig) -> LongEncoderConfig:
        """Returns the model configuration with the labels and sizes of the data."""
        data = self.data
        sizes = {"vocab_size": data.vocab_size, "num_sequences": data.num_sequences}
        return dataclasses.replace(model, labels=data.labels, **sizes)


def _sequences(batch: dict[str, Array]) -> list[Array]:
    """Returns the one or two arrays of tokens in a batch, each [B, T]."""
    return [batch[name] for name in _ARRAYS if name in batch]


def _logits(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None = None) -> Float[Array, "B C"]:
    return model(*_sequences(batch), rngs=rngs)


class LongRangeTask(ClassificationBase[LongRangeConfig, LongEncoderConfig, LabeledSequences]):
    """Classification of long sequences."""

    logits = staticmethod(_logits)
    unit = "token"

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all are padded to the maximum length."""
        return BatchSpec((self.config.data.max_length,), self.config.data.tokens_per_batch)

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        examples = self.encode(self.rows("train"))
        multiple = options.length_multiple
        length = -(-self.config.data.max_length // multiple) * multiple  # rounded up to a multiple
        spec = self.batch_spec._replace(boundaries=(length,))
        return train_batches(lambda epoch: examples, spec, options)  # the same examples in every epoch

    def encode(self, rows: LabeledSequences) -> LazyExamples:
        lengths = np.array([max(map(len, row.sequences)) for row in rows], np.int64)
        return LazyExamples(rows, self._example, lengths)

    def _example(self, row: LabeledSequence) -> Example:
        """Returns the arrays of a row: "tokens" and, for a pair, "other_tokens", [T] int32, and `LABEL_ARRAYS`."""
        tokens = {name: array.astype(np.int32) for name, array in zip(_ARRAYS, row.sequences, strict=False)}
        return tokens | label_arrays(self.label_ids[row.label])

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return long_range_loss(model, batch, rngs, label_smoothing=self.config.label_smoothing)


def long_range_loss(
    model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None, *, label_smoothing: float = 0.0
) -> LossOutput:
    """Sums the cross entropy of the labels of sequences.

    Args:
      model: model of the kind "long_sequence": `model(tokens, other_tokens, rngs=...)` returns the logits of the labels
        of each example.
      batch: "tokens" and, for pairs, "other_tokens" [B, T] int32 with 0 as padding, "label" [B] int32 and "row_weights"
        [B] float32, 0 for padding examples.
      rngs: stream `dropout`; None means evaluation.
      label_smoothing: see `summed_cross_entropy`.

    Returns:
      The output of `class_loss`; `num_tokens` counts the tokens of all sequences.
    """
    is_read = jnp.stack(_sequences(batch)) != 0
    return class_loss(_logits(model, batch, rngs), batch, is_read, label_smoothing=label_smoothing)
