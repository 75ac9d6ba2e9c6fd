"""Attention by distance or by block, counted in tokens: padding between two tokens is not counted.

Tokens are moved together before the attention, and the results are moved back to their columns afterwards. A column is
an index along the length axis of the arrays, padding included.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

from tfx_jax.functional.attention.signature import Bias, Mask, SegmentIds, pair_of_segment_ids


class TokenOrder(NamedTuple):
    """A permutation of the columns in which the tokens of each segment are consecutive.

    Attributes:
      queries: the column of each query in the new order, [B, T]; None means that queries are not moved.
      keys: the column of each key in the new order, [B, S].
      segment_ids: segments of queries and keys in the new order; 0 is padding, always hidden.
    """

    queries: Int[Array, "B T"] | None
    keys: Int[Array, "B S"]
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]]

    def of_queries(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
        """Moves an array with an axis of queries to the new order."""
        return x if self.queries is None else _take(x, self.queries, 1)

    def of_keys(self, x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B S *rest"]:
        """Moves an array with an axis of keys to the new order."""
        return _take(x, self.keys, 1)

    def of_pairs(self, x: Shaped[Array, "#B #N #T #S"] | None) -> Shaped[Array, "B #N #T #S"] | None:
        """Moves the query axis and the key axis of a bias or a mask to the new order."""
        if x is None:
            return None
        x = jnp.broadcast_to(x, (len(self.keys), *x.shape[1:]))
        if self.queries is not None and x.shape[2] > 1:
            x = _take(x, self.queries, 2)
        return x if x.shape[3] == 1 else _take(x, self.keys, 3)

    def to_columns(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
        """Moves an array with an axis of queries back to the columns."""
        return x if self.queries is None else _take(x, jnp.argsort(self.queries, axis=1), 1)

    def restore(self, outputs: Any) -> Any:
        """Moves an output [B, T, N, U], or a pair of output and weights [B, N, T, S], back to the columns."""
        if not isinstance(outputs, tuple):
            return self.to_columns(outputs)
        out, weights = outputs
        weights = self.to_columns(weights.swapaxes(1, 2)).swapaxes(1, 2)
        return self.to_columns(out), _take(weights, jnp.argsort(self.keys, axis=1), 3)


def order_tokens(
    mask: Mask | None, segment_ids: SegmentIds | None, batch: int, num_queries: int, num_keys: int
) -> TokenOrder | None:
    """Returns the order in which the tokens of each segment are consecutive.

    A column is padding if its key is in segment 0 or hidden from all heads and queries. With T = S, the columns of
    different segments may alternate. With 1 < T < S, the columns of a segment must be consecutive, except for padding.

    Args:
      mask: mask of keys, [#B, #N, 1, #S]; a mask of pairs does not define padding and is ignored.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      batch: B.
      num_queries: T. The queries are in the last T columns. If T = 1, the query is the last token: later columns are
        the unused part of a cache.
      num_keys: S.

    Returns:
      The order: tokens first if T = S, otherwise tokens last, so that queries stay at the end. None if every column
      holds a token of the same sequence.
    """
    is_padding_mask = mask is not None and mask.shape[2] == 1
    if segment_ids is None and not is_padding_mask:
        return None
    ones = (jnp.ones((batch, size), jnp.int32) for size in (num_queries, num_keys))
    ids = ones if segment_ids is None else pair_of_segment_ids(segment_ids, batch, num_queries, num_keys)
    query_ids, key_ids = (x.astype(jnp.int32) for x in ids)
    exists = key_ids != 0
    if mask is not None and is_padding_mask:
        exists = exists & mask.any(axis=(1, 2))
    if num_queries == 1:  # hide other sequences, so that the query's own is the only one
        exists = exists & (key_ids == query_ids)
    key_ids = jnp.where(exists, key_ids, 0)
    if num_queries == num_keys:
        sorted_last = jnp.iinfo(jnp.int32).max
        keys = queries = jnp.argsort(jnp.where(exists, key_ids, sorted_last), axis=1, stable=True)
    else:  # False sorts before True: padding first
        keys = jnp.argsort(exists, axis=1, stable=True)
        queries = jnp.argsort(exists[:, num_keys - num_queries :], axis=1, stable=True)
    if num_queries == 1:
        return TokenOrder(None, keys, (query_ids, _take(key_ids, keys, 1)))
    query_ids = jnp.where(exists[:, num_keys - num_queries :], query_ids, 0)
    return TokenOrder(queries, keys, (_take(query_ids, queries, 1), _take(key_ids, keys, 1)))


def attend_in_order(
    attend: Callable[..., Any],
    query: Num[Array, "B T N H"],
    key: Num[Array, "B S K H"],
    value: Num[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    order: TokenOrder,
) -> Any:
    """Calls `attend(query, key, value, bias, mask, segment_ids=...)` on tokens in order, and restores the columns."""
    # Keys that a padding mask hides are in segment 0 of the order, so that mask is not needed any more.
    is_padding_mask = mask is None or mask.shape[1:3] == (1, 1)
    outputs = attend(
        order.of_queries(query),
        order.of_keys(key),
        order.of_keys(value),
        order.of_pairs(bias),
        None if is_padding_mask else order.of_pairs(mask),
        segment_ids=order.segment_ids,
    )
    return order.restore(outputs)


def check_last_positions(num_queries: int, num_keys: int) -> None:
    """Raises ValueError if there are more queries than keys, whose last positions are those of the queries."""
    if num_queries > num_keys:
        raise ValueError(
            f"attention by position needs at most as many queries as keys ({num_keys}), got {num_queries}, because "
            "query i has position S - T + i: pass the keys of all queries"
        )


def attend_to_tokens(
    attend: Callable[..., Any],
    query: Num[Array, "B T N H"],
    key: Num[Array, "B S K H"],
    value: Num[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    segment_ids: SegmentIds | None,
    **gates: Shaped[Array, "B S ..."],
) -> Any:
    """Calls `attend(query, key, value, bias, mask, segment_ids=..., **gates)` on tokens without padding in between.

    The queries of the call are at the last T of its S columns, and gates belong to the keys.

    Raises:
      ValueError: if there are more queries than keys.
    """
    (b, t), s = query.shape[:2], key.shape[1]
    check_last_positions(t, s)
    order = order_tokens(mask, segment_ids, b, t, s)
    if order is None:
        return attend(query, key, value, bias, mask, segment_ids=None, **gates)
    ordered_gates = {name: order.of_keys(gate) for name, gate in gates.items()}

    def attend_with_gates(*arrays: Any, **options: Any) -> Any:
        return attend(*arrays, **options, **ordered_gates)

    return attend_in_order(attend_with_gates, query, key, value, bias, mask, order)


def positions_of(key_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns the position of each token in its segment, from 0; the tokens of a segment must be consecutive.

    >>> jax.jit(positions_of)(jnp.array([[7, 7, 3, 3, 3, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    columns = jnp.arange(key_ids.shape[1])[None]
    is_first = jnp.pad(key_ids[:, 1:] != key_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return columns - jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)


def _take(x: Shaped[Array, "B ..."], order: Int[Array, "B _"], axis: int) -> Shaped[Array, "B ..."]:
    """Reorders an axis by a separate order for each row."""

    def take(row: Array, order: Array) -> Array:
        return jnp.take(row, order, axis=axis - 1, mode="clip", unique_indices=True)

    return jax.vmap(take)(x, order)
