"""Padding in rows of tokens: positions, order, and ids where no token exists."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def left_aligned(
    tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Moves the tokens that exist to the front of each row, in their order.

    >>> left_aligned(jnp.array([[0, 7, 0, 8]]), jnp.array([[False, True, False, True]]))[0].tolist()
    [[7, 8, 0, 0]]
    """
    order = jnp.argsort(~token_mask, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(token_mask, order, axis=1)


def count(token_mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token among those of its row that exist; padding has that of the token before it.

    >>> count(jnp.array([[False, True, True, False]])).tolist()
    [[0, 0, 1, 1]]
    """
    if token_mask.dtype != jnp.bool_:
        raise ValueError(f"token_mask must be boolean (True = the token exists), got {token_mask.dtype}")
    return jnp.maximum(jnp.cumsum(token_mask, axis=1) - 1, 0)


def padding_last(tokens: Int[Array, "B T"], pad_id: int) -> Int[Array, "B T"]:
    """Moves padding behind the tokens of each row, so that columns are positions.

    >>> padding_last(jnp.array([[0, 7, 0, 8]]), 0).tolist()
    [[7, 8, 0, 0]]
    """
    return left_aligned(tokens, tokens != pad_id)[0]


def hide_padding(ids: Int[Array, "#B T"], token_mask: Bool[Array, "B T"] | None) -> Int[Array, "#B T"]:
    """Replaces ids by 0 where no token exists, so that the caller may pad with any id.

    A vector of NaN, which an id outside the table has, would reach the tokens: a weight of 0 times NaN is NaN.

    >>> hide_padding(jnp.array([[5, -1]]), jnp.array([[True, False]])).tolist()
    [[5, 0]]
    """
    return ids if token_mask is None else jnp.where(token_mask, ids, 0)
