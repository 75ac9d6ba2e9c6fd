"""Language models: GPT reads a text and predicts every next token (Radford et al., 2018 and 2019)."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array

from tfx_jax.data.batching import BatchSpec, ExampleSource
from tfx_jax.data.packing import ArrayExamples, TokenBlocks, join_documents, pack_documents
from tfx_jax.data.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.models.gpt import GPT
from tfx_jax.tasks.language_modeling import language_model_loss
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.texts import TextExperiment, read_documents
from tfx_jax.training.flops import stack_flops
from tfx_jax.training.step import Params


class LanguageModelExperiment(TextExperiment[list[str]]):
    """A GPT and plain text.

    A stream is cut into rows at other places in each epoch; documents that are packed are so once.
    """

    scores = (Score("loss", "loss", " nats", digits=4, is_loss=True), Score("perplexity", "perplexity", is_loss=True))
    model_class = GPT
    family = "gpt"

    def load_split(self, split: Split) -> list[str]:
        """The documents of a split."""
        return read_documents(self.data, split)

    def tokenizer_text(self) -> Iterable[str]:
        """The documents of the training split."""
        return self.split("train")

    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Loads the tokenizer of `workdir`, or trains it on the training split and saves it there."""
        super().open(workdir, can_make=can_make)
        if self.tokenizer.eos_id is None:
            raise UserError(f"the tokenizer of {workdir} has no token for the end of a text")

    def make_epochs(self) -> Callable[[int], ExampleSource]:
        """A stream cut at other places each time, or documents in rows."""
        length, seed = self.data.max_length, self.config.seed
        if self.data.is_packed:
            documents = [[*ids, self.tokenizer.eos_id] for ids in self._encode("train") if ids]
            rows = ArrayExamples(**pack_documents(cast(Any, documents), length, pad_id=0)._asdict())
            return lambda epoch: rows
        stream = self._stream("train")

        def cut(epoch: int) -> TokenBlocks:
            start = int(np.random.default_rng((seed, epoch)).integers(length)) if epoch else 0
            return TokenBlocks(stream[min(start, max(len(stream) - length - 1, 0)) :], length)

        cut(0)  # a text that is too short is an error now, not in a thread
        return cut

    @property
    def batch_spec(self) -> BatchSpec:
        """All rows are equally long."""
        return BatchSpec((self.data.max_length,), self.data.tokens_per_batch)

    def loss(self, model: GPT, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """See `language_model_loss`."""
        config = self.config
        return language_model_loss(
            model, batch, rngs, label_smoothing=config.label_smoothing, z_loss_weight=config.z_loss
        )

    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step."""
        rows, length = shapes["inputs"]
        return stack_flops(self.sizes, rows, length, num_predicted=length)

    def make_evaluation_rows(self, split: Split) -> ExampleSource:
        """Every token of a text in rows of `max_length`: the first of a row is predicted from one other."""
        return TokenBlocks(self._stream(split), self.data.max_length, pad_id=0)

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Scores every token of a text but the first."""
        nll = self.metrics(params, split)["nll"]
        loss = float(nll.mean)
        perplexity = math.exp(min(loss, 700.0))
        text = f"loss {loss:.4f} nats, perplexity {perplexity:,.2f}, {nll.weight:,.0f} tokens"
        return Evaluation({"loss": loss, "perplexity": perplexity}, text)

    def _stream(self, split: Split) -> np.ndarray:
        """All tokens of a split; a file has no end but its own, other documents have one each."""
        encoded = self._encode(split)
        if self.data.documents == "file":
            return np.array([token for ids in encoded for token in ids], np.int32)
        return join_documents(encoded, cast(int, self.tokenizer.eos_id))

    def _encode(self, split: Split) -> list[list[int]]:
        return self.tokenizer.encode_batch(self.split(split))
