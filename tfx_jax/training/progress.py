"""What a person sees while a model trains: a live line, and TensorBoard scalars."""

import contextlib
import socket
import sys
import time
from typing import Any, TextIO

import rich.console
import rich.progress
from etils import epath
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from tfx_jax.training.distributed import is_primary


class Progress:
    """Shows step, loss, tokens per second and the time left, and writes scalars for TensorBoard.

    Of several processes, only the first does so.
    On a terminal it is one line that moves; elsewhere a line each time something is logged. All of it goes to stderr.
    Scalars that cannot be written, on a full disk for example, are reported once and do not stop a training.
    """

    def __init__(self, workdir: epath.PathLike, *, first_step: int, num_steps: int, stream: TextIO | None = None):
        """Starts the clock.

        Args:
          workdir: TensorBoard files go to its folder `tensorboard`.
          first_step: where this run starts; steps before it took no time.
          num_steps: where it ends.
          stream: what is written to; None means stderr.
        """
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._console = rich.console.Console(
            file=stream or sys.stderr, highlight=False, emoji=False, soft_wrap=True, quiet=not is_primary()
        )
        self._records = self._open_records(epath.Path(workdir) / "tensorboard") if is_primary() else None
        self._write_event(file_version="brain.Event:2")
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal:
            columns = rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn()
            self._bar = rich.progress.Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("compiling", total=num_steps, completed=first_step)
            self._bar.start()

    def log(self, step: int, scalars: dict[str, float], *, loss: float, tokens_per_second: float) -> None:
        """Reports on the steps up to `step`; each of `scalars` becomes a point in TensorBoard."""
        self.scalars(step, scalars)
        per_step = (time.monotonic() - self._started) / max(step - self._first_step, 1)
        left = _clock(per_step * (self._num_steps - step))
        line = f"step {step}/{self._num_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  ETA {left}"
        if self._bar is None:
            self.message(line)
        else:
            self._bar.update(self._task, completed=step, description=line)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Adds a point to each of the named TensorBoard curves."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write_event(step=step, summary=Summary(value=values))

    def message(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Ends the live line and closes the file."""
        if self._bar is not None:
            self._bar.stop()
        if self._records is not None:
            self._records.close()

    # Not tensorboardX's SummaryWriter: a failed write ends its thread, and when its queue is full the training waits
    # for ever.

    def _open_records(self, directory: epath.Path) -> RecordWriter | None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return RecordWriter(str(directory / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"))
        except OSError as error:
            self.message(f"no scalars for TensorBoard: {error}")
            return None

    def _write_event(self, **fields: Any) -> None:
        if self._records is None:
            return
        try:
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._records.flush()
        except OSError as error:
            self.message(f"no more scalars for TensorBoard: {error}")
            with contextlib.suppress(OSError):
                self._records.close()
            self._records = None


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75), _clock(3_605)
    ('1:15', '1:00:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
