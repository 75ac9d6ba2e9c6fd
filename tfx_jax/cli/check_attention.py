"""`tfx-jax check-attention`: compares an attention function with the formula, case by case."""

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
    """Checks one function; returns 1 if a case is wrong."""
    parser = Parser(
        "check-attention",
        "Calls an attention function with the signature of jax.nn.dot_product_attention on small cases and compares "
        "values and gradients with the formula in float64. Exit status 1 means that a case is wrong.",
    )
    parser.add_argument("function", metavar="MODULE.FUNCTION", help="for example jax.nn.dot_product_attention")
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="check this case alone; may be given several times (all cases)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects with case, outcome and detail")
    arguments = parser.parse_args(argv)
    for name in arguments.case or ():
        if name not in CASES:
            raise UserError(f"there is no case {name!r}; the cases are {', '.join(CASES)}")
    set_up_program()
    checks = check_attention(_function(arguments.function), cases=arguments.case)
    print(json.dumps([check._asdict() for check in checks]) if arguments.json else summarize(checks))
    return int(any(check.outcome == "wrong" for check in checks))


def _function(name: str) -> Any:
    """Imports a function by its full name; modules of the current folder are found too.

    Raises:
      UserError: if there is no such module or function, or importing the module fails.
    """
    module, _, attribute = name.rpartition(".")
    if not (module and attribute):
        raise UserError(f"write MODULE.FUNCTION, such as jax.nn.dot_product_attention, instead of {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module raises while it is imported
        raise UserError(f"cannot import {module}: {one_line(error)}") from None
    if not callable(function):
        raise UserError(f"{module} has no function {attribute!r}")
    return function
