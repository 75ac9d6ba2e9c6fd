"""Traces a few steps for `tfx-jax train --profile=START:STOP`, on the host and the devices."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.reporting.meter import MetricAccumulator


def parse_steps(text: str, num_steps: int) -> range:
    """Parses START:STOP, which means the steps START to STOP - 1, each from 1 to `num_steps`.

    Raises:
      UserError: if the text has another form, or the steps are out of range.

    >>> parse_steps("10:13", 100)
    range(10, 13)
    """
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and 1 <= int(start) < int(stop)):
        raise UserError(f"--profile={text} must be START:STOP with 1 <= START < STOP, for example --profile=10:15")
    if int(start) > num_steps:
        raise UserError(f"--profile={text} must start at or before the last step, {num_steps}")
    return range(int(start), int(stop))


class Profile:
    """Traces some steps of a run into `workdir/profile`, for TensorBoard's profile plug-in and Perfetto.

    A failing trace is reported in one line and does not stop the run.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        steps: range | None,
        *,
        last_done_step: int,
        meter: MetricAccumulator,
        message: Callable[[str], None],
    ):
        """Prepares the trace, and prints a line if some of the steps are already done.

        Args:
          workdir: folder of the run; the trace is written to its folder `profile`.
          steps: steps to trace; those that are already done are dropped. None: trace nothing.
          last_done_step: last step of the run before this process; 0 for a new run.
          meter: timer of the run; it books the time of starting and writing the trace as saving.
          message: function that prints a line.
        """
        self._directory = epath.Path(workdir) / "profile"
        self._steps = steps or range(0)
        self._meter = meter
        self._message = message
        self._is_tracing = False
        if self._steps and self._steps.start <= last_done_step:
            remaining = range(last_done_step + 1, self._steps.stop)
            message(
                f"profile: steps up to {last_done_step} are done already, "
                + (f"tracing {_name(remaining)}" if remaining else "there is none left to trace")
            )
            self._steps = remaining

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Traces a whole step in the block; waits for its initial `state` if a trace begins or ends there."""
        if self._is_tracing and step not in self._steps:
            jax.block_until_ready(state)
            self.close()
        elif self._steps and step == self._steps.start:
            jax.block_until_ready(state)
            self._start()
        if not self._is_tracing:
            yield
            return
        self._last = step
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self) -> None:
        """Writes a trace that is still being recorded."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        try:
            with self._meter.timed("save"):
                jax.profiler.stop_trace()
            self._message(f"profile: traced {_name(range(self._steps.start, self._last + 1))} into {self._directory}")
        except Exception as error:  # the profiler raises errors of many classes
            self._message(f"profile: no trace: {error}")

    def _start(self) -> None:
        """Starts the trace; an error is reported in one line."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with self._meter.timed("save"):
                jax.profiler.start_trace(self._directory)
            self._is_tracing, self._last = True, self._steps.start
        except Exception as error:  # such as that another trace is running
            self._message(f"profile: no trace: {error}")


def _name(steps: range) -> str:
    """Returns a range of steps in words.

    >>> _name(range(10, 13)), _name(range(4, 5))
    ('steps 10 to 12', 'step 4')
    """
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps.stop - 1}"
