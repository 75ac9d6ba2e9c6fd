"""Alternates the sides of a row, each in its own process, and takes the ratio of every round.

Two programs that run one after the other on a shared machine meet different neighbors; ratios of neighboring turns
hold still where seconds do not. So the sides take turns in every round, in the order of the round before reversed, and
a row's figure is the median of the ratios of its rounds, with the least and the greatest of them. Ratios do not forgive
everything: threads that wait for each other lose more to neighbors than others do. So the share of the machine that
went to other processes is told besides (on Linux), and the ratio of the fastest units; where that share is more than a
few percent, do not believe the median.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_ROOT = pathlib.Path(__file__).parents[2]
# The threads of a parallel region spin a while after its end (Intel's OpenMP: 200 ms): not in the next side's turn.
_PAUSE = 0.3
# What `tfx-jax` asks for by itself, and would help anyone: every side has it, or a ratio would be one of environments.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Side:
    """One program of a comparison."""

    label: str
    build: str
    """"module:function" of this package; see `worker`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages it imports that this library does not depend on."""
    target: float | None = None
    """The least ratio of the first side's speed to this one's that we want."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """Programs that do the same work; the first is ours."""

    name: str
    title: str
    unit: str
    """What a unit of work is counted in, as in "target tokens"."""
    sides: tuple[Side, ...]
    is_fresh: bool = False
    """Whether each round needs new processes, which report phases."""
    preparation: Side | None = None
    """What has to run once before, in a process of its own; then a first round is not counted either."""
    obstacle: str = ""
    """Why it cannot run here; empty if it can."""


class Result(NamedTuple):
    """What was measured of a row."""

    row: Row
    samples: dict[str, list[list[float]]]
    """Seconds by side's label, round and unit."""
    work: dict[str, float]
    """Of a unit, by side's label."""
    about: dict[str, Any]
    """What the sides report besides: of fresh rows the phases of every round."""
    skipped: dict[str, str]
    """Sides that could not run, and why."""
    neighbors: dict[str, list[float]]
    """By side's label, the share of all cores that other processes took in each of its turns; none if unknown."""

    def speeds(self, label: str) -> list[float]:
        """Work a second of each round."""
        return [self.work[label] / statistics.median(seconds) for seconds in self.samples[label]]

    def ratios(self, label: str) -> list[float]:
        """Our speed over that of another side, round by round."""
        ours = self.speeds(self.row.sides[0].label)
        return [our / their for our, their in zip(ours, self.speeds(label), strict=True)]

    def fastest_ratio(self, label: str) -> float:
        """The same of the fastest unit of either side."""
        ours = self.row.sides[0].label
        our_best, their_best = (
            self.work[name] / min(min(seconds) for seconds in self.samples[name]) for name in (ours, label)
        )
        return our_best / their_best


def busy_seconds() -> float | None:
    """CPU seconds that all processes, and other guests of the same host, have taken so far; None where not on Linux."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class WorkerError(Exception):
    """A side that did not do what it was told, with the last line that it wrote."""


class Worker:
    """The process of one side."""

    def __init__(self, side: Side, log: pathlib.Path):
        """Starts it; `log` gets what it writes to standard error."""
        options = dict(side.options)
        if "spawned_at" in options:
            options["spawned_at"] = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", side.build, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | _LARGE_PAGES | {"PYTHONPATH": path} | dict(side.env),
            )

    def read(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
          WorkerError: if it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise WorkerError(lines[-1].strip() if lines else f"ended with status {self._process.returncode}")
        return json.loads(line)

    def turn(self, units: int) -> tuple[list[float], float | None]:
        """Lets it run so many units; returns their seconds and the share of all cores that others took meanwhile."""
        assert self._process.stdin is not None
        busy = busy_seconds()
        self._process.stdin.write(json.dumps({"units": units}) + "\n")
        self._process.stdin.flush()
        done = self.read()
        after = busy_seconds()
        if busy is None or after is None:
            return done["seconds"], None
        others = after - busy - done["cpu_seconds"]
        return done["seconds"], max(0.0, others) / (sum(done["seconds"]) * (os.cpu_count() or 1))

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure(row: Row, logs: pathlib.Path, *, rounds: int, turn_seconds: float) -> Result:
    """Runs a row; a side that cannot run is skipped with the reason, all of them if it is the first.

    Args:
      row: what to compare.
      logs: folder for what the sides write to standard error.
      rounds: turns of each side.
      turn_seconds: how long a turn should last; it has 1 to 50 units.
    """
    result = Result(row, {}, {}, {}, {}, {})
    if row.obstacle:
        result.skipped.update({side.label: row.obstacle for side in row.sides})
        return result
    sides = [side for side in row.sides if not _misses(side, result)]
    return (_measure_fresh if row.is_fresh else _measure_turns)(result, sides, logs, rounds, turn_seconds)


def _misses(side: Side, result: Result) -> bool:
    missing = [package for package in side.needs if importlib.util.find_spec(package) is None]
    if missing:
        result.skipped[side.label] = f"{', '.join(missing)} not installed"
    return bool(missing)


def _log(logs: pathlib.Path, row: Row, side: Side) -> pathlib.Path:
    return logs / f"{row.name}_{''.join(c if c.isalnum() else '_' for c in side.label)}.log"


def _measure_turns(
    result: Result, sides: Sequence[Side], logs: pathlib.Path, rounds: int, turn_seconds: float
) -> Result:
    workers: dict[str, Worker] = {}
    units: dict[str, int] = {}
    try:
        for side in sides:  # one after the other: compiling takes all cores
            worker = Worker(side, _log(logs, result.row, side))
            try:
                ready = worker.read()
            except WorkerError as error:
                result.skipped[side.label] = str(error)
                worker.close()
                continue
            workers[side.label] = worker
            result.work[side.label] = ready["work"]
            result.about[side.label] = ready["about"] | {"warm_up": ready["warm_up"]}
            result.samples[side.label] = []
            units[side.label] = min(max(round(turn_seconds / ready["warm_up"][-1]), 1), 50)
        order = list(workers)
        for _ in range(rounds if len(order) > 1 and result.row.sides[0].label in workers else 0):
            for label in order:
                time.sleep(_PAUSE)
                seconds, others = workers[label].turn(units[label])
                result.samples[label].append(seconds)
                if others is not None:
                    result.neighbors.setdefault(label, []).append(others)
            order.reverse()
    finally:
        for worker in workers.values():
            worker.close()
    return result


def _measure_fresh(
    result: Result, sides: Sequence[Side], logs: pathlib.Path, rounds: int, turn_seconds: float
) -> Result:
    del turn_seconds  # a turn is one process
    order, preparation = list(sides), result.row.preparation
    if preparation is not None:
        _phases(preparation, result.row, logs)
    for number in range(-1 if preparation else 0, rounds):
        for side in list(order):
            try:
                phases = _phases(side, result.row, logs)
            except WorkerError as error:
                result.skipped[side.label] = str(error)
                order.remove(side)
                continue
            if number >= 0:
                result.work[side.label] = 1.0
                result.samples.setdefault(side.label, []).append([sum(phases.values())])
                result.about.setdefault(side.label, []).append(phases)
        order.reverse()
    return result


def _phases(side: Side, row: Row, logs: pathlib.Path) -> dict[str, float]:
    """What a process reports that does its work once."""
    worker = Worker(side, _log(logs, row, side))
    try:
        return worker.read()["phases"]
    finally:
        worker.close()
