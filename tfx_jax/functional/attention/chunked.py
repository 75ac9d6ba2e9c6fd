"""Exact attention in linear memory: an online softmax over chunks of keys.

The running maximum and sum are those of Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867). The backward
pass recomputes the weights of each chunk, as FlashAttention does (Dao et al., 2022, algorithm 4 of
https://arxiv.org/abs/2205.14135). Ring attention uses the same functions. In this file there are I chunks of T queries
and J chunks of S keys; chunk axes come first, so that reading a chunk reads one slice.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dense import (
    apply_mask_mod,
    apply_score_mod,
    at_least_visible,
    check_sinks,
    dot_product_weights,
    hidden_logit,
    soft_capped,
)
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    MaskMod,
    Positions,
    ScoreMod,
    SegmentIds,
    Window,
    add_key_lengths,
    check_integers,
    check_outputs,
    check_shapes,
    check_soft_cap,
    check_window,
    count_from_lengths,
    pair_of_segment_ids,
    segment_mask,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zero_past_lengths,
    zeros_where_empty,
)
from tfx_jax.functional.layers import dropout


class Options(NamedTuple):
    """Static options of the computation, known at trace time."""

    scale: float
    is_causal: bool
    dropout_rate: float
    num_queries: int
    num_keys: int
    window: tuple[int, int] | None = None
    """How many keys a query sees to the left and to the right of its own position."""
    logits_soft_cap: float | None = None
    score_mod: Callable[..., Array] | None = None
    """Called as `score_mod(arrays, logits, b, n, t, s)`, with the arrays of `Extras`."""
    mask_mod: Callable[..., Array] | None = None
    """Called as `mask_mod(arrays, b, n, t, s)`."""


class Extras(NamedTuple):
    """Further input arrays, the same for all chunks."""

    sinks: Float[Array, "K G"] | None = None
    score_arrays: tuple[Array, ...] = ()
    """Floating-point arrays that `score_mod` closes over; they get gradients."""
    score_indices: tuple[Array, ...] = ()
    """Other arrays that `score_mod` closes over, such as integers."""
    mask_arrays: tuple[Array, ...] = ()
    """Arrays that `mask_mod` closes over."""


NO_EXTRAS = Extras()


class Queries(NamedTuple):
    """Chunks of the queries and of their segment ids."""

    query: Float[Array, "I B K G T H"]
    ids: Int[Array, "I B T"] | None


class Keys(NamedTuple):
    """Chunks of keys, values, bias, mask and segment ids; an axis of size 1 in a bias or a mask is broadcast."""

    key: Float[Array, "J B K S H"]
    value: Float[Array, "J B K S U"]
    bias: Float[Array, "#I #J #B #K #G #T #S"] | None
    mask: Bool[Array, "#I #J #B #K #G #T #S"] | None
    ids: Int[Array, "J B S"] | None


class Running(NamedTuple):
    """State of the online softmax after some of the keys."""

    largest: Float[Array, "I B K G T"]
    """The largest logit."""
    total: Float[Array, "I B K G T"]
    """The sum of exp(logit - largest)."""
    mixed: Float[Array, "I B K G T U"]
    """The sum of exp(logit - largest) * value."""


class Saved(NamedTuple):
    """Statistics of each query for the backward pass: its weights are exp(logit - largest) / total."""

    largest: Float[Array, "I B K G T"]
    total: Float[Array, "I B K G T"]
    out: Float[Array, "I B K G T U"]


class Residuals(NamedTuple):
    """Residuals that the forward pass saves for the backward pass."""

    queries: Queries
    keys: Keys
    rng: Array | None
    saved: Saved
    extras: Extras = NO_EXTRAS


class KeyGradients(NamedTuple):
    """Running sums of the gradients of the differentiable fields of `Keys` and `Extras`."""

    key: Float[Array, "J B K S H"]
    value: Float[Array, "J B K S U"]
    bias: Float[Array, "#I #J #B #K #G #T #S"] | None
    score_arrays: tuple[Array, ...] = ()


def split_inputs(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Float[Array, "#B #N #T #S"] | None,
    mask: Bool[Array, "#B #N #T #S"] | None,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None,
    rng: Array | None,
    chunk_size: int,
) -> tuple[Queries, Keys]:
    """Cuts the arrays into equal chunks of at most `chunk_size` tokens; the last ones are padded.

    Query head n belongs to key head n // G, with G = N / K, so the axis N becomes the axes K and G.
    """
    check_integers(1, chunk_size=chunk_size)
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    query, key, value, bias = vary_alike((query, key, value, bias), (mask, segment_ids, rng))
    query_ids, key_ids = (None, None) if segment_ids is None else segment_ids
    rows, columns = equal_chunks(t, chunk_size), equal_chunks(s, chunk_size)

    def split_pairs(x: Array | None) -> Array | None:
        """Cuts a bias or a mask, [B, N, T, S], along both of its last axes; axes of size 1 stay as they are."""
        if x is None:
            return None
        heads = (1, 1) if x.shape[1] == 1 else (k, n // k)
        x = x.reshape(x.shape[0], *heads, *x.shape[2:])  # [B, K, G, all queries, all keys]
        x = split_axis(x, 4, min(columns, x.shape[4]))  # [J, B, K, G, all queries, S]
        return split_axis(x, 4, min(rows, x.shape[4]))  # [I, J, B, K, G, T, S]

    queries = Queries(
        split_axis(query.reshape(b, t, k, n // k, h), 1, rows).transpose(0, 1, 3, 4, 2, 5),  # [I, B, K, G, T, H]
        None if query_ids is None else split_axis(query_ids, 1, rows),
    )
    keys = Keys(
        split_axis(key, 1, columns).transpose(0, 1, 3, 2, 4),
        split_axis(value, 1, columns).transpose(0, 1, 3, 2, 4),
        split_pairs(bias),
        split_pairs(mask),
        None if key_ids is None else split_axis(key_ids, 1, columns),
    )
    return queries, keys


def join_queries(out: Float[Array, "I B K G T U"], num_queries: int) -> Float[Array, "B L N U"]:
    """Concatenates the I chunks of an output, each of T queries, and removes the padding: L = `num_queries`."""
    i, b, k, g, t, u = out.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, i * t, k * g, u)[:, :num_queries]


def before_any_key(queries: Queries, keys: Keys, sinks: Float[Array, "K G"] | None = None) -> Running:
    """Returns the state of the online softmax before the first key: empty, or with the sinks only."""
    dtype = _statistics_dtype(queries)
    zeros = jnp.zeros_like(queries.query[..., 0], dtype)  # [I, B, K, G, T]
    largest, total = zeros + hidden_logit(dtype), zeros
    if sinks is not None:
        sinks = sinks.astype(dtype)[None, None, :, :, None]
        largest = jnp.maximum(largest, sinks)
        total = jnp.exp(sinks - largest)  # a sink counts in the denominator, but has no value
    return Running(largest, total, jnp.broadcast_to(zeros[..., None], (*zeros.shape, keys.value.shape[-1])))


def attend(
    options: Options,
    queries: Queries,
    keys: Keys,
    running: Running,
    shift: int | Array,
    rng: Array | None,
    extras: Extras = NO_EXTRAS,
) -> Running:
    """Updates the online softmax of all queries with all of `keys`, chunk by chunk.

    Args:
      options: static options.
      queries: I chunks of T queries.
      keys: J chunks of S keys.
      running: state of the softmax after the keys that were processed before.
      shift: query t is at the position of key t + shift, for causality and for the window.
      rng: PRNG key of dropout; None disables dropout.
      extras: further arrays.

    Returns:
      The new state.
    """
    # In a scan over layers, JAX hoists computations that are the same for all layers out of the loop and stores their
    # results: here the masks of all pairs of chunks. A barrier that includes the queries makes them depend on the
    # layer, so that they are not hoisted.
    queries, keys, extras = jax.lax.optimization_barrier((queries, keys, extras))

    def attend_query_chunk(chunk: Any) -> Any:
        """Updates the state of chunk i of the queries with the chunks of keys that it may see."""
        i, queries_i, running_i = chunk

        def visit_key_chunk(j: Array, running: Any) -> Any:
            """Updates the state of these queries with chunk j of the keys."""
            logits, visible, value, _ = _scores(options, queries_i, keys, extras, i, j, shift)
            largest = jnp.maximum(running.largest, jnp.where(visible, logits, hidden_logit(logits.dtype)).max(axis=-1))
            # Hidden logits may be huge: the derivative of their exponential would be infinite, times 0.
            weights = jnp.exp(jnp.where(visible, logits - largest[..., None], -jnp.inf))
            rescaling = jnp.exp(running.largest - largest)  # of the sums so far, which used the previous maximum
            dropped = dropout(weights, options.dropout_rate, _chunk_rng(rng, keys, i, j)).astype(value.dtype)
            mixed = jnp.einsum("BKGTS,BKSU->BKGTU", dropped, value, preferred_element_type=logits.dtype)
            return Running(
                largest, running.total * rescaling + weights.sum(axis=-1), running.mixed * rescaling[..., None] + mixed
            )

        return jax.lax.fori_loop(*_visible_chunks(options, queries, keys, i, shift), visit_key_chunk, running_i)

    return jax.lax.map(attend_query_chunk, (jnp.arange(queries.query.shape[0]), queries, running))


def finish(running: Running, dtype: np.dtype) -> Saved:
    """Returns output and softmax statistics once all keys are processed; queries without keys get zeros.

    `dtype` is that of the output.
    """
    total = jnp.where(running.total == 0, jnp.ones_like(running.total), running.total)
    return Saved(running.largest, total, (running.mixed / total[..., None]).astype(dtype))


def log_sum_exp(saved: Saved, running: Running) -> Float[Array, "I B K G T"]:
    """Returns the logarithm of the softmax denominator, minus infinity for queries without keys."""
    lse = saved.largest + jnp.log(saved.total)
    return jnp.where(running.total == 0, jnp.asarray(-jnp.inf, lse.dtype), lse)


def no_gradients(queries: Queries, keys: Keys, score_arrays: tuple[Array, ...] = ()) -> tuple[Array, KeyGradients]:
    """Returns zero gradients of queries and keys, the start of the sums of `add_gradients`."""
    dtype = _statistics_dtype(queries)
    differentiable = KeyGradients(keys.key, keys.value, keys.bias, score_arrays)
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), (queries.query, differentiable))


def add_gradients(
    options: Options,
    queries: Queries,
    keys: Keys,
    saved: Saved,
    cotangent: Float[Array, "I B K G T U"],
    gradients: tuple[Array, KeyGradients],
    shift: int | Array,
    rng: Array | None,
    extras: Extras = NO_EXTRAS,
    lse_cotangent: Float[Array, "I B K G T"] | None = None,
) -> tuple[Array, KeyGradients]:
    """Adds the gradients of the attention between all queries and all of `keys` to `gradients`.

    Args:
      options: static options.
      queries: queries.
      keys: keys.
      saved: output and statistics of the softmax, from `finish`.
      cotangent: gradient of the output.
      gradients: running sums for the queries and for the keys.
      shift: position of the first query, relative to the first key.
      rng: PRNG key of dropout.
      extras: further arrays.
      lse_cotangent: gradient of `log_sum_exp`; None means 0.

    Returns:
      The new running sums.
    """
    dtype = _statistics_dtype(queries)
    correction = _softmax_correction(saved, cotangent, lse_cotangent)

    def backpropagate_query_chunk(key_gradients: Any, chunk: Any) -> Any:
        """Adds the gradients that pass through chunk i of the queries."""
        i, queries_i, saved_i, cotangent_i, correction_i, query_gradient = chunk

        def add_key_chunk(j: Array, sums: Any) -> Any:
            """Adds the gradients between these queries and chunk j of the keys to `sums`."""
            query_gradient, key_gradients = sums
            logits, visible, value, logits_vjp = _scores(options, queries_i, keys, extras, i, j, shift)
            shifted = jnp.where(visible, logits - saved_i.largest[..., None], -jnp.inf)
            weights = jnp.exp(shifted) / saved_i.total[..., None]
            chunk_rng = _chunk_rng(rng, keys, i, j)
            dropped = dropout(weights, options.dropout_rate, chunk_rng).astype(value.dtype)
            out_gradient = cotangent_i.astype(value.dtype)
            value_gradient = _summed_over_queries(dropped, out_gradient, dtype)
            weight_gradient = jnp.einsum("BKGTU,BKSU->BKGTS", out_gradient, value, preferred_element_type=dtype)
            weight_gradient = dropout(weight_gradient, options.dropout_rate, chunk_rng)  # drops the same weights
            logit_gradient = weights * (weight_gradient - correction_i[..., None])
            product_gradient, score_gradients = logits_vjp(logit_gradient)
            scaled = (product_gradient * options.scale).astype(queries.query.dtype)
            key = _chunk(keys.key, j)
            query_part = jnp.einsum("BKGTS,BKSH->BKGTH", scaled, key, preferred_element_type=dtype)
            key_part = _summed_over_queries(scaled, queries_i.query, dtype)
            key_gradients = KeyGradients(
                _add_to_chunk(key_gradients.key, key_part, j),
                _add_to_chunk(key_gradients.value, value_gradient, j),
                None if key_gradients.bias is None else _add_to_chunk(key_gradients.bias, logit_gradient, i, j),
                tuple(x + y.astype(x.dtype) for x, y in zip(key_gradients.score_arrays, score_gradients, strict=True)),
            )
            return query_gradient + query_part, key_gradients

        bounds = _visible_chunks(options, queries, keys, i, shift)
        query_gradient, key_gradients = jax.lax.fori_loop(*bounds, add_key_chunk, (query_gradient, key_gradients))
        return key_gradients, query_gradient

    query_gradients, key_gradients = gradients
    chunks = (jnp.arange(queries.query.shape[0]), queries, saved, cotangent, correction, query_gradients)
    key_gradients, query_gradients = jax.lax.scan(backpropagate_query_chunk, key_gradients, chunks)
    return query_gradients, key_gradients


def as_cotangents(gradients: tuple[Array, KeyGradients], queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """Casts the gradients to the dtypes of the inputs and puts them into the structure of the inputs."""
    query, (key, value, bias, _) = gradients
    bias = None if bias is None or keys.bias is None else bias.astype(keys.bias.dtype)
    return Queries(query.astype(queries.query.dtype), None), Keys(
        key.astype(keys.key.dtype), value.astype(keys.value.dtype), bias, None, None
    )


def sink_gradients(
    extras: Extras, saved: Saved, cotangent: Float[Array, "I B K G T U"], lse_cotangent: Array | None = None
) -> Float[Array, "K G"] | None:
    """Returns the gradient of the sinks. A sink has no value; its weight only reduces the weights of the keys."""
    if extras.sinks is None:
        return None
    sinks = extras.sinks.astype(saved.largest.dtype)[None, None, :, :, None]
    weights = jnp.exp(sinks - saved.largest) / saved.total
    gradient = -(weights * _softmax_correction(saved, cotangent, lse_cotangent)).sum(axis=(0, 1, 4))
    return gradient.astype(extras.sinks.dtype)


def _summed_over_queries(
    pairs: Float[Array, "B K G T S"], rows: Float[Array, "B K G T U"], dtype: np.dtype
) -> Float[Array, "B K S U"]:
    """Returns the sum over queries of their pair with each key times their row, in `dtype`."""
    if pairs.dtype != dtype:  # XLA's CPU backend cannot run the other form in narrow types
        return jnp.einsum("BKGTS,BKGTU->BKSU", pairs, rows, preferred_element_type=dtype)
    # With the rows on the left, that backend need not transpose all pairs, which takes as long as both products.
    return jnp.einsum("BKGTU,BKGTS->BKUS", rows, pairs).mT


def _softmax_correction(saved: Saved, cotangent: Array, lse_cotangent: Array | None) -> Float[Array, "I B K G T"]:
    """Returns the D of each query in the gradient of its logits, weight * (gradient of the weight - D).

    D is the sum over keys of weight * gradient of the weight, which equals out . cotangent. The gradient of the
    log-denominator with respect to a logit is the weight, so `lse_cotangent` is subtracted from D.
    """
    dtype = saved.total.dtype
    correction = (saved.out.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)
    return correction if lse_cotangent is None else correction - lse_cotangent


def _scores(
    options: Options, queries: Queries, keys: Keys, extras: Extras, i: Array, j: Array, shift: int | Array
) -> tuple[Float[Array, "B K G T S"], Bool[Array, "#B #K #G #T S"], Float[Array, "B K S U"], Callable[..., Any]]:
    """Computes the logits between chunk i of the queries, passed as `queries`, and chunk j of all `keys`.

    Query t is at the position of key t + `shift`, for causality and for the window.

    Returns:
      Logits; which pairs are visible; the values of the chunk; and a function that maps the gradient of the logits to
      the gradients of the scaled products and of `extras.score_arrays`.
    """
    key, value = _chunk(keys.key, j), _chunk(keys.value, j)
    dtype = _statistics_dtype(queries)
    products = jnp.einsum("BKGTH,BKSH->BKGTS", queries.query, key, preferred_element_type=dtype) * options.scale
    b, k, g, t, s = products.shape
    n = k * g

    def indices() -> list[Array]:
        """Returns the indices of rows, heads, queries and keys of this pair of chunks."""
        # As in `attend`: the barrier keeps JAX from precomputing the bias of all pairs of chunks outside of a loop.
        rows, columns, _ = jax.lax.optimization_barrier((i.astype(jnp.int32), j.astype(jnp.int32), queries.query))
        last = options.num_queries - 1, options.num_keys - 1  # padding gets the index of the last token
        return _indices(queries.query, (b, n, t, s), rows * t, columns * s, last)

    def shape_logits(products: Array, score_arrays: tuple[Array, ...]) -> Array:
        """Applies the soft cap and `score_mod` to the scaled products."""
        logits = products
        if options.logits_soft_cap is not None:
            logits = soft_capped(logits, options.logits_soft_cap)
        if options.score_mod is not None:
            score_mod = functools.partial(options.score_mod, (*score_arrays, *extras.score_indices))
            logits = apply_score_mod(score_mod, logits.reshape(b, n, t, s), *indices()).reshape(b, k, g, t, s)
        return logits

    logits, logits_vjp = jax.vjp(shape_logits, products, extras.score_arrays)
    if keys.bias is not None:
        logits = logits + at_least_visible(_chunk(keys.bias, i, j).astype(dtype))

    key_position = (j * s + jnp.arange(s))[None, :]
    query_position = (i * t + jnp.arange(t))[:, None] + shift
    visible = key_position < options.num_keys
    if options.is_causal:
        visible = visible & (key_position <= query_position)
    if options.window is not None:
        left, right = options.window
        visible = visible & (key_position >= query_position - left) & (key_position <= query_position + right)
    visible = visible[None, None, None]
    if keys.mask is not None:
        visible = visible & _chunk(keys.mask, i, j)
    if keys.ids is not None and queries.ids is not None:
        visible = visible & segment_mask(queries.ids, _chunk(keys.ids, j))[:, None]
    if options.mask_mod is not None:
        mask_mod = functools.partial(options.mask_mod, extras.mask_arrays)
        pairs = apply_mask_mod(mask_mod, (b, n, t, s), *indices())
        heads = (1, 1) if pairs.shape[1] == 1 else (k, g)
        visible = visible & pairs.reshape(pairs.shape[0], *heads, *pairs.shape[2:])
    return logits, visible, value, logits_vjp


def _indices(
    query: Array, sizes: tuple[int, int, int, int], row: int | Array, column: int | Array, last: tuple[int, int]
) -> list[Array]:
    """Returns the indices of rows, heads, queries and keys of a block, as a `ScoreMod` takes them.

    Args:
      query: queries of the block, whose mesh axes the indices vary over within shard_map.
      sizes: (B, N, T, S) of the block.
      row: index of the first query.
      column: index of the first key.
      last: largest index of a query and of a key; padding after them gets the same index.

    Returns:
      int32 arrays of shapes [B, 1, 1, 1], [1, N, 1, 1], [1, 1, T, 1] and [1, 1, 1, S].
    """
    varying_false = jnp.zeros_like(query.ravel()[0], bool)  # selecting by it gives the indices the type of the queries
    starts, ends = (0, 0, row, column), (*sizes[:2], *last)
    indices: list[Array] = []
    for axis, (start, size, end) in enumerate(zip(starts, sizes, ends, strict=True)):
        index = jnp.minimum(start + jnp.arange(size, dtype=jnp.int32), jnp.int32(end))
        index = jnp.where(varying_false, index, index)
        indices.append(jnp.expand_dims(index, [other for other in range(4) if other != axis]))
    return indices


def _block_like(queries: Queries, keys: Keys) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the arguments of a `ScoreMod` for one pair of chunks: logits and four indices."""

    def block(query: Array) -> list[Array]:
        _, b, k, g, t, _ = query.shape  # [I, B, K, G, T, H]
        sizes = b, k * g, t, keys.key.shape[-2]
        logits = jnp.broadcast_to(jnp.zeros_like(query.ravel()[0], _statistics_dtype(queries)), sizes)
        return [logits, *_indices(query, sizes, 0, 0, sizes[2:])]

    return jax.eval_shape(block, queries.query)


