"""The training step: the same on any number of devices, in either style of parallelism, however tokens are spread."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.tasks.translation import translation_loss
from tfx_jax.training.config import OptimizerConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding import DATA_PARALLEL, make_mesh, shard_batch, state_shardings
from tfx_jax.training.step import TrainState, init_state, jit_update, update

B, S, T, V = 16, 5, 7, 11
NUM_STEPS = 4
LOSS = functools.partial(translation_loss, label_smoothing=0.1)
ADAM = make_optimizer(OptimizerConfig(warmup_steps=2, peak_learning_rate=0.01), d_model=8)
RNG = jax.random.key(7)


def make_model(dropout_rate=0.0, seed=0):
    config = TransformerConfig(V, num_layers=1, d_model=8, num_heads=2, d_ff=12, dropout_rate=dropout_rate)
    return Transformer(config, rngs=nnx.Rngs(params=seed))


def make_batch(seed, lengths):
    """One row for each of the target `lengths`, the sources of other lengths; 0 makes a row of padding."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    batch = {"source": rng.integers(3, V, (len(lengths), S)), "target": rng.integers(3, V, (len(lengths), T))}
    for side, size in (("source", S), ("target", T)):
        kept = np.minimum(lengths, size)
        batch[side][np.arange(size) >= kept[:, None]] = 0
    return {side: tokens.astype(np.int32) for side, tokens in batch.items()}


# From shard to shard very different numbers of tokens; with eight devices, two of them have none at all.
UNEVEN = [make_batch(seed, np.roll([7, 7, 7, 6, 5, 1, 0, 0, 3, 2, 7, 4, 0, 0, 1, 1], 2 * seed)) for seed in range(4)]


def prepare(num_devices, dropout_rate=0.0, optimizer=ADAM):
    """A compiled step, the first state and the mesh."""
    mesh = make_mesh(num_devices)
    graphdef, first_state = init_state(functools.partial(make_model, dropout_rate), optimizer)
    shardings = state_shardings(jax.eval_shape(first_state), mesh, DATA_PARALLEL)
    state = jax.jit(first_state, out_shardings=shardings)()
    return jit_update(graphdef, LOSS, optimizer, shardings), state, mesh


@functools.cache
def train(num_devices, dropout_rate):
    """The state and the metrics of a few steps, with the compiled step."""
    step_fn, state, mesh = prepare(num_devices, dropout_rate)
    history = []
    for batch in UNEVEN:
        state, metrics = step_fn(state, shard_batch(batch, mesh), RNG)
        history.append(jax.device_get(metrics))
    return state, history, step_fn


@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_eight_devices_equal_one(dropout_rate):
    """Measured: losses to 1.2e-7 relative, parameters to 6e-8 absolute where a step moves them by up to 1e-2."""
    state, history, _ = train(8, dropout_rate)
    expected_state, expected_history, _ = train(1, dropout_rate)
    assert len(state.params["embedding"]["table"].devices()) == 8
    assert len(expected_state.params["embedding"]["table"].devices()) == 1
    chex.assert_trees_all_close(history, expected_history, rtol=1e-6)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(expected_state.params), rtol=1e-6, atol=1e-6
    )
    chex.assert_trees_all_equal(state.step, expected_state.step, NUM_STEPS)


def test_dropout_is_on_when_it_is_asked_for():
    with_dropout, without = train(1, 0.3)[1], train(1, 0.0)[1]
    assert abs(with_dropout[0]["loss"] / without[0]["loss"] - 1) > 1e-3


def test_step_compiles_once_for_each_shape():
    _, _, step_fn = train(8, 0.0)
    assert step_fn._cache_size() == 1
    # The outputs have the shardings of the inputs, or a further step would compile again.
    state, _, _ = train(8, 0.0)
    replicated = jax.sharding.NamedSharding(make_mesh(8), jax.sharding.PartitionSpec())
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {replicated}
    step_fn(jax.tree.map(jnp.copy, state), shard_batch(make_batch(0, [3] * 8), make_mesh(8)), RNG)
    assert step_fn._cache_size() == 2


