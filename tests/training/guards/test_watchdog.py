"""The watchdog bites when nothing moves, and only then."""

import dataclasses
import threading
import time

import pytest

from tests.training.tiny import tiny_config, train
from tfx_jax.training.guards import watchdog
from tfx_jax.training.guards.watchdog import Watchdog
from tfx_jax.training.sharding.distributed import RESTART
from tfx_jax.training.sharding.strategies import TrainSetup


@pytest.fixture
def bites(monkeypatch):
    """The messages with which the process would have ended."""
    found, bitten = [], threading.Event()

    def leave(message, status):
        found.append((message, status))
        bitten.set()

    monkeypatch.setattr(watchdog, "leave", leave)
    found_within = lambda seconds: found if bitten.wait(seconds) else []  # noqa: E731
    return found_within


def test_names_what_hangs_and_dumps_stacks(bites, capfd):
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(110)]  # such as the pools of checkpoints
    for thread in others:
        thread.start()
    dog = Watchdog(0.2)
    dog.beat("reads the batch of step 7")
    message, status = bites(10)[0]
    dog.close()
    done.set()
    assert "it reads the batch of step 7 for 0.2 s (config.hang_seconds)" in message
    assert status == RESTART
    stacks = capfd.readouterr().err
    assert "test_names_what_hangs_and_dumps_stacks" in stacks
    assert stacks.count("thread ") >= 112  # with this one and the dog's


@pytest.mark.slow
def test_lets_pass_what_moves_and_what_may_take_any_time(bites):
    dog = Watchdog(1.0)
    for _ in range(15):
        dog.beat("computes")
        time.sleep(0.1)
    dog.beat(None)
    assert bites(1.5) == []
    dog.close()


@pytest.mark.slow
def test_one_of_several_says_once_what_it_waits_in_before_jax_aborts_it(monkeypatch, capfd):
    bitten = threading.Event()
    monkeypatch.setattr(watchdog, "leave", lambda *_: bitten.set())
    monkeypatch.setattr(watchdog, "_QUIET", 0.3)
    for processes, beats, expected in ((1, 3, 0), (2, 2, 0), (2, 3, 1)):  # the first step compiles
        monkeypatch.setattr(watchdog.jax, "process_count", lambda count=processes: count)
        dog = Watchdog(1.0)
        for _ in range(beats):
            dog.beat("computes step 7")
        assert bitten.wait(30)
        bitten.clear()
        dog.close()
        said = [line for line in capfd.readouterr().err.splitlines() if "it compiles, or" in line]
        assert len(said) == expected
    assert said[0].startswith(
        "tfx-jax: process 0 of 2: computes step 7 for 0.3 s: either it compiles, or another process"
    )


def test_none_is_started_for_zero(bites):
    before = threading.active_count()
    Watchdog(0).beat("computes")
    assert threading.active_count() == before


def test_a_training_that_never_has_its_first_parameters_hangs(bites, text, tmp_path, monkeypatch):
    """Not only steps do: on CPUs a library's decomposition of matrices waited for ever there."""
    ended = []

    def never(training):
        ended.extend(bites(10))
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainSetup, "first_state", never)
    with pytest.raises(KeyboardInterrupt):
        train(dataclasses.replace(tiny_config(text), hang_seconds=0.5), tmp_path / "workdir")
    assert [message.partition(" for ")[0] for message, _ in ended] == ["hung: it initializes the parameters"]
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(5)  # it is told to end
            assert not thread.is_alive()
