"""SIGKILL at any moment of a training, also inside saves; the same command goes on, bit for bit.

A trial is one kill. The training that it is made to goes on in the next trial, and the end of a training compares all
its checkpoints with those of one that no one disturbed. What is killed is a fork of a process that has imported JAX
and never had a backend, and takes its programs from the compilation cache: that is what makes a thousand affordable.
"""

import os
import pathlib
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable

import numpy as np

from benchmarks.faults import trainings
from benchmarks.faults.campaign import SECONDS, WAITING, Trial, cpu_seconds, doing
from tfx_jax import cli
from tfx_jax.cli import train as _  # noqa: F401  imported once, for all forks

_EVERY = 3  # steps between saves
_OVERRIDES: dict[str, object] = {
    "num_steps": 30,
    "checkpoint_every": _EVERY,
    "model.num_layers": 1,
    "hang_seconds": 0,  # the watcher sees to that
    **{"task.data.tokenizer": "words", "task.data.is_tokenized": True},  # made in no time, where a kill came before
}


class Hung(Exception):  # noqa: N818  a verdict
    """A training that came neither to the moment nor to an end."""


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains once without a fault."""
    bench = trainings.Bench(folder, _OVERRIDES)
    reference, workdir, log = folder / "reference", folder / "workdir", folder / "log"
    if not (reference / "complete").exists():
        shutil.rmtree(reference, ignore_errors=True)
        child = _fork(lambda: cli.main(_command(bench, reference)), log)
        if _wait(child, lambda: False, seconds=10 * SECONDS) != 0:  # it compiles, which no trial does again
            raise RuntimeError(log.read_text())
        (reference / "complete").touch()

    def attempt(random: np.random.Generator) -> Trial:
        before = trainings.steps_of(workdir)
        moment, happened = _moment(random, workdir, log, max(before, default=0))
        doing(f"kill {moment}")
        child = _fork(lambda: cli.main(_command(bench, workdir)), log)
        try:
            status = _wait(child, happened, pause=random.uniform(0, 0.02))
        except Hung:
            return Trial(f"kill {moment}", "hang", log.read_text()[-1_000:])
        what = f"killed {moment}, from step {max(before, default=0)}"
        text = log.read_text(errors="replace")
        if lost := before - trainings.steps_of(workdir):
            return Trial(what, "loss", f"checkpoints {sorted(lost)} are gone")
        if status == -signal.SIGKILL and "Traceback" not in text:
            return Trial(what, "same")
        if status != 0 or "Traceback" in text:
            return Trial(what, "traceback", f"status {status}: {text[-2_000:]}")
        return _compared(bench, workdir, reference, log, what)

    return attempt


def _compared(
    bench: trainings.Bench, workdir: pathlib.Path, reference: pathlib.Path, log: pathlib.Path, what: str
) -> Trial:
    """The verdict over a training that has come to its end; the next trial begins another."""

    def compare() -> int:
        bench.compare(workdir, reference, set())
        return 0

    status = _wait(_fork(compare, log), lambda: False)
    if status:
        shutil.move(workdir, workdir.with_name(f"differs-{len(list(workdir.parent.glob('differs-*')))}"))
        return Trial(what, "loss", log.read_text()[-2_000:])
    shutil.rmtree(workdir)
    return Trial(f"{what}: over before that, all checkpoints as without", "same")


def _moment(
    random: np.random.Generator, workdir: pathlib.Path, log: pathlib.Path, step: int
) -> tuple[str, Callable[[], bool]]:
    """When to kill: at a step, in a save, or some time after the start, when it may be anywhere."""
    kind = random.random()
    if kind < 0.4:
        save = (step // _EVERY + int(random.integers(1, 4))) * _EVERY
        return f"in the save of step {save}", lambda: any((workdir / "checkpoints").glob(f"{save}.*tmp*"))
    if kind < 0.8:
        wanted = step + int(random.integers(1, 3 * _EVERY))
        return f"after step {wanted}", lambda: f"step {wanted}/" in log.read_text(errors="replace")
    end = time.monotonic() + (seconds := random.uniform(0, 3))
    return f"after {seconds:.2f} s", lambda: time.monotonic() > end


def _command(bench: trainings.Bench, workdir: pathlib.Path) -> list[str]:
    """The command line."""
    return bench.command(workdir)


def _fork(run: Callable[[], int], log: pathlib.Path) -> int:
    log.write_bytes(b"")
    child = os.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            status = run()
            sys.stdout.flush()
            os._exit(status)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


def _wait(child: int, happened: Callable[[], bool], pause: float = 0.0, seconds: float = SECONDS) -> int:
    """The status of a process, killed once something has happened; negative: the signal that ended it.

    Raises:
      Hung: if neither comes within so many seconds of a core.
    """
    end, is_killed = time.monotonic() + WAITING * 5, False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if not is_killed and happened():
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
            is_killed = True
        if time.monotonic() > end or cpu_seconds(child) > seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Hung
        time.sleep(0.002)
