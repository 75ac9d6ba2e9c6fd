"""Damaged files of a finished training, and verbs that read them: flipped bits; truncated, missing, swapped files.

A verb must write the same output as before, or reject the file in one line. Another output is the outcome "silent",
unless standard error says what was skipped.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks.faults.campaign import Trial
from benchmarks.faults.command import Ended, call, fresh, judge, shown
from benchmarks.faults.subjects import training
from tfx_jax.errors import UserError
from tfx_jax.training import load_run
from tfx_jax.training.checkpoint import load_best_params, load_params

LINES = b"how many glasses of milk did they drink ?\nthe dog barks .\n"

READ = ["read"]
"""A stand-in for a verb that only reads configuration, tokenizer and parameters, in a tenth of a second."""

VERBS = {
    "translation": (
        *(READ, READ, READ, [*READ, "average"], [*READ, "2"], ["average"]),
        ["translate"],
    ),
    "labels": (READ, READ, READ, [*READ, "average"], ["average", "--last=2"], ["predict", "--json"]),
    "language": (READ, READ, READ, ["average"], ["generate", "--max-new-tokens=4"], ["convert", "--output=new"]),
}
"""Verbs that read the workdir of a training, by its name; cheap ones are repeated to be sampled more often."""


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Result of a verb: its status and output, and the content or checksums of the files that it wrote."""

    ended: Ended
    written: object


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial."""
    here = folder / "here"
    originals = {name: training(name, folder.parent) for name in VERBS}

    @functools.cache
    def expected(name: str, verb: int) -> _Answer:
        """Returns the answer of `VERBS[name][verb]` without a fault."""
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        answer = _ask(VERBS[name][verb])
        if answer.ended.status != 0:
            raise RuntimeError(f"{VERBS[name][verb]}: {answer.ended}")
        return answer

    def attempt(random: np.random.Generator) -> Trial:
        name = list(VERBS)[int(random.integers(len(VERBS)))]
        verb = int(random.integers(len(VERBS[name])))
        undamaged = expected(name, verb)
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        what = f"{name}: {harm(here / 'workdir', random)}; {shown([*VERBS[name][verb], '--workdir=workdir'])}"
        answer = _ask(VERBS[name][verb])
        has_message = len(answer.ended.err.splitlines()) > len(undamaged.ended.err.splitlines())
        return judge(answer.ended, what, lambda: has_message or _same(answer, undamaged))

    return attempt


def _ask(verb: Sequence[str]) -> _Answer:
    """Runs a verb of `VERBS` on the workdir in the current directory."""
    if verb[0] == "read":
        return _read(verb[1] if len(verb) > 1 else None)
    ended = call([*verb, "--workdir=workdir"], LINES)
    if ended.status != 0:
        return _Answer(ended, None)
    files = [pathlib.Path("new/model.safetensors"), pathlib.Path("new/config.json")]
    written: list[object] = [file.read_bytes() for file in files if file.exists()]
    if verb[0] == "average":
        metadata = json.loads(pathlib.Path("workdir/average/_CHECKPOINT_METADATA").read_text())
        written.append(metadata["custom_metadata"])  # the checksums of all values
    return _Answer(ended, written)


def _read(step: str | None) -> _Answer:
    """Reads configuration, tokenizer and parameters (the best ones, or those of `step`), as if it were a verb."""
    try:
        run = load_run("workdir")
        params = (
            load_best_params("workdir") if step is None else load_params("workdir", int(step) if step == "2" else step)
        )
    except UserError as error:
        return _Answer(Ended(2, b"", f"tfx-jax read: {error}\n"), None)
    except Exception:
        return _Answer(Ended(None, b"", "", traceback.format_exc()), None)
    values = [leaf.tobytes() for leaf in jax.tree.leaves(params)]
    return _Answer(Ended(0, b"", ""), (run.config, run.task.tokenizer.encode("the dog barks ."), values))


def _same(answer: _Answer, expected: _Answer) -> bool:
    return (answer.ended.out, answer.written) == (expected.ended.out, expected.written)


def harm(workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Damages one file; returns a description."""
    files = sorted(path for path in workdir.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    # All kinds of files are equally likely, however many checkpoints there are. Files in folders "d", Orbax's data, are
    # one kind.
    kinds = sorted({path.name if path.parent.name != "d" else "d" for path in files})
    kind = kinds[int(random.integers(len(kinds)))]
    candidates = [path for path in files if kind in (path.name, path.parent.name)]
    path = candidates[int(random.integers(len(candidates)))]
    name, data = path.relative_to(workdir), path.read_bytes()
    harm = ("flip", "flip", "flip", "cut", "cut", "longer", "empty", "gone", "folder", "other", "zeros")[
        random.integers(11)
    ]
    position = int(random.integers(max(1, len(data))))
    if harm == "flip" and data:
        bit = int(random.integers(8))
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
        return f"bit {bit} of byte {position} of {name} flipped"
    if harm in ("gone", "folder"):
        path.unlink()
        if harm == "folder":
            path.mkdir()
        return f"{name} {'made a folder' if harm == 'folder' else 'deleted'}"
    if harm == "other":
        other = files[int(random.integers(len(files)))]
        shutil.copyfile(other, path) if other != path else None
        return f"{name} replaced by {other.relative_to(workdir)}"
    if harm == "cut":
        os.truncate(path, position)
        return f"{name} cut to {position} bytes"
    changed = {"longer": data + data[: position + 1], "empty": b"", "flip": b"", "zeros": bytes(len(data))}[harm]
    path.write_bytes(changed)
    return f"{name} {harm}: {len(data)} bytes before, {len(changed)} after"
