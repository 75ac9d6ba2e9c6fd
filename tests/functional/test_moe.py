"""Mixture of experts against the papers' algorithms, token by token."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.functional.oracles import moe as oracle
from tfx_jax.functional import (
    combine,
    dispatch,
    expert_capacity,
    expert_load,
    feed_forward,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    sequence_balancing_loss,
    top_1_routing,
    top_2_routing,
    top_k_routing,
)

T, E, D, F = 24, 8, 6, 10
ROUTINGS = ((top_1_routing, 1), (top_2_routing, 2))
both = pytest.mark.parametrize(("routing_fn", "num_choices"), ROUTINGS, ids=("top_1", "top_2"))


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, LOGITS = _random(T, D), _random(T, E, seed=1)
PARAMS = _random(E, D, F, seed=2), _random(E, F, D, seed=3), _random(E, F, seed=4), _random(E, D, seed=5)


def _experts(params=PARAMS):
    """One function of a token for each expert, in float64."""

    def one(up, down, up_bias, down_bias):
        return lambda x: np.maximum(x @ up + up_bias, 0) @ down + down_bias

    return [one(*(np.asarray(param[expert], np.float64) for param in params)) for expert in range(len(params[0]))]


_dense = jax.jit(feed_forward)
SOME = np.arange(T) % 3 > 0  # a mask, and one that hides nothing, so that both are one program
MASKS = np.ones(T, bool), SOME


@functools.partial(jax.jit, static_argnames=("capacity", "routing_fn", "num_groups"))
def _mixture(x, logits, params, capacity, routing_fn, mask=None, num_groups=1):
    def experts_fn(buffers):
        return jax.vmap(feed_forward)(buffers, *params)

    options = {"capacity": capacity, "routing_fn": routing_fn, "num_groups": num_groups}
    return mixture_of_experts(x, logits, experts_fn, mask=mask, **options)


@both
@pytest.mark.parametrize("capacity", [1, 3, T])
def test_places_and_weights_are_those_of_the_algorithm(routing_fn, num_choices, capacity):
    route = jax.jit(routing_fn, static_argnames="capacity")
    for mask in MASKS:
        routing = jax.tree.map(np.asarray, route(LOGITS, capacity=capacity, mask=mask))
        chex.assert_shape(tuple(routing), (T, num_choices))
        got = {
            (token, int(routing.expert[token, choice]), int(routing.position[token, choice])): float(
                routing.weight[token, choice]
            )
            for token, choice in np.argwhere(np.asarray(routing.position) < capacity)
        }
        want = {tuple(map(int, route[:3])): route[3] for route in oracle.routes(LOGITS, capacity, num_choices, mask)}
        assert got.keys() == want.keys()
        np.testing.assert_allclose(list(got.values()), [want[place] for place in got], atol=1e-6)
        dropped = np.asarray(routing.position) >= capacity
        assert dropped.any() == (not mask.all() or capacity < T)
        np.testing.assert_array_equal(routing.position[dropped], capacity)
        np.testing.assert_array_equal(routing.weight[dropped], 0)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_more_experts_of_a_token_weigh_by_their_probabilities(is_normalized):
    route = jax.jit(functools.partial(top_k_routing, capacity=T, num_choices=5, is_normalized=is_normalized))
    routing = jax.tree.map(np.asarray, route(LOGITS))
    gates = oracle.probabilities(LOGITS)
    best = np.argsort(-gates, axis=1)[:, :5]
    np.testing.assert_array_equal(routing.expert, best)
    want = np.take_along_axis(gates, best, axis=1)
    want = want / want.sum(axis=1, keepdims=True) if is_normalized else want
    np.testing.assert_allclose(routing.weight, want, atol=1e-6)
    assert (routing.position < T).all()
    with pytest.raises(ValueError, match=r"top-9 routing needs logits \[T, E\] with E >= 9, got \(24, 8\)"):
        top_k_routing(LOGITS, T, num_choices=9)


GROUPS = {"num_expert_groups": 4, "groups_per_token": 2}


@pytest.mark.parametrize(
    ("scores", "bias", "options"),
    [
        ("softmax", None, {**GROUPS, "group_choices": 1, "is_normalized": False, "scale": 3.0}),  # DeepSeek-V2
        ("sigmoid", _random(E, seed=6), {**GROUPS, "group_choices": 2, "scale": 2.5}),  # DeepSeek-V3
    ],
)
def test_experts_in_groups_are_those_of_deepseek(scores, bias, options):
    """Section 2.2.2 of DeepSeek-V2 and equations 13 to 16 of DeepSeek-V3, token by token."""
    route = jax.jit(functools.partial(top_k_routing, capacity=T, num_choices=3, scores=scores, **options))
    routing = jax.tree.map(np.asarray, route(LOGITS, bias=bias))
    gates = oracle.probabilities(LOGITS) if scores == "softmax" else 1 / (1 + np.exp(-np.float64(LOGITS)))
    assert len(np.unique(routing.expert // 2, axis=0)) > 2
    for token, gate in enumerate(gates):
        ranking = gate + (0 if bias is None else bias)
        of_group = np.sort(ranking.reshape(4, 2), axis=1)[:, -options["group_choices"] :].sum(axis=1)
        best_groups = np.argsort(-of_group)[:2]
        allowed = [expert for expert in range(E) if expert // 2 in best_groups]
        best = sorted(allowed, key=lambda expert: -ranking[expert])[:3]
        np.testing.assert_array_equal(routing.expert[token], best)
        weight = gate[best] / (gate[best].sum() if options.get("is_normalized", True) else 1)
        np.testing.assert_allclose(routing.weight[token], options["scale"] * weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": "relu"}, "scores must be one of softmax, sigmoid, got 'relu'"),
        ({"num_expert_groups": 3}, "num_expert_groups=3 does not divide the 8 experts"),
        ({**GROUPS, "groups_per_token": 5}, "groups_per_token=5 must be at most num_expert_groups=4"),
        ({**GROUPS, "groups_per_token": 1}, "1 groups of 2 experts are too few for 3 experts of a token"),
        ({**GROUPS, "group_choices": 3}, "2 groups of 2 experts are too few for 3 .* and group_choices=3"),
    ],
)
def test_errors_of_experts_in_groups(options, message):
    with pytest.raises(ValueError, match=message):
        top_k_routing(LOGITS, T, num_choices=3, **options)


@both
@pytest.mark.parametrize("capacity", [2, T])
def test_mixture_equals_its_oracle(routing_fn, num_choices, capacity):
    for mask in MASKS:
        out = _mixture(X, LOGITS, PARAMS, capacity, routing_fn, mask)
        want = oracle.mixture(X, LOGITS, _experts(), capacity, num_choices, mask)
        np.testing.assert_allclose(out, want, atol=2e-5 * np.abs(want).max())
        np.testing.assert_array_equal(np.asarray(out)[(want == 0).all(axis=1)], 0)


def test_one_expert_with_room_for_all_is_the_dense_network():
    params = [param[:1] for param in PARAMS]
    dense = _dense(X, *(param[0] for param in params))
    np.testing.assert_array_equal(_mixture(X, LOGITS[:, :1], params, T, top_1_routing), dense)


def test_equal_experts_are_the_dense_network_whatever_the_router_says():
    params = tuple(np.repeat(param[:1], E, axis=0) for param in PARAMS)
    dense = _dense(X, *(param[0] for param in params))
    np.testing.assert_allclose(_mixture(X, LOGITS, params, T, top_2_routing, MASKS[0]), dense, atol=1e-5)


def test_leading_axes_are_tokens_in_order_and_vmap_makes_groups_with_their_own_places():
    x, logits, mask = X.reshape(2, 12, D), LOGITS.reshape(2, 12, E), SOME.reshape(2, 12)
    together = np.asarray(_mixture(x, logits, PARAMS, 2, top_1_routing, mask))
    np.testing.assert_array_equal(together.reshape(T, D), _mixture(X, LOGITS, PARAMS, 2, top_1_routing, SOME))
    groups = jax.jit(jax.vmap(lambda x, logits: _mixture(x, logits, PARAMS, 2, top_1_routing)))(x, logits)
    want = [oracle.mixture(*group, _experts(), 2, 1) for group in zip(x, logits, strict=True)]
    np.testing.assert_allclose(groups, want, atol=1e-4)


@both
def test_groups_have_their_own_places(routing_fn, num_choices):
    """And a token's way is told by its number among all."""
    got = _mixture(X, LOGITS, PARAMS, 2, routing_fn, SOME, num_groups=3)
    groups = [range(start, start + T // 3) for start in range(0, T, T // 3)]
    want = [oracle.mixture(X[rows], LOGITS[rows], _experts(), 2, num_choices, SOME[rows]) for rows in groups]
    np.testing.assert_allclose(got, np.concatenate(want), atol=1e-4)
    _, routing = jax.jit(
        lambda x, logits: mixture_of_experts(
            x, logits, lambda x: x, capacity=2, num_groups=3, routing_fn=routing_fn, return_routing=True
        )
    )(X, LOGITS)
    alone = jax.jit(lambda logits: routing_fn(logits, 2))(LOGITS[T // 3 : 2 * T // 3])
    chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[T // 3 : 2 * T // 3], routing), alone, atol=1e-6)


def test_what_is_dispatched_comes_back():
    @jax.jit
    def there_and_back(x, logits):
        routing = top_2_routing(logits, T)
        buffers = dispatch(x, routing, num_experts=E, capacity=T)
        return buffers, combine(buffers, routing)

    buffers, out = there_and_back(X, LOGITS)
    assert buffers.shape == (E, T, D)
    assert np.count_nonzero(np.asarray(buffers).any(axis=-1)) == 2 * T
    np.testing.assert_allclose(out, X, atol=1e-6)


@both
def test_gradients_equal_central_differences_of_the_oracle(routing_fn, num_choices):
    """Of tokens, parameters and above all the router, through the weights and both losses."""
    cotangent = np.random.default_rng(6).normal(size=(T, D))

    def loss(x, logits, params):
        out = _mixture(x, logits, params, 3, routing_fn)
        losses = load_balancing_loss(logits) + router_z_loss(logits)
        return (out * cotangent.astype(np.float32)).sum() + 10 * losses

    def want(x, logits, *params):
        out = oracle.mixture(x, logits, _experts(params), 3, num_choices)
        losses = oracle.switch_loss(logits) + np.square(np.log(np.exp(logits).sum(axis=1))).mean()
        return (out * cotangent).sum() + 10 * losses

    arrays = [np.asarray(a, np.float64) for a in (X, LOGITS, *PARAMS)]
    d_x, d_logits, d_params = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(X, LOGITS, PARAMS)
    for index, gradient in enumerate((d_x, d_logits, *d_params)):
        direction = np.random.default_rng(index).normal(size=gradient.shape)
        ahead, behind = (
            want(*(a + sign * 1e-6 * direction if i == index else a for i, a in enumerate(arrays))) for sign in (1, -1)
        )
        got = (np.asarray(gradient, np.float64) * direction).sum()
        np.testing.assert_allclose(got, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-4)
        assert np.abs(gradient).max() > 0


def test_load_balancing_losses_of_both_papers():
    loss = jax.jit(load_balancing_loss)
    for logits in (LOGITS, 5 * LOGITS):
        np.testing.assert_allclose(loss(logits), oracle.switch_loss(logits), rtol=1e-5)
        np.testing.assert_allclose(loss(logits) / E**2, oracle.gshard_loss(logits), rtol=1e-5)
    even = 50 * np.eye(E, dtype=np.float32)[np.arange(T) % E]
    np.testing.assert_allclose(loss(even), 1.0, rtol=1e-6)
    np.testing.assert_allclose(loss(even[np.zeros(T, int)]), E, rtol=1e-6)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_the_loss_of_each_sequence(num_choices):
    loss = jax.jit(sequence_balancing_loss, static_argnames="num_choices")
    logits = np.asarray(LOGITS).reshape(4, -1, E)
    mask = SOME.reshape(4, -1).copy()
    mask[2] = False  # a sequence of padding does not count
    for scale in (1, 5):
        for exists in (None, mask):
            want = oracle.sequence_loss(scale * logits, num_choices, exists)
            padded = scale * logits if exists is None else np.where(exists[..., None], scale * logits, np.float32(9))
            np.testing.assert_allclose(loss(padded, exists, num_choices=num_choices), want, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda logits: sequence_balancing_loss(logits, num_choices=num_choices)))(logits)
    step = np.random.default_rng(0).normal(size=logits.shape)
    ahead, behind = (oracle.sequence_loss(logits + way * step, num_choices) for way in (1e-6, -1e-6))
    np.testing.assert_allclose((gradient * step).sum(), (ahead - behind) / 2e-6, rtol=1e-3)
    assert loss(logits, np.zeros_like(mask), num_choices=num_choices) == 0


def test_loads_count_dropped_tokens_but_not_padding():
    routing = jax.jit(top_2_routing, static_argnums=1)(LOGITS, 1)
    experts = np.asarray(routing.expert)
    np.testing.assert_array_equal(expert_load(routing, E), np.bincount(experts.reshape(-1), minlength=E))
    want = np.bincount(experts[SOME].reshape(-1), minlength=E)
    np.testing.assert_array_equal(expert_load(routing, E, SOME), want)


def test_z_loss():
    want = np.mean([np.log(np.exp(np.asarray(row, np.float64)).sum()) ** 2 for row in LOGITS])
    loss = jax.jit(router_z_loss)
    np.testing.assert_allclose(loss(LOGITS), want, rtol=1e-5)
    assert np.isfinite(loss(np.full((T, E), 1e4, np.float32)))


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_losses_leave_padding_out(loss):
    loss, mask = jax.jit(loss), SOME
    padded = np.where(mask[:, None], LOGITS, np.float32(1e4))
    np.testing.assert_allclose(loss(padded, mask), loss(np.asarray(LOGITS)[mask]), rtol=1e-6)
    np.testing.assert_allclose(loss(padded.reshape(2, 12, E), mask.reshape(2, 12)), loss(padded, mask), rtol=1e-6)
    assert loss(LOGITS, np.zeros(T, bool)) == 0


def test_random_second_choice_is_made_in_proportion_to_its_weight_and_else_takes_no_place():
    logits = np.broadcast_to(np.array([[2.0, 0.5, -9.0]], np.float32), (4000, 3))
    routing = jax.jit(top_2_routing, static_argnums=1)(logits, 4000, rng=jax.random.key(0))
    routing = jax.tree.map(np.asarray, routing)
    made = routing.weight[:, 1] > 0
    expected = 2 / (1 + np.exp(1.5))
    assert abs(made.mean() - expected) < 3 * np.sqrt(expected * (1 - expected) / 4000)
    np.testing.assert_array_equal(routing.position[made, 1], np.arange(made.sum()))
    assert (routing.weight[:, 0] > 0).all()


def test_memory_is_that_of_the_buffers_not_of_a_one_hot():
    num_tokens, num_experts, capacity, size = 8192, 16, 1024, 8

    def loss(x, logits, w):
        out = mixture_of_experts(
            x, logits, lambda y: jnp.einsum("ECD,EDF->ECF", y, w), capacity=capacity, routing_fn=top_2_routing
        )
        return jnp.square(out).sum()

    shapes = (num_tokens, size), (num_tokens, num_experts), (num_experts, size, size)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    used = compiled.compile().memory_analysis().temp_size_in_bytes
    assert used < num_tokens * num_experts * capacity / 8  # the one-hot would have 4 bytes for each


@both
def test_experts_spread_over_eight_devices_equal_one_device(routing_fn, num_choices):
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))

    def loss(x, logits, params):
        out = _mixture(x, logits, params, 4, routing_fn)
        return jnp.square(out).sum() + load_balancing_loss(logits), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    tokens = NamedSharding(mesh, P("expert"))
    placed = jax.device_put((X, LOGITS, PARAMS), tokens)  # tokens are dealt to all devices, and so are experts
    program = step.lower(*placed).compile()
    chex.assert_trees_all_close(program(*placed), step(X, LOGITS, PARAMS), rtol=1e-4, atol=1e-4)
    assert f"f32[1,{D},{F}]" in program.as_text()
    assert f"f32[{E},{D},{F}]" not in program.as_text()  # no device ever holds the experts of the others


def test_bfloat16_experts_keep_a_float32_router():
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (X, PARAMS))
    out = np.asarray(_mixture(half[0], LOGITS, half[1], T, top_2_routing))
    assert out.dtype == jnp.bfloat16
    routing = jax.eval_shape(lambda logits: top_2_routing(logits, 3), LOGITS.astype(jnp.bfloat16))
    assert routing.weight.dtype == jnp.float32
    want = oracle.mixture(half[0].astype(np.float32), LOGITS, _experts(), T, 2)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=0.03 * np.abs(want).max())


