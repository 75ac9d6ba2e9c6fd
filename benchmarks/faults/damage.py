"""Files of a finished training with a bit flipped, cut short, longer, emptied, gone or another's, and verbs that read.

A verb then writes what it wrote before, or refuses in one line. Other answers are silent unless standard error tells of
what was skipped.
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
"""What every verb does before it computes: the configuration, the tokenizer and the parameters; a second's tenth."""

VERBS = {
    "translation": (
        *(READ, READ, READ, [*READ, "average"], [*READ, "2"], ["average"]),
        ["translate"],
    ),
    "labels": (READ, READ, READ, [*READ, "average"], ["average", "--last=2"], ["predict", "--json"]),
    "language": (READ, READ, READ, ["average"], ["generate", "--max-new-tokens=4"], ["convert", "--output=new"]),
}
"""That read the workdir of a training; cheap ones more often."""


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What a verb gave: its output, and the checksums of what it wrote."""

    ended: Ended
    written: object


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains, and asks every verb once without any fault."""
    here = folder / "here"
    originals = {name: training(name, folder.parent) for name in VERBS}

    @functools.cache
    def expected(name: str, verb: int) -> _Answer:
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        answer = _ask(VERBS[name][verb])
        if answer.ended.status != 0:
            raise RuntimeError(f"{VERBS[name][verb]}: {answer.ended}")
        return answer

    def attempt(random: np.random.Generator) -> Trial:
        name = list(VERBS)[int(random.integers(len(VERBS)))]
        verb = int(random.integers(len(VERBS[name])))
        wanted = expected(name, verb)
        fresh(here)
        shutil.copytree(originals[name], here / "workdir")
        what = f"{name}: {harm(here / 'workdir', random)}; {shown([*VERBS[name][verb], '--workdir=workdir'])}"
        answer = _ask(VERBS[name][verb])
        told = len(answer.ended.err.splitlines()) > len(wanted.ended.err.splitlines())
        return judge(answer.ended, what, lambda: told or _same(answer, wanted))

    return attempt


def _ask(verb: Sequence[str]) -> _Answer:
    if verb[0] == "read":
        return _read(verb[1] if len(verb) > 1 else None)
    ended = call([*verb, "--workdir=workdir"], LINES)
    if ended.status != 0:
        return _Answer(ended, None)
    files = [pathlib.Path("new/model.safetensors"), pathlib.Path("new/config.json")]
    written: list[object] = [file.read_bytes() for file in files if file.exists()]
    if verb[0] == "average":
        described = json.loads(pathlib.Path("workdir/average/_CHECKPOINT_METADATA").read_text())
        written.append(described["custom_metadata"])  # the checksums of all values
    return _Answer(ended, written)


def _read(step: str | None) -> _Answer:
    """The configuration, the ids of a text, and all parameters, as if a verb had printed them."""
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


def _same(answer: _Answer, wanted: _Answer) -> bool:
    return (answer.ended.out, answer.written) == (wanted.ended.out, wanted.written)


def harm(workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Does one thing to one file, the larger ones not more often than the small; returns what."""
    files = sorted(path for path in workdir.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    # Each kind of file as often as any other, however many checkpoints there are.
    kinds = sorted({path.name if path.parent.name != "d" else "d" for path in files})
    kind = kinds[int(random.integers(len(kinds)))]
    fitting = [path for path in files if kind in (path.name, path.parent.name)]
    path = fitting[int(random.integers(len(fitting)))]
    name, data = path.relative_to(workdir), path.read_bytes()
    harm = ("flip", "flip", "flip", "cut", "cut", "longer", "empty", "gone", "folder", "other", "zeros")[
        random.integers(11)
    ]
    place = int(random.integers(max(1, len(data))))
    if harm == "flip" and data:
        bit = int(random.integers(8))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        return f"bit {bit} of byte {place} of {name} flipped"
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
        os.truncate(path, place)
        return f"{name} cut to {place} bytes"
    changed = {"longer": data + data[: place + 1], "empty": b"", "flip": b"", "zeros": bytes(len(data))}[harm]
    path.write_bytes(changed)
    return f"{name} {harm}: {len(data)} bytes before, {len(changed)} after"
