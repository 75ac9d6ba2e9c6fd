"""Chunked computation shared by all attentions whose past is a state (a matrix) of constant size.

For each key head, each token updates the state S, [H, U], and its query reads the state:

    S_t = diag(a_t) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

with a decay a_t in [0, 1]. Without the delta rule u_t = v_t. With the delta rule
u_t = beta_t (v_t - S_{t-1}^T diag(a_t) k_t), which overwrites the value stored for k_t.

Within a chunk of C tokens o is a product of matrices, [C, C] and [C, U]. A scan passes the state from chunk to chunk:
the chunkwise form of Yang et al. (2023, https://arxiv.org/abs/2312.06635; 2024, https://arxiv.org/abs/2406.06484).

The product of the decays between two tokens is the exponential of a sum of logarithms. As a difference of cumulative
sums from the start of the chunk it would lose a slow decay after a fast one, and the separate factors would overflow.
So sums are never subtracted. A decay per head has a sum for each pair of tokens, [C, C]. With a decay per channel a
chunk is halved: the sums of both halves are taken from the middle, and each half is treated in the same way.

Axis letters besides those of `tfx_jax.functional`: P chunks, C tokens of a chunk, and J the same tokens as keys, where
both occur; K key heads and G = N / K queries for each; R = G rows that read the state, with the delta rule one more,
the key; Z decays of a head, H or 1.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    check_shapes,
    pair_of_segment_ids,
    statistics_dtype,
)
from tfx_jax.functional.attention.spec import Option, RecurrentDecoding

_LOG_OF_ZERO = -1e4  # finite, and its exponential is 0 in float64 too

BLOCK_SIZE = Option("tokens in a chunk, a power of two", at_least=1)


class Updates(NamedTuple):
    """Updates of the state by each token, in float32 at least."""

    key: Float[Array, "B S K H"]
    log_decay: Float[Array, "B S K Z"]
    """log a, at most 0, with Z = H for a decay per channel and Z = 1 for one per head."""
    beta: Float[Array, "B S K"] | None = None
    """The delta rule's beta; None without the delta rule, where a write strength is multiplied into the key."""


def check_recurrent(
    name: str,
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    mask: Mask | None,
    *,
    is_causal: bool,
    block_size: int,
    dropout_rate: float,
    **gates: tuple[Array, tuple[int, ...]],
) -> None:
    """Raises ValueError for arguments that no recurrent attention supports.

    `name` is that of the attention in messages; `gates` maps names to (array, required shape after [B, S]).
    """
    check_shapes(query, key, value, bias, mask)
    if not is_causal:
        raise ValueError(
            f"{name} attention is causal only, because its state holds past tokens only: pass is_causal=True"
        )
    if bias is not None:
        raise ValueError(
            f"{name} attention takes no bias, because it never computes the logits of pairs: pass bias=None"
        )
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"{name} attention takes only a padding mask, [B, 1, 1, S], got shape {mask.shape}, because its state does "
            "not keep single keys. It is always is_causal; pass segment_ids for packed sequences"
        )
    if dropout_rate:
        raise ValueError(f"{name} attention has no weights to drop, got dropout_rate={dropout_rate}; drop the output")
    check_integers(block_size=block_size)
    if block_size < 1 or block_size & (block_size - 1):  # a power of two has a single bit
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    for gate, (array, features) in gates.items():
        required = *key.shape[:2], *features
        if array.shape != required:
            raise ValueError(f"{gate} must have shape {required}, one gate for each key, got {array.shape}")


def check_size(name: str, parameter: Array, *shape: int) -> None:
    """Raises ValueError unless the parameter has the given shape."""
    if parameter.shape != shape:
        raise ValueError(f"{name} must have shape {shape} for keys of {shape[0]} heads, got {parameter.shape}")


