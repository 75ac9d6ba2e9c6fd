"""The feed-forward network against equation 2 of Vaswani et al. (2017), and as the two convolutions it also is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import feed_forward

B, T, D, F = 2, 5, 4, 7


def _random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, UP, DOWN = _random(B, T, D, seed=0), _random(D, F, seed=1), _random(F, D, seed=2)
UP_BIAS, DOWN_BIAS = _random(F, seed=3), _random(D, seed=4)

_feed_forward = jax.jit(feed_forward, static_argnames=("activation_fn", "dropout_rate"))


def _oracle(x, up, down, up_bias=None, down_bias=None):
    x, up, down = (np.asarray(array, np.float64) for array in (x, up, down))
    up_bias = np.zeros(F) if up_bias is None else np.asarray(up_bias, np.float64)
    down_bias = np.zeros(D) if down_bias is None else np.asarray(down_bias, np.float64)
    out = np.zeros(x.shape)
    for position in np.ndindex(x.shape[:-1]):
        hidden = [max(0.0, x[position] @ up[:, unit] + up_bias[unit]) for unit in range(up.shape[1])]
        out[position] = np.array(hidden) @ down + down_bias
    return out


@pytest.mark.parametrize(
    ("up_bias", "down_bias"), [(None, None), (UP_BIAS, None), (None, DOWN_BIAS), (UP_BIAS, DOWN_BIAS)]
)
def test_equals_equation_2(up_bias, down_bias):
    out = _feed_forward(X, UP, DOWN, up_bias, down_bias)
    assert (out.shape, out.dtype) == ((B, T, D), jnp.float32)
    np.testing.assert_allclose(out, _oracle(X, UP, DOWN, up_bias, down_bias), atol=1e-5)


@pytest.mark.parametrize("index", [(1, 3), 0, ...], ids=str)
def test_any_leading_axes(index):
    out = _feed_forward(X[index], UP, DOWN, UP_BIAS, DOWN_BIAS)
    np.testing.assert_allclose(out, _oracle(X, UP, DOWN, UP_BIAS, DOWN_BIAS)[index], atol=1e-5)


def test_equals_two_convolutions_of_kernel_size_one():
    """As the paper remarks in section 3.3."""

    def convolve(x, kernel, bias):
        y = jax.lax.conv_general_dilated(x, kernel[None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        return y + bias[None, None]

    convolved = jax.jit(lambda x: convolve(jax.nn.relu(convolve(x, UP, UP_BIAS)), DOWN, DOWN_BIAS))(X)
    np.testing.assert_allclose(_feed_forward(X, UP, DOWN, UP_BIAS, DOWN_BIAS), convolved, atol=1e-5)


def test_positions_do_not_see_each_other():
    other = X.copy()
    other[1, 2] += 1
    out, changed = (np.asarray(_feed_forward(x, UP, DOWN, UP_BIAS, DOWN_BIAS)) for x in (X, other))
    is_changed = np.abs(out - changed).max(axis=-1) > 1e-3
    np.testing.assert_array_equal(np.argwhere(is_changed), [[1, 2]])


def test_gradient_equals_the_chain_rule_by_hand():
    cotangent = _random(B, T, D, seed=5)
    pull_back = jax.jit(lambda *arrays: jax.vjp(feed_forward, *arrays)[1](cotangent))
    x, up, down, upstream = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (X, UP, DOWN, cotangent))
    before = x @ up + np.asarray(UP_BIAS, np.float64)
    hidden = np.maximum(before, 0)
    d_before = (upstream @ down.T) * (before > 0)
    want = (d_before @ up.T, x.T @ d_before, hidden.T @ upstream, d_before.sum(axis=0), upstream.sum(axis=0))
    for got, expected in zip(pull_back(X, UP, DOWN, UP_BIAS, DOWN_BIAS), want, strict=True):
        np.testing.assert_allclose(np.asarray(got).reshape(expected.shape), expected, atol=1e-4)


def test_activation_is_an_argument():
    out = _feed_forward(X, UP, DOWN, activation_fn=lambda x: x)
    np.testing.assert_allclose(out, X @ (UP @ DOWN), atol=1e-5)


def test_dropout_falls_on_hidden_units():
    """With W2 the identity the output is the hidden layer, here of ones: half of them zero, the others doubled."""
    x, up, down = (a.astype(np.float32) for a in (np.ones((30, 40, 16)), np.full((16, 16), 1 / 16), np.eye(16)))
    out = np.asarray(_feed_forward(x, up, down, dropout_rate=0.5, dropout_rng=jax.random.key(0)))
    assert set(np.unique(out)) == {0, 2}
    assert abs((out == 0).mean() - 0.5) < 3 * 0.5 / np.sqrt(out.size)
    np.testing.assert_array_equal(_feed_forward(x, up, down, dropout_rate=0.5), 1)


def test_bfloat16():
    half = [array.astype(jnp.bfloat16) for array in (X, UP, DOWN, UP_BIAS, DOWN_BIAS)]
    out = np.asarray(_feed_forward(*half))
    assert out.dtype == jnp.bfloat16
    want = _oracle(*(array.astype(np.float32) for array in half))
    np.testing.assert_allclose(out.astype(np.float32), want, atol=0.02 * np.abs(want).max())


def test_gate_multiplies_the_activated_units():
    gate = _random(D, F, seed=5)
    x, up, down, linear = (np.asarray(array, np.float64) for array in (X, UP, DOWN, gate))
    want = (np.maximum(x @ up, 0) * (x @ linear)) @ down
    np.testing.assert_allclose(jax.jit(feed_forward)(X, UP, DOWN, gate=gate), want, atol=1e-4)


def test_gated_units_of_gpt_oss():
    """Both factors are bounded, the activated one from above, and the other gets an offset and a bias."""
    gate, gate_bias = _random(D, F, seed=5), _random(F, seed=6)
    x, up, down, linear, bias = (np.asarray(array, np.float64) for array in (X, UP, DOWN, gate, gate_bias))
    first, second = np.minimum(x @ up, 0.5), np.clip(x @ linear + bias, -0.5, 0.5)
    want = (first / (1 + np.exp(-1.702 * first)) * (second + 1)) @ down
    quick_gelu = lambda x: x * jax.nn.sigmoid(1.702 * x)  # noqa: E731
    options = {"gate_offset": 1.0, "limit": 0.5, "activation_fn": quick_gelu}
    got = jax.jit(lambda *arrays: feed_forward(*arrays[:3], gate=gate, gate_bias=gate_bias, **options))(X, UP, DOWN)
    np.testing.assert_allclose(got, want, atol=1e-4)
