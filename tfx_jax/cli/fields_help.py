"""All fields of an experiment, each as the flag that sets it, with what it means."""

import ast
import dataclasses
import functools
import inspect
import io
import shlex
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

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
        field.name: f"--{name}.{field.name}={_spelt(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if not dataclasses.is_dataclass(getattr(config, field.name))
    }
    column = 2 + min(max(map(len, flags.values()), default=0), 60)
    lines = [f"{kind.__name__}: {summary}"]
    for field in dataclasses.fields(config):
        if field.name in flags:
            meaning = "; ".join(
                filter(None, (_comments(kind).get(field.name, "").rstrip("."), _allowed(field.metadata)))
            )
            indent = " " * column
            told = textwrap.wrap(meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent)
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


def _spelt(value: Any) -> str:
    """A value as a shell takes it in a flag; lists and the like as they are written in Python."""
    return shlex.quote(value) if isinstance(value, str) and value else shlex.quote(str(value)) if value != "" else ""


def _allowed(metadata: Any) -> str:
    """What `tfx_jax.fields` lets a field be."""
    if "choices" in metadata:
        return f"one of {', '.join(metadata['choices'])}"
    if "is_fraction" in metadata:
        return "in [0, 1)"
    if "at_most" in metadata:
        return f"{metadata['at_least']} to {metadata['at_most']}"
    return f"at least {metadata['at_least']}" if metadata.get("at_least") else ""


@functools.cache
def _comments(kind: type) -> dict[str, str]:
    """The comment of each field of a dataclass, behind it or above it; nothing where there is no source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # made in a notebook, or by hand
            continue
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        for node in getattr(body, "body", ()):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                behind = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
                found[node.target.id] = " ".join(behind or _above(node.lineno, lines, comments))
    return found


def _above(line: int, lines: list[str], comments: dict[int, str]) -> list[str]:
    """The lines of comment right above a line of source."""
    told: list[str] = []
    while (line := line - 1) in comments and lines[line - 1].lstrip().startswith("#"):
        told.insert(0, comments[line])
    return told
