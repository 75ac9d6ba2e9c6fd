"""Batches prepared ahead, by a thread that ends before the interpreter does."""

import atexit
import weakref
from typing import Any, TypeVar

import grain
import grain.experimental

T = TypeVar("T")


class PrefetchedIterator(grain.experimental.ThreadPrefetchDatasetIterator[T]):
    """Runs another iterator in a thread, some elements ahead; its state is that of the last element taken.

    The thread ends before the interpreter does: a daemon thread that is still inside SentencePiece when Python shuts
    down aborts the process.
    """

    def __init__(self, parent: grain.DatasetIterator[T], num_elements: int):
        super().__init__(parent, num_elements)
        _open_iterators.add(self)

    def close(self) -> None:
        """Ends the thread; the second time, there is nothing to do, nor are the modules to do it with at shut-down."""
        if not self._closed:
            super().close()


_open_iterators: weakref.WeakSet[PrefetchedIterator[Any]] = weakref.WeakSet()


@atexit.register
def _close_iterators() -> None:
    for iterator in list(_open_iterators):
        iterator.close()
