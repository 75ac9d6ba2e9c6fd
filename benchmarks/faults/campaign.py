"""Runs trials in a worker process: limits their time and memory, records their outcomes and counts them in a table."""

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np

SECONDS = 30.0
"""Limit of the CPU time of a trial."""

WAITING = 120.0
"""Limit of the elapsed seconds of a trial, without the time in which other processes had the cores."""

MAX_BYTES = 2 << 30
"""Limit of the memory that a trial may add to the process."""

BAD = ("loss", "silent", "traceback", "raw", "hang", "memory")
"""Outcomes that count as failures; `benchmarks.faults` explains them."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Outcome of one fault.

    Attributes:
      what: description of the fault and the command, sufficient to repeat it.
      outcome: "same" as without the fault, "line" for a rejection in one line, or one of `BAD`.
      detail: printed text.
    """

    what: str
    outcome: str
    detail: str = ""


Try = Callable[[np.random.Generator], Trial]
"""Makes one fault, sampled with the generator, and returns its trial."""

Prepare = Callable[[pathlib.Path], Try]
"""Makes the files that a kind of fault needs in a folder, unless they exist; returns the function that makes trials."""


@dataclasses.dataclass(frozen=True)
class Record(Trial):
    """A trial with its number and its measurements."""

    kind: str = ""
    seed: int = 0
    number: int = 0
    seconds: float = 0.0
    mib: int = 0  # peak of the memory added to the process


def draw(kind: str, seed: int, number: int) -> np.random.Generator:
    """Returns the random number generator of one trial, which does not depend on other trials."""
    return np.random.default_rng([seed, number, *kind.encode()])


