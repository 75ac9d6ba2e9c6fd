"""Position encodings against the formulas of their papers in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.attention.oracles.dense import softmax_over, visible
from tests.functional.oracles.positions import t5_bucket, transformer_xl_scores, turned
from tfx_jax.functional import (
    alibi_bias,
    alibi_score_mod,
    alibi_slopes,
    chunked_attention,
    dot_product_attention,
    learned_positions,
    relative_position_bias,
    relative_position_bucket,
    relative_shift,
    rotary_embedding,
    rotary_frequencies,
    sinusoidal_positions,
    t5_score_mod,
)
from tfx_jax.models import LlamaConfig
from tfx_jax.nn.attention import RotaryConfig

# Each is one program for each shape, where a call without jit compiles one for each of its operations.
_sinusoidal = jax.jit(sinusoidal_positions, static_argnames=("d_model", "base", "is_interleaved"))
_learned = jax.jit(learned_positions)
_rotary = jax.jit(rotary_embedding)
_bucket = jax.jit(relative_position_bucket, static_argnames=("num_buckets", "max_distance", "is_bidirectional"))
_bias_options = ("num_queries", "num_keys", "max_distance", "is_bidirectional")
_relative_bias = jax.jit(relative_position_bias, static_argnames=_bias_options)
_alibi = jax.jit(alibi_bias, static_argnames=("num_heads", "num_queries", "num_keys"))


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _paper(positions, d_model, base=10_000.0):
    table = np.zeros((len(positions), d_model))
    for row, position in enumerate(positions):
        for i in range(d_model // 2):
            angle = float(position) / base ** (2 * i / d_model)
            table[row, 2 * i], table[row, 2 * i + 1] = np.sin(angle), np.cos(angle)
    return table


class TestSinusoidal:
    @pytest.mark.parametrize(("length", "d_model"), [(20, 128), (60, 32), (7, 2)])
    def test_equals_the_paper(self, length, d_model):
        table = _sinusoidal(np.arange(length), d_model)
        assert (table.shape, table.dtype) == ((length, d_model), jnp.float32)
        np.testing.assert_allclose(table, _paper(range(length), d_model), atol=5e-7)

    def test_the_row_of_four_columns_that_textbooks_print(self):
        table = np.asarray(_sinusoidal(np.arange(60), 4))
        for position in (0, 1, 59):
            want = [np.sin(position), np.cos(position), np.sin(position / 100), np.cos(position / 100)]
            np.testing.assert_allclose(table[position], want, atol=5e-7)

    @pytest.mark.parametrize("base", [0.5, 1.0, 500.0, 1e6])
    def test_other_bases(self, base):
        table = _sinusoidal(np.arange(30), 12, base=base)
        np.testing.assert_allclose(table, _paper(range(30), 12, base), atol=5e-7)

    @settings(deadline=None, max_examples=30)
    @given(position=st.integers(0, 1_000_000))
    def test_error_grows_as_documented(self, position):
        error = np.abs(_sinusoidal(np.array([position]), 64) - _paper([position], 64)).max()
        assert error <= 3e-7 + 7.4e-10 * position

    def test_any_shape_of_positions(self):
        positions = np.array([[3, 0, 7], [7, 1, 3]])
        table = np.asarray(_sinusoidal(np.arange(8), 6))
        np.testing.assert_array_equal(_sinusoidal(positions, 6), table[positions])
        np.testing.assert_array_equal(_sinusoidal(np.array(7), 6), table[7])
        halves = _sinusoidal(positions, 6, is_interleaved=False)
        np.testing.assert_array_equal(halves, table[positions][..., [0, 2, 4, 1, 3, 5]])
        np.testing.assert_array_equal(_sinusoidal(positions.astype(np.int8), 6), table[positions])

    @settings(deadline=None, max_examples=30)
    @given(position=st.integers(-5000, 5000), step=st.integers(-5000, 5000))
    def test_a_step_rotates_every_pair(self, position, step):
        """PE(pos + k) = R(k) PE(pos) with one R(k) for all positions, so relative offsets are linear."""
        here, there, turn = np.asarray(_sinusoidal(np.array([position, position + step, step]), 16), np.float64)
        sin, cos = turn[0::2], turn[1::2]
        rotated = np.stack([cos * here[0::2] + sin * here[1::2], cos * here[1::2] - sin * here[0::2]], axis=-1)
        np.testing.assert_allclose(rotated.reshape(-1), there, atol=1e-5)

    def test_wavelengths_are_geometric_from_2_pi_to_10000_times_2_pi(self):
        d_model = 128
        _, one = np.asarray(_sinusoidal(np.arange(2), d_model), np.float64)
        wavelengths = 2 * np.pi / np.arctan2(one[0::2], one[1::2])
        ratio = 10_000 ** (2 / d_model)
        np.testing.assert_allclose(wavelengths[0], 2 * np.pi, rtol=1e-6)
        np.testing.assert_allclose(wavelengths[1:] / wavelengths[:-1], ratio, rtol=1e-5)
        np.testing.assert_allclose(wavelengths[-1] * ratio, 10_000 * 2 * np.pi, rtol=1e-5)

    @pytest.mark.parametrize("d_model", [32, 512])
    def test_positions_beyond_the_base_do_not_repeat(self, d_model):
        """It is sometimes said that the code repeats after 10,000 positions. It does not.

        The distance of two codes depends on their offset alone, so the distances to position 0 are all there are.
        """
        table = np.asarray(_sinusoidal(np.arange(30_001), d_model))
        distances = np.linalg.norm(table[1:] - table[0], axis=-1)
        assert distances.min() > 0.5
        assert len({code.tobytes() for code in table + 0.0}) == len(table)

    def test_odd_width(self):
        with pytest.raises(ValueError, match="d_model must be even for sinusoidal positions, got 5"):
            sinusoidal_positions(jnp.arange(3), 5)


class TestLearned:
    TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)

    @pytest.mark.parametrize("positions", [2, [1, 0, 3], [[0, 1], [2, 3], [3, 3]]], ids=str)
    def test_looks_up(self, positions):
        out = _learned(self.TABLE, np.array(positions))
        np.testing.assert_array_equal(out, self.TABLE[np.array(positions)])

    def test_keeps_the_dtype_of_the_table(self):
        assert jax.eval_shape(learned_positions, self.TABLE.astype(jnp.bfloat16), np.array([1])).dtype == jnp.bfloat16

    @pytest.mark.parametrize("outside", [4, 100, -1, -4])
    def test_position_outside_the_table_is_nan(self, outside):
        out = np.asarray(_learned(self.TABLE, np.array([0, outside])))
        np.testing.assert_array_equal(out[0], self.TABLE[0])
        assert np.isnan(out[1]).all()

    def test_gradient_reaches_the_rows_that_were_used(self):
        gradient = jax.jit(jax.grad(lambda table: learned_positions(table, jnp.array([1, 3, 1])).sum()))(self.TABLE)
        np.testing.assert_array_equal(gradient, np.array([0, 2, 0, 1])[:, None] * np.ones((1, 3)))

    def test_sequence_longer_than_the_table(self):
        with pytest.raises(ValueError, match="at most 4 tokens, the size of the table of learned positions, got 5"):
            learned_positions(self.TABLE, jnp.zeros((2, 5), int))


class TestRotary:
    def test_equals_the_paper_but_for_the_order_of_features(self):
        x, positions = _normal(0, 2, 5, 3, 8), np.array([[0, 1, 2, 3, 4], [7, 40, 3, 1000, 2]])
        got = np.asarray(_rotary(x, positions))
        pairs = x.reshape(2, 5, 3, 2, 4).swapaxes(-1, -2).reshape(x.shape)  # feature i beside i + H / 2
        for b, t, n in np.ndindex(2, 5, 3):
            want = turned(pairs[b, t, n], positions[b, t]).reshape(4, 2).T.ravel()
            np.testing.assert_allclose(got[b, t, n], want, atol=2e-6)

    @settings(deadline=None, max_examples=20)
    @given(first=st.integers(-5000, 30_000), second=st.integers(-5000, 30_000), step=st.integers(-5000, 5000))
    def test_inner_products_depend_on_the_distance_alone(self, first, second, step):
        query, key = _normal(1, 1, 1, 1, 16), _normal(2, 1, 1, 1, 16)

        def product(query_position, key_position):
            turned = (_rotary(x, np.array([p])) for x, p in ((query, query_position), (key, key_position)))
            return np.prod([*map(np.asarray, turned)], axis=0).sum()

        np.testing.assert_allclose(product(first, second), product(first + step, second + step), atol=1e-3)

    def test_keeps_lengths_and_dtype_and_leaves_position_0_alone(self):
        x = _normal(3, 2, 4, 1, 6)
        out = np.asarray(_rotary(x, np.arange(4)))
        np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
        np.testing.assert_array_equal(out[:, 0], x[:, 0])
        assert np.abs(out[:, 1] - x[:, 1]).max() > 0.1
        half = np.asarray(_rotary(x.astype(jnp.bfloat16), np.arange(4)))
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(np.float32), out, atol=3e-2)

    def test_fractions_of_positions_have_fractions_of_angles(self):
        """As in position interpolation; their frequencies may be passed or not."""
        x = np.random.default_rng(0).normal(size=(1, 4, 2, 8)).astype(np.float32)
        positions = np.array([0.0, 0.5, 1.25, -2.75], np.float32)
        frequencies = (10_000.0 ** (-np.arange(4) / 4)).astype(np.float32)
        rotate = jax.jit(rotary_embedding)
        found = rotate(x, positions)
        np.testing.assert_allclose(found, rotate(x, positions, frequencies=frequencies), atol=1e-6)
        angles = positions[:, None] * frequencies
        wanted = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(4, 8)
        np.testing.assert_allclose(sinusoidal_positions(positions, 8), wanted, atol=1e-6)

    def test_float64_has_angles_of_float64(self):
        with jax.enable_x64(True):
            x = np.random.default_rng(5).normal(size=(1, 2, 1, 4))
            got = np.asarray(_rotary(x, np.array([1, 30_000])))
        for t, position in enumerate((1, 30_000)):
            want = turned(x[0, t, 0, [0, 2, 1, 3]], position).reshape(2, 2).T.ravel()
            np.testing.assert_allclose(got[0, t, 0], want, rtol=0, atol=2e-11)

    def test_a_step_of_decoding_equals_its_row(self):
        x = _normal(4, 2, 5, 3, 8)
        step = _rotary(x[:, 3:4], np.array([[3], [3]]))
        np.testing.assert_array_equal(step, np.asarray(_rotary(x, np.arange(5)))[:, 3:4])

    def test_errors(self):
        with pytest.raises(ValueError, match="head size must be even for a rotary embedding, got 5"):
            rotary_embedding(jnp.ones((1, 2, 1, 5)), jnp.arange(2))
        with pytest.raises(ValueError, match=r"positions must have shape \[T\] = \(2,\) .* got \(3,\)"):
            rotary_embedding(jnp.ones((1, 2, 1, 4)), jnp.arange(3))


class TestRelativeBuckets:
    @pytest.mark.parametrize("is_bidirectional", [True, False])
    @pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 20), (64, 1000), (6, 4)])
    def test_equals_the_description_of_t5(self, num_buckets, max_distance, is_bidirectional):
        relative = np.arange(-3 * max_distance, 3 * max_distance + 1)
        got = _bucket(relative, num_buckets, max_distance=max_distance, is_bidirectional=is_bidirectional)
        want = [t5_bucket(distance, num_buckets, max_distance, is_bidirectional) for distance in relative]
        np.testing.assert_array_equal(got, want)
        assert got.dtype == jnp.int32
        assert got.max() < num_buckets

    def test_of_any_shape(self):
        relative = np.arange(-6, 6).reshape(3, 4)
        np.testing.assert_array_equal(np.asarray(_bucket(relative)).ravel(), _bucket(relative.ravel()))

    @pytest.mark.parametrize(("num_buckets", "max_distance"), [(2, 128), (32, 8)])
    def test_errors(self, num_buckets, max_distance):
        with pytest.raises(ValueError, match=f"got num_buckets={num_buckets} and max_distance={max_distance}$"):
            relative_position_bucket(jnp.arange(3), num_buckets, max_distance=max_distance)

    @pytest.mark.parametrize("is_bidirectional", [True, False])
    @pytest.mark.parametrize(("t", "s", "offset"), [(6, 6, None), (3, 7, None), (5, 9, 0), (1, 8, 2), (7, 3, None)])
    def test_bias_is_the_table_at_the_bucket_of_every_pair(self, t, s, offset, is_bidirectional):
        table = _normal(0, 8, 3)
        options = {"max_distance": 6, "is_bidirectional": is_bidirectional}
        bias = np.asarray(_relative_bias(table, t, s, offset=offset, **options))
        assert bias.shape == (1, 3, t, s)
        first = s - t if offset is None else offset
        for i, j in np.ndindex(t, s):
            np.testing.assert_array_equal(bias[0, :, i, j], table[t5_bucket(j - i - first, 8, 6, is_bidirectional)])

    def test_a_step_of_decoding_with_a_traced_offset_equals_its_row(self):
        table = _normal(1, 8, 2)
        whole = np.asarray(_relative_bias(table, 5, is_bidirectional=False))
        for i in range(5):
            step = _relative_bias(table, 1, 5, offset=i, is_bidirectional=False)  # a number under jit is traced
            np.testing.assert_array_equal(step, whole[:, :, i : i + 1])

    def test_gradient_counts_the_pairs_of_every_bucket(self):
        gradient = jax.jit(jax.grad(lambda table: relative_position_bias(table, 3).sum()))(
            np.zeros((32, 2), np.float32)
        )
        want = np.zeros((32, 2))
        want[[0, 1, 2, 17, 18]] = np.array([3, 2, 1, 2, 1])[:, None]
        np.testing.assert_array_equal(gradient, want)


class TestRelativeShift:
    @pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 4), (4, 1), (3, 5), (5, 5), (6, 2)])
    def test_equals_the_gather(self, t, s):
        scores = _normal(0, 2, 3, t, t + s - 1)
        rows, columns = np.arange(t)[:, None], np.arange(s)[None] - np.arange(t)[:, None] + t - 1
        want = scores[..., rows, columns]
        fewer = range(1, t + s - 1)  # columns: the rest is zeros
        got, got_of_fewer = jax.jit(lambda x: (relative_shift(x), [relative_shift(x[..., :p], s) for p in fewer]))(
            scores
        )
        np.testing.assert_array_equal(got, want)
        for p, got in zip(fewer, got_of_fewer, strict=True):
            np.testing.assert_array_equal(got, np.where(columns < p, want, 0))

    def test_gradient_is_that_of_the_gather(self):
        scores, cotangent = _normal(1, 4, 5), _normal(2, 4, 5)
        columns = np.arange(5)[None] - np.arange(4)[:, None] + 3
        want = np.zeros((4, 8), np.float32)
        want[np.arange(4)[:, None], columns] = cotangent
        gradient = jax.jit(jax.grad(lambda x: (relative_shift(x, 5) * cotangent).sum()))(scores)
        np.testing.assert_array_equal(gradient, want[:, :5])

    def test_is_the_attention_of_transformer_xl(self):
        """With a memory of three tokens, u and v as in the paper, through the bias of dot-product attention."""
        t, s, h = 4, 7, 8
        query, key, value, kernel = (_normal(i, n, h) for i, n in enumerate((t, s, s, h)))
        u, v = _normal(5, h), _normal(6, h)

        def relative(distance):
            return np.asarray(_sinusoidal(np.asarray(distance), h)) @ kernel

        @jax.jit
        def attend(query, key, value):
            distances = sinusoidal_positions(jnp.arange(s - 1, -1, -1), h) @ kernel
            bias = relative_shift((query + v[None]) @ distances.T, s) / np.sqrt(h)
            one_head = (x[None, :, None] for x in (query + u[None], key, value))
            return dot_product_attention(*one_head, bias=bias[None, None], is_causal=True)[0, :, 0]

        scores = transformer_xl_scores(query, key, relative, u, v)
        seen = visible(query[None, :, None], key[None, :, None], is_causal=True)
        want = softmax_over(scores / np.sqrt(h), seen)[0, 0] @ value
        np.testing.assert_allclose(attend(query, key, value), want, atol=1e-5)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"as many relative positions .* as queries, got 3 < 4"):
            relative_shift(jnp.ones((4, 3)))


class TestAlibi:
    def test_slopes_of_a_power_of_two(self):
        np.testing.assert_array_equal(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
        np.testing.assert_allclose(alibi_slopes(16), [2.0 ** (-i / 2) for i in range(1, 17)], rtol=1e-6)
        np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])

    @pytest.mark.parametrize(
        ("num_heads", "exponents"),
        [(3, [4, 8, 2]), (6, [2, 4, 6, 8, 1, 3]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
    )
    def test_slopes_of_other_numbers_of_heads(self, num_heads, exponents):
        np.testing.assert_allclose(alibi_slopes(num_heads), 2.0 ** -np.array(exponents), rtol=1e-6)

    @pytest.mark.parametrize(("t", "s", "offset"), [(4, 4, None), (3, 7, None), (2, 5, 0), (1, 6, 4)])
    def test_bias_falls_with_the_distance(self, t, s, offset):
        bias, slopes = np.asarray(_alibi(3, t, s, offset=offset)), np.asarray(alibi_slopes(3))
        assert (bias.shape, bias.dtype) == ((1, 3, t, s), jnp.float32)
        first = s - t if offset is None else offset
        for n, i, j in np.ndindex(3, t, s):
            assert bias[0, n, i, j] == -slopes[n] * abs(i + first - j)

    def test_a_step_of_decoding_with_a_traced_offset_equals_its_row(self):
        step = _alibi(4, 1, 5, offset=3)  # a number under jit is traced
        np.testing.assert_array_equal(step, np.asarray(_alibi(4, 5))[:, :, 3:4])

    def test_each_row_may_have_its_offset(self):
        offsets = np.array([3, 0, 4])
        rows = _alibi(4, 2, 7, offset=offsets)
        for row, offset in zip(rows, offsets, strict=True):
            np.testing.assert_array_equal(row[None], _alibi(4, 2, 7, offset=offset))
        query, key, value = _normal(0, 3, 2, 4, 8), _normal(1, 3, 7, 4, 8), _normal(2, 3, 7, 4, 8)
        want = jax.jit(dot_product_attention)(query, key, value, rows)
        for attend in (dot_product_attention, chunked_attention):
            attend = jax.jit(functools.partial(attend, score_mod=alibi_score_mod(alibi_slopes(4), offset=offsets)))
            np.testing.assert_allclose(attend(query, key, value), want, atol=1e-5)

    def test_offsets_and_slopes_of_other_shapes_are_named(self):
        x = np.ones((3, 2, 4, 8), np.float32)
        with pytest.raises(ValueError, match=r"offset must be one number or have shape \[B\] = \(3,\), got \(2,\)"):
            dot_product_attention(x, x, x, score_mod=alibi_score_mod(alibi_slopes(4), offset=np.array([1, 2])))
        with pytest.raises(ValueError, match=r"offset must be one number for all rows, got shape \(3,\)"):
            dot_product_attention(x, x, x, score_mod=t5_score_mod(np.ones((32, 4)), offset=np.array([1, 2, 3])))
        with pytest.raises(ValueError, match=r"slopes must have one number .* got 4"):
            alibi_score_mod(4)
        with pytest.raises(ValueError, match=r"positions must be an array of shape \[T\] = \(2,\) .* got 0"):
            rotary_embedding(x, 0)
        for lengths in (3, [3, 3, 3]):
            with pytest.raises(ValueError, match=r"key_lengths must be an array of integers .* got "):
                dot_product_attention(x, x, x, key_lengths=lengths)

    def test_causal_attention_may_take_a_bias_of_keys_instead(self):
        query, key, value = _normal(0, 2, 6, 4, 8), _normal(1, 2, 9, 4, 8), _normal(2, 2, 9, 4, 8)
        of_keys = np.asarray(alibi_slopes(4))[None, :, None, None] * np.arange(9, dtype=np.float32)[None, None, None]
        attend = jax.jit(functools.partial(dot_product_attention, is_causal=True))
        got, want = attend(query, key, value, of_keys), attend(query, key, value, _alibi(4, 6, 9))
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_arrays_in_another_layout_are_named():
    x = np.zeros((2, 3, 5, 4), np.float32)  # [batch, heads, length, size]
    with pytest.raises(ValueError, match=r"x must have rank 4, \[batch, length, heads, size\], got shape \(3, 5, 4\)"):
        rotary_embedding(x[0], np.arange(5))
    with pytest.raises(ValueError, match=r"got \(5,\); x must be \[batch, length, heads, size\]$"):
        rotary_embedding(x, np.arange(5))
    with pytest.raises(ValueError, match=r"got \(6,\)$"):
        rotary_embedding(x, np.arange(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "llama3", "low_frequency_factor": 4.0}, "low_frequency_factor=4.0 must be below high_frequency_f"),
        ({"scaling": "yarn", "base": 1.0}, "scaling='yarn' needs base above 1"),
        ({"scaling": "yarn", "beta_slow": 0.0}, "beta_slow above 0"),
        (
            {"scaling": "linear", "factor": 0.0},
            "base, factor and original_max_length must be above 0, got 10000.0, 0.0",
        ),
        ({"scaling": "yarn", "original_max_length": 0}, "original_max_length must be above 0"),
        (
            {"scaling": "longrope"},
            "scaling='longrope' needs 4 short_factors and long_factors, one for each pair, got 0",
        ),
        (
            {"scaling": "longrope", "short_factors": (1.0,) * 4, "long_factors": (1.0,) * 3},
            "short_factors and long_factors must have equal lengths, got 4 and 3",
        ),
        (
            {"scaling": "yarn", "short_factors": (1.0,) * 4},
            "short_factors and long_factors are for scaling='longrope' only, got scaling='yarn'",
        ),
        (
            {"scaling": "longrope", "short_factors": (1.0,) * 4, "long_factors": (1.0, 1.0, 0.0, 1.0)},
            "short_factors and long_factors above 0",
        ),
        ({"scaling": "ntk"}, "scaling must be one of none, linear, llama3, yarn, dynamic, longrope, got 'ntk'"),
    ],
)
def test_rotary_scalings_that_make_no_sense_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(8, **options)
    with pytest.raises(ValueError, match=f"rotary: .*{message}"):
        LlamaConfig(d_k=8, rotary=RotaryConfig(**options)).validate()


def test_factors_are_validated_for_heads_of_any_size():
    RotaryConfig(scaling="longrope", short_factors=(1.0,), long_factors=(2.0,)).validate()
    with pytest.raises(ValueError, match="must have equal lengths, got 0 and 3"):
        RotaryConfig(scaling="longrope", long_factors=(2.0,) * 3).validate()


@pytest.mark.parametrize("length", [1, 3, 4])
def test_each_row_is_rotated_by_its_own_frequencies(length):
    """Positions of a sequence, the same in all rows, and another list of frequencies in each row, B = 3."""
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((3, length, 1, 6)).astype(np.float32), 1 + np.arange(length)
    frequencies = rng.uniform(0.1, 1, (3, 2)).astype(np.float32)
    angles = positions[None, :, None] * frequencies.astype(np.float64)[:, None]
    pairs = (x[:, :, 0, :2] + 1j * x[:, :, 0, 2:4]) * np.exp(1j * angles)
    want = np.concatenate([pairs.real, pairs.imag, x[:, :, 0, 4:]], axis=-1)
    rotate = jax.jit(lambda positions: rotary_embedding(x, positions, frequencies=frequencies))
    for arranged in (positions, np.tile(positions, (3, 1))):
        np.testing.assert_allclose(rotate(arranged)[:, :, 0], want, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (2, 2), (3, 4), (1, 3, 2), (0,)])
def test_frequencies_of_a_wrong_shape_are_rejected(shape):
    with pytest.raises(
        ValueError, match=r"frequencies must have shape \[P\] or \[B, P\] with B = 3 and 1 to 3 pairs P"
    ):
        rotary_embedding(np.ones((3, 4, 1, 6), np.float32), np.arange(4), frequencies=np.ones(shape, np.float32))


def test_dynamic_scaling_needs_two_pairs():
    with pytest.raises(ValueError, match="scaling='dynamic' needs a size of at least 4, got 2"):
        rotary_frequencies(2, scaling="dynamic")


def test_frequencies_that_depend_on_the_length():
    """The base grows with the length of a text (NTK), or a list of divisors is chosen by it (LongRoPE)."""
    short, long = np.array([1.0, 1.5, 2.0]), np.array([1.0, 4.0, 9.0])
    exponents, lengths = np.arange(3) / 3, np.array([2, 8, 9, 40])
    longrope = {"scaling": "longrope", "short_factors": tuple(short), "long_factors": tuple(long)}
    options = {"base": 100.0, "factor": 5.0, "original_max_length": 8}
    found = jax.jit(
        lambda lengths: [
            rotary_frequencies(6, **options, **scaling, length=lengths)[0]
            for scaling in ({"scaling": "dynamic"}, longrope)
        ]
    )(lengths)
    for row, length in enumerate(lengths):
        base = 100.0 * (5.0 * max(length, 8) / 8 - 4.0) ** (6 / 4)
        wants = base**-exponents, 100.0**-exponents / (long if length > 8 else short)
        for got, scaling, want in zip(found, ({"scaling": "dynamic"}, longrope), wants, strict=True):
            np.testing.assert_allclose(got[row], want, rtol=1e-6)
            np.testing.assert_allclose(rotary_frequencies(6, **options, **scaling, length=length)[0], want, rtol=1e-6)
    assert rotary_frequencies(6, **options, **longrope)[1] == pytest.approx(np.sqrt(1 + np.log(5) / np.log(8)))
    assert rotary_frequencies(6, **options, **longrope, attention_factor=1.25)[1] == 1.25


def test_each_text_of_a_batch_is_rotated_by_its_length():
    """The last position says how long a text is."""
    rotary = RotaryConfig(scaling="dynamic", factor=4.0, original_max_length=4)
    x, positions = _normal(0, 2, 6, 1, 8), np.array([[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    both, alone, plain = jax.jit(
        lambda x: (
            rotary.rotate(x, positions),
            rotary.rotate(x[1:], positions[1:]),
            RotaryConfig().rotate(x, positions),
        )
    )(x)
    np.testing.assert_array_equal(both[1:], alone)
    np.testing.assert_array_equal(both[0], plain[0])
    assert np.abs(both[1] - plain[1]).max() > 0.1
