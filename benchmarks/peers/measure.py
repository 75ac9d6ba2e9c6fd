"""Alternates the sides of a row, each in its own process, and takes the ratio of every round.

On a shared machine the load changes, so seconds are not comparable but ratios of neighboring turns are. The sides take
turns in every round, in the reversed order of the previous round. A row's figure is the median of the ratios of its
rounds, with the least and the greatest ratio. Load still affects ratios, because threads that wait for each other lose
more than others. So the share of the machine that other processes used is reported too (on Linux), and the ratio of the
fastest units. If that share is more than a few percent, the median is not reliable.
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
# Seconds between turns: the threads of a parallel region spin for a while after its end (Intel's OpenMP: 200 ms), which
# must not disturb the next side.
_PAUSE = 0.3
# A setting of `tfx-jax` that helps every program; all sides get it, so that ratios do not measure the environment.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Side:
    """One program of a comparison."""

    label: str
    build: str
    """"module:function" of this package; see `worker`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages that the side imports and this library does not depend on."""
    target: float | None = None
    """Target for the ratio of the first side's speed to this side's speed; None for no target."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """Programs that do the same work; the first is ours."""

    name: str
    title: str
    unit: str
    """Unit of `Workload.work`, such as "target tokens"."""
    sides: tuple[Side, ...]
    is_fresh: bool = False
    """Whether each round needs new processes, which report phases."""
    preparation: Side | None = None
    """Side that has to run once before, in a separate process; then the first round is not counted."""
    obstacle: str = ""
    """Why the row cannot run here; empty if it can."""


class Result(NamedTuple):
    """Measurements of a row."""

    row: Row
    samples: dict[str, list[list[float]]]
    """Seconds of each unit in each round, by the side's label."""
    work: dict[str, float]
    """Size of a unit of work, by the side's label."""
    about: dict[str, Any]
    """Further results of a side, by its label; in rows with `is_fresh`, the phases of every round."""
    skipped: dict[str, str]
    """Reason why a side could not run, by its label."""
    neighbors: dict[str, list[float]]
    """Share of all cores that other processes used in each turn of a side, by its label; missing if unknown."""

    def speeds(self, label: str) -> list[float]:
        """Returns the work per second of a side in each round."""
        return [self.work[label] / statistics.median(seconds) for seconds in self.samples[label]]

    def ratios(self, label: str) -> list[float]:
        """Returns our speed divided by that of another side in each round."""
        our_speeds = self.speeds(self.row.sides[0].label)
        return [ours / theirs for ours, theirs in zip(our_speeds, self.speeds(label), strict=True)]

    def fastest_ratio(self, label: str) -> float:
        """Returns our speed in our fastest unit divided by another side's speed in its fastest unit."""
        ours = self.row.sides[0].label
        our_best, their_best = (
            self.work[name] / min(min(seconds) for seconds in self.samples[name]) for name in (ours, label)
        )
        return our_best / their_best


def busy_seconds() -> float | None:
    """Returns the CPU seconds of all processes and of other guests of the host so far; None if not on Linux."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class WorkerError(Exception):
    """A worker ended early; the message is the last line of its log."""


class Worker:
    """The process of one side."""

    def __init__(self, side: Side, log: pathlib.Path):
        """Starts the process; its standard error goes to the file `log`."""
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
        """Returns the next answer of the process.

        Raises:
          WorkerError: if the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            raise WorkerError(lines[-1].strip() if lines else f"ended with status {self._process.returncode}")
        return json.loads(line)

    def turn(self, units: int) -> tuple[list[float], float | None]:
        """Runs a number of units in the process.

        Returns:
          (seconds of each unit, share of all cores that other processes used meanwhile or None if unknown).
        """
        assert self._process.stdin is not None
        before, started_at = busy_seconds(), time.monotonic()
        self._process.stdin.write(json.dumps({"units": units}) + "\n")
        self._process.stdin.flush()
        answer = self.read()
        after, elapsed = busy_seconds(), time.monotonic() - started_at  # with the unit that is not timed
        if before is None or after is None:
            return answer["seconds"], None
        others = after - before - answer["cpu_seconds"]
        return answer["seconds"], max(0.0, others) / (elapsed * (os.cpu_count() or 1))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure(
    row: Row, logs: pathlib.Path, *, rounds: int, turn_seconds: float, compiles_together: bool = False
) -> Result:
    """Measures a row; a side that cannot run is skipped with the reason, and without the first side all are.

    Args:
      row: what to compare.
      logs: folder for the standard error of the sides.
      rounds: turns of each side.
      turn_seconds: how long a turn should last; it has 1 to 50 units.
      compiles_together: whether sides that run in one process each compile at the same time, on a machine that has
        cores enough; their turns are never at the same time.
    """
    result = Result(row, {}, {}, {}, {}, {})
    if row.obstacle:
        result.skipped.update({side.label: row.obstacle for side in row.sides})
        return result
    sides = [side for side in row.sides if not _misses(side, result)]
    if row.is_fresh:
        return _measure_fresh(result, sides, logs, rounds)
    return _measure_turns(result, sides, logs, rounds, turn_seconds, compiles_together)


def _misses(side: Side, result: Result) -> bool:
    """Returns whether a side lacks a package, and records it in `result.skipped`."""
    missing = [package for package in side.needs if importlib.util.find_spec(package) is None]
    if missing:
        result.skipped[side.label] = f"{', '.join(missing)} not installed"
    return bool(missing)


def _log(logs: pathlib.Path, row: Row, side: Side) -> pathlib.Path:
    return logs / f"{row.name}_{''.join(c if c.isalnum() else '_' for c in side.label)}.log"


def _measure_turns(
    result: Result,
    sides: Sequence[Side],
    logs: pathlib.Path,
    rounds: int,
    turn_seconds: float,
    compiles_together: bool,
) -> Result:
    """Measures a row whose sides each run in one process, and adds the measurements to `result`."""
    workers: dict[str, Worker] = {}
    units: dict[str, int] = {}

    def start(side: Side) -> Worker:
        return workers.setdefault(side.label, Worker(side, _log(logs, result.row, side)))

    try:
        for side in sides if compiles_together else ():
            start(side)
        for side in sides:  # otherwise one after the other, because compiling takes all cores
            worker = workers.get(side.label) or start(side)
            try:
                ready = worker.read()
            except WorkerError as error:
                result.skipped[side.label] = str(error)
                workers.pop(side.label).close()
                continue
            result.work[side.label] = ready["work"]
            result.about[side.label] = ready["about"] | {"warm_up": ready["warm_up"]}
            result.samples[side.label] = []
            units[side.label] = min(max(round(turn_seconds / ready["warm_up"][-1]), 1), 50)
        order = list(workers)
        for _ in range(rounds if result.row.sides[0].label in workers else 0):
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


def _measure_fresh(result: Result, sides: Sequence[Side], logs: pathlib.Path, rounds: int) -> Result:
    """Measures a row whose sides start a new process in every round, and adds the measurements to `result`."""
    order = list(sides)
    preparation = result.row.preparation
    if preparation is not None:
        _phases(preparation, result.row, logs)
    for number in range(-1 if preparation else 0, rounds):  # round -1 is not counted
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
    """Runs a side in a new process and returns the seconds of its phases."""
    worker = Worker(side, _log(logs, row, side))
    try:
        return worker.read()["phases"]
    finally:
        worker.close()