def _visible_chunks(
    options: Options, queries: Queries, keys: Keys, i: Array, shift: int | Array
) -> tuple[int | Array, int | Array]:
    """Returns (start, end) of the range of key chunks that causality and the window leave to chunk i of the queries."""
    (num_chunks, *_, s, _), t = keys.key.shape, queries.query.shape[-2]
    # How many keys after its own position a query sees; None means all.
    right = 0 if options.is_causal else options.window[1] if options.window else None
    if right is None:
        end = num_chunks
    else:
        last_key = (i + 1) * t - 1 + shift + right  # the last key that the chunk's last query sees
        end = jnp.clip(last_key // s + 1, 0, num_chunks)
    if options.window is None:
        return 0, end
    first_key = i * t + shift - options.window[0]  # the first key that the chunk's first query sees
    return jnp.clip(first_key // s, 0, end), end


def _chunk_rng(rng: Array | None, keys: Keys, i: Array, j: Array) -> Array | None:
    """Returns the PRNG key of the pair of chunks i and j: the backward pass needs the same dropout."""
    return None if rng is None else jax.random.fold_in(rng, i * keys.key.shape[0] + j)


def _statistics_dtype(queries: Queries) -> np.dtype:
    """Returns the dtype of logits and sums: float32 at least."""
    return statistics_dtype(queries.query)


def _chunk(x: Array, *index: Array) -> Array:
    """Returns x[index]; along a leading axis of size 1, which is broadcast, any index reads the only entry."""
    rest = x.shape[len(index) :]
    # A dynamic slice clamps its start, so that index 5 of an axis of size 1 becomes 0.
    start = (*index, *(jnp.zeros_like(index[0]) for _ in rest))
    return jax.lax.dynamic_slice(x, start, (*(1 for _ in index), *rest)).reshape(rest)


def _add_to_chunk(x: Array, update: Array, *index: Array) -> Array:
    """Adds `update` to x[index], summed over the axes along which the chunk was broadcast."""
    chunk = _chunk(x, *index)
    broadcast_axes = tuple(axis for axis, size in enumerate(chunk.shape) if size < update.shape[axis])
    chunk = chunk + update.sum(axis=broadcast_axes, keepdims=True)
    chunk = chunk.reshape(*(1 for _ in index), *chunk.shape)
    start = (*index, *(jnp.zeros_like(index[0]) for _ in x.shape[len(index) :]))
    return jax.lax.dynamic_update_slice(x, chunk, start)


def equal_chunks(length: int, at_most: int) -> int:
    """Returns the smallest chunk size that needs no more chunks than `at_most`: 513 in chunks of 257, not of 512."""
    num_chunks = -(-length // at_most)  # -(-x // y) rounds the quotient up
    return -(-length // max(1, num_chunks))


def split_axis(x: Array, axis: int, size: int) -> Array:
    """Pads an axis to a multiple of `size` and cuts it into chunks, along a new first axis."""
    num_chunks = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, num_chunks * size - x.shape[axis])
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :]), axis, 0)


