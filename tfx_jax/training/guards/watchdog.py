"""Ends a process that hangs: a collective that waits for a dead process would wait forever."""

import sys
import threading
import traceback

import jax

from tfx_jax.training.sharding.distributed import RESTART, leave, say

_QUIET = 30.0
"""Seconds after which one of several processes logs what it waits for; JAX aborts it 50 to 100 s after another died."""

_FIRST_STEP = 2
"""Number of beats, the first ones, after which this message is not logged: they belong to the start of the run."""


class Watchdog:
    """A thread that ends the process if the training makes no progress for too long.

    Time in which the process itself is stopped (Ctrl-Z, a sleeping laptop) does not count.
    """

    def __init__(self, hang_seconds: float):
        """Starts the thread; with 0 seconds there is none."""
        self._limit = hang_seconds
        self._quiet = 0.0  # seconds since the last beat
        self._beats = 0
        self._doing: str | None = None
        self._closed = threading.Event()
        if hang_seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str | None) -> None:
        """Reports progress: the next activity, such as "reads a batch", or None for one of any duration."""
        self._doing, self._quiet = doing, 0.0
        self._beats += 1

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()

    def _watch(self) -> None:
        """Runs in the thread: ends the process if an activity exceeds the limit.

        If the run has several processes, it also logs that an activity takes long.
        """
        interval = min(1.0, self._limit / 10)
        while not self._closed.wait(interval):
            # Counts intervals instead of reading the clock, so that time in which the process was stopped does not
            # count.
            before = self._quiet
            self._quiet += interval
            is_long = before < _QUIET <= self._quiet and self._beats > _FIRST_STEP  # True once for each activity
            if is_long and self._doing is not None and jax.process_count() > 1:
                say(f"{self._doing} for {_QUIET:g} s: either it compiles, or another process has stopped or died")
            if self._quiet >= self._limit and self._doing is not None:
                _dump_stacks()
                leave(
                    f"hung: it {self._doing} for {self._limit:g} s (config.hang_seconds); the stacks are above. "
                    "Restart all processes to resume",
                    RESTART,
                )


def _dump_stacks() -> None:
    """Prints the stacks of all threads, the main thread first; `faulthandler` prints at most a hundred threads."""
    frames = sys._current_frames()
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        if thread.ident not in frames:  # the thread has just ended
            continue
        print(f"thread {thread.name}, most recent call first:", file=sys.__stderr__)
        for frame, line in traceback.walk_stack(frames[thread.ident]):
            # Prints no source lines: reading them would hang if the file system does.
            print(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}', file=sys.__stderr__)
