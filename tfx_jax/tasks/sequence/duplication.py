"""Duplication of symbols: a model reads 0 w 0 and says w again (Kitaev et al., 2020, section 5).

Of "Reformer: The Efficient Transformer" (https://arxiv.org/abs/2001.04451): a model that says a symbol for the second
time
has to look back at the first, half a sequence away, so that an attention which finds only some of its keys is seen to
miss them. Nothing is read from files: every sequence is drawn from the seed, the split, the epoch and its number.
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
from tfx_jax.tasks.planning import NO_DATA, planned_batch
from tfx_jax.tasks.prediction import TrainedModel
from tfx_jax.tasks.task import Artifacts, EvalResult, MetricInfo, PlannedTask, TaskConfig, eval_result
from tfx_jax.tasks.token_prediction import TokenPredictionBase

DrawSequences = Callable[[int, int], ExampleSource]
"""`draw(seed, epoch)` returns the sequences of a split."""

Config = TypeVar("Config", bound="DrawnConfig")


@documented
@dataclasses.dataclass
class DuplicationData:
    """Random sequences 0 w 0 w, drawn as they are needed; the defaults are the paper's."""

    num_symbols: int = at_least(1, 127)  # w is of 1 .. num_symbols
    max_length: int = at_least(4, 1_024)  # of all of 0 w 0 w: even
    train_sequences: int = at_least(1, 16_384)  # of an epoch; each epoch has others
    eval_sequences: int = at_least(1, 1_024)  # of the validation and of the test split, whatever the seed
    tokens_per_batch: int = at_least(1, 16_384)  # positions of a global batch

    @property
    def vocab_size(self) -> int:
        """0 and the symbols."""
        return self.num_symbols + 1

    def draw(self, split: Split) -> DrawSequences:
        """Returns how sequences of a split are drawn; no two splits draw the same."""
        count = self.train_sequences if split == "train" else self.eval_sequences

        def draw(seed: int, epoch: int) -> DuplicatedSequences:
            key = (seed, SPLITS.index(split), epoch)
            return DuplicatedSequences(count, self.max_length, self.num_symbols, key=key)

        return draw


@dataclasses.dataclass
class DrawnConfig(TaskConfig):
    """Base class of tasks on sequences of symbols that are drawn as they are needed: there are no files.

    `data` has `vocab_size` and `draw(split)`; `task_class` is the task.
    """

    task_class: ClassVar[Callable[..., Any]]

    def splits(self) -> Splits[DrawSequences]:
        """Returns how sequences of each split are drawn; there are all splits."""
        return Splits(lambda split: True, self.data.draw)

    def setup(self, model: DecoderConfig, splits: Splits[DrawSequences], artifacts: Artifacts) -> Any:
        """See `tfx_jax.tasks.task.TaskConfig`; there are no artifacts: symbols are their own ids."""
        vocab_size = self.data.vocab_size
        if artifacts.starts_from_model:
            if model.vocab_size < vocab_size:
                raise UserError(f"the model to start from has {model.vocab_size} tokens, {vocab_size} are needed")
            vocab_size = model.vocab_size
        return self.task_class(self, dataclasses.replace(cast(Any, model), vocab_size=vocab_size), splits, NO_DATA)

    def planned(self, model: DecoderConfig, options: LoaderOptions) -> PlannedTask:
        model = dataclasses.replace(cast(Any, model), vocab_size=self.data.vocab_size)
        dtypes = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
        task = self.task_class(self, model, NO_DATA, NO_DATA)
        return PlannedTask(task, planned_batch(self.data, options, dtypes=dtypes))


