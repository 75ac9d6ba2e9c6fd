"""Dataclass fields of configurations with declared bounds: `num_layers: int = at_least(1, 6)`."""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import math
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from tfx_jax.errors import UserError, printable

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)

_LARGEST = 2**31 - 1  # counts and sizes are int32 on devices
MAX_BEAMS = 10_000
"""Largest beam width; quality gains end at some tens of beams, and memory grows with the width."""

MAX_LENGTH_PENALTY = 7
"""Largest exponent of a beam search's length penalty: ((5 + L) / 6)^7 is finite in float32 up to L = 1,000,000."""


def at_least(least: float, default: T) -> T:
    """Declares a dataclass field with numbers of at least `least`; None is not checked."""
    return dataclasses.field(default=default, metadata={"at_least": least})


def within(least: float, most: float, default: T) -> T:
    """Declares a dataclass field with numbers in [least, most]; `most` may be larger than 2^31 - 1."""
    return dataclasses.field(default=default, metadata={"at_least": least, "at_most": most})


def fraction(default: T) -> T:
    """Declares a dataclass field with numbers in [0, 1), such as a dropout rate."""
    return dataclasses.field(default=default, metadata={"is_fraction": True})


def one_of(choices: Iterable[str], default: str) -> str:
    """Declares a dataclass field with one of the strings `choices`."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def check_fields(config: Any, name: str = "config") -> None:
    """Checks the type and value of every field of nested dataclasses against its declaration.

    Args:
      config: a dataclass.
      name: name of the dataclass in messages.

    Raises:
      UserError: if a value is out of range or has the wrong type; the message names the field.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        path, metadata = f"{name}.{field.name}", field.metadata
        is_dataclass = hasattr(value, "__dataclass_fields__")
        if is_dataclass:  # first: checking its type may read properties, which need valid fields
            check_fields(value, path)
        _check_type(path, value, hints[field.name])
        if is_dataclass or value is None:
            continue
        most = metadata.get("at_most", _LARGEST)
        # Without a declared limit, only integers are limited, because they are int32 on devices.
        is_limited = isinstance(value, (int, float) if "at_most" in metadata else int)
        if is_limited and value > most:
            raise UserError(f"{path} must be at most {most}, got {_shown(value)}")
        _check_integers(path, value, max(most, _LARGEST))
        if "at_least" in metadata and not value >= metadata["at_least"]:
            raise UserError(f"{path} must be at least {metadata['at_least']}, got {_shown(value)}")
        if "is_fraction" in metadata and not 0.0 <= value < 1.0:
            raise UserError(f"{path} must be in [0, 1), got {_shown(value)}")
        if "choices" in metadata and value not in metadata["choices"]:
            listed = " or ".join(f'"{choice}"' for choice in metadata["choices"])
            raise UserError(f"{path} must be {listed}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path} must be finite, got {value}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Returns the annotated type of each field of a dataclass."""
    return typing.get_type_hints(kind)


def _check_type(path: str, value: Any, hint: Any) -> None:
    """Raises UserError unless a value has the annotated type of its field; integers are valid floats."""
    if _has_type(value, hint):
        return
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    names = " or ".join(_type_name(kind) for kind in alternatives)
    if isinstance(value, list):  # of Python, where a tuple is asked for: a configuration can be hashed
        names = names.replace("a list of", "a tuple of")
    raise UserError(f"{path} must be {names}, got {_shown(value)}")


def _check_integers(path: str, value: Any, most: float) -> None:
    """Raises UserError unless a value, or each item of a tuple, is in [-(2^31 - 1), most] if it is an integer."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and not -_LARGEST <= number <= most:
            raise UserError(f"{path} must be from {-_LARGEST} to {most}, got {_shown(number)}")


def _has_type(value: Any, hint: Any) -> bool:
    """Returns whether a value has an annotated type: a class, X | Y or tuple[X, ...]; see `_check_type`."""
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_has_type(item, typing.get_args(hint)[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False):  # typing.is_protocol from Python 3.13 on
        return dataclasses.is_dataclass(value)  # a user-defined task may lack optional methods
    return isinstance(value, hint)


def _type_name(kind: Any) -> str:
    """Returns a type in words, such as "a whole number" or "a list of whole numbers"."""
    if typing.get_origin(kind) is tuple:
        _, _, noun = _type_name(typing.get_args(kind)[0]).partition(" ")  # without the article
        return f"a list of {noun}s"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "None"}
    return names.get(kind) or f"an instance of {kind.__name__}"


def _shown(value: Any) -> str:
    """Returns a value as text for messages; Python cannot print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    return printable(repr(value), 100)


def documented(kind: Kind) -> Kind:
    """Appends the comments of a dataclass's fields to its docstring, and makes it reject attributes that are no fields.

    Subclasses inherit the check, with their own fields: a misspelled `config.num_stepz = 3` raises a UserError that
    suggests the field.
    """
    kind.__doc__ = cast(Any, _Documentation(kind.__doc__))
    cast(Any, kind).__setattr__ = _set_field
    return kind


def _set_field(config: Any, name: str, value: Any) -> None:
    """Sets an attribute of a configuration; raises UserError unless its class declares it."""
    if name not in config.__dataclass_fields__ and not hasattr(type(config), name):
        names = [field.name for field in dataclasses.fields(config)]
        similar = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"its fields are {', '.join(names)}"
        raise UserError(f"{type(config).__name__} has no field {name}; {hint}")
    object.__setattr__(config, name, value)


class _Documentation:
    """A docstring that reads the source when it is accessed, so that imports stay fast."""

    def __init__(self, text: str | None):
        self._text = inspect.cleandoc(text or "")

    def __get__(self, instance: Any, owner: type) -> str:
        entries = [f"{name}: {meaning}" for name, meaning in meanings(owner).items() if meaning]
        lines = [line for text in entries for line in textwrap.wrap(text, 100, subsequent_indent="  ")]
        return "\n".join([self._text, "", "Fields:", *(f"  {line}" for line in lines)])


def meanings(kind: type) -> dict[str, str]:
    """Returns the meaning of each field of a dataclass: its help text or source comment, and its allowed values."""
    comments = _comments(kind)
    result: dict[str, str] = {}
    for field in dataclasses.fields(kind):
        text = field.metadata.get("help") or comments.get(field.name, "").rstrip(".")
        result[field.name] = "; ".join(part for part in (text, _allowed(field.metadata)) if part)
    return result


def _allowed(metadata: Any) -> str:
    """Returns the values that the declaration of a field allows, as text; "" if it allows all."""
    if "choices" in metadata:
        return f"one of {', '.join(metadata['choices'])}"
    if "is_fraction" in metadata:
        return "in [0, 1)"
    if "at_most" in metadata:
        return f"{metadata['at_least']} to {metadata['at_most']}"
    return f"at least {metadata['at_least']}" if metadata.get("at_least") else ""


@functools.cache
def _comments(kind: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass, at its end or above it; {} without source code."""
    result: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # defined in a notebook or at run time
            continue
        comments = {  # by line number
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        for node in getattr(body, "body", ()):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                trailing = [
                    comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments
                ]
                result[node.target.id] = " ".join(trailing or _comments_above(node.lineno, lines, comments))
    return result


def _comments_above(line: int, lines: list[str], comments: dict[int, str]) -> list[str]:
    """Returns the comments directly above a line of source.

    Args:
      line: number of the line, from 1.
      lines: all lines of the source.
      comments: the comments of the source, by the number of their line.
    """
    above: list[str] = []
    while (line := line - 1) in comments and lines[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
    return above
