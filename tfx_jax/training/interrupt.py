"""Leaving a training cleanly on SIGTERM and Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopRequest:
    """Whether somebody asked the training to stop.

    Attributes:
      signum: the signal that asked, or None.
    """

    signum: int | None = None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a request that the training loop reads between two steps.

    A second Ctrl-C interrupts at once, as ever. Outside the main thread, where Python delivers no signals, nothing is
    installed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(signum: int, _: object) -> None:
        if request.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.signum = signum

    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
