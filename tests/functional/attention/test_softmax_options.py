"""Options of softmax attention: alike in the formula and in chunks, and what kernels have of them."""

import functools
import importlib
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.functional.attention.oracles.dense import mixed
from tests.functional.attention.oracles.softmax_options import option_logits, option_pairs, weights_and_lse
from tfx_jax.functional import (
    alibi_bias,
    alibi_score_mod,
    alibi_slopes,
    chunked_attention,
    dot_product_attention,
    merge_attention,
    relative_position_bias,
    sliding_window_attention,
    t5_score_mod,
)
from tfx_jax.planning.measure import without_compilation_cache

DIMS = chex.Dimensions(B=2, T=11, S=14, N=4, K=2, H=8, U=6)
IN_CHUNKS = functools.partial(chunked_attention, chunk_size=4)
both = pytest.mark.parametrize("attend", [dot_product_attention, IN_CHUNKS], ids=["xla", "chunked"])


def _inputs(dims=DIMS, seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=dims[axes]).astype(dtype) for axes in ("BTNH", "BSKH", "BSKU"))


def _compared(attends, arrays, **options):
    """Output and gradients of all arrays by each attention, from one program."""

    def loss(arrays, attend):
        out = attend(*arrays, **options)
        return jnp.square(out - 1.0).sum(), out

    return jax.jit(lambda arrays: [jax.grad(loss, has_aux=True)(arrays, attend) for attend in attends])(arrays)


DOCUMENTS = np.random.default_rng(5).integers(0, 2, (DIMS.B, DIMS.S)).astype(np.int32)
OPTIONS = {"logits_soft_cap": 1.5, "local_window_size": (6, 3), "scale": 0.6, "return_lse": True}
LENGTHS = {"query_lengths": np.array([11, 7]), "key_lengths": np.array([12, 9])}
ORACLE_LENGTHS = {"query_lengths": LENGTHS["query_lengths"], "lengths": LENGTHS["key_lengths"]}


class TestEverythingTogether:
    def _attend(self, attend, arrays, documents):
        *arrays, sinks, slopes = arrays

        def score_mod(logits, b, n, t, s):
            return (
                logits * (1 + slopes[n] ** 2)
                - slopes[n] * (s - t).astype(logits.dtype)
                + documents[b, s].astype(logits.dtype)
            )

        def mask_mod(b, n, t, s):
            return (documents[b, s] == n % 2) | (s <= t)

        return attend(*arrays, sinks=sinks, score_mod=score_mod, mask_mod=mask_mod, **OPTIONS, **LENGTHS)

    def _oracle(self, arrays):
        query, key, value, bias, sinks, slopes = arrays

        def score(logits, b, n, t, s):
            return logits * (1 + slopes[n] ** 2) - slopes[n] * (s - t) + DOCUMENTS[b, s]

        def seen(b, n, t, s):
            return DOCUMENTS[b, s] == n % 2 or s <= t

        logits = option_logits(query, key, bias=bias, scale=0.6, cap=1.5, score=score)
        pairs = option_pairs(query, key, window=(6, 3), **ORACLE_LENGTHS, seen=seen)
        weights, lse = weights_and_lse(logits, pairs, sinks)
        exists = np.arange(DIMS.T) < LENGTHS["query_lengths"][:, None]
        return mixed(weights, value) * exists[:, :, None, None], np.where(exists[:, None], lse, -np.inf)

    @both
    def test_equals_the_oracle_with_gradients(self, attend):
        """Central differences of the oracle, also of the logarithms of the denominators."""
        random = np.random.default_rng(1)
        with jax.enable_x64(True):
            arrays = *_inputs(dtype=np.float64), *(random.normal(size=size) for size in ((1, 4, 1, 14), 4, 4))
            directions = [random.normal(size=x.shape) for x in arrays]

            def loss(out, lse, namespace):
                return namespace.sin(3 * out).sum() + namespace.cos(namespace.where(lse > -1e9, lse, 0.0)).sum()

            @jax.jit
            @functools.partial(jax.grad, has_aux=True)
            def gradients(arrays, documents):
                results = self._attend(attend, arrays, documents)
                return loss(*results, jnp), results

            got, (out, lse) = gradients(arrays, DOCUMENTS)
        want, want_lse = self._oracle(arrays)
        np.testing.assert_allclose(out, want, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, atol=1e-12)
        np.testing.assert_array_equal(np.asarray(out)[1, 7:], 0)
        for number, (gradient, direction) in enumerate(zip(got, directions, strict=True)):
            ahead, behind = (
                loss(
                    *self._oracle([x + (sign * 1e-6 * direction if n == number else 0) for n, x in enumerate(arrays)]),
                    np,
                )
                for sign in (1, -1)
            )
            np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), (ahead - behind) / 2e-6, rtol=1e-6)

    def test_weights_are_those_of_the_output(self):
        options = {"logits_soft_cap": 1.5, "local_window_size": 3, **LENGTHS, "return_weights": True}
        query, key, value = _inputs()
        sinks = np.array([0.5, -1, 0, 2], np.float32)
        attends = [functools.partial(attend, sinks=sinks, **options) for attend in (dot_product_attention, IN_CHUNKS)]
        (out, weights), (chunked_out, chunked_weights) = jax.jit(lambda *x: [attend(*x) for attend in attends])(
            query, key, value
        )
        pairs = option_pairs(query, key, window=(3, 3), **ORACLE_LENGTHS)
        want = weights_and_lse(option_logits(query, key, cap=1.5), pairs, sinks)[0]
        want = want * (np.arange(DIMS.T) < LENGTHS["query_lengths"][:, None])[:, None, :, None]
        for got in (weights, chunked_weights):
            np.testing.assert_allclose(got, want, atol=1e-6)
        for got in (out, chunked_out):
            np.testing.assert_allclose(got, mixed(want, value), atol=1e-5)
        assert want.sum(axis=-1).max() < 1


