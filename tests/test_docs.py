"""README and docs: what they print is run, or at least understood by the parser that a user's shell would reach."""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import PIL.Image
import pytest
import scipy.io.wavfile
from flax import nnx

from tfx_jax import cli, training
from tfx_jax.arguments import Parser
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.tokenizers.train import train_or_load_folder
from tfx_jax.errors import SOURCE
from tfx_jax.functional.attention import SPECS
from tfx_jax.models import GPT, BertConfig, BertMaskedLM, GPTConfig, hf
from tfx_jax.training.config import validate

ROOT = pathlib.Path(__file__).parents[1]
GUIDE = "docs/guide.md"
WRITTEN = (
    "attention",
    "in_your_model",
    "models",
    "hugging_face",
    "conformance",
    "notebooks",
    "formats",
    "serving",
    "sweeps",
    "results",
    "from_laptop_to_pod",
    "speed",
)
START = "docs/site/index.md"  # of the site alone: some of its links lead to pages that are generated
PAGES = ["README.md", GUIDE, START, *(f"docs/{name}.md" for name in WRITTEN)]
BLOCK = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Name and text of each block of a language."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [(name, text) for tongue, name, text in found if tongue == language]


def commands(page):
    """Each command of the page's bash blocks as the words that a shell makes of it, without comments and pipes."""
    for _, text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = next((i for i, word in enumerate(words) if word in ("|", "&&", "<", ">")), len(words))
                if words[:end]:
                    yield words[:end]
                words = words[end + 1 :]


TFX_JAX = [
    pytest.param(page, words[1:], id=" ".join(words))
    for page in PAGES
    for words in commands(page)
    if words[0] == "tfx-jax"
]


class ParsedError(Exception):
    """A command was understood, and ends here."""


@pytest.mark.parametrize(("page", "arguments"), TFX_JAX)
def test_commands_are_understood(page, arguments, monkeypatch, capsys):
    """By the verb's own parser; what it leaves are fields that the experiment has."""
    arguments = [argument for argument in arguments if argument != "..."]
    if arguments[0].startswith("--"):
        assert cli.main(arguments) == 0
        return

    def parse(parser, given=None, namespace=None):
        raise ParsedError(original(parser, given, namespace))

    original = Parser.parse_known_args
    monkeypatch.setattr(Parser, "parse_known_args", parse)
    with pytest.raises(ParsedError) as raised:
        cli.main(arguments)
    options, left = raised.value.args[0]
    if getattr(options, "config", None) is not None:
        load_config_file(options.config, left)
    else:
        assert all(re.match(r"--config\.[\w.]+=", argument) for argument in left)
    if "--" in arguments:
        behind = arguments[arguments.index("--") + 1 :]
        monkeypatch.setattr(Parser, "parse_known_args", original)
        test_commands_are_understood(page, behind, monkeypatch, capsys)


FORMATS = [words for words in commands("docs/formats.md") if words[1] == "train"]


