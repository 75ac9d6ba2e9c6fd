"""The mixture of experts as a module: its parameters, its start, its dtype; the formula is tested in functional."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.functional.oracles import moe as oracle
from tests.nn.programs import draw, initial, jitted, normal, params_of
from tfx_jax.errors import UserError
from tfx_jax.functional import load_balancing_loss, router_z_loss, top_2_routing, top_k_routing
from tfx_jax.nn import ExpertsConfig, FeedForward, MixtureOfExperts

B, T, D, F, E = 2, 5, 6, 10, 4


X = normal(1, B, T, D)

_losses = jitted(lambda logits: (load_balancing_loss(logits), router_z_loss(logits)))


@jitted
def _train(layer, x=X, mask=None):
    """The answers, the auxiliary loss, the load and the share of dropped tokens of a training step."""
    y = layer(x, token_mask=mask, rngs=nnx.Rngs(dropout=0))
    return y, (layer.auxiliary_loss[...], layer.load_balancing[...], layer.dropped_tokens[...])


_top_3 = functools.partial(top_k_routing, num_choices=3)


def _layer(**options):
    return draw(lambda: MixtureOfExperts(D, F, E, **options, rngs=nnx.Rngs(0)))


def _expected(layer, capacity, num_choices, mask=None):
    params = params_of(layer, np.float64)

    def one(expert):
        p = {name: leaf[expert] for name, leaf in params["experts"].items()}
        return lambda x: np.maximum(x @ p["up"] + p["up_bias"], 0) @ p["down"] + p["down_bias"]

    x = np.float64(X).reshape(-1, D)
    logits = x @ params["router"]
    out = oracle.mixture(x, logits, [one(expert) for expert in range(E)], capacity, num_choices, mask)
    return out.reshape(B, T, D), logits.astype(np.float32)


def test_a_training_step_equals_the_oracle_with_both_losses():
    for options, capacity, num_choices in (
        ({}, 4, 1),  # 1.25 * 10 tokens / 4 experts, rounded up
        ({"capacity_factor": 0.4}, 1, 1),
        ({"routing_fn": top_2_routing, "capacity_factor": 1.0}, 5, 2),
    ):
        layer = _layer(**options, load_balancing_weight=0.1, router_z_weight=0.02)
        y, (auxiliary, balance, dropped) = _train(layer)
        want, logits = _expected(layer, capacity, num_choices)
        np.testing.assert_allclose(y, want, atol=1e-5)
        want_balance, want_z = _losses(logits)
        np.testing.assert_allclose(balance, want_balance, rtol=1e-5)
        np.testing.assert_allclose(auxiliary, 0.1 * want_balance + 0.02 * want_z, rtol=1e-5)
        np.testing.assert_allclose(dropped, (want == 0).all(axis=-1).mean(), rtol=1e-6)


def test_groups_have_their_own_places_in_training():
    layer = _layer(num_groups=2, capacity_factor=0.8)
    y, (_, _, dropped) = _train(layer)
    rows = np.arange(B * T) // T  # a group is a row
    want = sum(_expected(layer, 1, 1, rows == row)[0] for row in range(B))  # 0.8 * 5 tokens / 4 experts
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(dropped, (want == 0).all(axis=-1).mean(), rtol=1e-6)
    assert (want != _expected(layer, 2, 1)[0]).any()


def test_evaluation_drops_no_token_and_leaves_what_training_said():
    for options, num_choices in (({"capacity_factor": 0.1}, 1), ({"routing_fn": top_2_routing}, 2)):
        layer = _layer(**options)

        @jitted
        def run(layer):
            return layer(X), layer(X[:1, :1]), layer.auxiliary_loss[...]

        y, alone, auxiliary = run(layer)
        np.testing.assert_allclose(y, _expected(layer, B * T, num_choices)[0], atol=1e-5)
        np.testing.assert_allclose(alone, y[:1, :1], atol=1e-6)
        assert auxiliary == params_of(layer)["auxiliary_loss"]


def test_few_tokens_meet_their_experts_alone():
    """With no more choices than experts, an evaluation gathers the experts of each token; with more, tokens move."""
    options = {"activation_fn": jax.nn.silu, "is_gated": True, "use_router_bias": True, "routing_fn": _top_3}
    layer, mask = draw(lambda: MixtureOfExperts(D, F, 7, **options, rngs=nnx.Rngs(0))), np.array([[True], [False]])

    @jitted
    def run(layer):
        return layer(X), layer(X[:, :1]), layer(X[:, :1], token_mask=mask)

    many, few, hidden = run(layer)
    np.testing.assert_allclose(few, many[:, :1], atol=1e-6)
    np.testing.assert_allclose(hidden, few * mask[..., None], atol=1e-6)
    params = params_of(layer, np.float64)
    logits = np.float64(X) @ params["router"] + params["router_bias"]

    def one(expert):
        p = {name: leaf[expert] for name, leaf in params["experts"].items()}
        silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
        gated = lambda x: silu(x @ p["up"] + p["up_bias"]) * (x @ p["gate"] + p["gate_bias"])  # noqa: E731
        return lambda x: gated(x) @ p["down"] + p["down_bias"]

    want = oracle.mixture(X.reshape(-1, D), logits.reshape(-1, 7), [one(expert) for expert in range(7)], B * T, 3)
    np.testing.assert_allclose(many, want.reshape(B, T, D), atol=1e-5)


@pytest.mark.parametrize("use_gate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_shared_network_answers_every_token_too(use_gate):
    """In training, where an expert drops tokens, in evaluation, and for a few tokens."""
    layer = _layer(capacity_factor=0.4, shared_d_ff=7, use_shared_gate=use_gate)
    trained, _ = _train(layer)
    many, few = jitted(lambda layer: (layer(X), layer(X[:1, :1])))(layer)
    params = params_of(layer, np.float64)
    p = params["shared"]
    assert jax.tree.map(np.shape, p) == {"up": (D, 7), "up_bias": (7,), "down": (7, D), "down_bias": (D,)}
    shared = np.maximum(np.float64(X) @ p["up"] + p["up_bias"], 0) @ p["down"] + p["down_bias"]
    if use_gate:
        shared /= 1 + np.exp(-np.float64(X) @ params["shared_gate"]["kernel"])
    np.testing.assert_allclose(trained, _expected(layer, 1, 1)[0] + shared, atol=1e-5)
    np.testing.assert_allclose(many, _expected(layer, B * T, 1)[0] + shared, atol=1e-5)
    np.testing.assert_allclose(few, many[:1, :1], atol=1e-6)


def test_a_correction_bias_chooses_experts_and_is_not_trained():
    """It decides for the last expert, whose weight stays its score; for many tokens and for few."""
    config = ExpertsConfig(num_experts=E, experts_per_token=1, router_scores="sigmoid", use_correction_bias=True)
    layer = draw(lambda: config.make(D, F, rngs=nnx.Rngs(0)))

    @jitted
    def run(layer):
        layer.correction_bias[...] = 2.0 * jnp.arange(E, dtype=jnp.float32)
        last = jax.tree.map(lambda leaf: leaf[E - 1], layer.experts)
        score = jax.nn.sigmoid(X @ layer.router[:, E - 1 :])
        return layer(X), layer(X[:1, :1]), score * last(X)

    many, few, want = run(layer)
    np.testing.assert_allclose(many, want, atol=1e-5)
    np.testing.assert_allclose(few, want[:1, :1], atol=1e-5)
    assert "correction_bias" in nnx.to_pure_dict(nnx.state(layer))
    assert "correction_bias" not in nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def test_padding_is_sent_nowhere():
    layer, mask = _layer(capacity_factor=0.8), np.arange(B * T) % 4 > 0
    y, (_, balance, dropped) = _train(layer, mask=mask.reshape(B, T))
    want, logits = _expected(layer, 2, 1, mask)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_array_equal(y.reshape(-1, D)[~mask], 0)
    np.testing.assert_allclose(balance, _losses(logits[mask])[0], rtol=1e-5)
    np.testing.assert_allclose(dropped, (want.reshape(-1, D)[mask] == 0).all(axis=-1).mean(), rtol=1e-6)


def test_one_expert_is_a_feed_forward_network():
    one = draw(lambda: MixtureOfExperts(D, F, 1, rngs=nnx.Rngs(0)))

    @jitted
    def run(one):
        dense = FeedForward(D, F, rngs=nnx.Rngs(1))
        for name in ("up", "up_bias", "down", "down_bias"):
            getattr(dense, name)[...] = getattr(one.experts, name)[0]
        return one(X), dense(X)

    np.testing.assert_allclose(*run(one), atol=1e-6)


def test_every_expert_starts_as_a_feed_forward_network_of_its_own():
    params = params_of(initial(lambda: MixtureOfExperts(64, 256, 3, rngs=nnx.Rngs(0))))
    params = {name: params[name] for name in ("router", "experts")}
    experts = {"up": (3, 64, 256), "up_bias": (3, 256), "down": (3, 256, 64), "down_bias": (3, 64)}
    assert jax.tree.map(np.shape, params) == {"router": (64, 3), "experts": experts}
    limit = math.sqrt(6 / (64 + 256))
    for kernels in (params["experts"]["up"], params["experts"]["down"]):
        for kernel in kernels:
            assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert np.abs(kernels[0] - kernels[1]).max() > 0.1 * limit
    assert not params["experts"]["up_bias"].any()
    assert not params["experts"]["down_bias"].any()


def test_gradients_reach_the_router_and_the_chosen_experts():
    graphdef, params, state = nnx.split(_layer(), nnx.Param, ...)
    params, state = nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    @jitted
    def gradients(params):
        def answered(params):
            layer = nnx.merge(graphdef, {**params, **state})
            y = layer(X, rngs=nnx.Rngs(dropout=0))
            return jnp.square(y).sum(), layer.auxiliary_loss[...]

        return jax.grad(lambda params: answered(params)[0])(params), jax.grad(lambda params: answered(params)[1])(
            params
        )

    of_task, of_router = gradients(params)
    chex.assert_tree_all_finite(of_task)
    for gradient in jax.tree.leaves(of_task):
        assert np.abs(gradient).max() > 0
    assert np.abs(of_router["router"]).max() > 0


def test_drops_hidden_units_only_with_rngs():
    @jitted
    def run(layer, dropping):
        return layer(X), dropping(X), dropping(X, rngs=nnx.Rngs(0))

    plain, silent, dropped = run(_layer(), _layer(dropout_rate=0.5))
    np.testing.assert_array_equal(silent, plain)
    assert np.abs(dropped - plain).max() > 1e-2


def test_bfloat16_computes_in_bfloat16_on_float32_parameters_with_a_float32_router():
    layer = _layer(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(layer)), jnp.float32)
    (y, said), (plain, same) = _train(layer), _train(_layer())
    chex.assert_type((y, *said), (jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32))
    np.testing.assert_allclose(y.astype(np.float32), plain, atol=0.06)
    chex.assert_trees_all_equal(said, same)


def test_the_router_of_bfloat16_tokens_is_float32_too():
    rounded = X.astype(jnp.bfloat16)
    _, said = _train(_layer(dtype=jnp.bfloat16), rounded)
    chex.assert_trees_all_equal(said, _train(_layer(), rounded.astype(np.float32))[1])


def test_experts_drop_hidden_units_of_their_own():
    options = {"capacity_factor": 1.0, "routing_fn": top_2_routing, "dropout_rate": 0.5}

    @jax.jit
    def drop(x, rng):
        layer = MixtureOfExperts(D, D, 2, **options, rngs=nnx.Rngs(0))
        layer.router[...] = jnp.zeros((D, 2))  # both experts answer, each with half the weight
        layer.experts.up_bias[...] = jnp.ones((2, D))
        layer.experts.down[...] = jnp.stack([jnp.eye(D)] * 2)
        return layer(x, rngs=nnx.Rngs(dropout=rng))

    y = drop(np.zeros((B, T, D), np.float32), jax.random.key(0))
    # A hidden unit is 2 where an expert keeps it: dropped by both, kept by one, kept by both.
    assert set(np.unique(y)) == {0, 1, 2}


def test_groups_that_a_batch_does_not_divide_into_are_one_line():
    message = r"^config\.model\.experts\.num_groups=3 does not divide the 10 tokens of a batch: 0 means one group for"
    with pytest.raises(UserError, match=message):
        _layer(num_groups=3)(X, rngs=nnx.Rngs(dropout=0))
