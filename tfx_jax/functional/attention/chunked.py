"""Exact attention in linear memory: an online softmax over chunks of keys.

The running maximum and sum are those of Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867). The gradient
recomputes the weights of a chunk, as FlashAttention does (Dao et al., 2022, algorithm 4 of
https://arxiv.org/abs/2205.14135). Ring attention uses the same functions. Queries have I chunks of T and keys J chunks
of S; chunk axes come first, so that reading a chunk reads one slice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dense import dot_product_weights
from tfx_jax.functional.attention.masks import Bias, Mask, SegmentIds, check_shapes, pair_of_segment_ids, segment_mask
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request, zeros_where_empty
from tfx_jax.functional.layers import dropout


class Options(NamedTuple):
    """What is known when the program is traced."""

    scale: float
    is_causal: bool
    dropout_rate: float
    num_queries: int
    num_keys: int


class Queries(NamedTuple):
    """Queries and what belongs to them."""

    query: Float[Array, "I B K G T H"]
    ids: Int[Array, "I B T"] | None


class Keys(NamedTuple):
    """Keys, values and what belongs to them; an axis of size 1 in a bias or a mask is broadcast."""

    key: Float[Array, "J B K S H"]
    value: Float[Array, "J B K S U"]
    bias: Float[Array, "#I #J #B #K #G #T #S"] | None
    mask: Bool[Array, "#I #J #B #K #G #T #S"] | None
    ids: Int[Array, "J B S"] | None


class Running(NamedTuple):
    """What is known of the softmax after some of the keys."""

    largest: Float[Array, "I B K G T"]
    """The largest logit."""
    total: Float[Array, "I B K G T"]
    """The sum of exp(logit - largest)."""
    mixed: Float[Array, "I B K G T U"]
    """The sum of exp(logit - largest) * value."""


class Saved(NamedTuple):
    """What the gradient needs to know of each query: the softmax is exp(logit - largest) / total."""

    largest: Float[Array, "I B K G T"]
    total: Float[Array, "I B K G T"]
    out: Float[Array, "I B K G T U"]


class Residuals(NamedTuple):
    """What a forward pass leaves to its gradient."""

    queries: Queries
    keys: Keys
    rng: Array | None
    saved: Saved


class KeyGradients(NamedTuple):
    """Gradients of the `Keys` that have one, summed so far."""

    key: Float[Array, "J B K S H"]
    value: Float[Array, "J B K S U"]
    bias: Float[Array, "#I #J #B #K #G #T #S"] | None


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
    """Cuts the arrays into equal chunks of at most `chunk_size`; the last ones are padded."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    b, t, n, h = query.shape
    s, k = key.shape[1:3]
    query, key, value, bias = _varying_alike((query, key, value, bias), (mask, segment_ids, rng))
    query_ids, key_ids = (None, None) if segment_ids is None else segment_ids
    rows, columns = _equal_chunks(t, chunk_size), _equal_chunks(s, chunk_size)

    def pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x.reshape(x.shape[0], *((1, 1) if x.shape[1] == 1 else (k, n // k)), *x.shape[2:])
        return _split(_split(x, 4, min(columns, x.shape[4])), 4, min(rows, x.shape[3]))

    queries = Queries(
        _split(query.reshape(b, t, k, n // k, h), 1, rows).transpose(0, 1, 3, 4, 2, 5),
        None if query_ids is None else _split(query_ids, 1, rows),
    )
    keys = Keys(
        _split(key, 1, columns).transpose(0, 1, 3, 2, 4),
        _split(value, 1, columns).transpose(0, 1, 3, 2, 4),
        pairs(bias),
        pairs(mask),
        None if key_ids is None else _split(key_ids, 1, columns),
    )
    return queries, keys


def join_queries(out: Float[Array, "I B K G T U"], num_queries: int) -> Float[Array, "B L N U"]:
    """Puts the chunks of an output together again, without the padding."""
    i, b, k, g, t, u = out.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, i * t, k * g, u)[:, :num_queries]


def before_any_key(queries: Queries, keys: Keys) -> Running:
    """The state in which nothing was seen yet."""
    dtype = _statistics_dtype(queries)
    nothing = jnp.zeros_like(queries.query[..., 0], dtype)
    return Running(
        nothing + _hidden(dtype), nothing, jnp.broadcast_to(nothing[..., None], (*nothing.shape, keys.value.shape[-1]))
    )


def attend(
    options: Options, queries: Queries, keys: Keys, running: Running, shift: int | Array, rng: Array | None
) -> Running:
    """Lets all queries see all of `keys` as well; if causal, query t sees those up to t + `shift`."""
    # In a scan over layers, JAX computes before it what is the same in each, and stacks it: here who sees whom, of all
    # pairs of chunks. It leaves alone what comes out of a barrier with the queries, which are not the same.
    queries, keys = jax.lax.optimization_barrier((queries, keys))

    def one_chunk_of_queries(chunk: Any) -> Any:
        i, queries_i, running_i = chunk

        def see(j: Array, running: Any) -> Any:
            logits, seen, value = _scores(options, queries_i, keys, i, j, shift)
            largest = jnp.maximum(running.largest, jnp.where(seen, logits, _hidden(logits.dtype)).max(axis=-1))
            weights = jnp.where(seen, jnp.exp(logits - largest[..., None]), jnp.zeros((), logits.dtype))
            shrink = jnp.exp(running.largest - largest)
            dropped = dropout(weights, options.dropout_rate, _chunk_rng(rng, keys, i, j)).astype(value.dtype)
            mixed = jnp.einsum("BKGTS,BKSU->BKGTU", dropped, value, preferred_element_type=logits.dtype)
            return Running(
                largest, running.total * shrink + weights.sum(axis=-1), running.mixed * shrink[..., None] + mixed
            )

        return jax.lax.fori_loop(0, _num_visible(options, queries, keys, i, shift), see, running_i)

    return jax.lax.map(one_chunk_of_queries, (jnp.arange(queries.query.shape[0]), queries, running))


def finish(running: Running, dtype: np.dtype) -> Saved:
    """The output once all keys were seen, zero where there were none, and the statistics of the softmax."""
    total = jnp.where(running.total == 0, jnp.ones_like(running.total), running.total)
    return Saved(running.largest, total, (running.mixed / total[..., None]).astype(dtype))


def no_gradients(queries: Queries, keys: Keys) -> tuple[Array, KeyGradients]:
    """Where the sums of `add_gradients` begin: for the queries and for the keys."""
    dtype = _statistics_dtype(queries)
    differentiable = KeyGradients(keys.key, keys.value, keys.bias)
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
) -> tuple[Array, KeyGradients]:
    """Adds to `gradients` what flows between all queries and all of `keys`; the arguments are those of `attend`."""
    dtype = _statistics_dtype(queries)
    # The sum of weight * gradient of the weight over all keys, which the softmax's Jacobian needs: rows of out know it.
    along_out = (saved.out.astype(dtype) * cotangent.astype(dtype)).sum(axis=-1)

    def one_chunk_of_queries(key_gradients: Any, chunk: Any) -> Any:
        i, queries_i, saved_i, cotangent_i, along_out_i, query_gradient = chunk

        def flow(j: Array, sums: Any) -> Any:
            query_gradient, key_gradients = sums
            logits, seen, value = _scores(options, queries_i, keys, i, j, shift)
            weights = jnp.exp(logits - saved_i.largest[..., None]) / saved_i.total[..., None]
            weights = jnp.where(seen, weights, jnp.zeros((), dtype))
            chunk_rng = _chunk_rng(rng, keys, i, j)
            dropped = dropout(weights, options.dropout_rate, chunk_rng).astype(value.dtype)
            towards_out = cotangent_i.astype(value.dtype)
            for_value = jnp.einsum("BKGTS,BKGTU->BKSU", dropped, towards_out, preferred_element_type=dtype)
            for_weights = jnp.einsum("BKGTU,BKSU->BKGTS", towards_out, value, preferred_element_type=dtype)
            for_weights = dropout(for_weights, options.dropout_rate, chunk_rng)
            for_logits = weights * (for_weights - along_out_i[..., None])
            scaled = (for_logits * options.scale).astype(queries.query.dtype)
            key = _chunk(keys.key, j)
            for_query = jnp.einsum("BKGTS,BKSH->BKGTH", scaled, key, preferred_element_type=dtype)
            for_key = jnp.einsum("BKGTS,BKGTH->BKSH", scaled, queries_i.query, preferred_element_type=dtype)
            key_gradients = KeyGradients(
                _add_to_chunk(key_gradients.key, for_key, j),
                _add_to_chunk(key_gradients.value, for_value, j),
                None if key_gradients.bias is None else _add_to_chunk(key_gradients.bias, for_logits, i, j),
            )
            return query_gradient + for_query, key_gradients

        bound = _num_visible(options, queries, keys, i, shift)
        query_gradient, key_gradients = jax.lax.fori_loop(0, bound, flow, (query_gradient, key_gradients))
        return key_gradients, query_gradient

    query_gradients, key_gradients = gradients
    chunks = (jnp.arange(queries.query.shape[0]), queries, saved, cotangent, along_out, query_gradients)
    key_gradients, query_gradients = jax.lax.scan(one_chunk_of_queries, key_gradients, chunks)
    return query_gradients, key_gradients


def as_cotangents(gradients: tuple[Array, KeyGradients], queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """The gradients in the types and places of the inputs."""
    query, (key, value, bias) = gradients
    bias = None if bias is None or keys.bias is None else bias.astype(keys.bias.dtype)
    return Queries(query.astype(queries.query.dtype), None), Keys(
        key.astype(keys.key.dtype), value.astype(keys.value.dtype), bias, None, None
    )


def _scores(
    options: Options, queries: Queries, keys: Keys, i: Array, j: Array, shift: int | Array
) -> tuple[Float[Array, "B K G T S"], Bool[Array, "#B #K #G #T S"], Float[Array, "B K S U"]]:
    """Logits between one chunk of queries and chunk j of the keys, which pairs may meet, and the values."""
    key, value = _chunk(keys.key, j), _chunk(keys.value, j)
    dtype = np.promote_types(queries.query.dtype, np.float32)
    logits = jnp.einsum("BKGTH,BKSH->BKGTS", queries.query, key, preferred_element_type=dtype) * options.scale
    if keys.bias is not None:
        logits = logits + _chunk(keys.bias, i, j).astype(dtype)

    t, s = logits.shape[-2:]
    key_position = (j * s + jnp.arange(s))[None, :]
    seen = key_position < options.num_keys
    if options.is_causal:
        seen = seen & (key_position <= (i * t + jnp.arange(t))[:, None] + shift)
    seen = seen[None, None, None]
    if keys.mask is not None:
        seen = seen & _chunk(keys.mask, i, j)
    if keys.ids is not None and queries.ids is not None:
        seen = seen & segment_mask(queries.ids, _chunk(keys.ids, j))[:, None]
    return logits, seen, value


def _num_visible(options: Options, queries: Queries, keys: Keys, i: Array, shift: int | Array) -> int | Array:
    """How many chunks of keys the queries of chunk i may see the first of: the rest need no work."""
    (j, *_, s, _), t = keys.key.shape, queries.query.shape[-2]
    return jnp.clip(((i + 1) * t - 1 + shift) // s + 1, 0, j) if options.is_causal else j


def _chunk_rng(rng: Array | None, keys: Keys, i: Array, j: Array) -> Array | None:
    """A key for the pair of chunks, so that the gradient can draw again what the output saw dropped."""
    return None if rng is None else jax.random.fold_in(rng, i * keys.key.shape[0] + j)


def _statistics_dtype(queries: Queries) -> np.dtype:
    return np.promote_types(queries.query.dtype, np.float32)  # NumPy's: JAX's own refuses under strict promotion


def _hidden(dtype: np.dtype) -> Array:
    """Below every logit, but finite: the difference of two infinities is no number."""
    return jnp.asarray(0.7 * jnp.finfo(dtype).min, dtype)


def _chunk(x: Array, *index: Array) -> Array:
    """x[index], and x[0] along a leading axis of size 1: a dynamic slice moves its start to where it fits."""
    rest = x.shape[len(index) :]
    start = (*index, *(jnp.zeros_like(index[0]) for _ in rest))
    return jax.lax.dynamic_slice(x, start, (*(1 for _ in index), *rest)).reshape(rest)


def _add_to_chunk(x: Array, update: Array, *index: Array) -> Array:
    """Adds to x[index]; what was broadcast in the chunk is summed."""
    chunk = _chunk(x, *index)
    broadcast = tuple(axis for axis, size in enumerate(chunk.shape) if size < update.shape[axis])
    chunk = (chunk + update.sum(axis=broadcast, keepdims=True)).reshape(*(1 for _ in index), *chunk.shape)
    start = (*index, *(jnp.zeros_like(index[0]) for _ in x.shape[len(index) :]))
    return jax.lax.dynamic_update_slice(x, chunk, start)


def _equal_chunks(length: int, at_most: int) -> int:
    """The size of a chunk: a length of one more than `at_most` gives two halves, not a chunk of padding."""
    return -(-length // max(1, -(-length // at_most)))


def _split(x: Array, axis: int, size: int) -> Array:
    """Pads an axis to a multiple of `size` and cuts it into chunks, along a new first axis."""
    num_chunks = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, num_chunks * size - x.shape[axis])
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :]), axis, 0)


def _varying_alike(arrays: tuple[Array | None, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Within shard_map, lets arrays vary over all mesh axes that any varies over, as the state of a loop has to."""
    zero = jnp.zeros((), bool)
    for x in jax.tree.leaves((arrays, others)):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        zero = zero | jnp.zeros_like(x.ravel()[0], bool)
    return jax.tree.map(lambda x: jnp.where(zero, x, x), arrays)


@weights_on_request
@divided_as_queries
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
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q K^T + bias) V, exactly, without ever holding the T x S weights.

    A chunk of queries meets the keys chunk by chunk, and what it saw is rescaled whenever a larger logit turns up:
    "Self-attention Does Not Need O(n^2) Memory" (Rabe and Staats, 2021, section 2 of https://arxiv.org/abs/2112.05682).
    The gradient keeps the output and two numbers for each query and computes the weights once more, chunk by chunk
    (FlashAttention, Dao et al., 2022, algorithm 4 of https://arxiv.org/abs/2205.14135). Chunks that causality hides
    entirely cost nothing.

    The gradient is a `jax.custom_vjp`: `jax.grad` works, and so does `jax.jvp` of a gradient, but not `jax.jvp` of this
    function itself; `dot_product_attention` has that too.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N, and keys are not repeated for the queries that share them.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. It and its gradient are stored as given: one for
        all pairs costs the memory that this function saves elsewhere.
      mask: True where a query may attend, broadcastable to [B, N, T, S]; best a padding mask, [B, 1, 1, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits, a Python number; None means 1 / sqrt(H).
      chunk_size: the most queries and the most keys that meet at once. Memory grows with its square, [B, N, chunk_size,
        chunk_size]; any length works.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight. Which are dropped depends on `chunk_size`.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, which are dense: O(T S).

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`, zero for a query without keys; with `return_weights` a
      pair of these and the weights, [B, N, T, S]. All sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the sizes do not fit together, a mask is not boolean or of rank 4, or `chunk_size` is below 1.

    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> jax.jit(functools.partial(chunked_attention, is_causal=True, chunk_size=2))(x, x, x).shape
    (1, 3, 2, 4)
    """
    check_shapes(query, key, value, bias, mask)
    b, t, _, h = query.shape
    s = key.shape[1]
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    queries, keys = split_inputs(query, key, value, bias, mask, ids, dropout_rng, chunk_size)
    options = Options(h**-0.5 if scale is None else scale, is_causal, dropout_rate, t, s)
    out = join_queries(_attend(options, queries, keys, dropout_rng), t)
    if not return_weights:
        return out
    return out, dot_product_weights(query, key, bias, mask, is_causal=is_causal, scale=scale, segment_ids=segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, queries: Queries, keys: Keys, rng: Array | None) -> Float[Array, "I B K G T U"]:
    return _forward(options, queries, keys, rng)[0]


def _forward(
    options: Options, queries: Queries, keys: Keys, rng: Array | None
) -> tuple[Float[Array, "I B K G T U"], Residuals]:
    shift = options.num_keys - options.num_queries
    running = attend(options, queries, keys, before_any_key(queries, keys), shift, rng)
    saved = finish(running, queries.query.dtype)
    return saved.out, Residuals(queries, keys, rng, saved)


def _backward(options: Options, residuals: Residuals, cotangent: Array) -> tuple[Queries, Keys, None]:
    queries, keys, rng, saved = residuals
    shift = options.num_keys - options.num_queries
    gradients = no_gradients(queries, keys)
    gradients = add_gradients(options, queries, keys, saved, cotangent, gradients, shift, rng)
    return *as_cotangents(gradients, queries, keys), None


_attend.defvjp(_forward, _backward)
