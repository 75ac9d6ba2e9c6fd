"""`--print-config`: every field of an experiment as a flag that works, with what its source says of it."""

import dataclasses
import inspect
import pydoc
import re
import shlex

import pytest

from tests.training.configs import TRAININGS, default_config, title
from tfx_jax.cli import main
from tfx_jax.cli.support.fields_help import fields_help
from tfx_jax.cli.support.overrides import override
from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, meanings, one_of
from tfx_jax.models import BertConfig
from tfx_jax.training.config import ExperimentConfig, flat


@dataclasses.dataclass
class Part:
    """What lies inside.

    More of it.
    """

    rate: float = fraction(0.1)  # of dropping
    # Told at a length that takes more than what is left of one line,
    # even of a wide one, so that it goes on below.
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass
class Whole:
    """What holds it."""

    count: int = at_least(1, 3)  # of all
    # Told above, on
    # two lines.
    kind: str = one_of(("a", "b"), "a")
    free: str = ""
    words: str = "two words"
    part: Part = dataclasses.field(default_factory=Part)


def test_a_line_for_each_field():
    assert fields_help(Whole()).splitlines() == [
        "Whole: What holds it.",
        "--config.count=3            of all; at least 1",
        "--config.kind=a             Told above, on two lines; one of a, b",
        "--config.free=",
        "--config.words='two words'",
        "",
        "Part: What lies inside.",
        "--config.part.rate=0.1        of dropping; in [0, 1)",
        "--config.part.sizes='(1, 2)'  Told at a length that takes more than what is left of one line,"
        " even of a wide one, so",
        "                              that it goes on below",
    ]


@pytest.mark.parametrize("classes", TRAININGS, ids=title)
def test_every_flag_that_is_printed_sets_what_is_there(classes):
    """But for lists."""
    config = default_config(classes)
    lines = [line for line in fields_help(config).splitlines() if line.startswith("--config.")]
    flags = [shlex.split(line.partition("  ")[0])[0] for line in lines]
    names = [flag.removeprefix("--config.").partition("=")[0] for flag in flags]
    assert sorted(names) == sorted(flat(config))
    values = flat(config)
    given = [flag for name, flag in zip(names, flags, strict=True) if not isinstance(values[name], tuple)]
    assert override(default_config(classes), given) == config


def test_none_takes_back_what_an_experiment_has_set():
    config = default_config((BertConfig, *TRAININGS[0][1:]))
    config.model.attention.options.window = 3
    assert override(config, ["--config.model.attention.options.window=None"]).model.attention.options.window is None
    again = ["--config.model.attention.options.window=None", "--config.model.attention.options.window=5"]
    assert override(config, again).model.attention.options.window == 5
    with pytest.raises(UserError, match=r"config\.model\.num_layers=None: must be a whole number, got 'None'"):
        override(config, ["--config.model.num_layers=None"])
    with pytest.raises(UserError, match=r"label_smoothing=abc: must be a number, got 'abc'"):
        override(config, ["--config.task.label_smoothing=abc"])


def test_the_command_prints_what_a_training_would_have(capsys, tmp_path):
    arguments = ["train", "--config=transformer_demo:test", "--print-config", "--config.model.num_layers=7"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("--config.model.num_layers"))
    assert re.match(r"--config\.model\.num_layers=7 +", line)
    assert sum(line.startswith("--config.seed=0 ") for line in lines) == 1
    assert not list(tmp_path.iterdir())
    assert main(["train", "--config=transformer_demo:test"]) == 2
    assert "--workdir is missing" in capsys.readouterr().err


@pytest.mark.parametrize("classes", TRAININGS, ids=title)
def test_help_of_every_configuration_says_what_its_fields_mean(classes):
    def check(config):
        said = " ".join(inspect.getdoc(type(config)).split())
        for name, meaning in meanings(type(config)).items():
            assert not meaning or f" {name}: {' '.join(meaning.split())}" in said
            if dataclasses.is_dataclass(getattr(config, name)):
                check(getattr(config, name))

    check(default_config(classes))


def test_help_shows_fields_below_the_docstring():
    shown = documented(dataclasses.make_dataclass("Shown", [], bases=(Part,), namespace={"__doc__": Part.__doc__}))
    lines = [line.strip(" |") for line in pydoc.render_doc(shown, renderer=pydoc.plaintext).splitlines()]
    start = lines.index("What lies inside.")
    assert lines[start + 2 : start + 6] == ["More of it.", "", "Fields:", "rate: of dropping; in [0, 1)"]
    assert lines[start + 6].startswith("sizes: Told at a length")


def test_the_source_says_something_of_most_fields():
    """Names that everybody knows need no words; a comment that is lost in reading would be seen here."""
    text = fields_help(ExperimentConfig(model=BertConfig()))
    told = [line for line in text.splitlines() if re.match(r"--config\.\S+ +\S", line)]
    assert len(told) > 0.7 * len([line for line in text.splitlines() if line.startswith("--config.")])
