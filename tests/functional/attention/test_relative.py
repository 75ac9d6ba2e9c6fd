"""Transformer-XL: distances, memory and the parameters of relative attention."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.relative import relative_weights
from tfx_jax.functional import relative_attention


def _inputs(t, s, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, t, 4, 5), (2, s, 2, 5), (2, s, 2, 3)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _parameters(num_distances, seed=1):
    random = np.random.default_rng(seed)
    shapes = {"relative_key": (num_distances, 4, 5), "content_bias": (4, 5), "position_bias": (4, 5)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_causal_attention_needs_no_distance_below_zero():
    inputs, every = _inputs(4, 9), _parameters(12)
    past = every | {"relative_key": every["relative_key"][:9]}
    attend = jax.jit(functools.partial(relative_attention, is_causal=True, return_weights=True))
    got = attend(*inputs, **past)
    chex.assert_trees_all_close(got, attend(*inputs, **every), atol=1e-6)
    want = relative_weights(*inputs[:2], is_causal=True, **every)
    np.testing.assert_allclose(got[1], want, atol=1e-5)
    np.testing.assert_allclose(got[0], mixed(want, inputs[2]), atol=1e-5)


def test_without_positions_and_biases_it_is_dense_attention():
    inputs = _inputs(4, 9)
    nothing = jax.tree.map(np.zeros_like, _parameters(12))
    got = jax.jit(functools.partial(relative_attention, scale=0.3))(*inputs, **nothing)
    np.testing.assert_allclose(got, mixed(dense_weights(*inputs[:2], scale=0.3), inputs[2]), atol=1e-6)


def test_gradients_of_its_parameters_equal_central_differences_of_the_oracle():
    inputs, parameters = _inputs(4, 9), _parameters(12)
    random = np.random.default_rng(2)
    bias = random.normal(size=(1, 4, 4, 9)).astype(np.float32)
    directions = {name: random.normal(size=x.shape) for name, x in parameters.items()}
    cotangent = random.normal(size=(2, 4, 4, 3))

    def oracle(step):
        moved = {name: np.asarray(x, np.float64) + step * directions[name] for name, x in parameters.items()}
        return (mixed(relative_weights(*inputs[:2], bias=bias, scale=0.4, **moved), inputs[2]) * cotangent).sum()

    def loss(parameters):
        out = relative_attention(*inputs, bias, scale=0.4, **parameters)
        return (out * cotangent.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(loss))(parameters)
    got = sum((np.asarray(gradients[name], np.float64) * d).sum() for name, d in directions.items())
    np.testing.assert_allclose(got, (oracle(1e-6) - oracle(-1e-6)) / 2e-6, rtol=1e-4, atol=1e-4)
    assert all(np.abs(gradient).max() > 1e-3 for gradient in gradients.values())


def test_reading_segment_by_segment_with_memory_equals_one_long_pass():
    """Section 3.2, two layers deep; the memory holds what each layer read of all earlier segments."""
    random = np.random.default_rng(4)
    length, segment = 12, 4
    text = random.normal(size=(2, length, 4, 5)).astype(np.float32)
    layers = [((random.normal(size=(3, 5, 5)) / 2).astype(np.float32), _parameters(length, seed)) for seed in (5, 6)]

    @jax.jit
    def read(layer, memory, x):
        (by_query, by_key, by_value), parameters = layer
        known = jnp.concatenate([memory, x], axis=1)
        recent = {"relative_key": parameters["relative_key"][length - known.shape[1] :]}
        out = relative_attention(x @ by_query, known @ by_key, known @ by_value, is_causal=True, **parameters | recent)
        return x + out, known

    def passed(x, memories):
        known = []
        for layer, memory in zip(layers, memories, strict=True):
            x, kept = read(layer, memory, x)
            known.append(kept)
        return x, known

    nothing = [text[:, :0]] * 2
    whole, _ = passed(text, nothing)
    memories, parts = nothing, []
    for start in range(0, length, segment):
        part, memories = passed(text[:, start : start + segment], memories)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-5)
    forgetful, _ = passed(text[:, segment : 2 * segment], nothing)
    assert np.abs(np.asarray(forgetful) - np.asarray(parts[1])).max() > 0.1  # the memory is not idle


def test_only_distance_counts_not_position():
    """Hidden keys in front move every position and change nothing."""
    query, key, value = _inputs(4, 4)
    parameters = _parameters(12)
    at = {"relative_key": parameters["relative_key"][5:]}
    attend = jax.jit(relative_attention)
    near = attend(query, key, value, **parameters | at)
    padded_key, padded_value = (np.pad(x, ((0, 0), (5, 0), (0, 0), (0, 0))) for x in (key, value))
    mask = (np.arange(9) >= 5)[None, None, None]
    np.testing.assert_allclose(attend(query, padded_key, padded_value, None, mask, **parameters), near, atol=1e-6)


def test_float32_parameters_meet_bfloat16_activations():
    query, key, value = (x.astype(jnp.bfloat16) for x in _inputs(4, 4))
    out = jax.jit(relative_attention)(query, key, value, **_parameters(7))
    assert out.dtype == jnp.bfloat16
    want = jax.jit(relative_attention)(*(x.astype(np.float32) for x in (query, key, value)), **_parameters(7))
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=3e-2)


@pytest.mark.parametrize(
    ("change", "is_causal", "message"),
    [
        (
            {"relative_key": np.zeros((9, 4, 5), np.float32)},
            False,
            r"must have shape \[12, 4, 5\] for 4 queries and 9 keys",
        ),
        (
            {"relative_key": np.zeros((8, 4, 5), np.float32)},
            True,
            r"\[9, 4, 5\] or \[12, 4, 5\].*is_causal=True.*\(8, 4, 5\)",
        ),
        ({"relative_key": np.zeros((12, 2, 5), np.float32)}, True, r"got \(12, 2, 5\)"),
        (
            {"content_bias": np.zeros((2, 5), np.float32)},
            False,
            r"content_bias must have shape \[N, H\] = \(4, 5\), got \(2, 5\)",
        ),
        (
            {"position_bias": np.zeros((4,), np.float32)},
            False,
            r"position_bias must have shape \[N, H\] = \(4, 5\), got \(4,\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, is_causal, message):
    with pytest.raises(ValueError, match=message):
        relative_attention(*_inputs(4, 9), **_parameters(12) | change, is_causal=is_causal)
