"""Recurrent cells as pure functions of input projections, a state and a recurrent matrix; `scan_cell` runs them.

The projection x W + b is computed outside of the cells, for a whole sequence at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

State = tuple[Float[Array, "B H"], ...]
"""State of a cell, float32: (h,) for a GRU, (h, c) for an LSTM; h is also the output."""


def lstm_cell(
    gates: Float[Array, "B 4*H"],
    state: State,
    recurrent: Float[Array, "H 4*H"],
    kept: Float[Array, "B H"] | None = None,
) -> State:
    """Takes one step of an LSTM with a forget gate (Hochreiter and Schmidhuber, 1997; Gers et al., 2000).

    c' = f c + i g and h' = o tanh(c'), where i, f, o = sigmoid and g = tanh of x W + b + h U.

    With `kept`, U multiplies (kept * h) instead of h: the dropout of Gal and Ghahramani (2016,
    https://arxiv.org/abs/1512.05287).

    Args:
      gates: x W + b, in the order i, f, g, o, float32.
      state: (h, c).
      recurrent: U.
      kept: dropout mask, scaled, the same at every step; None means no dropout.

    >>> [float(x[0, 0]) for x in lstm_cell(jnp.zeros((1, 4)), (jnp.zeros((1, 1)), jnp.ones((1, 1))), jnp.ones((1, 4)))]
    [0.23105858266353607, 0.5]
    """
    h, c = state
    i, f, g, o = jnp.split(gates + mixed_product(h if kept is None else kept * h, recurrent), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(
    gates: Float[Array, "B 3*H"],
    state: State,
    recurrent: Float[Array, "H 3*H"],
    kept: Float[Array, "B H"] | None = None,
) -> State:
    """Takes one step of a GRU: equations 5 to 8 of Cho et al. (2014, https://arxiv.org/abs/1406.1078).

    h' = z h + (1 - z) tanh(x W_n + b_n + (r h) U_n), where r, z = sigmoid of x W + b + h U. The reset gate r multiplies
    h before the product with U_n, as in the paper, not after it as in cuDNN.

    With `kept`, U and U_n multiply (kept * h) instead of h. The term z h is not masked: the mask would apply again at
    every step, and its scale would grow without bound.

    Args:
      gates: x W + b, in the order r, z, n, float32.
      state: (h,).
      recurrent: U, with U_n as its last columns.
      kept: dropout mask as in `lstm_cell`.

    >>> [float(x[0, 0]) for x in gru_cell(jnp.zeros((1, 3)), (jnp.ones((1, 1)),), jnp.zeros((1, 3)))]
    [0.5]
    """
    (h,) = state
    size, masked_h = h.shape[-1], h if kept is None else kept * h
    r_z = jax.nn.sigmoid(gates[:, : 2 * size] + mixed_product(masked_h, recurrent[:, : 2 * size]))
    r, z = jnp.split(r_z, 2, axis=-1)
    n = jnp.tanh(gates[:, 2 * size :] + mixed_product(r * masked_h, recurrent[:, 2 * size :]))
    return (z * h + (1 - z) * n,)


def scan_cell(
    step: Callable[[Array, State, Array], State],
    gates: Float[Array, "B T GH"],
    state: State,
    recurrent: Float[Array, "H GH"],
    token_mask: Bool[Array, "B T"] | None = None,
    *,
    is_reversed: bool = False,
) -> tuple[Float[Array, "B T H"], State]:
    """Runs a cell along a sequence. At padding, the state does not change and the output repeats the previous one.

    Args:
      step: the cell, called as `step(gates, state, recurrent)` with the gates of one position, [B, GH].
      gates: input projections x W + b of all positions.
      state: initial state.
      recurrent: U.
      token_mask: True for tokens, False for padding; None means no padding.
      is_reversed: whether to run from the last position to the first.

    Returns:
      The output at each position, and the final state: after the last position, in a reversed scan after the first.
    """

    def take_step(state: State, step_inputs: tuple[Array, Array | None]) -> tuple[State, Array]:
        """Returns the state after one position and its output; at padding, the old ones."""
        step_gates, exists = step_inputs
        new_state = step(step_gates, state, recurrent)
        if exists is not None:
            new_state = tuple(jnp.where(exists[:, None], new, old) for new, old in zip(new_state, state, strict=True))
        return new_state, new_state[0]

    inputs = gates.swapaxes(0, 1), None if token_mask is None else token_mask.T
    state, outputs = jax.lax.scan(take_step, state, inputs, reverse=is_reversed)
    return outputs.swapaxes(0, 1), state


def mixed_product(x: Float[Array, "*batch I"], weights: Float[Array, "I J"]) -> Float[Array, "*batch J"]:
    """Multiplies in the less precise of both dtypes and sums in float32."""
    dtype = min(x.dtype, weights.dtype, key=lambda dtype: dtype.itemsize)
    # Reshaped to a matrix: otherwise XLA transposes the gradient of a scan's outputs first, twice as slow on a CPU.
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    product = jnp.einsum("RI,IJ->RJ", rows, weights.astype(dtype), preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:-1], weights.shape[-1])
