"""Trials in a process of their own: watched for time and memory, written down as they end, counted in a table."""

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
"""Of a core, that a trial may take."""

WAITING = 120.0
"""Seconds that it may take in all, not counting those for which others had the cores."""

MAX_BYTES = 2 << 30
"""That a trial may take besides what the process had before."""

BAD = ("loss", "silent", "traceback", "raw", "hang", "memory")
"""What a trial must not come to; "raw" is a terminal's control character in a message, or a status that means nothing.
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of one fault.

    Attributes:
      what: was done, so that a person can do it again.
      outcome: "same" as without the fault, "line" for one line that refuses, or one of BAD.
      detail: what was printed.
    """

    what: str
    outcome: str
    detail: str = ""


Try = Callable[[np.random.Generator], Trial]
"""Makes one fault; the generator decides which."""

Prepare = Callable[[pathlib.Path], Try]
"""Makes in a folder what a kind of fault needs, or finds it there."""


@dataclasses.dataclass(frozen=True)
class Record(Trial):
    """A trial, and what the watcher saw of it."""

    kind: str = ""
    seed: int = 0
    number: int = 0
    seconds: float = 0.0
    mib: int = 0  # more than before it, at its greatest


def draw(kind: str, seed: int, number: int) -> np.random.Generator:
    """The generator of one trial, which is the same whatever was tried before."""
    return np.random.default_rng([seed, number, *kind.encode()])


class Campaign:
    """Trials of one kind, in a worker that is started again when it hangs, dies or grows."""

    def __init__(self, kind: str, prepare: Prepare, output: pathlib.Path, *, waiting: float = WAITING):
        """Starts nothing yet."""
        self._waiting = waiting
        self._kind, self._prepare, self._folder = kind, prepare, output.resolve() / kind
        self._folder.mkdir(parents=True, exist_ok=True)
        self._worker: Any = None
        self._path = self._folder / "trials.jsonl"

    def run(self, seed: int, numbers: Iterable[int], on_record: Callable[[Record], object]) -> list[Record]:
        """Makes the trials that are not written down yet; returns all of them."""
        known = {(record.seed, record.number): record for record in read_records(self._path)}
        found: list[Record] = []
        for number in numbers:
            record = known.get((seed, number))
            if record is None:
                record = self._try(seed, number)
                with self._path.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(record)) + "\n")
                on_record(record)
            found.append(record)
        self.close()
        return found

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
        process, connection, log = self._running()
        before, greatest, started = _resident(process.pid), 0, time.monotonic()
        cpu, delay = cpu_seconds(process.pid), _delay_seconds(process.pid)
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
            greatest = max(greatest, _resident(process.pid) - before)
            seconds = time.monotonic() - started
            waited = seconds - _delay_seconds(process.pid) + delay
            if greatest > MAX_BYTES:
                trial = Trial("", "memory", f"{greatest >> 20} MiB")
            elif waited > self._waiting or cpu_seconds(process.pid) - cpu > SECONDS:
                trial = Trial("", "hang", f"after {seconds:.0f} s")
        if trial.outcome in ("memory", "hang") or not process.is_alive():
            trial = dataclasses.replace(trial, what=(self._folder / "now").read_text(errors="replace"))
            process.kill()
            self.close()
        elif _resident(process.pid) > MAX_BYTES // 2:  # programs that stay compiled
            self.close()
        own = {"kind": self._kind, "seed": seed, "number": number}
        seconds = round(time.monotonic() - started, 2)
        return Record(**dataclasses.asdict(trial), **own, seconds=seconds, mib=greatest >> 20)

    def _running(self) -> Any:
        """The worker, its connection and its log."""
        if self._worker is None or not self._worker[0].is_alive():
            self._start()
        return self._worker

    def _environment(self) -> dict[str, str]:
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
        # It imports JAX, which reads these then, before anything of ours runs there.
        with mock.patch.dict(os.environ, self._environment()):
            process.start()
        theirs.close()
        try:
            ours.recv()  # it is ready
        except EOFError:
            raise SystemExit(f"the worker of {self._kind} cannot start: {_tail(log)}") from None
        self._worker = process, ours, log


def doing(what: str) -> None:
    """Tells the watcher what a trial is about to do, in case that it never comes back."""
    if folder := os.environ.get("TFX_JAX_FAULTS"):  # of a worker; tests try faults in their own process
        (pathlib.Path(folder) / "now").write_text(what, errors="replace")


def _work(connection: Any, kind: str, prepare: Prepare, folder: pathlib.Path) -> None:
    """The worker: what programs print beside the streams that are caught goes to a log."""
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
        except BaseException:  # of the tool itself: seen, and not taken for a success
            trial = Trial("the tool", "traceback", traceback.format_exc())
        connection.send(trial)


def read_records(path: pathlib.Path) -> list[Record]:
    """What was written down; a last line that was cut off is left out."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(Record(**json.loads(line)))
        except ValueError:
            continue
    return records


def table(records: Sequence[Record]) -> str:
    """Outcomes by kind, as Markdown."""
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
    """Each trial that came to what none must, with the command that makes it again."""
    lines: list[str] = []
    for record in records:
        if record.outcome in BAD:
            again = f"--kinds={record.kind} --seed={record.seed} --first={record.number} --count=1 --output=NEW"
            lines.append(f"{record.outcome}: {record.what}\n  {record.detail[-400:]!r}\n  {again}")
    return "".join(f"{line}\n" for line in lines)


def _resident(process: int) -> int:
    try:
        return int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def cpu_seconds(process: int) -> float:
    """What a process has had of the cores."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def _delay_seconds(process: int) -> float:
    """How long the threads of a process were ready to run, and others ran: the sum of all.

    Threads that wait for each other are delayed one after the other. The sum is too large where several are at once,
    but a process that hangs has none that is ready.
    """
    total = 0.0
    for path in pathlib.Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            total += int(path.read_text().split()[1]) / 1e9
    return total


def _tail(path: pathlib.Path) -> str:
    return path.read_text(errors="replace")[-600:] if path.exists() else ""
