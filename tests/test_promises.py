"""The list of promises.md: its sentences are in their pages, its tests and figures exist. And tables of the pages."""

import collections
import functools
import inspect
import pathlib
import re
import tomllib

import pytest

import tfx_jax.models
from tfx_jax import testing
from tfx_jax.cli.support import model_worker, server
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.sources import audio, images
from tfx_jax.training import ExperimentConfig, MeshConfig

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"README.md", "docs/site/index.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@functools.cache
def page(name):
    """A page with single spaces, also for line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def _promises():
    """Yields (page, sentence, what holds it) of each promise."""
    for section in (ROOT / "tests" / "promises.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        for promise in text.split("\n> ")[1:]:
            sentence, *held_by = promise.strip().split("\n- ")
            yield name, sentence, held_by


PROMISES = list(_promises())


@functools.cache
def _tests(path):
    """Names of the tests of a file, those of classes with the class."""
    names, prefix = set(), ""
    for kind, name in re.findall(r"^(class | *def )(\w+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
        if kind == "class ":
            prefix = f"{name}::"
        else:
            names.add(name if kind == "def " else prefix + name)
    return names


def test_each_promise_stands_in_its_page_and_is_held():
    wrong = []
    for name, sentence, held_by in PROMISES:
        wrong += [] if " ".join(sentence.split()) in page(name) else [f"{name} no longer says: {sentence}"]
        wrong += [] if held_by else [f"nothing holds: {sentence}"]
        for line in held_by:
            if line.startswith("measured: "):
                path, figure = line.removeprefix("measured: ").split(": ")
                found = figure in (ROOT / path).read_text(encoding="utf-8")
            else:
                path, _, test = line.partition("::")
                found = (ROOT / path).exists() and test.startswith(("test_", "Test")) and test in _tests(path)
            wrong += [] if found else [f"there is no {line}, which holds: {sentence}"]
    assert not wrong, "\n".join(wrong)


def test_every_page_has_promises_and_each_is_listed_once():
    assert {name for name, *_ in PROMISES} == PAGES
    assert [promise for promise, count in collections.Counter(p[:2] for p in PROMISES).items() if count > 1] == []


def test_badges_are_what_the_package_declares():
    first, last = re.search(
        r"!\[Python 3\.(\d+) to 3\.(\d+)\]\(.*?python-3\.\1%20to%203\.\2-", page("README.md")
    ).groups()
    supported = re.findall(r"Python :: 3\.(\d+)'", str(PROJECT["classifiers"]))
    assert (PROJECT["requires-python"], supported[0], supported[-1]) == (f">=3.{first}", first, last)
    assert f"You need Python 3.{first} to 3.{last}." in page("docs/guide.md")
    first, last = re.search(r"!\[JAX 0\.(\d+) to 0\.(\d+)\]\(.*?jax-0\.\1%20to%200\.\2-", page("README.md")).groups()
    assert f"jax>=0.{first},<0.{int(last) + 1}" in PROJECT["dependencies"]


def test_figures_of_the_readme_are_those_of_the_results():
    """By the experiment's name; the results themselves are those of the notes (tests/experiments)."""
    rows = re.findall(r"\(experiments/(\w+)\.py\) \| [^|]* \| ([\d.]+) ", page("README.md"))
    assert len(rows) == 4
    for name, figure in rows:
        (result,) = re.findall(rf"\(\.\./experiments/{name}\.py\) \| [^|]* \| ([^|]*) \|", page("docs/results.md"))
        assert f" {figure} " in f" {result} ", name


def _column(name, header, number):
    """Cells of a column of the table that begins with a header."""
    table = (ROOT / name).read_text(encoding="utf-8").partition(header)[2].partition("\n\n")[0]
    return [row.split(" | ")[number].strip("| ") for row in table.splitlines()[2:]]


def test_every_model_of_the_page_is_in_one_file_with_its_configuration():
    names = [name.strip("`") for name in _column("docs/models.md", "| model | takes | gives | paper |", 0)]
    assert len(names) > 15
    for name in names:
        model = getattr(tfx_jax.models, name)
        config = inspect.signature(model.__init__).parameters["config"].annotation
        assert model.__module__ == config.__module__, name
        source = pathlib.Path(str(inspect.getsourcefile(model))).read_text(encoding="utf-8")
        assert 0 < source.find(f"\nclass {config.__name__}") < source.find(f"\nclass {name}("), name


def test_extras_that_pages_name_exist():
    guide = page("docs/guide.md")
    brackets = re.findall(r"tfx-jax\[([\w,-]+)\]", " ".join(page(name) for name in sorted(PAGES)))
    listed = re.search(r"More extras may be added .*? for what they name\.", guide)[0]
    named = {extra for group in brackets for extra in group.split(",")} | set(re.findall(r"`([a-z-]+)`(?: |,)", listed))
    assert named >= {"tpu", "cuda", "plan", "chat", "export", "serve", "wandb", "tfds", "gcs"}
    assert named - set(PROJECT["optional-dependencies"]) == set()
    assert "tfx-jax[gcs]" in PROJECT["optional-dependencies"]["tpu"]