class TestSinks:
    @both
    def test_minus_infinity_is_none_and_zeros_add_one_to_the_denominator(self, attend):
        query, key, value = _inputs()
        mask = np.arange(DIMS.S)[None, None, None] < np.array([9, 0])[:, None, None, None]
        program = jax.jit(functools.partial(attend, return_lse=True))
        plain, none, zeros = (
            program(query, key, value, mask=mask, sinks=None if x is None else np.full(4, x, np.float32))
            for x in (None, -np.inf, 0.0)
        )
        chex.assert_trees_all_close(none, plain, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(plain[0])[1], 0)
        np.testing.assert_array_equal(np.asarray(plain[1])[1], -np.inf)
        np.testing.assert_allclose(zeros[1], np.log1p(np.exp(np.asarray(plain[1], np.float64))), atol=1e-6)
        share = np.exp(np.asarray(plain[1] - zeros[1])).swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(zeros[0], np.asarray(plain[0]) * share, atol=1e-6)

    @pytest.mark.parametrize("sinks", [np.zeros(2, np.float32), np.zeros((1, 4), np.float32), np.zeros(4, int)])
    @both
    def test_are_a_number_for_each_query_head(self, attend, sinks):
        with pytest.raises(ValueError, match=r"sinks must be one floating-point logit .* \[N\] = \(4,\), got"):
            jax.eval_shape(functools.partial(attend, sinks=sinks), *_inputs())


class TestWindow:
    @pytest.mark.parametrize(
        ("window", "is_causal"), [((2, 5), False), (3, True), pytest.param((0, 0), False, marks=pytest.mark.slow)]
    )
    def test_equals_sliding_window_attention(self, window, is_causal):
        attends = [
            functools.partial(sliding_window_attention, window=window),
            *(functools.partial(x, local_window_size=window) for x in (dot_product_attention, IN_CHUNKS)),
        ]
        want, *got = _compared(attends, _inputs(), is_causal=is_causal)
        for answers in got:
            chex.assert_trees_all_close(answers, want, atol=2e-5, rtol=1e-5)

    def test_chunks_outside_are_not_computed(self):
        """A NaN in them would spread through any product, were it multiplied by zero."""
        query, key, value = _inputs(chex.Dimensions(B=1, T=16, S=16, N=1, K=1, H=4, U=4))
        value[:, :4] = value[:, 12:] = np.nan  # the first and the last chunk
        out = np.asarray(jax.jit(functools.partial(IN_CHUNKS, local_window_size=(4, 0)))(query, key, value))
        assert np.isnan(out).any(axis=(0, 2, 3)).tolist() == [True] * 8 + [False] * 4 + [True] * 4
        out = np.asarray(jax.jit(functools.partial(IN_CHUNKS, local_window_size=(0, 1)))(query, key, value))
        assert np.isnan(out).any(axis=(0, 2, 3)).tolist() == [True] * 4 + [False] * 4 + [True] * 8

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            ((1, -1), r"must be at least 0, got \(1, -1\)"),
            ((2,), r"must be an integer or a pair of integers \(left, right\), .* got \(2,\)"),
            ((1, 0, 0), r"must be an integer or a pair of integers .* got \(1, 0, 0\)"),
            (2.5, r"must be an integer or a pair of integers .* got 2\.5"),
            (True, r"must be an integer or a pair of integers .* got True"),
        ],
    )
    @both
    def test_others_are_refused(self, attend, size, message):
        with pytest.raises(ValueError, match=f"^local_window_size {message}"):
            jax.eval_shape(functools.partial(attend, local_window_size=size), *_inputs())


