"""What keeps `make mutants` running, without running it."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.mutants.__main__ import MUTANTS, ROOT
from tests.mutants.mutant import in_file, mutated


def test_every_mutant_applies():
    problems = []
    for mutant in MUTANTS:
        try:
            mutated(ROOT, mutant)
        except ValueError as error:
            problems.append(str(error))
    assert problems == []


def test_titles_tell_mutants_apart():
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_of_every_mutant_exist():
    missing = []
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, word = test.partition(" -k ")
        path = ROOT / "tests" / file
        if not path.is_file() or word.removeprefix("[") not in path.read_text():
            missing.append(test)
    assert missing == []


@pytest.mark.slow
def test_every_mutant_has_a_test_that_is_not_slow():
    """`make mutants` runs no others."""
    named = {test for mutant in MUTANTS for test in mutant.tests}
    files = sorted({test.partition(" -k ")[0] for test in named})
    options = ["--collect-only", "-q", "-m", "not slow", "-p", "no:xdist", "-p", "no:cacheprovider"]
    found = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT / "tests", capture_output=True)
    tests = [line.removeprefix("tests/") for line in found.stdout.decode().splitlines() if "::" in line]
    assert len(tests) > len(files)

    def is_there(file, word):
        return any(test.startswith(f"{file}::") and word.lower() in test.lower() for test in tests)

    assert sorted(test for test in named if not is_there(*test.partition(" -k ")[::2])) == []


@pytest.mark.parametrize(
    ("text", "becomes", "problem"),
    [
        ("3", "4", "stands there 0 times"),
        ("2", "3", "stands there 2 times"),
        ("2 * x", "2 *", "no Python"),
    ],
)
def test_a_mutant_that_would_test_nothing_is_refused(tmp_path, text, becomes, problem):
    (tmp_path / "tfx_jax").mkdir()
    (tmp_path / "tfx_jax" / "double.py").write_text("TWO = 2\n\n\ndef double(x):\n    return 2 * x\n")
    (mutant,) = in_file("double.py", "test_double.py", ("wrong", text, becomes))
    with pytest.raises(ValueError, match=problem):
        mutated(tmp_path, mutant)


_PROGRAM = """
import json, pathlib, sys
from tests.mutants.mutant import in_file
from tests.mutants.runner import Runner

mutants = in_file(
    "double.py",
    "test_double.py -k twice, test_double.py -k whole",
    ("noticed", "2 * x", "3 * x"),
    ("unnoticed", "x < 0", "x < -1"),
    ("noticed when it is imported", "def double", "def treble"),
    ("of tests that are left out", "2 * x", "4 * x", "test_double.py -k whole"),
    ("endless", "if x < 0", "while x > 0"),
)
folder = pathlib.Path(sys.argv[2])
runner = Runner(pathlib.Path(sys.argv[1]), folder, 2, imports=())
outcomes = dict(runner.run(mutants[:-1], 60.0)) | dict(runner.run(mutants[-1:], 3.0))
names = [f"tests/test_double.py::test_{name}" for name in ("is_twice", "of_something_else")]
assert runner.failing(names, 60.0) == {names[1]}
print(json.dumps({mutant.name: [outcome.status, *outcome.failed] for mutant, outcome in outcomes.items()}))
"""

_TESTS = """
from tfx_jax.double import double

def test_is_twice():
    assert double(3) == 6

def test_is_whole():
    assert double(3) % 1 == 0

def test_of_something_else():
    assert False
"""


def test_the_runner_tells_what_is_noticed_from_what_is_not(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "folder"
    double = "def double(x):\n    if x < 0:\n        x = 1 * x\n    return 2 * x\n"
    files = {
        "tfx_jax/__init__.py": "",
        "tfx_jax/errors.py": "",
        "tfx_jax/double.py": double,
        "tests/test_double.py": _TESTS,
    }
    for name, text in (files | {"pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, root, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    twice = "tests/test_double.py::test_is_twice"
    assert json.loads(done.stdout) == {
        "noticed": ["killed", twice],
        "unnoticed": ["survived"],
        "noticed when it is imported": ["killed", "tests/test_double.py, when it was imported"],
        "endless": ["timed out"],
        "of tests that are left out": ["survived"],
    }
    assert pathlib.Path(root, "tfx_jax", "double.py").read_text() == double
