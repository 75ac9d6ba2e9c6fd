"""Data that are too large for memory: written piece by piece into files without a name, and mapped."""

import mmap
import os
import tempfile
import weakref

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tfx_jax.errors import UserError

_BLOCK_BYTES = 1 << 20  # that are written at once


class UnnamedFile:
    """A file in the folder for temporary files (`TMPDIR`), which is gone with the process, however that ends.

    Attributes:
      descriptor: of the open file.
    """

    def __init__(self):
        """Makes an empty one.

        Raises:
          UserError: if there is no folder for it.
        """
        try:
            self.descriptor, name = tempfile.mkstemp()
            os.unlink(name)
        except OSError as error:
            raise UserError(f"cannot keep data on disk: {error}: set TMPDIR to a folder that can be written") from None
        weakref.finalize(self, os.close, self.descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes.

        Raises:
          UserError: if the disk is full.
        """
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError as error:
            raise UserError(
                f"cannot keep data in {tempfile.gettempdir()}: {error.strerror or error}: set TMPDIR to a folder with "
                "more room"
            ) from None


class DiskArray:
    """Grows a flat array on disk.

    >>> array = DiskArray(np.int32)
    >>> array.append([5, 6])
    >>> array.append([7])
    >>> array.mapped()
    array([5, 6, 7], dtype=int32)
    """

    def __init__(self, dtype: DTypeLike):
        """Begins an empty one."""
        self._dtype, self._file, self._size = np.dtype(dtype), UnnamedFile(), 0
        self._waiting = bytearray()

    def append(self, values: ArrayLike) -> None:
        """Writes values [N] behind the others.

        Raises:
          UserError: if the disk is full.
        """
        array = np.asarray(values, self._dtype)
        self._waiting += array.tobytes()
        self._size += array.size
        if len(self._waiting) >= _BLOCK_BYTES:
            self._write()

    def mapped(self) -> np.ndarray:
        """Returns all of it, read-only; what is read of it is in memory as long as there is room."""
        if not self._size:
            return np.zeros(0, self._dtype)
        self._write()
        return np.frombuffer(mmap.mmap(self._file.descriptor, 0, prot=mmap.PROT_READ), self._dtype)

    def _write(self) -> None:
        self._file.write(bytes(self._waiting))
        self._waiting.clear()
