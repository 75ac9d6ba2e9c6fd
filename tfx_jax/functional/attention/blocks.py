"""Shared parts of block-sparse attentions: dense attention of each block of queries over the keys that it may see."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_shapes,
    pair_of_segment_ids,
    segment_mask,
)


def attend_in_blocks(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    mask: Mask | None,
    *,
    cut_queries: Callable[[Array], Array],
    cut_keys: Callable[[Array], Array],
    columns: Int[Array, "blocks J"],
    allowed: Bool[Array, "#I #J"],
    rows: slice,
    segment_ids: SegmentIds | None,
    return_weights: bool,
    pair_bias: Float[Array, "#B #blocks N I J"] | None = None,
    **options: Any,
) -> Any:
    """Computes dense attention of each block of I queries over J keys, with the blocks as a batch axis.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H].
      value: values, [B, S, K, U].
      bias: broadcastable to [B, N, 1, S].
      mask: broadcastable to [B, N, 1, S].
      cut_queries: cuts [B, T, ...] into blocks of queries, [B, blocks, I, ...].
      cut_keys: cuts [B, S, ...] into the keys of each block, [B, blocks, J, ...].
      columns: position of each key of a block; positions outside 0 .. S - 1 are padding.
      allowed: which of the J keys each of the I queries may see, the same for all blocks.
      rows: slice of the blocks * I queries that removes the padding.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      return_weights: also return the weights, [B, N, T, S].
      pair_bias: added to the logits of the queries and keys of each block; None means no such bias.
      options: options of `dot_product_attention`.
    """
    (b, t, n, _), s, (num_blocks, _) = query.shape, key.shape[1], columns.shape

    def merge_blocks(x: Array) -> Array:
        """Makes each block a row of the batch: [#B, #blocks, ...] to [B * blocks, ...]."""
        return jnp.broadcast_to(x, (b, num_blocks, *x.shape[2:])).reshape(b * num_blocks, *x.shape[2:])

    def over_keys(x: Array) -> Array:  # [#B, #N, 1, #S] to [#B, blocks, #N, 1, J]
        per_key = jnp.broadcast_to(x, (*x.shape[:3], s))[:, :, 0].swapaxes(1, 2)
        return jnp.moveaxis(cut_keys(per_key), 3, 2)[:, :, :, None]

    visible = allowed[None] & ((columns >= 0) & (columns < s))[:, None]  # [blocks, I, J]; other columns are padding
    visible = visible[None, :, None]
    if mask is not None:
        visible = visible & over_keys(mask)
    if segment_ids is not None:
        query_ids, key_ids = pair_of_segment_ids(segment_ids, b, t, s)
        visible = visible & jax.vmap(segment_mask, 1, 1)(cut_queries(query_ids), cut_keys(key_ids))
    bias = None if bias is None else over_keys(bias)
    if pair_bias is not None:
        bias = pair_bias if bias is None else bias + pair_bias
    outputs = dot_product_attention(
        merge_blocks(cut_queries(query)),
        merge_blocks(cut_keys(key)),
        merge_blocks(cut_keys(value)),
        None if bias is None else merge_blocks(bias),
        merge_blocks(visible),
        return_weights=return_weights,
        **options,
    )
    out, weights = outputs if isinstance(outputs, tuple) else (outputs, None)
    out = out.reshape(b, -1, *out.shape[2:])[:, rows]
    if weights is None:
        return out
    weights = weights.reshape(b, num_blocks, *weights.shape[1:])
    return out, _spread(weights, columns, s).reshape(b, n, -1, s)[:, :, rows]


def _spread(
    weights: Float[Array, "B blocks N I J"], columns: Int[Array, "blocks J"], num_keys: int
) -> Float[Array, "B N blocks I S"]:
    """Scatters the weights of each block to the positions of its keys."""

    def scatter(block: Array, columns: Array) -> Array:
        """Scatters the weights of one block, [B, N, I, J], along their last axis, to [B, N, I, S]."""
        return jnp.zeros((*block.shape[:-1], num_keys), block.dtype).at[..., columns].set(block, mode="drop")

    # Padding gets an index out of range, which is dropped; a negative index would count from the end.
    return jax.vmap(scatter, (1, 0), 2)(weights, jnp.where(columns < 0, num_keys, columns))


def cut(
    x: Shaped[Array, "B S *rest"], start: int, num_blocks: int, block_size: int, span: int
) -> Shaped[Array, "B blocks span *rest"]:
    """Cuts out `span` positions from start + i * block_size for each block i, with zeros beyond both ends of `x`.

    `start` may be negative, and spans longer than `block_size` overlap.
    """
    num_pieces = -(-span // block_size)  # pieces of `block_size` positions in a span, rounded up
    end = start + (num_blocks + num_pieces - 1) * block_size
    # Negative padding removes positions.
    padding = [(0, 0, 0), (-start, end - x.shape[1], 0), *[(0, 0, 0)] * (x.ndim - 2)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
    batch, _, *rest = x.shape
    # Piece i of all blocks is one slice of `x`, because consecutive blocks are `block_size` apart.
    pieces = [
        x[:, i * block_size : (i + num_blocks) * block_size].reshape(batch, num_blocks, block_size, *rest)
        for i in range(num_pieces)
    ]
    return jnp.concatenate(pieces, axis=2)[:, :, :span]


def check_over_keys(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> None:
    """Raises ValueError for shapes that do not match and for a bias or a mask that differs between queries."""
    check_shapes(query, key, value, bias, mask)
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and array.shape[2] != 1:
            raise ValueError(
                f"{name} must be the same for all queries, got shape {array.shape}: one for each pair of query and key "
                "takes the memory that sparse attention saves; pass [B, 1, 1, S], is_causal and segment_ids"
            )
