"""Duplication of symbols: a model reads 0 w 0 and repeats w (Kitaev et al., 2020, section 5).

From "Reformer: The Efficient Transformer" (https://arxiv.org/abs/2001.04451). To repeat a symbol, the model must attend
half a sequence back, which exposes attention that finds only some of its keys. No files are read: every sequence is
generated from the seed, the split, the epoch and its index.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.data.batching.batches import (
    Example,
    ExampleList,
    ExampleSource,
    LoaderOptions,
)
from tfx_jax.data.sources.splits import SPLITS, Split, Splits
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented
from tfx_jax.models.config import DecoderConfig, ModelConfig, check_max_length, require_kind
from tfx_jax.tasks.loss import LossOutput, Metric, is_first_choice, summed_cross_entropy
from tfx_jax.tasks.planning import LENGTH, NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.token_prediction import TokenPredictionBase

DrawSequences = Callable[[int, int], ExampleSource]
"""`draw(seed, epoch)` returns the sequences of a split for an epoch of the run with this seed."""

Config = TypeVar("Config", bound="DrawnConfig")


@documented
@dataclasses.dataclass
class DuplicationData:
    """Random sequences 0 w 0 w, generated at access; the defaults are the paper's."""

    num_symbols: int = at_least(1, 127)  # symbols of w are 1 .. num_symbols
    max_length: int = at_least(4, 1_024)  # length of 0 w 0 w, even
    train_sequences: int = at_least(1, 16_384)  # sequences per epoch; each epoch has new ones
    eval_sequences: int = at_least(
        1, 1_024
    )  # sequences of the validation and of the test split, independent of the seed
    tokens_per_batch: int = at_least(1, 16_384)  # positions of a global batch

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 0 and the symbols."""
        return self.num_symbols + 1

    def draw(self, split: Split) -> DrawSequences:
        """Returns `draw(seed, epoch)`, which generates the sequences of a split; splits have none in common."""
        count = self.train_sequences if split == "train" else self.eval_sequences

        def draw(seed: int, epoch: int) -> DuplicatedSequences:
            key = (seed, SPLITS.index(split), epoch)
            return DuplicatedSequences(count, self.max_length, self.num_symbols, key=key)

        return draw


@dataclasses.dataclass
class DrawnConfig(TaskConfig):
    """Base class of tasks on sequences of symbols that are generated at access instead of read from files.

    `data` has `vocab_size` and `draw(split)`; `task_class` is the task.
    """

    task_class: ClassVar[Callable[..., Any]]

    def splits(self) -> Splits[DrawSequences]:
        """Returns for each split the function that generates its sequences; all splits exist."""
        return Splits(lambda split: True, self.data.draw)

    def setup(self, model: DecoderConfig, splits: Splits[DrawSequences], artifacts: Artifacts) -> Any:
        """Sets up the task without artifacts, because symbols are their own ids."""
        vocab_size = self.data.vocab_size
        if artifacts.starts_from_model:
            if model.vocab_size < vocab_size:
                raise UserError(
                    f"the initial model has {model.vocab_size} tokens, but the task needs {vocab_size}: name a model "
                    "with a larger vocabulary as config.init_from"
                )
            vocab_size = model.vocab_size
        return self.task_class(self, dataclasses.replace(cast(Any, model), vocab_size=vocab_size), splits, NO_DATA)

    def planned(self, model: DecoderConfig, options: LoaderOptions) -> PlannedTask:
        model = dataclasses.replace(cast(Any, model), vocab_size=self.data.vocab_size)
        arrays = dict.fromkeys(("inputs", "targets"), (np.int32, LENGTH)) | {"weights": (np.float32, LENGTH)}
        task = self.task_class(self, model, NO_DATA, NO_DATA)
        return PlannedTask(task, planned_batch(self.data, options, arrays))


class DrawnSequences(abc.ABC):
    """Sequences of one length, each generated at access, as an `ExampleSource`."""

    def __init__(self, count: int, length: int, *, key: Sequence[int]):
        """Stores the parameters of the sequences.

        Args:
          count: number of sequences.
          length: length of each sequence.
          key: non-negative numbers that seed the sequences; different keys give different sequences.
        """
        self._count, self._length, self._key = count, length, tuple(key)

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> Example:
        """Generates a sequence."""

    @property
    def lengths(self) -> np.ndarray:
        """Length of each example, [count] int; all are equal."""
        return np.full(self._count, self._length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._count:
            raise IndexError(f"there is no example {index}: examples are numbered from 0 to {self._count - 1}")
        return self.draw(np.random.default_rng((*self._key, index)))


class DrawnTask(TokenPredictionBase[Config, DecoderConfig, DrawSequences]):
    """Base class of the tasks of a `DrawnConfig`: predicts symbols with a weight; every epoch has new sequences."""

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns `epoch_examples(epoch)`: every epoch has new sequences."""
        draw = self._splits["train"]
        return lambda epoch: draw(seed, epoch)

    def make_eval_examples(self, split: Split) -> ExampleSource:
        draw = self._splits[split]
        return draw(0, 0)  # seed and epoch: the same sequences for all runs

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return duplication_loss(model, batch, rngs)

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns metrics of the symbols with a weight, each predicted from the true symbols before it."""
        values = {name: 100 * float(sums[name].mean) for name in ("accuracy", "exact_match")}
        values["loss"] = float(sums["nll"].mean)
        return eval_result(self.metrics, values, f"{sums['exact_match'].weight:,.0f} sequences")


class DuplicatedSequences(DrawnSequences):
    """Sequences 0 w 0 w; see `duplicate`."""

    def __init__(self, count: int, length: int, num_symbols: int, *, key: Sequence[int]):
        """Stores the parameters; `length` is that of 0 w 0 w, with symbols of w from 1 .. num_symbols."""
        super().__init__(count, length, key=key)
        self._num_symbols = num_symbols

    def draw(self, rng: np.random.Generator) -> Example:
        return duplicate(rng.integers(1, self._num_symbols, self._length // 2 - 1, endpoint=True))


def duplicate(word: Sequence[int] | np.ndarray) -> Example:
    """Returns the example of a word w, [W]: the tokens of 0 w 0 w and the token after each.

    Returns:
      "inputs" and "targets", [2 W + 2] int32, and "weights", [2 W + 2] float32: 1 where the target is a symbol of the
      second w. The last token is read, too, so that the length is that of the paper, but predicts nothing.

    >>> {name: array.tolist() for name, array in duplicate([5, 7]).items()}
    {'inputs': [0, 5, 7, 0, 5, 7], 'targets': [5, 7, 0, 5, 7, 0], 'weights': [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]}
    """
    half = np.concatenate([[0], np.asarray(word)]).astype(np.int32)  # 0 w
    inputs = np.tile(half, 2)
    weights = np.zeros(len(inputs), np.float32)
    weights[len(half) : -1] = 1
    return {"inputs": inputs, "targets": np.roll(inputs, -1), "weights": weights}


class DuplicationTask(DrawnTask["DuplicationConfig"]):
    """Duplication of symbols, with new sequences in every epoch."""

    metrics = (
        MetricInfo("accuracy", "accuracy", " %", note="symbols of the second half"),
        MetricInfo("exact_match", "exact match", " %", note="sequences whose second half is entirely right"),
        MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
    )

    def encode(self, words: Sequence[Sequence[int]]) -> list[Example]:
        """Returns one example per word.

        Raises:
          UserError: if a word has another length than those of the data, or an unknown symbol.
        """
        length = self.config.data.max_length // 2 - 1  # half of 0 w 0 w, without its 0
        num_symbols = self.config.data.num_symbols
        for word in words:
            if len(word) != length or not all(1 <= symbol <= num_symbols for symbol in word):
                raise UserError(f"a word must have {length} symbols from 1 to {num_symbols}, got {list(word)}")
        return [duplicate(word) for word in words]

    def predict(self, model: TrainedModel, words: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the most likely symbol at each position of the second w, given the true symbols before it."""
        predictions = model.predict(predict_tokens, ExampleList(self.encode(words), by="inputs"), self.batch_spec)
        # The tokens predicted after the second 0 and after all but the last symbol of the second w.
        return [tokens[len(tokens) // 2 : -1] for tokens in predictions]


@documented
@dataclasses.dataclass
class DuplicationConfig(DrawnConfig):
    """Repeats a random sequence of symbols."""

    data: DuplicationData = dataclasses.field(default_factory=DuplicationData)

    task_class = DuplicationTask

    def validate(self, model: ModelConfig) -> None:
        """Checks that the model is a decoder with enough positions, and that the length is even."""
        require_kind(model, "decoder", "duplication")
        if self.data.max_length % 2:
            raise UserError(
                f"config.task.data.max_length={self.data.max_length} must be even: an example is 0 w 0 w with a "
                "sequence w"
            )
        check_max_length(model, self.data.max_length)

    def tiny(self) -> None:
        data = self.data
        data.max_length, data.train_sequences, data.eval_sequences, data.tokens_per_batch = 16, 64, 16, 256


def duplication_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the symbols of the second w.

    Args:
      model: model of the kind "decoder": `model(inputs, rngs=...)` returns the logits of the next token at each
        position.
      batch: "inputs" and "targets" [B, T] int32, "weights" [B, T] float32, as from `duplicate`; padding examples have
        weight 0.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      The output of `summed_cross_entropy`, with the metric "exact_match": the fraction of examples whose predictions
      are all right. `num_tokens` counts the tokens read.
    """
    targets, weights = batch["targets"], batch["weights"]
    logits = model(batch["inputs"], rngs=rngs)
    output = summed_cross_entropy(logits, targets, weights)
    is_row = (weights > 0).any(axis=-1)  # [B], False for padding examples
    is_right = (is_first_choice(logits, targets) | (weights == 0)).all(axis=-1)  # [B]
    num_rows = is_row.sum(dtype=jnp.float32)
    exact_match = Metric((is_right & is_row).sum(dtype=jnp.float32), num_rows)
    return output._replace(
        metrics=output.metrics | {"exact_match": exact_match}, num_tokens=num_rows * weights.shape[-1]
    )


def predict_tokens(model: Any, batch: dict[str, Array]) -> Int[Array, "B T"]:
    """Returns the most likely token after each of "inputs", [B, T], for `TrainedModel.predict`."""
    return model(batch["inputs"]).argmax(axis=-1)
