"""`tfx-jax check-attention`: compares an attention function with the float64 formula on many small cases."""

import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tfx_jax.arguments import Parser
from tfx_jax.errors import UserError, one_line
from tfx_jax.testing import CASES, Check, check_attention, summarize


def run(argv: Sequence[str]) -> int:
    """Checks one function and prints the outcomes; the exit status is 1 if a case is wrong, else 0."""
    parser = Parser(
        "check-attention",
        "Calls an attention function with the signature of jax.nn.dot_product_attention on small cases and compares "
        "values and gradients with the formula in float64. Exit status 1 means that a case is wrong.",
    )
    parser.add_argument(
        "function",
        metavar="MODULE.FUNCTION",
        help="attention function to check, for example jax.nn.dot_product_attention",
    )
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="check only this case; may be repeated; all cases by default"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list of objects with case, outcome and detail"
    )
    arguments = parser.parse_args(argv)
    for name in arguments.case or ():
        if name not in CASES:
            raise UserError(f"unknown case {name!r}; {_similar_cases(name)}")
    with contextlib.suppress(ModuleNotFoundError):  # installed with jax and jaxtyping only
        from tfx_jax.cli.support.options import set_up_program  # needs all other packages

        set_up_program()
    checks = _check(_function(arguments.function), arguments.case or CASES)
    print(json.dumps([check._asdict() for check in checks]) if arguments.json else summarize(checks))
    return int(any(check.outcome == "wrong" for check in checks))


def _check(function: Any, cases: Sequence[str]) -> list[Check]:
    """Checks case by case, and says on a terminal which one runs, because all of them take minutes."""
    checks: list[Check] = []
    shows_progress = sys.stderr.isatty()
    for number, case in enumerate(cases, 1):
        if shows_progress:
            print(f"\r\x1b[K{number}/{len(cases)} {case}", end="", file=sys.stderr, flush=True)
        checks += check_attention(function, cases=[case])
    if shows_progress:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return checks


def _similar_cases(name: str) -> str:
    """Returns the end of a message about a case that does not exist: similar names, or how to list all."""
    similar = [case for case in CASES if len(name) > 2 and name.lower() in case.lower()][:5]
    similar = similar or difflib.get_close_matches(name, CASES, n=3)
    if similar:
        return f"did you mean {' or '.join(map(repr, similar))}?"
    groups = dict.fromkeys(case.partition(":")[0] for case in CASES)
    return f"names begin with {', '.join(groups)}; tfx_jax.testing.CASES has all {len(CASES)}"


def _function(name: str) -> Any:
    """Imports a function by its full name; modules in the current folder can be imported, too.

    Raises:
      UserError: if there is no such module or function, or importing the module fails.
    """
    module, _, attribute = name.rpartition(".")
    if not (module and attribute):
        raise UserError(f"write MODULE.FUNCTION, such as jax.nn.dot_product_attention, instead of {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # importing a module can raise any error
        raise UserError(f"cannot import {module}: {one_line(error)}") from None
    if not callable(function):
        raise UserError(f"{module} has no function {attribute!r}")
    return function
