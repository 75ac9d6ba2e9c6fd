"""Attention chosen by a configuration: from the command line to a step on eight devices, or one line."""

import dataclasses
import pathlib

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from tests.attentions import CAUSAL, ON_CPU, example
from tfx_jax.cli.train import load_config_file
from tfx_jax.errors import UserError
from tfx_jax.functional.attention import SPECS
from tfx_jax.models import GPT, BertClassifier, BertConfig, GPTConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks.text.classification import classification_loss
from tfx_jax.tasks.text.language_modeling import language_model_loss
from tfx_jax.training.config import OptimizerConfig, load_config, save_config, validate
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch, shard_training

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
QUICK = ("window", "general")
"""One without parameters of its own, and one with; the others take the same way."""


def classifier_training(mesh, attention):
    """Of a BERT, whose attention may see the future."""
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 32, "dropout_rate": 0.0}
    config = BertConfig(24, max_length=8, labels=("a", "b"), attention=attention, attention_dropout_rate=0.0, **sizes)
    return shard_training(
        mesh,
        lambda: BertClassifier(config, rngs=nnx.Rngs(params=0)),
        classification_loss,
        make_optimizer(OptimizerConfig(warmup_steps=2, peak_learning_rate=0.05), config.d_model),
    )


def classifier_batch():
    tokens = np.random.default_rng(0).integers(1, 24, (8, 8)).astype(np.int32)
    batch = {"tokens": tokens, "token_type_ids": tokens * 0, "token_mask": tokens > 0}
    return batch | {"label": tokens[:, 0] % 2, "row_weights": np.ones(8, np.float32)}


@pytest.mark.slow
def test_centroids_are_state_that_training_moves_and_evaluation_does_not():
    """On eight devices as on one; no gradient and no moment is of them."""
    options = AttentionOptions(num_clusters=3, window=4, decay=0.5)  # of centroids that move fast
    attention = AttentionConfig("routing", options)
    states = []
    for mesh in (make_mesh(1), make_mesh(8)):
        training = classifier_training(mesh, attention)
        state = training.first_state()
        first = jax.device_get(state.model_state)
        for _ in range(2):
            state, metrics = training.step_fn(state, shard_batch(classifier_batch(), mesh), jax.random.key(3))
        states.append(jax.device_get((state, metrics.means)))
    chex.assert_trees_all_close(*states, rtol=1e-4, atol=1e-4)
    state = states[0][0]
    (centroids,) = jax.tree.leaves(state.model_state)
    assert centroids.shape == (2, 4, 3, 4)  # layers, heads, clusters, size
    assert np.abs(centroids - jax.tree.leaves(first)[0]).max(axis=(1, 2, 3)).min() > 0.01
    moments = jax.tree_util.tree_leaves_with_path(state.opt_state)
    assert not [path for path, _ in moments if "centroids" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CAUSAL])
def test_two_steps_on_eight_devices_are_those_on_one(name):
    attention = example(name, length=8)
    config = GPTConfig(24, max_length=8, num_layers=1, d_model=16, num_heads=4, d_ff=32, attention=attention)
    tokens = np.random.default_rng(0).integers(1, 24, (8, 8)).astype(np.int32)
    batch = {"inputs": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": np.ones((8, 8), np.float32)}
    losses = {}
    for mesh in (make_mesh(fsdp=2, tensor=2), make_mesh(1)):
        config = dataclasses.replace(config, dropout_rate=0.0, attention_dropout_rate=0.0)
        training = shard_training(
            mesh,
            lambda: GPT(config, rngs=nnx.Rngs(params=0)),  # noqa: B023
            language_model_loss,
            make_optimizer(OptimizerConfig(warmup_steps=2, peak_learning_rate=0.05), config.d_model),
        )
        state, losses[mesh.size] = training.first_state(), []
        for _ in range(2):
            state, metrics = training.step_fn(state, shard_batch(batch, mesh), jax.random.key(3))
            losses[mesh.size].append(float(metrics.means["loss"].mean))
    np.testing.assert_allclose(losses[8], losses[1], atol=2e-5)
    assert losses[1][1] < losses[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_CPU if not SPECS[name].causal])