def to_float32(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the array in float32 at least."""
    return x.astype(statistics_dtype(x))


def per_channel(x: Float[Array, "*batch Z"], num_channels: int) -> Float[Array, "*batch H"]:
    """Returns one factor per channel, from one per channel or one per head.

    A factor per head is repeated by a product with ones instead of broadcasting. Its gradient, a sum over channels, is
    then a product of matrices too: on CPUs XLA takes several times as long for a sum over the last axis.
    """
    if x.shape[-1] == num_channels:
        return x
    return jnp.matmul(x, jnp.ones((1, num_channels), x.dtype), precision="highest")


def recurrent_attention(
    query: Float[Array, "B T N H"],
    updates: Updates,
    value: Float[Array, "B S K U"],
    mask: Mask | None,
    segment_ids: SegmentIds | None,
    *,
    dtype: DTypeLike,
    block_size: int,
    return_weights: bool,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    """Computes what each query reads from the state, S_t^T q_t, chunk by chunk.

    Args:
      query: queries, normalized and scaled, [B, T, N, H], at the last T of the S positions.
      updates: updates of the state by each token.
      value: values, [B, S, K, U].
      mask: True for tokens, False for padding, which does not change the state, [B or 1, 1, 1, S]; None means none.
      segment_ids: packed sequences, which start from a state of zeros each; None means one sequence for each row.
      dtype: dtype of the output.
      block_size: C, tokens in a chunk, a power of two.
      return_weights: also return the weights, which are the outputs for unit vectors as values.

    Returns:
      The outputs, [B, T, N, U]; with `return_weights` a pair of outputs and weights, [B, N, T, S].
    """
    (b, t, n, _), (s, k) = query.shape, updates.key.shape[1:3]
    visible = _visible(mask, segment_ids, b, t, s)
    chunks = _chunks(query, updates, visible, segment_ids, block_size)
    value = _zeros_in_padding(value, visible)

    def attend(values: Float[Array, "B S K Z"]) -> Float[Array, "B T N Z"]:
        """Computes the outputs for any values."""
        values = _split(values.astype(updates.key.dtype), chunks.write.shape[0], chunks.write.shape[3])
        states, writes, _ = _scan(chunks, values)
        from_earlier_chunks = jnp.einsum("PBKCGH,PBKHU->PBKCGU", chunks.query, states)
        out = from_earlier_chunks + jnp.einsum("PBKCGJ,PBKJU->PBKCGU", chunks.pairs, writes)
        out = out.transpose(1, 0, 3, 2, 4, 5).reshape(b, -1, n, values.shape[-1])
        return out[:, -t:]  # chunks are padded in front

    out = attend(value).astype(dtype)
    if not return_weights:
        return out
    # The output is linear in the values, so the weights are the outputs for unit vectors as values.
    unit_vectors = jnp.broadcast_to(jnp.eye(s, dtype=updates.key.dtype)[None, :, None], (b, s, k, s))
    return out, attend(unit_vectors).transpose(0, 2, 1, 3)


def decoding_of_updates(
    updates_fn: Callable[..., Updates], query_fn: Callable[[Array], Array], block_size: int
) -> RecurrentDecoding:
    """Returns decoding of an attention with updates `updates_fn(key, **gates)` and queries `query_fn(query)`."""

    def read(key: Array, value: Array, mask: Mask | None, **gates: Array) -> Array:
        """Returns the state after a prompt, [B, K, H, U]."""
        updates = updates_fn(key, **gates)
        (b, s, k, h), u = key.shape, value.shape[-1]
        if not s:
            return jnp.zeros((b, k, h, u), updates.key.dtype)
        visible = _visible(mask, None, b, 0, s)
        chunks = _chunks(jnp.zeros((b, s, 0, h)), updates, visible, None, block_size)
        value = _zeros_in_padding(value, visible)
        values = _split(value.astype(updates.key.dtype), chunks.write.shape[0], chunks.write.shape[3])
        _, _, last_state = _scan(chunks, values)
        return last_state

    def step(state: Array, query: Array, key: Array, value: Array, **gates: Array) -> tuple[Array, Array]:
        """Returns the output of one token, [B, 1, N, U], and the new state."""
        updates = jax.tree.map(lambda x: x[:, 0], updates_fn(key, **gates))
        (b, _, n, h), (k, u) = query.shape, value.shape[2:]
        state = state * jnp.exp(updates.log_decay)[..., None]
        write = value[:, 0].astype(state.dtype)  # the u of the module's docstring, [B, K, U]
        if updates.beta is not None:
            stored_value = jnp.einsum("BKH,BKHU->BKU", updates.key, state)
            write = updates.beta[..., None] * (write - stored_value)
        state = state + updates.key[..., None] * write[..., None, :]
        heads = query_fn(query).reshape(b, k, n // k, h)
        out = jnp.einsum("BKGH,BKHU->BKGU", heads, state)
        return out.reshape(b, 1, n, u).astype(query.dtype), state

    return RecurrentDecoding(read, step)


class _Chunks(NamedTuple):
    """Coefficients of P chunks of C tokens, computed from everything but the values."""

    query: Float[Array, "P B K C G H"]
    """Queries, decayed from the start of the chunk: they multiply the state before the chunk."""
    pairs: Float[Array, "P B K C G J"]
    """Coefficients of the chunk's writes u in the outputs of its queries."""
    write: Float[Array, "P B K C H"]
    """Keys, decayed to the end of the chunk: they add the writes to the state after the chunk."""
    decay: Float[Array, "P B K Z"]
    """Decay of the state over the whole chunk."""
    solve: Float[Array, "P B K C J"] | None
    """Delta rule: matrix from the values to the writes for a zero state before the chunk."""
    erase: Float[Array, "P B K C H"] | None
    """Delta rule: `solve` times the keys, decayed from the start: what the state before subtracts from the writes."""


def _scan(chunks: _Chunks, value: Float[Array, "P B K C U"]) -> tuple[Array, Array, Array]:
    """Returns the state before each chunk, [P, B, K, H, U], the writes u, [P, B, K, C, U], and the last state."""
    if chunks.solve is not None:
        value = chunks.solve @ value

    # Zeros that vary over the same shard_map axes as the inputs, as the carry of a scan must.
    start = 0 * (chunks.write[0, :, :, 0, :, None] * value[0, :, :, 0, None, :])
    if chunks.erase is None:  # the writes do not depend on the state: what they add to it is one product for all chunks

        def decay_and_add(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            """Returns the states after and before a chunk, [B, K, H, U]."""
            decay, added = chunk
            return state * decay[..., None] + added, state

        last, states = jax.lax.scan(decay_and_add, start, (chunks.decay, chunks.write.mT @ value))
        return states, value, last

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        """Returns the state after a chunk, [B, K, H, U], and the state before it with the chunk's writes."""
        value, write, decay, erase = chunk
        written = value - erase @ state
        return state * decay[..., None] + write.mT @ written, (state, written)

    last, (states, written) = jax.lax.scan(step, start, (value, chunks.write, chunks.decay, chunks.erase))
    return states, written, last


def _split(x: Float[Array, "B S K *"], num_chunks: int, block_size: int) -> Float[Array, "P B K C *"]:
    """Splits axis 1 into chunks; padded in front, because the last query is at the position of the last key."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (num_chunks * block_size - x.shape[1], 0)
    x = jnp.pad(x, padding).reshape(x.shape[0], num_chunks, block_size, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, *range(4, x.ndim))


def _visible(mask: Mask | None, segment_ids: SegmentIds | None, b: int, t: int, s: int) -> Bool[Array, "B S"] | None:
    """Returns which keys are tokens; None means all."""
    visible = None if mask is None else jnp.broadcast_to(mask[:, 0, 0], (b, s))
    if segment_ids is None:
        return visible
    is_token = pair_of_segment_ids(segment_ids, b, t, s)[1] != 0
    return is_token if visible is None else visible & is_token


def _zeros_in_padding(x: Float[Array, "B S *"], visible: Bool[Array, "B S"] | None) -> Float[Array, "B S *"]:
    """Sets padding to 0: by `where` instead of a product, because it may hold NaN."""
    return x if visible is None else jnp.where(jnp.expand_dims(visible, range(2, x.ndim)), x, 0)


def _chunks(
    query: Float[Array, "B T N H"],
    updates: Updates,
    visible: Bool[Array, "B S"] | None,
    segment_ids: SegmentIds | None,
    block_size: int,
) -> _Chunks:
    """Computes the coefficients of all chunks.

    Args:
      query: queries, at the last T of the S positions; with N = 0 the coefficients of the state only.
      updates: updates of the state by each token.
      visible: which keys are tokens, from `_visible`; None means all.
      segment_ids: packed sequences; None means one sequence for each row.
      block_size: C, tokens in a chunk, a power of two.
    """
    (b, t, n, h), (s, k) = query.shape, updates.key.shape[1:3]
    longest = max(t, s)
    block_size = min(block_size, 1 << (longest - 1).bit_length())  # at most the next power of two
    split = functools.partial(_split, num_chunks=-(-longest // block_size), block_size=block_size)
    updates = jax.tree.map(lambda x: _zeros_in_padding(x, visible), updates)  # so padding does not change the state
    key, beta = split(updates.key), None if updates.beta is None else split(updates.beta)
    queries = split(query.reshape(b, t, k, n // k, h))
    # The delta rule reads the state by keys too: they are appended to the queries as one more row.
    rows = queries if beta is None else jnp.concatenate([queries, key[..., None, :]], axis=-2)
    runs = None  # numbers of the sequences of rows, [P, B, 1, C, R], and of keys, [P, B, 1, C]
    if segment_ids is not None:
        assert visible is not None
        query_runs, key_runs = _runs(*pair_of_segment_ids(segment_ids, b, t, s), visible)
        key_runs = split(key_runs[..., None])  # 1 or more; 0 is padding in front
        runs = jnp.broadcast_to(split(query_runs[..., None])[..., None], queries.shape[:2] + (1, *queries.shape[3:5]))
        runs = (runs if beta is None else jnp.concatenate([runs, key_runs[..., None]], -1)), key_runs
    # The decays to each token from the start of its chunk, and from it to the end, as logarithms.
    pairs_fn = _pairs_of_head_decays if updates.log_decay.shape[-1] == 1 < key.shape[-1] else _pairs
    pairs, solve, before, after = pairs_fn(rows, key, split(updates.log_decay), beta, runs)
    decay = jnp.exp(before[..., -1, :])
    reads, writes = _decayed(rows, jnp.exp(before)), key * per_channel(jnp.exp(after), h)
    if runs is not None:
        # The state after a chunk is that of its last sequence; other sequences do not write to it. In the next chunk
        # only queries of that sequence read it, and it stays only if that sequence is the last one there too.
        last = runs[1][:, :, :, -1:]  # number of each chunk's last sequence
        previous = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
        reads = jnp.where((runs[0] == previous[..., None])[..., None], reads, 0)
        writes = jnp.where((runs[1] == last)[..., None], writes, 0)
        decay = jnp.where(last == previous, decay, 0)
    if beta is None or solve is None:
        return _Chunks(reads, pairs, writes, decay, None, None)
    # The last row is the key: separate it from the queries.
    solve = solve * beta[..., None, :]
    query_reads, query_pairs, key_reads = reads[..., :-1, :], pairs[..., :-1, :], reads[..., -1, :]
    return _Chunks(query_reads, query_pairs, writes, decay, solve, erase=solve @ key_reads)


def _runs(
    query_ids: Int[Array, "B T"], key_ids: Int[Array, "B S"], visible: Bool[Array, "B S"]
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns the number of each query's and each key's packed sequence, counted from 1 in the order of the row.

    Padding gets the number of the sequence before it. A query gets -1 if its sequence has no key yet.
    """
    t, s = query_ids.shape[1], key_ids.shape[1]
    newest_token = jax.lax.cummax(jnp.where(visible, jnp.arange(s)[None], -1), axis=1)  # index of it, at each position
    ids = jnp.where(newest_token < 0, 0, jnp.take_along_axis(key_ids, jnp.maximum(newest_token, 0), axis=1))
    changes = ids[:, 1:] != ids[:, :-1]
    runs = 1 + jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)
    if t > s:
        ids, runs = (jnp.pad(x, ((0, 0), (t - s, 0))) for x in (ids, runs))
    has_key = (query_ids != 0) & (query_ids == ids[:, -t:])
    return jnp.where(has_key, runs[:, -t:], -1), runs[:, -s:]


def _decayed(rows: Float[Array, "*batch R H"], decay: Float[Array, "*batch Z"]) -> Float[Array, "*batch R H"]:
    """Multiplies all rows by the same decay.

    The rows are multiplied one by one, because the gradient of a broadcast decay, a sum over rows, crashes on CPUs with
    jaxlib 0.10.2.
    """
    if not rows.shape[-2]:
        return rows
    decay = per_channel(decay, rows.shape[-1])
    return jnp.stack([rows[..., row, :] * decay for row in range(rows.shape[-2])], axis=-2)


def _pairs_of_head_decays(
    rows: Float[Array, "P B K C R H"],
    key: Float[Array, "P B K C H"],
    log_decay: Float[Array, "P B K C 1"],
    beta: Float[Array, "P B K C"] | None,
    runs: tuple[Int[Array, "P B #K C R"], Int[Array, "P B #K C"]] | None,
) -> tuple[Array, Array | None, Array, Array]:
    """Computes the results of `_pairs` for one decay per head, by products of whole chunks.

    `runs` are the numbers of the sequences of rows and of keys, from `_runs`; None means one sequence.
    """
    is_later = jnp.tri(key.shape[3], k=-1, dtype=jnp.bool_)[None, None, None]  # rows are later than columns
    # Sums over the tokens after s up to t, [P, B, K, C, C], by a product, which CPUs compute faster than `cumsum`.
    up_to = jnp.tri(key.shape[3], dtype=log_decay.dtype)
    finite = jnp.maximum(log_decay, _LOG_OF_ZERO)  # 0 * inf in the product would be NaN
    sums = jnp.matmul(up_to, jnp.where(is_later, finite, 0), precision="highest")
    decay = jnp.where(is_later.mT, 0, jnp.exp(sums))
    # Row by row for the reason that `_decayed` gives: each product is [P, B, K, C, J].
    row_indices = range(rows.shape[-2])
    products = [(rows[..., row, :] @ key.mT) * decay for row in row_indices]
    if runs is not None:
        row_runs, key_runs = runs
        is_same = [row_runs[..., row, None] == key_runs[..., None, :] for row in row_indices]
        products = [jnp.where(same, product, 0) for same, product in zip(is_same, products, strict=True)]
    inverse = None
    if beta is not None:
        inverse = _inverse(jnp.where(is_later, products[-1], 0) * beta[..., None])
    joined = jnp.stack(products, axis=-2) if products else jnp.zeros((*rows.shape[:-1], key.shape[3]), key.dtype)
    return joined, inverse, jnp.cumsum(log_decay, axis=-2), sums[..., -1, :, None]


def _inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Returns the inverse of I + L for a strictly lower triangular L; C is a power of two."""
    half = lower.shape[-1] // 2
    if not half:
        return jnp.ones_like(lower)
    # [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]; the two diagonal blocks recurse together.
    first, second = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -second @ (lower[..., half:, :half] @ first)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _pairs(
    rows: Float[Array, "P B K C R H"],
    key: Float[Array, "P B K C H"],
    log_decay: Float[Array, "P B K C Z"],
    beta: Float[Array, "P B K C"] | None,
    runs: tuple[Int[Array, "P B #K C R"], Int[Array, "P B #K C"]] | None,
) -> tuple[Array, Array | None, Array, Array]:
    """Computes decayed products of rows (queries, and keys for the delta rule) and the keys at or before them.

    It starts with parts of one token and merges neighboring parts until a part is the whole chunk.

    Args:
      rows: R rows for each token that read the state.
      key: keys.
      log_decay: logarithms of the decays, one per channel; `_pairs_of_head_decays` is for one per head.
      beta: write strength of the delta rule; None without it.
      runs: numbers of the sequences of rows and of keys, from `_runs`; None means one sequence.

    Returns:
      Products, [P, B, K, C, R, C]. With `beta`, the inverse of I + beta L, [P, B, K, C, C], where L has the products of
      the last row, the key, with earlier keys; otherwise None. Sums of the log-decays from the start of the chunk up to
      each token, and from after each token to the end, [P, B, K, C, Z] both.
    """
    length = key.shape[3]
    # [P, B, K, parts, tokens of a part, ...]: at first each token is a part.
    products = jnp.einsum("...RH,...H->...R", rows, key)
    if runs is not None:
        products = jnp.where(runs[0] == runs[1][..., None], products, 0)
        runs = runs[0][:, :, :, :, None], runs[1][:, :, :, :, None]
    products = products[:, :, :, :, None, :, None]
    before, rows, key = (x[:, :, :, :, None] for x in (log_decay, rows, key))
    after = jnp.zeros_like(before)
    inverse = None
    if beta is not None:
        beta = beta[:, :, :, :, None]
        inverse = jnp.ones_like(beta)[..., None]
    size = 1

    def halves(x: Array) -> tuple[Array, Array]:
        """Returns the first and the second of each pair of neighboring parts."""
        x = x.reshape(*x.shape[:3], length // (2 * size), 2, size, *x.shape[5:])
        return x[:, :, :, :, 0], x[:, :, :, :, 1]

    def triangle(first: Array, corner: Array, second: Array) -> Array:
        """Returns the block matrices [[first, 0], [corner, second]]."""
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=4)

    while size < length:
        (before_1, before_2), (after_1, after_2) = halves(before), halves(after)
        reads, writes = _decayed(halves(rows)[1], jnp.exp(before_2)), halves(key)[0] * jnp.exp(after_1)
        corner = jnp.einsum("...IRH,...JH->...IRJ", reads, writes)  # rows of the second half by keys of the first
        if runs is not None:
            row_runs, key_runs = runs
            is_same = halves(row_runs)[1][..., None] == halves(key_runs)[0][..., None, None, :]
            corner = jnp.where(is_same, corner, 0)
        if beta is not None and inverse is not None:
            (inverse_1, inverse_2), beta_2 = halves(inverse), halves(beta)[1]
            erased = corner[..., -1, :] * beta_2[..., None]
            inverse = triangle(inverse_1, -inverse_2 @ (erased @ inverse_1), inverse_2)
        first, second = halves(products)
        products = triangle(first, corner, second)
        before = jnp.concatenate([before_1, before_2 + before_1[..., -1:, :]], axis=4)
        after = jnp.concatenate([after_1 + before_2[..., -1:, :], after_2], axis=4)
        size *= 2
    products, before, after = products[:, :, :, 0], before[:, :, :, 0], after[:, :, :, 0]
    return products, None if inverse is None else inverse[:, :, :, 0], before, after
