"""What all experiments that fine-tune a BERT share: examples that fit into memory, a head, one pass to evaluate."""

import abc
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import grain
import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.epochs import Layout, Row, RowList, epoch_batches, one_pass
from tfx_jax.data.hf_tokenizer import FolderTokenizer
from tfx_jax.data.next_sentence import pair_inputs
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.models.bert import BertConfig
from tfx_jax.models.bert_heads import BertWithHead
from tfx_jax.tasks.prediction import Predictor
from tfx_jax.training.distributed import gather_lists, primary_first
from tfx_jax.training.experiments.examples import Example, ExamplesExperiment
from tfx_jax.training.experiments.texts import open_tokenizer
from tfx_jax.training.flops import stack_flops
from tfx_jax.training.sharding import num_row_parts, row_share
from tfx_jax.training.step import Params


class BertExperiment(ExamplesExperiment[Example]):
    """A BERT with a head, trained on examples; subclasses say how these become rows, a loss and scores.

    Attributes:
      head: the class of the model.
      fills: what padding is in the arrays of a row, where it is not 0.
      tokenizer: trained on the training part, or that of the model to start from; kept in the workdir.
      labels: of the training part, in the order of their ids; kept in the workdir.
    """

    head: ClassVar[type[BertWithHead]]
    fills: ClassVar[Mapping[str, int]] = {}

    @abc.abstractmethod
    def texts(self, examples: Sequence[Example]) -> Iterable[str]:
        """All text of some examples, to train a tokenizer on."""

    @abc.abstractmethod
    def labels_of(self, examples: Sequence[Example]) -> tuple[str, ...]:
        """The labels of some examples in the order of their ids; none for a head without."""

    @abc.abstractmethod
    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """The rows of examples, "tokens", "segments" and "is_token" [T] among their arrays; one each or several."""

    @abc.abstractmethod
    def predict_batch(self, model: Any, batch: dict[str, Array]) -> Any:
        """What the model says of a batch: an array [B, ...] or a tuple of such; pure, to be compiled."""

    def open(self, workdir: epath.PathLike) -> None:
        """Loads tokenizer and labels of `workdir`, or makes them from the training part and saves them there."""
        self.tokenizer: FolderTokenizer = open_tokenizer(
            self.config, workdir, lambda: self.texts(self.examples("train")), family="bert"
        )
        if None in (self.tokenizer.cls_id, self.tokenizer.sep_id, self.tokenizer.pad_id):
            raise UserError(f"the tokenizer of {workdir} has not all of BERT's special tokens")
        path = epath.Path(workdir) / "labels.json"
        with primary_first("labels"):
            if not path.exists():
                partial = path.with_name(path.name + ".partial")
                partial.write_text(json.dumps(self.labels_of(self.examples("train")), ensure_ascii=False) + "\n")
                partial.replace(path)
            self.labels: tuple[str, ...] = tuple(json.loads(path.read_text()))

    @functools.cached_property
    def sizes(self) -> BertConfig:
        """The model's configuration, with the vocabulary and the labels that it really has."""
        model = self.config.model
        vocab_size = model.vocab_size if self.config.init_from else self.tokenizer.vocab_size
        return dataclasses.replace(model, vocab_size=vocab_size, labels=self.labels or model.labels)

    def make_model(self, attention_fn: Callable[..., Any] = dot_product_attention) -> BertWithHead:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return self.head(self.sizes, attention_fn=attention_fn, rngs=nnx.Rngs(params=self.config.seed))

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training part when it trains on a mesh."""
        share, rows = row_share(mesh), RowList(self.rows(self.examples("train")))
        return epoch_batches(
            lambda epoch: rows,
            self._layout,
            seed=self.config.seed,
            rows_multiple=num_row_parts(mesh) * self.config.accumulate,
            process_index=share.index,
            process_count=share.count,
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        return stack_flops(self.sizes, *shapes["tokens"], num_predicted=0)

    def predict(self, params: Params, rows: Sequence[Row]) -> list[Any]:
        """Applies `predict_batch` to rows; processes share them.

        Returns:
          For each row its part of the array, as nested lists, or a list of its parts.
        """
        mine = rows[jax.process_index() :: jax.process_count()]
        found: list[Any] = [None] * len(mine)
        passed = list(one_pass(RowList(mine), self._layout))
        for batch, result in zip(passed, self._predictor(params, passed), strict=True):
            arrays = [np.asarray(array).tolist() for array in jax.tree.leaves(result)]
            for place, index in enumerate(batch["index"].tolist()):
                if index >= 0:
                    parts = [array[place] for array in arrays]
                    found[index] = parts if len(parts) > 1 else parts[0]
        return gather_lists(found)

    @property
    def _layout(self) -> Layout:
        data = self.config.data
        return Layout(self.boundaries, data.tokens_per_batch, {**self.fills, **self._padding})

    @property
    def _padding(self) -> dict[str, int]:
        return {"tokens": cast(int, self.tokenizer.pad_id)}

    @functools.cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.graphdef, self.predict_batch)


def text_row(tokenizer: FolderTokenizer, first: Sequence[int], second: Sequence[int], max_length: int) -> Row:
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
