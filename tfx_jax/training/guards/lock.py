"""A workdir serves one training at a time, and may lie on a disk that is full."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import socket
import stat
from collections.abc import Iterator
from typing import TextIO

from etils import epath

from tfx_jax.errors import UserError, is_of_store, one_line
from tfx_jax.files import is_local

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOLDER = "process "  # what a lock file begins with
_MAX_LOCK = 1_000  # characters


@contextlib.contextmanager
def report_storage_errors(workdir: epath.PathLike) -> Iterator[None]:
    """Turns what a disk or a store raises into one line; files are replaced, never overwritten: nothing is lost."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except Exception as error:
        if not is_local(workdir) and is_of_store(error):
            told = f"{workdir} cannot be reached ({one_line(error)}):"
        elif not isinstance(error, OSError):
            raise
        elif error.errno in _NO_ROOM:
            told = f"cannot write {error.filename or workdir} ({error.strerror}): make room and"
        elif error.filename is not None:
            told = f"{error.filename}: {error.strerror}: fix this and"
        else:
            raise
        raise UserError(f"{told} run the same command again") from None


@contextlib.contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Holds `workdir/train.lock`, which the operating system releases when the process dies, however it dies.

    An object store (`gs://`) has no locks: two trainings there write the same checkpoints in turn, and the second to
    start removes a save of the first that is under way, which stops the first with one line. A network file system
    without locks is used with a warning.

    Raises:
      UserError: if another process holds it; nothing of its training is touched.
    """
    if not is_local(workdir):
        yield
        return
    with _open_lock(pathlib.Path(workdir) / "train.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(_MAX_LOCK).strip() or "another process"
            raise UserError(f"{workdir} is in use by {holder}: wait until it ends, or take another --workdir") from None
        except OSError as error:
            logging.warning("%s cannot be locked (%s): let no other training use it", workdir, error.strerror)
        with contextlib.suppress(OSError):  # a full disk is no reason to stop here
            file.seek(0)
            file.truncate()
            file.write(f"{_HOLDER}{os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def _open_lock(path: pathlib.Path) -> TextIO:
    """Opens the lock file for reading and writing; a workdir from elsewhere may have anything in its place.

    Raises:
      UserError: if it is a link, no regular file, or holds anything but what `locked` writes.
    """
    refused = UserError(f"{path} is not the lock of a training: delete it and rerun the command")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.is_symlink() or error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a socket
            raise refused from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    file = open(descriptor, "r+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by the caller
    if (holder := file.read(_MAX_LOCK)) and not holder.startswith(_HOLDER):
        file.close()
        raise refused
    file.seek(0)
    return file
