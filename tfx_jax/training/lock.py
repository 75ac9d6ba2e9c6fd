"""A workdir serves one training at a time, and may lie on a disk that is full."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator

from etils import epath

from tfx_jax.errors import UserError, is_of_store, one_line
from tfx_jax.files import is_local

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def report_storage_errors(workdir: epath.PathLike) -> Iterator[None]:
    """Turns what a disk or a store raises into one line; files are replaced, never overwritten: nothing is lost."""
    try:
        yield
    except BrokenPipeError:  # of whoever reads what is printed
        raise
    except Exception as error:
        if not is_local(workdir) and is_of_store(error):
            told = f"{workdir} cannot be reached ({one_line(error)}):"
        elif not isinstance(error, OSError):
            raise
        elif error.errno in _NO_ROOM:
            told = f"cannot write {error.filename or workdir} ({error.strerror}): make room and"
        elif error.filename is not None:
            told = f"{error.filename}: {error.strerror}: mend that and"
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
    with (pathlib.Path(workdir) / "train.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{workdir} is in use by {holder}: wait until it ends, or take another --workdir") from None
        except OSError as error:
            logging.warning("%s cannot be locked (%s): let no other training use it", workdir, error.strerror)
        with contextlib.suppress(OSError):  # a full disk is no reason to stop here
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
