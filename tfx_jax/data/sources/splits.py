"""The splits of a data set."""

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from tfx_jax.errors import UserError, one_line

Split = Literal["train", "validation", "test"]
"""The name of a part of a data set."""

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""All of them, in the order in which they are read."""

Data = TypeVar("Data")


class Splits(Generic[Data]):
    """The splits of a data set, each of which is read when it is first asked for, and kept."""

    def __init__(self, has: Callable[[Split], bool], load: Callable[[Split], Data], *, field: str = "file"):
        """Reads nothing yet.

        Args:
          has: tells whether the configuration names a split.
          load: reads one.
          field: "file" if `config.task.data.train_file` names the training split, and so on.
        """
        self._has, self._load, self._field = has, load, field
        self._loaded: dict[Split, Data] = {}

    def __contains__(self, split: Split) -> bool:
        return self._has(split)

    def __getitem__(self, split: Split) -> Data:
        """Returns a split.

        Raises:
          UserError: if the configuration names no such split, or it cannot be read.
        """
        if split not in self._loaded:
            if split not in self:
                raise UserError(f"config.task.data.{split}_{self._field} names no file for the {split} split")
            try:
                self._loaded[split] = self._load(split)
            except ImportError as error:  # of the client of a store
                told = f"the {split} split cannot be read ({one_line(error)})"
                raise UserError(f"{told}: install what is missing, or copy the data here") from None
        return self._loaded[split]
