"""Which cases `--one-in` runs."""

import pytest

from tests import tiers

SMALL = [f"tests/test_a.py::test_few[{case}]" for case in range(6)]
LARGE = [f"tests/test_a.py::test_many[{first}-{second}]" for first in range(40) for second in range(30)]


def kept(number, cases, whole=6):
    return {case for case, stays in zip(cases, tiers.one_in(number, cases, whole=whole), strict=True) if stays}


def test_tests_of_few_cases_run_whole():
    assert kept(1000, [*SMALL, *LARGE]) >= set(SMALL)
    assert not kept(1000, SMALL, whole=5) >= set(SMALL)


def test_no_test_is_left_out_but_by_request():
    for size in range(2, 7):
        assert len(kept(10**9, SMALL[:size], whole=1)) == 1
        assert not kept(10**9, SMALL[:size], whole=0)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_one_case_in_so_many_runs(number):
    assert len(kept(number, LARGE)) == pytest.approx(len(LARGE) / number, rel=0.2)


def test_no_row_of_a_product_is_left_out():
    share = kept(3, LARGE)
    assert {case.partition("[")[2].partition("-")[0] for case in share} == {str(first) for first in range(40)}
    assert {case.partition("-")[2] for case in share} == {f"{second}]" for second in range(30)}


def test_a_new_case_changes_no_other_ones_lot():
    assert kept(4, LARGE) == kept(4, LARGE[:100] + ["tests/test_a.py::test_many[new]"] + LARGE[100:]) - {
        "tests/test_a.py::test_many[new]"
    }
