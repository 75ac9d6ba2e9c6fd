"""Warnings about inputs that are longer than the model reads."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

_warned = set[int]()


def warn_shortened(
    inputs: Iterable[Sequence[Any]], limit: int, *, what: str, effect: str, unit: str = "tokens"
) -> None:
    """Logs how many inputs exceed a limit; warns only once about the same inputs, however often they are evaluated.

    Args:
      inputs: all inputs, before they are cut.
      limit: number of units that are read of one input.
      what: name of the inputs in the message, in the plural.
      effect: what happens to longer inputs, for the message.
      unit: name of the units that count the length.
    """
    inputs = list(inputs)
    longer = [tuple(item) for item in inputs if len(item) > limit]
    key = hash((what, effect, limit, *longer))
    if longer and key not in _warned:
        _warned.add(key)
        logging.warning(
            "%s of %s %s have more than %s %s: %s", f"{len(longer):,}", f"{len(inputs):,}", what, limit, unit, effect
        )