def test_two_steps_of_an_encoder_on_eight_devices_are_those_on_one(name):
    """With what has no causal form, and so no place above."""
    attention, losses = example(name, length=8), {}
    for mesh in (make_mesh(fsdp=2, tensor=2), make_mesh(1)):
        training = classifier_training(mesh, attention)
        state, losses[mesh.size] = training.first_state(), []
        for _ in range(2):
            state, metrics = training.step_fn(state, shard_batch(classifier_batch(), mesh), jax.random.key(3))
            losses[mesh.size].append(float(metrics.means["loss"].mean))
    np.testing.assert_allclose(losses[8], losses[1], atol=2e-5)
    assert abs(losses[1][1] - losses[1][0]) > 1e-4  # the first step moved the model


def configured(*overrides, experiment="gpt_char_tinyshakespeare"):
    overrides = [f"--config.{override}" for override in overrides]
    return validate(load_config_file(f"{EXPERIMENTS / experiment}.py:test", overrides))


def test_the_command_line_names_an_attention_and_its_options():
    config = configured("model.attention.name=window", "model.attention.options.window=64")
    assert config.model.attention == AttentionConfig("window", AttentionOptions(window=64))


def test_a_workdir_remembers_its_attention(tmp_path):
    config = configured("model.attention.name=lsh", "model.attention.options.num_buckets=4")
    save_config(config, tmp_path)
    assert load_config(tmp_path).model.attention == config.model.attention
    with pytest.raises(UserError, match=r"model\.attention\.name='lsh', not 'dense'"):
        save_config(configured(), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=bigbird"], r"config\.model: bigbird attention needs attention\.options\.block_size"),
        (["name=lsh"], r"config\.model: lsh attention needs attention\.options\.num_buckets"),
        (["name=window"], r"config\.model: window attention needs attention\.options\.window"),
        (["options.window=3"], r"config\.model\.attention\.options\.window is not an option of dense attention"),
        (["name=dense,chunked"], r"config\.model\.num_layers=1 is no multiple of the 2 layers of the pattern"),
        (["name=no"], r"config\.model\.attention\.name='no' must be one of dense, chunked"),
        (["option.window=3"], r"did you mean config\.model\.attention\.options\.window"),
    ],
)
def test_what_an_attention_cannot_be_is_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        configured(*(f"model.attention.{override}" for override in overrides))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["num_experts=1", "experts_per_token=2"],
            r"experts\.num_experts=1 must be at least experts\.experts_per_token=2",
        ),
        (["capacity_factor=0"], r"config\.model\.experts\.capacity_factor must be above 0"),
        (
            ["num_experts=4", "num_expert_groups=3"],
            r"config\.model\.experts: num_expert_groups=3 does not divide the 4",
        ),
        (
            ["use_shared_gate=true"],
            r"config\.model\.experts\.use_shared_gate needs a shared network: set experts\.shared",
        ),
        (["num_experts=3", "every=1", "num_experts=3"], r"config\.mesh\.expert=2 does not divide .*num_experts=3"),
        (["num_experts=4"], r"config\.model\.num_layers=1 is no multiple of the 2 layers of the pattern"),
    ],
)
def test_what_experts_cannot_be_is_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        configured(*(f"model.experts.{override}" for override in overrides), "mesh.expert=2")
    assert "\n" not in str(raised.value)


def test_a_mesh_that_divides_positions_wants_dense_attention():
    with pytest.raises(UserError, match=r"config\.mesh\.sequence=2 shards positions, which window attention does not"):
        configured(
            "model.attention.name=window",
            "model.attention.options.window=3",
            "mesh.sequence=2",
            experiment="transformer_demo",
        )


@pytest.mark.parametrize(("name", "length"), [("splash", 8), ("dense", 1024)])
def test_kernels_of_accelerators_train_on_several_devices(name, length):
    """As far as programs are lowered; where there is no accelerator, one line says so of those that were named."""
    sizes = {"max_length": length, "num_layers": 1, "d_model": 16, "num_heads": 4, "d_ff": 32}
    config = GPTConfig(24, attention=AttentionConfig(name), attention_dropout_rate=0.0, **sizes)
    training = shard_training(
        make_mesh(4, tensor=2),
        lambda: GPT(config, rngs=nnx.Rngs(params=0)),
        language_model_loss,
        make_optimizer(OptimizerConfig(), config.d_model),
    )
    batch = {name: jax.ShapeDtypeStruct((8, length), np.int32) for name in ("inputs", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct((8, length), np.float32)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    step = training.step_fn.trace(training.abstract_state, batch, rng)
    assert "tpu_custom_call" in step.lower(lowering_platforms=("tpu",)).as_text()
    if name == "splash":
        with pytest.raises(ValueError, match=r"implementation='splash' needs a TPU, got platform 'cpu'"):
            step.lower()
