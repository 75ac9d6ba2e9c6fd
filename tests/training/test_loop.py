"""Whole trainings on a tiny text: exact resumption, interruption, and what stops them."""

import errno
import functools
import os
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import chex
import jax
import numpy as np
import optax
import pytest

from tests.tiers import slow_but
from tests.training.tiny import tiny_config, train, whole_state
from tfx_jax.data.batching import batches
from tfx_jax.errors import UserError
from tfx_jax.tasks.loss import Metric
from tfx_jax.tasks.task import EvalResult
from tfx_jax.tasks.text.translation import TranslationTask
from tfx_jax.training import loop
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import learning_rate, make_optimizer
from tfx_jax.training.step import new_state

config_of_two = functools.partial(tiny_config, num_devices=2)


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """The workdir of a training on two devices that ran to its end in one go."""
    workdir = tmp_path_factory.mktemp("whole")
    train(config_of_two(text), workdir)
    return workdir


def train_and_be_killed(text, workdir, step):
    """Trains in a process of its own, which kills itself when it has taken so many steps."""
    program = f"""
import os, signal, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
from tests.training import test_loop, tiny
from tfx_jax.training import loop
add = loop.MetricAccumulator.add
def kill(meter, step, metrics):
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return add(meter, step, metrics)
loop.MetricAccumulator.add = kill
tiny.train(test_loop.config_of_two(sys.argv[1]), sys.argv[2])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(text), str(workdir)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return killed.stderr


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(text, uninterrupted, tmp_path, capfd):
    """Killed before there is a checkpoint, and again when there are some."""
    for step in (2, 7):
        assert "resuming" not in train_and_be_killed(text, tmp_path, step)
    train(config_of_two(text), tmp_path)
    assert "resuming at step" in capfd.readouterr().err
    chex.assert_trees_all_equal(whole_state(tmp_path), whole_state(uninterrupted))


def test_signals_save_and_leave(text, uninterrupted, tmp_path, monkeypatch, capfd):
    add, signals = loop.MetricAccumulator.add, {3: signal.SIGTERM, 6: signal.SIGINT}

    def interrupt(meter, step, metrics):
        if step in signals:
            os.kill(os.getpid(), signals.pop(step))
        return add(meter, step, metrics)

    monkeypatch.setattr(loop.MetricAccumulator, "add", interrupt)
    for step, signum in list(signals.items()):
        assert train(config_of_two(text), tmp_path).signum == signum
        assert "stopped, saved at step" in capfd.readouterr().err
        newest, _, _ = whole_state(tmp_path)
        assert newest in (step, step + 1)  # the step under way is finished, no further one begun
    assert train(config_of_two(text), tmp_path).signum is None
    chex.assert_trees_all_equal(whole_state(tmp_path), whole_state(uninterrupted))


def test_a_signal_before_the_first_step_says_that_nothing_was_saved(text, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(loop, "check_state", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert train(tiny_config(text), tmp_path).signum == signal.SIGTERM
    assert "stopped, before the first step: rerun the same command to resume" in capfd.readouterr().err


def test_a_workdir_that_fails_before_the_configuration_is_known_is_one_line(text, tmp_path, monkeypatch):
    """A run that started from another model reads its own configuration first."""
    error = OSError(errno.EIO, os.strerror(errno.EIO), "config.json")
    monkeypatch.setattr(loop, "adopt_pretrained_config", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r"^config\.json: Input/output error: fix this and rerun the same command$"):
        train(tiny_config(text), tmp_path)


def test_the_name_of_an_experiment_is_no_configuration(tmp_path):
    with pytest.raises(UserError, match=r"got the name 'vit_digits': tfx_jax\.cli\.train\.load_config_file returns"):
        train("vit_digits", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_finished_training_does_nothing_more(text, uninterrupted):
    before = whole_state(uninterrupted)
    assert train(config_of_two(text), uninterrupted).step == 9
    chex.assert_trees_all_equal(whole_state(uninterrupted), before)


def test_the_norm_of_parameters_has_the_frozen_ones_but_no_other_state():
    state = new_state({"a": np.float32([3])}, optax.sgd(0.1), model_state={"b": np.float32([4]), "c": np.float32([9])})
    found = loop._step_scalars(lambda count: 0.1 * (count + 1), {"b"}, state)
    assert found["train/param_norm"] == 5
    assert found["train/learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", OptimizerConfig.__dataclass_fields__["name"].metadata["choices"])
def test_every_optimizer_tells_the_learning_rate_of_its_last_update(name):
    """Of a model with a stack of layers, which Adafactor counts by layer."""
    config = OptimizerConfig(name=name, schedule="constant", peak_learning_rate=0.1, warmup_steps=4)
    params = {"decoder_layers": {"up": np.ones((2, 3, 3), np.float32)}, "table": np.ones((3, 2), np.float32)}
    optimizer = make_optimizer(config, 16, matrices={"decoder_layers/up": (1, 1)})
    schedule, state = learning_rate(config, 16), new_state(params, optimizer)

    @jax.jit
    def update(state):
        _, opt_state = optimizer.update(state.params, state.opt_state, state.params)
        state = state._replace(opt_state=opt_state, step=state.step + 1)
        return state, loop._step_scalars(schedule, (), state)["train/learning_rate"]

    for step in range(1, 4):
        state, found = update(state)
        assert (found.shape, float(found)) == ((), pytest.approx(0.1 * step / 4))


def test_a_training_cannot_be_shortened(text, uninterrupted):
    """It says so, and keeps the configuration."""
    before = (uninterrupted / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"is at step 9 already: config\.num_steps must be at least that$"):
        train(config_of_two(text, num_steps=5), uninterrupted)
    assert (uninterrupted / "config.json").read_bytes() == before


def test_training_can_be_prolonged(text, tmp_path):
    train(tiny_config(text, num_steps=3), tmp_path)
    assert train(tiny_config(text, num_steps=4), tmp_path).step == 4


def test_another_config_is_refused_and_nothing_is_lost(text, uninterrupted):
    before = whole_state(uninterrupted)
    other = config_of_two(text)
    other.task.label_smoothing = 0.2
    with pytest.raises(UserError, match=r"was made with task\.label_smoothing=0\.1, not 0\.2"):
        train(other, uninterrupted)
    chex.assert_trees_all_equal(whole_state(uninterrupted), before)


def test_loss_falls(text, tmp_path, scalars):
    train(tiny_config(text, num_steps=30, checkpoint_every=100), tmp_path)
    assert scalars[-1]["train/nll"] < scalars[0]["train/nll"] - 0.5
    assert scalars[9]["train/learning_rate"] == pytest.approx((16 * 10) ** -0.5, rel=1e-6)


def test_non_finite_loss_stops_with_step_and_last_good_checkpoint(text, tmp_path, monkeypatch):
    train(tiny_config(text, num_steps=3), tmp_path)
    good = load_params(tmp_path)
    config = tiny_config(text, num_steps=9, checkpoint_every=1)
    add = loop.MetricAccumulator.add

    def spoilt(meter, step, metrics):
        loss = Metric(np.float32(np.nan if step == 5 else 1.0), np.float32(1.0))
        return add(meter, step, metrics._replace(means=metrics.means | {"loss": loss}))

    monkeypatch.setattr(loop.MetricAccumulator, "add", spoilt)
    with pytest.raises(UserError, match="the loss is nan at step 5; the last good checkpoint is step 4"):
        train(config, tmp_path)
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 4
    chex.assert_trees_all_equal(load_params(tmp_path, 3), good)


def test_diverging_optimizer_really_is_caught(text, tmp_path):
    config = tiny_config(text, num_steps=40, checkpoint_every=100)
    config.optimizer.peak_learning_rate = 1e38
    with pytest.raises(UserError, match=r"the loss is (nan|-?inf) at step \d+; no checkpoint exists yet"):
        train(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "train.lock"] == ["tensorboard"]


def test_a_rejected_run_leaves_nothing_behind(text, tmp_path, monkeypatch):
    """Rejected after configuration and tokenizer were written, so that the corrected command starts afresh."""

    def reject(*_):
        assert {"config.json", "tokenizer", "artifacts.json"} <= {path.name for path in workdir.iterdir()}
        raise UserError("too large")

    monkeypatch.setattr(loop, "check_state", reject)
    for workdir in (tmp_path / "new", tmp_path / "old"):
        if workdir.name == "old":
            workdir.mkdir()
            (workdir / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match="too large"):
            train(tiny_config(text), workdir)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert {path.name for path in workdir.iterdir()} == {"notes.txt", "train.lock"}


def test_evaluations_rank_checkpoints_and_stop_early(text, tmp_path, monkeypatch):
    bleus = iter([3.0, 7.0, 7.0, 5.0, 9.0])  # as good as before is no progress

    def evaluate(*_):
        return EvalResult({"bleu": next(bleus), "exact_match": 0.0}, "as it may be")

    monkeypatch.setattr(TranslationTask, "evaluate", evaluate)
    config = tiny_config(text, num_steps=9, eval_every=1, patience=2, keep_last=1, validation="validation.tsv")
    result = train(config, tmp_path)
    assert [evaluation["bleu"] for evaluation in result.evaluations] == [3.0, 7.0, 7.0, 5.0]
    assert result.step == 4
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [3, 4]
    # Started again, it remembers that it had converged.
    assert train(config, tmp_path).step == 4
    chex.assert_trees_all_equal(load_params(tmp_path, "best"), load_params(tmp_path, 3))


def test_another_metric_may_rank_checkpoints(text, tmp_path, monkeypatch, capfd):
    """Whose best value is bold in the report, named at the end, and wrong names are refused before the first step."""
    bleus, matches = iter([3.0, 7.0, 8.0, 9.0]), iter([1.0, 5.0, 4.0, 3.0])

    def evaluate(*_):
        return EvalResult({"bleu": next(bleus), "exact_match": next(matches)}, "as it may be")

    monkeypatch.setattr(TranslationTask, "evaluate", evaluate)
    config = tiny_config(text, num_steps=9, eval_every=1, patience=2, keep_last=1, validation="validation.tsv")
    config.best_metric = "exact"
    with pytest.raises(
        UserError, match=r"^config\.best_metric must be one of bleu, exact_match, or empty, got 'exact'$"
    ):
        train(config, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    config.best_metric = "exact_match"
    assert train(config, tmp_path / "kept").step == 4
    chex.assert_trees_all_equal(load_params(tmp_path / "kept", "best"), load_params(tmp_path / "kept", 2))
    assert "stopped early: no better exact match in the last 2" in capfd.readouterr().err
    report = (tmp_path / "kept" / "report.md").read_text()
    assert "stopped early, without a better exact match" in report
    assert "| 2 | 7.00 | **5.0 %** |" in report


@pytest.mark.slow
def test_a_score_that_is_no_number_is_never_the_best(text, tmp_path, monkeypatch, capfd):
    nan, inf = np.nan, np.inf
    bleus = iter([nan, 3.0, inf, -inf, 7.0, nan, inf, nan])

    def evaluate(*_):
        return EvalResult({"bleu": next(bleus), "exact_match": 0.0}, "as it may be")

    monkeypatch.setattr(TranslationTask, "evaluate", evaluate)
    config = tiny_config(text, num_steps=9, eval_every=1, patience=3, keep_last=1, validation="validation.tsv")
    assert train(config, tmp_path).step == 8  # three in a row no better than 7.0
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [5, 8]
    chex.assert_trees_all_equal(load_params(tmp_path, "best"), load_params(tmp_path, 5))
    said = [line.partition(", ")[2] for line in capfd.readouterr().err.splitlines() if ": validation" in line]
    no_number = [f"BLEU is {value}: this checkpoint cannot be the best" for value in ("nan", "inf", "-inf")]
    assert [line.rpartition(", ")[0] for line in said] == [
        *(no_number[0], "", *no_number[1:], "", *no_number[:2], no_number[0]),
    ]
    assert "score" not in whole_state(tmp_path)[2]  # of the newest: of a broken model alone, none is the best
    report = (tmp_path / "report.md").read_text()
    assert report.count("**7.00**") == 1
    assert "**nan**" not in report
    assert "**inf**" not in report
    assert train(config, tmp_path).step == 8


@pytest.mark.slow
@pytest.mark.parametrize("last_step", slow_but([3, 6], 3))
def test_an_evaluation_that_dies_costs_no_step(text, tmp_path, monkeypatch, last_step):
    """What is trained is saved before it is evaluated; the next run evaluates it, and ends as if nothing had been."""
    dying = False

    def evaluate(task, model, split="validation"):
        if dying:
            raise RuntimeError("the device is lost")
        return EvalResult({"bleu": float(np.abs(model.params["table"]).sum()), "exact_match": 0.0}, "so much")

    monkeypatch.setattr(TranslationTask, "evaluate", evaluate)
    config = tiny_config(text, num_steps=last_step, eval_every=3, checkpoint_every=100, validation="validation.tsv")
    want = train(config, tmp_path / "whole")
    workdir = tmp_path / "dies"
    if last_step > 3:
        train(tiny_config(text, num_steps=4, eval_every=3, checkpoint_every=100, validation="validation.tsv"), workdir)
    dying = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        train(config, workdir)
    assert max(int(path.name) for path in (workdir / "checkpoints").iterdir()) == last_step
    dying = False
    found = train(config, workdir)
    assert found.evaluations[0]["step"] == 3
    assert found.evaluations[-1] == want.evaluations[-1]
    chex.assert_trees_all_equal(whole_state(workdir)[1], whole_state(tmp_path / "whole")[1])
    chex.assert_trees_all_equal(load_params(workdir, "best"), load_params(tmp_path / "whole", "best"))


@pytest.mark.slow
def test_tables_of_the_report_do_not_fail_the_run(text, tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("no tables")

    monkeypatch.setattr(TranslationTask, "report_tables", fail)
    config = tiny_config(text, num_steps=2, validation="validation.tsv")
    assert train(config, tmp_path).step == 2
    assert "no tables in the report: no tables" in capfd.readouterr().err
    assert "## How to repeat it" in (tmp_path / "report.md").read_text()
    monkeypatch.undo()
    train(tiny_config(text, num_steps=3, validation="validation.tsv"), tmp_path)
    assert "## Sample translations" in (tmp_path / "report.md").read_text()


def test_a_process_alone_without_tables_ends_the_run_of_several(monkeypatch):
    """The others would wait for its share of the predictions."""

    def fail(_):
        raise RuntimeError("no tables")

    trainer: Any = mock.MagicMock(has_validation=True)
    trainer.run.task.report_tables = fail
    assert loop._Trainer._tables(trainer, 1) == []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="no tables"):
        loop._Trainer._tables(trainer, 1)


def test_a_run_that_fails_before_its_first_step_stops_reading_ahead(text, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "base_rng", mock.Mock(side_effect=UserError("no memory")))  # when reading has begun
    before = set(batches._open_iterators)
    with pytest.raises(UserError, match="no memory") as caught:
        train(tiny_config(text), tmp_path)
    iterators = set(batches._open_iterators) - before
    assert iterators, f"{caught.tb} holds it"
    assert all(iterator._closed for iterator in iterators)


@pytest.mark.parametrize(("init_from", "doing"), [("", "reads the checkpoints"), ("owner/name", None)])
def test_a_resumed_run_may_read_its_pretrained_model_for_any_time(init_from, doing):
    trainer: Any = mock.MagicMock()
    trainer.config.init_from = init_from

    def restore(_):
        assert trainer.watchdog.beat.mock_calls == [mock.call(doing)]
        return "state", {"data": 1, "evaluations": []}

    trainer.checkpoints.restore_latest = restore
    assert loop._Trainer._restore(trainer, mock.MagicMock()) == "state"
