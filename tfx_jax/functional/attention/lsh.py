"""Attention among tokens that hash alike, from the Reformer: locality-sensitive hashing (LSH)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dense import masked_softmax
from tfx_jax.functional.attention.masks import Mask, check_shapes, pair_of_segment_ids
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request, zeros_where_empty
from tfx_jax.functional.layers import dropout

_HIDDEN_SEGMENT = np.iinfo(np.int32).max


@weights_on_request
@divided_as_queries
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
    r"""Self-attention among tokens that a random rotation puts into the same bucket (Reformer).

    Section 2 of "Reformer: The Efficient Transformer" (Kitaev et al., 2020, https://arxiv.org/abs/2001.04451). A round
    of hashing gives every token the bucket argmax([qR; -qR]), sorts the tokens by (bucket, position), cuts them into
    chunks and lets each attend to the tokens of its bucket in its own chunk and in the one before. With P_i^(r) the
    keys that token i reaches in round r and N_ij the number of rounds in which it reaches key j, the rounds combine to

        o_i = sum_r exp(z_i^(r) - z_i) o_i^(r),  z_i^(r) = log sum_{j in P_i^(r)} exp(scale * q_i . k_j - log N_ij),

    which is the softmax over the union of all P_i^(r): a key found twice counts once.

    Sorting takes O(T log T), and hashing a token into n buckets O(n) with one factor, O(sqrt(n)) with two and O(log n)
    with factors of two.

    **Shared queries and keys.** A key is the query of its token at unit length, k_j = q_j / |q_j|, so that both hash
    alike. Pass the queries as `key`: the argument is there for the common signature and its values are not read.
    Because q_i . k_i would win every softmax, a token attends to itself only when it sees nothing else.

    **Causality.** As published, later tokens decide where the borders of the chunks fall, and so whether a query
    reaches `chunk_size` or up to 2 * chunk_size - 1 earlier tokens of its bucket: the future leaks into what it sees.
    With `is_causal` a query therefore reaches exactly the last `chunk_size` earlier tokens of its bucket, which costs
    the same. Nothing later then changes its output but for rounding: terms may be added in another order.

    **Padding and packing.** Chunks are counted from the first visible token of each segment, and the number of buckets
    is given. So a text gets the same output alone, padded on any side, beside other texts in a batch or packed with
    them, and with `is_causal` a prefix of it does too. Rounding aside: a token on the border of a bucket may cross it.

    The gradient is a `jax.custom_vjp`: there is no `jax.jvp` of this function itself.

    Args:
      query: queries, [B, T, N, H], keys at the same time.
      key: not read, [B, T, K, H].
      value: values, [B, T, K, U]; K divides N, and query head n reads value head n // (N / K).
      bias: refused; logits exist for the pairs of one bucket only.
      mask: True for the tokens that may be seen, [B or 1, 1, 1, T]. A hidden token is hidden as a query too: it leaves
        the sorted order, gets a zero output and changes that of no other token.
      rng: PRNG key of the rotations. The paper draws new ones at every step; a fixed one makes evaluation repeatable.
      num_buckets: an even number, or 1; a tuple of them is hashed factor by factor and means their product, which
        takes less work than one rotation into very many buckets. `lsh_num_buckets` gives the usual number for texts of
        a given length. Models need one number for texts of all lengths: another number is another hash.
      num_hashes: rounds; more of them find more of the near keys. The paper trains with 4 and evaluates with 8.
      chunk_size: tokens in a chunk of the sorted sequence.
      is_causal: a token sees itself and earlier ones only.
      scale: multiplies the logits; None means 1 / sqrt(H). The authors' code passes 1.
      segment_ids: packed sequences, [B, T]; tokens see their own segment, and segment 0 is padding. Without `is_causal`
        this doubles the keys that are compared, because chunks then begin anywhere.
      dropout_rate: probability in [0, 1) of dropping an attention weight, drawn for each round.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights, before dropout, as a dense array with zeros outside the buckets.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      [B, N, T, T], float32 (float64 for float64 inputs) as all logits and statistics are.

    Raises:
      ValueError: if the sizes do not fit together, `key` has another length than `query`, `mask` is over pairs, `bias`
        is given, or a number of hashes, buckets or tokens cannot be.

    >>> hashing = {"num_buckets": 8, "chunk_size": 16, "is_causal": True}
    >>> attend = jax.jit(lambda x, rng: lsh_attention(x, x, x, rng=rng, **hashing))
    >>> attend(jnp.ones((1, 100, 2, 8)), jax.random.key(0)).shape
    (1, 100, 2, 8)
    """
    check_shapes(query, key, value, None, mask)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"LSH attention is self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys"
        )
    if num_hashes < 1 or chunk_size < 1:
        raise ValueError(f"num_hashes and chunk_size must be at least 1, got {num_hashes} and {chunk_size}")
    b, t, n, h = query.shape
    factors = _bucket_factors(num_buckets)
    scale = 1 / math.sqrt(h) if scale is None else scale
    chunk_size = min(chunk_size, t)
    visible, segment = visible_tokens(bias, mask, b, t), jnp.zeros((b, t), jnp.int32)
    if isinstance(segment_ids, tuple):
        raise ValueError("a token is query and key at once: segment_ids must be one array, [B, T], not a pair")
    if segment_ids is not None:
        segment = pair_of_segment_ids(segment_ids, b, t, t)[0].astype(jnp.int32)
        visible = visible & (segment != 0)

    value = jnp.repeat(value, n // value.shape[2], axis=2)
    # A chunk and the one before it; where chunks begin at any place of the array, also parts of those beside the two.
    around = (2, 1) if segment_ids is not None and not is_causal else (1, 0)

    # Hidden tokens, and those that fill the last chunk, are sorted behind all others.
    excess = -t % chunk_size
    query, value = (jnp.pad(x, ((0, 0), (0, excess), (0, 0), (0, 0))).swapaxes(1, 2) for x in (query, value))
    segment = jnp.pad(
        jnp.where(visible, segment, _HIDDEN_SEGMENT), ((0, 0), (0, excess)), constant_values=_HIDDEN_SEGMENT
    )
    order, places = _sorted(segment, _buckets(query, _rotations(rng, num_hashes, n, h, factors)))
    out, is_alone = _attend_in_chunks(
        query, value, order, places, chunk_size, around, is_causal, scale, dropout_rate, dropout_rng
    )

    alone_rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, num_hashes)
    itself = (is_alone & (segment != _HIDDEN_SEGMENT)[:, None])[..., None].astype(out.dtype)
    out = out + dropout(itself, dropout_rate, alone_rng) * value.astype(out.dtype)
    out = out[:, :, :t].swapaxes(1, 2).astype(query.dtype)
    if not return_weights:
        return out
    weights = _lsh_weights(query[:, :, :t], places, chunk_size, is_causal, scale)
    return out, weights + itself[:, :, :t] * jnp.eye(t, dtype=weights.dtype)[None, None]


def lsh_num_buckets(length: int, *, chunk_size: int) -> tuple[int, ...]:
    """Returns the number of buckets for which tokens of one text fill half a chunk on average, as factors.

    Args:
      length: the tokens of a typical or longest text. Not the length of an array: padding would change the hashes.
      chunk_size: as in `lsh_attention`.

    Returns:
      2 * length / chunk_size, rounded up to a power of two; in two factors when above 128.

    >>> lsh_num_buckets(1_000, chunk_size=64), lsh_num_buckets(65_536, chunk_size=64)
    ((32,), (32, 64))
    """
    bits = math.ceil(math.log2(max(1.0, 2 * length / chunk_size)))
    return (2**bits,) if bits <= 7 else (2 ** (bits // 2), 2 ** (bits - bits // 2))


class _Places(NamedTuple):
    """Where the rounds of hashing put the tokens; each array is [rounds, B, N, T]."""

    rank: Array
    """The place of each token in the sorted sequence."""
    rank_in_segment: Array
    """The same, counted from the first token of its segment."""
    group: Array
    """One number for each bucket of each segment, from 1; 0 for hidden tokens."""


def _bucket_factors(num_buckets: int | tuple[int, ...]) -> tuple[int, ...]:
    factors = num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)
    if any(factor < 1 or (factor > 1 and factor % 2) for factor in factors):
        raise ValueError(f"num_buckets must be 1 or even (a rotated axis and its opposite), got {num_buckets}")
    return factors


def _rotations(rng: Array, num_hashes: int, num_heads: int, head_size: int, factors: tuple[int, ...]) -> list[Array]:
    """For each factor of the number of buckets, [rounds, N, H, factor / 2]."""
    shapes = [(num_hashes, num_heads, head_size, factor // 2) for factor in factors if factor > 1]
    return [jax.random.normal(jax.random.fold_in(rng, i), shape, jnp.float32) for i, shape in enumerate(shapes)]


def _buckets(query: Float[Array, "B N T H"], rotations: list[Array]) -> Int[Array, "rounds B N T"]:
    """argmax([qR; -qR]) for each factor, as the digits of one number."""
    dtype = np.promote_types(query.dtype, np.float32)
    query = jax.lax.stop_gradient(query.astype(dtype))
    bucket = jnp.zeros((1, *query.shape[:3]), jnp.int32)
    for rotation in rotations:
        rotated = jax.vmap(lambda one: jnp.einsum("BNTH,NHF->BNTF", query, one))(rotation.astype(dtype))
        half = rotated.shape[-1]
        axis = jnp.argmax(jnp.abs(rotated), axis=-1, keepdims=True).astype(jnp.int32)
        is_opposite = (jnp.take_along_axis(rotated, axis, axis=-1) < 0)[..., 0]
        bucket = bucket * (2 * half) + axis[..., 0] + jnp.where(is_opposite, half, 0)
    return bucket


def _sorted(segment: Int[Array, "B T"], bucket: Int[Array, "rounds B N T"]) -> tuple[Array, _Places]:
    """The tokens of every round in the order of segment, bucket and position, and the place of each."""
    segments = jnp.broadcast_to(segment[None, :, None], bucket.shape)
    position = jax.lax.broadcasted_iota(jnp.int32, bucket.shape, bucket.ndim - 1)
    *sorted_by, order = jax.lax.sort((segments, bucket, position), num_keys=3)
    rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
    changes = [jnp.pad(jnp.diff(x, axis=-1) != 0, ((0, 0),) * 3 + ((1, 0),)) for x in sorted_by]
    first = jax.lax.cummax(jnp.where(changes[0], position, 0), axis=position.ndim - 1)
    group = 1 + jnp.cumsum(changes[0] | changes[1], axis=-1, dtype=jnp.int32)
    first, group = (jnp.take_along_axis(x, rank, axis=-1) for x in (first, group))
    return order, _Places(rank, rank - first, jnp.where(segments == _HIDDEN_SEGMENT, 0, group))


def _reaches(query: _Places, key: _Places, chunk_size: int, is_causal: bool) -> Array:
    """Whether queries reach keys, in every round; the places are broadcast against each other."""
    back = query.rank - key.rank
    if is_causal:  # ranks count the tokens of the bucket in between, all of them earlier than the query
        near = (back > 0) & (back <= chunk_size)
    else:
        chunks_back = query.rank_in_segment // chunk_size - key.rank_in_segment // chunk_size
        near = (back != 0) & (chunks_back >= 0) & (chunks_back <= 1)
    return near & (query.group == key.group) & (key.group > 0)


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
    """The softmax over the union of all rounds, and which tokens it leaves without a key."""
    dtype = np.promote_types(query.dtype, np.float32)
    nothing = 0.7 * jnp.finfo(dtype).min

    def chunked(x: Array, axis: int) -> Array:
        return x.reshape(*x.shape[:axis], -1, chunk_size, *x.shape[axis + 1 :])

    @jax.checkpoint  # the logits of one round live at a time, in the backward pass as well
    def attend(this_round: Any) -> Any:
        order, rank, index = this_round
        q, v = (chunked(_permuted(x, order, rank), 2) for x in (query, value))
        in_chunks = _Places(*(chunked(jnp.take_along_axis(x, order[None], axis=-1), 3) for x in places))
        seen, times = _reached_in_chunks(in_chunks, index, chunk_size, around, is_causal)

        keys = _with_neighbors(q, 2, around)
        logits = jnp.einsum("BNXIH,BNXJH->BNXIJ", q, keys, preferred_element_type=dtype)
        logits = logits * scale * _inverse_length(keys)[..., None, :] - jnp.log(times.astype(dtype))
        logits = jnp.where(seen, logits, nothing)
        largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
        terms = jnp.where(seen, jnp.exp(logits - largest), 0)
        is_empty = ~seen.any(axis=-1)
        total = jnp.where(is_empty, 1, terms.sum(axis=-1))
        z = jnp.where(is_empty, nothing, largest[..., 0] + jnp.log(total))

        terms = dropout(terms, dropout_rate, None if dropout_rng is None else jax.random.fold_in(dropout_rng, index))
        terms = (terms / total[..., None]).astype(value.dtype)
        out = jnp.einsum("BNXIJ,BNXJU->BNXIU", terms, _with_neighbors(v, 2, around), preferred_element_type=dtype)
        return tuple(_permuted(x.reshape(*rank.shape, -1), rank, order) for x in (z, out))

    z, out = jax.lax.map(attend, (order, places.rank, jnp.arange(order.shape[0])))
    return (jax.nn.softmax(z, axis=0) * out).sum(axis=0), (z == nothing).all(axis=(0, -1))


def _reached_in_chunks(
    places: _Places, index: Array, chunk_size: int, around: tuple[int, int], is_causal: bool
) -> tuple[Array, Array]:
    """Which keys the queries of each chunk reach in round `index`, and in how many rounds (at least 1)."""
    of_queries = _Places(*(x[..., :, None] for x in places))
    of_keys = _Places(*(_with_neighbors(x, 3, around)[..., None, :] for x in places))
    times = _reaches(of_queries, of_keys, chunk_size, is_causal).sum(axis=0, dtype=jnp.int32)
    of_queries, of_keys = (_Places(*(x[index] for x in places)) for places in (of_queries, of_keys))
    return _reaches(of_queries, of_keys, chunk_size, is_causal), jnp.maximum(times, 1)


def _lsh_weights(
    query: Float[Array, "B N T H"], places: _Places, chunk_size: int, is_causal: bool, scale: float
) -> Float[Array, "B N T T"]:
    """The map that `_attend_in_chunks` applies, computed directly as the softmax over the union of the rounds."""
    dtype = np.promote_types(query.dtype, np.float32)
    t = query.shape[2]
    of_queries = _Places(*(x[..., :t, None] for x in places))
    of_keys = _Places(*(x[..., None, :t] for x in places))
    seen = _reaches(of_queries, of_keys, chunk_size, is_causal).any(axis=0)
    logits = jnp.einsum("BNTH,BNSH->BNTS", query, query, preferred_element_type=dtype)
    return masked_softmax(logits * scale * _inverse_length(query)[..., None, :], seen)


def _inverse_length(x: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
    dtype = np.promote_types(x.dtype, np.float32)
    return jax.lax.rsqrt(jnp.square(x.astype(dtype)).sum(axis=-1) + 1e-12)  # finite for a vector of zeros


def _with_neighbors(chunks: Array, axis: int, around: tuple[int, int]) -> Array:
    """Each chunk (along `axis`) between as many as `around` says before and after it; zeros beyond the ends."""
    padding = [(0, 0)] * chunks.ndim
    padding[axis] = around
    padded, num_chunks = jnp.pad(chunks, padding), chunks.shape[axis]
    shifted = [jax.lax.slice_in_dim(padded, i, i + num_chunks, axis=axis) for i in range(sum(around) + 1)]
    return jnp.concatenate(shifted, axis=axis + 1)


@jax.custom_vjp
def _permuted(x: Float[Array, "B N T F"], order: Int[Array, "B N T"], inverse: Int[Array, "B N T"]) -> Array:
    """Puts token `order[i]` at place i. The gradient is a gather too, where that of a general gather is a scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=2)


