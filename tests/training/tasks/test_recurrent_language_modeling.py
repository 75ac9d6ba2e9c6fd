"""A language model with a memory in the trainer: streams, resumed trainings, evaluation and generation."""

import io
import math
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tiny import whole_state
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig
from tfx_jax.models.transformer_xl import TransformerXLConfig
from tfx_jax.tasks.text.recurrent_language_modeling import RecurrentLanguageModelConfig, RecurrentLanguageModelTask
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, load_config, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

TEXT = "\n".join(f"{word} and {other} ." for word in "abcdefgh" for other in "qrstuvwxyz") + "\n"
ROWS, LENGTH = 8, 6


def tiny_config(folder):
    config = tiny_variant(ExperimentConfig(model=TransformerXLConfig(), task=RecurrentLanguageModelConfig()))
    data = config.task.data
    data.dataset, data.data_dir, data.train_file, data.validation_share = "files", str(folder), "text.txt", 0.2
    data.tokenizer, data.max_length, data.tokens_per_batch = "characters", LENGTH, ROWS * LENGTH + 1
    config.model.memory_length, config.model.eval_memory_length = 8, 10
    config.task.eval_rows = 3
    config.mesh.data = 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 2
    # 640 characters: thirteen steps an epoch, so that rows change their parts.
    config.num_steps, config.eval_every, config.checkpoint_every = 20, 10, 5
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("work")
    return workdir, train(tiny_config(folder), workdir)


@pytest.mark.slow
def test_training_learns(trained):
    _, result = trained
    first, last = result.evaluations
    assert last["loss"] < first["loss"] < math.log(40)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))


@pytest.mark.slow
def test_resumed_training_is_that_which_went_on_to_the_last_bit(trained, folder, tmp_path):
    """Stopped in the middle of an epoch, with its memories, and after the rows have changed their parts."""
    for num_steps in (7, 14, 20):
        config = tiny_config(folder)
        config.num_steps = num_steps
        train(config, tmp_path)
    step, state, extra = whole_state(tmp_path)
    expected_step, expected, expected_extra = whole_state(trained[0])
    assert (step, extra["data"]) == (expected_step, expected_extra["data"]) == (20, extra["data"])
    chex.assert_trees_all_equal(state, expected)
    memories = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (ROWS, 2, 8, 32)]
    assert len(memories) == 1
    assert np.abs(memories[0]).max() > 0.1


@pytest.mark.slow
def test_a_killed_training_goes_on_with_its_memories(trained, folder, tmp_path):
    """SIGKILL between two checkpoints, in a process of its own."""
    program = f"""
import os, signal
from tests.training.tasks import test_recurrent_language_modeling as module
from tfx_jax.training import loop
log = loop.Progress.log
def dying(self, step, *arguments, **options):
    if step >= 12:
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, step, *arguments, **options)
loop.Progress.log = dying
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
loop.train(module.tiny_config({str(folder)!r}), {str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert whole_state(tmp_path)[0] in (5, 10)
    train(tiny_config(folder), tmp_path)
    chex.assert_trees_all_equal(whole_state(tmp_path)[1], whole_state(trained[0])[1])


@pytest.mark.slow
@pytest.mark.compiles(90, "trains on eight devices and on one, with all the crumbs of saving and restoring")
def test_other_devices_take_the_memories_up(trained, folder, tmp_path):
    """Eight devices for half of the way, with their rows of the memories, are one device for the whole."""
    config = tiny_config(folder)
    config.mesh.data, config.num_steps = 8, 10
    train(config, tmp_path)
    config.mesh.data, config.num_steps = 1, 20
    result = train(config, tmp_path)
    assert result.evaluations[-1]["loss"] == pytest.approx(trained[1].evaluations[-1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_evaluation_is_the_mean_over_all_tokens_of_long_rows(trained):
    """Against calls of the model, segment after segment, of each of three parts by itself."""
    workdir, result = trained
    run = load_run(workdir, RecurrentLanguageModelTask)
    params = load_params(workdir)
    ids = np.array(run.task.tokenizer.encode(TEXT[int(len(TEXT) * 0.8) :]), np.int32)
    model = nnx.merge(run.graphdef, jax.device_put(params))
    call = jax.jit(lambda tokens, memories: model(tokens, memories, memory_length=10))
    size, total = math.ceil((len(ids) - 1) / (3 * LENGTH)) * LENGTH, 0.0
    for part in range(0, len(ids) - 1, size):
        memories = jax.jit(lambda: model.init_memories(1, 10))()
        for start in range(part, min(part + size, len(ids) - 1), LENGTH):
            inputs, targets = ids[start : start + LENGTH][: len(ids) - 1 - start], ids[start + 1 : start + LENGTH + 1]
            row = np.pad(inputs, (0, LENGTH - len(inputs)))[None]  # what follows is not seen
            logits, memories = call(row, memories)
            logits = np.asarray(logits[0], np.float64)[: len(inputs)]
            total += (np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(targets)), targets]).sum()
    assert result.evaluations[-1]["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert run.evaluate(params).metrics["loss"] == result.evaluations[-1]["loss"]


def test_generate_goes_on_with_a_workdir(trained, monkeypatch, capsys):
    """However long the prompt and the text are."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a and q .\nb\n")))
    assert main(["generate", f"--workdir={trained[0]}", "--max-new-tokens=40", "--temperature=0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first[:9], second[:1]) == ("a and q .", "b")
    assert len(first) > 20


def test_rows_are_shared_by_devices(folder, tmp_path):
    config = tiny_config(folder)
    config.task.data.tokens_per_batch = 6 * LENGTH
    run = make_run(config, tmp_path)
    with pytest.raises(UserError, match=r"tokens_per_batch=36 makes 6 rows of max_length=6, which must be a multiple"):
        run.train_data(make_mesh(4))
    assert jax.eval_shape(run.make_carry).inputs.shape == (6, 2, 8, 32)


def test_mistakes_are_one_line(folder, trained):
    config = tiny_config(folder)
    config.model = GPTConfig()
    with pytest.raises(UserError, match="recurrent language modeling needs a model of the kind 'recurrent_decoder'"):
        validate(config)
    config = tiny_config(folder)
    config.model.attention.name = "dense"
    with pytest.raises(UserError, match=r'config\.model\.attention\.name must be "relative" in a Transformer-XL'):
        validate(config)
    assert load_config(trained[0]) == tiny_config(folder)
