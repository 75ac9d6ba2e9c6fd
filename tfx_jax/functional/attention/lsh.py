"""Locality-sensitive hashing (LSH) attention of the Reformer: attention among tokens in the same hash bucket."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dense import hidden_logit, masked_softmax
from tfx_jax.functional.attention.signature import (
    Mask,
    check_integers,
    check_shapes,
    pair_of_segment_ids,
    shard_like_query,
    statistics_dtype,
    visible_keys,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.layers import dropout

_HIDDEN_SEGMENT = np.iinfo(np.int32).max  # segment of hidden tokens, which are sorted after all others


@weights_on_request
@shard_like_query
@zeros_where_empty
def lsh_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    rng: Array,
    num_buckets: int | tuple[int, ...],
    num_hashes: int = 4,
    chunk_size: int = 64,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes self-attention among tokens that a random rotation puts into the same bucket (Reformer).

    Section 2 of "Reformer: The Efficient Transformer" (Kitaev et al., 2020, https://arxiv.org/abs/2001.04451). A round
    of hashing gives every token the bucket argmax([qR; -qR]), sorts the tokens by (bucket, position) and cuts them into
    chunks. Each token attends to the tokens of its bucket in its own chunk and in the chunk before. With P_i^(r) the
    keys that token i reaches in round r and N_ij the number of rounds in which it reaches key j, the rounds combine to

        o_i = sum_r exp(z_i^(r) - z_i) o_i^(r),  z_i^(r) = log sum_{j in P_i^(r)} exp(scale * q_i . k_j - log N_ij),

    which is the softmax over the union of all P_i^(r): a key that is reached twice counts once.

    Sorting takes O(T log T). Hashing a token into n buckets takes O(n) with one factor, O(sqrt(n)) with two, and
    O(log n) with factors of two (see `num_buckets`).

    **Shared queries and keys.** The key of a token is its query at unit length, k_j = q_j / |q_j|, so that both have
    the same bucket. Pass the queries as `key`: the argument exists for the common signature and its values are unused.
    Because q_i . k_i would dominate every softmax, a token attends to itself only if it sees no other token.

    **Causality.** In the published method, later tokens move the borders of the chunks, and so decide whether a query
    reaches `chunk_size` or up to 2 * chunk_size - 1 earlier tokens of its bucket: the future leaks. With `is_causal` a
    query therefore reaches exactly the last `chunk_size` earlier tokens of its bucket, at the same cost. Later tokens
    then change its output by rounding only, because terms may be added in another order.

    **Padding and packing.** Chunks start at the first visible token of each segment, and the number of buckets does not
    depend on the length. So a sequence gets the same output alone, padded on any side, in a batch with others, or
    packed with them; with `is_causal` so does a prefix of it. The exception is rounding at the border of a bucket.

    The gradient is a `jax.custom_vjp`, so `jax.jvp` of this function does not work.

    Args:
      query: queries, [B, T, N, H]; they are also the keys.
      key: unused, [B, T, K, H].
      value: values, [B, T, K, U]; K divides N, and query head n reads value head n // (N / K).
      bias: must be None, because logits are computed for the pairs of one bucket only.
      mask: True for visible tokens, [B or 1, 1, 1, T]. A hidden token is neither query nor key: it is not in the sorted
        order, gets a zero output and does not change other outputs.
      rng: PRNG key of the rotations. The paper samples new ones at every step; a fixed key makes evaluation repeatable.
      num_buckets: an even number, or 1. A tuple of such numbers stands for their product and is hashed factor by
        factor, which is cheaper than one rotation into very many buckets. `lsh_num_buckets` returns the usual number
        for a given length. Use one number for sequences of all lengths: another number is another hash.
      num_hashes: rounds of hashing; more rounds miss fewer near keys. The paper trains with 4 and evaluates with 8.
      chunk_size: tokens in a chunk of the sorted sequence.
      is_causal: a token sees itself and earlier ones only.
      scale: multiplies the logits; None means 1 / sqrt(H). The authors' code passes 1.
      segment_ids: packed sequences, [B, T]; tokens see their own segment, and segment 0 is padding. Without `is_causal`
        this doubles the number of logits, because chunks then begin anywhere.
      dropout_rate: probability in [0, 1) of dropping an attention weight, sampled separately in each round.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights, before dropout, as a dense array with zeros outside the buckets.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      [B, N, T, T], float32 (float64 for float64 inputs) as all logits and statistics are.

    Raises:
      ValueError: if shapes do not match, `key` and `query` differ in length, `mask` is not a padding mask, `bias` is
        given, or a number of hashes, buckets or tokens is out of range.

    >>> hashing = {"num_buckets": 8, "chunk_size": 16, "is_causal": True}
    >>> attend = jax.jit(lambda x, rng: lsh_attention(x, x, x, rng=rng, **hashing))
    >>> attend(jnp.ones((1, 100, 2, 8)), jax.random.key(0)).shape
    (1, 100, 2, 8)
    """
    check_shapes(query, key, value, None, mask)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            "LSH attention is self-attention and needs as many keys as queries, got "
            f"{query.shape[1]} queries and {key.shape[1]} keys"
        )
    check_integers(num_hashes=num_hashes, chunk_size=chunk_size)
    if num_hashes < 1 or chunk_size < 1:
        raise ValueError(f"num_hashes and chunk_size must be at least 1, got {num_hashes} and {chunk_size}")
    b, t, n, h = query.shape
    factors = _bucket_factors(num_buckets)
    scale = 1 / math.sqrt(h) if scale is None else scale
    chunk_size = min(chunk_size, t)
    visible, segment = visible_tokens(bias, mask, b, t), jnp.zeros((b, t), jnp.int32)
    if isinstance(segment_ids, tuple):
        raise ValueError(
            "LSH attention is self-attention: segment_ids must be one array, [B, T], not a pair for queries and keys"
        )
    if segment_ids is not None:
        segment = pair_of_segment_ids(segment_ids, b, t, t)[0].astype(jnp.int32)
        visible = visible & (segment != 0)

    value = jnp.repeat(value, n // value.shape[2], axis=2)
    # How many chunks of the array before and after its own a token looks at: 1 before. Chunks of segments can begin
    # anywhere in the array, so that such a chunk and the one before it overlap with one more on each side.
    around = (2, 1) if segment_ids is not None and not is_causal else (1, 0)

    # Hidden tokens, and the padding of the last chunk, are sorted after all others.
    excess = -t % chunk_size  # tokens that the last chunk lacks
    padding = ((0, 0), (0, excess), (0, 0), (0, 0))
    query, value = (jnp.pad(x, padding).swapaxes(1, 2) for x in (query, value))  # [B, N, T, H or U]
    segment = jnp.pad(
        jnp.where(visible, segment, _HIDDEN_SEGMENT), ((0, 0), (0, excess)), constant_values=_HIDDEN_SEGMENT
    )
    order, places = _sorted(segment, _buckets(query, _rotations(rng, num_hashes, n, h, factors)))
    out, is_alone = _attend_in_chunks(
        query, value, order, places, chunk_size, around, is_causal, scale, dropout_rate, dropout_rng
    )

    alone_rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, num_hashes)
    # A visible token that reaches no other token attends to itself with weight 1.
    own_weight = (is_alone & (segment != _HIDDEN_SEGMENT)[:, None])[..., None].astype(out.dtype)  # [B, N, T, 1]
    out = out + dropout(own_weight, dropout_rate, alone_rng) * value.astype(out.dtype)
    out = out[:, :, :t].swapaxes(1, 2).astype(query.dtype)
    if not return_weights:
        return out
    weights = _lsh_weights(query[:, :, :t], places, chunk_size, is_causal, scale)
    return out, weights + own_weight[:, :, :t] * jnp.eye(t, dtype=weights.dtype)[None, None]