def _permuted_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return _permuted(x, order, inverse), inverse


def _permuted_backward(inverse: Array, gradient: Array) -> tuple[Array, None, None]:
    return jnp.take_along_axis(gradient, inverse[..., None], axis=2), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def visible_tokens(bias: Array | None, mask: Mask | None, batch: int, num_keys: int) -> Bool[Array, "B S"]:
    """Which keys may be seen by anyone."""
    if bias is not None:
        raise ValueError(f"a bias is for pairs, of which only a few are ever looked at here; got shape {bias.shape}")
    if mask is None:
        return jnp.ones((batch, num_keys), jnp.bool_)
    if mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"mask must hide whole tokens, [B or 1, 1, 1, S], got shape {mask.shape}: a mask of pairs would be an array"
            " of T x S; pass is_causal or segment_ids, where the attention takes them"
        )
    return jnp.broadcast_to(mask[:, 0, 0], (batch, num_keys))


def _seeded(query: Array, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    """`lsh_attention` with the same rotations at every step."""
    return lsh_attention(query, *arguments, rng=jax.random.key(seed), **options)


def _example(length: int) -> dict[str, Any]:
    chunk_size = min(64, max(length // 4, 1))
    num_buckets = lsh_num_buckets(length, chunk_size=chunk_size)
    return {"num_buckets": num_buckets[0] if len(num_buckets) == 1 else num_buckets, "chunk_size": chunk_size}


LSH = AttentionSpec(
    name="lsh",
    function=_seeded,
    reference="Reformer: Kitaev et al. (2020), section 2",
    options={
        "num_hashes": Option("rounds of hashing"),
        "num_buckets": Option(
            "buckets of each round, even; 2 x length / chunk_size fill half a chunk each", required=True
        ),
        "chunk_size": Option("tokens computed together"),
        "seed": Option("seed of the rotations, the same at every step", at_least=0, at_most=2**32 - 1),
    },
    example=_example,
    bias=False,
    cross=False,
    grouped_queries=False,
)
