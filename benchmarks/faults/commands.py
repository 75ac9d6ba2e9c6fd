"""Random command lines of every verb, with valid values and with mistakes of people and programs.

The flags are taken from the parsers of the verbs, and the fields from the experiments, so that new flags are tried
without a change here. A valid command runs; a training takes two steps.
"""

import argparse
import contextlib
import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.faults.campaign import Trial
from benchmarks.faults.command import call, fresh, judge, shown
from benchmarks.faults.subjects import model_folder, training
from tfx_jax.arguments import Parser
from tfx_jax.cli import VERBS
from tfx_jax.cli.train import load_config_file
from tfx_jax.launch import TARGETS
from tfx_jax.training.config import flat

TEXTS = (
    *("", " ", "x", "-", "--", "None", "True", "[]", "{}", "()", "(1,)", "(1, 'x')", "'", '"', "%s%n", "$HOME", "a=b"),
    *(
        "\x1b[2J\x1b[31mred",
        "two\nlines",
        "tab\there",
        "\u202ereversed",
        "日本語",
        "é" * 200,
        "\udcff",
        "\x07",
        "a" * 5_000,
    ),
    *("/dev/null", "/dev/null/below", "/proc/self/mem", "s3://bucket/x", "gs://bucket/x", "http://127.0.0.1:1/x", "~"),
)
"""Values that are not numbers; \\udcff is a byte that is not UTF-8, as Python reads it from a command line."""

NUMBERS = (
    *("0", "-0", "1", "-1", "2", "3", "7", "1.5", "0.5", "-0.5", "1e-45", "1e400", "nan", "inf", "-inf", "1_0", "0x10"),
    *("2147483647", "2147483648", "4294967296", "1000000000000", "9" * 30, "1e9", "+1", "１", "1 "),
)
"""Values that are numbers or look like numbers."""

CONFIGS = ("transformer_demo:test", "gpt_wikitext2:test", "bert_banking77:test", "t5_wikitext2:test", "vit_digits:test")
_LINES = b"how many glasses of milk did they drink ?\n\nthe dog\tbarks\n"


class _Seen(Exception):  # noqa: N818  carries the flags of a parser out of the verb
    pass