def lsh_num_buckets(length: int, *, chunk_size: int) -> tuple[int, ...]:
    """Returns, as factors, the number of buckets with which a bucket holds half a chunk of tokens on average.

    Args:
      length: number of tokens of a typical or of the longest sequence, not of the padded array: with a number that
        depends on the padding, the hashes would too.
      chunk_size: as in `lsh_attention`.

    Returns:
      2 * length / chunk_size, rounded up to a power of two; as two factors if it is above 128.

    >>> lsh_num_buckets(1_000, chunk_size=64), lsh_num_buckets(65_536, chunk_size=64)
    ((32,), (32, 64))
    """
    bits = math.ceil(math.log2(max(1.0, 2 * length / chunk_size)))
    if bits <= 7:
        return (2**bits,)
    return 2 ** (bits // 2), 2 ** (bits - bits // 2)


class _Places(NamedTuple):
    """Sorted positions and buckets of the tokens in each round of hashing; each array is [rounds, B, N, T]."""

    rank: Array
    """The index of each token in the sorted sequence."""
    rank_in_segment: Array
    """The index of each token in the sorted sequence, counted from the first token of its segment."""
    group: Array
    """One number for each bucket of each segment, from 1; 0 for hidden tokens."""


def _bucket_factors(num_buckets: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the factors of the number of buckets; raises ValueError if one is neither 1 nor even."""
    factors = num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)
    if any(factor < 1 or (factor > 1 and factor % 2) for factor in factors):
        raise ValueError(f"num_buckets must be 1 or even (a rotated axis and its opposite), got {num_buckets}")
    return factors


def _rotations(rng: Array, num_hashes: int, num_heads: int, head_size: int, factors: tuple[int, ...]) -> list[Array]:
    """Samples a rotation, [rounds, N, H, factor / 2], for each factor above 1 of the number of buckets."""
    shapes = [(num_hashes, num_heads, head_size, factor // 2) for factor in factors if factor > 1]
    return [jax.random.normal(jax.random.fold_in(rng, i), shape, jnp.float32) for i, shape in enumerate(shapes)]


def _buckets(query: Float[Array, "B N T H"], rotations: list[Array]) -> Int[Array, "rounds B N T"]:
    """Returns the bucket of each token: argmax([qR; -qR]) for each factor, as the digits of one number.

    `rotations` has an array [rounds, N, H, factor / 2] for each factor above 1, from `_rotations`.
    """
    dtype = statistics_dtype(query)
    query = jax.lax.stop_gradient(query.astype(dtype))
    bucket = jnp.zeros((1, *query.shape[:3]), jnp.int32)
    for rotation in rotations:
        rotate = jax.vmap(lambda one_round: jnp.einsum("BNTH,NHF->BNTF", query, one_round))
        rotated = rotate(rotation.astype(dtype))  # [rounds, B, N, T, factor / 2]
        half = rotated.shape[-1]
        # The argmax of [x; -x] is the entry of x with the largest magnitude, in the second half if it is negative.
        axis = jnp.argmax(jnp.abs(rotated), axis=-1, keepdims=True).astype(jnp.int32)
        is_opposite = (jnp.take_along_axis(rotated, axis, axis=-1) < 0)[..., 0]
        bucket = bucket * (2 * half) + axis[..., 0] + jnp.where(is_opposite, half, 0)
    return bucket


def _sorted(segment: Int[Array, "B T"], bucket: Int[Array, "rounds B N T"]) -> tuple[Array, _Places]:
    """Sorts the tokens of every round by segment, bucket and position; returns the order and the `_Places`."""
    segments = jnp.broadcast_to(segment[None, :, None], bucket.shape)
    position = jax.lax.broadcasted_iota(jnp.int32, bucket.shape, bucket.ndim - 1)
    *sorted_by, order = jax.lax.sort((segments, bucket, position), num_keys=3)
    rank = jnp.argsort(order, axis=-1).astype(jnp.int32)  # the inverse of the permutation `order`
    # Along the sorted sequence: where a new segment or bucket begins, the first position of each segment, and the
    # number of each bucket.
    new_segment, new_bucket = (jnp.pad(jnp.diff(x, axis=-1) != 0, ((0, 0),) * 3 + ((1, 0),)) for x in sorted_by)
    first = jax.lax.cummax(jnp.where(new_segment, position, 0), axis=position.ndim - 1)
    group = 1 + jnp.cumsum(new_segment | new_bucket, axis=-1, dtype=jnp.int32)
    first, group = (jnp.take_along_axis(x, rank, axis=-1) for x in (first, group))  # back in the order of tokens
    return order, _Places(rank, rank - first, jnp.where(segments == _HIDDEN_SEGMENT, 0, group))


def _reaches(query: _Places, key: _Places, chunk_size: int, is_causal: bool) -> Array:
    """Returns which queries reach which keys in every round, True for keys of the same bucket that are near enough.

    The places of queries and of keys, such as [rounds, B, N, T, 1] and [rounds, B, N, 1, T], are broadcast.
    """
    ranks_back = query.rank - key.rank
    if is_causal:  # within a bucket ranks are in order of position, so `ranks_back` counts earlier tokens of the bucket
        is_near = (ranks_back > 0) & (ranks_back <= chunk_size)
    else:
        chunks_back = query.rank_in_segment // chunk_size - key.rank_in_segment // chunk_size
        is_near = (ranks_back != 0) & (chunks_back >= 0) & (chunks_back <= 1)
    return is_near & (query.group == key.group) & (key.group > 0)


def _attend_in_chunks(
    query: Float[Array, "B N T H"],
    value: Float[Array, "B N T U"],
    order: Int[Array, "rounds B N T"],
    places: _Places,
    chunk_size: int,
    around: tuple[int, int],
    is_causal: bool,
    scale: float,
    dropout_rate: float,
    dropout_rng: Array | None,
) -> tuple[Float[Array, "B N T U"], Bool[Array, "B N T"]]:
    """Returns the output of the softmax over the union of all rounds, and which tokens reach no key.

    Args:
      query: queries, which are also the keys; T is a multiple of `chunk_size`.
      value: values.
      order: for each round, the index of the token at each place of the sorted sequence.
      places: places of the tokens in the sorted sequences.
      chunk_size: tokens in a chunk of a sorted sequence.
      around: how many chunks before and after its own a token looks at.
      is_causal: a token reaches earlier tokens only.
      scale: multiplies the logits.
      dropout_rate: probability of dropping a weight.
      dropout_rng: PRNG key; None disables dropout.
    """
    dtype = statistics_dtype(query)
    no_logit = hidden_logit(dtype)  # logit of unreached keys, and log_total of a round without keys

    def chunked(x: Array, axis: int) -> Array:
        """Splits an axis into chunks, [..., chunks, chunk_size, ...]."""
        return x.reshape(*x.shape[:axis], -1, chunk_size, *x.shape[axis + 1 :])

    @jax.checkpoint  # so that the logits of only one round are in memory, also in the backward pass
    def attend(this_round: Any) -> Any:
        """Returns log sum_j exp(logit_j), [B, N, T, 1], and output, [B, N, T, U], of each token in one round."""
        order, rank, index = this_round
        # Sort the tokens and cut them: X chunks, in which I indexes a query and J a key of the neighboring chunks.
        q, v = (chunked(_permuted(x, order, rank), 2) for x in (query, value))  # [B, N, X, I, H or U]
        in_chunks = _Places(*(chunked(jnp.take_along_axis(x, order[None], axis=-1), 3) for x in places))
        reached, num_rounds = _reached_in_chunks(in_chunks, index, chunk_size, around, is_causal)

        keys = _with_neighbors(q, 2, around)
        logits = jnp.einsum("BNXIH,BNXJH->BNXIJ", q, keys, preferred_element_type=dtype)
        # Keys have unit length, and a key that is reached in n rounds counts 1 / n in each of them.
        logits = logits * scale * _inverse_length(keys)[..., None, :] - jnp.log(num_rounds.astype(dtype))
        logits = jnp.where(reached, logits, no_logit)
        largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
        terms = jnp.where(reached, jnp.exp(logits - largest), 0)
        is_empty = ~reached.any(axis=-1)
        total = jnp.where(is_empty, 1, terms.sum(axis=-1))
        log_total = jnp.where(is_empty, no_logit, largest[..., 0] + jnp.log(total))

        terms = dropout(terms, dropout_rate, None if dropout_rng is None else jax.random.fold_in(dropout_rng, index))
        terms = (terms / total[..., None]).astype(value.dtype)
        out = jnp.einsum("BNXIJ,BNXJU->BNXIU", terms, _with_neighbors(v, 2, around), preferred_element_type=dtype)
        return tuple(_permuted(x.reshape(*rank.shape, -1), rank, order) for x in (log_total, out))  # unsorted

    log_total, out = jax.lax.map(attend, (order, places.rank, jnp.arange(order.shape[0])))
    return (jax.nn.softmax(log_total, axis=0) * out).sum(axis=0), (log_total == no_logit).all(axis=(0, -1))


def _reached_in_chunks(
    places: _Places, index: Array, chunk_size: int, around: tuple[int, int], is_causal: bool
) -> tuple[Array, Array]:
    """Returns which keys the queries of each chunk reach in round `index`, and in how many rounds (at least 1).

    `places` are in the order of this round, in chunks: each array is [rounds, B, N, chunks, chunk_size].
    """
    query_places = _Places(*(x[..., :, None] for x in places))
    key_places = _Places(*(_with_neighbors(x, 3, around)[..., None, :] for x in places))
    num_rounds = _reaches(query_places, key_places, chunk_size, is_causal).sum(axis=0, dtype=jnp.int32)
    query_places, key_places = (_Places(*(x[index] for x in places)) for places in (query_places, key_places))
    return _reaches(query_places, key_places, chunk_size, is_causal), jnp.maximum(num_rounds, 1)


def _lsh_weights(
    query: Float[Array, "B N T H"], places: _Places, chunk_size: int, is_causal: bool, scale: float
) -> Float[Array, "B N T T"]:
    """Computes the weights of `_attend_in_chunks` as a dense array: the softmax over the union of the rounds."""
    dtype = statistics_dtype(query)
    t = query.shape[2]
    query_places = _Places(*(x[..., :t, None] for x in places))
    key_places = _Places(*(x[..., None, :t] for x in places))
    reached = _reaches(query_places, key_places, chunk_size, is_causal).any(axis=0)
    logits = jnp.einsum("BNTH,BNSH->BNTS", query, query, preferred_element_type=dtype)
    return masked_softmax(logits * scale * _inverse_length(query)[..., None, :], reached)


def _inverse_length(x: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
    """Returns 1 / |x|, in float32 at least."""
    dtype = statistics_dtype(x)
    return jax.lax.rsqrt(jnp.square(x.astype(dtype)).sum(axis=-1) + 1e-12)  # finite for a vector of zeros


def _with_neighbors(chunks: Array, axis: int, around: tuple[int, int]) -> Array:
    """Concatenates each chunk along `axis` with `around` = (before, after) neighbors; zeros beyond the ends."""
    padding = [(0, 0)] * chunks.ndim
    padding[axis] = around
    padded, num_chunks = jnp.pad(chunks, padding), chunks.shape[axis]
    shifted = [jax.lax.slice_in_dim(padded, i, i + num_chunks, axis=axis) for i in range(sum(around) + 1)]
    return jnp.concatenate(shifted, axis=axis + 1)


@jax.custom_vjp
def _permuted(x: Float[Array, "B N T F"], order: Int[Array, "B N T"], inverse: Int[Array, "B N T"]) -> Array:
    """Moves token `order[i]` to index i. The gradient is a gather by `inverse` instead of a slower scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=2)


def _permuted_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    """Returns the permuted tokens, and the inverse permutation as the residual of the backward pass."""
    return _permuted(x, order, inverse), inverse


def _permuted_backward(inverse: Array, gradient: Array) -> tuple[Array, None, None]:
    """Moves the gradients back to the places of their tokens; the permutation itself has no gradient."""
    return jnp.take_along_axis(gradient, inverse[..., None], axis=2), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def visible_tokens(bias: Array | None, mask: Mask | None, batch: int, num_keys: int) -> Bool[Array, "B S"]:
    """Returns which keys the padding mask shows; raises ValueError for a bias or a mask of pairs."""
    if bias is not None:
        raise ValueError(
            "this attention takes no bias, because it computes the logits of few pairs only: pass bias=None, got shape "
            f"{bias.shape}"
        )
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"mask must be a padding mask, [B or 1, 1, 1, S], got shape {mask.shape}: a mask of pairs would take T x S "
            "memory; pass is_causal or segment_ids if the attention supports them"
        )
    return visible_keys(mask, batch, num_keys)


def _seeded(query: Array, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """Calls `lsh_attention` with the rotations of a fixed seed."""
    return lsh_attention(query, *arguments, rng=jax.random.key(seed), **options)


def _example(length: int) -> dict[str, Any]:
    """Returns options of LSH attention for sequences of `length` tokens."""
    chunk_size = min(64, max(length // 4, 1))
    num_buckets = lsh_num_buckets(length, chunk_size=chunk_size)
    return {"num_buckets": num_buckets[0] if len(num_buckets) == 1 else num_buckets, "chunk_size": chunk_size}


LSH = AttentionSpec(
    name="lsh",
    function=_seeded,
    reference="Reformer: Kitaev et al. (2020), section 2",
    options={
        "num_hashes": Option("rounds of hashing"),
        "num_buckets": Option("hash buckets, an even number; usual is 2 x length / chunk_size", required=True),
        "chunk_size": Option("tokens in a chunk of the sorted sequence"),
        "seed": Option("seed of the rotations, which are the same at every step", at_least=0, at_most=2**32 - 1),
    },
    example=_example,
    bias=False,
    cross=False,
    grouped_queries=False,
)
