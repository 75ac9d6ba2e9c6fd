"""Position encodings against section 3.5 of Vaswani et al. (2017) in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import learned_positions, sinusoidal_positions


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
        table = sinusoidal_positions(jnp.arange(length), d_model)
        assert (table.shape, table.dtype) == ((length, d_model), jnp.float32)
        np.testing.assert_allclose(table, _paper(range(length), d_model), atol=5e-7)

    @pytest.mark.parametrize("base", [0.5, 1.0, 500.0, 1e6])
    def test_other_bases(self, base):
        table = sinusoidal_positions(jnp.arange(30), 12, base=base)
        np.testing.assert_allclose(table, _paper(range(30), 12, base), atol=5e-7)

    @settings(deadline=None, max_examples=30)
    @given(position=st.integers(0, 1_000_000))
    def test_error_grows_as_documented(self, position):
        error = np.abs(sinusoidal_positions(jnp.array([position]), 64) - _paper([position], 64)).max()
        assert error <= 3e-7 + 7.4e-10 * position

    def test_any_shape_of_positions(self):
        positions = jnp.array([[3, 0, 7], [7, 1, 3]])
        table = sinusoidal_positions(jnp.arange(8), 6)
        np.testing.assert_array_equal(jax.jit(sinusoidal_positions, static_argnums=1)(positions, 6), table[positions])
        np.testing.assert_array_equal(sinusoidal_positions(jnp.array(7), 6), table[7])
        np.testing.assert_array_equal(sinusoidal_positions(positions.astype(jnp.int8), 6), table[positions])

    @settings(deadline=None, max_examples=30)
    @given(position=st.integers(-5000, 5000), step=st.integers(-5000, 5000))
    def test_a_step_rotates_every_pair(self, position, step):
        """PE(pos + k) = R(k) PE(pos) with one R(k) for all positions, so relative offsets are linear."""
        here, there, turn = np.asarray(
            sinusoidal_positions(jnp.array([position, position + step, step]), 16), np.float64
        )
        sin, cos = turn[0::2], turn[1::2]
        rotated = np.stack([cos * here[0::2] + sin * here[1::2], cos * here[1::2] - sin * here[0::2]], axis=-1)
        np.testing.assert_allclose(rotated.reshape(-1), there, atol=1e-5)

    def test_wavelengths_are_geometric_from_2_pi_to_10000_times_2_pi(self):
        d_model = 128
        _, one = np.asarray(sinusoidal_positions(jnp.arange(2), d_model), np.float64)
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
        table = np.asarray(sinusoidal_positions(jnp.arange(30_001), d_model))
        distances = np.linalg.norm(table[1:] - table[0], axis=-1)
        assert distances.min() > 0.5
        assert len(np.unique(table, axis=0)) == len(table)

    def test_odd_width(self):
        with pytest.raises(ValueError, match="d_model must be even for sinusoidal positions, got 5"):
            sinusoidal_positions(jnp.arange(3), 5)


class TestLearned:
    TABLE = jnp.arange(12.0).reshape(4, 3)

    @pytest.mark.parametrize("positions", [2, [1, 0, 3], [[0, 1], [2, 3], [3, 3]]], ids=str)
    def test_looks_up(self, positions):
        out = learned_positions(self.TABLE, jnp.array(positions))
        np.testing.assert_array_equal(out, np.asarray(self.TABLE)[np.array(positions)])

    def test_keeps_the_dtype_of_the_table(self):
        assert learned_positions(self.TABLE.astype(jnp.bfloat16), jnp.array([1])).dtype == jnp.bfloat16

    @pytest.mark.parametrize("outside", [4, 100, -1, -4])
    def test_position_outside_the_table_is_nan(self, outside):
        out = jax.jit(learned_positions)(self.TABLE, jnp.array([0, outside]))
        np.testing.assert_array_equal(out[0], self.TABLE[0])
        assert jnp.isnan(out[1]).all()

    def test_gradient_reaches_the_rows_that_were_used(self):
        gradient = jax.grad(lambda table: learned_positions(table, jnp.array([1, 3, 1])).sum())(self.TABLE)
        np.testing.assert_array_equal(gradient, np.array([0, 2, 0, 1])[:, None] * np.ones((1, 3)))

    def test_sequence_longer_than_the_table(self):
        with pytest.raises(ValueError, match="5 positions, but the table of learned positions has 4"):
            learned_positions(self.TABLE, jnp.zeros((2, 5), int))
