"""Balancing of experts by a bias that training steps change: against NumPy, in parts, on a mesh, and its effect."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.nn.programs import draw, jitted
from tfx_jax.nn import ExpertsConfig, Frozen, balance_experts, scan_layers, stack_layers
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch, shard_training

L, B, T, D, E, A, STEPS = 2, 16, 6, 8, 4, 2, 5
CONFIG = ExpertsConfig(
    num_experts=E,
    experts_per_token=A,
    router_scores="sigmoid",
    use_correction_bias=True,
    bias_speed=0.03,
    load_balancing=0.0,
    router_z_loss=0.0,
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
MASK = RNG.random((B, T)) < 0.8
ROUTERS = 0.5 * RNG.normal(size=(L, D, E)).astype(np.float32)
X[..., 0] = 1.0
ROUTERS[:, 0] = [0.5, 0.25, 0.0, -0.25]  # all tokens have this feature, so most prefer the first experts


class Layers(nnx.Module):
    """A stack of mixtures of experts that all read the same tokens."""

    def __init__(self):
        make = functools.partial(CONFIG.make, D, 3)
        self.encoder_layers = stack_layers(lambda rngs: make(rngs=rngs), L, nnx.Rngs(params=0))
        self.encoder_layers.router[...] = jnp.asarray(ROUTERS)

    def __call__(self, x, mask, rngs):
        def run(layer, x, rngs):
            return x, layer(x, token_mask=mask, rngs=rngs)

        return scan_layers(run, self.encoder_layers, x, rngs)[1].sum(axis=0)


def loss_fn(model, batch, rngs):
    count = batch["mask"].sum().astype(jnp.float32)
    loss = jnp.square(model(batch["x"], batch["mask"], rngs) - batch["x"]).sum()
    return LossOutput(loss, count, {}, count)


def train(mesh, *, learning_rate=0.0, num_steps=STEPS, **options):
    """Returns biases [steps, L, E] after each step, and the last state."""
    training = shard_training(mesh, Layers, loss_fn, optax.sgd(learning_rate), **options)
    state, biases = training.first_state(), []
    batch = shard_batch({"x": X, "mask": MASK}, mesh)
    for _ in range(num_steps):
        state, _ = training.step_fn(state, batch, jax.random.key(0))
        layers = state.model_state["encoder_layers"]
        assert not np.asarray(layers["load"]).any()
        biases.append(np.asarray(layers["correction_bias"]))
    return np.array(biases), state


def loads(routers, bias):
    """The loads of the experts in float64, [L, E]."""
    x = np.float64(X[MASK])
    scores = 1 / (1 + np.exp(-np.einsum("TD,LDE->LTE", x, np.float64(routers))))
    chosen = np.argsort(-(scores + np.float64(bias)[:, None]), axis=-1)[..., :A]
    return np.array([np.bincount(layer.reshape(-1), minlength=E) for layer in chosen])


@functools.cache
def expected():
    """The biases after each step, by algorithm 1 of Wang et al. (2024)."""
    bias, biases = np.zeros((L, E)), []
    for _ in range(STEPS):
        load = loads(ROUTERS, bias)
        for layer in range(L):
            for expert in range(E):
                error = load[layer].sum() / E - load[layer, expert]
                bias[layer, expert] += CONFIG.bias_speed * np.sign(error)
        biases.append(bias.copy())
    return np.array(biases)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_biases_are_those_of_the_paper(accumulate):
    biases, _ = train(make_mesh(1), accumulate=accumulate)
    np.testing.assert_allclose(biases, expected(), atol=1e-6)
    assert len(np.unique(expected())) > 5


def test_a_mesh_counts_the_tokens_of_all_devices():
    biases, state = train(make_mesh(2, fsdp=2, expert=2), accumulate=2)
    np.testing.assert_allclose(biases, expected(), atol=1e-6)
    assert len(state.params["encoder_layers"]["router"].sharding.device_set) == 8


def test_loads_become_more_even():
    """Of a router that training does not change, most of whose tokens prefer the same experts."""

    def spread(bias):
        load = loads(ROUTERS, bias)
        return load.max(axis=1) / load.mean(axis=1)

    biases, _ = train(make_mesh(1), num_steps=40)
    before, after = spread(np.zeros((L, E))), spread(biases[-1])
    assert (before > 1.2).all()
    assert (after - 1 < 0.5 * (before - 1)).all()


def test_a_router_that_is_not_trained_keeps_its_bias():
    layer = draw(lambda: CONFIG.make(D, 3, rngs=nnx.Rngs(0)))
    layer.load[...] = np.arange(4, dtype=np.float32)
    layer.router = Frozen(layer.router[...])

    @jitted
    def balanced(layer):
        balance_experts(layer)
        return layer.correction_bias[...], layer.load[...]

    bias, load = balanced(layer)
    np.testing.assert_array_equal(bias, layer.correction_bias[...])
    assert not load.any()


def test_evaluation_counts_nothing():
    layer = draw(lambda: CONFIG.make(D, 3, rngs=nnx.Rngs(0)))
    layer.load[...] = np.zeros(E, np.float32)

    @jitted
    def load_after(layer, rngs):
        layer(X, rngs=rngs)
        return layer.load[...]

    assert not load_after(layer, None).any()
    assert load_after(layer, nnx.Rngs(dropout=0)).sum() == B * T * A
