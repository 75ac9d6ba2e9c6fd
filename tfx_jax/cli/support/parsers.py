"""Parsers of the verbs, for completion and for the command reference."""

import argparse
import importlib
from typing import NoReturn

from tfx_jax.arguments import Parser, calls_on_use


class _ParserError(Exception):
    """Carries a parser out of the verb that made it."""


def parser_of(verb: str, *arguments: str) -> argparse.ArgumentParser:
    """Returns the parser that a verb makes for its arguments.

    Runs the verb, but leaves it with an exception as soon as its parser begins to parse.
    """

    def stop(parser: Parser) -> NoReturn:
        raise _ParserError(parser)

    with calls_on_use(stop):
        try:
            importlib.import_module(f"tfx_jax.cli.{verb.replace('-', '_')}").run(arguments)
        except _ParserError as error:
            return error.args[0]
    raise LookupError(f"tfx-jax {verb} has no parser")