class TestStaticCache:
    """A cache of S keys of which each row has written `key_lengths`: the queries are the last ones of them."""

    @pytest.mark.parametrize("num_queries", [1, 3])
    def test_positions_count_from_the_lengths(self, num_queries):
        """Also where a window is as short as the rest of the cache, and of a block of queries none sees the future."""
        query, key, value = _inputs()
        query, lengths = query[:, :num_queries], np.array([3, 9])
        options = {"is_causal": True, "local_window_size": (2, 0)}
        attends = dot_product_attention, IN_CHUNKS, lambda *x, **_: dot_product_attention(*x, is_causal=True, **length)
        length = {"key_lengths": lengths}
        run = jax.jit(lambda *x: [attend(*x, **options, **length) for attend in attends])
        windowed, in_chunks, causal = run(query, key, value)
        for window, answers in (((2, 0), (windowed, in_chunks)), (None, (causal,))):
            pairs = option_pairs(query, key, is_causal=True, window=window, lengths=lengths)
            want = mixed(weights_and_lse(option_logits(query, key), pairs)[0], value)
            for got in answers:
                np.testing.assert_allclose(got, want, atol=1e-5)
        row = tuple(x[:1] for x in (query, key[:, :3], value[:, :3]))
        alone = jax.jit(functools.partial(dot_product_attention, **options))(*row)
        np.testing.assert_allclose(windowed[:1], alone, atol=1e-5)  # as without the rest of the cache

    def test_kernels_say_why_they_cannot(self):
        x, lengths = jnp.zeros((2, 256, 2, 128), jnp.bfloat16), jnp.array([200, 100])
        with pytest.raises(ValueError, match="'splash' has no mask_mod, got one, or key_lengths with is_causal or"):
            dot_product_attention(x[:, :128], x, x, is_causal=True, key_lengths=lengths, implementation="splash")


@pytest.mark.parametrize("cap", [0, 0.0, -1.5, np.float32(0)])
@pytest.mark.parametrize(
    "attend",
    [dot_product_attention, IN_CHUNKS, functools.partial(sliding_window_attention, window=1)],
    ids=["xla", "chunked", "window"],
)
def test_caps_that_are_not_above_0_are_refused(attend, cap):
    with pytest.raises(ValueError, match="logits_soft_cap must be above 0, or None for no cap, got"):
        jax.eval_shape(functools.partial(attend, logits_soft_cap=cap), *_inputs())


@pytest.mark.parametrize("lengths", [np.ones((2, 1), int), np.ones(3, int), np.ones(2, np.float32)], ids=str)
@pytest.mark.parametrize("name", ["query_lengths", "key_lengths"])
@both
def test_lengths_are_an_integer_for_each_row(attend, name, lengths):
    with pytest.raises(ValueError, match=rf"{name} must be integers of shape \[B\] = \(2,\), got"):
        jax.eval_shape(functools.partial(attend, **{name: lengths}), *_inputs())


