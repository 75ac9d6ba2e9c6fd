"""What all experiments on plain text share: its documents, and scores that are sums over all of it."""

import abc
import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
from etils import epath
from jaxtyping import Array

from tfx_jax.data.batching import ExampleSource, eval_batches
from tfx_jax.data.process_shard import ProcessShard
from tfx_jax.data.splits import Split
from tfx_jax.data.text import read_text
from tfx_jax.data.wikitext import read_articles
from tfx_jax.tasks.loss import Metric
from tfx_jax.toy_grammar import grammar_documents
from tfx_jax.training.config import ExperimentConfig, TextConfig
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiments.rows import RowsExperiment, SplitData
from tfx_jax.training.step import Params

_GRAMMAR_DOCUMENTS = {"train": 2_000, "validation": 100, "test": 100}


class TextExperiment(RowsExperiment[SplitData]):
    """An experiment on plain text; subclasses say which rows are made of it.

    Attributes:
      data: the part of the configuration that says where the text comes from.
    """

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `TextConfig`."""
        super().__init__(config)
        self.data = cast(TextConfig, config.data)
        self._evaluation_rows: dict[Split, ExampleSource] = {}

    @abc.abstractmethod
    def make_evaluation_rows(self, split: Split) -> ExampleSource:
        """The rows of a split for `evaluation_rows`."""

    def has_split(self, split: Split) -> bool:
        """Whether the configuration names such a split, or takes it from the end of the training text."""
        return super().has_split(split) or (split == "validation" and self.data.validation_share > 0)

    def evaluation_rows(self, split: Split) -> ExampleSource:
        """The rows of a split to evaluate on, made once; they are the same whatever the seed of the training."""
        if split not in self._evaluation_rows:
            self._evaluation_rows[split] = self.make_evaluation_rows(split)
        return self._evaluation_rows[split]

    def predict_batch(self, model: Any, batch: dict[str, Array]) -> dict[str, Metric]:
        """The metrics that the loss gives."""
        return self.loss(model, batch, None).metrics

    def metrics(self, params: Params, split: Split) -> dict[str, Metric]:
        """The metrics of the loss over all rows to evaluate on; processes share them."""
        shard = ProcessShard(jax.process_index(), jax.process_count())
        batches = eval_batches(self.evaluation_rows(split), self.batch_spec, shard=shard)
        found = [jax.tree.map(float, metrics) for metrics in self.predictor(params, batches)]
        return _add(gather_lists([_add(found)]))


def _add(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Adds metrics of the same name."""
    columns = collections.defaultdict(list)
    for part in parts:
        for name, metric in part.items():
            columns[name].append(metric)
    return {name: Metric(*map(math.fsum, zip(*column, strict=True))) for name, column in columns.items()}


def read_documents(data: TextConfig, split: Split) -> list[str]:
    """The documents of a split that the configuration names; lines, empty ones too, are without their line breaks.

    Raises:
      UserError: if it cannot be read.
    """
    if data.dataset == "grammar":
        documents = ["\n".join(sentences) for sentences in grammar_documents(split, _GRAMMAR_DOCUMENTS[split])]
        between = "\n" if data.documents == "lines" else "\n\n"
        return documents if data.documents == "articles" else _documents_of(between.join(documents), data.documents)
    if data.validation_share and split != "test":
        return _split_off(data)[split == "validation"]
    return _read(data, getattr(data, f"{split}_file"))


def _split_off(data: TextConfig) -> tuple[list[str], list[str]]:
    """The training text without its end, and its end, for validation."""
    documents = _read(data, data.train_file)
    share = data.validation_share
    if data.documents == "file":
        (text,) = documents
        place = int(len(text) * (1 - share))
        return [text[:place]], [text[place:]]
    place = int(len(documents) * (1 - share))
    return documents[:place], documents[place:]


def _read(data: TextConfig, file: str) -> list[str]:
    path = epath.Path(data.data_dir) / file
    if data.documents == "articles":
        return ["\n".join(article.lines) for article in read_articles(path)]
    return _documents_of(read_text(path), data.documents)


def _documents_of(text: str, documents: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if documents == "lines" else [text]