def test_state_is_donated():
    step_fn, state, mesh = prepare(1)
    step_fn(state, shard_batch(UNEVEN[0], mesh), RNG)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_resumed_run_draws_the_masks_it_would_have_drawn():
    """From a copy of the state in the middle, with the same key: the same bits at the end."""
    step_fn, state, mesh = prepare(1, dropout_rate=0.3)
    batches = [shard_batch(batch, mesh) for batch in UNEVEN]
    for batch in batches[:2]:
        state, _ = step_fn(state, batch, RNG)
    middle = jax.tree.map(lambda leaf: np.array(leaf), state)
    sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
    for batch in batches[2:]:
        state, _ = step_fn(state, batch, RNG)
    resumed = jax.device_put(middle, sharding)
    for batch in batches[2:]:
        resumed, _ = step_fn(resumed, batch, RNG)
    chex.assert_trees_all_equal(resumed, state)


def test_steps_draw_different_masks():
    """The same parameters and batch at another step: another loss."""
    step_fn, state, mesh = prepare(1, dropout_rate=0.3)
    later = TrainState(state.step + 1, *jax.tree.map(jnp.copy, (state.params, state.opt_state)))
    batch = shard_batch(UNEVEN[0], mesh)
    losses = [float(step_fn(start, batch, RNG)[1]["loss"]) for start in (state, later)]
    assert abs(losses[0] / losses[1] - 1) > 1e-3


def replicate(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), tree)


def test_pmap_equals_jit():
    """The classic style: every device holds a replica of the state and gets its rows of the batch."""
    graphdef, first_state = init_state(make_model, ADAM)
    step_fn = jax.pmap(functools.partial(update, graphdef, LOSS, ADAM, axis_name="data"), axis_name="data")
    state = replicate(jax.jit(first_state)())
    history = []
    for batch in UNEVEN:
        shards = {side: rows.reshape(8, B // 8, -1) for side, rows in batch.items()}
        state, metrics = step_fn(state, shards, replicate(RNG))
        history.append(jax.device_get(metrics))
    expected_state, expected_history, _ = train(8, 0.0)
    for replica in range(8):
        mine = jax.tree.map(lambda leaf, replica=replica: np.asarray(leaf[replica]), (state.params, history[-1]))
        expected = jax.device_get((expected_state.params, expected_history[-1]))
        chex.assert_trees_all_close(mine, expected, rtol=1e-6, atol=1e-6)
    # The replicas stay equal to the last bit, or they would drift apart.
    first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), state)
    chex.assert_trees_all_equal(state, first)


def test_pmap_draws_a_mask_of_its_own_on_each_device():
    class Draws(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(()))

    def drawn(model, batch, rngs):
        value = jax.random.uniform(rngs.dropout())
        return model.weight[...] * value, {"tokens": jnp.ones(()), "squares": value**2}

    graphdef, first_state = init_state(Draws, optax.sgd(0.1))
    step_fn = jax.pmap(functools.partial(update, graphdef, drawn, optax.sgd(0.1), axis_name="data"), axis_name="data")
    _, metrics = step_fn(replicate(first_state()), {"rows": np.zeros((8, 2))}, replicate(RNG))
    mean, mean_square = float(metrics["loss"][0]) / 8, float(metrics["squares"][0]) / 8
    assert mean_square - mean**2 > 0.01


@pytest.fixture(scope="module")
def sgd():
    """gradient(batch) -> (gradient, metrics) of the first parameters, read off a step of plain gradient descent."""
    optimizer = optax.sgd(1.0)
    step_fn, state, mesh = prepare(1, optimizer=optimizer)
    sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
    first = jax.tree.map(lambda leaf: np.array(leaf), state)

    def gradient(batch):
        after, metrics = step_fn(jax.device_put(first, sharding), shard_batch(batch, mesh), RNG)
        moved = jax.tree.map(lambda old, new: old.astype(np.float64) - new, first.params, jax.device_get(after.params))
        return moved, jax.device_get(metrics)

    return gradient


