"""Files and folders that somebody names: no pipe that never ends, no file that fills the memory, no store unreached."""

import contextlib
import os
import pathlib
import stat

from etils import epath

from tfx_jax.errors import UserError, one_line

MAX_BYTES = 256 << 20
"""Of a description, a vocabulary or a tokenizer; the largest that are published have a tenth of it."""


def read_small_file(path: epath.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a file that has to be one, local or remote.

    Raises:
      OSError: if it cannot be read; FileNotFoundError if it does not exist.
      UserError: if it is a pipe, a device or the like, or has more than `max_bytes`.
    """
    check_regular(path)
    file = epath.Path(path)
    size = file.stat().length
    if size > max_bytes:
        raise UserError(f"{path} has {size:,} bytes, more than the {max_bytes:,} that such a file may have")
    return file.read_bytes()


def check_regular(path: epath.PathLike) -> None:
    """Checks that a local path is a file with contents of its own; what is elsewhere always is.

    Raises:
      OSError: if the path cannot be looked at.
      UserError: if it is a pipe, a device or the like, which may never end.
    """
    local = pathlib.Path(path)
    if is_local(path) and not stat.S_ISREG(mode := local.stat().st_mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path} is no file but a pipe or a device")


_STORES = ("gs", "s3", "az", "hf")  # that etils reads, each by a client that has to be installed


def reach(name: epath.PathLike) -> epath.Path:
    """Returns the path of a folder that need not be there.

    Raises:
      UserError: if it can be none, or is in a store that cannot be reached or for which no client is installed.
    """
    check_store(name)
    if not is_local(name):
        _end_waiting()
    try:
        path = epath.Path(name)
        path.exists()
    except ImportError as error:
        raise UserError(f"{name} cannot be reached ({one_line(error)}): install what is missing") from None
    except Exception as error:
        if isinstance(error, OSError) and is_local(name):
            raise UserError(f"{name} cannot be used ({error.strerror or error}): name another folder") from None
        raise UserError(f"{name} cannot be reached ({one_line(error)})") from None  # by whatever client it has
    return path


def check_store(name: epath.PathLike) -> None:
    """Checks that a name is of a disk, or of a store that can be read; whether it is there is not asked.

    Raises:
      UserError: if it is neither, as an address of the web.
    """
    store, mark, _ = os.fspath(name).partition("://")
    if mark and store not in _STORES:
        listed = ", ".join(f"{store}://" for store in _STORES)
        raise UserError(f"{name} cannot be read: name a local folder, or one in a store ({listed})")


def absolute(path: epath.PathLike) -> epath.Path:
    """The whole path, as Orbax asks for; `resolve` would take one in a store for a local folder named "gs:"."""
    found = epath.Path(path)
    return found.resolve() if is_local(found) else found


def is_local(path: epath.PathLike) -> bool:
    """Whether it is on a disk, and in no store."""
    return "://" not in os.fspath(path)


def _end_waiting() -> None:
    """Makes who reads Google's store give a request up that is not answered, after which it is tried again.

    By default gcsfs waits five minutes, six times, and tensorstore for ever; who has set something else keeps that.
    """
    with contextlib.suppress(ImportError):
        import fsspec.config

        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", 20)
    for name, value in (("TIME_SECONDS", "20"), ("LIMIT_BYTES", "1")):
        os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{name}", value)
