"""The benchmark of depth, with models that compile in no time."""

import re

import jax
import pytest

from benchmarks import depth

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rows():
    """The cells of every row of both tables."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        printed = []
        monkeypatch.setattr("builtins.print", lambda *args, **_: printed.extend(args))
        depth.main(["--layers=2,8", "--unrolled=2", "--rows=64", "--length=16", "--vocab_size=99", "--d_model=64"])
    jax.config.update("jax_enable_compilation_cache", True)
    lines = [line for line in "\n".join(printed).splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_depth_is_compiled_both_ways(rows):
    times = [row for row in rows if len(row) == 4]
    assert [row[:2] for row in times] == [["2 + 2", "scanned"], ["2 + 2", "unrolled"], ["8 + 8", "scanned"]]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in times)


def test_rematerialization_saves_the_more_the_deeper(rows):
    found = {(row[0], row[2]): float(row[-1]) for row in rows if len(row) == 7}
    assert list(found) == [(f"{n} + {n}", remat) for n in (2, 8) for remat in ("none", "dots", "full")]
    for layers in ("2 + 2", "8 + 8"):
        assert found[layers, "full"] < found[layers, "dots"] < found[layers, "none"] == 1
    assert found["8 + 8", "full"] < 0.9 * found["2 + 2", "full"]
