"""Additive and general attention: the identities of Bahdanau et al. (2015) and Luong et al. (2015), and the memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.attention.oracles.additive import (
    additive_weights,
    concat_weights,
    covered_weights,
    general_weights,
    weights_of,
)
from tests.functional.attention.oracles.dense import dense_weights, mixed, softmax_over
from tfx_jax.functional import additive_attention, attentional_vector, coverage_loss, general_attention

B, T, S, N, K, H, J, F, U = 2, 5, 7, 4, 2, 3, 6, 8, 9  # all different


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = _normal(0, B, T, N, H), _normal(1, B, S, K, J), _normal(2, B, S, K, U)
W_QUERY, W_KEY, V = _normal(3, H, F), _normal(4, J, F), _normal(5, F)
W = _normal(6, H, J)

_additive = jax.jit(additive_attention, static_argnames=("is_causal", "scale", "return_weights"))
_general = jax.jit(general_attention, static_argnames=("scale", "return_weights"))


class TestAdditive:
    def test_queries_and_keys_of_different_sizes(self):
        out, weights = _additive(QUERY, KEY, VALUE, w_query=W_QUERY, w_key=W_KEY, v=V, return_weights=True)
        want = additive_weights(QUERY, KEY, w_query=W_QUERY, w_key=W_KEY, v=V)
        np.testing.assert_allclose(weights, want, atol=1e-6)
        np.testing.assert_allclose(out, mixed(want, VALUE), atol=1e-5)

    def test_split_equals_concatenated(self):
        w = np.concatenate([W_QUERY, W_KEY])
        w_query, w_key = np.split(w, [H])
        _, weights = _additive(QUERY, KEY, VALUE, w_query=w_query, w_key=w_key, v=V, return_weights=True)
        np.testing.assert_allclose(weights, concat_weights(QUERY, KEY, w=w, v=V), atol=1e-6)

    def test_heads_with_parameters_of_their_own(self):
        w_query, w_key, v = _normal(7, N, H, F), _normal(8, K, J, F), _normal(9, N, F)
        _, weights = _additive(QUERY, KEY, VALUE, w_query=w_query, w_key=w_key, v=v, return_weights=True)
        wq, wk, vs = (np.asarray(x, np.float64) for x in (w_query, w_key, v))
        want = weights_of(lambda n, q, k: vs[n] @ np.tanh(q @ wq[n] + k @ wk[n // (N // K)]), QUERY, KEY)
        np.testing.assert_allclose(weights, want, atol=1e-6)

    def test_multiplied_beforehand(self):
        hidden_query, hidden_key = QUERY @ W_QUERY, KEY @ W_KEY
        out = _additive(hidden_query, hidden_key, VALUE, w_query=None, w_key=None, v=V)
        np.testing.assert_allclose(out, _additive(QUERY, KEY, VALUE, w_query=W_QUERY, w_key=W_KEY, v=V), atol=1e-5)

    def test_scale(self):
        halved = _additive(QUERY, KEY, VALUE, w_query=W_QUERY, w_key=W_KEY, v=V, scale=0.5)
        np.testing.assert_allclose(
            halved, _additive(QUERY, KEY, VALUE, w_query=W_QUERY, w_key=W_KEY, v=V / 2), atol=1e-6
        )

    @pytest.mark.parametrize(("length", "width"), [(1, 8), (3, 8), (8, 8), (17, 8), (19, 3), (7, 1)])
    def test_every_number_of_blocks(self, length, width):
        """More queries than hidden units, fewer, and lengths that no block divides."""
        query, key, v = _normal(1, 1, length, 1, width), _normal(2, 1, 4, 1, width), _normal(3, width)
        _, weights = _additive(query, key, key, w_query=None, w_key=None, v=v, return_weights=True)
        scores = np.tanh(query[0, :, None, 0] + key[0, None, :, 0]) @ v
        want = softmax_over(scores, np.ones(scores.shape, bool))
        np.testing.assert_allclose(np.asarray(weights)[0, 0], want, atol=1e-6)

    def test_gradients_of_the_parameters(self):
        def loss(attend, parameters):
            return jnp.square(attend(QUERY, KEY, VALUE, parameters)).sum()

        def blocked(query, key, value, parameters):
            return additive_attention(query, key, value, **parameters)

        def plain(query, key, value, parameters):
            query = jnp.repeat((query @ parameters["w_query"])[:, :, None], S, axis=2)
            key = jnp.repeat(jnp.repeat(key @ parameters["w_key"], N // K, axis=2)[:, None], T, axis=1)
            weights = jax.nn.softmax(jnp.tanh(query + key) @ parameters["v"], axis=2)
            return jnp.einsum("BTSN,BSNU->BTNU", weights, jnp.repeat(value, N // K, axis=2))

        parameters = {"w_query": W_QUERY, "w_key": W_KEY, "v": V}
        got, want = (jax.jit(jax.grad(functools.partial(loss, attend)))(parameters) for attend in (blocked, plain))
        for name, gradient in want.items():
            np.testing.assert_allclose(got[name], gradient, atol=1e-4, err_msg=name)

    def test_never_holds_the_hidden_layer_of_all_pairs(self):
        """A fortieth of it, forward and backward, where the plain formula needs all of it for its gradient."""
        t, s, f = 1024, 512, 256
        query, key = jax.ShapeDtypeStruct((1, t, 1, f), jnp.float32), jax.ShapeDtypeStruct((1, s, 1, f), jnp.float32)

        def loss(query, key, v):
            return jnp.square(additive_attention(query, key, key, w_query=None, w_key=None, v=v)).sum()

        def plain(query, key, v):
            weights = jax.nn.softmax(jnp.tanh(query + key.transpose(0, 2, 1, 3)) @ v)
            return jnp.square(weights @ key[:, :, 0]).sum()

        def bytes_of(fn):
            v = jax.ShapeDtypeStruct((f,), jnp.float32)
            return jax.jit(fn).lower(query, key, v).compile().memory_analysis().temp_size_in_bytes

        hidden_layer = 4 * t * s * f

        def forward_and_backward(*arrays):
            return loss(*arrays), jax.grad(loss, argnums=(0, 1, 2))(*arrays)

        assert bytes_of(forward_and_backward) < hidden_layer / 40
        assert bytes_of(jax.grad(plain, argnums=(0, 1, 2))) >= hidden_layer

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"w_query": W_KEY}, r"kernel of the query must have shape \[3, F\] or \[4, 3, F\].*got \(6, 8\)"),
            ({"w_key": np.ones((N, J, F), np.float32)}, r"kernel of the key must have shape \[6, F\] or \[2, 6, F\]"),
            ({"w_key": np.ones((J, F + 1), np.float32)}, r"one width F: queries have 8, keys 9, v has shape \(8,\)"),
            ({"v": np.ones((K, F), np.float32)}, r"one width F: queries have 8, keys 8, v has shape \(2, 8\)"),
            ({"query": QUERY[0]}, r"query must have rank 4.*got shape \(5, 4, 3\)"),
            ({"query": QUERY[:1]}, "query and key must have equal batch sizes, got 1 != 2"),
            ({"query": QUERY[:, :, :3]}, "must divide 3 query heads, got 2 key heads"),
            ({"value": VALUE[:, :-1]}, r"value must have .* logits of shape \(2, 4, 5, 7\); got \(2, 6, 2, 9\)"),
            ({"mask": np.ones((B, 1, 1, S), np.float32)}, "mask must be boolean"),
            ({"bias": np.ones((B, 1, 1, T), np.float32)}, r"bias must be broadcastable to .* got shape \(2, 1, 1, 5\)"),
        ],
    )
    def test_errors(self, changed, message):
        arguments = {"query": QUERY, "key": KEY, "value": VALUE, "w_query": W_QUERY, "w_key": W_KEY, "v": V}
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(additive_attention, **arguments | changed)


class TestCoverage:
    """Equations 10 to 12 of See et al. (2017)."""

    PARAMETERS = {"w_query": W_QUERY, "w_key": W_KEY, "v": V, "w_coverage": 3 * _normal(6, F)}  # noqa: RUF012

    @pytest.mark.parametrize("shape", [(B, N, T, S), (1, 1, 1, S), (B, 1, T, S), (B, N, 1, S)], ids=str)
    def test_every_pair_has_its_own(self, shape):
        coverage = np.random.default_rng(7).uniform(0, 3, shape).astype(np.float32)
        options = {"coverage": coverage, **self.PARAMETERS}
        out, weights = _additive(QUERY, KEY, VALUE, **options, return_weights=True)
        want = covered_weights(QUERY, KEY, **options)
        assert np.abs(want - additive_weights(QUERY, KEY, w_query=W_QUERY, w_key=W_KEY, v=V)).max() > 0.1
        np.testing.assert_allclose(weights, want, atol=1e-6)
        np.testing.assert_allclose(out, mixed(want, VALUE), atol=1e-5)

    @pytest.mark.parametrize("length", [3, 8, 17, 19])
    def test_every_number_of_blocks(self, length):
        query, coverage = _normal(1, B, length, N, H), _normal(2, B, N, length, S)
        w_coverage = _normal(6, N, F)  # of a head of its own
        options = self.PARAMETERS | {"coverage": coverage, "w_coverage": w_coverage}
        _, weights = _additive(query, KEY, VALUE, **options, return_weights=True)
        for head in range(N):
            alone = options | {"coverage": coverage[:, head : head + 1], "w_coverage": w_coverage[head]}
            want = covered_weights(query[:, :, head : head + 1], KEY[:, :, head // 2 : head // 2 + 1], **alone)
            np.testing.assert_allclose(weights[:, head : head + 1], want, atol=1e-6)

    def test_gradients_are_those_of_differences(self):
        coverage = np.random.default_rng(7).uniform(0, 3, (B, N, T, S)).astype(np.float32)
        cotangent = _normal(8, B, N, T, S)

        def loss(given):
            options = self.PARAMETERS | given
            return (additive_attention(QUERY, KEY, VALUE, **options, return_weights=True)[1] * cotangent).sum()

        given = {"coverage": coverage, "w_coverage": self.PARAMETERS["w_coverage"]}
        gradients = jax.jit(jax.grad(loss))(given)
        for name, array in given.items():
            direction = _normal(9, *array.shape)
            ends = [
                (covered_weights(QUERY, KEY, **self.PARAMETERS | given | {name: array + step * direction}) * cotangent)
                for step in (np.float64(1e-5), np.float64(-1e-5))
            ]
            slope = (ends[0] - ends[1]).sum() / 2e-5
            assert np.vdot(gradients[name], direction) == pytest.approx(slope, rel=1e-4)

    def test_the_loss_is_the_smaller_of_both(self):
        rng = np.random.default_rng(0)
        weights, coverage = rng.dirichlet(np.ones(S), (B, T)), rng.uniform(0, 0.3, (B, T, S))
        want = [
            [sum(map(min, *pair)) for pair in zip(*rows, strict=True)] for rows in zip(weights, coverage, strict=True)
        ]
        got = jax.jit(coverage_loss)(weights.astype(np.float32), coverage.astype(np.float32))
        np.testing.assert_allclose(got, want, rtol=1e-6)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"coverage": None}, "coverage and w_coverage go together"),
            ({"w_coverage": None}, "coverage and w_coverage go together"),
            (
                {"coverage": np.ones((B, 1, S), np.float32)},
                r"coverage must be broadcastable to .* got shape \(2, 1, 7\)",
            ),
            ({"coverage": np.ones((B, 1, S, T), np.float32)}, r"= \(2, 4, 5, 7\), got shape \(2, 1, 7, 5\)"),
            (
                {"w_coverage": np.ones((K, F), np.float32)},
                r"w_coverage must have shape \[8\] or \[4, 8\], got \(2, 8\)",
            ),
        ],
    )
    def test_errors(self, changed, message):
        options = {"coverage": np.ones((1, 1, 1, S), np.float32), **self.PARAMETERS} | changed
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(additive_attention, **options), QUERY, KEY, VALUE)


class TestLuong:
    def test_general(self):
        _, weights = _general(QUERY, KEY, VALUE, w=W, return_weights=True)
        np.testing.assert_allclose(weights, general_weights(QUERY, KEY, w=W), atol=1e-5)

    def test_general_with_a_kernel_for_each_head(self):
        w = _normal(7, N, H, J)
        _, weights = _general(QUERY, KEY, VALUE, w=w, return_weights=True)
        want = weights_of(lambda n, q, k: q @ np.asarray(w[n], np.float64) @ k, QUERY, KEY)
        np.testing.assert_allclose(weights, want, atol=1e-5)

    def test_dot_is_general_with_the_identity(self):
        key = KEY[..., :H]
        for scale in (None, 0.5):
            out = _general(QUERY, key, VALUE, w=np.eye(H, dtype=np.float32), scale=scale)
            want = mixed(dense_weights(QUERY, key, scale=scale or 1.0), VALUE)
            np.testing.assert_allclose(out, want, atol=1e-6)

    def test_attentional_vector(self):
        context, state, w = _normal(0, 2, 3, U), _normal(1, 2, 3, H), _normal(2, U + H, F)
        want = np.tanh(np.concatenate([context, state], axis=-1) @ np.asarray(w))
        np.testing.assert_allclose(jax.jit(attentional_vector)(context, state, w), want, atol=1e-5)


@pytest.mark.parametrize("size", [16, 128, 1024])
def test_why_the_dot_product_is_scaled(size):
    """q . k of unit normals has variance d; unscaled, softmax saturates as d grows and its gradient vanishes."""
    query, key = np.random.default_rng(size).normal(size=(2, 2**14 // size, 64, size))
    products = query @ key.swapaxes(1, 2)
    np.testing.assert_allclose(products.var() / size, 1.0, atol=0.02)  # a standard error is below 0.006

    def sensitivity(logits):
        weights = softmax_over(logits, np.ones(logits.shape, bool))
        return (weights * (1 - weights)).sum(axis=-1).mean()  # the trace of the Jacobian of softmax

    logits = products[0]
    assert sensitivity(logits / np.sqrt(size)) > 0.9
    assert sensitivity(logits) < 3 / np.sqrt(size)
