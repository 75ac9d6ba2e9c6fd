"""Signals become a request to stop; nothing else of Python's signal handling changes."""

import os
import signal
import threading

import pytest

from tfx_jax.training.guards.interrupt import stop_on_signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_noted_and_nothing_raised(signum):
    with stop_on_signals() as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signum)
        assert stop.signum == signum


def test_second_interrupt_raises():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT


def test_interrupt_after_sigterm_raises_but_a_second_sigterm_does_not():
    """A cluster may send SIGTERM more than once; a user who presses Ctrl-C meanwhile does not want to wait."""
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_restored_even_after_an_error():
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    error = RuntimeError("boom")

    def fail():
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) != before[0]
            raise error

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_nohup_keeps_a_training_alive():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signum is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_get_a_request_that_nothing_sets():
    seen = []

    def work():
        with stop_on_signals() as stop:
            seen.append((stop.signum, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_stop_is_due_at_the_step_after_the_signal():
    with stop_on_signals() as stop:
        assert not stop.is_due(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_due(2)


def test_requests_are_independent():
    with stop_on_signals() as first:
        os.kill(os.getpid(), signal.SIGTERM)
    with stop_on_signals() as second:
        assert second.signum is None
    assert first.signum == signal.SIGTERM
