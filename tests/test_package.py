"""What `pip install` gives: the wheel has all that the README names, and asks for all that it imports."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

import tfx_jax

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXPERIMENTS = sorted(path.name for path in (ROOT / "experiments").glob("*.py"))
# A program that sees neither the tree nor its editable install, whatever the environment puts on the path.
ELSEWHERE = """
import pathlib, sys
sys.path = [folder for folder in sys.path if not (pathlib.Path(folder) / "experiments").is_dir()]
import tfx_jax.cli
print(tfx_jax.__file__, flush=True)
sys.exit(tfx_jax.cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_has_the_experiments_and_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name.removeprefix("tfx_jax/_experiments/") for name in names if "experiments/transformer_" in name]
    assert inside == [name for name in EXPERIMENTS if name.startswith("transformer_")]
    assert {f"tfx_jax/_experiments/{name}" for name in EXPERIMENTS} <= set(names)
    assert not [name for name in names if "benchmarks" in name]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tfx_jax"}  # the package and its .dist-info


def test_wheel_has_what_is_not_code(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tfx_jax/py.typed", "tfx_jax/cli/support/attention_view.html"} <= set(names)
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tfx_jax").rglob("*.py")}
    assert tracked <= set(names)


def test_version_is_that_of_the_distribution(wheel):
    assert tfx_jax.__version__ == importlib.metadata.version("tfx-jax")
    (path,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    written = zipfile.ZipFile(wheel).read(path).decode()
    assert f"\nVersion: {wheel.name.split('-')[1]}\n" in written


def test_page_on_an_index_has_no_relative_link(wheel):
    (path,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    page = zipfile.ZipFile(wheel).read(path).decode().partition("\n\n")[2]
    targets = re.findall(r"\]\(([^)]+)\)", page) + re.findall(r'src="([^"]+)"', page)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    source = "https://github.com/tfx-jax/tfx-jax/blob/main"
    assert {f"{source}/LICENSE", f"{source}/CONTRIBUTING.md#recipes"} <= set(targets)
    assert "https://raw.githubusercontent.com/tfx-jax/tfx-jax/main/docs/attention.png" in targets


def test_release_is_published_without_a_password():
    """As a trusted publisher: by one job, which may ask for a token, after the one that checks."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert [name for name, job in jobs.items() if job.get("permissions")] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["needs"], jobs["publish"]["environment"]) == ("build", "release")
    assert ".ci/wheel dist" in [step.get("run") for step in jobs["build"]["steps"]]
    stored = [step["with"] for job in jobs.values() for step in job["steps"] if "artifact" in step.get("uses", "")]
    assert [with_["name"] for with_ in stored] == ["dist", "dist"]
    assert [with_["path"] for with_ in stored] == ["dist/tfx_jax-*", "dist"]


def test_changes_run_what_ci_runs_and_nights_run_all_on_both_stacks():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in commands["change"]
    assert commands["night"][-1].endswith(" make test-all")
    stacks = jobs["night"]["strategy"]["matrix"]["include"]
    assert [stack["python"] for stack in stacks] == ["3.11", "3.13"]
    assert all((ROOT / "constraints" / f"jax-{stack['jax']}.txt").is_file() for stack in stacks)


@pytest.mark.parametrize(("tag", "expected"), [("v1.2.3", "1.2.3"), (None, "0.1.0.dev1"), ("no git", "0.1.0.dev0")])
def test_version_is_that_of_the_tag(tmp_path, tag, expected):
    """Before the first tag it counts commits, and an archive without git has one too."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    steps = [["init", "-q"], ["add", "."], ["commit", "-qm", "First"], *([["tag", tag]] if tag else [])]
    for step in [] if tag == "no git" else steps:
        subprocess.run([*git, *step], check=True, capture_output=True)
    command = [sys.executable, "-m", "hatchling", "version"]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said.strip().partition("+")[0] == expected


def _name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_every_import_is_declared():
    declared = {_name(requirement) for requirement in PROJECT["dependencies"]}
    for extra in ("chat", "serve", "tfds"):
        declared |= {_name(requirement) for requirement in PROJECT["optional-dependencies"][extra]}
    providers = importlib.metadata.packages_distributions()
    missing = {}
    for path in [*(ROOT / "tfx_jax").rglob("*.py"), *(ROOT / "experiments").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package in {name.split(".")[0] for name in names} - {"tfx_jax", *sys.stdlib_module_names}:
                by = {_name(provider) for provider in providers.get(package, [package])}
                if not by & declared:
                    missing.setdefault(package, path.name)
    assert missing == {}


@pytest.mark.slow
def test_installed_wheel_trains_without_the_tree(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    train = ["train", "--config=transformer_demo:test", "--workdir=run"]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *train],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert (empty / "run" / "report.md").exists()
