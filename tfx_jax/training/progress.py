"""What a person sees while a model trains: a live line, and TensorBoard scalars."""

import sys
import time
from typing import TextIO

import rich.console
import rich.progress
from etils import epath
from tensorboardX import SummaryWriter


class Progress:
    """Shows step, loss, tokens per second and the time left, and writes scalars for TensorBoard.

    On a terminal it is one line that moves; elsewhere a line each time something is logged. All of it goes to stderr.
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
        self._writer = SummaryWriter(str(epath.Path(workdir) / "tensorboard"))
        self._console = rich.console.Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
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
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def message(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Ends the live line and writes what TensorBoard still lacks."""
        if self._bar is not None:
            self._bar.stop()
        self._writer.close()


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75), _clock(3_605)
    ('1:15', '1:00:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