def masked(batch, keep):
    return {side: np.where(keep[:, None], rows, 0) for side, rows in batch.items()}


def test_every_token_weighs_the_same(sgd):
    """The gradient of a batch is the token-weighted mean over any two parts of it, however uneven."""
    batch = UNEVEN[0]
    whole, metrics = sgd(batch)
    assert metrics["tokens"] == np.count_nonzero(batch["target"]) == 51
    in_first = np.arange(B) < 3
    (first, first_metrics), (second, second_metrics) = sgd(masked(batch, in_first)), sgd(masked(batch, ~in_first))
    assert (first_metrics["tokens"], second_metrics["tokens"]) == (21, 30)
    expected = jax.tree.map(lambda one, other: (21 * one + 30 * other) / 51, first, second)
    chex.assert_trees_all_close(whole, expected, atol=3e-7)
    for name in ("loss", "nll", "correct"):
        np.testing.assert_allclose(metrics[name], first_metrics[name] + second_metrics[name], rtol=1e-6)


def test_rows_of_padding_change_nothing(sgd):
    batch = make_batch(5, [7, 0, 4, 2])
    padded = {side: np.concatenate([rows, np.zeros((B - 4, rows.shape[1]), np.int32)]) for side, rows in batch.items()}
    expected, expected_metrics = sgd(batch)
    gradient, metrics = sgd(padded)
    chex.assert_trees_all_close(gradient, expected, atol=3e-7)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-6)


def test_batch_of_padding_alone_changes_nothing(sgd):
    gradient, metrics = sgd(make_batch(0, [0] * B))
    chex.assert_trees_all_equal(gradient, jax.tree.map(np.zeros_like, gradient))
    assert set(metrics.values()) == {0.0}


def test_batch_of_padding_alone_leaves_adam_to_its_own_decay():
    """A gradient of exactly zero: the moments shrink by b1 and b2, and the parameters follow the old momentum."""
    step_fn, state, mesh = prepare(1)
    state, _ = step_fn(state, shard_batch(UNEVEN[0], mesh), RNG)
    before = jax.tree.map(lambda leaf: np.array(leaf), state)
    state, metrics = step_fn(state, shard_batch(make_batch(0, [0] * B), mesh), RNG)
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0.0
    old, new = before.opt_state[0], state.opt_state[0]
    chex.assert_trees_all_close(new.mu, jax.tree.map(lambda leaf: 0.9 * leaf, old.mu), rtol=1e-6)
    chex.assert_trees_all_close(new.nu, jax.tree.map(lambda leaf: 0.98 * leaf, old.nu), rtol=1e-6)
    expected = jax.tree.map(
        lambda weight, mu, nu: weight - 0.01 * (0.9 * mu / (1 - 0.9**2)) / (np.sqrt(0.98 * nu / (1 - 0.98**2)) + 1e-9),
        before.params,
        old.mu,
        old.nu,
    )
    chex.assert_trees_all_close(state.params, expected, atol=1e-6)


def test_first_state_is_the_drawn_model():
    graphdef, first_state = init_state(functools.partial(make_model, seed=3), ADAM)
    state = first_state()
    expected = nnx.to_pure_dict(nnx.state(make_model(seed=3)))
    chex.assert_trees_all_equal(state.params, expected)
    assert state.step == 0
    assert state.step.dtype == jnp.int32
    chex.assert_trees_all_equal(state.opt_state[0].mu, jax.tree.map(jnp.zeros_like, expected))
    assert not jax.tree.leaves(graphdef)  # the definition holds no array


def test_metrics_are_sums_with_the_norm_of_the_gradient(sgd):
    gradient, metrics = sgd(UNEVEN[1])
    assert set(metrics) == {"tokens", "nll", "correct", "loss", "grad_norm"}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["loss"] / metrics["tokens"] > np.log(V) * 0.5
