"""Trainings in separate processes that are killed, terminated, lack disk space or data, or share a workdir.

Then the same command runs again, after following the message if there was one. It must end without a traceback, every
checkpoint that was complete before must still be there, and all must equal those of an undisturbed run, bit for bit.
It is no failure if JAX itself aborts a process because its peer is gone. The full disk is a small tmpfs if the user may
mount one, otherwise a limit on the size of files (the detail says which). A trial takes a minute of a core; `kills` has
the cheap version of the most common faults.
"""

import functools
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.faults.campaign import Trial
from tfx_jax.errors import UserError
from tfx_jax.synthetic.grammar import GrammarPairs
from tfx_jax.training.checkpoint import load_params, saved_checksums

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 40
EVERY = 5  # steps between checkpoints
RESUMED = 20  # last checkpoint of a stopped training
OVERRIDES = {
    "task.data.dataset": "files",
    "task.data.train_source": "train.tsv",
    **dict.fromkeys(("task.data.source_language", "task.data.target_language"), "en"),
    "task.data.max_length": 16,
    "task.data.tokens_per_batch": 128,
    "model.d_model": 16,
    "num_steps": STEPS,
    "checkpoint_every": EVERY,
    "log_every": 1,
    "keep_last": 100,
    "hang_seconds": 60,
}


class Missed(Exception):  # noqa: N818  not an error: the training was over before the fault could happen
    """The moment for the fault did not come."""


class Failed(Exception):  # noqa: N818
    """The training did not survive as it should."""


class Training:
    """One run of the command, as one process or several."""

    def __init__(self, bench: "Bench", workdir: pathlib.Path, *, processes: int = 1, file_limit: int | None = None):
        """Starts the processes.

        Args:
          bench: the campaign's folder.
          workdir: workdir of the training.
          processes: number of processes.
          file_limit: maximum size of files that the processes may write, in bytes; None for no limit.
        """
        command = [sys.executable, "-m", "tfx_jax", *bench.command(workdir)]
        port = _free_port()
        self.logs, self.processes = [], []
        bench.started.append(self)
        soft_and_hard = file_limit or 0, file_limit or 0
        limits = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, soft_and_hard) if file_limit else None
        for index in range(processes):
            cluster = [f"--coordinator=127.0.0.1:{port}", f"--num-processes={processes}", f"--process-id={index}"]
            arguments = command + (cluster if processes > 1 else [])
            self.logs.append(bench.output / "logs" / f"{workdir.name}.{time.monotonic_ns()}.{index}")
            with self.logs[-1].open("w") as log:
                process = subprocess.Popen(arguments, stdout=log, stderr=log, env=bench.environment, preexec_fn=limits)
            self.processes.append(process)

    def text(self, index: int = 0) -> str:
        """Returns the output of a process so far."""
        return self.logs[index].read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Waits until `happened` returns True; raises Missed if the training ends before."""
        while not happened():
            if any(process.poll() is not None for process in self.processes):
                raise Missed
            time.sleep(0.002)

    def wait_until_step(self, step: int) -> None:
        """Waits until the line of this step is printed; raises Missed if the training ends before."""
        self.wait_until(lambda: f"step {step}/" in self.text())

    def statuses(self, seconds: float = 240) -> list[int]:
        """Waits for all processes and returns their exit statuses; kills those that run after the time, in seconds."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in self.processes:
            process.kill()  # does nothing to a process that has ended
        return [process.wait() for process in self.processes]