@pytest.mark.parametrize("words", FORMATS, ids=" ".join)
def test_example_files_are_read(words, tmp_path, monkeypatch):
    """Each file of the page, by the command of the page, as far as the first step."""
    for language in ("text", "json"):
        for name, text in blocks("docs/formats.md", language):
            (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        PIL.Image.new("RGB", (40, 50)).save(tmp_path / "photos" / name / "1.png")
    for name in ("one.wav", "two.wav"):
        scipy.io.wavfile.write(tmp_path / name, 22_050, np.zeros(22_050, np.int16))
    for train, validation in re.findall(r"train_file=(\S+) .*validation_file=(\S+)", " ".join(words)):
        assert train != validation
        shutil.copy(tmp_path / train, tmp_path / validation)
    monkeypatch.chdir(tmp_path)
    (config,) = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    loaded = validate(load_config_file(config, [word for word in words if word.startswith("--config.")]))
    if hasattr(loaded.task.data, "validation_pairs"):
        loaded.task.data.validation_pairs = 0  # so few are not divided
    splits = loaded.task.splits()
    examples = splits["train"]
    assert examples[0] if hasattr(examples, "__getitem__") else next(iter(examples))
    if "validation" in splits:
        assert next(iter(splits["validation"]))
    named = [word for word in words if re.search(r"train_\w+=", word)]
    folder = tmp_path / loaded.task.data.data_dir
    assert all((folder / word.partition("=")[2]).exists() for word in named)
    assert named


def test_columns_of_formats_are_the_ones_meant(tmp_path, monkeypatch):
    for name, text in blocks("docs/formats.md", "text"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def read(name):
        (words,) = [words for words in FORMATS if f"--workdir=runs/{name}" in words]
        overrides = [word for word in words if word.startswith("--config.")]
        return load_config_file(words[2].removeprefix("--config="), overrides).task.splits()["train"]

    assert read("stars")[0] == ("Slow, but warm.", "3")
    assert read("pairs")[1] == ("A dog runs.", "The dog sleeps.", "contradiction")
    assert read("topics")[2] == ("What is the rate for yen?", "exchange")
    assert read("fasttext") == read("topics")
    assert read("conll2003")[0].tags == ["B-ORG", "O", "B-MISC", "O"]


# `tfx-jax` as a shell finds it, but trainings take two steps, and have one layer where no folder says otherwise.
COMMAND = """#!/bin/sh
case $1 in train) set -- "$@" --config.num_steps=2 --config.model.num_layers=1 ;; esac
exec {python} -m tfx_jax "$@"
"""


def run_block(beginning, folder):
    """Runs the one block of the guide with this beginning by a shell, in a folder."""
    (text,) = [text for _, text in blocks(GUIDE, "bash") if text.startswith(beginning)]
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "tfx-jax").write_text(COMMAND.format(python=sys.executable))
    (folder / "bin" / "tfx-jax").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    """Where the block of one's own tasks ran, on little text, and what it printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my.en").write_text("".join(f"the dog has {n} cats\n" for n in range(40)))
    (folder / "my.de").write_text("".join(f"der Hund hat {n} Katzen\n" for n in range(40)))
    topics = "".join(f"{n} cats,animals\n{n} cakes,food\n" for n in range(20))
    for name in ("my.csv", "dev.csv"):
        (folder / name).write_text("text,topic\n" + topics)
    (folder / "texts.txt").write_text("9 dogs\n8 cakes\n")
    return folder, run_block("tfx-jax train --config=transformer_files", folder)


@pytest.mark.slow
def test_first_model_of_the_guide_is_trained_as_printed(tmp_path):
    assert len(run_block("tfx-jax train --config=transformer_demo --workdir=runs/demo\n", tmp_path).splitlines()) == 1
    assert (tmp_path / "runs" / "demo" / "report.md").exists()


@pytest.mark.slow
def test_own_tasks_of_the_guide_train_as_printed(own_tasks):
    folder, said = own_tasks
    assert (folder / "runs" / "mine" / "report.md").exists()
    answers = [line.split("\t") for line in said.splitlines()[-2:]]
    assert {label for label, _ in answers} <= {"animals", "food"}
    assert all(0.4 < float(probability) <= 1 for _, probability in answers)


@pytest.mark.slow
@pytest.mark.compiles(70, "two models are drawn, to be written to folders")
def test_pretrained_models_of_the_guide_are_used_as_printed(tmp_path):
    """With small ones of one's own by these names."""
    tagged = "Ken\tB-person\nlives\tO\nin\tO\nParis\tB-location\n\n" * 8
    for name in ("train.conll", "dev.conll"):
        (tmp_path / name).write_text(tagged)
    small_gpt(tmp_path / "gpt2")
    folder = tmp_path / "bert-base-cased"
    tokenizer = train_or_load_folder(
        folder, lambda: ["Ken lives in Paris"], kind="wordpiece", family="bert", vocab_size=99
    )
    config = BertConfig(vocab_size=tokenizer.vocab_size, num_layers=1, d_model=8, num_heads=2, d_ff=16)
    hf.save(BertMaskedLM(config, rngs=nnx.Rngs(0)), folder)
    run_block('echo "Once upon a time"', tmp_path)
    assert hf.load_config(tmp_path / "names").d_model == 8


def small_gpt(folder):
    tokenizer = train_or_load_folder(folder, lambda: ["to be"], kind="bpe", family="gpt", vocab_size=300)
    config = GPTConfig(vocab_size=30_000, num_layers=1, d_model=8, num_heads=2, max_length=512)
    assert tokenizer.vocab_size <= config.vocab_size
    hf.save(GPT(config, rngs=nnx.Rngs(0)), folder)


PYTHON_OF_THE_GUIDE = ("README.md", GUIDE, START, "docs/models.md")  # run in one session
PYTHON_BY_ITSELF = ("docs/in_your_model.md", "docs/conformance.md", "docs/sweeps.md")


def test_all_python_of_the_pages_is_run():
    pages = ["README.md", START, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    assert {page for page in pages if blocks(page, "python")} == {*PYTHON_OF_THE_GUIDE, *PYTHON_BY_ITSELF}


@pytest.mark.slow
@pytest.mark.compiles(300, "models are made and called outside of one program, as a reader does it, and trained")
def test_python_of_the_guide_runs_as_printed(own_tasks, monkeypatch):
    """In one session, with a GPT called gpt2, a text and what the shell has trained; the training takes two steps."""
    folder, _ = own_tasks
    monkeypatch.chdir(folder)
    (folder / "my.txt").write_text("to be or not to be\n" * 200)
    small_gpt("gpt2")
    trained, train = [], training.train

    def train_briefly(config, workdir):
        trained.append(config.num_steps)
        return train(dataclasses.replace(config, num_steps=2), workdir)

    monkeypatch.setattr(training, "train", train_briefly)
    names = {}
    for page in PYTHON_OF_THE_GUIDE:
        for _, text in blocks(page, "python"):
            exec(compile(text, page, "exec"), names)
    assert names["out"].shape == (2, 10, 8, 64)
    assert names["maps"]["decoder/0/cross"].shape == (1, 8, 3, 4)
    assert trained == [9_000]
    assert names["losses"][-1] < names["losses"][0]
    assert (folder / "runs" / "gpt" / "report.md").exists()
    assert (folder / "mine" / "model.safetensors").exists()
    assert (folder / "copy-of-gpt2" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.compiles(100, "a training of an experiment")
def test_verbs_of_the_guide_run_as_printed(tmp_path, monkeypatch, capfd):
    """By a shell, on a model that six steps have trained."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config=transformer_demo:test", "--workdir=runs/mine"]) == 0
    (text,) = [text for _, text in blocks(GUIDE, "bash") if text.startswith("tfx-jax average")]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], env={**os.environ, "PATH": path}, check=False)
    out, err = capfd.readouterr()
    assert done.returncode == 0, err
    assert "averaged the checkpoints of steps 2, 4, 6" in out
    assert "sacreBLEU: " in out
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_guide_has_every_verb_and_readme_targets_that_exist():
    text = (ROOT / GUIDE).read_text(encoding="utf-8")
    assert [verb for verb in cli.VERBS if f"`{verb}`" not in text] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"make ([a-z][a-z-]*)", "".join(text for _, text in blocks("README.md", "bash")))
    assert targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


@pytest.mark.parametrize("page", ["README.md", GUIDE, "docs/formats.md"])
def test_lines_fit_a_terminal(page):
    """But tables, and lines that are nothing but a link."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 90 and not re.match(r"\||!?\[.*\)[,.]?$", line)] == []
    assert page == "docs/formats.md" or len(lines) < 280  # a reference is as long as its formats


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md"])
def test_links_lead_somewhere(page):
    """In the repository; tests/test_site.py has those of the site."""
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    places = [place for place in re.findall(r"\]\(([^)#]+)", text) if "://" not in place]
    places += re.findall(r'<img src="([^"]+)"', text)
    missing = [place for place in places if not (ROOT / page).parent.joinpath(place).exists()]
    generated = {"papers.md", "configuration.md", "commands.md", "api/index.md", "api/functional/index.md"}
    assert set(missing) == (generated if page == START else set())


def test_page_of_attentions_names_every_paper():
    text = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    papers = [paper for spec in SPECS.values() for paper in re.findall(r"([^:;,]+) \((\d{4})\)", spec.reference)]
    assert len(papers) > 35
    assert [paper for paper in papers if f"{paper[0].strip()}, {paper[1]}" not in text] == []


def test_extras_are_installed_from_where_they_are():
    """Before a release, `pip install "tfx-jax[plan]"` finds nothing."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("colab/*.py")]
    files += [path for folder in ("tfx_jax", "experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    commands = [line for path in files for line in path.read_text().splitlines() if 'install "tfx-jax' in line]
    assert len(commands) > 5
    formatted = "{SOURCE}"  # in the source of a message
    names = [f"] @ {SOURCE}", f"tfx-jax @ {SOURCE}", f"] @ {formatted}", f"tfx-jax @ {formatted}"]
    assert [line for line in commands if not any(name in line for name in names)] == []


@pytest.mark.slow
@pytest.mark.compiles(300, "ten ways to call attention, as a reader types them")
def test_python_of_the_page_on_own_models_runs_as_printed():
    pytest.importorskip("haiku")
    namespace = {}
    for _, text in blocks("docs/in_your_model.md", "python"):
        exec(text, namespace)


@pytest.mark.slow
@pytest.mark.compiles(10, "two cases of the conformance kit")
def test_python_of_the_page_on_conformance_prints_what_it_says(capsys):
    ((_, text),) = blocks("docs/conformance.md", "python")
    exec(text, {})
    assert capsys.readouterr().out.strip() == text.rpartition("# ")[2].strip()


@pytest.mark.slow
@pytest.mark.compiles(200, "two trainings")
def test_a_sweep_runs_as_printed(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="optuna is no dependency")
    monkeypatch.chdir(tmp_path)
    ((_, text),) = blocks("docs/sweeps.md", "python")
    assert "vit_digits" in text
    assert "n_trials=20" in text
    namespace = {}
    exec(text.replace("vit_digits", "vit_digits:test").replace("n_trials=20", "n_trials=2"), namespace)
    study = namespace["study"]
    assert len(study.trials) == 2
    assert 0 <= study.best_value == max(trial.value for trial in study.trials) <= 100  # percent
    assert sorted(path.name for path in (tmp_path / "runs" / "sweep").iterdir()) == ["0", "1"]


def test_the_guide_names_all_extras():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    install = (ROOT / "docs/guide.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    for extra in extras.keys() - {"dev", "docs"}:
        assert f"`{extra}`" in install or f"tfx-jax[{extra}]" in install, extra
