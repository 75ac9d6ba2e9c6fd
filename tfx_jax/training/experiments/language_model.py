"""Language models: GPT reads a text and predicts every next token (Radford et al., 2018 and 2019)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import grain
import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.epochs import Layout, Rows, epoch_batches, one_pass
from tfx_jax.data.grammar import Split
from tfx_jax.data.hf_tokenizer import FolderTokenizer
from tfx_jax.data.packing import ArrayRows, TokenBlocks, join_documents, pack_documents
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.tasks.language_modeling import language_model_loss
from tfx_jax.training.config import ExperimentConfig, TextConfig
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiment import Evaluation, Experiment, Score
from tfx_jax.training.experiments.texts import has_text, open_tokenizer, read_documents
from tfx_jax.training.flops import stack_flops
from tfx_jax.training.sharding import num_row_parts, row_share
from tfx_jax.training.step import Metrics, Params


class LanguageModelExperiment(Experiment):
    """A GPT and plain text.

    Attributes:
      data: the part of the configuration that says where the text comes from.
      tokenizer: trained on the training text at first use and kept in the workdir.
    """

    scores = (Score("loss", "loss", " nats", digits=4, is_loss=True), Score("perplexity", "perplexity", is_loss=True))

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `GPTConfig` and a `TextConfig`."""
        super().__init__(config)
        self._model, self.data = cast(GPTConfig, config.model), cast(TextConfig, config.data)
        self._texts: dict[Split, list[str]] = {}

    def read_data(self) -> None:
        """Reads the training part and, if there is one, the validation part."""
        for split in ("train", "validation") if self.has_validation else ("train",):
            self._documents(cast(Split, split))

    @property
    def has_validation(self) -> bool:
        """Whether the configuration names a validation part."""
        return has_text(self.data, "validation")

    def open(self, workdir: epath.PathLike) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training part and saves it there."""
        self.tokenizer: FolderTokenizer = open_tokenizer(
            self.config, workdir, lambda: self._documents("train"), family="gpt"
        )
        if self.tokenizer.eos_id is None:
            raise UserError(f"the tokenizer of {workdir} has no token for the end of a text")

    def make_model(self, attention_fn: Callable[..., Any] = dot_product_attention) -> GPT:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""
        return GPT(self.sizes, attention_fn=attention_fn, rngs=nnx.Rngs(params=self.config.seed))

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training part when it trains on a mesh.

        A stream is cut into rows at other places in each epoch; documents that are packed are so once.
        """
        share = row_share(mesh)
        return epoch_batches(
            self._make_epochs(),
            self._layout,
            seed=self.config.seed,
            rows_multiple=num_row_parts(mesh) * self.config.accumulate,
            process_index=share.index,
            process_count=share.count,
        )

    def loss(self, model: GPT, batch: dict[str, Array], rngs: nnx.Rngs | None) -> tuple[Array, Metrics]:
        """See `language_model_loss`."""
        config = self.config
        return language_model_loss(
            model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, length = shapes["inputs"]
        return stack_flops(self.sizes, rows, length, num_predicted=length)

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Scores every token of a text in rows of `max_length`: the first of a row is predicted from one other."""
        rows = TokenBlocks(self._stream(split), self.data.max_length, pad_id=0)
        params = jax.device_put(params)
        mine = _Share(rows, jax.process_index(), jax.process_count())
        sums = [self._sums(params, batch) for batch in one_pass(mine, self._layout)]
        of_process = [math.fsum(float(value) for value in column) for column in zip(*sums, strict=True)] or [0.0, 0.0]
        nll, tokens = (math.fsum(column) for column in zip(*gather_lists([of_process]), strict=True))
        loss = nll / tokens
        scores = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        return Evaluation(scores, f"loss {loss:.4f} nats, perplexity {scores['perplexity']:,.2f}, {tokens:,.0f} tokens")

    @functools.cached_property
    def sizes(self) -> GPTConfig:
        """The model's configuration, with the vocabulary that it really has."""
        vocab_size = self._model.vocab_size if self.config.init_from else self.tokenizer.vocab_size
        return dataclasses.replace(self._model, vocab_size=vocab_size)

    @functools.cached_property
    def _sums(self) -> Callable[..., Any]:
        graphdef = self.graphdef

        @jax.jit
        def sums(params: Params, batch: dict[str, Array]) -> tuple[Array, Array]:
            _, found = language_model_loss(nnx.merge(graphdef, params), batch, None)
            return found["nll"], found["tokens"]

        return lambda params, batch: sums(params, {name: batch[name] for name in ("inputs", "targets", "weights")})

    @property
    def _layout(self) -> Layout:
        return Layout((self.data.max_length,), self.data.tokens_per_batch)

    def _make_epochs(self) -> Callable[[int], Rows]:
        length, seed = self.data.max_length, self.config.seed
        if self.data.is_packed:
            documents = [[*ids, self.tokenizer.eos_id] for ids in self._encode("train") if ids]
            rows = ArrayRows(**pack_documents(cast(Any, documents), length, pad_id=0)._asdict())
            return lambda epoch: rows
        stream = self._stream("train")

        def cut(epoch: int) -> TokenBlocks:
            start = int(np.random.default_rng((seed, epoch)).integers(length)) if epoch else 0
            return TokenBlocks(stream[min(start, max(len(stream) - length - 1, 0)) :], length)

        cut(0)  # a text that is too short is an error now, not in a thread
        return cut

    def _stream(self, split: Split) -> np.ndarray:
        """All tokens of a part; a file has no end but its own, other documents have one each."""
        encoded = self._encode(split)
        if self.data.documents == "file":
            return np.array([token for ids in encoded for token in ids], np.int32)
        return join_documents(encoded, cast(int, self.tokenizer.eos_id))

    def _encode(self, split: Split) -> list[list[int]]:
        return self.tokenizer.encode_batch(self._documents(split))

    def _documents(self, split: Split) -> list[str]:
        if split not in self._texts:
            self._texts[split] = read_documents(self.data, split)
        return self._texts[split]


class _Share:
    """The rows of one process: every `count`-th, beginning with `index`."""

    def __init__(self, rows: Rows, index: int, count: int):
        self._rows, self._places = rows, range(index, len(rows), count)
        self.lengths = rows.lengths[index::count]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self._rows[self._places[index]]
