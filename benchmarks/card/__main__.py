r"""A machine with one H100 or H200 in ten minutes: is everything correct, how fast is it, and how good are predictions?

    python -m benchmarks.card --minutes=10 --output=runs/card --data-dir=DIR

from the root of the repository. It needs Python 3.12, JAX 0.11 or newer for CUDA, PyTorch, transformers, Matplotlib and
Pillow, and no network; `python -m benchmarks.card.wheels` collects what else such a machine lacks. DIR holds
`input.txt` of tiny Shakespeare and Multi30k's `train.en.gz`, `train.de.gz`, `valid.en` and `valid.de` with BPE applied;
without it nothing is trained.

Sections run in this order, each in a separate process that is killed at its time limit. Later sections get the time
that a section does not use. Every row is written when it is measured, as a line of OUTPUT/card.jsonl and in the tables
of OUTPUT/card.md, so a section that fails or is killed loses only the rows that it has not measured.

    machine      devices and versions
    correctness  every implementation of attention, forward and backward, against float64
    prediction   `tfx-jax bench step`: the time of a step that `plan` predicts, and the time that it takes
    training     base, big and GPT-2 against PyTorch, compiled and with fused attention
    decoding     base with a beam of 4, GPT-2 and a Llama against transformers
    attention    1,024 to 65,536 tokens, every implementation against PyTorch's
    runs         experiments for what time remains; the same command, with the same OUTPUT, resumes them

`--only=correctness,attention` chooses sections. `--size=tiny`, the default without an accelerator, rehearses all of
them on a CPU.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.card.table import as_markdown

_ROOT = pathlib.Path(__file__).parents[2]
_SECTIONS = "benchmarks.card.sections"
_GRACE = 10.0  # seconds that a killed section has to end its processes

SHARES = {
    "machine": 3,
    "correctness": 10,
    "prediction": 22,
    "training": 25,
    "decoding": 17,
    "attention": 13,
    "runs": 10,
}
"""Sections in order, and the share of the time that each may use."""


class Results:
    """The rows so far, in card.jsonl and card.md of a folder."""

    def __init__(self, folder: pathlib.Path):
        """Starts empty files."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.rows: list[dict[str, Any]] = []
        (folder / "card.jsonl").write_text("")

    def add(self, row: dict[str, Any]) -> None:
        """Writes a row into both files."""
        self.rows.append(row)
        with (self._folder / "card.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        (self._folder / "card.md").write_text(as_markdown(self.rows))


def run_section(name: str, options: dict[str, Any], seconds: float, folder: pathlib.Path, results: Results) -> None:
    """Runs a section in a process and adds its rows; then one that says how long it took, and how it ended."""
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", _SECTIONS, name, json.dumps(options | {"ends": time.time() + seconds})]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
    limit = threading.Timer(seconds, _kill, [process])
    limit.start()
    with process:
        for line in process.stdout or ():
            with contextlib.suppress(json.JSONDecodeError):  # half a line of a process that was killed
                results.add({"section": name} | json.loads(line))
        status = process.wait()
        limit.cancel()
        limit.join()  # at the limit, until all processes of the section have ended
        _signal(process, signal.SIGKILL)  # what the section has started and left
    took = time.monotonic() - start
    outcome = "complete"
    if took >= seconds:
        outcome = f"stopped at its limit of {seconds:.0f} s"
    elif status:
        outcome = f"failed: {_last_line(log) or f'status {status}'}"
    results.add({"section": name, "row": "section", "outcome": outcome, "seconds": round(took, 1)})
    print(f"{name}: {outcome}, {took:.0f} s", file=sys.stderr, flush=True)


def _kill(process: subprocess.Popen[str]) -> None:
    """Asks a section and its processes to end, and kills those that do not; a training may save after its section."""
    _signal(process, signal.SIGTERM)
    ends = time.monotonic() + _GRACE
    while time.monotonic() < ends:
        process.poll()  # otherwise the section stays in the group as a zombie
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _last_line(log: pathlib.Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.card", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all sections; 10 by default")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/card"), help="folder for the results")
    parser.add_argument("--data-dir", type=pathlib.Path, help="folder of the texts to train on")
    parser.add_argument(
        "--size", choices=("auto", "full", "tiny"), default="auto", help="auto: full where there is an accelerator"
    )
    parser.add_argument("--only", default=",".join(SHARES), help="sections, separated by commas")
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in SHARES]:
        parser.error(f"unknown section {', '.join(unknown)}; there are {', '.join(SHARES)}")
    if not arguments.minutes > 0:
        parser.error("--minutes must be above 0")

    deadline = time.monotonic() + 60 * arguments.minutes
    folder = arguments.output.resolve()
    results = Results(folder)
    size = arguments.size
    data_dir = None if arguments.data_dir is None else str(arguments.data_dir.resolve())
    for name in SHARES:
        if name not in chosen and name != "machine":
            continue
        later = sum(share for other, share in list(SHARES.items())[list(SHARES).index(name) :] if other in chosen)
        seconds = max(deadline - time.monotonic(), 1.0) * SHARES[name] / max(later, SHARES[name])
        device = next((row["device"] for row in results.rows if "device" in row), "unknown")
        options = {"size": size, "output": str(folder), "data_dir": data_dir, "device": device}
        # Starting JAX takes a while on any machine.
        run_section(name, options, max(seconds, 120.0) if name == "machine" else seconds, folder, results)
        if name == "machine" and size == "auto":  # where nothing is known, an accelerator is likelier
            size = "tiny" if any(row.get("has_accelerator") is False for row in results.rows) else "full"
    print((folder / "card.md").read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
