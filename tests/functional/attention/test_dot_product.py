"""Scaled dot-product attention against equation 1 of Vaswani et al. (2017), computed query by query in float64."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.functional.attention.oracles.dense import dense_weights, mixed, softmax_over
from tfx_jax.functional import dot_product_attention

DIMS = chex.Dimensions(B=3, T=5, S=7, N=8, K=2, H=9, U=6)  # all different, and G = 4
SQUARE = chex.Dimensions(B=2, T=6, S=6, N=4, K=4, H=8, U=8)  # what jax.nn.dot_product_attention can do as well


# One program instead of a dozen operations to compile: these tests are about values.
_jitted = jax.jit(dot_product_attention, static_argnames=("is_causal", "scale", "dropout_rate", "return_weights"))


def _inputs(dims=DIMS, seed=0):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=dims[axes]).astype(np.float32) for axes in ("BTNH", "BSKH", "BSKU"))


def _bias(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _mask(shape, seed=2):
    """Random visibility in which every query sees a key."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def _oracle(query, key, value, bias=0.0, mask=True, scale=None):
    return mixed(dense_weights(query, key, bias=bias, mask=mask, scale=scale), value)


def _oracle_gradients(query, key, value, bias, mask, cotangent):
    """The chain rule through equation 1, by hand: what `cotangent` on the output means for the four inputs."""
    (b, t, n, h), k = query.shape, key.shape[2]
    weights = dense_weights(query, key, bias=bias, mask=mask)
    query, key, value, cotangent = (np.asarray(x, np.float64) for x in (query, key, value, cotangent))
    d_query, d_key, d_value, d_bias = (np.zeros(x.shape) for x in (query, key, value, weights))
    for batch, head, position in np.ndindex(b, n, t):
        group = head // (n // k)
        row, upstream = weights[batch, head, position], cotangent[batch, position, head]
        d_row = value[batch, :, group] @ upstream
        d_logits = row * (d_row - row @ d_row)
        d_bias[batch, head, position] = d_logits
        d_query[batch, position, head] = d_logits @ key[batch, :, group] / np.sqrt(h)
        d_key[batch, :, group] += np.outer(d_logits, query[batch, position, head]) / np.sqrt(h)
        d_value[batch, :, group] += np.outer(row, upstream)
    return d_query, d_key, d_value, d_bias


def _causal(num_queries, num_keys):
    return np.array([[s <= t + num_keys - num_queries for s in range(num_keys)] for t in range(num_queries)])


