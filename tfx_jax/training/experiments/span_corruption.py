"""T5's pre-training: spans of a text are dropped, and the model writes them down (Raffel et al., 2020)."""

from collections.abc import Callable, Iterable

import numpy as np

from tfx_jax.data.batching import BatchSpec, ExampleSource
from tfx_jax.data.span_corruption import CorruptedTexts, longest_text, span_corruption_lengths
from tfx_jax.data.splits import Split
from tfx_jax.training.experiment import Evaluation, Score
from tfx_jax.training.experiments.t5 import T5Experiment
from tfx_jax.training.experiments.texts import TextExperiment, read_documents
from tfx_jax.training.step import Params

_EVALUATION_SEED = 0  # of the spans: the same for all trainings, so that their losses compare


class SpanCorruptionExperiment(T5Experiment[list[str]], TextExperiment[list[str]]):
    """A T5 and plain text (sections 3.1.4 and 3.3 of the paper).

    All documents are one stream, without anything between them, as the authors' program has it
    (`reduce_concat_tokens`). It is cut into texts whose sources, spans dropped, have `max_length` tokens. Each epoch is
    cut at other places, and drops other spans.
    """

    scores = (Score("loss", "loss", " nats", digits=4, is_loss=True), Score("accuracy", "token accuracy", " %"))

    def load_split(self, split: Split) -> list[str]:
        """The documents of a split."""
        return read_documents(self.data, split)

    def tokenizer_text(self) -> Iterable[str]:
        """The documents of the training split."""
        return self.split("train")

    def make_epochs(self) -> Callable[[int], CorruptedTexts]:
        """Texts cut at other places, with other spans, in each epoch."""
        stream, seed = self._stream("train"), self.config.seed

        def cut(epoch: int) -> CorruptedTexts:
            start = int(np.random.default_rng((seed, epoch)).integers(self._text_length)) if epoch else 0
            return self._corrupted(stream, (seed, epoch), start=start)

        cut(0)  # a text that is too short is an error now, not in a thread
        return cut

    @property
    def batch_spec(self) -> BatchSpec:
        """All sources are equally long, and so are all targets."""
        source_length, target_length = span_corruption_lengths(self._text_length)
        return BatchSpec((source_length,), self.data.tokens_per_batch, self.pad_values, {"target": target_length})

    def make_evaluation_rows(self, split: Split) -> ExampleSource:
        """The texts of a split, their spans the same each time."""
        return self._corrupted(self._stream(split), (_EVALUATION_SEED,))

    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Scores every target token."""
        metrics = self.metrics(params, split)
        nll, accuracy = metrics["nll"], metrics["accuracy"]
        scores = {"loss": float(nll.mean), "accuracy": 100 * float(accuracy.mean)}
        spelled = ", ".join(f"{score.title} {score.spell(scores[score.name])}" for score in self.scores)
        return Evaluation(scores, f"{spelled}, {nll.weight:,.0f} target tokens")

    @property
    def _text_length(self) -> int:
        return longest_text(self.data.max_length)

    def _corrupted(self, stream: np.ndarray, seed: tuple[int, ...], *, start: int = 0) -> CorruptedTexts:
        return CorruptedTexts(stream, self._text_length, seed, start=start, **self.specials._asdict())

    def _stream(self, split: Split) -> np.ndarray:
        encoded = self.tokenizer.encode_batch(self.split(split))
        return np.array([token for ids in encoded for token in ids], np.int32)
