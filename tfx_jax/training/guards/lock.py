"""Lock of the workdir against a second run, and clear errors for full disks and unreachable stores."""

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

from tfx_jax.errors import UserError, is_store_error, one_line
from tfx_jax.files import is_local

LOCK_NAME = "train.lock"
"""File of the workdir that a run holds locked."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOLDER = "process "  # first word of a lock file
_MAX_LOCK = 1_000  # characters read of a lock file


@contextlib.contextmanager
def report_storage_errors(workdir: epath.PathLike) -> Iterator[None]:
    """Turns errors of a disk or a store into one-line UserErrors; files are replaced atomically, so nothing is lost."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except Exception as error:
        if not is_local(workdir) and is_store_error(error):
            problem = f"{workdir} cannot be reached ({one_line(error)}):"
        elif not isinstance(error, OSError):
            raise
        elif error.errno in _DISK_FULL:
            problem = f"cannot write {error.filename or workdir} ({error.strerror}): free disk space and"
        elif error.filename is not None:
            problem = f"{error.filename}: {error.strerror}: fix this and"
        else:
            raise
        raise UserError(f"{problem} rerun the same command") from None


@contextlib.contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Holds `workdir/train.lock`, which the operating system releases when the process ends for any reason.

    An object store (`gs://`) has no locks: two runs there write the same checkpoints in turn, and when the second one
    starts, it deletes a checkpoint that the first is saving, which stops the first with an error. A network file system
    without locks is used with a warning.

    Raises:
      UserError: if another process holds the lock; nothing of its run is changed.
    """
    if not is_local(workdir):
        yield
        return
    with _open_lock(pathlib.Path(workdir) / LOCK_NAME) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(_MAX_LOCK).strip() or "another process"
            raise UserError(f"{workdir} is in use by {holder}: wait until it ends, or use another workdir") from None
        except OSError as error:
            logging.warning("%s cannot be locked (%s): do not start a second run in it", workdir, error.strerror)
        with contextlib.suppress(OSError):  # the lock works without its text, even on a full disk
            file.seek(0)
            file.truncate()
            file.write(f"{_HOLDER}{os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def _open_lock(path: pathlib.Path) -> TextIO:
    """Opens the lock file for reading and writing, or creates it. The path is not trusted: it may be a link or a pipe.

    Raises:
      UserError: if it is a link, not a regular file, or has other content than `locked` writes.
    """
    invalid = UserError(f"{path} is not a lock file of tfx_jax: delete it and rerun the command")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.is_symlink() or error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a socket
            raise invalid from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise invalid
    file = open(descriptor, "r+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by the caller
    if (holder := file.read(_MAX_LOCK)) and not holder.startswith(_HOLDER):
        file.close()
        raise invalid
    file.seek(0)
    return file
