"""Position encodings: what tells a set of tokens from a sequence."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def sinusoidal_positions(
    positions: Int[Array, "*shape"], d_model: int, *, base: float = 10_000.0
) -> Float[Array, "*shape D"]:
    r"""Encodes each position as sines and cosines of geometrically spaced wavelengths, 2 pi to base * 2 pi.

    Section 3.5 of Vaswani et al. (2017): PE(pos, 2i) = sin(pos / base^(2i / d)), PE(pos, 2i + 1) = cos(same). The step
    pos -> pos + k is a rotation of every (2i, 2i + 1) pair, so attention can learn to look k tokens away. Positions
    beyond `base` do not repeat earlier ones: the periods of the columns have no common multiple.

    Args:
      positions: token positions, counted from 0, any shape.
      d_model: D, even.
      base: the paper's 10,000.

    Returns:
      float32 [*shape, D].

    Raises:
      ValueError: if `d_model` is odd.

    >>> sinusoidal_positions(jnp.arange(2), 4).round(2).tolist()
    [[0.0, 1.0, 0.0, 1.0], [0.8399999737739563, 0.5400000214576721, 0.009999999776482582, 1.0]]
    """
    if d_model % 2:
        raise ValueError(f"d_model must be even for sinusoidal positions, got {d_model}")
    # The frequencies are constants of the program, so they may as well be exact: float64 until the last moment.
    frequency = (float(base) ** (-np.arange(0, d_model, 2, dtype=np.float64) / d_model)).astype(np.float32)
    angle = positions[..., None].astype(jnp.float32) * np.expand_dims(frequency, tuple(range(positions.ndim)))
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions.shape, d_model)


def learned_positions(table: Float[Array, "P D"], positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks positions up in a learned table (Gehring et al., 2017; row E of Table 3 in Vaswani et al., 2017).

    Args:
      table: one row for each position 0 .. P - 1.
      positions: positions, any shape; the last axis is the length of a sequence.

    Returns:
      [*shape, D] in the dtype of `table`. A position past the table is NaN: training on it would be a silent lie.

    Raises:
      ValueError: if the sequences are longer than the table, which is all that shapes can tell.

    >>> learned_positions(jnp.array([[0.5], [0.25]]), jnp.array([1, 0])).tolist()
    [[0.25], [0.5]]
    """
    if positions.ndim and positions.shape[-1] > table.shape[0]:
        raise ValueError(f"{positions.shape[-1]} positions, but the table of learned positions has {table.shape[0]}")
    return jnp.take(table, positions, axis=0, mode="fill", fill_value=jnp.nan)
