"""Set-up of the process of a command: UTF-8 whatever the locale, streams that cannot end it, variables of JAX."""

import contextlib
import io
import locale
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tfx_jax.errors import UserError
from tfx_jax.files import is_local

_MIN_FILES, _MAX_FILES = 256, 4_096  # open at once: Orbax alone takes some fifty


def restart_in_utf8_mode() -> None:
    """Restarts the running command, in this process, with Python's UTF-8 mode where the locale has another encoding.

    Only the environment of a new process can ask for it (PEP 540). File names, arguments and all files of text are
    UTF-8 then. Python takes this mode by itself in the locales "C" and "POSIX".
    """
    if sys.flags.utf8_mode or os.environ.get("PYTHONUTF8") == "1":  # "1": it was asked for, and is switched off (-I)
        return
    if is_utf8(sys.getfilesystemencoding()) and is_utf8(locale.getencoding()):
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_utf8(encoding: str | None) -> bool:
    """Whether this is a name of UTF-8."""
    return (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"


def set_up_streams() -> None:
    """Makes the standard streams of this process UTF-8, and errors of standard error harmless.

    A closed descriptor is opened on /dev/null, so that no file gets its number: what libraries in C++ write to
    standard error would go there. `sys.stdin` and `sys.stdout` stay None where they were closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    use_utf8(sys.stdin, sys.stdout)
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
    sys.stderr = sys.__stderr__ = unfailing(2)


def use_utf8(*streams: Any) -> None:
    """Switches streams to UTF-8, whatever PYTHONIOENCODING says; what it cannot encode is written with a backslash."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not is_utf8(stream.encoding):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def unfailing(descriptor: int) -> TextIO:
    """Opens a descriptor for text that is lost where it cannot be written.

    A full disk, a closed terminal or a reader that is gone must not end a training.
    """
    return io.TextIOWrapper(_Unfailing(descriptor, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


class _Unfailing(io.FileIO):
    """A file whose writes never fail."""

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            while rest and (count := super().write(rest)):
                rest = rest[count:]
        return len(data)


def check_arguments(arguments: Iterable[str]) -> None:
    """Checks that arguments are text: Python shows a byte that is not UTF-8 as half of a surrogate pair.

    Raises:
      UserError: names the first argument that is not.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"the argument {argument} is not UTF-8: write it in UTF-8") from None


def check_cache_folder() -> None:
    """Checks that JAX can use the compilation cache that the environment names: it warns for every program if not.

    Raises:
      UserError: if it is not a folder and cannot become one.
    """
    name = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if not name or not is_local(name):
        return
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"JAX_COMPILATION_CACHE_DIR={name} is not a folder ({reason}): correct or unset this variable"
        ) from None


def check_file_limit() -> None:
    """Raises the limit of open files, if it is low, as far as this process may.

    Raises:
      UserError: if it stays too low for a checkpoint to be read or written.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _MAX_FILES:
        return
    wanted = _MAX_FILES if hard == unlimited else min(hard, _MAX_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft < _MIN_FILES:
        raise UserError(f"only {soft} files may be open at once, which is too few: run ulimit -n {_MAX_FILES} before")
