"""All fields of an experiment, each as the flag that sets it, with what it means."""

import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from tfx_jax.fields import meanings

_WIDTH = 120


def fields_help(config: Any, name: str = "config") -> str:
    """Describes nested dataclasses.

    Args:
      config: an experiment's.
      name: what flags call it.

    Returns:
      A paragraph for each dataclass, the class and its docstring's first line above; a line for each field:
      `--config.seed=0`, what the comment in the source says of it and which values it may have.
    """
    return "\n\n".join("\n".join(lines) for lines in _paragraphs(config, name))


def _paragraphs(config: Any, name: str) -> Iterator[list[str]]:
    kind = type(config)
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    flags = {
        field.name: f"--{name}.{field.name}={_spelled(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if not dataclasses.is_dataclass(getattr(config, field.name))
    }
    column = 2 + min(max(map(len, flags.values()), default=0), 60)
    lines = [f"{kind.__name__}: {summary}"]
    for field in dataclasses.fields(config):
        if field.name in flags:
            indent = " " * column
            told = textwrap.wrap(meanings(kind)[field.name], _WIDTH, initial_indent=indent, subsequent_indent=indent)
            flag = flags[field.name]
            if told and len(flag) + 2 <= column:
                told[0] = f"{flag:<{column}}{told[0].lstrip()}"
            else:
                told = [flag, *told]
            lines += told
    yield lines
    for field in dataclasses.fields(config):
        if field.name not in flags:
            yield from _paragraphs(getattr(config, field.name), f"{name}.{field.name}")


def _spelled(value: Any) -> str:
    """A value as a shell takes it in a flag; lists and the like as they are written in Python."""
    return shlex.quote(value) if isinstance(value, str) and value else shlex.quote(str(value)) if value != "" else ""
