"""T5's pre-training: spans of a text are dropped, and the model writes them down (Raffel et al., 2020)."""

import functools
import math
from collections.abc import Callable
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
from tfx_jax.data.span_corruption import CorruptedTexts, longest_text, span_corruption_lengths
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.config import ExperimentConfig, TextConfig
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.t5 import T5Experiment
from tfx_jax.training.experiments.texts import has_text, read_documents
from tfx_jax.training.sharding import num_row_parts, row_share
from tfx_jax.training.step import Params

_EVALUATION_SEED = 0  # of the spans: the same for all trainings, so that their losses compare


class SpanCorruptionExperiment(T5Experiment):
    """A T5 and plain text (sections 3.1.4 and 3.3 of the paper).

    All documents are one stream, without anything between them, as the authors' program has it
    (`reduce_concat_tokens`). It is cut into texts whose sources, spans dropped, have `max_length` tokens.
    """

    scores = (Score("loss", "loss", " nats", digits=4, is_loss=True), Score("accuracy", "token accuracy", " %"))

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration with a `T5Config` and a `TextConfig`."""
        super().__init__(config)
        self.data = cast(TextConfig, config.data)
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
        self.open_tokenizer(workdir, lambda: self._documents("train"))

    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training part: each epoch is cut at other places, and drops other spans."""
        share = row_share(mesh)
        return epoch_batches(
            self._make_epochs(),
            self._layout,
            seed=self.config.seed,
            rows_multiple=num_row_parts(mesh) * self.config.accumulate,
            process_index=share.index,
            process_count=share.count,
        )

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Scores every target token; the spans are the same whatever the seed of the training."""
        rows = self._corrupted(self._stream(split), (_EVALUATION_SEED,))
        mine = [rows[index] for index in range(jax.process_index(), len(rows), jax.process_count())]
        params = jax.device_put(params)
        batches = one_pass(RowList(mine, by="source"), self._layout) if mine else ()
        sums = [self._sums(params, batch) for batch in batches]
        of_process = [math.fsum(float(value) for value in column) for column in zip(*sums, strict=True)] or [0.0] * 3
        nll, correct, tokens = (math.fsum(column) for column in zip(*gather_lists([of_process]), strict=True))
        scores = {"loss": nll / tokens, "accuracy": 100 * correct / tokens}
        text = f"loss {scores['loss']:.4f} nats, token accuracy {scores['accuracy']:.2f} %, {tokens:,.0f} target tokens"
        return Evaluation(scores, text)

    @functools.cached_property
    def _sums(self) -> Callable[..., Any]:
        graphdef = self.graphdef

        @jax.jit
        def sums(params: Params, batch: dict[str, Array]) -> tuple[Array, ...]:
            _, found = translation_loss(nnx.merge(graphdef, params), batch, None)
            return found["nll"], found["correct"], found["tokens"]

        return lambda params, batch: sums(params, {name: batch[name] for name in ("source", "target")})

    @property
    def _text_length(self) -> int:
        return longest_text(self.data.max_length)

    @property
    def _layout(self) -> Layout:
        source_length, target_length = span_corruption_lengths(self._text_length)
        pad_id = self.specials.pad_id
        return Layout(
            (source_length,),
            self.data.tokens_per_batch,
            fills={"source": pad_id, "target": pad_id},
            widths={"target": target_length},
        )

    def _make_epochs(self) -> Callable[[int], CorruptedTexts]:
        stream, seed = self._stream("train"), self.config.seed

        def cut(epoch: int) -> CorruptedTexts:
            start = int(np.random.default_rng((seed, epoch)).integers(self._text_length)) if epoch else 0
            return self._corrupted(stream, (seed, epoch), start=start)

        cut(0)  # a text that is too short is an error now, not in a thread
        return cut

    def _corrupted(self, stream: np.ndarray, seed: tuple[int, ...], *, start: int = 0) -> CorruptedTexts:
        return CorruptedTexts(stream, self._text_length, seed, start=start, **self.specials._asdict())

    def _stream(self, split: Split) -> np.ndarray:
        encoded = self.tokenizer.encode_batch(self._documents(split))
        return np.array([token for ids in encoded for token in ids], np.int32)

    def _documents(self, split: Split) -> list[str]:
        if split not in self._texts:
            self._texts[split] = read_documents(self.data, split)
        return self._texts[split]
