"""Kernel attention: the statistics of random features, the causal scan, and inputs far beyond float32's exponents."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tests.functional.attention.oracles.favor import favor_weights, linear_weights
from tfx_jax.functional import favor_attention, linear_attention, orthogonal_features
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.kernel_features import log_elu_features, log_softmax_features

H = 8
PROJECTION = np.random.default_rng(0).normal(size=(24, H)).astype(np.float32)
_orthogonal = jax.jit(orthogonal_features, static_argnums=(1, 2))


def _inputs(t=12, s=17, seed=0):
    random = np.random.default_rng(seed)
    shapes = (2, t, 4, H), (2, s, 2, H), (2, s, 2, 6)
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def _unit_vectors(count, size, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, size))
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def _iid_features(rng, num_features, size):
    return jax.random.normal(rng, (num_features, size))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _estimates(features_fn, num_features, num_draws, x, y):
    """Estimates of exp(x . y) for each draw of features and each pair, [num_draws, pairs]."""

    def estimate(rng):
        projection = features_fn(rng, num_features, x.shape[1])
        return jnp.exp(log_softmax_features(x, projection) + log_softmax_features(y, projection)).sum(axis=-1)

    return jax.vmap(estimate)(jax.random.split(jax.random.key(0), num_draws))


def _mean_squared_error(features_fn, num_features, size=H, num_draws=1000):
    x, y = _unit_vectors(8, size), _unit_vectors(8, size, seed=1)
    estimates = np.asarray(_estimates(features_fn, num_features, num_draws, x, y), np.float64)
    return np.square(estimates - np.exp((np.asarray(x, np.float64) * y).sum(axis=-1))).mean()


@pytest.mark.parametrize("features_fn", [orthogonal_features, pytest.param(_iid_features, marks=pytest.mark.slow)])
def test_the_kernel_is_estimated_without_bias(features_fn):
    x, y = _unit_vectors(5, H), _unit_vectors(5, H, seed=1)
    estimates = np.asarray(_estimates(features_fn, 12, 4000, x, y), np.float64)
    standard_errors = estimates.std(axis=0) / np.sqrt(len(estimates))
    want = np.exp((np.asarray(x, np.float64) * y).sum(axis=-1))
    assert (np.abs(estimates.mean(axis=0) - want) < 3 * standard_errors).all()
    assert (standard_errors < 0.02 * want).all()  # so that a bias of 6 % could not hide


@pytest.mark.parametrize("features_fn", [orthogonal_features, pytest.param(_iid_features, marks=pytest.mark.slow)])
def test_squared_error_falls_with_the_number_of_features(features_fn):
    counts = (8, 32, 128)
    errors = [_mean_squared_error(features_fn, count) for count in counts]
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert abs(slope + 1) < 0.1


def test_orthogonal_features_err_less_than_independent_ones():
    assert _mean_squared_error(orthogonal_features, 16, 16) < 0.9 * _mean_squared_error(_iid_features, 16, 16)


def test_the_features_of_a_seed_are_a_constant_of_a_program():
    """They are not drawn and orthogonalized again wherever the attention is called."""
    x = jax.ShapeDtypeStruct((1, 3, 2, 4), jnp.float32)
    program = str(jax.make_jaxpr(functools.partial(SPECS["favor"].function, seed=5))(x, x, x))
    assert "exp" in program
    assert not re.search("random_|threefry|qr|householder", program)


def test_rows_are_orthogonal_within_a_block_and_normally_long():
    rows = np.asarray(_orthogonal(jax.random.key(0), 2 * 64 + 5, 64), np.float64)
    assert rows.shape == (133, 64)
    for block in (rows[:64], rows[64:128], rows[128:]):
        products = block @ block.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-3)
    assert np.abs(rows[:64] @ rows[64:128].T).max() > 1
    squares = np.square(rows).sum(axis=1)  # chi-squared: mean 64, variance 128
    assert abs(squares.mean() - 64) < 3 * np.sqrt(128 / 133)
    assert 0.6 < squares.var() / 128 < 1.5


def test_redrawing_gives_other_features_and_the_same_key_the_same():
    first, again, other = (np.asarray(_orthogonal(jax.random.key(seed), 12, H)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_comes_near_softmax_attention_with_4_h_log_h_features():
    """Within 10 %, weight by weight, for queries and keys of length 1 at scale 1."""
    size = 64
    query, key = (_unit_vectors(32, size, seed).reshape(1, 32, 1, size) for seed in (0, 1))
    projection = _orthogonal(jax.random.key(0), int(4 * size * np.log(size)), size)
    value = _inputs(s=32)[2][:1, :, :1]
    attend = jax.jit(functools.partial(favor_attention, projection=projection, scale=1.0, return_weights=True))
    out, weights = attend(query, key, value)
    want = dense_weights(query, key, scale=1.0)
    assert np.sqrt(np.square(weights / want - 1).mean()) < 0.1
    assert np.linalg.norm(out - mixed(want, value)) < 0.1 * np.linalg.norm(mixed(want, value))


def test_is_the_formula_of_the_book():
    """Murphy (2022), equation 15.69: diag^-1(Q' ((K')^T 1)) (Q' ((K')^T V)), with all of it in float64."""
    query, key, value = (np.asarray(x[0, :, 0], np.float64) for x in _inputs())
    projection = np.asarray(PROJECTION, np.float64)
    query_features, key_features = (
        np.exp(x @ projection.T - np.square(x).sum(axis=1, keepdims=True) / 2) for x in (query / H**0.25, key / H**0.25)
    )
    want = (query_features @ (key_features.T @ value)) / (query_features @ key_features.sum(axis=0))[:, None]
    attend = jax.jit(functools.partial(favor_attention, projection=PROJECTION))
    got = np.asarray(attend(*(x[:1, :, :1] for x in _inputs())))[0, :, 0]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("t", "s", "block_size"),
    [
        (12, 17, 1),
        (17, 12, 4),
        (1, 6, 4),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((12, 17, 4), (17, 12, 1), (1, 6, 1))),
    ],
)
def test_causal_blocks_equal_the_quadratic_form(t, s, block_size):
    query, key, value = _inputs(t, s)
    attend = jax.jit(functools.partial(favor_attention, projection=PROJECTION, is_causal=True, block_size=block_size))
    want = mixed(favor_weights(query, key, projection=PROJECTION, is_causal=True), value)
    np.testing.assert_allclose(attend(query, key, value), want, atol=1e-5)


def test_causal_gradients_equal_central_differences_of_the_oracle():
    inputs = _inputs()
    mask = np.ones((2, 1, 1, 17), bool)
    mask[0, ..., :8] = False  # the first queries of row 0 see nothing
    random = np.random.default_rng(1)
    directions = [random.normal(size=x.shape) for x in inputs]
    cotangent = random.normal(size=(2, 12, 4, 6))

    def oracle(step):
        query, key, value = (np.asarray(x, np.float64) + step * d for x, d in zip(inputs, directions, strict=True))
        return (
            mixed(favor_weights(query, key, projection=PROJECTION, mask=mask, is_causal=True), value) * cotangent
        ).sum()

    def loss(inputs):
        out = favor_attention(*inputs, mask=mask, projection=PROJECTION, is_causal=True, block_size=4)
        return (out * cotangent.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(loss))(inputs)
    got = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(got, (oracle(1e-6) - oracle(-1e-6)) / 2e-6, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_where_every_feature_underflows(is_causal):
    """Below zero elu(x) + 1 is exp(x), here down to exp(-300) with exact logarithms; float32 ends at exp(-104)."""
    random = np.random.default_rng(0)
    query, key = (-random.integers(0, 300, (1, length, 2, H)).astype(np.float32) for length in (12, 17))
    value = _inputs()[2][:1]
    attend = jax.jit(functools.partial(linear_attention, is_causal=is_causal, block_size=4))
    want = mixed(linear_weights(query, key, is_causal=is_causal), value)
    np.testing.assert_allclose(attend(query, key, value), want, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_of_huge_inputs_are_still_a_distribution(is_causal):
    query, key, value = _inputs(17, 17)
    attend = functools.partial(favor_attention, projection=PROJECTION, is_causal=is_causal, block_size=4)
    mask = np.arange(17)[None, None, None, :] > 2
    _, weights = jax.jit(functools.partial(attend, return_weights=True))(query * 1000, key * 1000, value, mask=mask)
    visible = np.broadcast_to(np.arange(17) > 2, (2, 4, 17)) if is_causal else 1.0
    np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), visible, atol=1e-5)


def test_scale_and_feature_map_are_arguments():
    query, key, value = _inputs()
    for scale in (0.25, 0.0):
        out = jax.jit(functools.partial(favor_attention, projection=PROJECTION, scale=scale))(query, key, value)
        want = favor_weights(query, key, projection=PROJECTION, scale=scale)
        np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)
    attend = functools.partial(linear_attention, log_features_fn=lambda x: 2 * log_elu_features(x), scale=4.0)
    out = jax.jit(attend)(query, key, value)
    want = linear_weights(*(2 * np.asarray(x) for x in (query, key)), power=2)
    np.testing.assert_allclose(out, mixed(want, value), atol=1e-5)


def test_memory_of_causal_gradients_is_linear():
    length = 8192
    like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    projection = np.zeros((64, 16), np.float32)

    def loss(query, key, value):
        return jnp.square(favor_attention(query, key, value, projection=projection, is_causal=True)).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(like, like, like).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < length * 64 * 16 * 4 / 2  # half of what [T, M, U] would take, a sixteenth of [T, T]


def test_errors_say_what_to_do():
    query, key, value = _inputs()
    favor = functools.partial(favor_attention, query, key, value, projection=PROJECTION)
    with pytest.raises(ValueError, match=r"projection must have shape \[M, H\] with H = 8, got \(24, 7\)"):
        favor_attention(query, key, value, projection=PROJECTION[:, :7])
    with pytest.raises(ValueError, match=r"no weights to drop, got dropout_rate=0\.1; drop the output"):
        favor(dropout_rate=0.1)
    with pytest.raises(ValueError, match="takes no bias"):
        favor(np.zeros((1, 1, 1, 17), np.float32))
    with pytest.raises(
        ValueError, match=r"only a padding mask, \[B, 1, 1, S\], got shape \(1, 4, 1, 17\).*is_causal=True"
    ):
        favor(mask=np.ones((1, 4, 1, 17), bool))
    with pytest.raises(ValueError, match=r"scale must be at least 0.*-1"):
        favor(scale=-1.0)
    for block_size in (0, 12):
        with pytest.raises(ValueError, match=f"block_size must be a power of two, got {block_size}"):
            favor(block_size=block_size)
    with pytest.raises(ValueError, match="query and key must have equal head sizes, got 8 != 7"):
        linear_attention(query, key[..., :7], value)
