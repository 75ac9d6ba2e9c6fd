"""The names of the splits of a data set."""

from typing import Literal

Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
