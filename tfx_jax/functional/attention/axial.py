"""Attention over chosen axes of images, videos and tables, by way of any attention over sequences."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.wrappers import weights_on_request


@weights_on_request
def attention_over_axes(
    attention_fn: Callable[..., Any],
    query: Float[Array, "B *queries N H"],
    key: Float[Array, "B *keys K H"],
    value: Float[Array, "B *keys K U"],
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    axes: Sequence[int],
    segment_ids: Array | tuple[Array, Array] | None = None,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """Flattens the chosen axes into one sequence and attends over it; the other axes act as more batch.

    Over axis 1 of a video [B, frames, rows, columns, D] each pixel attends to its own past and future; over axes (2, 3)
    each frame attends within itself. The axial attention of Ho et al. (2019, https://arxiv.org/abs/1912.12180) is one
    axis at a time, and Keras calls the argument `attention_axes`.

    Args:
      attention_fn: any attention of the shared signature over [B, T, N, H], such as `dot_product_attention`.
      query: queries, [B, ..., N, H].
      key: keys, [B, ..., K, H]: as many axes as `query`, and as long in those not attended over.
      value: values, [B, ..., K, U].
      bias: broadcastable to the shape of the weights.
      mask: broadcastable to the shape of the weights; True where a query may attend.
      axes: which axes, counted as in the layer's input [B, ..., D], that is with heads and size as one last axis; the
        negative count from there too. Neither the batch nor the features can be attended over.
      segment_ids: [B, ...] or a pair of them, for queries and keys.
      return_weights: also return the weights.
      **options: passed on. `is_causal` means the order of the flattened axes.

    Returns:
      [B, ..., N, U]; with `return_weights` a pair of it and the weights, [B, *others, N, *axes of the queries, *axes of
      the keys], the axes in the order in which `axes` names them.

    Raises:
      ValueError: if an axis is none of theirs or named twice, or the other axes of queries and keys differ.

    >>> import jax
    >>> from tfx_jax.functional import dot_product_attention
    >>> attend = jax.jit(
    ...     lambda x: attention_over_axes(dot_product_attention, x, x, x, axes=(-3, -2), return_weights=True)
    ... )
    >>> out, weights = attend(jnp.ones((2, 3, 4, 5, 1, 8)))  # [B, frames, rows, columns, N, H]
    >>> out.shape, weights.shape
    ((2, 3, 4, 5, 1, 8), (2, 3, 1, 4, 5, 4, 5))
    """
    rank = query.ndim - 1
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must have one rank, got {query.ndim}, {key.ndim} and {value.ndim}")
    axes = _counted_from_front(axes, rank)
    others = [axis for axis in range(rank - 1) if axis not in axes]
    batch, queries, keys = ([x.shape[i] for i in part] for x, part in ((query, others), (query, axes), (key, axes)))
    if [key.shape[axis] for axis in others] != batch:
        raise ValueError(f"queries {query.shape} and keys {key.shape} differ in an axis that is not attended over")

    def flatten(x: Array) -> Array:
        last = range(rank - 1, x.ndim)
        moved = jnp.transpose(x, (*others, *axes, *last))
        return moved.reshape(math.prod(batch), -1, *(x.shape[i] for i in last))

    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        options["segment_ids"] = (flatten(pair[0]), flatten(pair[1]))
    groups = (batch, [query.shape[-2]], queries, keys)
    bias, mask = (None if pairs is None else _flatten_groups(pairs, groups) for pairs in (bias, mask))
    result = attention_fn(
        flatten(query), flatten(key), flatten(value), bias, mask, return_weights=return_weights, **options
    )
    out = result[0] if return_weights else result
    out = out.reshape(*batch, *queries, *out.shape[-2:])
    out = jnp.moveaxis(out, range(len(others), rank - 1), axes)
    return (out, result[1].reshape(*batch, query.shape[-2], *queries, *keys)) if return_weights else out


def _counted_from_front(axes: Sequence[int], rank: int) -> list[int]:
    counted = [axis + rank if axis < 0 else axis for axis in axes]
    if not counted or len(set(counted)) < len(counted) or not all(0 < axis < rank - 1 for axis in counted):
        raise ValueError(
            f"attention_axes {tuple(axes)} must be different axes between the batch (0) and the features ({rank - 1})"
        )
    return counted


def _flatten_groups(pairs: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Makes of a mask or bias the [B, N, T, S] it means; a group of axes that are all of size 1 stays one."""
    if pairs.ndim != sum(map(len, groups)):
        raise ValueError(
            f"mask and bias must be broadcastable to {tuple(size for group in groups for size in group)}, "
            f"got shape {pairs.shape}"
        )
    wanted, flat, start = [], [], 0
    for group in groups:
        given = pairs.shape[start : start + len(group)]
        start += len(group)
        is_one = all(size == 1 for size in given)
        wanted += given if is_one else group
        flat.append(1 if is_one else math.prod(group))
    return jnp.broadcast_to(pairs, wanted).reshape(flat)
