"""Ends a process that hangs: a collective that waits for a process that is gone waits for ever."""

import sys
import threading
import traceback

import jax

from tfx_jax.training.sharding.distributed import RESTART, leave, say

_QUIET = 30.0
"""Seconds after which one process of several says what it waits in: JAX aborts it 50 to 100 after another stopped."""

_FIRST_STEP = 2
"""Beats of the step that always compiles."""


class Watchdog:
    """A thread that ends the process when the training has not moved on for too long.

    Time in which the process itself was stopped (Ctrl-Z, a sleeping laptop) does not count.
    """

    def __init__(self, hang_seconds: float):
        """Starts the thread; 0 seconds for none."""
        self._limit = hang_seconds
        self._quiet, self._beats = 0.0, 0
        self._doing: str | None = None
        self._closed = threading.Event()
        if hang_seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str | None) -> None:
        """Tells that the training has come to something new, "reads a batch" say; None for what may take any time."""
        self._doing, self._quiet = doing, 0.0
        self._beats += 1

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        interval = min(1.0, self._limit / 10)
        while not self._closed.wait(interval):
            # Ticks are counted, not the clock read: a process that was stopped has not hung.
            before = self._quiet
            self._quiet += interval
            is_long = before < _QUIET <= self._quiet and self._beats > _FIRST_STEP
            if is_long and self._doing is not None and jax.process_count() > 1:
                say(f"{self._doing} for {_QUIET:g} s: it compiles, or another process is stopped or gone")
            if self._quiet >= self._limit and self._doing is not None:
                _dump_stacks()
                leave(
                    f"hangs: it {self._doing} for {self._limit:g} s (config.hang_seconds), its stacks are above; "
                    "start all processes again to go on",
                    RESTART,
                )


def _dump_stacks() -> None:
    """Prints what every thread does, the main one first: faulthandler begins with the newest and stops at a hundred."""
    frames = sys._current_frames()
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        if thread.ident not in frames:  # it has just ended
            continue
        print(f"thread {thread.name}, most recent call first:", file=sys.__stderr__)
        for frame, line in traceback.walk_stack(frames[thread.ident]):
            # No line of source is read: what hangs may be the file system.
            print(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}', file=sys.__stderr__)
