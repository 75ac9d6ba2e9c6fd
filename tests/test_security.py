"""SECURITY.md: its statements of the code, and that each test which it names exists."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tfx_jax.cli import main, serve
from tfx_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
MODULES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"} | {"code", "imp", "runpy"}
CALLS = re.compile(r"(eval|exec|compile|__import__)|.*(exec_module|import_module|yaml\.load|torch\.load|os\.system)")
KEYWORDS = {"allow_pickle", "shell", "trust_remote_code"}
OWN = re.compile(r"f?['\"](tfx_jax|matplotlib|pyarrow|sklearn)\b")  # what `import_module` may import

# Only files that have one of these are parsed.
WORDS = re.compile(
    rf"\b({'|'.join(MODULES - {'code', 'imp'})})\b|import (code|imp)\b|(?<![.\w])(eval|exec|compile)\(|__import__|"
    rf"exec_module|import_module|\b(yaml|torch)\.load|os\.system|{'|'.join(KEYWORDS)}"
)


def executing(text):
    """Yields what in the text of a file could execute code from elsewhere."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            if CALLS.fullmatch(name) and not OWN.match(ast.unparse(node.args[0])):
                yield ast.unparse(node)
            yield from {keyword.arg for keyword in node.keywords} & KEYWORDS


def test_no_other_code_is_executed():
    found = {}
    for path in sorted((ROOT / "tfx_jax").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if WORDS.search(text) and (what := sorted(set(executing(text)))):
            found[path.relative_to(ROOT / "tfx_jax").as_posix()] = what
    assert found == {
        "cli/train.py": ["runpy"],
        "cli/check_attention.py": ["importlib.import_module(module)"],
        "models/export.py": ["importlib.import_module('jax2onnx')"],
        "training/reporting/loggers.py": ["importlib.import_module(name)"],  # wandb or mlflow
    }


@pytest.mark.parametrize(
    "text", ["import pickle", "from pickle import load", "exec(x)", "np.load(x, allow_pickle=True)", "yaml.load(x)"]
)
def test_code_that_executes_is_found(text):
    assert WORDS.search(text)
    assert len(set(executing(text))) == 1


def test_tests_that_the_page_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(named) >= 5
    assert [path for path in named if not (ROOT / path).exists()] == []
    tests = re.findall(r"`(test_\w+)`", PAGE)
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(tests) >= 6
    assert [name for name in tests if f"def {name}(" not in text] == []


def test_serve_listens_on_this_machine_only(monkeypatch):
    addresses = []

    def listen(host, port):
        addresses.append(host)
        raise UserError("enough")

    monkeypatch.setattr(serve, "_listener", listen)
    assert main(["serve", "--model=folder"]) == 2
    assert main(["serve", "--model=folder", "--host=0.0.0.0"]) == 2
    assert addresses == ["127.0.0.1", "0.0.0.0"]


# Python reports each class or function that a pickle names, whatever reads the pickle.
WATCHED = """
import sys
found = []
sys.addaudithook(lambda event, arguments: found.append(arguments) if event == "pickle.find_class" else None)
from tfx_jax.cli import main
for arguments in ({steps}):
    assert main(arguments.split()) == 0
    print("after", arguments.split()[0], found)
import pickle, pathlib
pickle.loads(pickle.dumps(pathlib.Path("x")))
print("hook", bool(found))
"""


@pytest.mark.slow
def test_no_model_is_unpickled(tmp_path):
    """A run is trained, resumed, evaluated and converted, and its folder generates."""
    train = "train --config=transformer_demo:test --workdir=run"
    steps = [train, f"{train} --config.num_steps=8", "evaluate --workdir=run", "convert --workdir=run --output=folder"]
    steps.append("generate --model=folder --max-new-tokens=2")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(steps=", ".join(map(repr, steps)))],
        cwd=tmp_path,
        input="she did not go to school .\n",
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    watched = [line for line in done.stdout.splitlines() if line.startswith(("after ", "hook "))]
    assert watched == [*(f"after {step.split()[0]} []" for step in steps), "hook True"]