class TestEquation:
    def test_equals_oracle(self):
        out, weights = _jitted(*_inputs(), return_weights=True)
        chex.assert_shape(out, DIMS["BTNU"])
        chex.assert_shape(weights, DIMS["BNTS"])
        np.testing.assert_allclose(out, _oracle(*_inputs()), atol=1e-5)
        np.testing.assert_allclose(weights, dense_weights(*_inputs()[:2]), atol=1e-6)

    @pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
    def test_grouped_queries(self, num_kv_heads):
        inputs = _inputs(chex.Dimensions(B=3, T=5, S=7, N=8, K=num_kv_heads, H=9, U=6))
        np.testing.assert_allclose(_jitted(*inputs), _oracle(*inputs), atol=1e-5)

    @pytest.mark.parametrize("full", list(itertools.product([True, False], repeat=4)), ids=str)
    def test_every_broadcastable_mask_and_bias(self, full):
        mask = _mask(tuple(size if whole else 1 for size, whole in zip(DIMS["BNTS"], full, strict=True)))
        bias = _bias(tuple(1 if whole else size for size, whole in zip(DIMS["BNTS"], full, strict=True)))
        out = _jitted(*_inputs(), bias, mask)
        np.testing.assert_allclose(out, _oracle(*_inputs(), bias, mask), atol=1e-5)

    @pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
    def test_scale(self, scale):
        out = _jitted(*_inputs(), scale=scale)
        np.testing.assert_allclose(out, _oracle(*_inputs(), scale=scale), atol=1e-5)

    def test_bias_is_not_scaled(self):
        bias = _bias(DIMS["BNTS"])
        _, weights = _jitted(*_inputs(), bias, scale=0.0, return_weights=True)
        np.testing.assert_allclose(weights, softmax_over(bias, np.ones(bias.shape, bool)), atol=1e-6)

    @pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 5), (3, 7), (7, 3), (1, 6)])
    def test_causal_aligns_the_last_query_with_the_last_key(self, num_queries, num_keys):
        inputs = _inputs(chex.Dimensions(B=2, T=num_queries, S=num_keys, N=4, K=2, H=8, U=6))
        mask = _causal(num_queries, num_keys)
        np.testing.assert_allclose(_jitted(*inputs, is_causal=True), _oracle(*inputs, mask=mask), atol=1e-5)

    def test_single_segment_ids_are_those_of_queries_and_keys(self):
        ids = np.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 1, 1]])
        mask = np.array([[[[a == b != 0 for b in row] for a in row]] for row in ids.tolist()])
        out = _jitted(*_inputs(SQUARE), segment_ids=ids)
        np.testing.assert_allclose(out, _oracle(*_inputs(SQUARE), mask=mask), atol=1e-5)

    def test_pair_of_segment_ids_with_causality_and_mask(self):
        random = np.random.default_rng(3)
        query_ids, key_ids = random.integers(0, 3, DIMS["BT"]), random.integers(0, 3, DIMS["BS"])
        padding = random.random((DIMS.B, 1, 1, DIMS.S)) < 0.8
        same = np.array(
            [[[[a == b != 0 for b in k] for a in q]] for q, k in zip(query_ids.tolist(), key_ids.tolist(), strict=True)]
        )
        visible = same & padding & _causal(DIMS.T, DIMS.S)
        out = _jitted(
            *_inputs(),
            mask=padding,
            is_causal=True,
            segment_ids=(query_ids, key_ids),
        )
        np.testing.assert_allclose(out, _oracle(*_inputs(), mask=visible), atol=1e-5)

    def test_packed_segments_equal_separate_sequences(self):
        query, key, value = _inputs(SQUARE)
        ids = np.array([[1, 1, 1, 1, 2, 2]] * SQUARE.B)
        packed = np.asarray(_jitted(query, key, value, is_causal=True, segment_ids=ids))
        for part in (slice(0, 4), slice(4, 6)):
            alone = _jitted(query[:, part], key[:, part], value[:, part], is_causal=True)
            np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)

    @settings(deadline=None, max_examples=8)
    @given(data=st.data())
    def test_any_sizes_and_any_mask(self, data):
        size = st.integers(1, 5)
        b, t, s, k, g, h, u = (data.draw(size, label=name) for name in "BTSKGHU")
        dims = chex.Dimensions(B=b, T=t, S=s, N=k * g, K=k, H=h, U=u)
        inputs = _inputs(dims, seed=data.draw(st.integers(0, 1000), label="seed"))
        visible = st.lists(st.booleans(), min_size=b * t * s, max_size=b * t * s)
        mask = np.array(data.draw(visible, label="mask")).reshape(b, 1, t, s)
        is_causal = data.draw(st.booleans(), label="is_causal")
        out = _jitted(*inputs, mask=mask, is_causal=is_causal)
        np.testing.assert_allclose(out, _oracle(*inputs, mask=mask & _causal(t, s) if is_causal else mask), atol=1e-5)

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
    def test_equals_jax_nn_where_both_are_defined(self, options):
        bias, mask = _bias(SQUARE["BNTS"]), _mask((SQUARE.B, 1, 1, SQUARE.S))
        out = _jitted(*_inputs(SQUARE), bias, mask, **options)
        theirs = jax.jit(functools.partial(jax.nn.dot_product_attention, **options))
        np.testing.assert_allclose(out, theirs(*_inputs(SQUARE), bias, mask), atol=1e-6)

    @pytest.mark.parametrize("num_heads", [1, 4, 8, 16, 32])
    def test_heads_share_the_model_width_as_in_table_3(self, num_heads):
        dims = chex.Dimensions(B=2, T=5, S=7, D=512, N=num_heads, H=512 // num_heads)
        assert dims.N * dims.H == dims.D

        def multi_head(x, memory, to_query, to_key, to_value, merge):
            query = jnp.einsum("BTD,DNH->BTNH", x, to_query)
            key, value = (jnp.einsum("BSD,DNH->BSNH", memory, kernel) for kernel in (to_key, to_value))
            context, weights = dot_product_attention(query, key, value, return_weights=True)
            chex.assert_shape([query, context], dims["BTNH"])
            chex.assert_shape([key, value], dims["BSNH"])
            chex.assert_shape(weights, dims["BNTS"])
            return jnp.einsum("BTNH,NHD->BTD", context, merge)

        shapes = [dims[axes] for axes in ("BTD", "BSD", "DNH", "DNH", "DNH", "NHD")]
        out = jax.eval_shape(multi_head, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
        chex.assert_shape(out, dims["BTD"])


class TestGradients:
    def test_equal_the_chain_rule_by_hand(self):
        inputs = (*_inputs(), _bias(DIMS["BNTS"]))
        mask = _mask(DIMS["BNTS"])
        mask[1, :, 2] = False  # a query that sees nothing
        cotangent = np.random.default_rng(4).normal(size=DIMS["BTNU"]).astype(np.float32)
        pull_back = jax.jit(lambda inputs, cotangent: jax.vjp(lambda *x: _jitted(*x, mask), *inputs)[1](cotangent))
        for got, want in zip(pull_back(inputs, cotangent), _oracle_gradients(*inputs, mask, cotangent), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_oracle_gradients_equal_central_differences(self, seed):
        """Checks the oracle itself: along a random direction, in float64."""
        random = np.random.default_rng(seed)
        inputs = [np.asarray(x, np.float64) for x in (*_inputs(), _bias(DIMS["BNTS"]))]
        mask, cotangent = _mask(DIMS["BNTS"]), random.normal(size=DIMS["BTNU"])
        direction = [random.normal(size=x.shape) for x in inputs]
        ahead, behind = (
            _oracle(*(x + step * d for x, d in zip(inputs, direction, strict=True)), mask) for step in (1e-5, -1e-5)
        )
        gradients = _oracle_gradients(*inputs, mask, cotangent)
        slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        np.testing.assert_allclose(slope, ((ahead - behind) * cotangent).sum() / 2e-5, rtol=1e-7)


class TestMasking:
    def test_hidden_keys_change_nothing_bit_for_bit(self):
        query, key, value = _inputs()
        is_hidden = np.arange(DIMS.S) % 3 == 1
        attend = functools.partial(_jitted, mask=~is_hidden[None, None, None], return_weights=True)
        for junk in np.array([-3.0, 1e30, -3e38], np.float32):
            junk_key, junk_value = (np.where(is_hidden[None, :, None, None], junk, x) for x in (key, value))
            chex.assert_trees_all_equal(attend(query, key, value), attend(query, junk_key, junk_value))

    def test_future_changes_nothing_bit_for_bit(self):
        query, key, value = _inputs(SQUARE)
        before = np.asarray(_jitted(query, key, value, is_causal=True))
        for token in range(SQUARE.S):
            bump = 2.0 * (np.arange(SQUARE.S) == token)[None, :, None, None].astype(np.float32)
            after = np.asarray(_jitted(query, key + bump, value + bump, is_causal=True))
            np.testing.assert_array_equal(before[:, :token], after[:, :token])
            assert (np.abs(before - after)[:, token:].max(axis=(0, 2, 3)) > 1e-3).all()

    def test_hidden_keys_stay_hidden_below_the_lowest_logits(self):
        mask = _mask(DIMS["BNTS"])
        _, weights = _jitted(*_inputs(), np.full((1, 1, 1, 1), -1e30, np.float32), mask, return_weights=True)
        np.testing.assert_allclose(weights, mask / mask.sum(axis=-1, keepdims=True), atol=1e-6)

    def test_hidden_keys_get_no_gradient(self):
        query, key, value = _inputs()
        hidden = np.arange(DIMS.S) > 3

        def loss(key, value):
            return jnp.square(_jitted(query, key, value, mask=~hidden[None, None, None])).sum()

        for gradient in map(np.asarray, jax.jit(jax.grad(loss, argnums=(0, 1)))(key, value)):
            np.testing.assert_array_equal(gradient[:, hidden], 0)
            assert (np.abs(gradient[:, ~hidden]).max(axis=-1) > 0).all()

    def test_hidden_values_must_be_finite(self):
        """The limit of the promise, as documented: a weight of zero does not silence a NaN."""
        query, key, value = _inputs()
        value[:, 0] = np.nan
        assert np.isnan(_jitted(query, key, value, mask=(np.arange(DIMS.S) > 0)[None, None, None])).all()

    @pytest.mark.parametrize(
        ("options", "empty"),
        [
            ({"mask": (np.arange(7) != 2)[None, None, :, None]}, [2]),
            ({"mask": np.zeros((1, 1, 1, 1), bool)}, [0, 1, 2, 3, 4, 5, 6]),
            ({"is_causal": True}, [0, 1, 2]),
            ({"segment_ids": (np.array([[0, 1, 1, 1, 1, 0, 0]]), np.array([[1, 1, 1, 0]]))}, [0, 5, 6]),
            ({"segment_ids": (np.array([[1, 1, 1, 1, 1, 5, 1]]), np.array([[1, 1, 1, 1]]))}, [5]),
        ],
        ids=["row", "all", "causal", "padding", "lonely segment"],
    )
    def test_query_without_keys_is_zero_with_finite_gradients(self, options, empty):
        inputs = _inputs(chex.Dimensions(B=1, T=7, S=4, N=6, K=3, H=8, U=2))

        def loss(inputs):
            out, weights = dot_product_attention(*inputs, return_weights=True, **options)
            return jnp.square(out - 1.0).sum(), (out, weights)

        gradients, (out, weights) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
        np.testing.assert_array_equal(np.asarray(out)[:, empty], 0)
        np.testing.assert_array_equal(np.asarray(weights)[:, :, empty], 0)
        seen = np.setdiff1d(np.arange(7), empty)
        assert (np.abs(np.asarray(out)[:, seen]) > 0).all()
        chex.assert_tree_all_finite(gradients)
        np.testing.assert_array_equal(np.asarray(gradients[0])[:, empty], 0)

    def test_no_keys_at_all(self):
        query, key, value = _inputs()
        np.testing.assert_array_equal(_jitted(query, key[:, :0], value[:, :0], is_causal=True), 0)

    def test_one_visible_key_is_copied(self):
        query, key, value = _inputs()
        out = _jitted(query, key, value, mask=(np.arange(DIMS.S) == 4)[None, None, None])
        want = np.repeat(value[:, 4], DIMS.N // DIMS.K, axis=1)[:, None]
        np.testing.assert_array_equal(out, np.broadcast_to(want, DIMS["BTNU"]))


class TestWeights:
    def test_rows_sum_to_one_or_zero(self):
        mask = _mask(DIMS["BNTS"])
        mask[0, :, 3] = False
        weights = np.asarray(_jitted(*_inputs(), mask=mask, return_weights=True)[1])
        np.testing.assert_allclose(weights.sum(axis=-1), mask.any(axis=-1), atol=1e-6)
        np.testing.assert_array_equal(weights[~mask], 0)

    def test_output_is_weights_times_values(self):
        query, key, value = _inputs()
        out, weights = _jitted(query, key, value, is_causal=True, return_weights=True)
        np.testing.assert_allclose(out, mixed(weights, value), atol=1e-6)

    def test_program_without_weights_is_the_one_that_never_had_them(self):
        def lowered(attend):
            attend.__name__ = "attend"
            return jax.jit(attend).lower(*_inputs())

        off = lowered(lambda *inputs: dot_product_attention(*inputs))
        unused = lowered(lambda *inputs: dot_product_attention(*inputs, return_weights=True)[0])
        on = lowered(lambda *inputs: dot_product_attention(*inputs, return_weights=True))
        assert off.as_text() == unused.as_text()
        assert off.as_text() != on.as_text()
        size_off, size_on = (program.compile().memory_analysis().output_size_in_bytes for program in (off, on))
        assert size_off == 4 * np.prod(DIMS["BTNU"])
        assert size_on >= size_off + 4 * np.prod(DIMS["BNTS"])

    def test_weights_are_those_before_dropout(self):
        options = {"is_causal": True, "return_weights": True}
        dropped, weights = _jitted(*_inputs(), dropout_rate=0.5, dropout_rng=jax.random.key(0), **options)
        out, clean = _jitted(*_inputs(), **options)
        np.testing.assert_array_equal(weights, clean)
        assert np.abs(np.asarray(dropped) - np.asarray(out)).max() > 0.1


class TestDropout:
    RATE = 0.3
    NUM_HEADS, NUM_KEYS = 5, 64

    def _dropped(self, rng):
        """Weights after dropout, read off with unit vectors as values, and before."""
        random = np.random.default_rng(5)
        query = random.normal(size=(2, 48, self.NUM_HEADS, 8)).astype(np.float32)
        key = random.normal(size=(2, self.NUM_KEYS, 1, 8)).astype(np.float32)
        value = np.tile(np.eye(self.NUM_KEYS, dtype=np.float32)[None, :, None], (2, 1, 1, 1))
        out, weights = _jitted(query, key, value, dropout_rate=self.RATE, dropout_rng=rng, return_weights=True)
        return np.asarray(out), np.asarray(weights).transpose(0, 2, 1, 3)

    def test_statistics(self):
        dropped, weights = self._dropped(jax.random.key(1))
        is_dropped = dropped == 0
        sigma = np.sqrt(self.RATE * (1 - self.RATE) / dropped.size)
        assert abs(is_dropped.mean() - self.RATE) < 3 * sigma
        np.testing.assert_allclose(dropped[~is_dropped], weights[~is_dropped] / (1 - self.RATE), rtol=1e-4)
        sigma = np.sqrt(self.RATE / (1 - self.RATE) * np.square(weights).sum()) / weights.size
        assert abs(dropped.mean() - weights.mean()) < 3 * sigma

    def test_same_key_same_mask(self):
        first, again, other = (self._dropped(jax.random.key(seed))[0] for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert ((first == 0) != (other == 0)).mean() > 0.3

    def test_no_rng_is_evaluation(self):
        np.testing.assert_array_equal(_jitted(*_inputs(), dropout_rate=0.9), _jitted(*_inputs()))


class TestPrecision:
    def test_bfloat16_is_close_and_stays_bfloat16(self):
        mask = _mask(DIMS["BNTS"])
        mask[0, 0, 0] = False

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def attend(inputs):
            out, weights = dot_product_attention(*inputs, mask=mask, return_weights=True)
            return jnp.square(out.astype(jnp.float32)).sum(), (out, weights)

        half = tuple(x.astype(jnp.bfloat16) for x in _inputs())
        whole = tuple(x.astype(np.float32) for x in half)
        (gradients, (out, weights)), (want_gradients, (want, want_weights)) = attend(half), attend(whole)
        assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_allclose(weights, want_weights, atol=1e-5)  # logits and softmax are float32
        np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)
        for got, want in zip(gradients, map(np.asarray, want_gradients), strict=True):
            assert got.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=5e-2 * float(np.abs(want).max()))

    def test_huge_logits_stay_finite(self):
        query, key, value = ((1e3 * x).astype(jnp.bfloat16) for x in _inputs())

        def loss(query, key, value):
            out = _jitted(query, key, value, is_causal=True)
            return out.astype(jnp.float32).mean()

        chex.assert_tree_all_finite(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value))

    def test_float64_is_float64_throughout(self):
        with jax.enable_x64(True):
            inputs = tuple(np.random.default_rng(6).normal(size=DIMS[a]) for a in ("BTNH", "BSKH", "BSKU"))
            mask = _mask(DIMS["BNTS"])
            out, weights = _jitted(*inputs, mask=mask, return_weights=True)
            assert (out.dtype, weights.dtype) == (jnp.float64, jnp.float64)
            np.testing.assert_allclose(out, _oracle(*inputs, mask=mask), atol=1e-13)


class TestTransformations:
    def test_vmap(self):
        stacked = [np.stack(pair) for pair in zip(_inputs(seed=7), _inputs(seed=8), strict=True)]
        masks = np.stack([_mask(DIMS["BNTS"], seed=seed) for seed in (7, 8)])
        attend = functools.partial(_jitted, return_weights=True)
        mapped = jax.jit(jax.vmap(lambda q, k, v, mask: attend(q, k, v, None, mask)))(*stacked, masks)
        for i in range(2):
            alone = attend(*(x[i] for x in stacked), None, masks[i])
            chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: np.asarray(x)[i], mapped), alone, atol=1e-6)

    def test_scan_and_remat(self):
        """A scanned, rematerialized stack gives the output, maps and gradients of the plain loop."""
        mixers = (0.3 * np.random.default_rng(9).normal(size=(3, 8, 8))).astype(np.float32)
        x = _inputs(SQUARE)[0]

        def layer(x, mixer):
            out, weights = dot_product_attention(x @ mixer, x, x, is_causal=True, return_weights=True)
            return x + out, weights

        def looped(mixers, x):
            maps = []
            for mixer in mixers:
                x, weights = layer(x, mixer)
                maps.append(weights)
            return jnp.square(x).mean(), jnp.stack(maps)

        def scanned(mixers, x):
            x, maps = jax.lax.scan(jax.checkpoint(layer), x, mixers)
            return jnp.square(x).mean(), maps

        plain, transformed = (jax.jit(jax.value_and_grad(f, has_aux=True))(mixers, x) for f in (looped, scanned))
        chex.assert_trees_all_close(plain, transformed, rtol=1e-5, atol=1e-5)

    def test_compiles_once_for_equal_shapes(self):
        attend = jax.jit(chex.assert_max_traces(lambda *inputs: dot_product_attention(*inputs, is_causal=True), n=1))
        for seed in range(3):
            attend(*_inputs(seed=seed))

    def test_sharded_over_batch_and_heads(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
        sharding = NamedSharding(mesh, P("data", None, "model"))
        dims = chex.Dimensions(B=4, T=5, S=7, N=6, K=2, H=9, U=8)
        query, key, value = _inputs(dims)
        bias, mask = _bias((1, dims.N, dims.T, dims.S)), _mask((dims.B, 1, 1, dims.S))
        attend = jax.jit(functools.partial(dot_product_attention, is_causal=True, return_weights=True))
        placed = (
            *(jax.device_put(x, sharding) for x in (query, key, value)),
            jax.device_put(bias, NamedSharding(mesh, P(None, "model"))),
            jax.device_put(mask, NamedSharding(mesh, P("data"))),
        )
        out, weights = attend(*placed)
        assert out.sharding.is_equivalent_to(sharding, out.ndim)
        assert weights.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), weights.ndim)
        program = attend.lower(*placed).compile().as_text()
        assert not any(word in program for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
        chex.assert_trees_all_close((out, weights), attend(query, key, value, bias, mask), atol=1e-6)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (
                {"query": (3, 5, 72)},
                r"query must have rank 4, .* got shape \(3, 5, 72\); .* pass query\[None\] and take",
            ),
            ({"key": (7, 2, 9)}, "key must have rank 4"),
            ({"value": (1, 3, 7, 2, 6)}, r"value must have rank 4, .* got shape \(1, 3, 7, 2, 6\)(\n|$)"),
            ({"query": (3, 5, 8, 4)}, "query and key must have equal head sizes, got 4 != 9"),
            ({"value": (3, 4, 2, 6)}, r"key and value must have equal .* \(3, 7, 2\) != \(3, 4, 2\)"),
            ({"value": (3, 7, 1, 6)}, r"key and value must have equal .* \(3, 7, 2\) != \(3, 7, 1\)"),
            ({"query": (1, 5, 8, 9)}, "query and key must have equal batch sizes, got 1 != 3"),
            ({"query": (3, 5, 7, 9)}, "must divide that of query heads, got 2 key heads and 7 query heads"),
            ({"bias": (5, 7)}, r"bias must be broadcastable to \[B, N, T, S\] = \(3, 8, 5, 7\), got shape \(5, 7\)"),
            ({"bias": (3, 2, 5, 7)}, "bias must be broadcastable"),
            (
                {"bias": (5, 7)},
                r"(?m)needs 4 axes: for \[T, S\] pass bias\[None, None\], for \[B, S\] bias\[:, None, None\]$",
            ),
            (
                {"mask": (3, 5, 7)},
                r"(?m)needs 4 axes: for \[B, T, S\] pass mask\[:, None\], for \[N, T, S\] mask\[None\]$",
            ),
            ({"mask": (7,)}, r"(?m)got shape \(7,\); it needs 4 axes$"),
            ({"mask": (3, 1, 5, 5)}, r"(?m)mask must be broadcastable .* got shape \(3, 1, 5, 5\)$"),
            ({"segment_ids": (3, 5)}, r"segment_ids must have shapes .* = \(3, 5\) and .* = \(3, 7\), got"),
            ({"segment_ids": (5,)}, "segment_ids must have shapes"),
        ],
        ids=str,
    )
    def test_sizes_that_do_not_fit(self, change, match):
        arrays = dict(zip(("query", "key", "value"), _inputs(), strict=True))
        dtypes = {"mask": bool, "segment_ids": int}
        arrays |= {name: np.ones(shape, dtypes.get(name, np.float32)) for name, shape in change.items()}
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(dot_product_attention, **arrays)

    @pytest.mark.parametrize("shape", [(1, 5), (3, 1)])
    def test_segment_ids_are_not_broadcast(self, shape):
        ids = np.ones(shape, int), np.ones(DIMS["BS"], int)
        with pytest.raises(ValueError, match="segment_ids must have shapes"):
            dot_product_attention(*_inputs(), segment_ids=ids)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
    def test_mask_of_numbers(self, dtype):
        with pytest.raises(ValueError, match="mask must be boolean"):
            dot_product_attention(*_inputs(), mask=np.ones((1, 1, DIMS.T, DIMS.S), dtype))

    @pytest.mark.parametrize("rate", [-0.1, 1.0])
    def test_dropout_rate(self, rate):
        with pytest.raises(ValueError, match="dropout rate must be in"):
            _jitted(*_inputs(), dropout_rate=rate, dropout_rng=jax.random.key(0))