class Bench:
    """The folder of a campaign, with the undisturbed runs for comparison."""

    def __init__(self, output: pathlib.Path, overrides: dict[str, object] | None = None):
        self.output = output.resolve()
        (self.output / "logs").mkdir(parents=True, exist_ok=True)
        self.text = self.output / "train.tsv"
        pairs = GrammarPairs("train")
        lines = [f"{pair['source']}\t{pair['target']}\n" for pair in (pairs[index] for index in range(4_000))]
        self.text.write_text("".join(lines))
        self.overrides = {"task.data.data_dir": str(self.output)} | (overrides or {})
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(self.output / "xla"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.started: list[Training] = []
        self._references: dict[int, pathlib.Path] = {}

    def command(self, workdir: pathlib.Path) -> list[str]:
        """Returns the arguments of `tfx-jax` that train in a workdir."""
        overrides = [f"--config.{name}={value}" for name, value in (OVERRIDES | self.overrides).items()]
        return ["train", "--config=transformer_demo:test", f"--workdir={workdir}", *overrides]

    def reference(self, processes: int = 1) -> pathlib.Path:
        """Returns the workdir of an undisturbed run of this number of processes; made at the first call."""
        if processes not in self._references:
            workdir = self.output / f"reference{processes}"
            shutil.rmtree(workdir, ignore_errors=True)
            training = Training(self, workdir, processes=processes)
            if any(training.statuses()):
                raise Failed(f"the uninterrupted run itself: {training.text()[-2000:]}")
            self._references[processes] = workdir
        return self._references[processes]

    def stopped(self, workdir: pathlib.Path) -> pathlib.Path:
        """Makes `workdir` the workdir of a run that was stopped at step `RESUMED`, and returns it."""
        shutil.copytree(self.reference(), workdir, dirs_exist_ok=True)
        for step in steps_of(workdir):
            if step > RESUMED:
                shutil.rmtree(workdir / "checkpoints" / str(step))
        return workdir

    def check(self, workdir: pathlib.Path, before: set[int], processes: int) -> None:
        """Raises Failed if a checkpoint of `before` is gone, or one differs from that of the undisturbed run."""
        self.compare(workdir, self.reference(processes), before)

    def compare(self, workdir: pathlib.Path, reference: pathlib.Path, before: set[int]) -> None:
        """Compares all checkpoints with those of the run in `reference`.

        Args:
          workdir: workdir of the disturbed run.
          reference: workdir of the undisturbed run.
          before: steps of checkpoints that the disturbed run had earlier.

        Raises:
          Failed: if a checkpoint is gone or differs.
        """
        expected_steps = steps_of(reference)
        if lost := (before | expected_steps) - steps_of(workdir):
            raise Failed(f"checkpoints {sorted(lost)} are gone")
        for step in sorted(expected_steps):
            if saved_checksums(workdir, step) != saved_checksums(reference, step):
                raise Failed(f"step {step} differs from that of the uninterrupted run")
            try:
                load_params(workdir, step)  # compares the values with the checksums
            except UserError as error:
                raise Failed(str(error)) from None


Fault = Callable[[Bench, pathlib.Path, np.random.Generator], str]
"""Makes a fault to a new training in a workdir; returns details. Its docstring is the fault's name in reports."""


def kill_in_step(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Killed (-9) in a step."""
    step = int(random.integers(1, STEPS - 2))
    training = Training(bench, workdir)
    training.wait_until_step(step)
    time.sleep(random.uniform(0, 0.03))
    training.processes[0].send_signal(signal.SIGKILL)
    return f"status {training.statuses()[0]} after step {step}"


def kill_in_save(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Killed (-9) in a save."""
    save = int(random.integers(1, STEPS // EVERY + 1))
    training = Training(bench, workdir)
    folder = workdir / "checkpoints"
    training.wait_until(lambda: any(folder.glob(f"{save * EVERY}.*tmp*")))
    time.sleep(random.uniform(0, 0.05))
    training.processes[0].send_signal(signal.SIGKILL)
    return f"status {training.statuses()[0]} in the save of step {save * EVERY}"


def kill_in_preparation(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Killed (-9) in data preparation."""
    training = Training(bench, workdir)
    training.wait_until(lambda: (workdir / "config.json").exists())
    time.sleep(random.uniform(0, 0.5))
    training.processes[0].send_signal(signal.SIGKILL)
    trained = "with" if (workdir / "tokenizer" / "vocab.json").exists() else "without"
    return f"status {training.statuses()[0]} {trained} a tokenizer"


def terminate(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """SIGTERM."""
    step = int(random.integers(1, STEPS - 5))
    training = Training(bench, workdir)
    training.wait_until_step(step)
    training.processes[0].send_signal(signal.SIGTERM)
    (status,) = training.statuses()
    if status != 128 + signal.SIGTERM or "rerun the same command to resume" not in training.text():
        raise Failed(f"status {status}: {training.text()[-500:]}")
    return f"status {status}, saved at step {max(steps_of(workdir))}"


def truncate(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Truncated checkpoint file."""
    path = _file_of_newest(bench.stopped(workdir), random)
    size = int(random.integers(path.stat().st_size))
    os.truncate(path, size)
    return f"{path.relative_to(workdir)} cut to {size} bytes"


def flip_bit(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Flipped bit in a checkpoint file."""
    path = _file_of_newest(bench.stopped(workdir), random)
    data = bytearray(path.read_bytes())
    position = int(random.integers(len(data)))
    data[position] ^= 1 << int(random.integers(8))
    path.write_bytes(data)
    return f"{path.relative_to(workdir)}, byte {position}"


def full_disk(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Full disk."""
    pages = sum(-(-path.stat().st_size // 4096) for path in bench.reference().rglob("*") if path.is_file())
    size = int(random.uniform(0.05, 0.9) * pages) * 4096  # too small for all checkpoints
    workdir.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", workdir], capture_output=True).returncode:
        training = Training(bench, workdir, file_limit=int(random.integers(200, 20_000)))
        how = "RLIMIT_FSIZE"
    else:
        training = Training(bench, workdir)
        how = f"tmpfs of {size} bytes"
    line = _one_line(training)
    if how != "RLIMIT_FSIZE":
        subprocess.run(["mount", "-o", "remount,size=1g", workdir], check=True)
    return f"{how}: {line}"


def missing_file(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Missing data file."""
    if random.integers(2):
        bench.stopped(workdir)
    away = bench.text.rename(bench.output / "away.tsv")
    try:
        return _one_line(Training(bench, workdir))
    finally:
        away.rename(bench.text)


def two_trainers(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """Two trainers in one workdir."""
    first = Training(bench, workdir)
    first.wait_until_step(int(random.integers(1, STEPS - 5)))
    first.processes[0].send_signal(signal.SIGSTOP)  # otherwise it would end before the second one has started
    try:
        line = _one_line(Training(bench, workdir))
    finally:
        first.processes[0].send_signal(signal.SIGCONT)
    if first.statuses() != [0]:
        raise Failed(f"the first trainer: {first.text()[-500:]}")
    return line


def one_of_two_dies(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """One process of two dies."""
    victim = int(random.integers(2))
    training = Training(bench, workdir, processes=2)
    training.wait_until_step(int(random.integers(1, STEPS - 10)))
    time.sleep(random.uniform(0, 0.03))
    training.processes[victim].send_signal(signal.SIGKILL)
    return f"process {victim} of 2 killed, statuses {training.statuses(seconds=20)}"


def one_of_two_is_terminated(bench: Bench, workdir: pathlib.Path, random: np.random.Generator) -> str:
    """SIGTERM to one process of two."""
    victim = int(random.integers(2))
    training = Training(bench, workdir, processes=2)
    # JAX needs a second to inform the other process, longer than all steps take, so the signal is sent early.
    training.wait_until(lambda: (workdir / "config.json").exists())
    time.sleep(random.uniform(0, 4))
    training.processes[victim].send_signal(signal.SIGTERM)
    statuses = training.statuses()
    if statuses not in ([143, 143], [0, 0]):  # 0: the end came before a step that both could stop at
        raise Failed(f"statuses {statuses}: {training.text()[-500:]}")
    return f"process {victim} of 2, statuses {statuses}"


TWO_PROCESSES = (one_of_two_dies, one_of_two_is_terminated)
FAULTS: tuple[Fault, ...] = (
    *(kill_in_step, kill_in_save, kill_in_preparation, terminate, truncate, flip_bit, full_disk, missing_file),
    *(two_trainers, *TWO_PROCESSES),
)


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Returns the function that makes a trial with a random fault; a missed moment is tried again up to ten times."""
    bench = Bench(folder)

    def attempt(random: np.random.Generator) -> Trial:
        fault, seed = FAULTS[int(random.integers(len(FAULTS)))], int(random.integers(2**31))
        for attempt_number in range(10):
            trial = suffer(bench, fault, (seed, attempt_number))
            if trial is not None:
                return trial
        return Trial(fault.__name__, "hang", "the moment for the fault never came")

    return attempt


def suffer(bench: Bench, fault: Fault, seed: Sequence[int]) -> Trial | None:
    """Makes one fault to a new training, runs the same command again and compares; None if the moment was missed."""
    processes = 2 if fault in TWO_PROCESSES else 1
    detail = ""
    bench.reference(processes)
    workdir = bench.output / f"{fault.__name__}-{'-'.join(map(str, seed))}"
    shutil.rmtree(workdir, ignore_errors=True)
    what = f"{str(fault.__doc__).rstrip('.')}, {fault.__name__} {tuple(seed)}"
    try:
        detail = fault(bench, workdir, np.random.default_rng(seed))
        before = steps_of(workdir)
        again = Training(bench, workdir, processes=processes)
        if any(again.statuses()) or "Traceback" in again.text():
            raise Failed(f"the second run: {again.text()[-500:]}")
        bench.check(workdir, before, processes)
    except Missed:
        return None
    except Failed as failure:
        is_crash = "Traceback" in str(failure)
        return Trial(what, "traceback" if is_crash else "loss", f"{detail}; {failure}")
    finally:
        for training in bench.started:
            training.statuses(seconds=0)  # kills processes that still run
        bench.started.clear()
        if fault is full_disk:
            subprocess.run(["umount", workdir], capture_output=True)
    shutil.rmtree(workdir, ignore_errors=True)
    return Trial(what, "line" if "tfx-jax train: " in detail else "same", detail)


def _one_line(training: Training) -> str:
    """Returns the message with which a training ended; raises Failed unless it is one line with exit status 2."""
    statuses, lines = training.statuses(), training.text().splitlines()
    if statuses != [2] or not lines or not lines[-1].startswith("tfx-jax train: ") or "Traceback" in training.text():
        raise Failed(f"statuses {statuses}: {training.text()[-1000:]}")
    return lines[-1]


def _file_of_newest(workdir: pathlib.Path, random: np.random.Generator) -> pathlib.Path:
    """Returns a random file of the newest checkpoint."""
    folder = workdir / "checkpoints" / str(max(steps_of(workdir)))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return files[int(random.integers(len(files)))]


def steps_of(workdir: pathlib.Path) -> set[int]:
    """Returns the steps of the complete checkpoints."""
    folder = workdir / "checkpoints"
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.is_dir() else set()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
