"""What a tokenizer.json may ask for: a file of a stranger must not take the memory, nor end the program."""

from collections.abc import Mapping, Sequence
from typing import Any

from tfx_jax.errors import UserError

_MAX_GROWTH = 1_000  # of a text by its normalizers; those of published tokenizers make of a character a few
_MAX_SPECIALS = 100  # that a template puts around a text


def check_pipeline(values: Mapping[str, Any], path: Any) -> None:
    """Checks a tokenizer.json that has been read.

    Args:
      values: what it holds.
      path: its name, for messages.

    Raises:
      UserError: if its normalizers would make a text many times longer, or its template would put many tokens around
        it.
    """
    growth = 1
    for step in _steps(values.get("normalizer"), "normalizers"):
        content = step.get("content", step.get("prepend"))
        if isinstance(content, str):
            pattern = step.get("pattern")
            matched = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(1, len(content) // max(1, len(matched) if isinstance(matched, str) else 1))
        if growth > _MAX_GROWTH:
            raise UserError(f"{path}: its normalizers would make a text more than {_MAX_GROWTH:,} times longer")
    for step in _steps(values.get("post_processor"), "processors"):
        for name in ("single", "pair"):
            template = step.get(name)
            if isinstance(template, Sequence) and len(template) > _MAX_SPECIALS:
                raise UserError(f"{path}: its template for a {name} has {len(template):,} parts: no model needs those")


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a part that may be a sequence of others, as deep as it is nested."""
    found, waiting = [], [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, Mapping):
            found.append(step)
            if isinstance(inner := step.get(name), list):
                waiting += inner
    return found
