"""Which cases of a test `make test` runs; `make test-all` and CI run all."""

from collections.abc import Hashable, Iterable

import pytest


def slow_but(values: Iterable[Hashable], *quick: Hashable) -> list:
    """Returns the cases of a parametrized test, slow but for those that show its mechanism.

    Args:
      values: of all cases.
      quick: those of them that `make test` runs.
    """
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
