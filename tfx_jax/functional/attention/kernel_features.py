"""Attention in linear time: feature maps instead of the exponential (Performer, linear attention).

If the weight of a key is a dot product of features, phi(q) . phi(k), the sums over keys are computed once for all
queries: (Q' K'^T) V = Q' (K'^T V). Features are represented by their logarithms, and each sum over keys is divided by
the largest value of each feature. So nothing overflows, the largest key of a feature never underflows, and hidden or
future keys do not even change the rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    check_integers,
    check_shapes,
    refuse_segment_ids,
    shard_like_query,
    statistics_dtype,
    visible_keys,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option, RecurrentDecoding


@jax.custom_batching.custom_vmap
def orthogonal_of_normal(normal: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """Turns a matrix of independent normals into a uniformly distributed orthogonal matrix (Mezzadri, 2007).

    Under `jax.vmap` the matrices are computed one after the other. On CPUs jaxlib 0.10.2 (`ParallelBatchMap`) divides a
    batched QR among the threads of a pool and waits in one of these threads: as many batches at once as there are
    threads, such as the weights of two layers on two cores, deadlock.

    Args:
      normal: a sample of N(0, 1) for each element, [D, D].

    Returns:
      [D, D] in the dtype of `normal`.

    >>> rotation = orthogonal_of_normal(jax.random.normal(jax.random.key(0), (3, 3)))
    >>> bool(jnp.abs(rotation @ rotation.T - jnp.eye(3)).max() < 1e-5)
    True
    """
    basis, triangle = jnp.linalg.qr(normal)
    # QR fixes the signs by convention. Multiplied by the signs of R's diagonal, the distribution becomes uniform.
    return basis * jnp.sign(jnp.diagonal(triangle))[None]


@orthogonal_of_normal.def_vmap
def _one_by_one(axis_size: int, in_batched: Any, normals: Float[Array, "B D D"]) -> tuple[Float[Array, "B D D"], bool]:
    """Returns the matrices of a batch, and that the result is batched, as `custom_vmap` requires."""
    del axis_size, in_batched  # there is one argument, and it is batched whenever this is called
    return jax.lax.map(orthogonal_of_normal, normals), True


# As multiples of the largest float: the log-features of hidden keys, and the smallest reference of a sum. They differ
# so much that exp(hidden - reference) is 0. Both are finite, because infinities would make gradients NaN.
_HIDDEN, _LEAST = -0.7, -0.3

LogFeaturesFn = Callable[[Float[Array, "*batch H"]], Float[Array, "*batch M"]]
"""Maps vectors to the logarithms of their features."""


def orthogonal_features(rng: Array, num_features: int, size: int) -> Float[Array, "M H"]:
    """Samples normal vectors that are orthogonal to each other within blocks of `size` rows.

    The "O" of FAVOR+ (Choromanski et al., 2021, https://arxiv.org/abs/2009.14794). Each row is a sample of N(0, I), so
    estimates stay unbiased. Together the rows cover the directions more evenly than independent rows,
    `jax.random.normal(rng, (M, H))`, which reduces the variance.

    Args:
      rng: PRNG key.
      num_features: M, the number of rows; the paper recommends about H log H.
      size: H, the length of a row.

    Returns:
      float32, [M, H].

    >>> rows = np.asarray(jax.jit(orthogonal_features, static_argnums=(1, 2))(jax.random.key(0), 4, 4))
    >>> bool(np.abs(rows @ rows.T - np.diag(np.square(rows).sum(axis=1))).max() < 1e-5)
    True
    """
    if num_features < 1 or size < 1:
        raise ValueError(f"num_features and size must be at least 1, got {num_features} and {size}")
    rng_directions, rng_lengths = jax.random.split(rng)
    num_blocks = -(-num_features // size)
    normal = jax.random.normal(rng_directions, (num_blocks, size, size))
    directions = jax.vmap(orthogonal_of_normal)(normal).mT.reshape(num_blocks * size, size)[:num_features]
    lengths = jnp.linalg.norm(jax.random.normal(rng_lengths, (num_features, size)), axis=1, keepdims=True)
    return directions * lengths


def log_softmax_features(x: Float[Array, "*batch H"], projection: Float[Array, "M H"]) -> Float[Array, "*batch M"]:
    """Computes log phi(x) = W x - |x|^2 / 2 - log(M) / 2, the positive random features of the softmax kernel.

    E[phi(x) . phi(y)] = exp(x . y) for rows of W from N(0, I): lemma 1 of Choromanski et al. (2021,
    https://arxiv.org/abs/2009.14794).

    >>> log_softmax_features(jnp.array([2.0, 0.0]), jnp.array([[1.0, 5.0]])).tolist()
    [0.0]
    """
    projected = jnp.einsum("...H,MH->...M", x, projection.astype(x.dtype))
    return projected - 0.5 * jnp.square(x).sum(axis=-1, keepdims=True) - 0.5 * math.log(projection.shape[0])


def log_elu_features(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Computes log(elu(x) + 1), the features of Katharopoulos et al. (2020, equation 7).

    >>> log_elu_features(jnp.array([-3.0, 0.0])).tolist()
    [-3.0, 0.0]
    """
    return jnp.minimum(x, 0) + jnp.log1p(jnp.maximum(x, 0))


@weights_on_request
@shard_like_query
@zeros_where_empty
def favor_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    projection: Float[Array, "M H"],
    is_causal: bool = False,
    scale: float | None = None,
    block_size: int = 128,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Estimates softmax(scale * Q K^T) V in time linear in T and S, with random features: FAVOR+.

    The Performer of Choromanski et al. (2021, https://arxiv.org/abs/2009.14794): `linear_attention` with the features
    phi(x) = exp(W x - |x|^2 / 2) / sqrt(M) of x = sqrt(scale) q and x = sqrt(scale) k. The estimate of the kernel is
    unbiased with relative variance (exp(|x + y|^2) - 1) / M: accurate for vectors of about unit length, useless for
    long ones. `recurrent_decoding` decodes with sums of constant size.

    Args:
      query: [B, T, N, H]. Arguments without explanation are those of `linear_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: must be None.
      mask: padding, [B or 1, 1, 1, S].
      projection: W, [M, H], from `orthogonal_features`. It is not learned; resample it from time to time.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the estimated logits; None means 1 / sqrt(H).
      block_size: as in `linear_attention`.
      segment_ids: must be None.
      dropout_rate: must be 0.
      dropout_rng: unused.
      return_weights: also return the weights, dense.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, S].

    Raises:
      ValueError: if `projection` has the wrong shape, or in the cases of `linear_attention`.

    >>> @jax.jit
    ... def attend(x, rng):
    ...     return favor_attention(x, x, x, projection=orthogonal_features(rng, 16, 4))
    >>> attend(jnp.ones((1, 3, 2, 4)), jax.random.key(0)).shape
    (1, 3, 2, 4)
    """
    size = query.shape[-1]
    if projection.ndim != 2 or projection.shape[1] != size:
        raise ValueError(f"projection must have shape [M, H] with H = {size}, got {projection.shape}")
    return linear_attention(
        query,
        key,
        value,
        bias,
        mask,
        log_features_fn=functools.partial(log_softmax_features, projection=projection),
        is_causal=is_causal,
        scale=size**-0.5 if scale is None else scale,
        block_size=block_size,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )


@weights_on_request
@shard_like_query
@zeros_where_empty
def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    log_features_fn: LogFeaturesFn = log_elu_features,
    is_causal: bool = False,
    scale: float | None = None,
    block_size: int = 128,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes diag(Q' (K'^T 1))^-1 Q' (K'^T V) with Q' = phi(Q) and K' = phi(K), in time linear in T and S.

    Equations 4 to 6 of "Transformers are RNNs" (Katharopoulos et al., 2020, https://arxiv.org/abs/2006.16236), and the
    causal equation 9 in blocks: pairwise inside a block, and a running sum over the earlier blocks.
    `recurrent_decoding` decodes with sums of constant size.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S], True for visible keys. A query that sees no key gets zeros.
      log_features_fn: maps [*batch, H] to the logarithms of M positive features, [*batch, M]; elu(x) + 1 by default.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: queries and keys are multiplied by sqrt(scale) before the feature map; None means 1, as in the paper.
      block_size: tokens in a causal block, a power of two. The backward pass stores M * U numbers per block.
      segment_ids: must be None, because the sums run over all keys of a row.
      dropout_rate: must be 0, because no weights are computed that could be dropped. Drop the output instead.
      dropout_rng: unused; part of the common signature.
      return_weights: also return the weights, as dense attention would have them: quadratic in memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, S].
      Features and sums are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, the mask is not a padding mask, or an option is out of range.

    >>> x = jnp.array([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    >>> jax.jit(lambda x: linear_attention(0 * x, 0 * x, x, is_causal=True))(x).ravel().tolist()
    [0.0, 0.5, 1.0]
    """
    check_shapes(query, key, value, bias, mask)
    refuse_segment_ids(segment_ids, "linear attention")
    _check_options(bias, mask, scale, block_size, dropout_rate)
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    dtype = statistics_dtype(query)
    log_query_fn, log_key_fn = _log_features(log_features_fn, scale)

    # Heads come first from here on, and the G queries of a key head are next to each other: [B, K, T, G, H].
    visible = visible_keys(mask, b, s)
    query_heads = query.reshape(b, t, k, n // k, -1).transpose(0, 2, 1, 3, 4)
    key_heads, value_heads = key.swapaxes(1, 2), _value_heads(value, visible, dtype)

    def attend(values: Float[Array, "B K S Z"]) -> Float[Array, "B T N Z"]:
        """Computes the weighted means of any values."""
        if is_causal:
            out = _causal(query_heads, key_heads, values, visible, log_query_fn, log_key_fn, block_size)
        else:
            log_key = log_key_fn(key_heads, visible)
            sums = _extended(_no_keys(log_key, values), log_key, values)
            out = _quotient(_read(log_query_fn(query_heads), sums))
        return out.transpose(0, 2, 1, 3, 4).reshape(b, t, n, -1)

    out = attend(value_heads).astype(query.dtype)
    if not return_weights:
        return out
    # The output is linear in the values, so the weights are the outputs for unit vectors as values.
    weights = attend(jnp.broadcast_to(jnp.eye(s, dtype=dtype), (b, k, s, s)))
    return out, weights.swapaxes(1, 2)


def _value_heads(value: Float[Array, "B S K U"], visible: Bool[Array, "B S"], dtype: DTypeLike) -> Array:
    """Returns values as [B, K, S, U], with 0 for hidden ones, which may hold NaN."""
    return jnp.where(visible[..., None, None], value, 0).swapaxes(1, 2).astype(dtype)


def _log_features(
    log_features_fn: LogFeaturesFn, scale: float | None
) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    """Returns (log_query_fn, log_key_fn), which compute log-features.

    `log_query_fn(x)` scales queries, [..., H], and `log_key_fn(x, visible)` keys, [B, K, S, H]; hidden keys, for which
    `visible`, [B, S], is False, get features of 0.
    """
    root = 1.0 if scale is None else math.sqrt(scale)

    def log_query_fn(x: Array) -> Array:
        return log_features_fn(x.astype(statistics_dtype(x)) * root)

    def log_key_fn(x: Array, visible: Array) -> Array:
        log_key = log_query_fn(x)
        return jnp.where(visible[:, None, :, None], log_key, _HIDDEN * jnp.finfo(log_key.dtype).max)

    return log_query_fn, log_key_fn


def _decode(log_features_fn: LogFeaturesFn, scale: float | None) -> RecurrentDecoding:
    """Returns decoding whose state is the `_Sums` over all keys so far."""
    log_query_fn, log_key_fn = _log_features(log_features_fn, scale)

    def read(key: Array, value: Array, mask: Mask | None) -> _Sums:
        """Returns the sums over the keys of a prompt, [B, S, K, H], which may be empty."""
        (b, s, k, h), u = key.shape, value.shape[-1]
        visible = visible_keys(mask, b, s)
        # Features of a key of zeros, [B, K, 1, M], only for shape and dtype of the sums.
        log_features = log_query_fn(jnp.zeros((b, k, 1, h), key.dtype))
        sums = _no_keys(log_features, jnp.zeros((b, k, 1, u), log_features.dtype))
        if not s:
            return sums
        value_heads = _value_heads(value, visible, log_features.dtype)
        return _extended(sums, log_key_fn(key.swapaxes(1, 2), visible), value_heads)

    def step(sums: _Sums, query: Array, key: Array, value: Array) -> tuple[Array, _Sums]:
        """Returns the output of one token, [B, 1, N, U], and the sums extended by it."""
        (b, _, n, h), k = query.shape, key.shape[2]
        sums = _extended(sums, log_query_fn(key.swapaxes(1, 2)), value.swapaxes(1, 2).astype(sums.ones.dtype))
        answers = _read(log_query_fn(query.reshape(b, k, 1, n // k, h)), sums)
        return _quotient(answers).reshape(b, 1, n, -1).astype(query.dtype), sums

    return RecurrentDecoding(read, step)


class _Sums(NamedTuple):
    """Sums over a set of keys of phi(k) v^T (`values`) and of phi(k) (`ones`), both divided by exp(reference).

    `ones` is what `values` would be with the number 1 in place of each value: the denominator of the weighted mean.
    """

    reference: Float[Array, "*batch M"]
    """The largest log phi(k) of each feature. That key contributes exp(0), so `ones` is at least 1."""
    values: Float[Array, "*batch M U"]
    ones: Float[Array, "*batch M"]


class _Answers(NamedTuple):
    """Numerator and denominator of the output of queries over a set of keys, both divided by exp(log_scale)."""

    log_scale: Float[Array, "*batch T G"]
    numerator: Float[Array, "*batch T G U"]
    denominator: Float[Array, "*batch T G"]


def _no_keys(log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]) -> _Sums:
    """Returns the sums over no keys, computed from the arguments so that they vary over the same shard_map axes."""
    feature_zeros, value_zeros = jnp.zeros_like(log_key[..., 0, :]), jnp.zeros_like(value[..., 0, :])
    reference = feature_zeros + _LEAST * jnp.finfo(feature_zeros.dtype).max
    return _Sums(reference, feature_zeros[..., :, None] * value_zeros[..., None, :], feature_zeros)


def _largest(log_key: Float[Array, "*batch S M"]) -> Float[Array, "*batch M"]:
    """Returns the reference of a sum over these keys; references cancel in the quotient, so they need no gradient."""
    largest = jax.lax.stop_gradient(log_key).max(axis=-2)
    return jnp.maximum(largest, _LEAST * jnp.finfo(largest.dtype).max)


def _extended(sums: _Sums, log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]) -> _Sums:
    """Returns the sums extended by more keys and values."""
    reference = jnp.maximum(sums.reference, _largest(log_key))
    decay = jnp.exp(sums.reference - reference)  # of the sums so far, which used a smaller reference
    features = jnp.exp(log_key - reference[..., None, :])
    values = sums.values * decay[..., None] + jnp.einsum("...SM,...SU->...MU", features, value)
    return _Sums(reference, values, sums.ones * decay + features.sum(axis=-2))


def _query_features(
    log_query: Float[Array, "*batch T G M"], reference: Float[Array, "*batch M"]
) -> tuple[Float[Array, "*batch T G"], Float[Array, "*batch T G M"]]:
    """Returns (log_scale, features): phi(q) exp(reference) = exp(log_scale) * features, the largest feature being 1."""
    log_query = log_query + reference[..., None, None, :]
    log_scale = jax.lax.stop_gradient(log_query).max(axis=-1)
    return log_scale, jnp.exp(log_query - log_scale[..., None])


def _read(log_query: Float[Array, "*batch T G M"], sums: _Sums) -> _Answers:
    """Returns the answers of queries that see all keys of the sums."""
    log_scale, features = _query_features(log_query, sums.reference)
    numerator = jnp.einsum("...TGM,...MU->...TGU", features, sums.values)
    return _Answers(log_scale, numerator, jnp.einsum("...TGM,...M->...TG", features, sums.ones))


def _read_pairs(
    log_query: Float[Array, "*batch T G M"], log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]
) -> _Answers:
    """Returns the answers of queries that see all of these keys, pair by pair: faster than sums if S < M."""
    reference = _largest(log_key)
    log_scale, features = _query_features(log_query, reference)
    weights = jnp.einsum("...TGM,...SM->...TGS", features, jnp.exp(log_key - reference[..., None, :]))
    return _Answers(log_scale, jnp.einsum("...TGS,...SU->...TGU", weights, value), weights.sum(axis=-1))


def _read_past(
    log_query: Float[Array, "B K P T G M"], log_key: Float[Array, "B K P T M"], value: Float[Array, "B K P T U"]
) -> _Answers:
    """Returns the answers of queries that see keys up to their own position, in each of P parts of T tokens.

    T is a power of two. A reference taken over a whole part would let future keys change the rounding. So each part is
    split: the second half sees all keys of the first half, whose maximum is a valid reference, and both halves recurse.
    """
    b, k, p, t = log_key.shape[:4]
    if t == 1:
        return _read_pairs(log_query, log_key, value)

    log_query, log_key, value = (x.reshape(b, k, 2 * p, t // 2, *x.shape[4:]) for x in (log_query, log_key, value))
    # Along the axis of parts, even indices are now first halves and odd indices are second halves.
    same_half = _read_past(log_query, log_key, value)  # answers from the keys of the query's own half
    other_half = _read_pairs(log_query[:, :, 1::2], log_key[:, :, ::2], value[:, :, ::2])  # second reads first
    first = _Answers(*(x[:, :, ::2] for x in same_half))
    second = _merged(_Answers(*(x[:, :, 1::2] for x in same_half)), other_half)
    return _Answers(*(jnp.concatenate(halves, axis=3) for halves in zip(first, second, strict=True)))


def _merged(some: _Answers, others: _Answers) -> _Answers:
    """Merges the answers of the same queries over two disjoint sets of keys."""
    # Numerators and denominators are divided by exp(log_scale): bring both to the larger scale, then add.
    log_scale = jnp.maximum(some.log_scale, others.log_scale)
    factor, other_factor = (jnp.exp(x.log_scale - log_scale) for x in (some, others))
    numerator = some.numerator * factor[..., None] + others.numerator * other_factor[..., None]
    return _Answers(log_scale, numerator, some.denominator * factor + others.denominator * other_factor)


def _quotient(answers: _Answers) -> Float[Array, "*batch T G U"]:
    """Divides numerator by denominator, which is 0 for queries without keys and at least 1 for all others."""
    denominator = jnp.where(answers.denominator > 0, answers.denominator, jnp.ones((), answers.denominator.dtype))
    return answers.numerator / denominator[..., None]


def _causal(
    query: Float[Array, "B K T G H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S U"],
    visible: Bool[Array, "B S"],
    log_query_fn: Callable[[Array], Array],
    log_key_fn: Callable[[Array, Array], Array],
    block_size: int,
) -> Float[Array, "B K T G U"]:
    """Computes causal linear attention by a scan over blocks whose carry is the sums over all earlier blocks.

    The last query is at the position of the last key. `visible` is False for padding; the functions are those of
    `_log_features`; `block_size` is a power of two.
    """
    num_queries, longest = query.shape[2], max(query.shape[2], key.shape[2])
    block_size = min(block_size, 1 << (longest - 1).bit_length())  # at most the next power of two
    num_blocks = -(-longest // block_size)

    def blocks(x: Array, axis: int) -> Array:
        """Cuts an axis into blocks, [num_blocks, ..., block_size, ...], padded in front to align the last tokens."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (num_blocks * block_size - x.shape[axis], 0)
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], num_blocks, block_size, *x.shape[axis + 1 :]), axis, 0)

    def step(sums: _Sums, block: tuple[Array, ...]) -> tuple[_Sums, Array]:
        """Returns the sums extended by a block, and the outputs of its queries."""
        query, key, value, visible = block
        log_query, log_key = log_query_fn(query), log_key_fn(key, visible)
        in_block = _read_past(*(x[:, :, None] for x in (log_query, log_key, value)))  # the block is one part
        in_block = _Answers(*(x[:, :, 0] for x in in_block))
        answers = _merged(in_block, _read(log_query, sums))  # of the block itself and of earlier ones
        return _extended(sums, log_key, value), _quotient(answers)

    sums = _no_keys(log_key_fn(key[:, :, :1], visible[:, :1]), value)
    xs = blocks(query, 2), blocks(key, 2), blocks(value, 2), blocks(visible, 1)
    # Without a checkpoint the backward pass would store the features of all tokens and the weights of all blocks.
    _, out = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), sums, xs)
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], -1, *out.shape[4:])[:, :, -num_queries:]


def _check_options(
    bias: Bias | None, mask: Mask | None, scale: float | None, block_size: int, dropout_rate: float
) -> None:
    """Raises ValueError for options that `linear_attention` does not support."""
    if bias is not None:
        raise ValueError(
            "linear attention takes no bias, because it never computes the logits of pairs: pass bias=None"
        )
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"linear attention takes only a padding mask, [B, 1, 1, S], got shape {mask.shape}, because it sums over "
            "keys for all queries at once. Pass is_causal=True for causality; there is no segment_ids: give each "
            "sequence its own row"
        )
    if dropout_rate:
        raise ValueError(f"linear attention has no weights to drop, got dropout_rate={dropout_rate}; drop the output")
    if scale is not None and scale < 0:
        raise ValueError(f"scale must be at least 0, because queries and keys are multiplied by its root, got {scale}")
    check_integers(block_size=block_size)
    if block_size < 1 or block_size & (block_size - 1):  # a power of two has a single bit
        raise ValueError(f"block_size must be a power of two, got {block_size}")


def _seeded(query: Array, *arguments: Any, seed: int = 0, num_features: int | None = None, **options: Any) -> Any:
    """Calls `favor_attention` with the random features of a fixed seed."""
    return favor_attention(query, *arguments, projection=_projection(query.shape[-1], seed, num_features), **options)


@functools.lru_cache(maxsize=64)
def _projection(size: int, seed: int, num_features: int | None) -> Any:
    """Returns the random features of a seed, a NumPy array [M, H], by default four times as many as the head size.

    A constant of compiled programs, which would otherwise draw and orthogonalize it again in every layer and step.
    """
    draw = jax.jit(lambda: orthogonal_features(jax.random.key(seed), num_features or 4 * size, size))
    return np.asarray(draw.lower().compile()())  # `draw()` would be part of the program that calls this


def _decode_linear(
    scale: float | None = None, block_size: int = 128, log_features_fn: LogFeaturesFn = log_elu_features
) -> RecurrentDecoding:
    """Returns decoding of `linear_attention`."""
    del block_size
    return _decode(log_features_fn, scale)


def _decode_favor(
    seed: int = 0,
    num_features: int | None = None,
    scale: float | None = None,
    block_size: int = 128,
    projection: Float[Array, "M H"] | None = None,
) -> RecurrentDecoding:
    """Returns decoding of `favor_attention` with a projection, or with the random features of a fixed seed."""
    del block_size

    def log_features_fn(x: Array) -> Array:
        """Returns the log-features of queries or keys, which `_decode` has multiplied by sqrt(scale) if it is given."""
        size = x.shape[-1]
        x = x if scale is not None else x * size**-0.25  # the root of the default scale, 1 / sqrt(H)
        return log_softmax_features(x, _projection(size, seed, num_features) if projection is None else projection)

    return _decode(log_features_fn, scale)


_BLOCK_SIZE = Option("tokens in a causal block, a power of two")

LINEAR = AttentionSpec(
    name="linear",
    function=linear_attention,
    reference="Katharopoulos et al. (2020), equations 4 to 9",
    options={"block_size": _BLOCK_SIZE},
    bias=False,
    segments=False,
    dropout=False,
    decoding=_decode_linear,
)
FAVOR = dataclasses.replace(
    LINEAR,
    name="favor",
    function=_seeded,
    reference="Performer: Choromanski et al. (2021), FAVOR+",
    options={
        "num_features": Option("number of random features; None means four times the head size", at_least=1),
        "block_size": _BLOCK_SIZE,
        "seed": Option("seed of the random features, which are the same at every step", at_least=0, at_most=2**32 - 1),
    },
    decoding=_decode_favor,
)
