"""Token prediction: base class of tasks that predict next tokens, masked tokens, dropped spans or repeated symbols.

Evaluation computes the metrics of the loss, without dropout. A task defines how examples are cut (`make_epochs`,
`make_eval_examples`) and how the model is called (`loss`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import grain
import numpy as np
from flax import nnx

from tfx_jax.data.batching.batches import Batch, BatchSpec, ExampleSource, LoaderOptions, train_batches
from tfx_jax.data.batching.documents import TextDocuments, encode_documents
from tfx_jax.data.sources.splits import Split, Splits
from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer
from tfx_jax.tasks.loss import LossOutput, Metric
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import EvalResult, MetricInfo, TaskConfig

Config = TypeVar("Config", bound=TaskConfig)
Model = TypeVar("Model")
Data = TypeVar("Data")

PERPLEXITY_METRICS = (
    MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
    MetricInfo("perplexity", "perplexity", is_loss=True),
)


class TokenPredictionBase(Generic[Config, Model, Data]):
    """Base class of the tasks that predict tokens; see `tfx_jax.tasks.task.Task`.

    Attributes:
      tokenizer: turns text into tokens.
    """

    metrics: tuple[MetricInfo, ...] = PERPLEXITY_METRICS
    unit = "token"

    def __init__(self, config: Config, model_config: Model, splits: Splits[Data], tokenizer: HFTokenizer):
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self._splits = splits
        self._eval_examples: dict[Split, ExampleSource] = {}

    def make_model(self, *, rngs: nnx.Rngs) -> Any:
        return cast(Any, self.model_config).make(rngs=rngs)

    @property
    def batch_spec(self) -> BatchSpec:
        """How examples become batches: all have the same length."""
        return BatchSpec((self.config.data.max_length,), self.config.data.tokens_per_batch)

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns `epoch_examples(epoch)`, which returns the training examples of an epoch, counted from 0."""
        raise NotImplementedError

    def make_eval_examples(self, split: Split) -> ExampleSource:
        """Returns the examples of a split, independent of the seed of the run."""
        raise NotImplementedError

    def loss(self, model: Any, batch: dict[str, Any], rngs: nnx.Rngs | None) -> LossOutput:
        """Returns the loss of a batch and its metrics; "nll" is the cross entropy."""
        raise NotImplementedError

    def train_data(self, options: LoaderOptions) -> grain.IterDataset[Batch]:
        if "validation" in self._splits:
            self.eval_examples("validation")  # raises for unusable data here, not at the first evaluation
        return train_batches(self.make_epochs(options.seed), self.batch_spec, options)

    def eval_examples(self, split: Split) -> ExampleSource:
        """Returns `make_eval_examples` of a split, cached."""
        if split not in self._eval_examples:
            self._eval_examples[split] = self.make_eval_examples(split)
        return self._eval_examples[split]

    def predict_metrics(self, model: Any, batch: dict[str, Any]) -> dict[str, Metric]:
        """Returns the metrics of the loss without dropout, for `TrainedModel.sum_metrics`."""
        return self.loss(model, batch, rngs=None).metrics

    def evaluate(self, model: TrainedModel, split: Split = "validation") -> EvalResult:
        """Computes the metrics of all predictions of a split."""
        return self.result(model.sum_metrics(self.predict_metrics, self.eval_examples(split), self.batch_spec))

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Turns the summed metrics of the loss into an evaluation result."""
        nll = sums["nll"]
        loss = float(nll.mean)
        perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows
        summary = f"loss {loss:.4f} nats, perplexity {perplexity:,.2f}, {nll.weight:,.0f} tokens"
        return EvalResult({"loss": loss, "perplexity": perplexity}, summary)


def first_cut(seed: int, epoch: int, length: int) -> int:
    """Returns the first cut of a stream in an epoch, 0 to length - 1: 0 in the first epoch, then random."""
    return int(np.random.default_rng((seed, epoch)).integers(length)) if epoch else 0


def token_stream(tokenizer: HFTokenizer, texts: TextDocuments, *, documents: str) -> np.ndarray:
    """Joins the tokens of all documents, [number of tokens] int32, on disk.

    Args:
      tokenizer: a tokenizer with an EOS token.
      texts: the documents.
      documents: kind of documents, see `TextData.documents`. EOS follows each document, except the last one of a
        "file".
    """
    tokens, _ = encode_documents(tokenizer, texts, eos_id=tokenizer.eos_id)
    return tokens[:-1] if documents == "file" else tokens
