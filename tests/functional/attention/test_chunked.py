"""Chunked attention is dense attention, whatever the chunks, bias, mask and dropout."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tfx_jax.functional import chunked_attention, dot_product_attention

DIMS = chex.Dimensions(B=2, T=11, S=14, N=4, K=2, H=8, U=6)


def _inputs(dims=DIMS, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=dims[axes]).astype(dtype) for axes in ("BTNH", "BSKH", "BSKU"))


def _loss(attend, arrays, **options):
    out = attend(*arrays, **options)
    return jnp.square(out - 1.0).sum(), out


def _gradients(attend, arrays, **options):
    """Of the square distance to 1, with respect to all arrays; and the output."""
    return jax.jit(jax.grad(functools.partial(_loss, attend), has_aux=True))(arrays, **options)


# One program for all tests of these sizes: whatever hides a key is a mask here, and a bias is one for all pairs.
_dense_gradients = jax.jit(jax.grad(functools.partial(_loss, dot_product_attention), has_aux=True))


def _dense(arrays, bias=0.0, mask=True):
    (b, t, n, _), s = arrays[0].shape, arrays[1].shape[1]
    full = np.broadcast_to(np.asarray(bias, arrays[0].dtype), (b, n, t, s))
    gradients, out = _dense_gradients((*arrays, full), mask=np.broadcast_to(mask, (b, n, t, s)))
    return gradients[:3], np.asarray(gradients[3]), out


def _not_later(num_queries, num_keys):
    """Causality aligned at the last key, as `causal_mask` has it."""
    return np.tri(num_queries, num_keys, num_keys - num_queries, dtype=bool)[None, None]


@pytest.mark.parametrize(
    ("chunk_size", "is_causal"),
    [
        (1, True),
        (4, False),
        (4, True),
        (512, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(512, True, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_any_size_change_nothing(chunk_size, is_causal):
    mask = np.arange(DIMS.S)[None, None, None] < np.array([9, 0])[:, None, None, None]
    attend = functools.partial(chunked_attention, chunk_size=chunk_size, is_causal=is_causal)
    gradients, out = _gradients(attend, _inputs(), mask=mask)
    seen = mask & _not_later(DIMS.T, DIMS.S) if is_causal else mask
    want_gradients, _, want = _dense(_inputs(), mask=seen)
    chex.assert_trees_all_close((gradients, out), (want_gradients, want), atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[1], 0)


@pytest.mark.parametrize(
    "axes", ["BNTS", "B11S", "11TS", *(pytest.param(axes, marks=pytest.mark.slow) for axes in ("1N1S", "B1T1"))]
)
def test_bias_and_mask_of_every_shape_with_gradients(axes):
    shape = tuple(1 if axis == "1" else getattr(DIMS, axis) for axis in axes)
    random = np.random.default_rng(1)
    bias, mask = random.normal(size=shape).astype(np.float32), random.random(shape) < 0.6
    attend = functools.partial(chunked_attention, chunk_size=4)
    (*gradients, for_bias), out = _gradients(attend, (*_inputs(), bias), mask=mask)
    want_gradients, for_all_pairs, want = _dense(_inputs(), bias, mask)
    chex.assert_trees_all_close((tuple(gradients), out), (want_gradients, want), atol=2e-5, rtol=1e-5)
    broadcast = tuple(axis for axis, size in enumerate(shape) if size == 1)
    np.testing.assert_allclose(for_bias, for_all_pairs.sum(axis=broadcast, keepdims=True), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(13, 5), (1, 9), (9, 1)])
def test_causality_is_aligned_at_the_last_key(num_queries, num_keys):
    dims = chex.Dimensions(B=2, T=num_queries, S=num_keys, N=4, K=1, H=8, U=6)
    query, key, value = _inputs(dims)
    out = jax.jit(functools.partial(chunked_attention, chunk_size=3, is_causal=True, scale=0.7))(query, key, value)
    np.testing.assert_allclose(out, mixed(dense_weights(query, key, is_causal=True, scale=0.7), value), atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[:, : max(0, num_queries - num_keys)], 0)


def test_chunks_hidden_by_causality_are_not_computed():
    """A NaN in them would spread through any product, were it multiplied by zero."""
    query, key, value = _inputs(chex.Dimensions(B=1, T=12, S=12, N=1, K=1, H=4, U=4))
    value[:, 8:] = np.nan
    out = np.asarray(jax.jit(functools.partial(chunked_attention, is_causal=True, chunk_size=4))(query, key, value))
    chex.assert_tree_all_finite(out[:, :8])
    assert np.isnan(out[:, 8:]).all()


def test_segments_across_chunks_with_gradients():
    query_ids = np.array([[1] * 4 + [2] * 7, [0] * 2 + [3] * 9])
    key_ids = np.array([[2] * 6 + [1] * 8, [3] * 3 + [4] * 8 + [0] * 3])
    same = (query_ids[:, :, None] == key_ids[:, None]) & (query_ids != 0)[:, :, None]
    attend = functools.partial(chunked_attention, chunk_size=4)
    gradients, out = _gradients(attend, _inputs(), segment_ids=(query_ids, key_ids))
    want_gradients, _, want = _dense(_inputs(), mask=same[:, None])
    chex.assert_trees_all_close((gradients, out), (want_gradients, want), atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(out)[1, :2], 0)


@functools.cache
def _dropped_and_clean(rate):
    """Weights after dropout, read off with unit vectors as values, and before, both [B, T, N, S]."""
    dims = chex.Dimensions(B=2, T=30, S=48, N=4, K=2, H=8, U=48)
    query, key, _ = _inputs(dims)
    value = np.broadcast_to(np.eye(dims.S, dtype=np.float32)[None, :, None], dims["BSKU"])
    attend = jax.jit(functools.partial(chunked_attention, chunk_size=6, dropout_rate=rate, return_weights=True))
    out, weights = attend(query, key, value, dropout_rng=jax.random.key(1))
    return np.asarray(out), np.asarray(weights).transpose(0, 2, 1, 3)


class TestDropout:
    RATE = 0.3

    def test_statistics_and_weights_before_it(self):
        dropped, weights = _dropped_and_clean(self.RATE)
        is_dropped = dropped == 0
        sigma = np.sqrt(self.RATE * (1 - self.RATE) / dropped.size)
        assert abs(is_dropped.mean() - self.RATE) < 3 * sigma
        np.testing.assert_allclose(dropped[~is_dropped], weights[~is_dropped] / (1 - self.RATE), rtol=1e-4)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)

    def test_no_two_chunks_drop_the_same(self):
        is_dropped = _dropped_and_clean(self.RATE)[0] == 0
        patterns = is_dropped.transpose(0, 2, 1, 3).reshape(8, 5, 6, 8, 6).transpose(1, 3, 0, 2, 4).reshape(40, -1)
        agreement = (patterns[:, None] == patterns[None]).mean(axis=-1)[np.triu_indices(40, 1)]
        assert agreement.max() < 0.75  # 0.58 by chance, with a standard deviation of 0.03

    def test_the_gradient_sees_what_the_output_saw(self):
        """For a given key the function is smooth, so that its central differences check the regenerated masks."""
        with jax.enable_x64(True):
            inputs = (*_inputs(dtype=jnp.float64), np.random.default_rng(2).normal(size=(1, 4, 1, 14)))
            random = np.random.default_rng(3)
            directions = [random.normal(size=x.shape) for x in inputs]
            attend = functools.partial(chunked_attention, chunk_size=4, dropout_rate=0.4)

            @jax.jit
            @jax.value_and_grad
            def loss(inputs):
                return jnp.sin(attend(*inputs, is_causal=True, dropout_rng=jax.random.key(7))).sum()

            step = 1e-6
            ahead, behind = (
                float(loss(tuple(x + sign * step * d for x, d in zip(inputs, directions, strict=True)))[0])
                for sign in (1, -1)
            )
            gradients = loss(inputs)[1]
            got = sum((np.asarray(g) * d).sum() for g, d in zip(gradients, directions, strict=True))
            np.testing.assert_allclose(got, (ahead - behind) / (2 * step), rtol=1e-7)

    def test_no_rng_is_evaluation_and_the_same_rng_the_same(self):
        clean = jax.jit(functools.partial(chunked_attention, chunk_size=4))
        attend = jax.jit(functools.partial(chunked_attention, chunk_size=4, dropout_rate=0.5))
        np.testing.assert_array_equal(attend(*_inputs()), clean(*_inputs()))
        keys = [jax.random.key(seed) for seed in (1, 1, 2)]
        first, again, other = (np.asarray(attend(*_inputs(), dropout_rng=rng)) for rng in keys)
        np.testing.assert_array_equal(first, again)
        assert np.abs(first - other).max() > 0.1


class TestPrecision:
    def test_float64_is_float64_throughout(self):
        with jax.enable_x64(True):
            query, key, value = _inputs(dtype=jnp.float64)
            out = jax.jit(functools.partial(chunked_attention, chunk_size=4, is_causal=True))(query, key, value)
            assert out.dtype == jnp.float64
            np.testing.assert_allclose(out, mixed(dense_weights(query, key, is_causal=True), value), atol=1e-13)

    def test_bfloat16_sums_in_float32(self):
        """A thousand equal weights: added up in bfloat16 the sum would stop at 256."""
        dims = chex.Dimensions(B=1, T=1, S=1024, N=1, K=1, H=8, U=8)
        query, key, value = (np.ones_like(x, jnp.bfloat16) for x in _inputs(dims))
        out = jax.jit(functools.partial(chunked_attention, chunk_size=8))(query, key, value)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)

    def test_weights_of_huge_logits_are_still_exact_in_the_gradient(self):
        """The statistics are kept apart: the logarithm of the sum would be lost next to a logit of 1e6."""
        query, key, value = _inputs()
        offset = np.full((1, 1, 1, DIMS.S), 2.0**20, np.float32)
        (*gradients, _), out = _gradients(
            functools.partial(chunked_attention, chunk_size=4), (query * 8, key * 8, value, offset)
        )
        want_gradients, _, want = _dense((query * 8, key * 8, value), offset)
        chex.assert_trees_all_close((tuple(gradients), out), (want_gradients, want), atol=1e-4, rtol=1e-4)


class TestTransformations:
    def test_a_huge_hidden_logit_leaves_second_derivatives_finite(self):
        query, key, value = _inputs()
        is_visible = np.arange(DIMS.S) != 1
        key = np.where(is_visible[:, None, None], key, np.float32(1e20))
        mask = is_visible[None, None, None]

        @functools.partial(jax.jit, static_argnums=0)
        def second(attend, query):
            def loss(query):
                return jnp.sin(attend(query, key, value, mask=mask)).sum()

            return jax.grad(lambda query: (jax.grad(loss)(query) ** 2).sum())(query)

        got = second(functools.partial(chunked_attention, chunk_size=4), query)
        np.testing.assert_allclose(got, second(dot_product_attention, query), atol=1e-4, rtol=1e-4)

    def test_forward_mode_is_refused_and_derivatives_of_gradients_work(self):
        query, key, value = _inputs()
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jit(lambda x: jax.jvp(lambda x: chunked_attention(x, key, value), (x,), (x,))).lower(query)

        def hessian_times_query(attend):
            gradient = jax.grad(lambda x: jnp.square(attend(x, key, value, is_causal=True)).sum())
            return jax.jit(lambda x: jax.jvp(gradient, (x,), (x,))[1])(query)

        got = hessian_times_query(functools.partial(chunked_attention, chunk_size=4))
        np.testing.assert_allclose(got, hessian_times_query(dot_product_attention), atol=1e-4, rtol=1e-4)

    def test_within_shard_map_with_a_bias_that_is_not_sharded(self):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        bias = np.random.default_rng(4).normal(size=(1, DIMS.N, 1, DIMS.S)).astype(np.float32)
        attend = jax.shard_map(
            functools.partial(chunked_attention, chunk_size=4, is_causal=True),
            mesh=mesh,
            in_specs=(P("data"), P("data"), P("data"), P()),
            out_specs=P("data"),
        )
        (*gradients, for_bias), out = _gradients(attend, (*_inputs(), bias))
        want_gradients, for_all_pairs, want = _dense(_inputs(), bias, _not_later(DIMS.T, DIMS.S))
        chex.assert_trees_all_close((tuple(gradients), out), (want_gradients, want), atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(for_bias, for_all_pairs.sum(axis=(0, 2), keepdims=True), atol=5e-5, rtol=1e-5)

    def test_memory_grows_with_the_length_not_its_square(self):
        """Also with a bias for each key, dropout and causality."""

        def temporary(length):
            like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
            bias = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.float32)

            def loss(query, key, value, bias):
                attend = functools.partial(chunked_attention, is_causal=True, chunk_size=256, dropout_rate=0.1)
                return jnp.square(attend(query, key, value, bias, dropout_rng=jax.random.key(0))).sum()

            program = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(like, like, like, bias).compile()
            return program.memory_analysis().temp_size_in_bytes

        short, long = temporary(4096), temporary(16384)
        assert long < 4 * short
        assert long < 16384 * 16 * 4 * 32  # of the order of query, key and value


def test_the_scale_may_be_an_array_with_a_derivative():
    arrays = _inputs()

    def loss(scale, implementation):
        return jnp.square(dot_product_attention(*arrays, scale=scale, implementation=implementation)).sum()

    for function in (loss, jax.grad(loss)):
        got, want = (jax.jit(function, static_argnums=1)(0.3, name) for name in ("chunked", "xla"))
        np.testing.assert_allclose(got, want, rtol=1e-4)
    with pytest.raises(ValueError, match="logits_soft_cap must be a Python number in chunked attention"):
        chunked_attention(*arrays, logits_soft_cap=jnp.float32(3))


def test_chunks_need_a_size():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        chunked_attention(*_inputs(), chunk_size=0)


def test_segment_ids_of_the_wrong_length():
    with pytest.raises(ValueError, match="segment_ids must have shapes"):
        chunked_attention(*_inputs(), segment_ids=np.ones((2, 11), int))
