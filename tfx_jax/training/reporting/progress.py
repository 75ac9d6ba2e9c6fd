"""Progress of a run: a live line on stderr, and TensorBoard scalars that can be read back.

`Progress` passes what it gets to a list of sinks: `TensorBoard`, and the loggers of `loggers`.
"""

import contextlib
import itertools
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
import rich.console
import rich.progress
from etils import epath
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import hparams as hparams_summaries
from tensorboardX.summary import text as text_summary

from tfx_jax.errors import one_line, printable
from tfx_jax.files import open_regular
from tfx_jax.training.reporting.loggers import LOGGERS, Outcome, Sink, without_credentials

_KEPT_LINES = 20  # lines of a run that stay on a terminal


class Progress:
    """Shows step, loss, throughput and remaining time, and passes scalars to TensorBoard and a logger; in process 0.

    On a terminal, one line is updated and some lines stay; elsewhere each logged step is a line. All output goes to
    stderr. Scalars that cannot be written, as on a full disk, are reported once and do not stop the run.
    """

    def __init__(
        self,
        workdir: epath.PathLike | None,
        *,
        last_done_step: int,
        num_steps: int,
        unit: str = "token",
        logger: str | None = None,
        stream: TextIO | None = None,
    ):
        """Starts the clock.

        Args:
          workdir: workdir; TensorBoard files are written to its folder `tensorboard`. None disables all output, as in
            all processes but the first.
          last_done_step: last step of the run before this process; 0 for a new run.
          num_steps: last step of the run.
          unit: unit of the throughput, such as "token".
          logger: one of `LOGGERS`, or None.
          stream: stream to write to; None means stderr.
        """
        self._num_steps, self._unit = num_steps, unit
        self._last_done_step = last_done_step
        self._started_at = time.monotonic()
        self._compiling = 0.0  # seconds of compilation, excluded from the estimate
        self._num_kept = 0
        self._first_step: tuple[int, float] | None = None  # the first step that was done, and when
        self._rates = ""  # last line of `log` without its step
        self._console = rich.console.Console(
            file=stream or sys.stderr, highlight=False, emoji=False, soft_wrap=True, quiet=workdir is None
        )
        self._sinks: list[Sink] = []
        if workdir is not None:
            folder = epath.Path(workdir)
            self._open(TensorBoard, lambda: TensorBoard(folder / "tensorboard", last_done_step=last_done_step))
            if logger is not None:
                self._open(LOGGERS[logger], lambda: LOGGERS[logger](folder))
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal and workdir is not None:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TimeElapsedColumn(),  # a clock that moves while a step compiles
            )
            self._bar = rich.progress.Progress(
                *columns, console=self._console, transient=True, get_time=lambda: time.monotonic()
            )
            self._task = self._bar.add_task("compiling", total=num_steps, completed=last_done_step)
            self._bar.start()

    def step(self, step: int) -> None:
        """Shows a finished step on a terminal: with the rate of steps first, later with the line of the last `log`."""
        if self._bar is None:
            return
        now = time.monotonic()
        if self._first_step is None:  # compilation precedes it
            self._first_step = step, now
        rates = self._rates
        first_step, started_at = self._first_step
        if not rates and step > first_step and now > started_at:
            seconds_per_step = (now - started_at) / (step - first_step)
            eta = clock(seconds_per_step * (self._num_steps - step))
            rates = f"{1 / seconds_per_step:.3g} steps/s  ETA {eta}"
        self._bar.update(self._task, completed=step, description=f"step {step}/{self._num_steps}  {rates}".rstrip())

    def log(
        self, step: int, scalars: dict[str, float], *, loss: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        """Reports the steps up to `step`; each of `scalars` becomes a point in TensorBoard.

        The model FLOPs utilization, relative to the devices' 16-bit peak, is shown if it is known. The remaining time
        excludes "time/compile". On a terminal, one line stays per twentieth of the run.
        """
        self.scalars(step, scalars)
        self._compiling += scalars.get("time/compile", 0.0)
        seconds = time.monotonic() - self._started_at - self._compiling
        seconds_per_step = seconds / max(step - self._last_done_step, 1)
        eta = clock(seconds_per_step * (self._num_steps - step))
        line = f"step {step}/{self._num_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} {self._unit}s/s  ETA {eta}"
        if mfu is not None:
            line += f"  MFU {mfu:.1%} of 16-bit peak"
        self._rates = line.partition("  ")[2]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        num_kept = step * _KEPT_LINES // self._num_steps  # lines that are to stay up to this step
        if self._bar is None or num_kept > self._num_kept:
            self._num_kept = num_kept
            self.message(line)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Adds a point to each named curve."""
        self._send(lambda sink: sink.scalars(step, scalars))

    def text(self, name: str, markdown: str) -> None:
        """Adds a text, where there is a place for texts."""
        self._send(lambda sink: sink.text(self._last_done_step, name, markdown))

    def hparams(self, fields: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Shows the fields of a configuration, by name, beside the named scalars: in TensorBoard's tab HParams."""
        self._send(lambda sink: sink.hparams(self._last_done_step, fields, metrics))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Adds an image of this name and step."""
        self._send(lambda sink: sink.image(step, name, png))

    def stage(self, text: str) -> None:
        """Shows the current activity between two steps on a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, description=printable(text))

    def message(self, text: str) -> None:
        """Prints a line that is not overwritten."""
        self._console.print(printable(text), markup=False)

    def close(self, outcome: Outcome = "finished") -> None:
        """Ends the live line and closes the sinks."""
        if self._bar is not None:
            self._bar.stop()
        self._send(lambda sink: sink.close(outcome))

    def _open(self, kind: type[Sink], make: Callable[[], Sink]) -> None:
        """Adds a sink and says where it is; if it cannot be made, reports that."""
        try:
            sink = make()
        except kind.errors as error:
            self.message(f"no scalars for {kind.title}: {without_credentials(one_line(error))}")
            return
        self._sinks.append(sink)
        if sink.place:
            self.message(f"{kind.title}: {sink.place}")

    def _send(self, write: Callable[[Sink], None]) -> None:
        """Calls `write` with each sink; one that fails is reported and not used again."""
        for sink in list(self._sinks):
            try:
                write(sink)
            except sink.errors as error:
                self._sinks.remove(sink)
                self.message(f"no more scalars for {sink.title}: {without_credentials(one_line(error))}")
                with contextlib.suppress(*sink.errors):
                    sink.close("failed")