class TestMerge:
    @both
    def test_parts_of_the_keys_are_all_keys(self, attend):
        """Of three parts, one hidden, and a row that sees no key; the sinks belong to one part. With gradients."""
        mask = np.ones((2, 1, 1, DIMS.S), bool)
        mask[0, ..., 5:9] = mask[1] = False
        sinks = np.array([0.5, -1, 0, 2], np.float32)

        def whole(query, key, value, sinks):
            return attend(query, key, value, mask=mask, sinks=sinks, return_lse=True)

        def merged(query, key, value, sinks):
            parts = slice(0, 5), slice(5, 9), slice(9, None)
            results = [
                attend(query, key[:, part], value[:, part], mask=mask[..., part], sinks=given, return_lse=True)
                for part, given in zip(parts, (None, None, sinks), strict=True)
            ]
            return merge_attention(*zip(*results, strict=True))

        def loss(arrays, attend):
            out, lse = attend(*arrays)
            return jnp.square(out - 1.0).sum() + jnp.sin(lse).sum(), (out, lse)

        program = jax.jit(lambda arrays: [jax.grad(loss, has_aux=True)(arrays, x) for x in (whole, merged)])
        want, got = program((*_inputs(), sinks))
        chex.assert_tree_all_finite(got)
        chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-5)

    def test_nothing_in_any_part_is_nothing(self):
        out, lse = jnp.zeros((1, 2, 3, 4)), jnp.full((1, 3, 2), -jnp.inf)
        merged = jax.jit(merge_attention)([out, out], [lse, lse])
        chex.assert_trees_all_equal(merged, (out, lse))
        gradients = jax.jit(jax.grad(lambda out, lse: merge_attention([out, out], [lse, lse])[0].sum(), argnums=(0, 1)))
        chex.assert_tree_all_finite(gradients(out, lse))

    @both
    def test_sinks_count_in_a_part_without_keys(self, attend):
        @jax.jit
        def run(query, key, value, sinks):
            empty = attend(query, key[:, :0], value[:, :0], sinks=sinks, return_lse=True)
            merged = merge_attention(*zip(empty, attend(query, key, value, return_lse=True), strict=True))
            return merged[0], attend(query, key, value, sinks=sinks)

        np.testing.assert_allclose(*run(*_inputs(), np.array([0.5, -1, 0, 2], np.float32)), atol=1e-5)

    @both
    def test_a_sink_of_minus_infinity_is_none_in_gradients_too(self, attend):
        query, key, value = _inputs()
        mask = np.arange(query.shape[1])[None, None, :, None] != 2  # a query without keys

        @jax.jit
        @jax.grad
        def gradient(sinks):
            out, lse = attend(query, key, value, mask=mask, sinks=sinks, return_lse=True)
            return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        got = gradient(np.array([-np.inf, 0, 1, -np.inf], np.float32))
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got[np.array([0, 3])], 0, atol=1e-5)

    def test_sizes_that_do_not_fit(self):
        out, lse = jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 3, 2))
        with pytest.raises(ValueError, match="one lse per output, got 2 outputs and 1 lses"):
            merge_attention([out, out], [lse])
        with pytest.raises(ValueError, match=r"lse must have shape \[B, N, T\] = \(1, 3, 2\) .* got \(1, 2, 3\)"):
            merge_attention([out], [lse.swapaxes(1, 2)])

    @both
    def test_excludes_weights(self, attend):
        with pytest.raises(ValueError, match="return_weights and return_lse exclude each other"):
            jax.eval_shape(functools.partial(attend, return_weights=True, return_lse=True), *_inputs())


