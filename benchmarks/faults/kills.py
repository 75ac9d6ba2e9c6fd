"""SIGKILL at any moment of a training, also inside saves; the same command must resume it, bit for bit.

A trial is one kill. The next trial resumes the training. When a training ends, all its checkpoints are compared with
those of an undisturbed run. To afford a thousand trials, the killed process is a fork of a process that has imported
JAX but never initialized a backend, and its programs come from the compilation cache.
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
    "hang_seconds": 0,  # the watcher of the campaign detects hangs
    # A tokenizer that is trained quickly, because it is trained again if a kill came before it was saved.
    **{"task.data.tokenizer": "words", "task.data.is_tokenized": True},
}


class Hung(Exception):  # noqa: N818  a verdict
    """A training that neither reached the moment of the kill nor ended."""


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains once without a fault; returns the function that makes a trial."""
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
        return _compare(bench, workdir, reference, log, what)

    return attempt


def _compare(
    bench: trainings.Bench, workdir: pathlib.Path, reference: pathlib.Path, log: pathlib.Path, what: str
) -> Trial:
    """Returns the trial of a training that has ended, and deletes its workdir, so that the next trial begins another.

    Args:
      bench: the campaign's folder.
      workdir: workdir of the training.
      reference: workdir of the undisturbed run.
      log: file for the output of the process that compares.
      what: description of the fault.
    """

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
    """Samples the moment of the kill: in a save, after a step, or some time after the start.

    Args:
      random: random number generator.
      workdir: workdir of the training.
      log: file with its output.
      step: step of the last checkpoint.

    Returns:
      (description of the moment, function that returns whether it has come).
    """
    kind = random.random()
    if kind < 0.4:
        save = (step // _EVERY + int(random.integers(1, 4))) * _EVERY
        return f"in the save of step {save}", lambda: any((workdir / "checkpoints").glob(f"{save}.*tmp*"))
    if kind < 0.8:
        target_step = step + int(random.integers(1, 3 * _EVERY))
        return f"after step {target_step}", lambda: f"step {target_step}/" in log.read_text(errors="replace")
    seconds = random.uniform(0, 3)
    kill_time = time.monotonic() + seconds
    return f"after {seconds:.2f} s", lambda: time.monotonic() > kill_time


def _command(bench: trainings.Bench, workdir: pathlib.Path) -> list[str]:
    """Returns the arguments of `tfx-jax` that train in a workdir."""
    return bench.command(workdir)


def _fork(run: Callable[[], int], log: pathlib.Path) -> int:
    """Calls `run` in a forked process, with its output in `log`, and exits with its result; returns the process id."""
    log.write_bytes(b"")
    child = os.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_APPEND)
            for stream in (1, 2):  # standard output and standard error
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
    """Waits for a process, and kills it once `happened` returns True.

    Args:
      child: process id.
      happened: returns whether the moment of the kill has come.
      pause: seconds between the moment and the kill.
      seconds: limit of the CPU time.

    Returns:
      The exit status; negative if a signal ended the process.

    Raises:
      Hung: if the process exceeds the limit.
    """
    deadline = time.monotonic() + WAITING * 5
    is_killed = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if not is_killed and happened():
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
            is_killed = True
        if time.monotonic() > deadline or cpu_seconds(child) > seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Hung
        time.sleep(0.002)
