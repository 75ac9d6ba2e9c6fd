"""The versions that go together: those of the lock, within what we declare, and what is installed here."""

import importlib.metadata
import pathlib
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.card.wheels import blocks

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "constraints").glob("jax-*.txt"))
PYTHON = {"jax-0.10": "3.11", "jax-0.11": "3.12", "jax-0.12": "3.13"}  # the oldest that is not the lock's


def pins(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_there_is_a_file_for_every_jax_that_is_supported():
    assert [path.stem for path in FILES] == list(PYTHON)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_are_those_of_the_lock(path):
    lock = {name: version for name, version, _ in blocks((ROOT / "requirements.lock").read_text(), PYTHON[path.stem])}
    unlocked = {"libtpu"} | ({"jax", "jaxlib"} if path.stem == "jax-0.11" else set())
    found = pins(path)
    assert {name: version for name, version in found.items() if name not in unlocked} == {
        name: lock[name] for name in found if name not in unlocked
    }
    assert path.stem == f"jax-{'.'.join(found['jax'].split('.')[:2])}"
    assert found["jax"] == found["jaxlib"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_are_within_what_we_declare(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["plan"]]
    found, environment = pins(path), {"python_version": PYTHON[path.stem]}
    checked = 0
    for requirement in map(Requirement, declared):
        version = found.get(canonicalize_name(requirement.name))
        if version is not None and (requirement.marker is None or requirement.marker.evaluate(environment)):
            assert requirement.specifier.contains(version), requirement
            checked += 1
    assert checked >= 6


def test_versions_are_those_that_are_installed():
    series = ".".join(importlib.metadata.version("jax").split(".")[:2])
    for name, version in pins(ROOT / "constraints" / f"jax-{series}.txt").items():
        if name != "libtpu":  # it is only where programs are compiled for TPUs
            assert importlib.metadata.version(name) == version, name
