"""One side of a comparison, in a process of its own: `python -m benchmarks.peers.worker BUILD OPTIONS`.

BUILD is "module:function" of this package, OPTIONS its keyword arguments as JSON. The function returns either a
`Workload`, which then runs as often as standard input asks for ({"units": 3} a line), or, where the first time is what
counts (compiling, starting), the seconds of each phase. Every answer is one line of JSON on standard output; whatever
else a library prints goes to standard error.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO


class Workload(NamedTuple):
    """A unit of work that one side repeats."""

    run: Callable[[], Any]
    """Does one unit; returns when it is complete."""
    work: float
    """Size of a unit, in the row's unit, such as target tokens or FLOP."""
    about: dict[str, Any] | None = None
    """Further results to report, as JSON."""


def cores() -> int:
    """Returns the number of threads that every side may use: all cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timed(run: Callable[[], Any]) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def serve(built: Workload | dict[str, float], orders: TextIO, answers: TextIO) -> None:
    """Answers with the phases if `built` is a dictionary of seconds; otherwise runs the workload for each order.

    Args:
      built: result of the build function.
      orders: lines of JSON, {"units": number of units to run}.
      answers: gets a line of JSON when the workload is ready, and one for each order.
    """

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    if isinstance(built, dict):
        return answer({"phases": built})
    warm_up = [timed(built.run) for _ in range(2)]  # compiles and allocates everything that the first use needs
    answer({"work": built.work, "warm_up": warm_up, "about": built.about or {}})
    for order in orders:
        before = time.process_time()
        # Memory that was freed before the turns of the others has gone back to the host of a virtual machine: the first
        # unit fetches it, page by page (a step of the base model then takes twice its time).
        built.run()
        seconds = [timed(built.run) for _ in range(json.loads(order)["units"])]
        answer({"seconds": seconds, "cpu_seconds": time.process_time() - before})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, function = sys.argv[1].split(":")
    build = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    serve(build(**json.loads(sys.argv[2])), sys.stdin, answers)


if __name__ == "__main__":
    main()
