"""What all experiments share that learn from examples, which fit into memory and are rows of various lengths."""

import abc
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from etils import epath

from tfx_jax.data.batching import Example, ExampleList, ExampleSource, eval_batches
from tfx_jax.data.files import write_file
from tfx_jax.data.process_shard import ProcessShard
from tfx_jax.data.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.training.artifacts import artifact
from tfx_jax.training.distributed import gather_lists
from tfx_jax.training.experiments.rows import RowsExperiment
from tfx_jax.training.step import Params

Record = TypeVar("Record")

GRAMMAR_SIZES: dict[Split, int] = {"train": 2_000, "validation": 200, "test": 200}
"""How many examples of the built-in grammar each split has."""

# Coarser than `length_boundaries`: each length is a program to compile, and small data sets are trained on for minutes.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)


class ExamplesExperiment(RowsExperiment[Sequence[Record]]):
    """An experiment whose splits are lists of examples; subclasses say which rows these are.

    Attributes:
      length_of: the array that says how long a row is.
    """

    length_of: ClassVar[str]

    @abc.abstractmethod
    def rows(self, examples: Sequence[Record]) -> list[Example]:
        """The rows of examples; one each or several."""

    def make_epochs(self) -> Callable[[int], ExampleSource]:
        """The same rows in each epoch."""
        rows = self._as_rows(self.rows(self.split("train")))
        return lambda epoch: rows

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The lengths that batches may have."""
        max_length = self.config.data.max_length
        return (*(length for length in _LENGTHS if length < max_length), max_length)

    def predict(self, params: Params, rows: Sequence[Example]) -> list[Any]:
        """Applies `predict_batch` to rows; processes share them.

        Returns:
          For each row its part of the array, as nested lists, or a list of its parts.
        """
        shard = ProcessShard(jax.process_index(), jax.process_count())
        found: list[Any] = [None] * len(rows)
        passed = list(eval_batches(self._as_rows(rows), self.batch_spec, shard=shard))
        for batch, result in zip(passed, self.predictor(params, passed), strict=True):
            arrays = [np.asarray(array).tolist() for array in jax.tree.leaves(result)]
            for place, index in enumerate(batch["index"].tolist()):
                if index >= 0:
                    parts = [array[place] for array in arrays]
                    found[index] = parts if len(parts) > 1 else parts[0]
        return gather_lists(found[shard.index :: shard.count])

    def _as_rows(self, rows: Sequence[Example]) -> ExampleList:
        return ExampleList(rows, by=self.length_of)


def made_once(workdir: epath.PathLike, name: str, make: Callable[[], Any], *, can_make: bool) -> Any:
    """What a JSON file of a workdir says; a training makes it first if it is not there.

    Raises:
      UserError: if it is missing otherwise, or damaged.
    """
    path = epath.Path(workdir) / name
    with artifact(workdir, name, can_make=can_make) as is_new:
        if is_new and not path.exists():
            write_file(path, (json.dumps(make(), ensure_ascii=False) + "\n").encode())
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): put back a copy") from None
