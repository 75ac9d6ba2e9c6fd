"""Trainings that meet bad steps: skipped or stopped as configured, counted, and resumed to the last bit."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.tiny import tiny_config, train, whole_state
from tfx_jax.errors import UserError
from tfx_jax.tasks.loss import Metric
from tfx_jax.tasks.text import translation
from tfx_jax.training.optimizer import learning_rate
from tfx_jax.training.reporting.meter import MetricAccumulator
from tfx_jax.training.step import Metrics

translation_loss = translation.translation_loss


def spoilt(is_bad, factor=jnp.nan):
    """The loss of translation, times `factor` in the batches that `is_bad(batch)` picks."""

    def loss_fn(model, batch, rngs, **options):
        output = translation_loss(model, batch, rngs, **options)
        return output._replace(loss=jnp.where(is_bad(batch), factor, 1.0) * output.loss)

    return loss_fn


def some(batch):
    """About a third of the batches, as their tokens have it."""
    return batch["target"].sum() % 3 == 0


def test_bad_steps_are_skipped_and_counted(text, tmp_path, monkeypatch, scalars, capfd):
    monkeypatch.setattr(translation, "translation_loss", spoilt(some))
    assert train(tiny_config(text, num_steps=12, bad_steps="skip"), tmp_path).step == 12
    skipped = re.findall(r"the loss is nan at step (\d+): skipped \((\d+) in a row\)", capfd.readouterr().err)
    counts = [int(logged["train/bad_steps"]) for logged in scalars]
    assert [int(step) for step, _ in skipped] == [step for step, count in enumerate(counts, 1) if count]
    assert 1 <= len(skipped) < 12
    assert all(("train/loss" in logged) != bool(logged["train/bad_steps"]) for logged in scalars)
    # Skipped steps do not move the schedule: the learning rate is that of the last update.
    config = tiny_config(text, num_steps=12)
    schedule = learning_rate(config.optimizer, config.model.d_model, 12)
    updates = np.maximum(np.cumsum([not count for count in counts]) - 1, 0)
    np.testing.assert_allclose([logged["train/learning_rate"] for logged in scalars], jax.vmap(schedule)(updates))


def test_sums_leave_skipped_steps_out():
    meter = MetricAccumulator(lambda shapes: 0, ["cpu"])
    for step, loss in enumerate([2.0, np.nan, 4.0]):
        is_bad = float(np.isnan(loss))
        means = dict.fromkeys(("loss", "nll", "accuracy"), Metric(loss, 5.0))
        numbers = {"tokens": 5.0, "grad_norm": loss, "bad": is_bad, "bad_in_a_row": is_bad}
        meter.add(step, Metrics(means, numbers))
    meter.drain()
    found = meter.take()
    assert {found[f"train/{name}"] for name in ("loss", "nll", "accuracy")} == {6.0 / 10.0}
    assert (found["train/grad_norm"], found["train/tokens_per_step"], found["train/bad_steps"]) == (3.0, 5.0, 1.0)


@pytest.mark.slow
def test_resumed_after_bad_steps_equals_uninterrupted(text, tmp_path, monkeypatch, scalars):
    """The running mean and the count come back as well: the first step after a resumption may be a spike."""
    monkeypatch.setattr(translation, "translation_loss", spoilt(some, 30.0))
    config = functools.partial(tiny_config, text, bad_steps="skip", spike_factor=4.0, checkpoint_every=100)
    train(config(num_steps=9), tmp_path / "whole")
    counts = [int(logged["train/bad_steps"]) for logged in scalars]
    middle = counts.index(1) + 1  # steps: the last of them is bad
    assert 1 < middle < 9
    for num_steps in (middle, 9):
        train(config(num_steps=num_steps), tmp_path / "parts")
    found, expected = whole_state(tmp_path / "parts"), whole_state(tmp_path / "whole")
    chex.assert_trees_all_equal(found, expected)
    assert 2 < expected[1]["rest"]["skip_state"]["mean_loss"] < 6


def test_many_bad_steps_in_a_row_stop_the_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "translation_loss", spoilt(lambda batch: True))
    message = "^20 bad steps in a row: the loss is nan at step 20; no checkpoint exists yet: lower the learning rate"
    with pytest.raises(UserError, match=message):
        train(tiny_config(text, num_steps=40, bad_steps="skip", checkpoint_every=100), tmp_path)


def test_no_checkpoint_is_saved_while_steps_are_bad(text, tmp_path, monkeypatch):
    """Its parameters may be the cause: the last good checkpoint is one before, from which the next run resumes."""
    config = functools.partial(tiny_config, text, bad_steps="skip", checkpoint_every=1)
    train(config(num_steps=3), tmp_path)
    monkeypatch.setattr(translation, "translation_loss", spoilt(lambda batch: True))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"^20 bad steps in a row: .* at step 23; the last good checkpoint is step 3: "
        ):
            train(config(num_steps=40), tmp_path)
        assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 3


@pytest.mark.slow
def test_spike_stops_the_run_and_the_same_run_goes_on_without_it(text, tmp_path, monkeypatch):
    train(tiny_config(text, num_steps=3, spike_factor=4.0), tmp_path)
    monkeypatch.setattr(translation, "translation_loss", spoilt(some, 30.0))
    config = functools.partial(tiny_config, text, num_steps=12, spike_factor=4.0, checkpoint_every=100)
    message = (
        r"^the loss per [a-z ]+ is \d+(\.\d+)?, a spike at step \d+; the last good checkpoint is step 3: .* such steps$"
    )
    with pytest.raises(UserError, match=message):
        train(config(), tmp_path)
    assert train(config(bad_steps="skip"), tmp_path).step == 12