class Campaign:
    """Trials of one kind, in a worker process that is restarted when it hangs, dies or needs too much memory."""

    def __init__(self, kind: str, prepare: Prepare, output: pathlib.Path, *, waiting: float = WAITING):
        """Stores the arguments; the worker is started by the first trial.

        Args:
          kind: name of the kind of fault.
          prepare: makes the files that the kind needs.
          output: folder of the whole campaign.
          waiting: limit of the elapsed seconds of a trial, see `WAITING`.
        """
        self._waiting = waiting
        self._kind, self._prepare, self._folder = kind, prepare, output.resolve() / kind
        self._folder.mkdir(parents=True, exist_ok=True)
        self._worker: Any = None  # (process, connection, log)
        self._path = self._folder / "trials.jsonl"

    def run(self, seed: int, numbers: Iterable[int], on_record: Callable[[Record], object]) -> list[Record]:
        """Makes the trials with these numbers that are not recorded yet; returns the records of all of them.

        `on_record` is called with each new record.
        """
        recorded = {(record.seed, record.number): record for record in read_records(self._path)}
        records: list[Record] = []
        for number in numbers:
            record = recorded.get((seed, number))
            if record is None:
                record = self._try(seed, number)
                with self._path.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(record)) + "\n")
                on_record(record)
            records.append(record)
        self.close()
        return records

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            process, connection, _ = self._worker
            self._worker = None
            connection.close()
            process.join(5)
            process.kill()
            process.join()

    def _try(self, seed: int, number: int) -> Record:
        """Makes one trial in the worker and watches its time and memory."""
        process, connection, log = self._running()
        memory_before, peak = _resident(process.pid), 0  # bytes
        start_time = time.monotonic()
        cpu_before, delay_before = cpu_seconds(process.pid), _delay_seconds(process.pid)
        connection.send((seed, number))
        trial = None
        while trial is None:
            if connection.poll(0.02):
                try:
                    trial = connection.recv()
                except EOFError:
                    process.join(5)
                    trial = Trial("", "traceback", f"the process died, status {process.exitcode}: {_tail(log)}")
                continue
            peak = max(peak, _resident(process.pid) - memory_before)
            seconds = time.monotonic() - start_time
            seconds_without_delay = seconds - (_delay_seconds(process.pid) - delay_before)
            if peak > MAX_BYTES:
                trial = Trial("", "memory", f"{peak >> 20} MiB")
            elif seconds_without_delay > self._waiting or cpu_seconds(process.pid) - cpu_before > SECONDS:
                trial = Trial("", "hang", f"after {seconds:.0f} s")
        if trial.outcome in ("memory", "hang") or not process.is_alive():
            # The worker announced what it was doing, see `doing`.
            trial = dataclasses.replace(trial, what=(self._folder / "now").read_text(errors="replace"))
            process.kill()
            self.close()
        elif _resident(process.pid) > MAX_BYTES // 2:  # compiled programs stay in memory
            self.close()
        identity = {"kind": self._kind, "seed": seed, "number": number}
        seconds = round(time.monotonic() - start_time, 2)
        return Record(**dataclasses.asdict(trial), **identity, seconds=seconds, mib=peak >> 20)

    def _running(self) -> Any:
        """Returns (process, connection, log) of the worker, which is started if it does not run."""
        if self._worker is None or not self._worker[0].is_alive():
            self._start()
        return self._worker

    def _environment(self) -> dict[str, str]:
        """Returns the variables of the worker's environment that differ from ours."""
        return {
            "TFX_JAX_FAULTS": str(self._folder),
            "JAX_COMPILATION_CACHE_DIR": str(self._folder.parent / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = self._folder / "worker.log"
        process = context.Process(target=_work, args=(theirs, self._kind, self._prepare, self._folder), daemon=False)
        # The worker imports JAX before `_work` runs, and JAX reads these variables then.
        with mock.patch.dict(os.environ, self._environment()):
            process.start()
        theirs.close()
        try:
            ours.recv()  # wait until the worker is ready
        except EOFError:
            raise SystemExit(f"the worker of {self._kind} cannot start: {_tail(log)}") from None
        self._worker = process, ours, log


def doing(what: str) -> None:
    """Writes what a trial is about to do to a file, where the watcher reads it if the trial hangs or dies."""
    if folder := os.environ.get("TFX_JAX_FAULTS"):  # set in a worker only; tests make faults in their own process
        (pathlib.Path(folder) / "now").write_text(what, errors="replace")


def _work(connection: Any, kind: str, prepare: Prepare, folder: pathlib.Path) -> None:
    """Main function of the worker: makes a trial for each (seed, number) received, and sends it back.

    Output that bypasses the captured streams goes to worker.log.
    """
    log = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watcher ends it
    attempt = prepare(folder)
    connection.send("ready")
    while True:
        try:
            seed, number = connection.recv()
        except EOFError:
            os._exit(0)  # threads of libraries may wait for ever
        try:
            trial = attempt(draw(kind, seed, number))
        except BaseException:  # an error of the benchmark itself is reported as a failure
            trial = Trial("the tool", "traceback", traceback.format_exc())
        connection.send(trial)


def read_records(path: pathlib.Path) -> list[Record]:
    """Returns the recorded trials; a truncated last line is left out."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(Record(**json.loads(line)))
        except ValueError:
            continue
    return records


def table(records: Sequence[Record]) -> str:
    """Returns a Markdown table of the outcomes by kind."""
    names = ("same", "line", *BAD)
    lines = [f"| kind | tried | {' | '.join(names)} | MiB at most |", "|---|" + "--:|" * (len(names) + 2)]
    groups: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        groups[record.kind].append(record)
    for kind, group in groups.items():
        counts = collections.Counter(record.outcome for record in group)
        numbers = (len(group), *(counts[name] for name in names), max(record.mib for record in group))
        lines.append(f"| {kind} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n".join(lines) + "\n"


def failures(records: Sequence[Record], output: pathlib.Path) -> str:
    """Returns three lines for each trial with a bad outcome: the outcome, the details, and the flags that repeat it."""
    lines: list[str] = []
    for record in records:
        if record.outcome in BAD:
            again = f"--kinds={record.kind} --seed={record.seed} --first={record.number} --count=1 --output=NEW"
            lines.append(f"{record.outcome}: {record.what}\n  {record.detail[-400:]!r}\n  {again}")
    return "".join(f"{line}\n" for line in lines)


def _resident(process: int) -> int:
    """Returns the bytes of memory that a process uses, 0 if it is gone."""
    try:
        return int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def cpu_seconds(process: int) -> float:
    """Returns the CPU time of a process, 0 if it is gone."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    except (OSError, IndexError):
        return 0.0


def _delay_seconds(process: int) -> float:
    """Returns the seconds in which threads of a process were ready to run but had no core, summed over the threads.

    Threads that wait for each other are delayed one after the other. The sum is too large if several threads are
    delayed at once, but a hanging process has no ready threads.
    """
    total = 0.0
    for path in pathlib.Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            total += int(path.read_text().split()[1]) / 1e9
    return total


def _tail(path: pathlib.Path) -> str:
    """Returns the end of a file, "" if there is none."""
    return path.read_text(errors="replace")[-600:] if path.exists() else ""
