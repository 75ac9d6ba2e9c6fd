"""Which places that make a `UserError` no test reaches: `make test ARGS="-p tests.error_branches"` lists them.

A place is a line of the library where one is made. What tests have other processes do is not seen, unless these are
forks, and neither is a `ValueError` that is made a `UserError` elsewhere.
"""

import ast
import os
import pathlib
import sys
import tempfile

import pytest

from tfx_jax import errors

ROOT = pathlib.Path(errors.__file__).parent
_FOLDER = "TFX_JAX_ERROR_BRANCHES"


def places(root: pathlib.Path = ROOT) -> list[str]:
    """All places, as "cli/train.py:41"."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
                found.append((path.relative_to(root).as_posix(), node.lineno))
    return [f"{name}:{line}" for name, line in sorted(found)]


class Recorder:
    """Notes where errors are made, and writes each place once into a folder that all processes of a run share."""

    def __init__(self, folder: pathlib.Path):
        self._seen: set[str] = set()
        self._folder = folder

    def __call__(self, error: Exception, *arguments: object) -> None:
        ValueError.__init__(error, *arguments)
        frame = sys._getframe(2)  # 1 is the function that stands in for __init__
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            place = f"{path.relative_to(ROOT).as_posix()}:{frame.f_lineno}"
            if place not in self._seen:
                self._seen.add(place)
                (self._folder / place.replace("/", "|")).touch()


def pytest_configure(config: pytest.Config) -> None:
    """Notes from now on; the first process makes the folder, workers inherit its name."""
    folder = os.environ.setdefault(_FOLDER, tempfile.mkdtemp(prefix="error-branches-"))
    recorder = Recorder(pathlib.Path(folder))
    errors.UserError.__init__ = lambda error, *arguments: recorder(error, *arguments)


def pytest_terminal_summary(terminalreporter) -> None:
    """Lists what is left."""
    reached = {path.name.replace("|", "/") for path in pathlib.Path(os.environ[_FOLDER]).iterdir()}
    missing = [place for place in places() if place not in reached]
    terminalreporter.write_sep("-", f"{len(missing)} of {len(places())} places of errors that no test reached")
    for place in missing:
        terminalreporter.write_line(place)
