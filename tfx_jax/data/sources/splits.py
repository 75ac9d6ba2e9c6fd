"""The splits of a data set."""

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from tfx_jax.errors import UserError, one_line

Split = Literal["train", "validation", "test"]
"""The name of a part of a data set."""

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""All splits, in the order in which they are read."""

Data = TypeVar("Data")


class Splits(Generic[Data]):
    """The splits of a data set, each of which is read at its first use and then kept in memory."""

    def __init__(self, has: Callable[[Split], bool], load: Callable[[Split], Data], *, field: str = "file"):
        """Stores the functions; nothing is read.

        Args:
          has: returns whether the configuration names a split.
          load: reads a split.
          field: suffix of the configuration's fields, for error messages: "file" for `config.task.data.train_file`.
        """
        self._has, self._load, self._field = has, load, field
        self._loaded: dict[Split, Data] = {}

    def __contains__(self, split: Split) -> bool:
        return self._has(split)

    def __getitem__(self, split: Split) -> Data:
        """Returns a split.

        Raises:
          UserError: if the configuration does not name the split, or it cannot be read.
        """
        if split not in self._loaded:
            if split not in self:
                kind = "folder" if self._field == "folder" else "file"
                raise UserError(f"config.task.data.{split}_{self._field} is not set: the {split} split needs a {kind}")
            try:
                self._loaded[split] = self._load(split)
            except ImportError as error:  # the client of a remote file system is not installed
                raise UserError(
                    f"the {split} split cannot be read ({one_line(error)}): install the missing package, or copy the "
                    "data to this machine"
                ) from None
        return self._loaded[split]
