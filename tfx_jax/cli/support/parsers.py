"""Parsers of the verbs, for completion and for the command reference."""

import argparse
import importlib
from typing import Any, NoReturn
from unittest import mock

from tfx_jax.arguments import Parser


class _FoundError(Exception):
    """Carries a parser out of the verb that made it."""


def parser_of(verb: str, *arguments: str) -> argparse.ArgumentParser:
    """Returns the parser that a verb makes for its arguments.

    Runs the verb, but leaves it with an exception as soon as its parser begins to parse.
    """

    def stop(parser: Parser, *_: Any, **__: Any) -> NoReturn:
        raise _FoundError(parser)

    with mock.patch.object(Parser, "parse_known_args", stop), mock.patch.object(Parser, "print_help", stop):
        try:
            importlib.import_module(f"tfx_jax.cli.{verb.replace('-', '_')}").run(arguments)
        except _FoundError as found:
            return found.args[0]
    raise LookupError(f"tfx-jax {verb} has no parser")
