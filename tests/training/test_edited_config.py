"""`config.json` after an edit by hand: it is read as `train` would take it, or one line says what is wrong."""

import copy
import io
import json
import math
import re
import resource
import sys
import types

import pytest
from etils import epath
from flax import nnx

from tests.attentions import KINDS
from tests.tiers import slow_but
from tests.training.configs import TRAININGS, default_config, title
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.models import GPTConfig
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.training.config import load_valid_config, save_config, tiny_variant
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run

HOSTILE = [
    *(None, True, "x", "", [], [1], ["a"], [[1]], {}, {"class": "tfx_jax.models.gpt.GPTConfig"}),
    *(0, -1, 1, 2, 3, 7, 10**6, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400)),
    *(0.5, -0.5, 1e-320, 1e308, math.nan, math.inf),
]
PARTS = ["model", "task", "task.data", "optimizer", "mesh", "model.attention", "model.attention.options"]


def leaves(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def edited(values, name, value):
    """A copy without its checksum in which one leaf or part is another value; None if there is no such part."""
    values = copy.deepcopy(values)
    del values["sha256"]
    *path, leaf = name.split(".")
    owner = values
    for part in path:
        owner = owner.get(part)
        if owner is None:
            return None
    owner[leaf] = value
    return values


def refused(read):
    """Whether it raises a UserError, which has to be one line."""
    try:
        read()
    except UserError as error:
        line = str(error)
    else:
        return False
    assert line.isprintable()
    assert 20 < len(line) < 600
    return True


class Folder:
    """The workdir of a tiny training that has made its artifacts, and the shapes of its parameters."""

    def __init__(self, classes, folder):
        self.path = epath.Path(folder)
        config = tiny_variant(default_config(classes))
        save_config(config, self.path)
        run = make_run(config, folder)
        self.params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(run.make_model)))
        self.values = json.loads((self.path / "config.json").read_text())

    def refuses(self, values, *, opens=True):
        """Whether reading an edited file is refused: with its parameters as every verb does, or the file alone."""
        (self.path / "config.json").write_text(json.dumps(values))
        if refused(lambda: load_valid_config(self.path)):
            return True
        return opens and refused(lambda: load_run(self.path).trained(self.params))


@pytest.fixture
def limited_memory():
    """Four GiB more than now at most: a size that is allocated raises MemoryError instead of ending the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**32, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize(
    "classes",
    [pytest.param(case, marks=[pytest.mark.slow] * (case[0] is not GPTConfig)) for case in TRAININGS],
    ids=title,
)
def test_any_edit_of_any_field_is_taken_or_refused_in_one_line(classes, tmp_path):
    """Every leaf and part with every hostile value; some of what is taken is opened with the parameters it had."""
    folder, num_taken = Folder(classes, tmp_path), 0
    for name in [*leaves(folder.values), *PARTS]:
        for value in HOSTILE:
            values = edited(folder.values, name, value)
            if name == "sha256" or values is None or folder.refuses(values, opens=False):
                continue
            num_taken += 1
            if name.startswith("model.") and num_taken % 8 == 0:
                folder.refuses(values)
    assert num_taken > 50


GPT = GPTConfig, LanguageModelConfig, TextData


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["dence", "window,", *SPECS], "dence", "window,", *KINDS))
def test_options_of_any_attention_are_taken_or_refused_in_one_line(name, tmp_path):
    values = edited(Folder(GPT, tmp_path).values, "model.attention.name", name)
    options, num_refused = values["model"]["attention"]["options"], 0
    path = tmp_path / "config.json"
    for option in options:
        for value in (None, -1, 0, 3, 2**31 - 1):
            values["model"]["attention"]["options"] = options | {option: value}
            path.write_text(json.dumps(values))
            num_refused += refused(lambda: load_valid_config(tmp_path))
    assert num_refused > len(options)


def test_an_edit_is_noticed_by_the_checksum(tmp_path):
    """Also of fields that no parameter depends on."""
    folder = Folder(GPT, tmp_path)
    for name in leaves(folder.values):
        values = folder.values | {"sha256": "another"}
        if name != "sha256":
            values = edited(folder.values, name, "another") | {"sha256": folder.values["sha256"]}
        assert folder.refuses(values, opens=False), name
    assert not folder.refuses(folder.values)


def test_the_advice_of_the_readme_works(tmp_path):
    """One field edited and the line of the checksum deleted, as text: the file still is JSON."""
    save_config(tiny_variant(default_config(GPT)), epath.Path(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"keep_last": 5', '"keep_last": 4'))
    with pytest.raises(UserError, match='delete its line "sha256"'):
        load_valid_config(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"sha256"' not in line))
    assert load_valid_config(tmp_path).keep_last == 4


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A language model that was trained for two steps."""
    workdir = tmp_path_factory.mktemp("edited")
    config = tiny_variant(default_config(GPT))
    config.mesh.data, config.num_steps = 1, 2
    train(config, workdir)
    return workdir


EDITS = {
    "model.num_layers": (2, "layers/.* of shape"),
    "model.d_ff": (65, "of shape"),
    "model.num_heads": (0, "config.model.num_heads must be at least 1, got 0"),
    "model.attention.name": ("dence", "attention.name='dence' must be one of"),
    "model.vocab_size": (5, "the tokenizer of .* ids, but vocab_size is 5"),
    "task.data.tokenizer": ("x", "the tokenizer of .* was made as .*, not 'x, gpt'"),
    "mesh.data": ("x", "config.mesh.data must be a whole number, got 'x'"),
    "keep_last": (0, "config.keep_last must be at least 1"),
    "seed": (2**32, "config.seed must be at most 4294967295"),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "generate", "average", "convert"])
def test_verbs_say_in_one_line_what_was_edited(workdir, verb, monkeypatch, capfd, tmp_path):
    saved = (workdir / "config.json").read_text()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"a\n")))
    more = [f"--output={tmp_path / 'out'}"] if verb == "convert" else []
    try:
        for name, (value, message) in EDITS.items():
            (workdir / "config.json").write_text(json.dumps(edited(json.loads(saved), name, value)))
            capfd.readouterr()
            assert main([verb, f"--workdir={workdir}", *more]) == 2
            (line,) = capfd.readouterr().err.splitlines()
            assert re.search(message, line), line
    finally:
        (workdir / "config.json").write_text(saved)