def flags_of(command: Sequence[str]) -> list[argparse.Action]:
    """Returns the flags and arguments of a verb or of one of its targets, from its parser.

    Runs the verb, but leaves it with an exception as soon as its parser begins to parse.
    """

    def see(parser: Parser, *_: Any) -> Any:
        raise _Seen(parser._actions)

    with mock.patch.object(Parser, "parse_known_args", see), mock.patch.object(Parser, "parse_args", see):
        try:
            importlib.import_module(f"tfx_jax.cli.{command[0].replace('-', '_')}").run(list(command[1:]))
        except _Seen as seen:
            return [action for action in seen.args[0] if action.dest != "help"]
    raise RuntimeError(f"{command} has no parser")


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models that the verbs read; returns the function that makes a trial."""
    workdirs = {name: str(training(name, folder.parent)) for name in ("translation", "language", "labels")}
    grammar = Grammar(workdirs, str(model_folder("gpt", folder.parent)))
    here = folder / "here"

    def attempt(random: np.random.Generator) -> Trial:
        command = grammar.command(random)
        fresh(here)
        what = shown(command)
        return judge(call(command, _LINES), what)

    return attempt


class Grammar:
    """Samples commands.

    Args:
      workdirs: workdirs of trainings by name.
      model: Hugging Face folder.
    """

    def __init__(self, workdirs: dict[str, str], model: str):
        benches = [["bench", name] for name in ("train", "step", "decode", "attention", "data")]
        launches = [["launch", name] for name in TARGETS]
        verbs = [[verb] for verb in VERBS if verb not in ("bench", "launch")]
        # Verbs with more options are sampled more often.
        self.commands = [*verbs, *benches, *launches, *([["train"]] * 6), ["evaluate"], ["generate"], ["plan"]]
        self._flags = {tuple(command): flags_of(command) for command in self.commands}
        self._workdirs, self._model = list(workdirs.values()), model
        self._fields = {name: flat(load_config_file(name)) for name in CONFIGS}

    def command(self, random: np.random.Generator) -> list[str]:
        """Returns the words of a random command: a verb with flags, most of which are valid."""
        command = list(self.commands[random.integers(len(self.commands))])
        if command[0] in ("bench", "launch") and random.random() < 0.05:
            return [command[0], *([_one_of(random, TEXTS)] if random.random() < 0.8 else [])]
        if random.random() < 0.01:
            command[0] = _one_of(random, TEXTS)
            return command
        config = _one_of(random, CONFIGS)
        wrong = (0.0, 0.08, 0.08, 0.4)[int(random.integers(4))]  # probability that a value is wrong
        words = [*command, *self._arguments(command, config, wrong, random)]
        if command in (["train"], ["plan"], ["evaluate"], ["bench", "step"], ["bench", "data"]):
            words += self._overrides(config, wrong, random)
        if command == ["train"]:
            words += ["--config.num_steps=2", "--config.eval_every=0"]
        if command[0] == "launch":
            words += ["--dry-run", "--", "train", f"--config={config}", "--workdir=gs://bucket/run"]
        if random.random() < 0.03:
            words.insert(int(random.integers(1, len(words) + 1)), _one_of(random, (*TEXTS, *NUMBERS)))
        return words

    def _arguments(self, command: list[str], config: str, wrong: float, random: np.random.Generator) -> list[str]:
        """Returns random flags of a command with their values; `wrong` is the probability of a wrong value."""
        words: list[str] = []
        flags = [action for action in self._flags[tuple(command)] if action.dest not in ("dry_run", "search")]
        for action in flags:
            is_needed = action.required or action.dest in ("workdir", "model", "output", "steps", "length", "batch")
            if random.random() < (wrong / 5 if is_needed else 0.75):
                continue
            name = action.option_strings[-1] if action.option_strings else None
            if action.nargs == 0 and name:
                words.append(name)
                continue
            value = self._value(action, config, wrong, random)
            words.append(value if name is None else f"{name}={value}")
        if command == ["generate"] and random.random() < 0.95:  # these two exclude each other
            drop = _one_of(random, ("--model=", "--workdir="))
            words = [word for word in words if not word.startswith(drop)]
        return words

    def _value(self, action: argparse.Action, config: str, wrong: float, random: np.random.Generator) -> str:
        """Returns a random value of a flag; `wrong` is the probability of one that is probably not allowed."""
        if random.random() < wrong:
            return _one_of(random, TEXTS if random.random() < 0.5 else NUMBERS)
        if action.choices is not None:
            choice = _one_of(random, tuple(map(str, action.choices)))
            return "tiny" if action.dest == "model" else choice  # bench has larger ones, which take minutes
        known_values = {
            "config": (config,),
            "workdir": tuple(self._workdirs),
            "model": (self._model,),
            "step": ("best", "average", "latest", "2", "4", "5"),
            "output": ("new", "new.png", "new/below.svg"),
            "html": ("new.html",),
            "source": ("the dog barks .",),
            "topology": ("v5e:2x2", "h100:1x1x2", "v5e:0x2", "v99:2x2"),
            "profile": ("0:1", "1:0", "a:b", "1:2:3"),
            "coordinator": ("127.0.0.1:0",),
            "name": ("transformer_demo", "no_such/x"),
        }
        if action.dest == "workdir" and not action.required and random.random() < 0.5:
            return "new"  # workdir of a new training
        accepted = _accepted(action, ("1", "2", "0.5", "1:00:00", "x", "a=b"))
        return _one_of(random, known_values.get(action.dest, accepted))

    def _overrides(self, config: str, wrong: float, random: np.random.Generator) -> list[str]:
        """Returns 0 to 3 overrides of fields of the experiment, with valid or wrong values."""
        fields = self._fields[config]
        words: list[str] = []
        for _ in range(int(random.integers(0, 4))):
            name = _one_of(random, tuple(fields))
            value = str(fields[name])
            same_kind = NUMBERS if isinstance(fields[name], int | float | type(None)) else TEXTS
            if random.random() < max(wrong, 0.2):
                value = _one_of(random, same_kind if random.random() < 0.8 else (*NUMBERS, *TEXTS))
            words.append(f"--config.{name}={value}")
            if random.random() < wrong / 4:
                words[-1] = _one_of(
                    random, (f"--config.{name}", f"--config.{name}x=1", f"--config={name}", "--config.")
                )
        return words


def _accepted(action: argparse.Action, values: Sequence[str]) -> Sequence[str]:
    """Returns the values that a flag accepts; all values if it accepts none."""
    accepted: list[str] = []
    for value in values:
        with contextlib.suppress(ValueError, TypeError, argparse.ArgumentTypeError):
            if callable(action.type):
                action.type(value)
            accepted.append(value)
    return accepted or values


def _one_of(random: np.random.Generator, values: Sequence[str]) -> str:
    return values[int(random.integers(len(values)))]
