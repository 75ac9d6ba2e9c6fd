"""Hostile workdirs: pipes, devices, sockets, links, folders or huge files in place of files; lists with "..".

A verb must answer as before, reject the workdir in one line, or say what it skipped. Nothing outside may change.
"""

import functools
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable

import numpy as np
from etils import epath

from benchmarks.faults.campaign import BAD, Trial
from benchmarks.faults.command import call, fresh, judge, shown
from benchmarks.faults.damage import LINES
from benchmarks.faults.subjects import EXPERIMENTS, TINY, training
from tfx_jax.training.checkpoint.artifacts import write_sealed

VERBS = {
    "translation": (["translate"], ["average"]),
    "labels": (["predict", "--json"], ["average", "--last=1"]),
    "language": (["generate", "--max-new-tokens=2", "--temperature=0"], ["convert", "--output=new"], ["average"]),
}
MORE = ("train.lock", "tensorboard", "profile", "checkpoints", "average", "tokenizer", "report.md", "config.json")
"""Names that are tried as often as all other files together; some are not there before."""


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial."""
    here, originals = folder / "here", {name: training(name, folder.parent) for name in VERBS}

    def copy(name: str, command: list[str]) -> None:
        """Recreates a workdir; for `train`, without its last checkpoint, so that two steps remain."""
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        if command[0] == "train":
            shutil.rmtree(here / "workdir/checkpoints/4")

    @functools.cache
    def cached_answer(name: str, command: tuple[str, ...]) -> bytes:
        copy(name, [*command])
        ended = call(command, LINES)
        if ended.status != 0:
            raise RuntimeError(f"{command}: {ended}")
        return ended.out

    def answer(name: str, command: list[str]) -> bytes:
        """Returns the output of a verb for the unchanged workdir."""
        return cached_answer(name, tuple(command))

    def attempt(random: np.random.Generator) -> Trial:
        name = list(VERBS)[int(random.integers(len(VERBS)))]
        verbs = [*VERBS[name], ["train", f"--config={EXPERIMENTS[name]}", *TINY]]
        command = [*verbs[int(random.integers(len(verbs)))], "--workdir=workdir"]
        answer(name, command)
        copy(name, command)
        outside = here / "outside"
        (outside / "7").mkdir(parents=True)  # a folder with the name of a checkpoint
        (outside / "secret").write_text("of somebody")
        before = contents(outside)
        what = f"{name}: {harm(here / 'workdir', outside, random)}; {shown(command)}"
        ended = call(command, LINES)
        trial = judge(ended, what, lambda: ended.out == answer(name, command) or bool(ended.err))
        if contents(outside) != before and trial.outcome not in BAD:
            return Trial(what, "loss", f"outside of the workdir: {contents(outside)}")
        return trial

    return attempt


def contents(folder: pathlib.Path) -> dict[str, str]:
    """Returns the text of all files below a folder by relative path; "" for folders."""
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace") if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def harm(workdir: pathlib.Path, outside: pathlib.Path, random: np.random.Generator) -> str:
    """Replaces a random file or folder of a workdir by something else; returns a description.

    Links may lead to `outside`, a folder beside the workdir.
    """
    if random.random() < 0.1:
        return _list(workdir, random)
    paths = sorted(path.relative_to(workdir) for path in workdir.rglob("*"))
    name = paths[int(random.integers(len(paths)))]
    if random.random() < 0.5:
        name = pathlib.Path(MORE[int(random.integers(len(MORE)))])
    path = workdir / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    targets = {
        "a link to a device": "/dev/zero",
        "a link to a full device": "/dev/full",
        "a link to itself": path.name,
        "a link to nowhere": outside / "new",
        "a link to another file": outside / "secret",
        "a link to another folder": outside,
        "a link to its own folder": ".",
        "a link to the root": "/",
    }
    kind = [*targets, "a pipe", "a socket", "an empty folder", "an endless file", "forbidden"][int(random.integers(13))]
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)
            server.bind(path.name)
            os.chdir(workdir.parent)
    elif kind == "an empty folder":
        path.mkdir()
    else:
        path.touch(0o000 if kind == "forbidden" else 0o644)
        if kind == "an endless file":
            os.truncate(path, 1 << 40)
    return f"{name} made {kind}"


def _list(workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Adds a hostile path to the list of files in artifacts.json; returns a description."""
    path = workdir / "artifacts.json"
    names = ("../outside/secret", "/dev/zero", "tokenizer/../../outside/secret", "tokenizer/../config.json", "..", "")
    name = names[int(random.integers(len(names)))]
    write_sealed(epath.Path(path), {"files": {**json.loads(path.read_text())["files"], name: "0" * 64}})
    return f"artifacts.json names {name!r}"
