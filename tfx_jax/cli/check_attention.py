"""`tfx-jax check-attention`: compares an attention function with the float64 formula on many small cases."""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.errors import UserError, one_line
from tfx_jax.testing import CASES, check_attention, summarize


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
            raise UserError(f"unknown case {name!r}; use one of {', '.join(CASES)}")
    set_up_program()
    checks = check_attention(_function(arguments.function), cases=arguments.case)
    print(json.dumps([check._asdict() for check in checks]) if arguments.json else summarize(checks))
    return int(any(check.outcome == "wrong" for check in checks))


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
