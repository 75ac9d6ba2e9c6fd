"""The mixture of experts as a module: its parameters, its start, its dtype; the formula is tested in functional."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.functional.oracles import moe as oracle
from tfx_jax.functional import load_balancing_loss, router_z_loss, top_2_routing
from tfx_jax.nn import FeedForward, MixtureOfExperts

B, T, D, F, E = 2, 5, 6, 10, 4


def _layer(**options):
    layer = MixtureOfExperts(D, F, E, **options, rngs=nnx.Rngs(0))
    layer.experts.up_bias[...] = jnp.linspace(-1.0, 1.0, E * F).reshape(E, F)
    layer.experts.down_bias[...] = jnp.linspace(2.0, 3.0, E * D).reshape(E, D)
    return layer


def _x():
    return jax.random.normal(jax.random.key(1), (B, T, D))


_apply = jax.jit(lambda layer, x, mask=None: layer(x, mask=mask))


def _expected(layer, capacity, num_choices, mask=None):
    def one(expert):
        params = (layer.experts.up, layer.experts.up_bias, layer.experts.down, layer.experts.down_bias)
        up, up_bias, down, down_bias = (np.asarray(param[expert], np.float64) for param in params)
        return lambda x: np.maximum(x @ up + up_bias, 0) @ down + down_bias

    x = np.asarray(_x(), np.float64).reshape(-1, D)
    logits = x @ np.asarray(layer.router[...], np.float64)
    out = oracle.mixture(x, logits, [one(expert) for expert in range(E)], capacity, num_choices, mask)
    return out.reshape(B, T, D), logits.astype(np.float32)


def test_equals_the_oracle_with_both_losses():
    for options, capacity, num_choices in (
        ({}, 4, 1),  # 1.25 * 10 tokens / 4 experts, rounded up
        ({"capacity_factor": 0.4}, 1, 1),
        ({"routing_fn": top_2_routing, "capacity_factor": 2.0}, 5, 2),
    ):
        layer = _layer(**options)
        y, losses = _apply(layer, _x())
        want, logits = _expected(layer, capacity, num_choices)
        np.testing.assert_allclose(y, want, atol=1e-5)
        chex.assert_trees_all_close(tuple(losses), (load_balancing_loss(logits), router_z_loss(logits)), rtol=1e-5)


def test_padding_is_sent_nowhere():
    layer, mask = _layer(capacity_factor=0.8), jnp.arange(B * T) % 4 > 0
    y, losses = _apply(layer, _x(), mask.reshape(B, T))
    want, logits = _expected(layer, 2, 1, mask)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_array_equal(y.reshape(-1, D)[~mask], 0)
    np.testing.assert_allclose(losses.load_balancing, load_balancing_loss(logits[mask]), rtol=1e-5)


def test_one_expert_is_a_feed_forward_network():
    one = MixtureOfExperts(D, F, 1, rngs=nnx.Rngs(0))
    dense = FeedForward(D, F, rngs=nnx.Rngs(1))
    for name in ("up", "up_bias", "down", "down_bias"):
        getattr(dense, name)[...] = getattr(one.experts, name)[0]
    np.testing.assert_allclose(_apply(one, _x())[0], dense(_x()), atol=1e-6)


def test_every_expert_starts_as_a_feed_forward_network_of_its_own():
    layer = MixtureOfExperts(64, 256, 3, rngs=nnx.Rngs(0))
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(layer)))
    experts = {"up": (3, 64, 256), "up_bias": (3, 256), "down": (3, 256, 64), "down_bias": (3, 64)}
    assert shapes == {"router": (64, 3), "experts": experts}
    limit = math.sqrt(6 / (64 + 256))
    for kernels in (layer.experts.up, layer.experts.down):
        for kernel in kernels[...]:
            assert 0.99 * limit < jnp.abs(kernel).max() <= limit
        assert jnp.abs(kernels[0] - kernels[1]).max() > 0.1 * limit
    assert not layer.experts.up_bias[...].any()
    assert not layer.experts.down_bias[...].any()


def test_gradients_reach_the_router_and_the_chosen_experts():
    layer = _layer()
    graphdef, params = nnx.split(layer)

    def loss(params):
        y, losses = nnx.merge(graphdef, params)(_x())
        return jnp.square(y).sum() + losses.load_balancing + losses.z

    gradients = jax.jit(jax.grad(loss))(params)
    chex.assert_tree_all_finite(gradients)
    for gradient in jax.tree.leaves(gradients):
        assert jnp.abs(gradient).max() > 0


def test_drops_hidden_units_only_with_rngs():
    layer, dropping = _layer(), _layer(dropout_rate=0.5)
    y = layer(_x())[0]
    np.testing.assert_array_equal(dropping(_x())[0], y)
    np.testing.assert_array_equal(layer(_x(), rngs=nnx.Rngs(params=0))[0], y)
    assert jnp.abs(dropping(_x(), rngs=nnx.Rngs(0))[0] - y).max() > 1e-2


def test_bfloat16_computes_in_bfloat16_on_float32_parameters_with_a_float32_router():
    layer = _layer(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(layer)), jnp.float32)
    y, losses = _apply(layer, _x())
    chex.assert_type((y, *losses), (jnp.bfloat16, jnp.float32, jnp.float32))
    plain, same = _apply(_layer(), _x())
    np.testing.assert_allclose(y.astype(jnp.float32), plain, atol=0.06)
    chex.assert_trees_all_equal(losses, same)