def test_capacity():
    assert expert_capacity(64, 8, 1.0) == 8
    assert expert_capacity(65, 8, 1.0) == 9
    assert expert_capacity(1, 8, 1.0) == 1
    assert expert_capacity(64, 8, 1.0, experts_per_token=3) == 24
    with pytest.raises(ValueError, match=r"capacity_factor=0\.0"):
        expert_capacity(64, 8, 0.0)


def test_scores_that_underflow_have_no_weight_instead_of_nan():
    @jax.jit
    def run(logits):
        routing = top_k_routing(logits, 3, num_choices=2, scores="sigmoid")
        return routing.weight, sequence_balancing_loss(logits[None], num_choices=2)

    weight, loss = run(np.full((3, 4), -120, np.float32))
    np.testing.assert_array_equal(weight, 0)
    assert loss == 0


def test_errors_name_the_sizes():
    with pytest.raises(ValueError, match=r"top-2 routing needs logits \[T, E\] with E >= 2, got \(24, 1\)"):
        top_2_routing(LOGITS[:, :1], 3)
    with pytest.raises(ValueError, match=r"top-1 routing needs logits \[T, E\] with E >= 1, got \(1, 24, 8\)"):
        top_1_routing(LOGITS[None], 3)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        top_1_routing(LOGITS, 0)
    with pytest.raises(ValueError, match=r"mask must have shape \[T\] = \(24,\), got \(23,\)"):
        top_1_routing(LOGITS, 3, mask=np.ones(23, bool))
    with pytest.raises(ValueError, match="num_choices must be at least 1, got 0"):
        top_k_routing(LOGITS, 3, num_choices=0)
    batch, logits = X.reshape(4, 6, -1), LOGITS.reshape(4, 6, -1)
    with pytest.raises(ValueError, match=r"mask must have the axes of tokens \(4, 6\), got \(6, 4\)"):
        mixture_of_experts(batch, logits, lambda x: x, capacity=3, mask=np.ones((6, 4), bool))
    with pytest.raises(ValueError, match="num_groups=5 does not divide the 24 tokens"):
        mixture_of_experts(X, LOGITS, lambda x: x, capacity=3, num_groups=5)
    with pytest.raises(ValueError, match=r"x and logits must have the same axes of tokens, got \(23,\) and \(24,\)"):
        mixture_of_experts(X[1:], LOGITS, lambda x: x, capacity=3)