class TensorBoard(Sink):
    """A new TensorBoard file in a folder.

    Not tensorboardX's SummaryWriter: a failed write ends its thread, and when its queue is full, the run would block
    forever.
    """

    title = "TensorBoard"
    errors = (OSError,)

    def __init__(self, folder: epath.Path, *, last_done_step: int):
        """Opens the file; `last_done_step` is the last step of the run before this process."""
        folder.mkdir(parents=True, exist_ok=True)
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"))
        self._write(file_version="brain.Event:2")  # must be the first record
        # TensorBoard, like `read_history`, discards what a killed run had written from this step on.
        self._write(step=last_done_step + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step=step, summary=Summary(value=values))

    def hparams(self, step: int, fields: Mapping[str, Any], metrics: Sequence[str]) -> None:
        values = {name: value if isinstance(value, int | float) else str(value) for name, value in fields.items()}
        for summary in hparams_summaries(values, dict.fromkeys(metrics, 0.0)):
            self._write(step=step, summary=summary)

    def text(self, step: int, name: str, markdown: str) -> None:
        self._write(step=step, summary=text_summary(name, markdown))

    def image(self, step: int, name: str, png: bytes) -> None:
        # The size follows the signature (8 bytes) and the header of the first chunk (8 bytes); color space 4 is RGBA.
        width, height = struct.unpack_from(">II", png, 16)
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def close(self, outcome: Outcome) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        """Writes one event, at once: a killed run loses nothing."""
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


Evaluation = Mapping[str, float]
"""Metrics of a validation: "step" and those of the task, such as "bleu" and "exact_match"."""


class Point(NamedTuple):
    """Scalars written to TensorBoard at one step."""

    step: int
    scalars: dict[str, float]


class History(NamedTuple):
    """TensorBoard scalars of all runs of a workdir."""

    points: list[Point]
    """Points of the steps that led to the current state, oldest first."""
    superseded: list[Point]
    """Points of steps that were lost when a run was killed, and were repeated."""
    starts: list[int]
    """For each run, the last step that was done before it; 0 for the first."""

    def curve(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps, increasing, and finite values of a scalar; of two values at one step the later."""
        # A later point replaces an earlier one of the same step.
        values = {point.step: point.scalars[tag] for point in self.points if tag in point.scalars}
        steps = np.array([step for step in sorted(values) if np.isfinite(values[step])], np.int64)
        return steps, np.array([values[step] for step in steps], np.float64)


def read_history(workdir: epath.PathLike) -> History:
    """Reads the TensorBoard files of a workdir; truncated records of a killed run or a full disk are left out."""
    points: list[Point] = []
    superseded: list[Point] = []
    starts: list[int] = []
    files = sorted((epath.Path(workdir) / "tensorboard").glob("events.out.tfevents.*"), key=lambda path: path.name)
    for event in itertools.chain.from_iterable(_read_events(path) for path in files):
        if event.session_log.status == SessionLog.START:
            # A run began at this step: the points from it on are those of an earlier run that was killed.
            starts.append(event.step - 1)
            superseded += [point for point in points if point.step >= event.step]
            points = [point for point in points if point.step < event.step]
        scalars = {value.tag: value.simple_value for value in event.summary.value if value.HasField("simple_value")}
        if scalars:
            points.append(Point(event.step, scalars))
    return History(points, superseded, starts)


def _read_events(path: epath.Path) -> Iterator[Event]:
    """Reads TensorFlow's record format up to the first damaged record.

    A record is the length of the event (8 bytes), a checksum of the length (4), the event, and a checksum of it (4).
    """
    remaining = path.stat().length
    with open_regular(path) as file:
        while len(header := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", header)
            remaining -= 12 + length + 4
            if masked_crc32c(header[:8]) != checksum or remaining < 0:
                return
            record = file.read(length)
            if struct.pack("<I", masked_crc32c(record)) != file.read(4):
                return
            yield Event.FromString(record)


def clock(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds.

    >>> clock(75), clock(3_605)
    ('1:15', '1:00:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