class DrawnSequences(abc.ABC):
    """Sequences of one length, each drawn when it is asked for, as an `ExampleSource`."""

    def __init__(self, count: int, length: int, *, key: Sequence[int]):
        """Takes what decides the sequences.

        Args:
          count: how many there are.
          length: of each.
          key: numbers, not negative; sources of other keys have other sequences.
        """
        self._count, self._length, self._key = count, length, tuple(key)

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> Example:
        """Draws a sequence."""

    @property
    def lengths(self) -> np.ndarray:
        """All examples are equally long, [count] int."""
        return np.full(self._count, self._length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._count:
            raise IndexError(f"example {index} of {self._count}")
        return self.draw(np.random.default_rng((*self._key, index)))


class DrawnTask(TokenPredictionBase[Config, DecoderConfig, DrawSequences]):
    """Base class of the tasks of a `DrawnConfig`: symbols with a weight are predicted, others in every epoch."""

    def make_epochs(self, seed: int) -> Callable[[int], ExampleSource]:
        """Returns the training examples by the number of the epoch."""
        draw = self._splits["train"]
        return lambda epoch: draw(seed, epoch)

    def make_eval_examples(self, split: Split) -> ExampleSource:
        return self._splits[split](0, 0)

    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        return duplication_loss(model, batch, rngs)

    def result(self, sums: Mapping[str, Metric]) -> EvalResult:
        """Returns the scores of the symbols with a weight, each given the right ones before it."""
        values = {name: 100 * float(sums[name].mean) for name in ("accuracy", "exact_match")}
        values["loss"] = float(sums["nll"].mean)
        return eval_result(self.metrics, values, f"{sums['exact_match'].weight:,.0f} sequences")


class DuplicatedSequences(DrawnSequences):
    """Sequences 0 w 0 w; see `duplicate`."""

    def __init__(self, count: int, length: int, num_symbols: int, *, key: Sequence[int]):
        """Takes what decides the sequences: their length is of all of 0 w 0 w, and w is drawn from 1 .. num_symbols."""
        super().__init__(count, length, key=key)
        self._num_symbols = num_symbols

    def draw(self, rng: np.random.Generator) -> Example:
        return duplicate(rng.integers(1, self._num_symbols, self._length // 2 - 1, endpoint=True))


def duplicate(word: Sequence[int] | np.ndarray) -> Example:
    """Returns an example of a word w, [W]: every token of 0 w 0 w, and what follows it.

    Returns:
      "inputs" and "targets", [2 W + 2] int32, and "weights", [2 W + 2] float32: 1 where a symbol of the second w
      follows. The last token is read too, so that the length is that of the paper, and predicts nothing.

    >>> {name: array.tolist() for name, array in duplicate([5, 7]).items()}
    {'inputs': [0, 5, 7, 0, 5, 7], 'targets': [5, 7, 0, 5, 7, 0], 'weights': [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]}
    """
    half = np.concatenate([[0], np.asarray(word)]).astype(np.int32)
    inputs = np.tile(half, 2)
    weights = np.zeros(len(inputs), np.float32)
    weights[len(half) : -1] = 1
    return {"inputs": inputs, "targets": np.roll(inputs, -1), "weights": weights}


class DuplicationTask(DrawnTask["DuplicationConfig"]):
    """Duplication of symbols, other ones in every epoch."""

    metrics = (
        MetricInfo("accuracy", "accuracy", " %", note="symbols of the second half"),
        MetricInfo("exact_match", "exact match", " %", note="sequences whose second half is entirely right"),
        MetricInfo("loss", "loss", " nats", digits=4, is_loss=True),
    )

    def encode(self, words: Sequence[Sequence[int]]) -> list[Example]:
        """Returns an example for each word.

        Raises:
          UserError: for a word of another length than those of the data, or with a symbol that they have not.
        """
        size, most = self.config.data.max_length // 2 - 1, self.config.data.num_symbols
        for word in words:
            if len(word) != size or not all(1 <= symbol <= most for symbol in word):
                raise UserError(f"a word has {size} symbols of 1 .. {most}, got {list(word)}")
        return [duplicate(word) for word in words]

    def predict(self, model: TrainedModel, words: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the likeliest symbol at each place of the second w, given the right ones before it."""
        found = model.predict(predict_tokens, ExampleList(self.encode(words), by="inputs"), self.batch_spec)
        return [tokens[len(tokens) // 2 : -1] for tokens in found]


@documented
@dataclasses.dataclass
class DuplicationConfig(DrawnConfig):
    """To say a random sequence of symbols for the second time."""

    data: DuplicationData = dataclasses.field(default_factory=DuplicationData)

    task_class = DuplicationTask

    def validate(self, model: ModelConfig) -> None:
        require_kind(model, "decoder", "duplication")
        if self.data.max_length % 2:
            raise UserError(f"config.task.data.max_length={self.data.max_length} must be even: two halves 0 w")
        check_max_length(model, self.data.max_length)

    def tiny(self) -> None:
        data = self.data
        data.max_length, data.train_sequences, data.eval_sequences, data.tokens_per_batch = 16, 64, 16, 256


def duplication_loss(model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
    """Sums the cross entropy of the symbols of the second w.

    Args:
      model: of the kind "decoder": `model(inputs, rngs=...)` gives the logits of what follows each token.
      batch: "inputs" and "targets" [B, T] int32, "weights" [B, T] float32, as of `duplicate`; rows of weight 0 are
        padding.
      rngs: stream `dropout`; None means evaluation.

    Returns:
      What `summed_cross_entropy` gives, and the metric "exact_match": the share of the rows all of whose predictions
      are right. `num_tokens` counts those read.
    """
    targets, weights = batch["targets"], batch["weights"]
    logits = model(batch["inputs"], rngs=rngs)
    output = summed_cross_entropy(logits, targets, weights)
    is_row = (weights > 0).any(axis=-1)
    is_right = (is_first_choice(logits, targets) | (weights == 0)).all(axis=-1)
    num_rows = is_row.sum(dtype=jnp.float32)
    exact_match = Metric((is_right & is_row).sum(dtype=jnp.float32), num_rows)
    return output._replace(
        metrics=output.metrics | {"exact_match": exact_match}, num_tokens=num_rows * weights.shape[-1]
    )


def predict_tokens(model: Any, batch: dict[str, Array]) -> Int[Array, "B T"]:
    """The likeliest token behind each of "inputs", [B, T]; for `TrainedModel.predict`."""
    return model(batch["inputs"]).argmax(axis=-1)
