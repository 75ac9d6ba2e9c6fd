"""One-line argument errors, without anything that is slow to import."""

import argparse
import math
from typing import Any, NoReturn

from tfx_jax.errors import UserError
from tfx_jax.fields import MAX_BEAMS, MAX_LENGTH_PENALTY


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s and that takes no abbreviations of flags."""

    def __init__(self, verb: str, description: str):
        super().__init__(f"tfx-jax {verb}", description=description, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but that "--" is no value: argparse takes it out and stores an empty list, whatever the type."""
        for argument in args or ():
            flag, _, value = argument.partition("=")
            if value == "--" and flag in self._option_string_actions:
                self.error(f'argument {flag}: "--" is no value')
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Turns an argument error into one line."""
        raise UserError(f"{message}; see {self.prog} --help")


def folder(text: str) -> str:
    """Reads the name of a folder from the command line, where an empty one would mean the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder")
    return text


def at_least_one(text: str) -> int:
    """Reads a count from the command line."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 1, of 31 bits')
    return int(text)


def beam_width(text: str) -> int:
    """Reads the width of a beam from the command line."""
    if at_least_one(text) > MAX_BEAMS:
        raise argparse.ArgumentTypeError(f"{text} beams are more than {MAX_BEAMS:,}")
    return int(text)


def not_negative(text: str) -> float:
    """Reads a number from the command line that may be 0, and is not infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of at least 0')
    return number


def seed(text: str) -> int:
    """Reads a seed from the command line: JAX takes the low 32 bits of any other."""
    if not text.isdecimal() or len(text) > 10 or not int(text) < 2**32:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of 0 to {2**32 - 1}')
    return int(text)


def length_penalty(text: str) -> float:
    """Reads the exponent of a beam search's length penalty from the command line."""
    number = not_negative(text)
    if number > MAX_LENGTH_PENALTY:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_LENGTH_PENALTY}")
    return number