TASKS = list(
    zip(*(_column("docs/guide.md", "| task | the model learns |", number) for number in (0, 2, 3)), strict=True)
)


@pytest.mark.parametrize(("task", "models", "experiment"), TASKS)
def test_tasks_of_the_guide_are_those_of_their_experiments(task, models, experiment):
    config = load_config_file(experiment.strip("`") + ":test")
    path = pathlib.Path(inspect.getsourcefile(type(config.task))).relative_to(ROOT).as_posix()
    assert f"(../{path})" in task
    assert type(config.model).__name__.removesuffix("Config") in re.findall(r"`(\w+)`", models)


def test_defaults_of_the_guide():
    assert f"`config.hang_seconds` ({ExperimentConfig().hang_seconds / 60:.0f} minutes)" in page("docs/guide.md")
    header = "| field | what its devices divide | default |"
    axes = [name.strip("`") for name in _column("docs/guide.md", header, 0)]
    defaults = _column("docs/guide.md", header, 2)
    assert dict(zip(axes, defaults, strict=True)) == {
        name: "all remaining devices" if size == -1 else str(size) for name, size in vars(MeshConfig()).items()
    }


def test_models_with_rotary_positions_and_alibi():
    configs = {name: getattr(tfx_jax.models, name) for name in tfx_jax.models.__all__ if name.endswith("Config")}
    fields = {name: " ".join(vars(config())).lower() for name, config in configs.items() if name.endswith("Config")}
    assert {"LlamaConfig", "BertConfig"} == {
        name for name, text in fields.items() if "rotary" in text or "rope" in text
    }
    assert [name for name, text in fields.items() if "alibi" in text] == []


def test_groups_of_the_conformance_page_are_those_of_the_cases():
    header = "| group | cases | what they check |"
    counts = collections.Counter(name.partition(":")[0] for name in testing.CASES)
    on_page = dict(
        zip(_column("docs/conformance.md", header, 0), _column("docs/conformance.md", header, 1), strict=True)
    )
    assert sum(map(int, on_page.values())) == len(testing.CASES) == 94
    assert {names: sum(counts.pop(name) for name in names.split(", ")) for names in on_page} == {
        names: int(count) for names, count in on_page.items()
    }
    assert not counts


def test_limits_of_the_server_are_those_of_the_page():
    limits = dict(zip(*(_column("docs/serving.md", "| what | limit |", number) for number in (0, 1)), strict=True))
    assert limits["JSON body of a request"] == f"{server.MAX_JSON // 2**20} MiB"
    assert limits["uploaded file"] == f"{server.MAX_BODY // 2**20} MiB"
    assert limits["image"].startswith(f"{images._MAX_PIXELS // 10**6} megapixels; ")
    assert set(re.findall(r"\w+", limits["image"].partition("; ")[2].upper())) == {*images._FORMATS, "OR"}
    assert limits["sound"].endswith(f" to {audio._MAX_RATE:,} Hz")
    assert limits["a text"] == f"{server.MAX_CHARACTERS:,} characters; {server.MAX_ATTENDED:,} to draw its attention"
    assert limits["texts of one request"] == str(server.MAX_INPUTS)
    assert limits["time to send a request, or to read nothing of an answer"] == f"{server.READ_SECONDS:.0f} seconds"
    assert limits["waiting requests"].startswith(f"{model_worker.MAX_WAITING};")
    assert limits["connections"].startswith(f"{server.MAX_CONNECTIONS};")
    assert f"at most {server.SHUTDOWN_SECONDS:.0f} seconds later" in page("docs/serving.md")


def test_the_index_counts_the_notebooks():
    notebooks = list((ROOT / "colab").glob("*.ipynb"))
    assert len(notebooks) == 6
    assert "Six notebooks for a browser" in page("docs/site/index.md")
    linked = [set(re.findall(r"colab/(\w+)\.ipynb", page(name))) for name in ("docs/notebooks.md", "README.md")]
    assert linked == [{path.stem for path in notebooks}] * 2


def test_three_notebooks_read_real_text():
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "colab").glob("*.py")}
    real = {name for name, source in sources.items() if "Gettysburg" in source}
    assert real == {"long_context", "attention_family", "pretrained"}
    assert "config.mesh.data, config.mesh.fsdp = 1, 8" in page("docs/notebooks.md")
    assert "mesh.fsdp" in sources["fine_tuning"]


def test_files_that_the_recipes_name_exist():
    recipes = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Recipes")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w./-]+/[\w./-]+\.(?:py|md|txt|toml))`", recipes))
    assert len(named) > 20
    places = (ROOT, ROOT / "tfx_jax")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
