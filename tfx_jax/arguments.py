"""Argument parser of the command line and its value types; imports nothing slow."""

import argparse
import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tfx_jax.errors import UserError
from tfx_jax.fields import MAX_BEAMS, MAX_LENGTH_PENALTY

_on_use: contextvars.ContextVar[Callable[["Parser"], None] | None] = contextvars.ContextVar("_on_use", default=None)


@contextlib.contextmanager
def calls_on_use(function: Callable[["Parser"], None]) -> Iterator[None]:
    """Makes every parser call `function` with itself before it parses arguments or prints its help, in the block."""
    token = _on_use.set(function)
    try:
        yield
    finally:
        _on_use.reset(token)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` for bad arguments and accepts no abbreviated flags."""

    def __init__(self, verb: str, description: str):
        super().__init__(f"tfx-jax {verb}", description=description, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but rejects `--flag=--`, for which argparse would store an empty list."""
        self._announce()
        for argument in args or ():
            flag, _, value = argument.partition("=")
            if value == "--" and flag in self._option_string_actions:
                self.error(f'argument {flag}: "--" is not a value')
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        self._announce()
        super().print_help(file)

    def _announce(self) -> None:
        if (function := _on_use.get()) is not None:
            function(self)

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        raise UserError(f"{message}; see {self.prog} --help")


def folder(text: str) -> str:
    """Parses the name of a folder; an empty name, which would mean the current folder, is rejected."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: name a folder")
    return text


def at_least_one(text: str) -> int:
    """Parses a count: a whole number from 1 to 2^31 - 1."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f'must be a whole number from 1 to {2**31 - 1:,}, got "{text}"')
    return int(text)


def beam_width(text: str) -> int:
    """Parses a beam width."""
    if at_least_one(text) > MAX_BEAMS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_BEAMS:,} beams, got {text}")
    return int(text)


def not_negative(text: str) -> float:
    """Parses a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'must be a finite number of at least 0, got "{text}"')
    return number


def seed(text: str) -> int:
    """Parses a seed. Seeds beyond 32 bits are rejected, because JAX would use their low 32 bits only."""
    if not text.isdecimal() or len(text) > 10 or not int(text) < 2**32:
        raise argparse.ArgumentTypeError(f'must be a whole number from 0 to {2**32 - 1}, got "{text}"')
    return int(text)


def length_penalty(text: str) -> float:
    """Parses the exponent of a beam search's length penalty."""
    number = not_negative(text)
    if number > MAX_LENGTH_PENALTY:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_LENGTH_PENALTY}, got {text}")
    return number
