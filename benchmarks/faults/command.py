"""Runs commands of `tfx-jax` in this process, with captured streams, so that thousands of them are quick."""

import contextlib
import dataclasses
import io
import os
import pathlib
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence

from benchmarks.faults.campaign import Trial, doing
from tfx_jax import cli

_PACKAGE = str(pathlib.Path(cli.__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Ended:
    """Result of a command.

    Attributes:
      status: exit status; None if an exception left the command.
      out: standard output.
      err: standard error.
      traceback: traceback of the exception that left the command, if any.
    """

    status: int | None
    out: bytes
    err: str
    traceback: str = ""


def call(arguments: Sequence[str], stdin: bytes = b"") -> Ended:
    """Runs `tfx-jax ARGUMENTS` with `stdin` as standard input."""
    streams = [io.TextIOWrapper(io.BytesIO(stdin if number == 0 else b""), "utf-8") for number in range(3)]
    streams[2].reconfigure(errors="backslashreplace")  # as Python's own stderr is
    original_streams = sys.stdin, sys.stdout, sys.stderr
    trace, status = "", None
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:  # of --help
        status = int(end.code or 0)
    except Exception:
        trace = traceback.format_exc()
    finally:
        sys.stdin, sys.stdout, sys.stderr = original_streams
    texts: list[bytes] = []
    for stream in streams[1:]:
        with contextlib.suppress(ValueError):  # the command may have closed the stream
            stream.flush()
        texts.append(stream.buffer.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    return Ended(status, texts[0], texts[1].decode(errors="replace"), trace)


def judge(ended: Ended, what: str, is_same: Callable[[], bool] = lambda: True) -> Trial:
    """Returns the trial of a command: whether it worked as without the fault, or rejected the fault with one line.

    Args:
      ended: result of the command.
      what: description of the fault and the command.
      is_same: returns whether the result is as without the fault; called only if the command succeeded.
    """
    lines = ended.err.splitlines()
    if ended.traceback or "Traceback (most recent call last)" in ended.err:
        return Trial(what, "traceback", (ended.traceback or ended.err)[-3_000:])
    if not all(line.isprintable() for line in ended.err.split("\n")):
        return Trial(what, "raw", ended.err[-1_000:])
    if ended.status == 0:
        return Trial(what, "same") if is_same() else Trial(what, "silent", f"{ended.out[-500:]!r} {ended.err[-1_000:]}")
    is_line = ended.status == 2 and lines and lines[-1].startswith("tfx-jax") and len(lines[-1]) > 20
    if is_line and _PACKAGE not in lines[-1]:  # a path of the library's source would mean an internal error
        return Trial(what, "line", lines[-1][:1_000])
    return Trial(what, "raw", f"status {ended.status}: {ended.out[-500:]!r} {ended.err[-1_000:]}")


def shown(arguments: Sequence[str]) -> str:
    """Returns a command as a user would type it, after announcing it to the watcher (`campaign.doing`)."""
    what = shlex.join(["tfx-jax", *arguments]).encode("unicode_escape").decode()
    doing(what)
    return what


def fresh(folder: pathlib.Path) -> pathlib.Path:
    """Empties or creates a folder, makes it the current directory, and returns it."""
    os.chdir(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    return folder


def made(folder: pathlib.Path, *commands: Sequence[str]) -> pathlib.Path:
    """Returns `folder` after running the commands that make it, unless it exists already.

    Raises:
      RuntimeError: if one of them fails.
    """
    if not folder.exists():
        for command in commands:
            ended = call(command)
            if ended.status != 0:
                shutil.rmtree(folder, ignore_errors=True)
                raise RuntimeError(f"{shlex.join(command)}: {ended.err}{ended.traceback}")
    return folder
