"""What an import costs: `tfx_jax.functional` is light enough for anyone's project, `tfx_jax` itself is free."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEAVY = ("flax", "optax", "orbax", "matplotlib", "grain", "sentencepiece", "torch")
TIMED_IMPORT = """
import time
import jax
start = time.process_time()
import tfx_jax.functional
print(time.process_time() - start)
"""


def _run(program):
    """What a fresh interpreter prints: imports are cached in this one."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _loaded_by(module):
    """Top-level packages in memory after an import."""
    return set(_run(f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").split())


@pytest.mark.slow
def test_functional_adds_little_to_jax():
    seconds = min(float(_run(TIMED_IMPORT)) for _ in range(3))  # what else the machine does only adds
    assert seconds < 0.3


def test_functional_loads_no_framework():
    assert not _loaded_by("tfx_jax.functional").intersection(HEAVY)


def test_package_itself_loads_nothing():
    assert not _loaded_by("tfx_jax").intersection({"jax", "numpy", *HEAVY})


def test_help_where_only_the_functions_are_installed():
    program = """
import pydoc, sys
for package in ("flax", "optax", "orbax", "grain", "etils"):
    sys.modules[package] = None
import tfx_jax
print(pydoc.render_doc(tfx_jax, renderer=pydoc.plaintext))
assert tfx_jax.functional.dot_product_attention
try:
    tfx_jax.nn
except ImportError as error:
    print(error)
try:
    from tfx_jax import train
except ImportError as error:
    print(error)
"""
    printed = _run(program)
    assert "Attention and Transformers in JAX" in printed
    for name in ("nn", "train"):
        assert re.search(rf"tfx_jax\.{name} needs the package \w+, which is not installed: install", printed)


def test_a_missing_module_of_the_library_itself_is_named():
    program = """
import sys, tfx_jax
sys.modules["tfx_jax.nn.attention"] = None
try:
    tfx_jax.nn
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert _run(program) == "tfx_jax.nn.attention\n"


def test_packages_are_imported_when_they_are_first_used():
    program = """
import sys, tfx_jax
assert {"functional", "models", "training"} <= set(dir(tfx_jax)) and "jax" not in sys.modules
assert callable(tfx_jax.functional.dot_product_attention) and "flax" not in sys.modules
assert isinstance(tfx_jax.nn.MultiHeadAttention, type)
try:
    tfx_jax.funtional
except AttributeError as error:
    print(error)
"""
    assert _run(program) == "module 'tfx_jax' has no attribute 'funtional'\n"


# Forks, so that each module is the first of the library to be imported, and JAX is imported once.
IMPORT_EACH = """
import importlib, os, sys
import flax.nnx, grain, jax, optax, orbax.checkpoint
for name in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(name, error)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.nightly
def test_any_module_can_be_imported_first():
    """The doors import their packages, so a cycle shows only in some orders."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "tfx_jax").rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]
    command = [sys.executable, "-c", IMPORT_EACH, *names]
    assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout == ""
