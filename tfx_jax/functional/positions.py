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
      float32 [*shape, D], within 3e-7 + 7.4e-10 * position of the exact value: 2e-5 at position 30,000, where angles
      multiplied in float32 would be off by 2e-3.

    Raises:
      ValueError: if `d_model` is odd.

    >>> print(np.asarray(sinusoidal_positions(jnp.arange(2), 4)).round(2))
    [[0.   1.   0.   1.  ]
     [0.84 0.54 0.01 1.  ]]
    """
    if d_model % 2:
        raise ValueError(f"d_model must be even for sinusoidal positions, got {d_model}")
    # Angles are fractions of a turn in units of 2^-32: that their product overflows is the reduction modulo 2 pi.
    turns = float(base) ** (-np.arange(0, d_model, 2) / d_model) / (2 * np.pi)
    steps = np.round(turns * 2.0**32).astype(np.int64).astype(np.int32)
    angle = positions[..., None].astype(jnp.int32) * np.expand_dims(steps, tuple(range(positions.ndim)))
    angle = angle.astype(jnp.float32) * (2 * np.pi / 2.0**32)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions.shape, d_model)


def learned_positions(table: Float[Array, "P D"], positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks positions up in a learned table (Gehring et al., 2017; row E of Table 3 in Vaswani et al., 2017).

    Args:
      table: one row for each position 0 .. P - 1.
      positions: positions, any shape; the last axis is the length of a sequence.

    Returns:
      [*shape, D] in the dtype of `table`. A position outside the table is NaN: training on it would be a
      silent lie.

    Raises:
      ValueError: if the sequences are longer than the table, which is all that shapes can tell.

    >>> learned_positions(jnp.array([[0.5], [0.25]]), jnp.array([1, 0])).tolist()
    [[0.25], [0.5]]
    """
    if positions.ndim and positions.shape[-1] > table.shape[0]:
        raise ValueError(f"{positions.shape[-1]} positions, but the table of learned positions has {table.shape[0]}")
    return table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
