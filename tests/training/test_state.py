"""State that is no parameter: what a model keeps, and what examples leave to the next batch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tfx_jax.nn import AuxiliaryLoss, StepMetric
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.checkpoint.checkpoints import Checkpoints, load_params
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch, shard_training
from tfx_jax.training.step import init_state, update

B, T, D = 16, 5, 3
DECAY = 0.9
OPTIMIZER = optax.adam(0.05)
RNG = jax.random.key(0)
EXAMPLES = np.random.default_rng(0).normal(size=(4, B, T, D)).astype(np.float32)


class Recurrent(nnx.Module):
    """Predicts each vector from the one before and a memory, and keeps a running mean of what it has read."""

    def __init__(self):
        self.weight = nnx.Param(0.3 * jnp.eye(D) + 0.1)
        self.mean = nnx.BatchStat(jnp.zeros(D))

    def __call__(self, inputs, memory):
        def step(memory, x):
            memory = jnp.tanh((x - self.mean[...][None]) @ self.weight[...] + 0.5 * memory)
            return memory, memory

        memory, outputs = jax.lax.scan(step, memory, inputs.swapaxes(0, 1))
        return outputs.swapaxes(0, 1), memory


def make_carry():
    return {"memory": jnp.zeros((B, D)), "last": jnp.zeros((B, D))}


def loss(model, batch, rngs, carry):
    del rngs
    x = batch["x"]
    inputs = jnp.concatenate([carry["last"][:, None], x[:, :-1]], axis=1)
    outputs, memory = model(inputs, carry["memory"])
    model.mean[...] = DECAY * model.mean[...] + (1 - DECAY) * x.mean(axis=(0, 1))
    count = jnp.float32(x.size)
    return LossOutput(((outputs - x) ** 2).sum(), count, {}, count, {"memory": memory, "last": x[:, -1]})


def expected_run(batches):
    """The same in float64 NumPy, without learning: the mean loss of each batch, the running mean and the memories."""
    weight, mean = 0.3 * np.eye(D) + 0.1, np.zeros(D)
    memory, last, losses = np.zeros((B, D)), np.zeros((B, D)), []
    for x in batches.astype(np.float64):
        total = 0.0
        for t in range(T):
            memory = np.tanh((last - mean) @ weight + 0.5 * memory)
            total += ((memory - x[:, t]) ** 2).sum()
            last = x[:, t]
        losses.append(total / x.size)
        mean = DECAY * mean + (1 - DECAY) * x.mean(axis=(0, 1))
    return losses, mean, memory


@functools.cache
def training(num_devices=1, optimizer=OPTIMIZER, **options):
    mesh = make_mesh(num_devices)
    return mesh, shard_training(mesh, Recurrent, loss, optimizer, make_carry=make_carry, **options)


def run(trained_on, state, batches):
    mesh, (step_fn, *_) = trained_on
    losses = []
    for x in batches:
        state, metrics = step_fn(state, shard_batch({"x": x}, mesh), RNG)
        losses.append(float(metrics.means["loss"].mean))
    return state, losses


def test_batches_go_on_where_the_last_one_ended():
    frozen = training(optimizer=optax.sgd(0.0))
    state, losses = run(frozen, frozen[1].first_state(), EXAMPLES)
    expected_losses, mean, memory = expected_run(EXAMPLES)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(state.model_state["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(state.carry["memory"], memory, rtol=1e-4, atol=1e-6)
    assert state.params.keys() == {"weight"}
    assert state.variables.keys() == {"weight", "mean"}


def test_no_gradient_and_no_moment_is_of_what_is_no_parameter():
    state = jax.eval_shape(training()[1].first_state)
    assert state.opt_state[0].mu.keys() == {"weight"}


def test_eight_devices_equal_one():
    state, losses = run(training(8), training(8)[1].first_state(), EXAMPLES)
    expected, expected_losses = run(training(), training()[1].first_state(), EXAMPLES)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(expected), rtol=1e-5, atol=1e-6)
    assert {shard.data.shape for shard in state.carry["memory"].addressable_shards} == {(B // 8, D)}


def test_parts_of_a_batch_have_their_rows_of_the_carry():
    """The model is another one for each part, as its running mean moves on: so that is left out."""

    def without_mean(model, batch, rngs, carry):
        output = loss(model, batch, rngs, carry)
        model.mean[...] = jnp.zeros(D)
        return output

    graphdef, first_state = init_state(Recurrent, OPTIMIZER, make_carry=make_carry)
    whole, parts = (
        jax.jit(functools.partial(update, graphdef, without_mean, OPTIMIZER, accumulate=accumulate))
        for accumulate in (1, 4)
    )
    states = [jax.jit(first_state)()] * 2
    for x in EXAMPLES:
        states = [step(state, {"x": x}, RNG)[0] for step, state in zip((whole, parts), states, strict=True)]
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)


def test_pmap_equals_jit():
    """Each device has its rows of the carry, and all have the mean of their running means."""
    graphdef, first_state = init_state(Recurrent, OPTIMIZER, make_carry=make_carry)
    step_fn = jax.pmap(functools.partial(update, graphdef, loss, OPTIMIZER, axis_name="data"), axis_name="data")
    first = jax.jit(first_state)()
    state = jax.tree.map(lambda leaf: np.stack([leaf] * 8), first._replace(carry=None))
    state = state._replace(carry=jax.tree.map(lambda rows: rows.reshape(8, -1, D), first.carry))
    keys = jax.random.wrap_key_data(np.stack([jax.random.key_data(RNG)] * 8))
    for x in EXAMPLES:
        state, _ = step_fn(state, {"x": x.reshape(8, -1, T, D)}, keys)
    expected, _ = run(training(), training()[1].first_state(), EXAMPLES)
    mine = jax.tree.map(lambda leaf: leaf[0], state._replace(carry=None))
    mine = mine._replace(carry=jax.tree.map(lambda rows: rows.reshape(B, D), state.carry))
    chex.assert_trees_all_close(jax.device_get(mine), jax.device_get(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_resumed_training_is_that_which_went_on_to_the_last_bit(tmp_path, num_devices):
    trained_on = training(num_devices)
    middle, _ = run(trained_on, trained_on[1].first_state(), EXAMPLES[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(middle, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore_latest(trained_on[1].abstract_state)
    saved = jax.device_get(middle)
    chex.assert_trees_all_equal(jax.device_get(restored), saved)
    chex.assert_trees_all_equal(load_params(tmp_path), saved.variables)
    expected, _ = run(trained_on, middle, EXAMPLES[2:])
    resumed, _ = run(trained_on, restored, EXAMPLES[2:])
    chex.assert_trees_all_equal(jax.device_get(resumed), jax.device_get(expected))


def test_a_bad_step_leaves_model_state_and_carry():
    trained_on = training(skip_bad_steps=True)
    state, _ = run(trained_on, trained_on[1].first_state(), EXAMPLES[:1])
    before = jax.device_get(state)
    after, _ = run(trained_on, state, np.full_like(EXAMPLES[:1], np.nan))
    assert after.skip_state.in_a_row == 1
    chex.assert_trees_all_equal((after.model_state, after.carry), (before.model_state, before.carry))


def test_a_model_that_keeps_random_keys_is_refused_by_name():
    """They would be saved, restored and divided like weights, and be the same at every step."""

    class Drops(Recurrent):
        def __init__(self):
            super().__init__()
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"^Drops keeps random keys in dropout/rngs/count: use `rngs` in the "):
        jax.eval_shape(init_state(Drops, OPTIMIZER)[1])


class Constrained(nnx.Module):
    """Predicts w for each x, and asks for a small w in training."""

    def __init__(self):
        self.w = nnx.Param(jnp.full((), 3.0))
        self.penalty = AuxiliaryLoss(jnp.zeros(()))
        self.size = StepMetric(jnp.zeros(()))

    def __call__(self, rngs=None):
        if rngs is not None:
            self.penalty[...], self.size[...] = 0.1 * self.w[...] ** 2, abs(self.w[...])
        return self.w[...]


def distance(model, batch, rngs):
    count = jnp.float32(batch["x"].size)
    return LossOutput(((model(rngs) - batch["x"]) ** 2).sum(), count, {}, count)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_a_part_of_the_model_adds_to_the_loss_is_learned_and_told_by_its_name(accumulate):
    optimizer, x = optax.sgd(0.25), EXAMPLES[0, :, 0, 0]
    graphdef, first_state = init_state(Constrained, optimizer)

    @jax.jit
    def step(x):
        return update(graphdef, distance, optimizer, first_state(), {"x": x}, RNG, accumulate=accumulate)

    state, metrics = step(x)
    np.testing.assert_allclose(state.params["w"], 3 - 0.25 * (2 * (3 - x.mean()) + 0.2 * 3), rtol=1e-6)
    np.testing.assert_allclose(metrics.means["size"].mean, 3)
    np.testing.assert_allclose(metrics.means["loss"].mean, ((3 - x) ** 2).mean(), rtol=1e-5)
