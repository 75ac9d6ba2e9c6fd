"""The architecture as tests: imports point down, and `functional` stays light."""

import ast
import graphlib
import importlib.util
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ORDER = ("functional", "nn", "models", "generation", "tasks", "training", "planning", "launch", "cli")
"""A package imports those before it."""
BESIDE = {
    "errors": set(),
    "fields": {"errors"},
    "files": {"errors"},
    "hub": {"errors", "files"},
    "arrays": set(),
    "testing": set(),
    "arguments": {"errors", "fields"},
    "data": {"errors", "files", "hub"},
    "synthetic": {"data", "errors"},
    "metrics": {"data", "errors"},
}
"""What the others may use; `functional` uses none of it."""
WITHOUT_DATA = {"nn", "models"}
MAY_IMPORT = {name: {name, *others} for name, others in BESIDE.items()}
MAY_IMPORT |= {
    name: {*ORDER[: place + 1], *({} if name == "functional" else BESIDE)}
    - ({"data", "synthetic", "metrics"} if name in WITHOUT_DATA else set())
    for place, name in enumerate(ORDER)
}
# At first use: see test_imports.py.
MAY_IMPORT |= {"__init__": {*ORDER, *BESIDE}, "__main__": {"cli"}}
SOURCES = sorted((ROOT / "tfx_jax").rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "experiments").rglob("*.py"))]


def _label(path):
    return path.relative_to(ROOT).as_posix()


def _imported_names(source, package):
    """Full dotted names of everything that some source code imports, inside functions too.

    >>> sorted(_imported_names("import a.b; from . import c; from ..d import e", "x.y"))
    ['a.b', 'x.d.e', 'x.y.c']
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _imports(path):
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    return set(_imported_names(path.read_text(encoding="utf-8"), package))


@pytest.mark.parametrize("path", SOURCES, ids=_label)
def test_imports_point_down(path):
    layer = pathlib.PurePath(path.relative_to(ROOT).parts[1]).stem
    ours = {name.split(".")[1] for name in _imports(path) if name.startswith("tfx_jax.")}
    assert ours & MAY_IMPORT.keys() <= MAY_IMPORT[layer]


def test_no_files_import_each_other():
    """Not in a circle of many either; nor do functions import what imports their file."""
    modules = {_label(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCES}
    imported = {
        name: {found if found in modules else found.rpartition(".")[0] for found in _imports(path)} & modules.keys()
        for name, path in modules.items()
    }
    order = list(graphlib.TopologicalSorter(imported).static_order())
    assert set(order) == modules.keys()


@pytest.mark.parametrize("path", [path for path in SOURCES if "functional" in path.parts], ids=_label)
def test_functional_imports_three_packages(path):
    packages = {name.split(".")[0] for name in _imports(path)}
    assert packages <= {"jax", "numpy", "jaxtyping", "tfx_jax", *sys.stdlib_module_names}


def test_one_file_knows_orbax():
    knowing = {_label(path) for path in SOURCES if any(name.startswith("orbax") for name in _imports(path))}
    assert knowing <= {"tfx_jax/training/checkpoint/checkpoints.py"}


def test_seconds_are_not_counted_by_a_clock_that_may_be_set():
    """TensorBoard alone is told what time it is: in the name of its file, and of each event."""
    clock = re.compile(
        r"\btime\.(time|time_ns|clock_gettime\w*)\b|\b(date|datetime)\.(now|utcnow|today)\b|from time import"
    )
    paths = [*FILES, *sorted((ROOT / "colab").rglob("*.py"))]
    reading = {_label(path): len(clock.findall(path.read_text(encoding="utf-8"))) for path in paths}
    assert {name: count for name, count in reading.items() if count} == {
        "tfx_jax/cli/support/server.py": 1,  # the date of an answer
        "tfx_jax/data/tokenizers/chat.py": 1,  # the date of a conversation
        "tfx_jax/training/reporting/progress.py": 2,
        "tfx_jax/training/reporting/report.py": 1,  # the date of a run
        "tfx_jax/training/reporting/loggers.py": 1,  # of each point, as MLflow wants
    }


def test_paths_from_a_file_to_the_root_have_the_right_length():
    """`parents[2]` of a file that moved one folder up is outside the repository, and may even exist there."""
    wrong = []
    for folder in ("benchmarks", "experiments", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for found in re.finditer(r'Path\(__file__\)\.parents\[(\d+)\](?! / "shared")', path.read_text("utf-8")):
                expected = len(path.relative_to(ROOT).parts) - 1
                wrong += [f"{_label(path)}: {found[0]}, not {expected}"] if int(found[1]) != expected else []
    assert not wrong, "\n".join(wrong)
