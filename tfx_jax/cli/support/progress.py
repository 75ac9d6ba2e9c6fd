"""How far a command is, on stderr."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tfx_jax.errors import printable
from tfx_jax.training.reporting.progress import clock as spelled

_BETWEEN = {True: 0.5, False: 30.0}  # seconds from one message to the next, on a terminal and elsewhere


class Progress:
    """Says how much is done and how long the rest will take.

    On a terminal it is one line, written over by the next; elsewhere, in a log, a line each half minute. What is done
    sooner says nothing.
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
          what: is done to what, such as "translated {} lines".
          total: of them, where it is known.
          stream: what is written to; None means stderr.
          clock: gives the time in seconds.
        """
        self._what, self._total, self._clock = what, total, clock
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._said = clock()
        self._done = 0
        self._first: tuple[float, int] | None = None
        self._is_shown = False

    def advance(self, count: int) -> None:
        """Counts what was done since the last call."""
        self.update(self._done + count, self._total)

    def update(self, done: int, total: int | None) -> None:
        """Takes what is done in all. The time up to the first call, which compiled, is no measure for the rest."""
        self._done, self._total = done, total
        now = self._clock()
        if self._first is None:
            self._first = now, self._done
        if now - self._said < _BETWEEN[self._is_terminal]:
            return
        self._said = now
        self._say(self._message(now))

    def stage(self, message: str) -> None:
        """Shows on a terminal what is being done, where no one knows how long it takes."""
        if self._is_terminal:
            self._say(message)

    def clear(self) -> None:
        """Wipes the line, before something else is written to the terminal."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_shown = False

    def _say(self, message: str) -> None:
        message = printable(message)
        self._stream.write(f"\r\x1b[K{message}" if self._is_terminal else f"{message}\n")
        self._stream.flush()
        self._is_shown = self._is_terminal

    def _message(self, now: float) -> str:
        if self._total is None:
            return self._what.format(f"{self._done:,}")
        message = self._what.format(f"{self._done:,} of {self._total:,}")
        begin, before = self._first or (now, self._done)
        if self._done > before:
            message += f", ETA {spelled((now - begin) / (self._done - before) * max(self._total - self._done, 0))}"
        return message
