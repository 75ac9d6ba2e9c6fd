"""Warnings about inputs that are longer than a model reads."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

_warned = set[int]()


def warn_shortened(
    inputs: Iterable[Sequence[Any]], limit: int, *, what: str, effect: str, unit: str = "tokens"
) -> None:
    """Logs how many inputs are longer than a limit; the same inputs only once, however often they are evaluated.

    Args:
      inputs: all of them, before anything is cut off.
      limit: the most that is read of one.
      what: what the message calls them, in the plural.
      effect: what happens to those that are longer.
      unit: what the length of an input counts.
    """
    inputs = list(inputs)
    longer = [tuple(item) for item in inputs if len(item) > limit]
    key = hash((what, effect, limit, *longer))
    if longer and key not in _warned:
        _warned.add(key)
        logging.warning(
            "%s of %s %s have more than %s %s: %s", f"{len(longer):,}", f"{len(inputs):,}", what, limit, unit, effect
        )
