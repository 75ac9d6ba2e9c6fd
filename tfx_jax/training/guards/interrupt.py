"""Leaving a training cleanly on SIGTERM, SIGHUP and Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether somebody asked the training to stop.

    Attributes:
      signum: the signal that asked, or None.
    """

    signum: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to stop before this step; call it before each one.

        A signal may reach one process of several, or each at another step, yet all have to stop before the same step:
        JAX's preemption service finds one that none of them has begun.
        """
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signum = self.signum or signal.SIGTERM
            return True
        return jax.process_count() == 1 and self.signum is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM, SIGINT and SIGHUP into a request that the training loop reads between two steps.

    SIGHUP, which a closed terminal or ssh session sends, stays ignored under `nohup`.
    A second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no signals, nothing is
    installed. In several processes SIGTERM stays with JAX, which listens to it and tells the other processes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(signum: int, _: object) -> None:
        if request.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.signum = signum
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)

    ours = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        ours.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, ask) for signum in ours}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
