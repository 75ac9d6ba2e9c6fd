"""Pre-training of a BERT on plain text: hidden tokens and next sentences (Devlin et al., 2019, section 3.1)."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import grain
import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.epochs import Layout, RowList, epoch_batches, one_pass
from tfx_jax.data.grammar import Split
from tfx_jax.data.hf_tokenizer import FolderTokenizer
from tfx_jax.data.pretraining import PretrainingRows, make_rows, split_sentences
from tfx_jax.data.wikitext import running_text
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.models.bert import BertConfig
from tfx_jax.models.bert_heads import BertPretraining
from tfx_jax.tasks.pretraining import num_chosen, pretraining_loss
from tfx_jax.training.config import ExperimentConfig, TextConfig
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiment import Evaluation, Experiment, Score
from tfx_jax.training.experiments.texts import has_text, open_tokenizer, read_documents
from tfx_jax.training.flops import stack_flops
from tfx_jax.training.sharding import num_row_parts, row_share
from tfx_jax.training.step import Metrics, Params

_RATE = 0.15  # of the tokens that are to be predicted
_LEAST_LENGTH = 8  # [CLS], two [SEP] and a few tokens of each segment
_SUMS = ("nll", "tokens", "correct", "next_sentences", "next_sentence_correct")


class PretrainingExperiment(Experiment):
    """A BERT and plain text, of which it learns hidden tokens and whether two segments are neighbours.

    Every epoch hides other tokens and makes other pairs. A document is an article, a line, or what stands between empty
    lines of a file, as `config.data.documents` says; its sentences are those of `split_sentences`.

    Attributes:
      data: the part of the configuration that says where the text comes from.
      tokenizer: trained on the training text, or that of the model to start from; kept in the workdir.
    """

    scores = (
        Score("loss", "masked LM loss", " nats", digits=4, is_loss=True, note="a fixed choice of hidden tokens"),
        Score("masked_accuracy", "masked accuracy", " %"),
        Score("next_sentence_accuracy", "next sentence accuracy", " %"),
    )

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `BertConfig` and a `TextConfig`."""
        super().__init__(config)
        self._model, self.data = cast(BertConfig, config.model), cast(TextConfig, config.data)
        self._texts: dict[Split, list[list[str]]] = {}

    def read_data(self) -> None:
        """Reads the training part and, if there is one, the validation part."""
        for split in ("train", "validation") if self.has_validation else ("train",):
            self.sentences(cast(Split, split))

    @property
    def has_validation(self) -> bool:
        """Whether the configuration names a validation part."""
        return has_text(self.data, "validation")

    def sentences(self, split: Split) -> list[list[str]]:
        """The sentences of each document of a part, which is read once.

        Raises:
          UserError: if there is no such part, it cannot be read, or it has no pairs of sentences.
        """
        if split not in self._texts:
            is_tokenised = self.data.documents == "articles"
            documents = [split_sentences(text, is_tokenised=is_tokenised) for text in self._documents(split)]
            found = sum(map(bool, documents))
            if found < 2 or max(map(len, documents)) < 2:
                raise UserError(
                    f"next sentence prediction needs two documents, one of two sentences or more, in the {split} part: "
                    f'config.data.documents="{self.data.documents}" finds {found}{", none with two" * (found > 1)}'
                )
            self._texts[split] = documents
        return self._texts[split]

    def open(self, workdir: epath.PathLike) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training part and saves it there."""
        if self.data.max_length < _LEAST_LENGTH:
            raise UserError(
                f"config.data.max_length={self.data.max_length} is too short for pairs: {_LEAST_LENGTH} will do"
            )
        self.tokenizer: FolderTokenizer = open_tokenizer(
            self.config, workdir, lambda: map("\n".join, self.sentences("train")), family="bert"
        )
        if None in self._specials.values():
            raise UserError(f"the tokenizer of {workdir} has not all of BERT's special tokens")

    @functools.cached_property
    def sizes(self) -> BertConfig:
        """The model's configuration, with the vocabulary that it really has."""
        vocab_size = self._model.vocab_size if self.config.init_from else self.tokenizer.vocab_size
        return dataclasses.replace(self._model, vocab_size=vocab_size)

    def make_model(self, attention_fn: Callable[..., Any] = dot_product_attention) -> BertPretraining:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return BertPretraining(self.sizes, attention_fn=attention_fn, rngs=nnx.Rngs(params=self.config.seed))

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training part when it trains on a mesh."""
        share, encoded, seed = row_share(mesh), self._encode("train"), self.config.seed
        return epoch_batches(
            lambda epoch: self._rows(encoded, np.random.default_rng((seed, epoch, 1))),
            self._layout,
            seed=seed,
            rows_multiple=num_row_parts(mesh) * self.config.accumulate,
            process_index=share.index,
            process_count=share.count,
        )

    def loss(self, model: BertPretraining, batch: dict[str, Array], rngs: nnx.Rngs | None) -> tuple[Array, Metrics]:
        """See `pretraining_loss`."""
        config = self.config
        return pretraining_loss(
            model, batch, rngs, rate=_RATE, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, length = shapes["tokens"]
        return stack_flops(self.sizes, rows, length, num_predicted=num_chosen(length, _RATE))

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Goes once through a part, with the same pairs and the same hidden tokens each time, whatever the seed."""
        rows = self._evaluation_rows(split)
        mine = RowList([rows[index] for index in range(jax.process_index(), len(rows), jax.process_count())])
        params = jax.device_put(params)
        sums = [self._sums(params, batch) for batch in one_pass(mine, self._layout)] if len(mine) else []
        of_process = [math.fsum(float(value) for value in column) for column in zip(*sums, strict=True)] or [0.0] * 5
        columns = zip(*gather_lists([of_process]), strict=True)
        nll, tokens, correct, pairs, pairs_correct = (math.fsum(column) for column in columns)
        scores = {
            "loss": nll / tokens,
            "masked_accuracy": 100 * correct / tokens,
            "next_sentence_accuracy": 100 * pairs_correct / pairs,
        }
        spelled = ", ".join(f"{score.title} {score.spell(scores[score.name])}" for score in self.scores)
        return Evaluation(scores, f"{spelled}, {tokens:,.0f} hidden tokens of {pairs:,.0f} pairs")

    @functools.cached_property
    def _sums(self) -> Callable[..., Any]:
        graphdef = self.graphdef

        @jax.jit
        def sums(params: Params, batch: dict[str, Array]) -> list[Array]:
            _, found = pretraining_loss(nnx.merge(graphdef, params), batch, None, rate=_RATE)
            return [found[name] for name in _SUMS]

        return sums

    @functools.cache  # noqa: B019 - an experiment lives as long as the program
    def _evaluation_rows(self, split: Split) -> PretrainingRows:
        return self._rows(self._encode(split), np.random.default_rng(0))

    def _rows(self, documents: list[list[list[int]]], rng: np.random.Generator) -> PretrainingRows:
        tokenizer, ids = self.tokenizer, cast(dict[str, int], self._specials)
        special = {*ids.values(), *({tokenizer.unk_id} - {None})}
        return make_rows(
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
        documents = self.sentences(split)
        encoded = iter(self.tokenizer.encode_batch([sentence for document in documents for sentence in document]))
        return [[next(encoded) for _ in document] for document in documents]

    @property
    def _specials(self) -> dict[str, int | None]:
        return {name: getattr(self.tokenizer, name) for name in ("cls_id", "sep_id", "pad_id", "mask_id")}

    @property
    def _layout(self) -> Layout:
        length = self.data.max_length
        boundaries = (length // 4, length // 2, length)  # few: each is compiled, and nine rows in ten are full
        return Layout(boundaries, self.data.tokens_per_batch, {"tokens": cast(int, self.tokenizer.pad_id)})

    def _documents(self, split: Split) -> list[str]:
        documents = read_documents(self.data, split)
        if self.data.documents == "articles":
            return [running_text(document) for document in documents]
        if self.data.documents == "file":
            return [text for document in documents for text in re.split(r"\n\s*\n", document)]
        return documents
