"""Small files of strangers, read whole: no pipe that never ends, no file that fills the memory."""

import pathlib
import stat

from etils import epath

from tfx_jax.errors import UserError

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
    if "://" not in str(path) and not stat.S_ISREG(mode := local.stat().st_mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path} is no file but a pipe or a device")