class TestMods:
    def test_t5_and_alibi_equal_their_biases_with_gradients(self):
        """Of the learned table and slopes too, where keys precede the queries, and causal."""
        table = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
        kinds = {"max_distance": 9, "is_bidirectional": False}

        def biased(*arrays):
            *arrays, table, slopes = arrays
            bias = relative_position_bias(table, DIMS.T, DIMS.S, **kinds)
            bias = (
                bias
                + alibi_bias(4, DIMS.T, DIMS.S) / alibi_slopes(4)[None, :, None, None] * slopes[None, :, None, None]
            )
            return dot_product_attention(*arrays, bias, is_causal=True)

        def modified(attend, *arrays):
            *arrays, table, slopes = arrays
            t5, alibi = t5_score_mod(table, offset=3, **kinds), alibi_score_mod(slopes, offset=3)
            return attend(
                *arrays, is_causal=True, score_mod=lambda logits, *places: alibi(t5(logits, *places), *places)
            )

        attends = [biased, *(functools.partial(modified, attend) for attend in (dot_product_attention, IN_CHUNKS))]
        want, *got = _compared(attends, (*_inputs(), table, np.float32([0.5, 0.1, 1, 0.3])))
        for answers in got:
            chex.assert_trees_all_close(answers, want, atol=5e-5, rtol=1e-5)

    @both
    def test_minus_infinity_hides_keys_and_whole_rows(self, attend):
        def score_mod(logits, b, n, t, s):
            return jnp.where((s > t) | (t == 4) | (n == 1), logits, -jnp.inf) * jnp.where(t == 5, 0.5, 1.0)

        def loss(arrays, **options):
            out, lse = attend(*arrays, return_lse=True, **options)
            return jnp.square(out - 1.0).sum(), (out, lse)

        def hidden(b, n, t, s):
            return (s > t) | (t == 4) | (n == 1)

        arrays = _inputs(chex.Dimensions(B=1, T=9, S=9, N=4, K=2, H=8, U=6))
        gradients, (out, lse) = jax.jit(jax.grad(functools.partial(loss, score_mod=score_mod), has_aux=True))(arrays)
        chex.assert_tree_all_finite(gradients)
        np.testing.assert_array_equal(np.asarray(out)[:, 8, [0, 2, 3]], 0)
        np.testing.assert_array_equal(np.asarray(lse)[:, [0, 2, 3], 8], -np.inf)
        _, (want, want_lse) = jax.jit(jax.grad(functools.partial(loss, mask_mod=hidden), has_aux=True))(arrays)
        others = [0, 1, 2, 3, 4, 6, 7, 8]
        np.testing.assert_allclose(np.asarray(out)[:, others], np.asarray(want)[:, others], atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse)[:, :, others], np.asarray(want_lse)[:, :, others], atol=1e-5)

    def test_outer_arrays_may_be_mapped_and_differentiated_through_jit(self):
        """What a mod reads from outside is traced in every way that JAX has."""
        query, key, value = _inputs()
        slopes = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
        documents = np.random.default_rng(4).integers(0, 2, (3, DIMS.S)).astype(np.int32)

        def loss(attend, slopes, documents):
            attend = jax.jit(
                functools.partial(
                    attend,
                    score_mod=lambda logits, b, n, t, s: logits * slopes[n],
                    mask_mod=lambda b, n, t, s: documents[s] == 1,
                )
            )
            return jnp.square(attend(query, key, value)).sum()

        def gradients(attend):
            return jax.vmap(jax.grad(functools.partial(loss, attend)))(slopes, documents)

        want, got = jax.jit(lambda: [gradients(attend) for attend in (dot_product_attention, IN_CHUNKS)])()
        assert np.abs(want).max() > 0.01
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)

    @both
    def test_on_a_mesh_with_explicit_axes_arrays_are_bound(self, attend):
        table = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)

        def loss(query, key, value, table):
            out = attend(
                query, key, value, score_mod=t5_score_mod(table, max_distance=9), sinks=np.zeros(4, np.float32)
            )
            return jnp.square(out).sum()

        gradient = jax.jit(jax.grad(loss, argnums=3))
        want = gradient(*_inputs(), table)
        with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"))):
            arrays = (jax.device_put(x, P("data", None, "model")) for x in _inputs())
            got = gradient(*arrays, jax.device_put(table, P()))
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)

    def test_tables_of_bfloat16_get_gradients_of_their_dtype(self):
        """Which are summed in float32 over chunks, and rounded once."""
        table = np.random.default_rng(2).normal(size=(8, 4)).astype(jnp.bfloat16)

        def gradient(attend):
            def loss(table):
                return jnp.square(attend(*_inputs(), score_mod=t5_score_mod(table, max_distance=9)) - 1.0).sum()

            return jax.grad(loss)

        want, got = jax.jit(lambda x: [gradient(attend)(x) for attend in (dot_product_attention, IN_CHUNKS)])(table)
        assert got.dtype == jnp.bfloat16
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=1e-2 * np.abs(want).max())

    @both
    def test_a_number_for_each_query_head_is_needed(self, attend):
        """Not for each key head, of which there are two."""
        for score_mod in (alibi_score_mod(alibi_slopes(2)), t5_score_mod(jnp.zeros((32, 2)))):
            with pytest.raises(ValueError, match=r"for each query head, \[N\] = \(4,\), got \(2,\); with grouped"):
                jax.eval_shape(functools.partial(attend, score_mod=score_mod), *_inputs())

    @both
    def test_results_that_do_not_fit_are_refused(self, attend):
        query, key, value = _inputs()
        with pytest.raises(ValueError, match=r"score_mod must return floating-point logits of shape .*, got bool"):
            jax.eval_shape(functools.partial(attend, score_mod=lambda logits, *_: logits > 0), query, key, value)
        with pytest.raises(ValueError, match=r"score_mod must return .* got float32 \(1, 1, 1, 1\)"):
            jax.eval_shape(
                functools.partial(attend, score_mod=lambda logits, *_: logits[:1, :1, :1, :1]), query, key, value
            )
        with pytest.raises(ValueError, match=r"mask_mod must return booleans broadcastable to .*, got int32"):
            jax.eval_shape(functools.partial(attend, mask_mod=lambda b, n, t, s: s), query, key, value)

    def test_memory_of_t5_base_at_16384_tokens(self):
        def temporary(length):
            x = jax.ShapeDtypeStruct((1, length, 12, 64), jnp.float32)

            def loss(arrays):
                *arrays, table = arrays
                return jnp.square(chunked_attention(*arrays, scale=1.0, score_mod=t5_score_mod(table))).sum()

            program = jax.jit(jax.grad(loss)).lower((x, x, x, jax.ShapeDtypeStruct((32, 12), jnp.float32))).compile()
            return program.memory_analysis().temp_size_in_bytes

        short, long = temporary(16384), temporary(32768)
        assert short <= 12 * 16384**2 * 4 / 20  # of the bias of all pairs
        assert long <= 2.1 * short

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_no_bias_of_all_pairs_is_computed_before_a_loop_over_layers(self, is_causal):
        """JAX computes before it what does not depend on the layer, such as a bias that is made of positions."""
        length = 4096

        def loss(x):
            def layer(x, weight):
                options = {"is_causal": is_causal, "local_window_size": (1000, 9) if is_causal else None}
                mods = {"score_mod": alibi_score_mod(alibi_slopes(2)), "mask_mod": lambda b, n, t, s: s % 7 != t % 5}
                return x + chunked_attention(weight * x, x, x, chunk_size=256, **options, **mods), None

            return jnp.square(jax.lax.scan(layer, x, jnp.ones(2))[0]).sum()

        program = jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)).compile()
        assert program.memory_analysis().temp_size_in_bytes < length**2