def vary_alike(arrays: tuple[Array | None, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives arrays one device-varying type: within shard_map all vary over each mesh axis that any input varies over.

    The type of an array in shard_map says over which mesh axes its values may differ between devices. The state of a
    loop must keep its type from step to step.

    Args:
      arrays: the arrays to return; None stays None.
      others: further inputs of the loop, any pytree of arrays and PRNG keys, whose mesh axes count too.

    Returns:
      The arrays, with the same values. Outside of shard_map nothing changes.
    """
    # Always False, but varies over the axes of every input; selecting by it returns x marked as varying over them all.
    varying_false = jnp.zeros((), bool)
    for x in jax.tree.leaves((arrays, others)):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        varying_false = varying_false | jnp.zeros_like(x.ravel()[0], bool)
    return jax.tree.map(lambda x: jnp.where(varying_false, x, x), arrays)


def _hoisted(
    function: Callable[..., Array], block: list[jax.ShapeDtypeStruct]
) -> tuple[Callable[..., Array], tuple[Array, ...], tuple[Array, ...]]:
    """Turns the arrays that a `ScoreMod` or `MaskMod` closes over into arguments, so that they can get gradients.

    Args:
      function: the modifier.
      block: shapes and dtypes of its arguments.

    Returns:
      `hoisted(arrays, *block)`, where `arrays` are the floating-point arrays followed by the others; the floating-point
      arrays; and the other arrays.
    """
    closed = jax.make_jaxpr(function)(*block)  # tracing turns the arrays of a closure into constants of the jaxpr
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in consts]
    floats, others = (
        tuple(x for x, floating in zip(consts, is_float, strict=True) if floating is kind) for kind in (True, False)
    )

    def hoisted(arrays: tuple[Array, ...], *args: Array) -> Array:
        """Evaluates the modifier with `arrays` as its constants, put back into the order of the jaxpr."""
        float_arrays, other_arrays = iter(arrays[: sum(is_float)]), iter(arrays[sum(is_float) :])
        ordered = [next(float_arrays if is_floating else other_arrays) for is_floating in is_float]
        (result,) = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, ordered))(*args)
        return result

    return hoisted, floats, others


@weights_on_request
@shard_like_query
@zeros_where_empty
def chunked_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    chunk_size: int = 512,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    local_window_size: Window | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"] | Float[Array, "B N T"]]:
    r"""Computes softmax(scale * Q K^T + bias) V exactly, without storing the T x S weights.

    Each chunk of queries visits the keys chunk by chunk and rescales its running sums whenever a larger logit occurs:
    "Self-attention Does Not Need O(n^2) Memory" (Rabe and Staats, 2021, section 2 of https://arxiv.org/abs/2112.05682).
    The backward pass keeps the output and two numbers per query and recomputes the weights chunk by chunk
    (FlashAttention, Dao et al., 2022, algorithm 4 of https://arxiv.org/abs/2205.14135). Chunks that causality or a
    window hides entirely are skipped.

    The gradient is a `jax.custom_vjp`: `jax.grad` works, and so does `jax.jvp` of a gradient, but `jax.jvp` of this
    function does not; use `dot_product_attention` for that.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N. Shared keys are not repeated in memory.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. The bias and its gradient are stored in the shape
        that is passed: a full [B, N, T, S] costs the memory that this function saves elsewhere.
      mask: True where a query may attend, broadcastable to [B, N, T, S]; preferably a padding mask, [B, 1, 1, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      chunk_size: upper limit for the queries and for the keys in a chunk. Memory grows with its square, [B, N,
        chunk_size, chunk_size]; any length works.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight. Another `chunk_size` drops other weights.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, a dense array: O(T S) memory.
      logits_soft_cap: as in `dot_product_attention`, like all arguments below; a Python number.
      sinks: a logit for each head that takes weight from the keys, [N].
      local_window_size: how many keys a query sees to the left and to the right.
      query_lengths: number of queries of each row, [B].
      key_lengths: number of keys of each row, [B].
      score_mod: changes logits, called for each pair of chunks. Arrays that it closes over get gradients.
      mask_mod: hides keys, called for each pair of chunks.
      return_lse: also return the logarithm of the softmax denominator.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`, zeros for a query without keys. With `return_weights` a
      pair of output and weights, [B, N, T, S]; with `return_lse` a pair of output and logarithms, [B, N, T]. All sums
      are float32 (float64 for float64 inputs).

    Raises:
      ValueError: if shapes do not match, a mask is not boolean or of rank 4, or `chunk_size` is below 1.

    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> jax.jit(functools.partial(chunked_attention, is_causal=True, chunk_size=2))(x, x, x).shape
    (1, 3, 2, 4)
    """
    check_shapes(query, key, value, bias, mask)
    check_outputs(return_weights, return_lse)
    check_sinks(sinks, query.shape[2])
    check_soft_cap(logits_soft_cap)
    if isinstance(logits_soft_cap, jax.Array):
        raise ValueError("logits_soft_cap must be a Python number in chunked attention, got an array")
    (b, t, n, h), (s, k) = query.shape, key.shape[1:3]
    window, is_causal = check_window(local_window_size, is_causal)
    positions = Positions(is_causal, window, mask_mod)
    is_causal, window, mask_mod = count_from_lengths(positions, query, key, query_lengths, key_lengths)
    mask = add_key_lengths(mask, key_lengths, key)
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    if sinks is not None:
        query, key, value, bias, sinks = vary_alike((query, key, value, bias, sinks), (mask, ids, dropout_rng))
    if isinstance(scale, jax.Array):  # not a static option
        query, scale = (query * scale).astype(query.dtype), 1.0
    queries, keys = split_inputs(query, key, value, bias, mask, ids, dropout_rng, chunk_size)
    hoisted_score_mod = hoisted_mask_mod = None
    extras = Extras(None if sinks is None else sinks.reshape(k, n // k))
    if score_mod is not None:
        hoisted_score_mod, floats, others = _hoisted(score_mod, _block_like(queries, keys))
        extras = extras._replace(score_arrays=floats, score_indices=others)
    if mask_mod is not None:
        hoisted_mask_mod, floats, others = _hoisted(mask_mod, _block_like(queries, keys)[1:])
        extras = extras._replace(mask_arrays=(*floats, *others))
    options = Options(
        scale=h**-0.5 if scale is None else scale,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        num_queries=t,
        num_keys=s,
        window=window,
        logits_soft_cap=logits_soft_cap,
        score_mod=hoisted_score_mod,
        mask_mod=hoisted_mask_mod,
    )
    out, lse = cast(Any, _attend)(options, queries, keys, extras, dropout_rng)
    out = join_queries(out, t)
    if return_lse:
        return zero_past_lengths(query_lengths, query, (out, join_queries(lse[..., None], t)[..., 0].swapaxes(1, 2)))
    if not return_weights:
        return zero_past_lengths(query_lengths, query, out)
    masks: dict[str, Any] = {"is_causal": is_causal, "window": window, "segment_ids": segment_ids}
    mods: dict[str, Any] = {"logits_soft_cap": logits_soft_cap, "score_mod": score_mod, "mask_mod": mask_mod}
    weights = dot_product_weights(query, key, bias, mask, scale=scale, sinks=sinks, **masks, **mods)
    return zero_past_lengths(query_lengths, query, (out, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: Options, queries: Queries, keys: Keys, extras: Extras, rng: Array | None
) -> tuple[Float[Array, "I B K G T U"], Float[Array, "I B K G T"]]:
    """Computes output and log-denominator of all chunks of queries, with the custom gradient of `_backward`."""
    return _forward(options, queries, keys, extras, rng)[0]


def _forward(
    options: Options, queries: Queries, keys: Keys, extras: Extras, rng: Array | None
) -> tuple[tuple[Float[Array, "I B K G T U"], Float[Array, "I B K G T"]], Residuals]:
    """Computes the results of `_attend` and the residuals for the backward pass."""
    shift = options.num_keys - options.num_queries  # aligns the last query with the last key
    running = attend(options, queries, keys, before_any_key(queries, keys, extras.sinks), shift, rng, extras)
    saved = finish(running, queries.query.dtype)
    return (saved.out, log_sum_exp(saved, running)), Residuals(queries, keys, rng, saved, extras)


def _backward(
    options: Options, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[Queries, Keys, Extras, None]:
    """Computes the gradients of `_attend` from those of its results, by algorithm 4 of FlashAttention."""
    queries, keys, rng, saved, extras = residuals
    cotangent, lse_cotangent = cotangents
    shift = options.num_keys - options.num_queries
    gradients = no_gradients(queries, keys, extras.score_arrays)
    gradients = add_gradients(
        options, queries, keys, saved, cotangent, gradients, shift, rng, extras, lse_cotangent=lse_cotangent
    )
    score_arrays = gradients[1].score_arrays
    score_arrays = tuple(x.astype(like.dtype) for x, like in zip(score_arrays, extras.score_arrays, strict=True))
    sinks = sink_gradients(extras, saved, cotangent, lse_cotangent)
    no_gradients_of: list[Any] = [tuple(None for _ in arrays) for arrays in (extras.score_indices, extras.mask_arrays)]
    return *as_cotangents(gradients, queries, keys), Extras(sinks, score_arrays, *no_gradients_of), None


_attend.defvjp(_forward, _backward)
