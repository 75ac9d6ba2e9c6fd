"""Recurrent cells: pure functions of what inputs add to the gates, a state and a matrix; `scan_cell` runs them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

State = tuple[Float[Array, "B H"], ...]
"""What a cell remembers, float32: of a GRU (h,), of an LSTM (h, c); the first is its output."""


def lstm_cell(
    gates: Float[Array, "B 4*H"],
    state: State,
    recurrent: Float[Array, "H 4*H"],
    kept: Float[Array, "B H"] | None = None,
) -> State:
    """Takes one step of an LSTM with a forget gate (Hochreiter and Schmidhuber, 1997; Gers et al., 2000).

    c' = f c + i g and h' = o tanh(c'), where i, f, o = sigmoid and g = tanh of x W + b + h U.

    With `kept`, U is told (kept h) instead, as Gal and Ghahramani have it (2016, https://arxiv.org/abs/1512.05287).

    Args:
      gates: x W + b, in the order i, f, g, o, float32.
      state: (h, c).
      recurrent: U.
      kept: a mask of dropout, the same at every step; None keeps all.

    >>> [float(x[0, 0]) for x in lstm_cell(jnp.zeros((1, 4)), (jnp.zeros((1, 1)), jnp.ones((1, 1))), jnp.ones((1, 4)))]
    [0.23105858266353607, 0.5]
    """
    h, c = state
    i, f, g, o = jnp.split(gates + narrow_product(h if kept is None else kept * h, recurrent), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(
    gates: Float[Array, "B 3*H"],
    state: State,
    recurrent: Float[Array, "H 3*H"],
    kept: Float[Array, "B H"] | None = None,
) -> State:
    """Takes one step of a GRU: equations 5 to 8 of Cho et al. (2014, https://arxiv.org/abs/1406.1078).

    h' = z h + (1 - z) tanh(x W_n + b_n + (r h) U_n), where r, z = sigmoid of x W + b + h U: the reset gate acts before
    the product, as in the paper, not behind it as in cuDNN.

    With `kept`, both U are told (kept h) instead. What z carries over is no product with weights and stays whole: the
    mask would be applied to it again at every step, and its scale grow without end.

    Args:
      gates: x W + b, in the order r, z, n, float32.
      state: (h,).
      recurrent: U.
      kept: as of `lstm_cell`.

    >>> [float(x[0, 0]) for x in gru_cell(jnp.zeros((1, 3)), (jnp.ones((1, 1)),), jnp.zeros((1, 3)))]
    [0.5]
    """
    (h,) = state
    size, told = h.shape[-1], h if kept is None else kept * h
    r, z = jnp.split(jax.nn.sigmoid(gates[:, : 2 * size] + narrow_product(told, recurrent[:, : 2 * size])), 2, axis=-1)
    n = jnp.tanh(gates[:, 2 * size :] + narrow_product(r * told, recurrent[:, 2 * size :]))
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
    """Runs a cell along a sequence; where `token_mask` has no token the state stays what it was.

    Returns:
      The output at each position, and the state behind the last one (of a reversed scan, before the first).
    """

    def read(state: State, column: tuple[Array, Array | None]) -> tuple[State, Array]:
        gates, exists = column
        after = step(gates, state, recurrent)
        if exists is not None:
            after = tuple(jnp.where(exists[:, None], new, old) for new, old in zip(after, state, strict=True))
        return after, after[0]

    columns = gates.swapaxes(0, 1), None if token_mask is None else token_mask.T
    state, outputs = jax.lax.scan(read, state, columns, reverse=is_reversed)
    return outputs.swapaxes(0, 1), state


def narrow_product(x: Float[Array, "*batch I"], weights: Float[Array, "I J"]) -> Float[Array, "*batch J"]:
    """Multiplies in the narrower of both dtypes, and sums in float32."""
    dtype = min(x.dtype, weights.dtype, key=lambda dtype: dtype.itemsize)
    # Of rows: of what a scan has written XLA would transpose the gradient first, and be half as fast on a CPU.
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    product = jnp.einsum("RI,IJ->RJ", rows, weights.astype(dtype), preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:-1], weights.shape[-1])
