"""Arrays larger than memory: written in blocks to unnamed temporary files, and memory-mapped."""

import mmap
import os
import tempfile
import weakref

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tfx_jax.errors import UserError

_BLOCK_BYTES = 1 << 20  # bytes per write


class UnnamedFile:
    """A deleted but open file in the folder for temporary files (`TMPDIR`); it disappears with the process.

    Attributes:
      descriptor: file descriptor.
    """

    def __init__(self):
        """Creates an empty file.

        Raises:
          UserError: if there is no writable folder for it.
        """
        try:
            self.descriptor, name = tempfile.mkstemp()
            os.unlink(name)
        except OSError as error:
            raise UserError(f"cannot keep data on disk: {error}: set TMPDIR to a writable folder") from None
        weakref.finalize(self, os.close, self.descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes.

        Raises:
          UserError: if the disk is full.
        """
        rest = memoryview(data).cast("B")
        try:
            while rest:
                num_written = os.write(self.descriptor, rest)  # may be fewer bytes than requested
                rest = rest[num_written:]
        except OSError as error:
            raise UserError(
                f"cannot keep data in {tempfile.gettempdir()}: {error.strerror or error}: set TMPDIR to a folder with "
                "more free space"
            ) from None


class DiskArray:
    """A flat array on disk to which values are appended.

    >>> array = DiskArray(np.int32)
    >>> array.append([5, 6])
    >>> array.append([7])
    >>> array.mapped()
    array([5, 6, 7], dtype=int32)
    """

    def __init__(self, dtype: DTypeLike):
        """Creates an empty array."""
        self._dtype, self._file = np.dtype(dtype), UnnamedFile()
        self._size = 0  # number of values, unwritten ones included
        self._unwritten = bytearray()

    def append(self, values: ArrayLike) -> None:
        """Appends values, an array of any shape, flattened.

        Raises:
          UserError: if the disk is full.
        """
        array = np.asarray(values, self._dtype)
        self._unwritten += array.tobytes()
        self._size += array.size
        if len(self._unwritten) >= _BLOCK_BYTES:
            self._write()

    def mapped(self) -> np.ndarray:
        """Returns the whole array, read-only and memory-mapped: the system caches the parts that are read."""
        if not self._size:
            return np.zeros(0, self._dtype)
        self._write()
        return np.frombuffer(mmap.mmap(self._file.descriptor, 0, prot=mmap.PROT_READ), self._dtype)

    def _write(self) -> None:
        self._file.write(bytes(self._unwritten))
        self._unwritten.clear()
