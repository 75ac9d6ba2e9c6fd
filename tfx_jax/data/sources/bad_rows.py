"""One error for all bad rows of a file, so that they can be corrected together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from etils import epath

from tfx_jax.errors import UserError

Row = TypeVar("Row")
Value = TypeVar("Value")

_SHOWN = 3  # problems in a message, and rows of each


class BadRows:
    """Bad rows of some data by their problems; is false as long as there are none."""

    def __init__(self):
        self._rows: dict[str, list[int]] = {}  # numbers of the rows with each of the first problems
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, number: int, problem: UserError) -> None:
        """Adds a row that has a problem."""
        self._count += 1
        if str(problem) in self._rows or len(self._rows) < _SHOWN:
            self._rows.setdefault(str(problem), []).append(number)

    def describe(self, locate: Callable[[int], str], unit: str) -> str:
        """Returns a message with the first problems, their first rows and the number of all bad rows.

        Args:
          locate: returns the place of a row from its number, such as "line 7".
          unit: what a row is, such as "line".
        """
        problems = []
        for problem, numbers in self._rows.items():
            places = [*map(locate, numbers[:_SHOWN]), *["..."] * (len(numbers) > _SHOWN)]
            problems.append(f"{', '.join(places)}: {problem}")
        return "; ".join([*problems, *[f"{self._count:,} bad {unit}s in all"] * (self._count > 1)])


def parse_rows(
    path: epath.PathLike, unit: str, rows: Iterable[tuple[int, Row]], parse: Callable[[Row], Value]
) -> Iterator[tuple[int, Value]]:
    """Yields (number, `parse(row)`) of each row of a file until one is bad, and only checks the rows after it.

    Args:
      path: path of the file, for the message.
      unit: what a row is, such as "line".
      rows: numbered rows.
      parse: returns the value of a row, or raises UserError with its problem.

    Raises:
      UserError: after the last row, if some were bad: names the first of them, see `BadRows.describe`.
    """
    bad_rows = BadRows()
    for number, row in rows:
        try:
            value = parse(row)
        except UserError as error:
            bad_rows.add(number, error)
            continue
        if not bad_rows:
            yield number, value
    if bad_rows:
        raise UserError(f"{path}, {bad_rows.describe(lambda number: f'{unit} {number}', unit)}")
