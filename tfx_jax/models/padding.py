"""Batches of tokens: their shape, and their padding: token positions, moving it to the end, and ids at padding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def check_tokens(max_length: int | None = None, **arguments: Any) -> None:
    """Raises ValueError unless each argument is an array [B, T] of integers with at most `max_length` tokens in a row.

    >>> check_tokens(tokens=jnp.array([5, 6]))
    Traceback (most recent call last):
    ...
    ValueError: tokens must be an array of token ids [B, T], got shape (2,): for a single sequence pass tokens[None]
    """
    for name, tokens in arguments.items():
        if not hasattr(tokens, "shape"):
            raise ValueError(f"{name} must be an array of token ids [B, T], got a {type(tokens).__name__}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"{name} must be an array of token ids [B, T], got dtype {tokens.dtype}")
        if len(tokens.shape) != 2:
            hint = f": for a single sequence pass {name}[None]" if len(tokens.shape) == 1 else ""
            raise ValueError(f"{name} must be an array of token ids [B, T], got shape {tokens.shape}{hint}")
        if max_length is not None and tokens.shape[1] > max_length:
            raise ValueError(f"a sequence must have at most max_length={max_length} tokens, got {tokens.shape[1]}")


def left_aligned(
    tokens: Int[Array, "B T"], token_mask: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Moves the tokens of each row to the front, in their order, and padding to the end.

    >>> left_aligned(jnp.array([[0, 7, 0, 8]]), jnp.array([[False, True, False, True]]))[0].tolist()
    [[7, 8, 0, 0]]
    """
    order = jnp.argsort(~token_mask, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(token_mask, order, axis=1)


def positions_from_mask(token_mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the position of each token, counted without padding; padding gets the position of the token before it.

    >>> positions_from_mask(jnp.array([[False, True, True, False]])).tolist()
    [[0, 0, 1, 1]]
    """
    if token_mask.dtype != jnp.bool_:
        raise ValueError(f"token_mask must be boolean (True = the token exists), got {token_mask.dtype}")
    return jnp.maximum(jnp.cumsum(token_mask, axis=1) - 1, 0)


def last_index(mask: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Returns the index of the last True of each row, 0 if there is none.

    >>> last_index(jnp.array([[True, True, False]])).tolist()
    [1]
    """
    return jnp.max(jnp.where(mask, jnp.arange(mask.shape[1])[None], 0), axis=1)


def padding_last(tokens: Int[Array, "B T"], pad_id: int) -> Int[Array, "B T"]:
    """Moves padding to the end of each row, so that a token's array index is its position.

    >>> padding_last(jnp.array([[0, 7, 0, 8]]), 0).tolist()
    [[7, 8, 0, 0]]
    """
    return left_aligned(tokens, tokens != pad_id)[0]


def hide_padding(ids: Int[Array, "#B T"], token_mask: Bool[Array, "B T"] | None) -> Int[Array, "#B T"]:
    """Replaces ids at padding by 0, so that callers may pad with any id.

    An id outside the vocabulary would be looked up as NaN, which reaches other tokens: 0 times NaN is NaN.

    >>> hide_padding(jnp.array([[5, -1]]), jnp.array([[True, False]])).tolist()
    [[5, 0]]
    """
    return ids if token_mask is None else jnp.where(token_mask, ids, 0)
