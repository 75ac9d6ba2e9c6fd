"""Set-up of a command's process: UTF-8 in every locale, streams that cannot end it, signals, limits, cache folder."""

import contextlib
import io
import locale
import os
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO

from tfx_jax.errors import UserError

STANDARD_OUTPUT = "standard output"
"""File name of errors of writing to standard output."""

_MIN_FILES, _MAX_FILES = 256, 4_096  # files open at once; Orbax alone opens about fifty


def restart_in_utf8_mode() -> None:
    """Restarts the running command, in this process, in Python's UTF-8 mode if the locale has another encoding.

    The mode can only be set in the environment of a new process (PEP 540). File names, arguments and all text files are
    UTF-8 then. In the locales "C" and "POSIX" Python enters this mode by itself.
    """
    if sys.flags.utf8_mode or os.environ.get("PYTHONUTF8") == "1":  # "1": already restarted, but -I ignores it
        return
    if is_utf8(sys.getfilesystemencoding()) and is_utf8(locale.getencoding()):
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_utf8(encoding: str | None) -> bool:
    """Returns whether `encoding` is a name of UTF-8."""
    return (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"


def set_up_streams() -> None:
    """Makes the standard streams UTF-8, marks write errors of standard output, ignores those of standard error.

    Closed descriptors are opened on /dev/null. Otherwise a file could get descriptor 2, and C++ libraries would write
    their messages into it. `sys.stdin` and `sys.stdout` stay None if they were closed.
    """
    # The lowest free descriptor is opened: 0, 1 and 2 if they were closed, then a higher one, which is not needed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # so that child processes have it too
    os.close(descriptor)
    use_utf8(sys.stdin, sys.stdout)
    if sys.stdout is not None:
        sys.stdout.flush()
        # An unbuffered stream (PYTHONUNBUFFERED) becomes one that writes each line.
        by_line = bool(sys.stdout.line_buffering) or isinstance(sys.stdout.buffer, io.RawIOBase)
        output = io.BufferedWriter(_Output(1, "w", closefd=False))
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, "utf-8", "backslashreplace", line_buffering=by_line)
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
    sys.stderr = sys.__stderr__ = unfailing(2)  # 2: the descriptor of standard error


def use_utf8(*streams: Any) -> None:
    """Switches streams to UTF-8, even if PYTHONIOENCODING says otherwise; unencodable text is backslash-escaped."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not is_utf8(stream.encoding):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def unfailing(descriptor: int) -> TextIO:
    """Opens a descriptor for writing text; text that cannot be written is dropped without an error.

    A full disk, a closed terminal or a closed pipe must not end a training run.
    """
    return io.TextIOWrapper(_Unfailing(descriptor, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


class _Output(io.FileIO):
    """Standard output, whose errors name it, so that they are told from those of files."""

    def write(self, data: Any) -> int:
        """Writes as a file does; errors have the file name `STANDARD_OUTPUT`."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            raise


class _Unfailing(io.FileIO):
    """A file whose writes never fail."""

    def write(self, data: Any) -> int:
        """Writes as much as the system takes, and reports all of it as written."""
        remaining = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            while remaining and (count := super().write(remaining)):
                remaining = remaining[count:]
        return len(data)


def end_on_signals(verb: str) -> None:
    """Makes SIGTERM end the process at once with one line and status 143, and a second Ctrl-C with status 130.

    Python handles a signal when it executes its next instruction, which is minutes later if XLA compiles. So a thread
    reads the numbers of arriving signals from a pipe. Verbs that install a handler keep theirs.
    """
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # the parent process ignores it
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as `set_wakeup_fd` requires

    def on_sigterm(*_: Any) -> None:
        """Does nothing: the thread ends the process."""

    def watch() -> None:
        """Reads the numbers of signals and ends the process."""
        num_interrupts = 0
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is on_sigterm:
                wipe = "\r\x1b[K" if sys.stderr.isatty() else ""  # wipes a progress line
                print(f"{wipe}tfx-jax {verb}: terminated", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                num_interrupts += 1
                if num_interrupts == 2:
                    os._exit(128 + signal.SIGINT)

    def forget() -> None:
        """Restores the defaults in a forked process, which has no such thread and must not write into the pipe."""
        if signal.getsignal(signal.SIGTERM) is on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    threading.Thread(target=watch, daemon=True).start()


def check_arguments(arguments: Iterable[str]) -> None:
    """Checks that arguments are valid text: Python decodes a byte that is not UTF-8 as half of a surrogate pair.

    Raises:
      UserError: names the first argument that is not UTF-8.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"the argument {argument} is not UTF-8: write it in UTF-8") from None


def check_cache_folder() -> None:
    """Checks that JAX can use JAX_COMPILATION_CACHE_DIR; otherwise it would warn for every program.

    Raises:
      UserError: if it is not a folder and cannot be created.
    """
    from tfx_jax.files import is_local  # needs etils, which `check-attention` does without

    name = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if not name or not is_local(name):
        return
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"JAX_COMPILATION_CACHE_DIR={name} cannot be used as a folder ({reason}): correct or unset this variable"
        ) from None


def check_file_limit() -> None:
    """Raises the limit of open files, if it is low, as far as the process is permitted to.

    Raises:
      UserError: if the limit is still too low to read or write a checkpoint.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _MAX_FILES:
        return
    raised = _MAX_FILES if hard == unlimited else min(hard, _MAX_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft < _MIN_FILES:
        raise UserError(
            f"the limit of open files is {soft}, but at least {_MIN_FILES} are needed: run ulimit -n {_MAX_FILES} first"
        )
