"""Exact attention of each query to the blocks of keys that it selected: other pairs are not computed.

The pairs of a query and a selected block are sorted by block and cut into tiles of queries that read the same block.
A tile is one dense product of its queries with a contiguous slice of keys, so the keys are never gathered one by one.
The softmaxes of a query's blocks are merged at the end, and the backward pass recomputes the weights of each tile, as
in `chunked.py`. In this file a row is a key head of an example: its queries are those of the G heads that share it.
Batch and heads stay two axes, B and K, because a mesh may divide both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention.chunked import vary_alike
from tfx_jax.functional.attention.dense import hidden_logit
from tfx_jax.functional.attention.signature import statistics_dtype
from tfx_jax.functional.layers import dropout

TILE_SIZE = 128
"""Queries in a tile, at most. Fewer fill the last tile of a block better, more make larger products."""


class _Options(NamedTuple):
    """Static options of the computation, known at trace time."""

    block_size: int
    is_causal: bool
    scale: float
    dropout_rate: float
    tile_size: int
    num_chosen: int


class _Inputs(NamedTuple):
    """Arrays of all rows; keys and what belongs to them are padded by a block, so that a slice may begin at S."""

    query: Float[Array, "B K T G H"]
    key: Float[Array, "B K S+block H"]
    value: Float[Array, "B K S+block U"]
    first: Int[Array, "B K S+block"]
    """Index of the first token of each token's block; -1 is padding."""


class _Pairs(NamedTuple):
    """Pairs of a query and a block that it reads, P = T * blocks of a query, sorted by block and padded by a tile."""

    query: Int[Array, "B K P+tile"]
    block: Int[Array, "B K P+tile"]
    """Index of the first token of the block; S for pairs that do not exist, which come last."""
    num_tiles: Int[Array, ""]
    """Tiles of the row that has the most."""
    place: Int[Array, "B K T L"]
    """Where the pairs of each query are."""


class _Tile(NamedTuple):
    """C queries of each row that read the same block of J keys."""

    query_index: Int[Array, "B K C"]
    """T where the tile is not full: such indices are dropped when results are written."""
    block: Int[Array, "B K"]
    query: Float[Array, "B K C G H"]
    key: Float[Array, "B K J H"]
    value: Float[Array, "B K J U"]
    logits: Float[Array, "B K C G J"]
    visible: Bool[Array, "B K C 1 J"]


class _Softmax(NamedTuple):
    """Softmax over the keys of one block, for each pair of a query and a block, or over all keys of a query."""

    largest: Float[Array, "B K P G"]
    total: Float[Array, "B K P G"]
    """The sum of exp(logit - largest)."""
    mixed: Float[Array, "B K P G U"]
    """The sum of exp(logit - largest) * value."""