@pytest.mark.aot
@pytest.mark.parametrize("implementation", ["chunked", "splash"])
def test_compiles_for_a_tpu(tpu_devices, implementation):
    """With gradients; in chunks nothing of the size of all pairs."""
    one = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:1x1")[0])
    x, sinks, table = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=one)
        for shape, dtype in (((1, 2048, 2, 64), jnp.bfloat16), ((2,), jnp.float32), ((32, 2), jnp.float32))
    )

    def loss(x, sinks, table):
        options = {"sinks": sinks, "logits_soft_cap": 30.0, "local_window_size": (100, 20)}
        if implementation == "chunked":
            options |= {"score_mod": t5_score_mod(table), "mask_mod": lambda b, n, t, s: s % 7 != t % 5}
        return dot_product_attention(x, x, x, implementation=implementation, **options).astype(jnp.float32).sum()

    with jax.default_matmul_precision("default"), without_compilation_cache():
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, sinks, table).compile()
    assert ("tpu_custom_call" in program.as_text()) == (implementation == "splash")
    assert program.memory_analysis().temp_size_in_bytes < 2048**2


@pytest.mark.parity
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_equals_transformers_with_gradients(family):
    """Its eager functions of models with a soft cap, and with sinks: causal, in a window of 5 tokens to the left."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    arrays = (*_inputs(chex.Dimensions(B=2, T=11, S=11, N=4, K=2, H=8, U=8)), np.float32([0.5, -1, 0, 2]))
    query, key, value, sinks = (torch.tensor(x, requires_grad=True) for x in arrays)
    module = types.SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    pairs = np.tri(11, dtype=bool) & ~np.tri(11, k=-6, dtype=bool)
    mask = torch.tensor(np.where(pairs, 0, np.finfo(np.float32).min).astype(np.float32)[None, None])
    more = {"softcap": 1.5} if family == "gemma2" else {}
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    want, want_weights = theirs(module, *heads_first, mask, scaling=0.7, **more)
    torch.sin(3 * want).sum().backward()

    def loss(arrays, attend):
        *arrays, sinks = arrays
        ours = {"logits_soft_cap": 1.5} if family == "gemma2" else {"sinks": sinks}
        out = attend(*arrays, is_causal=True, scale=0.7, local_window_size=5, return_weights=True, **ours)
        return jnp.sin(3 * out[0]).sum(), out

    attends = dot_product_attention, IN_CHUNKS
    program = jax.jit(lambda arrays: [jax.grad(loss, has_aux=True)(arrays, attend) for attend in attends])
    for gradients, (out, weights) in program(arrays):
        np.testing.assert_allclose(out, want.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(weights, want_weights.detach().numpy(), atol=1e-6)
        for got, tensor in zip(gradients, (query, key, value, sinks), strict=True):
            expected = np.zeros_like(got) if tensor.grad is None else tensor.grad.numpy()
            np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-4)
