"""Traces of a few steps, and a whole training that is watched, interrupted and reported."""

import os
import signal

import jax
import numpy as np
import pytest

from tests.training.tiny import tiny_config, train
from tfx_jax.errors import UserError
from tfx_jax.training import loop
from tfx_jax.training.reporting.meter import MetricAccumulator
from tfx_jax.training.reporting.profiling import Profile, parse_steps
from tfx_jax.training.reporting.progress import read_history


def test_steps_are_those_before_stop():
    assert parse_steps("1:2", 1) == range(1, 2)
    assert parse_steps("10:15", 12) == range(10, 15)


@pytest.mark.parametrize(
    "steps", ["", "5", ":", "5:", ":5", "0:3", "5:5", "6:5", "-1:5", "1:2:3", "a:b", "1.5:3", "²:5"]
)
def test_anything_else_costs_one_line(steps):
    with pytest.raises(UserError, match="must be START:STOP with 1 <= START < STOP, for example --profile=10:15"):
        parse_steps(steps, 100)


def test_steps_that_never_come_cost_one_line():
    with pytest.raises(UserError, match="--profile=101:105 must start at or before the last step, 100"):
        parse_steps("101:105", 100)


class Traces:
    """What the profiler was asked to do, in order, without doing it."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: self.calls.append("start"))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.calls.append("stop"))

    def run(self, workdir, steps, first_step, last_step, lines):
        meter = MetricAccumulator(lambda shapes: 0, ["cpu"])
        profile = Profile(workdir, steps, last_done_step=first_step, meter=meter, message=lines.append)
        for step in range(first_step + 1, last_step + 1):
            with profile.step(step, jax.numpy.ones(())):
                self.calls.append(step)
        profile.close()
        return self.calls


@pytest.mark.parametrize(
    ("steps", "first_step", "expected", "said"),
    [
        (None, 0, [1, 2, 3, 4], []),
        (range(2, 4), 0, [1, "start", 2, 3, "stop", 4], ["profile: traced steps 2 to 3 into {}"]),
        (range(3, 9), 0, [1, 2, "start", 3, 4, "stop"], ["profile: traced steps 3 to 4 into {}"]),
        (
            range(1, 4),
            2,
            ["start", 3, "stop", 4],
            ["profile: steps up to 2 are done already, tracing step 3", "profile: traced step 3 into {}"],
        ),
        (range(1, 3), 2, [3, 4], ["profile: steps up to 2 are done already, there is none left to trace"]),
    ],
)
def test_trace_begins_and_ends_between_steps(tmp_path, monkeypatch, steps, first_step, expected, said):
    lines = []
    assert Traces(monkeypatch).run(tmp_path, steps, first_step, 4, lines) == expected
    assert lines == [line.format(tmp_path / "profile") for line in said]


def test_profiler_that_fails_stops_nothing(tmp_path, monkeypatch):
    lines, traces = [], Traces(monkeypatch)

    def fail(*_):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    assert traces.run(tmp_path, range(2, 4), 0, 4, lines) == [1, 2, 3, 4]
    assert lines == ["profile: no trace: Only one profile may be run at a time."]


@pytest.mark.slow
def test_training_is_traced_and_reported_though_interrupted(text, tmp_path, monkeypatch, capfd):
    config = tiny_config(text, validation="validation.tsv", log_every=3)
    add = loop.MetricAccumulator.add

    def stop(meter, step, metrics):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return add(meter, step, metrics)

    monkeypatch.setattr(loop.MetricAccumulator, "add", stop)
    assert train(config, tmp_path, profile=range(4, 100)).signum == signal.SIGTERM
    assert "profile: traced step 4 into" in capfd.readouterr().err
    assert len(list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1
    assert "Step 4 of 9: interrupted by SIGTERM" in (tmp_path / "report.md").read_text()

    assert train(config, tmp_path, profile=range(4, 5)).signum is None
    said = capfd.readouterr().err
    assert "profile: steps up to 4 are done already, there is none left to trace" in said
    assert "no report" not in said
    report = (tmp_path / "report.md").read_text()
    assert "Step 9 of 9: finished" in report
    assert "| Runs | 2, the last from step 4 |" in report
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    history = read_history(tmp_path)
    steps, losses = history.curve("train/loss")
    assert steps.tolist() == [3, 4, 6, 9]  # the fourth step, behind the last line, is not lost
    assert np.isfinite(losses).all()
    totals = [sum(point.scalars.get(f"time/{part}", 0.0) for point in history.points) for part in ("evaluate", "save")]
    assert min(totals) > 0  # the last evaluation and the last save come after the last line