def attend_to_selected_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    first: Int[Array, "B S"],
    chosen: Int[Array, "B K T L"],
    *,
    block_size: int,
    is_causal: bool,
    scale: float | None,
    dropout_rate: float,
    dropout_rng: Array | None,
) -> Float[Array, "B T N U"]:
    """Computes softmax attention of each query to the tokens of the blocks that it chose.

    Memory grows as T * L, whatever the size of a block, and time as T * L * block_size. The gradient is a
    `jax.custom_vjp`, so `jax.jvp` of this function is not possible.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: [B, S, K, H]; the N / K query heads that share a key head share its choice.
      value: [B, S, K, U].
      first: index of the first token of each token's block; the tokens of a block are consecutive.
      chosen: index of the first token of each block that a query reads, all different; S where it reads fewer than L.
      block_size: tokens of a block, at most.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; zeros for a query that reads no token.
    """
    (b, t, n, h), (s, k) = query.shape, key.shape[1:3]
    query, key, value = vary_alike((query, key, value), (first, chosen, dropout_rng))
    num_chosen = chosen.shape[3]
    options = _Options(
        block_size, is_causal, h**-0.5 if scale is None else scale, dropout_rate, min(TILE_SIZE, t), num_chosen
    )

    def rows_of_keys(x: Array) -> Array:
        """Makes each key head of an example a row, [B, S, K, F] to [B, K, S + block, F]."""
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, block_size), (0, 0)))

    inputs = _Inputs(
        query.reshape(b, t, k, n // k, h).swapaxes(1, 2),
        rows_of_keys(key),
        rows_of_keys(value),
        jnp.broadcast_to(
            jnp.pad(first, ((0, 0), (0, block_size)), constant_values=-1)[:, None], (b, k, s + block_size)
        ),
    )
    pairs = _sort_pairs(chosen.reshape(b, k, t * num_chosen), options, s)
    out = cast(Any, _attend)(options, inputs, pairs, dropout_rng)
    return out.swapaxes(1, 2).reshape(b, t, n, -1)


def _sort_pairs(block: Int[Array, "B K P"], options: _Options, num_keys: int) -> _Pairs:
    """Sorts pairs by block; pair p belongs to query p // L."""
    block = block.astype(jnp.int32)
    num_pairs = block.shape[2]
    sizes = _vmap_rows(lambda row: jnp.zeros(num_keys + 1, jnp.int32).at[row].add(1))(block)  # pairs of each block
    num_tiles = (-(-sizes[..., :num_keys] // options.tile_size)).sum(axis=-1).max()
    if (num_keys + 1) * num_pairs < 2**32:  # a sort of single numbers is five times as fast as one of pairs
        packed = jnp.sort(
            block.astype(jnp.uint32) * np.uint32(num_pairs) + jnp.arange(num_pairs, dtype=jnp.uint32)[None, None]
        )
        order, block = ((x.astype(jnp.int32)) for x in (packed % np.uint32(num_pairs), packed // np.uint32(num_pairs)))
    else:
        index = jax.lax.broadcasted_iota(jnp.int32, block.shape, 2)
        block, order = jax.lax.sort((block, index), num_keys=1, is_stable=True)
    padding = ((0, 0), (0, 0), (0, options.tile_size))
    index = jax.lax.broadcasted_iota(jnp.int32, order.shape, 2)
    place = _vmap_rows(lambda order, index: jnp.zeros_like(index).at[order].set(index, unique_indices=True))(
        order, index
    )
    return _Pairs(
        jnp.pad(order // options.num_chosen, padding),
        jnp.pad(block, padding, constant_values=num_keys),
        num_tiles,
        place.reshape(*place.shape[:2], -1, options.num_chosen),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, inputs: _Inputs, pairs: _Pairs, rng: Array | None) -> Float[Array, "B K T G U"]:
    """Computes the output of all rows, with the custom gradient of `_backward`."""
    return _forward(options, inputs, pairs, rng)[0]


def _forward(options: _Options, inputs: _Inputs, pairs: _Pairs, rng: Array | None) -> tuple[Array, Any]:
    """Computes the output and the residuals for the backward pass."""
    dtype = statistics_dtype(inputs.query)

    def add_tile(tile: _Tile, position: Array, rng: Array | None, softmaxes: _Softmax) -> _Softmax:
        """Writes the softmax of each pair of a tile."""
        largest = jnp.where(tile.visible, tile.logits, hidden_logit(dtype)).max(axis=-1)
        weights = jnp.where(tile.visible, jnp.exp(tile.logits - largest[..., None]), jnp.zeros((), dtype))
        dropped = dropout(weights, options.dropout_rate, rng).astype(tile.value.dtype)
        mixed = jnp.einsum("BKCGJ,BKJU->BKCGU", dropped, tile.value, preferred_element_type=dtype)
        of_tile = _Softmax(largest, weights.sum(axis=-1), mixed)
        return _Softmax(*(_set_slice(x, part, position) for x, part in zip(softmaxes, of_tile, strict=True)))

    softmaxes = _Softmax(*(_per_pair(inputs, pairs, rest, dtype) for rest in ((), (), inputs.value.shape[3:])))
    softmaxes = _over_tiles(options, inputs, pairs, rng, add_tile, softmaxes)
    # Merges the softmaxes of the blocks of each query, [B, K, T, L, G].
    largest, total, mixed = (_rows(x, pairs.place) for x in softmaxes)
    is_empty = total == 0
    largest = jnp.where(is_empty, hidden_logit(dtype), largest)
    of_query = largest.max(axis=3, keepdims=True)
    rescaling = jnp.exp(largest - of_query)
    total = (total * rescaling).sum(axis=3)
    total = jnp.where(total == 0, jnp.ones_like(total), total)
    out = (mixed * rescaling[..., None]).sum(axis=3) / total[..., None]
    return out.astype(inputs.query.dtype), (inputs, pairs, rng, _Softmax(of_query[:, :, :, 0], total, out))


def _backward(options: _Options, residuals: Any, cotangent: Float[Array, "B K T G U"]) -> tuple[Any, None, None]:
    """Computes the gradients of `_attend` by algorithm 4 of FlashAttention, tile by tile."""
    inputs, pairs, rng, saved = residuals
    dtype = saved.total.dtype
    correction = (saved.mixed * cotangent.astype(dtype)).sum(axis=-1)  # [B, K, T, G], see `chunked._softmax_correction`

    def add_tile(tile: _Tile, position: Array, rng: Array | None, gradients: Any) -> tuple[Array, Array, Array]:
        """Adds the gradients that pass through a tile to those of keys and values, and writes those of its queries."""
        of_pairs, of_key, of_value = gradients
        largest, total, correction_c = (
            _rows(x, tile.query_index)[..., None] for x in (saved.largest, saved.total, correction)
        )
        out_gradient = _rows(cotangent, tile.query_index).astype(tile.value.dtype)
        weights = jnp.exp(tile.logits - largest) / jnp.where(total == 0, jnp.ones_like(total), total)
        weights = jnp.where(tile.visible, weights, jnp.zeros((), dtype))
        dropped = dropout(weights, options.dropout_rate, rng).astype(tile.value.dtype)
        value_part = jnp.einsum("BKCGJ,BKCGU->BKJU", dropped, out_gradient, preferred_element_type=dtype)
        weight_gradient = jnp.einsum("BKCGU,BKJU->BKCGJ", out_gradient, tile.value, preferred_element_type=dtype)
        weight_gradient = dropout(weight_gradient, options.dropout_rate, rng)  # drops the same weights
        scaled = (weights * (weight_gradient - correction_c) * options.scale).astype(tile.query.dtype)
        query_part = jnp.einsum("BKCGJ,BKJH->BKCGH", scaled, tile.key, preferred_element_type=dtype)
        key_part = jnp.einsum("BKCGJ,BKCGH->BKJH", scaled, tile.query, preferred_element_type=dtype)
        return (
            _set_slice(of_pairs, query_part, position),
            _set_slice(of_key, _slice(of_key, tile.block, options.block_size) + key_part, tile.block),
            _set_slice(of_value, _slice(of_value, tile.block, options.block_size) + value_part, tile.block),
        )

    start = _per_pair(inputs, pairs, inputs.query.shape[4:], dtype), *(jnp.zeros_like(x, dtype) for x in inputs[1:3])
    of_pairs, of_key, of_value = _over_tiles(options, inputs, pairs, rng, add_tile, start)
    gradients = _rows(of_pairs, pairs.place).sum(axis=3), of_key, of_value
    query, key, value = (x.astype(like.dtype) for x, like in zip(gradients, inputs[:3], strict=True))
    return _Inputs(query, key, value, cast(Any, None)), None, None


_attend.defvjp(_forward, _backward)


def _over_tiles(
    options: _Options, inputs: _Inputs, pairs: _Pairs, rng: Array | None, add_tile: Callable[..., Any], start: Any
) -> Any:
    """Calls `add_tile(tile, position, rng, state)` for one tile of each row after another; returns the last state."""

    def next_tile(loop: Any) -> Any:
        position, index, state = loop
        tile, count = _read_tile(options, inputs, pairs, position)
        tile_rng = None if rng is None else jax.random.fold_in(rng, index)
        return position + count, index + 1, add_tile(tile, position, tile_rng, state)

    # The number of tiles is known before the loop: devices with different rows need not agree in each iteration.
    begin = jnp.zeros_like(pairs.block[..., 0]), jnp.zeros((), jnp.int32), start
    _, _, state = jax.lax.while_loop(lambda loop: loop[1] < pairs.num_tiles, next_tile, begin)
    return state


def _read_tile(
    options: _Options, inputs: _Inputs, pairs: _Pairs, position: Int[Array, "B K"]
) -> tuple[_Tile, Int[Array, "B K"]]:
    """Returns the tile of each row that begins with the pair at `position`, and how many pairs it has."""
    t, s = inputs.query.shape[2], inputs.first.shape[2] - options.block_size
    blocks = _slice(pairs.block, position, options.tile_size)  # [B, K, C]
    block = blocks[..., 0]
    exists = (blocks == block[..., None]) & (block < s)[..., None]
    query_index = jnp.where(exists, _slice(pairs.query, position, options.tile_size), t)
    query = _rows(inputs.query, query_index)
    key, value, first = (_slice(x, block, options.block_size) for x in (inputs.key, inputs.value, inputs.first))
    visible = exists[..., None] & (first == block[..., None])[..., None, :]  # [B, K, C, J]
    if options.is_causal:
        key_index = block[..., None] + jnp.arange(options.block_size, dtype=block.dtype)[None, None]
        visible = visible & (key_index[..., None, :] <= (query_index + (s - t))[..., None])
    dtype = statistics_dtype(query)
    logits = jnp.einsum("BKCGH,BKJH->BKCGJ", query, key, preferred_element_type=dtype) * options.scale
    tile = _Tile(query_index, block, query, key, value, logits, visible[..., None, :])
    return tile, exists.sum(axis=-1, dtype=position.dtype)


def _vmap_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """Maps a function of one row over batch and key heads. Compilers know then that rows are independent."""
    return jax.vmap(jax.vmap(function))


def _slice(x: Shaped[Array, "B K S *rest"], start: Int[Array, "B K"], size: int) -> Shaped[Array, "B K J *rest"]:
    """Returns J = `size` consecutive entries of each row."""
    return _vmap_rows(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(x, start)


def _set_slice(
    x: Float[Array, "B K S *rest"], part: Float[Array, "B K J *rest"], start: Int[Array, "B K"]
) -> Float[Array, "B K S *rest"]:
    """Writes J consecutive entries of each row."""
    return _vmap_rows(lambda row, part, start: jax.lax.dynamic_update_slice_in_dim(row, part, start, 0))(x, part, start)


def _rows(x: Shaped[Array, "B K T ..."], index: Int[Array, "B K ..."]) -> Shaped[Array, "B K ..."]:
    """Gathers entries of each row; those out of range are zeros."""
    return _vmap_rows(lambda row, index: row.at[index].get(mode="fill", fill_value=0))(x, index)


def _per_pair(
    inputs: _Inputs, pairs: _Pairs, rest: tuple[int, ...], dtype: np.dtype
) -> Float[Array, "B K P+tile G *rest"]:
    """Returns zeros for each pair and each query head."""
    b, k, _, g, _ = inputs.query.shape
    like = jnp.zeros_like(inputs.query[:, :, :1, :, :1].reshape(b, k, 1, g, *(1 for _ in rest)), dtype)
    return jnp.broadcast_to(like, (b, k, pairs.block.shape[2], g, *rest))
