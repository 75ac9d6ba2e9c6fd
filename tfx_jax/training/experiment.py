"""What every experiment is to the training loop: data, model, loss and scores, whatever is learned."""

import abc
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import grain
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.data.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.nn.attention import ShardAttention
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.step import Params


class Score(NamedTuple):
    """How good a model is, in one respect.

    Attributes:
      name: by which evaluations have it, such as "bleu".
      title: for a person, such as "BLEU".
      unit: behind its values.
      digits: after the point.
      is_loss: whether lower is better.
      note: how it is computed, where that has to be said.
    """

    name: str
    title: str
    unit: str = ""
    digits: int = 2
    is_loss: bool = False
    note: str = ""

    def spell(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:.{self.digits}f}{self.unit}"


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
      scores: the values of all scores of the experiment, by name.
      text: the same for a person, on one line.
    """

    scores: dict[str, float]
    text: str


class Experiment(abc.ABC):
    """A configuration brought to life. `tfx_jax.training.experiments` has a subclass for everything that is learned.

    Attributes:
      scores: what evaluations measure; the first decides which checkpoint is best.
      token: what the throughput counts, and the loss is a mean over.
      config: the configuration.
    """

    scores: ClassVar[tuple[Score, ...]]
    token: ClassVar[str] = "token"

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration that `validate` has passed."""
        self.config = config

    @abc.abstractmethod
    def read_data(self) -> None:
        """Reads the training and validation splits, before anything is written.

        Raises:
          UserError: if they cannot be read.
        """

    @property
    @abc.abstractmethod
    def has_validation(self) -> bool:
        """Whether there is a split to evaluate on while training."""

    @abc.abstractmethod
    def open(self, workdir: epath.PathLike, *, can_make: bool = True) -> None:
        """Reads what a model needs beside its parameters from the workdir, or makes it there from the training data.

        Args:
          workdir: of the training.
          can_make: whether it may be made, as `tfx_jax.training.artifacts.artifact` has it.

        Raises:
          UserError: if it is missing and may not be made, or is damaged.
        """

    @abc.abstractmethod
    def make_model(self, shard_attention: ShardAttention | None = None) -> nnx.Module:
        """Draws a model; its vocabulary is the tokenizer's, which may be smaller than what the configuration allows."""

    @abc.abstractmethod
    def batches(self, mesh: Mesh) -> grain.IterDataset[dict[str, np.ndarray]]:
        """What this process reads of the training split when it trains on a mesh."""

    @abc.abstractmethod
    def loss(self, model: Any, batch: dict[str, Array], rngs: nnx.Rngs | None) -> LossOutput:
        """What is to be lowered, of a batch; see `tfx_jax.training.step.update`."""

    def make_carry(self) -> Any:
        """What the first batch begins with; None where examples do not go on from one batch to the next."""
        return None

    @abc.abstractmethod
    def training_flops(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The model FLOPs of a step on a batch of arrays of these shapes; see `tfx_jax.training.flops`."""

    @abc.abstractmethod
    def evaluate(self, params: Params, split: Split = "validation") -> Evaluation:
        """Scores parameters, which are NumPy arrays, on the "validation" or "test" split; processes share the work.

        Raises:
          UserError: if there is no such split.
        """

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The model without its parameters."""
        return nnx.graphdef(nnx.eval_shape(self.make_model))

    def rank(self, scores: Mapping[str, float]) -> float:
        """By how much one evaluation is better than others: the first score, higher being better."""
        first = self.scores[0]
        return -scores[first.name] if first.is_loss else scores[first.name]

    def no_such_split(self, split: str) -> UserError:
        """The error for a split that the configuration does not name."""
        return UserError(f"config.data.{split}_file names no file for the {split} split")
