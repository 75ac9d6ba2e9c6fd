"""Attention over selected axes of images, videos and tables, computed by any attention over sequences."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.signature import weights_on_request


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
    """Flattens the selected axes into one sequence and attends over it; the other axes become batch axes.

    Over axis 1 of a video [B, frames, rows, columns, D], each pixel attends to the same pixel of all frames; over axes
    (2, 3), each frame attends within itself. The axial attention of Ho et al. (2019, https://arxiv.org/abs/1912.12180)
    attends over one axis at a time. Keras calls the argument `attention_axes`.

    Args:
      attention_fn: any attention of the shared signature over [B, T, N, H], such as `dot_product_attention`.
      query: queries, [B, ..., N, H].
      key: keys, [B, ..., K, H]: as many axes as `query`, and of equal length in the axes that are not in `axes`.
      value: values, [B, ..., K, U].
      bias: broadcastable to the shape of the weights.
      mask: broadcastable to the shape of the weights; True where a query may attend.
      axes: the axes to attend over, numbered as in the layer's input [B, ..., D], where N and H are one axis; negative
        numbers count from the end of that shape. The batch axis and the feature axis are not allowed.
      segment_ids: [B, ...], or a pair of such arrays, for queries and keys.
      return_weights: also return the weights.
      **options: passed to `attention_fn`. `is_causal` refers to the order of the flattened axes.

    Returns:
      [B, ..., N, U]; with `return_weights` a pair of output and weights, [B, *other axes, N, *axes of the queries,
      *axes of the keys], with the attended axes in the order of `axes`.

    Raises:
      ValueError: if an axis does not exist or occurs twice, or the other axes of queries and keys differ, or
        those of keys and values.

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
        raise ValueError(f"query, key and value must have equal ranks, got {query.ndim}, {key.ndim} and {value.ndim}")
    axes = _counted_from_front(axes, rank)
    others = [axis for axis in range(rank - 1) if axis not in axes]
    batch = [query.shape[axis] for axis in others]
    queries, keys = [query.shape[axis] for axis in axes], [key.shape[axis] for axis in axes]
    if [key.shape[axis] for axis in others] != batch:
        raise ValueError(
            f"queries and keys must have equal lengths in the axes that are not attended over, {tuple(others)}, got "
            f"shapes {query.shape} and {key.shape}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must have equal axes but for the last, got {key.shape} and {value.shape}")

    def flatten(x: Array) -> Array:  # [B, ..., N, H] to [B * other axes, length of the flattened axes, N, H]
        last = range(rank - 1, x.ndim)
        moved = jnp.transpose(x, (*others, *axes, *last))
        return moved.reshape(math.prod(batch), math.prod(x.shape[i] for i in axes), *(x.shape[i] for i in last))

    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        options["segment_ids"] = (flatten(pair[0]), flatten(pair[1]))
    groups = (batch, [query.shape[-2]], queries, keys)
    bias, mask = (None if pairs is None else _flatten_groups(pairs, groups) for pairs in (bias, mask))
    if return_weights:  # else it is not passed on: not every attention has this option
        options["return_weights"] = True
    result = attention_fn(flatten(query), flatten(key), flatten(value), bias, mask, **options)
    out = result[0] if return_weights else result
    out = out.reshape(*batch, *queries, *out.shape[-2:])
    out = jnp.moveaxis(out, range(len(others), rank - 1), axes)  # attended axes back to their places
    return (out, result[1].reshape(*batch, query.shape[-2], *queries, *keys)) if return_weights else out


def _counted_from_front(axes: Sequence[int], rank: int) -> list[int]:
    """Returns the axes with negative ones counted from the front; raises ValueError for axes that are not allowed."""
    counted = [axis + rank if axis < 0 else axis for axis in axes]
    are_different = len(set(counted)) == len(counted)
    if not counted or not are_different or not all(0 < axis < rank - 1 for axis in counted):
        raise ValueError(
            f"attention_axes {tuple(axes)} must be different axes between the batch (0) and the features ({rank - 1})"
        )
    return counted


def _flatten_groups(pairs: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Reshapes a mask or bias to [B, N, T, S], one axis per group; a group whose axes all have size 1 keeps size 1.

    `groups` has the full sizes of the axes that become B, N, T and S.
    """
    if pairs.ndim != sum(map(len, groups)):
        raise ValueError(
            f"mask and bias must be broadcastable to {tuple(size for group in groups for size in group)}, "
            f"got shape {pairs.shape}"
        )
    full_shape, flat_shape, start = [], [], 0
    for group in groups:
        sizes = pairs.shape[start : start + len(group)]
        start += len(group)
        is_broadcast = all(size == 1 for size in sizes)
        full_shape += sizes if is_broadcast else group
        flat_shape.append(1 if is_broadcast else math.prod(group))
    return jnp.broadcast_to(pairs, full_shape).reshape(flat_shape)
