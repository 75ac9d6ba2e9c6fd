"""The position-wise feed-forward network."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from tfx_jax.functional.dropout import dropout
from tfx_jax.functional.linear import linear


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
      [*batch, D] in the dtype of `x`; parameters may have more precision, see `tfx_jax.functional.linear`.

    >>> array = jax.numpy.array
    >>> feed_forward(array([2.0]), array([[1.0, -1.0]]), array([[3.0], [5.0]])).tolist()
    [6.0]
    """
    hidden = activation_fn(linear(x, up, up_bias))
    hidden = hidden if gate is None else hidden * linear(x, gate)
    hidden = dropout(hidden, dropout_rate, dropout_rng)
    return linear(hidden, down, down_bias)
