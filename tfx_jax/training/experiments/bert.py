"""What all experiments that fine-tune a BERT share: labels, a head, rows of tokens and segments."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from etils import epath

from tfx_jax.data.batching import BatchSpec, Example
from tfx_jax.data.hf_tokenizer import HFTokenizer
from tfx_jax.data.next_sentence import pair_inputs
from tfx_jax.errors import UserError
from tfx_jax.training.experiments.examples import ExamplesExperiment, Record, made_once
from tfx_jax.training.flops import stack_flops


class BertExperiment(ExamplesExperiment[Record]):
    """A BERT with a head, trained on examples; subclasses say how these become rows, a loss and scores.

    Rows have "tokens", "segments" and "is_token" [T] among their arrays.

    Attributes:
      pad_values: what padding is in the arrays of a row, where it is not 0.
      labels: of the training split, in the order of their ids; kept in the workdir.
    """

    family = "bert"
    length_of = "tokens"
    pad_values: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def texts(self, examples: Sequence[Record]) -> Iterable[str]:
        """All text of some examples."""

    @abc.abstractmethod
    def labels_of(self, examples: Sequence[Record]) -> tuple[str, ...]:
        """The labels of some examples in the order of their ids; none for a head without."""

    def tokenizer_text(self) -> Iterable[str]:
        """All text of the training split."""
        return self.texts(self.split("train"))

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads tokenizer and labels of `workdir`, or makes them from the training split and saves them there."""
        super().open(workdir, can_make=can_make)
        if None in (self.tokenizer.cls_id, self.tokenizer.sep_id, self.tokenizer.pad_id):
            raise UserError(f"the tokenizer of {workdir} has not all of BERT's special tokens")
        labels = made_once(workdir, "labels.json", lambda: self.labels_of(self.split("train")), can_make=can_make)
        self.labels: tuple[str, ...] = tuple(labels)

    @property
    def sizes(self) -> Any:
        """The model's configuration, with the vocabulary and the labels that it really has."""
        sizes = super().sizes
        return dataclasses.replace(sizes, labels=self.labels or sizes.labels)

    @property
    def batch_spec(self) -> BatchSpec:
        """Rows of similar length together."""
        pad_values = {"tokens": cast(int, self.tokenizer.pad_id), **self.pad_values}
        return BatchSpec(self.boundaries, self.config.data.tokens_per_batch, pad_values)

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        return stack_flops(self.sizes, *shapes["tokens"], num_predicted=0)


def text_row(tokenizer: HFTokenizer, first: Sequence[int], second: Sequence[int], max_length: int) -> Example:
    """One text or two as BERT reads them, cut to `max_length`: "tokens", "segments" and "is_token", each [T]."""
    tokens, segments = pair_inputs(
        first,
        second,
        max_length=min(max_length, len(first) + len(second) + (3 if len(second) else 2)),
        cls_id=cast(int, tokenizer.cls_id),
        sep_id=cast(int, tokenizer.sep_id),
        pad_id=cast(int, tokenizer.pad_id),
    )
    return {"tokens": tokens, "segments": segments, "is_token": np.ones(len(tokens), bool)}
