"""Progress of a command, shown on stderr."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tfx_jax.errors import printable
from tfx_jax.training.reporting.progress import clock as format_seconds

_BETWEEN = {True: 0.5, False: 30.0}  # seconds between messages, on a terminal and elsewhere


class Progress:
    """Prints how much is done and the estimated remaining time.

    On a terminal it is one line that is overwritten; elsewhere, such as in a log, one line per half minute. Commands
    that finish sooner print nothing.
    """

    def __init__(
        self,
        what: str = "{}",
        total: int | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the clock.

        Args:
          what: message with a placeholder for the count, such as "translated {} lines".
          total: final count, if it is known.
          stream: stream to write to; None means stderr.
          clock: returns the time in seconds.
        """
        self._what, self._total, self._clock = what, total, clock
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last_shown = clock()
        self._done = 0
        self._first_update: tuple[float, int] | None = None  # time of the first update, and the work done at it
        self._is_shown = False

    def advance(self, count: int) -> None:
        """Adds `count` to the work done."""
        self.update(self._done + count, self._total)

    def update(self, done: int, total: int | None) -> None:
        """Sets the work done and the total. The rate is measured from the first call on: compilation precedes it."""
        self._done, self._total = done, total
        now = self._clock()
        if self._first_update is None:
            self._first_update = now, self._done
        if now - self._last_shown < _BETWEEN[self._is_terminal]:
            return
        self._last_shown = now
        self._write(self._message(now))

    def stage(self, message: str, *, is_logged: bool = False) -> None:
        """Shows a message on a terminal, for work of unknown duration; elsewhere only if `is_logged`."""
        if self._is_terminal or is_logged:
            self._write(message)

    def clear(self) -> None:
        """Erases the line, before other output is written to the terminal."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_shown = False

    def _write(self, message: str) -> None:
        """Prints a message: over the current line on a terminal, elsewhere on a separate line."""
        message = printable(message)
        self._stream.write(f"\r\x1b[K{message}" if self._is_terminal else f"{message}\n")
        self._stream.flush()
        self._is_shown = self._is_terminal

    def _message(self, now: float) -> str:
        """Returns the work done and, if the total is known, the estimated remaining time."""
        if self._total is None:
            return self._what.format(f"{self._done:,}")
        message = self._what.format(f"{self._done:,} of {self._total:,}")
        first_time, first_done = self._first_update or (now, self._done)
        if self._done > first_done:
            seconds_per_unit = (now - first_time) / (self._done - first_done)
            message += f", ETA {format_seconds(seconds_per_unit * max(self._total - self._done, 0))}"
        return message
