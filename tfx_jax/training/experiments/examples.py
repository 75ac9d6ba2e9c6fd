"""What all experiments share that learn from examples: parts that are read once and fit into memory."""

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from tfx_jax.data.grammar import Split
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.experiment import Experiment

Example = TypeVar("Example")

GRAMMAR_SIZES: dict[Split, int] = {"train": 2_000, "validation": 200, "test": 200}
"""How many examples of the built-in grammar each part has."""

# Coarser than `length_boundaries`: each length is a program to compile, and small data sets are trained on for minutes.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)


class ExamplesExperiment(Experiment, Generic[Example]):
    """An experiment whose data are lists of examples."""

    def __init__(self, config: ExperimentConfig):
        """Takes a configuration whose data have `train_file`, `validation_file` and `test_file`."""
        super().__init__(config)
        self._examples: dict[Split, Sequence[Example]] = {}

    @abc.abstractmethod
    def read_examples(self, split: Split) -> Sequence[Example]:
        """Reads a part that the configuration names."""

    def examples(self, split: Split) -> Sequence[Example]:
        """A part, read once.

        Raises:
          UserError: if there is no such part, or it cannot be read.
        """
        if split not in self._examples:
            data = self.config.data
            if data.dataset == "files" and not getattr(data, f"{split}_file"):
                raise self.no_such_part(split)
            self._examples[split] = self.read_examples(split)
        return self._examples[split]

    def read_data(self) -> None:
        """Reads the training part and, if there is one, the validation part."""
        for split in ("train", "validation") if self.has_validation else ("train",):
            self.examples(cast(Split, split))

    @property
    def has_validation(self) -> bool:
        """Whether the configuration names a validation part."""
        return self.config.data.dataset != "files" or bool(self.config.data.validation_file)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The lengths that batches may have."""
        max_length = self.config.data.max_length
        return (*(length for length in _LENGTHS if length < max_length), max_length)
