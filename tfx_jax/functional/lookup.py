"""Lookup of table rows by integer ids."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lookup(table: Float[Array, "V D"], ids: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks up rows of a table, such as the vectors of tokens.

    Args:
      table: [V, D].
      ids: 0 .. V - 1, any shape.

    Returns:
      [*shape, D] in the dtype of `table`. The row of an id outside 0 .. V - 1 is NaN. Negative ids do not count from
      the end.

    >>> lookup(jnp.array([[0.5], [0.25]]), jnp.array([1, 0, -1, 2])).tolist()
    [[0.25], [0.5], [nan], [nan]]
    """
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
