"""Where the seconds of a training go, and what is made of its metrics."""

import types

import jax
import numpy as np
import pytest

from tfx_jax.tasks.loss import Metric
from tfx_jax.training.reporting import meter as meter_module
from tfx_jax.training.reporting.meter import MetricAccumulator, peak_flops
from tfx_jax.training.step import Metrics

MEANS = {"loss": Metric(20.0, 5.0), "nll": Metric(10.0, 5.0), "next_sentence_accuracy": Metric(1.0, 2.0)}
METRICS = Metrics(MEANS, {"tokens": 6.0, "grad_norm": 3.0})


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [100.0]
    monkeypatch.setattr(meter_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def batch(rows=2, source_length=8, target_length=4):
    return {"source": np.zeros((rows, source_length)), "target": np.zeros((rows, target_length))}


def step_flops(batch):
    """Stands for the FLOPs of a step."""
    return 1000 * batch["source"].size + batch["target"].size


def seconds(scalars):
    return {name.removeprefix("time/"): value for name, value in scalars.items() if name.startswith("time/")}


def test_every_second_belongs_to_one_part(clock):
    meter = MetricAccumulator(step_flops, ["cpu"])
    clock[0] += 1
    with meter.timed("data"):
        clock[0] += 2
    with meter.starting(batch()):
        clock[0] += 4
    meter.add(1, METRICS)
    with meter.timed("evaluate"):
        clock[0] += 8
        with meter.timed("save"):
            clock[0] += 16
        clock[0] += 32
    clock[0] += 64
    meter.drain()
    assert seconds(meter.take()) == {"data": 2, "compile": 4, "step": 1 + 64, "save": 16, "evaluate": 8 + 32}
    assert seconds(meter.take()) == {"save": 0, "evaluate": 0}


def test_a_part_that_fails_is_over(clock):
    meter = MetricAccumulator(step_flops, ["cpu"])

    def fail():
        with meter.timed("data"):
            clock[0] += 2
            raise StopIteration

    with pytest.raises(StopIteration):
        fail()
    clock[0] += 4
    meter.add(1, METRICS)
    meter.drain()
    assert seconds(meter.take()) == {"data": 2, "compile": 0, "step": 4, "save": 0, "evaluate": 0}


def test_only_new_shapes_compile(clock):
    meter = MetricAccumulator(step_flops, ["cpu"])
    for shapes in ((2, 8, 4), (2, 8, 4), (2, 4, 8), (2, 8, 4), (2, 4, 8)):
        with meter.starting(batch(*shapes)):
            clock[0] += 1
        meter.add(1, METRICS)
    meter.drain()
    assert seconds(meter.take()) == {"data": 0, "compile": 2, "step": 3, "save": 0, "evaluate": 0}


class OnDevice:
    """A metric that takes seven seconds to arrive."""

    def __init__(self, clock):
        self.clock, self.is_ready = clock, False

    def block_until_ready(self):
        if not self.is_ready:
            self.clock[0] += 7
            self.is_ready = True
        return self

    def __array__(self, dtype=None, copy=None):
        self.block_until_ready()
        return np.array(1.0)


def test_a_step_under_way_is_waited_for_before_compiling_but_not_otherwise(clock):
    meter = MetricAccumulator(step_flops, ["cpu"])
    first, second = OnDevice(clock), OnDevice(clock)
    meter.add(1, METRICS._replace(means=MEANS | {"loss": Metric(first, 5.0)}))
    with meter.starting(batch()):
        clock[0] += 30
    assert first.is_ready
    meter.add(2, METRICS._replace(means=MEANS | {"loss": Metric(second, 5.0)}))
    with meter.starting(batch()):
        pass
    assert not second.is_ready  # it is fetched while the third step runs
    assert [step for step, _ in meter.add(3, METRICS)] == [2]
    assert second.is_ready
    meter.drain()
    assert seconds(meter.take()) == {"data": 0, "compile": 30, "step": 14, "save": 0, "evaluate": 0}


def test_means_and_rates_over_data_and_step(clock):
    meter = MetricAccumulator(step_flops, ["TPU v4"] * 2)
    for step in (1, 2):
        with meter.timed("data"):
            clock[0] += 1
        with meter.starting(batch()):
            clock[0] += 3
        meter.add(step, METRICS)
    with meter.timed("save"):
        clock[0] += 100
    meter.drain()
    found = meter.take()
    assert seconds(found) == {"data": 2, "compile": 3, "step": 3, "save": 100, "evaluate": 0}
    flops = 2 * (1000 * 2 * 8 + 2 * 4)
    assert {name: value for name, value in found.items() if name.startswith("train/")} == {
        "train/loss": 4.0,
        "train/nll": 2.0,
        "train/next_sentence_accuracy": 0.5,
        "train/grad_norm": 3.0,
        "train/tokens_per_second": 12 / 5,
        "train/tokens_per_step": 6.0,
        "train/mfu": pytest.approx(flops / 5 / (2 * 275e12)),
    }


def test_flops_are_counted_once_for_each_shape(clock):
    calls = []
    meter = MetricAccumulator(lambda batch: calls.append(batch["source"].shape) or 7, ["TPU v4"])
    for rows in (2, 3, 2, 3):
        with meter.starting(batch(rows)):
            clock[0] += 1
        meter.add(1, METRICS)
    meter.drain()
    assert calls == [(2, 8), (3, 8)]
    assert meter.take()["train/mfu"] == pytest.approx(4 * 7 / 2 / 275e12)


def test_no_utilization_of_devices_whose_peak_is_unknown():
    meter = MetricAccumulator(step_flops, ["cpu"])
    meter.add(1, METRICS._replace(numbers=METRICS.numbers | {"bad": 1.0}))
    meter.drain()
    found = meter.take()
    assert "train/mfu" not in found
    assert found["train/bad_steps"] == 1.0


def test_memory_is_constant_over_steps():
    """The meter forgets what it has summed: a training that runs for ever must not grow."""
    meter = MetricAccumulator(step_flops, ["cpu"])
    for step in range(1, 100):
        meter.add(step, jax.tree.map(jax.numpy.asarray, METRICS))
    meter.drain()
    assert meter.take()["train/loss"] == 4.0
    assert not meter._waiting
    assert not meter._sums


def test_peak_is_that_of_all_devices():
    assert peak_flops(["TPU v4"] * 8) == 8 * 275e12
    assert peak_flops(["NVIDIA H100 80GB HBM3"]) == pytest.approx(989e12, rel=1e-3)
    # A v3 chip, of 123 TFLOP/s, is two devices.
    assert peak_flops(["TPU v3"] * 2) == 123e12


def test_no_peak_is_better_than_a_wrong_one():
    assert peak_flops([device.device_kind for device in jax.devices()]) is None  # CPUs
    assert peak_flops(["TPU v4", "TPU v99"]) is None
    assert peak_flops(["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]) is None
