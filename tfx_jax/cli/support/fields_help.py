"""Help text for all fields of an experiment: each as the flag that sets it, with its meaning."""

import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from tfx_jax.fields import meanings

_WIDTH = 120


def fields_help(config: Any, name: str = "config") -> str:
    """Describes the fields of nested dataclasses.

    Args:
      config: the configuration of an experiment.
      name: prefix of the flags.

    Returns:
      One paragraph per dataclass. It begins with the class name and the first line of its docstring, followed by one
      line per field: `--config.seed=0`, the comment in the source and the allowed values.
    """
    return "\n\n".join("\n".join(lines) for lines in _paragraphs(config, name))


def _paragraphs(config: Any, name: str) -> Iterator[list[str]]:
    """Yields the lines of a dataclass, whose flags begin with `--name.`, and then those of each nested one."""
    kind = type(config)
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    flags = {
        field.name: f"--{name}.{field.name}={_spelled(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if not dataclasses.is_dataclass(getattr(config, field.name))
    }
    column = 2 + min(max(map(len, flags.values()), default=0), 60)  # at which the meanings begin
    lines = [f"{kind.__name__}: {summary}"]
    for field in dataclasses.fields(config):
        if field.name in flags:
            indent = " " * column
            meaning = textwrap.wrap(meanings(kind)[field.name], _WIDTH, initial_indent=indent, subsequent_indent=indent)
            flag = flags[field.name]
            if meaning and len(flag) + 2 <= column:
                meaning[0] = f"{flag:<{column}}{meaning[0].lstrip()}"
            else:  # a long flag has a separate line
                meaning = [flag, *meaning]
            lines += meaning
    yield lines
    for field in dataclasses.fields(config):
        if field.name not in flags:
            yield from _paragraphs(getattr(config, field.name), f"{name}.{field.name}")


def _spelled(value: Any) -> str:
    """Returns a value as a shell takes it in a flag, in Python syntax if it is not a string; "" for an empty string."""
    return shlex.quote(str(value)) if value != "" else ""
