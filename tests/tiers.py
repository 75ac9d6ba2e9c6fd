"""Which cases of a test `make test` runs, and which CI; `make test-all` runs all."""

import collections
import zlib
from collections.abc import Hashable, Iterable, Sequence

import pytest


def slow_but(values: Iterable[Hashable], *quick: Hashable) -> list:
    """Returns the cases of a parametrized test, slow but for those that show its mechanism.

    Args:
      values: of all cases.
      quick: those of them that `make test` runs.
    """
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def one_in(number: int, cases: Sequence[str], *, whole: int) -> list[bool]:
    """Says which cases `--one-in=number` runs: all of a test with few, about one in `number` of one with more.

    A checksum of the case decides. So the share is the same in each run, no regular part of a product is left out, and
    a case that is added changes no other one's lot. A test of which none would run keeps the one of the least checksum.

    Args:
      number: of the cases that one stands for.
      cases: ids, such as "tests/test_x.py::test_y[name]".
      whole: the most cases of a test that runs whole. 0: tests are left out, too.
    """
    checksums: dict[str, dict[str, int]] = collections.defaultdict(dict)  # of a test, of its cases
    for case in cases:
        checksums[case.partition("[")[0]][case] = zlib.crc32(case.encode())
    kept: set[str] = set()
    for test in checksums.values():
        share = [case for case, checksum in test.items() if len(test) <= whole or checksum % number == 0]
        kept.update(share or ([min(test, key=test.__getitem__)] if whole else []))
    return [case in kept for case in cases]
