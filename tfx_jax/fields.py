"""Fields of configurations that know which values they may have: `num_layers: int = at_least(1, 6)`."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeVar

from tfx_jax.errors import UserError

T = TypeVar("T")

_LARGEST = 2**31 - 1  # what counts and sizes become on devices
MAX_BEAMS = 10_000
"""That a search may keep: nobody gains by more than some tens, and memory grows with them."""


def at_least(least: float, default: T) -> T:
    """Declares a field of a dataclass whose numbers are not below `least`; None, where allowed, is let through."""
    return dataclasses.field(default=default, metadata={"at_least": least})


def within(least: float, most: float, default: T) -> T:
    """Declares a field of a dataclass whose whole numbers are in [least, most]; `most` may be beyond 31 bits."""
    return dataclasses.field(default=default, metadata={"at_least": least, "at_most": most})


def fraction(default: T) -> T:
    """Declares a field of a dataclass whose numbers are in [0, 1), such as a rate of dropout."""
    return dataclasses.field(default=default, metadata={"is_fraction": True})


def one_of(choices: Iterable[str], default: str) -> str:
    """Declares a field of a dataclass whose strings are among `choices`."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def check_fields(config: Any, name: str = "config") -> None:
    """Checks every field of nested dataclasses against its declaration.

    Args:
      config: a dataclass.
      name: what messages call it.

    Raises:
      UserError: if a value is not allowed; the message names the field.
    """
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        path, metadata = f"{name}.{field.name}", field.metadata
        if hasattr(value, "__dataclass_fields__"):
            check_fields(value, path)
        elif value is None:
            continue
        most = metadata.get("at_most", _LARGEST)
        if isinstance(value, int) and value > most:
            raise UserError(f"{path} must be at most {most}, got {value}")
        if "at_least" in metadata and not value >= metadata["at_least"]:
            raise UserError(f"{path} must be at least {metadata['at_least']}, got {value}")
        if "is_fraction" in metadata and not 0.0 <= value < 1.0:
            raise UserError(f"{path} must be in [0, 1), got {value}")
        if "choices" in metadata and value not in metadata["choices"]:
            listed = " or ".join(f'"{choice}"' for choice in metadata["choices"])
            raise UserError(f"{path} must be {listed}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path} must be finite, got {value}")
