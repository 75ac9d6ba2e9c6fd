"""Whole trainings on a tiny text: exact resumption, interruption, and what stops them."""

import dataclasses
import os
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from tfx_jax.errors import UserError
from tfx_jax.training import loop
from tfx_jax.training.checkpoint import Checkpoints, load_params
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.experiment import Evaluation
from tfx_jax.training.experiments.translation import TranslationExperiment
from tfx_jax.training.loop import train


def tiny_config(text, **changes):
    config = ExperimentConfig()
    config.data.dataset, config.data.data_dir = "files", str(text)
    config.data.train_source, config.data.validation_source = "train.tsv", "validation.tsv"
    config.model.num_layers, config.model.d_model, config.model.num_heads, config.model.d_ff = 1, 16, 2, 32
    config.data.tokenizer, config.data.is_tokenised = "words", True
    config.data.max_length = 32
    config.data.tokens_per_batch = 256
    config.data.window = 64
    config.optimizer.warmup_steps = 10
    config.decoding.extra_length, config.decoding.beam_size = 2, 2
    config.num_steps, config.checkpoint_every, config.log_every = 9, 3, 1
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a text to reverse, word by word."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for split, size in (("train", 200), ("validation", 4)):
        sentences = [[f"w{word}" for word in random.integers(30, size=random.integers(2, 12))] for _ in range(size)]
        lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in sentences]
        (folder / f"{split}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """The workdir of a training that ran to its end in one go."""
    workdir = tmp_path_factory.mktemp("whole")
    train(tiny_config(text), workdir)
    return workdir


def whole_state(workdir):
    """Parameters, moments and step of the newest checkpoint, with the position in the data."""
    directory = workdir / "checkpoints"
    newest = max(int(path.name) for path in directory.iterdir() if path.name.isdigit())
    with Checkpoints(workdir) as checkpoints:
        checkpointer = checkpoints._checkpointer
        wanted = jax.tree.map(
            lambda leaf: np.empty(leaf.shape, leaf.dtype), checkpointer.checkpointables_metadata(newest).metadata
        )
        wanted.pop("metrics", None)
        return newest, checkpointer.load_checkpointables(newest, wanted), checkpointer.metadata(newest).custom_metadata


def run_in_process(text, workdir, *, kill_at=None, signum=signal.SIGKILL):
    """Trains in a process of its own, which sends itself a signal when it has taken `kill_at` steps."""
    program = f"""
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
from tests.training.test_loop import tiny_config
from tfx_jax.training import loop
add = loop.Meter.add
def kill(meter, step, metrics):
    if step == {kill_at!r}:
        os.kill(os.getpid(), {int(signum)})
    return add(meter, step, metrics)
loop.Meter.add = kill
result = loop.train(tiny_config(sys.argv[1]), sys.argv[2])
sys.exit(0 if result.signum is None else 128 + result.signum)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program, str(text), str(workdir)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [2, 7])
def test_killed_and_resumed_equals_uninterrupted(text, uninterrupted, tmp_path, kill_at):
    killed = run_in_process(text, tmp_path, kill_at=kill_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_in_process(text, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    if kill_at > 3:
        assert "resuming at step" in resumed.stderr
    chex.assert_trees_all_equal(whole_state(tmp_path), whole_state(uninterrupted))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_leave(text, uninterrupted, tmp_path, signum):
    stopped = run_in_process(text, tmp_path, kill_at=4, signum=signum)
    assert stopped.returncode == 128 + signum, stopped.stderr
    assert "stopped, saved at step" in stopped.stderr
    newest, _, _ = whole_state(tmp_path)
    assert newest in (4, 5)  # the step under way is finished, no further one begun
    assert run_in_process(text, tmp_path).returncode == 0
    chex.assert_trees_all_equal(whole_state(tmp_path), whole_state(uninterrupted))


def test_finished_training_does_nothing_more(text, uninterrupted):
    before = whole_state(uninterrupted)
    assert train(tiny_config(text), uninterrupted).step == 9
    chex.assert_trees_all_equal(whole_state(uninterrupted), before)


def test_training_can_be_prolonged(text, tmp_path):
    train(tiny_config(text, num_steps=3), tmp_path)
    assert train(tiny_config(text, num_steps=4), tmp_path).step == 4


def test_another_config_is_refused_and_nothing_is_lost(text, uninterrupted):
    before = whole_state(uninterrupted)
    with pytest.raises(UserError, match=r"was made with label_smoothing=0\.1, not 0\.2"):
        train(tiny_config(text, label_smoothing=0.2), uninterrupted)
    chex.assert_trees_all_equal(whole_state(uninterrupted), before)


def test_loss_falls(text, tmp_path):
    losses = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = loop.Progress.log
        monkeypatch.setattr(
            loop.Progress,
            "log",
            lambda self, step, scalars, **rest: (losses.append(scalars), log(self, step, scalars, **rest)),
        )
        train(tiny_config(text, num_steps=30, checkpoint_every=100), tmp_path)
    assert losses[-1]["train/nll"] < losses[0]["train/nll"] - 0.5
    assert losses[9]["train/learning_rate"] == pytest.approx((16 * 10) ** -0.5, rel=1e-6)


def test_non_finite_loss_stops_with_step_and_last_good_checkpoint(text, tmp_path):
    train(tiny_config(text, num_steps=3), tmp_path)
    good = load_params(tmp_path)
    config = tiny_config(text, num_steps=9, checkpoint_every=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        add = loop.Meter.add
        monkeypatch.setattr(
            loop.Meter,
            "add",
            lambda meter, step, metrics: add(meter, step, metrics | {"loss": np.float32(np.nan if step == 5 else 1.0)}),
        )
        with pytest.raises(UserError, match="the loss is nan at step 5; the last good checkpoint is step 4"):
            train(config, tmp_path)
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 4
    chex.assert_trees_all_equal(load_params(tmp_path, 3), good)


def test_diverging_optimizer_really_is_caught(text, tmp_path):
    config = tiny_config(text, num_steps=40, checkpoint_every=100)
    config.optimizer.peak_learning_rate = 1e38
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step \d+; nothing is saved yet"):
        train(config, tmp_path)


def test_evaluations_rank_checkpoints_and_stop_early(text, tmp_path, monkeypatch):
    bleus = iter([3.0, 7.0, 5.0, 6.0, 9.0])

    def evaluate(*_):
        return Evaluation({"bleu": next(bleus), "exact_match": 0.0}, "as it may be")

    monkeypatch.setattr(TranslationExperiment, "evaluate", evaluate)
    config = tiny_config(text, num_steps=9, eval_every=1, patience=2, keep_last=1)
    result = train(config, tmp_path)
    assert [evaluation["bleu"] for evaluation in result.evaluations] == [3.0, 7.0, 5.0, 6.0]
    assert result.step == 4
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [2, 4]
    # Started again, it remembers that it had converged.
    assert train(config, tmp_path).step == 4
    chex.assert_trees_all_equal(load_params(tmp_path, "best"), load_params(tmp_path, 2))
