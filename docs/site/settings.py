"""Configuration and command reference, from the dataclasses and the parsers."""

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from docs.site.api import Pages
from docs.site.markdown import cell, code_link, inline, prose
from docs.site.symbols import REPOSITORY
from tfx_jax import cli, models, nn, tasks, training
from tfx_jax.cli.experiments import experiment_files, lab_note
from tfx_jax.cli.support.parsers import parser_of
from tfx_jax.fields import meanings
from tfx_jax.launch import TARGETS
from tfx_jax.models import hf


def pages() -> Pages:
    """Returns the configuration reference, the command reference and the experiments."""
    return {"configuration": _configuration(), "commands": _commands(), "experiments": _experiments()}


def _configs() -> Iterator[tuple[str, list[type]]]:
    """Yields (title of a section, dataclasses of configurations in it)."""
    yield "Experiment", [training.ExperimentConfig, training.OptimizerConfig, training.MeshConfig]
    for title, package in (("Models", models), ("Layers", nn), ("Tasks and data", tasks)):
        exports = [getattr(package, name) for name in package.__all__]
        yield title, [kind for kind in exports if isinstance(kind, type) and _is_config(kind)]


def _is_config(kind: type) -> bool:
    is_config = kind.__name__.endswith(("Config", "Data", "Speech", "Options"))
    return is_config and dataclasses.is_dataclass(kind)


def _configuration() -> str:
    lines = [
        "# Configuration reference",
        "",
        "Every field of every configuration, with its type, its default and its meaning. A field of an experiment is",
        "set on the command line by its path: `--config.model.num_layers=2`, `--config.optimizer.warmup_steps=1000`.",
        "`tfx-jax train --config=NAME --print-config` prints the fields of one experiment with their values.",
        "",
    ]
    for title, kinds in _configs():
        lines += [f"## {title}", ""]
        for kind in kinds:
            first = (inspect.getdoc(kind) or "").split("\n\n")[0].partition("\nFields:")[0]
            lines += [
                f"### {inline(kind.__name__)}",
                "",
                code_link(kind.__name__, "./"),
                "",
                prose(first, link="./"),
                "",
            ]
            lines += ["| field | type | default | |", "| --- | --- | --- | --- |"]
            hints = typing.get_type_hints(kind)
            field_meanings = meanings(kind)
            for field in dataclasses.fields(kind):
                row = [
                    f"`{field.name}`",
                    f"`{cell(_type_name(hints[field.name]))}`",
                    f"{cell(_default(field))}",
                    cell(inline(field_meanings[field.name])),
                ]
                lines.append(f"| {' | '.join(row)} |")
            lines.append("")
    return "\n".join(lines)


def _type_name(hint: Any) -> str:
    """Returns a type without the modules of its names, such as "Sequence[int]"."""
    return (
        hint.__name__
        if isinstance(hint, type) and not typing.get_args(hint)
        else re.sub(r"\b(?:\w+\.)+", "", str(hint))
    )


def _default(field: Any) -> str:
    """Returns the default of a dataclass field in backticks; "" for none."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return f"`{type(value).__name__}()`" if dataclasses.is_dataclass(value) else f"`{value!r}`"
    return "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"


_PARTS = {"launch": tuple(TARGETS), "bench": ("train", "step", "decode", "attention", "data")}
"""Verbs whose first argument selects another parser."""


def _commands() -> str:
    lines = [
        "# Command reference",
        "",
        "`tfx-jax VERB --help` prints the same. Exit status: 0 for success, 2 for a mistake in the command or in a",
        "file, 129, 130 and 143 after SIGHUP, Ctrl-C and SIGTERM, 75 after a hang; `plan` exits with 1 if the training",
        "does not fit.",
        "",
        "| verb | |",
        "| --- | --- |",
        *(f"| [{verb}](#tfx-jax-{verb}) | {inline(meaning)} |" for verb, meaning in cli.VERBS.items()),
        "",
    ]
    for verb in cli.VERBS:
        parsers = [parser_of(verb, "--help")]
        parsers += [parser_of(verb, name) for name in _PARTS.get(verb, ())]
        lines += [f"## tfx-jax {verb}", ""]
        for index, parser in enumerate(parsers):
            if index:  # the first parser is that of the verb itself, which has a heading already
                lines += [f"### {parser.prog}", ""]
            lines += list(_parser(parser))
    return "\n".join(lines)


def _parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the lines about a parser: description, usage, table of options, epilog."""
    yield inline(parser.description or "")
    yield ""
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    yield f"```text\n{usage}\n```\n"
    actions = [action for action in parser._actions if action.dest != "help"]
    if actions:
        yield "| option | |\n| --- | --- |"
    for action in actions:
        value = "" if action.nargs == 0 else f"={action.metavar or action.dest.upper()}"
        name = f"{', '.join(action.option_strings)}{value}" if action.option_strings else action.metavar or action.dest
        meaning = inline((action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%"))
        notes = [f"One of {', '.join(f'`{choice}`' for choice in action.choices)}."] if action.choices else []
        has_default = action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
        if has_default and "default" not in meaning:
            notes.append(f"Default: `{action.default}`.")
        if action.required and action.option_strings:
            notes.append("Required.")
        stop = "." if notes and meaning and not meaning.endswith(".") else ""
        yield f"| `{cell(str(name))}` | {cell(' '.join([meaning + stop, *notes]))} |"
    yield ""
    if parser.epilog:
        yield inline(parser.epilog)
        yield ""


def families() -> str:
    """Returns the table of architectures that `tfx_jax.models.hf` reads and writes."""
    rows = [
        f"| `{name}` | {code_link(family.model.__name__, './')} |"
        for name, family in sorted(hf.FAMILIES.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join(["| architecture in config.json | model |", "| --- | --- |", *rows])


def _experiments() -> str:
    lines = [
        "# Experiments",
        "",
        "An experiment is a configuration file that comes with the library: a model, a task, the data and the numbers",
        "of a paper, with a note of what was measured. `tfx-jax experiments` lists them, `tfx-jax experiments NAME`",
        "prints one note, and `tfx-jax experiments --copy NAME` writes the file here, to edit. [Results](results.md)",
        "has all figures in one table.",
        "",
    ]
    for name, path in experiment_files().items():
        note = lab_note(path)
        address = f"{REPOSITORY}/blob/main/experiments/{path.name}"
        lines += [
            f"## {inline(name)}",
            "",
            f"[experiments/{inline(path.name)}]({address})",
            "",
            prose(note, link="./"),
            "",
        ]
    return "\n".join(lines)
