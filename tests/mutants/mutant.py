"""What a mutant is: one small mistake in one file of the library, and the tests that should notice it."""

import ast
import pathlib
from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake that somebody could make, as exact text and what it becomes."""

    file: str
    """Path below `tfx_jax`."""
    name: str
    """What is wrong then."""
    text: str
    """Stands in the file exactly once."""
    becomes: str
    tests: tuple[str, ...]
    """Files below `tests`, in which order they run; `file -k word` means those of its tests whose names contain it."""

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"


def in_file(file: str, tests: str, *mistakes: tuple[str, ...]) -> tuple[Mutant, ...]:
    """Makes mutants of one file from (name, text, what it becomes), with tests of their own behind if they need them.

    Args:
      file: path below `tfx_jax`.
      tests: files below `tests`, separated by commas.
      *mistakes: what is wrong.
    """
    return tuple(Mutant(file, *mistake[:3], _split([*mistake, tests][3])) for mistake in mistakes)


def mutated(root: pathlib.Path, mutant: Mutant) -> str:
    """The file with the mistake in it.

    Raises:
      ValueError: if the text does not stand there once, or the result is no Python.
    """
    source = (root / "tfx_jax" / mutant.file).read_text()
    if (count := source.count(mutant.text)) != 1:
        raise ValueError(f"{mutant.title}: its text stands there {count} times: {mutant.text!r}")
    result = source.replace(mutant.text, mutant.becomes)
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise ValueError(f"{mutant.title}: it is no Python: {error}") from None
    return result


def _split(tests: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in tests.split(","))
