"""Clean exit of a training run on SIGTERM, SIGHUP and Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """A request to stop the training run.

    Attributes:
      signum: signal that requested the stop, or None.
    """

    signum: int | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to stop before this step; must be called before every step.

        A signal may reach only one of several processes, or each at another step, but all must stop before the same
        step. JAX's preemption service finds a step that none of them has begun.
        """
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signum = self.signum or signal.SIGTERM
            return True
        return jax.process_count() == 1 and self.signum is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM, SIGINT and SIGHUP into a request that the training loop reads between two steps.

    SIGHUP, which a closed terminal or ssh session sends, stays ignored under `nohup`. A second Ctrl-C interrupts at
    once. Outside the main thread, where Python delivers no signals, no handler is installed. With several processes,
    JAX keeps its handler of SIGTERM, which notifies the other processes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def request_stop(signum: int, _: object) -> None:
        """Handles a signal: records it; a second Ctrl-C interrupts at once."""
        if request.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.signum = signum
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)  # for JAX's handler, which notifies the other processes

    handled = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, request_stop) for signum in handled}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
