"""Edited configurations: fields of a workdir's config.json with hostile values, and verbs that read it.

A verb must reject the value in one line, or answer if the field allows the value. A value of another type, and a size
that differs from the parameters, must be rejected; ignoring it is the outcome "silent".
"""

import json
import math
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.faults.campaign import Trial
from benchmarks.faults.command import call, fresh, judge, shown
from benchmarks.faults.damage import LINES
from benchmarks.faults.subjects import training
from tfx_jax.data.tokenizers import load_folder_tokenizer

VERBS = {
    "translation": (["translate"], ["evaluate", "--json"], ["attend", "--source=the dog barks .", "--html=map.html"]),
    "labels": (["predict", "--json"], ["evaluate"]),
    "language": (["generate", "--max-new-tokens=2", "--temperature=0"], ["evaluate"], ["convert", "--output=new"]),
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 10**30, 0.5, -0.5, 1e300, float("nan"), float("inf")),
    *(
        "",
        "x",
        "dense",
        "float16",
        "\x1b[2J",
        "日本" * 9,
        "a" * 3_000,
        "../..",
        [],
        [1],
        [[1]],
        ["a"],
        {},
        {"class": "x"},
    ),
    {"class": "tfx_jax.models.gpt.GPTConfig"},
)
SIZES = ("vocab_size", "num_layers", "d_model", "d_ff", "max_length")
"""Fields of a model that determine shapes of its parameters; "max_length" does only if positions are learned."""


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial."""
    here, originals = folder / "here", {name: training(name, folder.parent) for name in VERBS}

    def attempt(random: np.random.Generator) -> Trial:
        name = list(VERBS)[int(random.integers(len(VERBS)))]
        command = [*VERBS[name][int(random.integers(len(VERBS[name])))], "--workdir=workdir"]
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        done, must_refuse = edit(here / "workdir/config.json", random)
        trial = judge(call(command, LINES), f"{name}: {done}; {shown(command)}")
        if trial.outcome == "same" and must_refuse:
            return Trial(trial.what, "silent", "the value was ignored")
        if trial.outcome == "line" and not re.search(r"config|vocab_size|tokenizer", trial.detail):
            return Trial(trial.what, "raw", f"no word of the configuration: {trial.detail}")
        return trial

    return attempt


def edit(path: pathlib.Path, random: np.random.Generator) -> tuple[str, bool]:
    """Changes, removes or adds a field of a config.json.

    Returns:
      (description of the change, whether every verb must reject it).
    """
    values = json.loads(path.read_text())
    del values["sha256"]
    parts = [(name, part) for name, part in leaves(values) if isinstance(part, dict)]
    prefix, part = parts[int(random.integers(len(parts)))]  # dotted name of a part of the configuration, its fields
    kind = random.random()
    if kind < 0.08 and part:
        field = list(part)[int(random.integers(len(part)))]
        del part[field]
        done, must_refuse = f"{prefix}{field} deleted", False
    elif kind < 0.16:
        part["no_such_field"] = 1
        done, must_refuse = f"{prefix}no_such_field=1", True
    else:
        field = list(part)[int(random.integers(len(part)))]
        before = part[field]
        value = VALUES[int(random.integers(len(VALUES)))]
        if type(before) is int and random.random() < 0.5:
            value = before + int(random.choice([-1, 1, before or 2]))
        part[field] = value
        done, must_refuse = f"{prefix}{field}={str(json.dumps(value))[:60]}, before {before!r}", False
        if isinstance(before, bool | int | float | str) and value is not None:
            is_number = isinstance(before, float) and type(value) is int
            must_refuse = type(value) is not type(before) and not is_number
        if prefix.endswith("model.") and field in SIZES[:-1] and value != before:
            if field == "vocab_size" and isinstance(value, int):  # a limit of the tokenizer, which may have fewer
                must_refuse |= 0 < value < num_tokens(path.parent)
            else:
                must_refuse = True
        must_refuse |= field == "tokenizer" and value != before
    path.write_text(json.dumps(values, indent=2))
    return done, must_refuse


def num_tokens(workdir: pathlib.Path) -> float:
    """Returns the number of tokens of a workdir's tokenizer, infinity if it has none."""
    folder = workdir / "tokenizer"
    return load_folder_tokenizer(folder).vocab_size if folder.exists() else math.inf


def leaves(values: Any, name: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted name, object) of an object and of all objects inside it, such as ("model.attention.", {...})."""
    result = [(name, values)]
    for field, value in values.items():
        if isinstance(value, dict):
            result += leaves(value, f"{name}{field}.")
    return result
