"""The position-wise feed-forward network."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.dropout import dropout


def feed_forward(
    x: Float[Array, "*batch D"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    up_bias: Float[Array, " F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    *,
    gate: Float[Array, "D F"] | None = None,
    activation_fn: Callable[[Array], Array] = jax.nn.relu,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Float[Array, "*batch D"]:
    """Computes max(0, x W1 + b1) W2 + b2 at every position (equation 2 of Vaswani et al., 2017).

    Args:
      x: [*batch, D].
      up: the paper's W1.
      down: W2.
      up_bias: b1; None means 0.
      down_bias: b2; None means 0.
      gate: multiplies the hidden units by x gate (Shazeer, 2020, https://arxiv.org/abs/2002.05202); None means by 1.
      activation_fn: the paper's ReLU.
      dropout_rate: of the hidden units; the paper has none there.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      [*batch, D] in the dtype of `x`, for parameters of that dtype.

    >>> feed_forward(jnp.array([2.0]), jnp.array([[1.0, -1.0]]), jnp.array([[3.0], [5.0]])).tolist()
    [6.0]
    """
    hidden = jnp.einsum("...D,DF->...F", x, up)
    hidden = hidden if up_bias is None else hidden + up_bias.reshape((1,) * (x.ndim - 1) + (-1,))
    hidden = activation_fn(hidden)
    hidden = hidden if gate is None else hidden * jnp.einsum("...D,DF->...F", x, gate)
    hidden = dropout(hidden, dropout_rate, dropout_rng)
    out = jnp.einsum("...F,FD->...D", hidden, down)
    return out if down_bias is None else out + down_bias.reshape((1,) * (x.ndim - 1) + (-1,))
