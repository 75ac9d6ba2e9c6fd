"""One command of `tfx-jax` in this process, its streams caught, so that thousands of them are quick."""

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
    """How a command ended.

    Attributes:
      status: its exit status.
      out: what it wrote to standard output.
      err: the same of standard error.
      traceback: of an exception that no one made a line of.
    """

    status: int | None
    out: bytes
    err: str
    traceback: str = ""


def call(arguments: Sequence[str], stdin: bytes = b"") -> Ended:
    """Runs `tfx-jax ARGUMENTS`."""
    streams = [io.TextIOWrapper(io.BytesIO(stdin if number == 0 else b""), "utf-8") for number in range(3)]
    streams[2].reconfigure(errors="backslashreplace")  # as Python's own stderr is
    kept, trace, status = (sys.stdin, sys.stdout, sys.stderr), "", None
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:  # of --help
        status = int(end.code or 0)
    except Exception:
        trace = traceback.format_exc()
    finally:
        sys.stdin, sys.stdout, sys.stderr = kept
    texts: list[bytes] = []
    for stream in streams[1:]:
        with contextlib.suppress(ValueError):
            stream.flush()
        texts.append(stream.buffer.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    return Ended(status, texts[0], texts[1].decode(errors="replace"), trace)


def judge(ended: Ended, what: str, is_same: Callable[[], bool] = lambda: True) -> Trial:
    """Whether a command did what it does without the fault, or refused in one line.

    Args:
      ended: how it ended.
      what: was done.
      is_same: whether it did what it does otherwise; asked where it succeeded.
    """
    lines = ended.err.splitlines()
    if ended.traceback or "Traceback (most recent call last)" in ended.err:
        return Trial(what, "traceback", (ended.traceback or ended.err)[-3_000:])
    if not all(line.isprintable() for line in ended.err.split("\n")):
        return Trial(what, "raw", ended.err[-1_000:])
    if ended.status == 0:
        return Trial(what, "same") if is_same() else Trial(what, "silent", f"{ended.out[-500:]!r} {ended.err[-1_000:]}")
    is_line = ended.status == 2 and lines and lines[-1].startswith("tfx-jax") and len(lines[-1]) > 20
    if is_line and _PACKAGE not in lines[-1]:  # which is no fault of the user's
        return Trial(what, "line", lines[-1][:1_000])
    return Trial(what, "raw", f"status {ended.status}: {ended.out[-500:]!r} {ended.err[-1_000:]}")


def shown(arguments: Sequence[str]) -> str:
    """A command as a user would type it, announced to the watcher."""
    what = shlex.join(["tfx-jax", *arguments]).encode("unicode_escape").decode()
    doing(what)
    return what


def fresh(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder empty, and the current one."""
    os.chdir(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    return folder


def made(folder: pathlib.Path, *commands: Sequence[str]) -> pathlib.Path:
    """A folder that commands make, unless they have before.

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
