"""The benchmark of long-context attention, at lengths that need no patience."""

import argparse
import itertools
import json
import math
import types

import pytest

from benchmarks import long_context
from benchmarks.long_context import Cell

BOTH_WAYS = (False, False)


# Each direction once and each pass once; all four are what the slow tests measure.
QUICK = ((False, False), (True, True))


@pytest.fixture(
    scope="module", params=[QUICK, pytest.param(tuple(long_context.TABLES), marks=pytest.mark.nightly)], ids=len
)
def tables(request):
    """Which tables the command makes: (is_causal, with_gradient) of each."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(long_context, "TABLES", {table: long_context.TABLES[table] for table in request.param})
        yield request.param


@pytest.fixture(scope="module")
def output(tmp_path_factory, tables):
    folder = tmp_path_factory.mktemp("long_context") / "new"
    long_context.main([f"--output={folder}", "--lengths=128,64", "--functions=linear"])
    return folder


@pytest.fixture(scope="module")
def cells(output):
    return json.loads((output / "long_context.json").read_text())["cells"]


@pytest.mark.nightly
def test_measures_every_cell(cells, tables):
    found = {(cell["function"], cell["is_causal"], cell["with_gradient"], cell["length"]) for cell in cells}
    assert found == {(name, *table, t) for name, table, t in itertools.product(("dense", "linear"), tables, (64, 128))}
    assert len(found) == len(cells)
    assert all(cell["seconds"] > 0 and cell["obstacle"] is None and len(cell["times"]) <= 9 for cell in cells)


def test_writes_a_table_for_each_direction_and_pass(output, tables):
    lines = (output / "long_context.md").read_text().splitlines()
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == list(long_context.TABLES.values())
    assert sum(line.startswith("| T | 64 | 128 | faster from | smaller from |") for line in lines) == len(tables)
    assert sum(line.startswith("| linear | ") and line.count("|") == 6 for line in lines) == len(tables)
    assert (output / "long_context.png").read_bytes().startswith(b"\x89PNG")


def test_memory_of_dense_attention_grows_with_the_square_of_the_length(cells, tables):
    def growth(name, table):
        row = {c["length"]: c for c in cells if (c["function"], c["is_causal"], c["with_gradient"]) == (name, *table)}
        # Results are the output and three gradients, linear in the length by nature.
        results = (4 if table[1] else 1) * long_context.HEAD_SIZE * 4
        return (row[128]["memory"] - 128 * results) / (row[64]["memory"] - 64 * results)

    for table in tables:
        assert growth("dense", table) > 3
        assert growth("linear", table) < 2.5


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({256: 0.5, 1024: 2.0, 4096: 3.0}, "1,024 (x 3.00 at 4,096)"),
        ({256: 2.0, 1024: 0.5, 4096: 3.0}, "4,096 (x 3.00 at 4,096)"),
        ({256: 0.2, 1024: 0.5}, "never (x 0.50 at 1,024)"),
        ({256: 0.2, 1024: math.inf}, "1,024 (x 0.20 at 256)"),
        ({256: math.inf}, "256"),
        ({}, "unknown"),
    ],
)
def test_crossover_is_where_winning_begins_for_good(ratios, words):
    assert long_context.crossover(ratios) == words


def test_dense_attention_without_room_loses_and_without_time_is_unknown():
    dense = {
        1: Cell("dense", *BOTH_WAYS, 1, memory=8, times=[6.0]),
        2: Cell("dense", *BOTH_WAYS, 2, memory=32, obstacle="time"),
        3: Cell("dense", *BOTH_WAYS, 3, memory=72, obstacle="memory"),
    }
    row = {t: Cell("linear", *BOTH_WAYS, t, memory=4 * t, times=[3.0 * t, 2.0 * t, 9.0 * t]) for t in dense}
    assert long_context.ratios(dense, row, "seconds") == {1: 2.0, 3: math.inf}
    assert long_context.ratios(dense, row, "memory") == {1: 2.0, 2: 4.0, 3: 6.0}


def test_expected_time_follows_the_growth_so_far():
    def row(*times):
        return {4**i: Cell("dense", *BOTH_WAYS, 4**i, memory=0, times=[t]) for i, t in enumerate(times)}

    assert long_context.expected_seconds({}, 16) == 0
    assert long_context.expected_seconds(row(1.0), 4) == 16
    assert long_context.expected_seconds(row(1.0, 8.0), 16) == pytest.approx(64)
    assert long_context.expected_seconds(row(1.0, 1.0), 16) == pytest.approx(4)
    assert long_context.expected_seconds(row(1.0, 99.0), 16) == pytest.approx(16 * 99)


def test_does_not_run_what_has_no_room_or_takes_too_long(monkeypatch):
    memory = {"dense": 10**18, "chunked": 1, "local": 1}
    runs = []

    class Program:
        def __init__(self, name):
            self.name = name

        def memory_analysis(self):
            return types.SimpleNamespace(temp_size_in_bytes=memory[self.name], output_size_in_bytes=2)

        def __call__(self, *arrays):
            runs.append(self.name)
            return arrays

    monkeypatch.setattr(long_context, "function_program", lambda name, *_: (Program(name), ()))
    arguments = argparse.Namespace(functions=list(memory), models=False, dtype="float32", seconds=1.5, longest=15)
    earlier = [Cell("chunked", *BOTH_WAYS, 4, memory=0, times=[1.0])]
    cells = long_context.measure(16, BOTH_WAYS, earlier, arguments)
    assert [(cell.obstacle, len(cell.times), cell.memory) for cell in cells] == [
        ("memory", 0, 10**18 + 2),
        ("time", 0, 3),
        (None, 9, 3),
    ]
    assert runs == ["local"] * 10
    assert [long_context.as_text(cell).partition(" / ")[0] for cell in cells[:2]] == [
        "too much memory",
        "too much time",
    ]


@pytest.mark.nightly
@pytest.mark.compiles(40, "two models with two and three attentions, at two lengths")
def test_models_are_trained_with_each_attention(tmp_path):
    long_context.main([f"--output={tmp_path}", "--models", "--lengths=512,64", "--functions=nystrom,linear"])
    cells = json.loads((tmp_path / "long_context.json").read_text())["cells"]
    names = {False: ("dense", "linear", "nystrom"), True: ("dense", "linear")}  # landmarks are of the future too
    found = [(cell["function"], cell["is_causal"], cell["length"]) for cell in cells]
    assert found == [(name, way, length) for way in (False, True) for length in (64, 512) for name in names[way]]
    for way in (False, True):
        memory = {
            cell["function"]: cell["memory"] for cell in cells if (cell["is_causal"], cell["length"]) == (way, 512)
        }
        assert memory["dense"] > memory["linear"]
    lines = (tmp_path / "long_context.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("## ")] == [f"## {t}" for t in long_context.MODEL_TABLES.values()]


def test_names_the_functions_there_are(capsys):
    with pytest.raises(SystemExit):
        long_context.main(["--output=unused", "--functions=linear,lstm"])
    assert "unknown functions ['lstm']; there are dense, chunked" in capsys.readouterr().err
