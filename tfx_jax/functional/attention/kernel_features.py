"""Attention in linear time: a kernel of features instead of the exponential (Performer, linear attention).

If the weight of a key is a dot product of features, phi(q) . phi(k), the sums over keys are computed once for all
queries: (Q' K'^T) V = Q' (K'^T V). Features are represented by their logarithms, and each sum over keys is relative to
the largest of each feature. So nothing overflows, no visible key underflows to zero, and hidden or future keys do not
change even the rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.masks import Bias, Mask, check_shapes, refuse_segment_ids
from tfx_jax.functional.attention.spec import AttentionSpec, Option, RecurrentDecoding
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request, zeros_where_empty


@jax.custom_batching.custom_vmap
def orthogonal_of_normal(normal: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """Makes a matrix of independent normals orthogonal: uniform over all orthogonal matrices (Mezzadri, 2007).

    Of a batch, under `jax.vmap`, one after the other. On CPUs jaxlib divides the QR of a batch among the threads of a
    pool, and waits in one of them: as many batches at once as there are threads, such as those of two layers' weights
    on two cores, wait for ever (jaxlib 0.10.2, `ParallelBatchMap`).

    Args:
      normal: a sample of N(0, 1) for each element, [D, D].

    Returns:
      [D, D] in the dtype of `normal`.

    >>> rotation = orthogonal_of_normal(jax.random.normal(jax.random.key(0), (3, 3)))
    >>> bool(jnp.abs(rotation @ rotation.T - jnp.eye(3)).max() < 1e-5)
    True
    """
    basis, triangle = jnp.linalg.qr(normal)
    # QR fixes signs by convention; multiplied by those of R's diagonal, the basis is uniform.
    return basis * jnp.sign(jnp.diagonal(triangle))[None]


@orthogonal_of_normal.def_vmap
def _one_by_one(axis_size: int, in_batched: Any, normals: Float[Array, "B D D"]) -> tuple[Float[Array, "B D D"], bool]:
    del axis_size, in_batched  # it has one argument, and is called where that is a batch
    return jax.lax.map(orthogonal_of_normal, normals), True


# As parts of the largest number: the logarithm of a feature that counts for nothing, and the least reference of a sum,
# far enough above it that their difference underflows to zero. Finite, because infinities would make NaN gradients.
_HIDDEN, _LEAST = -0.7, -0.3

LogFeaturesFn = Callable[[Float[Array, "*batch H"]], Float[Array, "*batch M"]]


def orthogonal_features(rng: Array, num_features: int, size: int) -> Float[Array, "M H"]:
    """Draws normal vectors, orthogonal to each other in blocks of `size`.

    The O of FAVOR+ (Choromanski et al., 2021, https://arxiv.org/abs/2009.14794). Each row alone is a sample of N(0, I),
    so estimates stay unbiased; together they cover the directions more evenly than independent rows, which are
    `jax.random.normal(rng, (M, H))`, and the variance falls. To redraw, call it with another `rng`.

    Args:
      rng: PRNG key.
      num_features: M, how many; the paper advises about H log H.
      size: H.

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
@divided_as_queries
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
    phi(x) = exp(W x - |x|^2 / 2) / sqrt(M) of x = sqrt(scale) q and x = sqrt(scale) k. The kernel's estimate is
    unbiased, with the relative variance (exp(|x + y|^2) - 1) / M: good for vectors of about unit length, and hopeless
    for long ones.

    Args:
      query: as in `linear_attention`, like all arguments that are not named here.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: refused.
      mask: padding, [B or 1, 1, 1, S].
      projection: W, [M, H], from `orthogonal_features`. Constant, not a parameter: draw another from time to time.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the estimated logits; None means 1 / sqrt(H).
      block_size: as in `linear_attention`.
      segment_ids: refused.
      dropout_rate: must be 0.
      dropout_rng: unused.
      return_weights: also return the weights, dense.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of these and the weights, [B, N, T, S].

    Raises:
      ValueError: if `projection` does not fit, and as `linear_attention`.

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
@divided_as_queries
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
    causal equation 9 in blocks: quadratic inside a block, by a running sum over the blocks before it.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, S, K, U].
      bias: refused: what is added to the logit of a pair has no place in a product of features.
      mask: padding, [B or 1, 1, 1, S], True where a key may be seen. A query without any gets zeros.
      log_features_fn: maps [*batch, H] to the logarithms of M positive features, [*batch, M]; elu(x) + 1 by default.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: queries and keys are multiplied by its root before the feature map; None means 1, as in the paper.
      block_size: tokens of a causal block, a power of two. Gradients keep M * U numbers for each block.
      segment_ids: refused: the sums are over all keys of a row.
      dropout_rate: must be 0: no weight exists that could be dropped. Drop the output instead.
      dropout_rng: unused, for the sake of the common signature.
      return_weights: also return the weights, as dense attention would have them: quadratic in memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of these and the weights, [B, N, T, S].
      Features and sums are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if the sizes do not fit together, the mask is of pairs, or an option is out of range.

    >>> x = jnp.array([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    >>> jax.jit(lambda x: linear_attention(0 * x, 0 * x, x, is_causal=True))(x).ravel().tolist()
    [0.0, 0.5, 1.0]
    """
    check_shapes(query, key, value, bias, mask)
    refuse_segment_ids(segment_ids, "linear attention")
    _check_options(bias, mask, scale, block_size, dropout_rate)
    (b, t, n, _), (s, k) = query.shape, key.shape[1:3]
    dtype = np.promote_types(query.dtype, np.float32)
    log_query_fn, log_key_fn = _log_features(log_features_fn, scale)

    # Heads come first from here on, and the G queries of a key head stand next to each other: [B, K, T, G, H].
    visible = jnp.ones((b, s), jnp.bool_) if mask is None else jnp.broadcast_to(mask[:, 0, 0], (b, s))
    query_heads = query.reshape(b, t, k, n // k, -1).transpose(0, 2, 1, 3, 4)
    key_heads, value_heads = key.swapaxes(1, 2), value.swapaxes(1, 2).astype(dtype)

    def attend(values: Float[Array, "B K S Z"]) -> Float[Array, "B T N Z"]:
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
    # A linear map is known by what it does to the unit vectors.
    weights = attend(jnp.broadcast_to(jnp.eye(s, dtype=dtype), (b, k, s, s)))
    return out, weights.swapaxes(1, 2)


def _log_features(
    log_features_fn: LogFeaturesFn, scale: float | None
) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    """The logarithms of the features of scaled queries, and of those of keys [B, K, S, H], hidden or not."""
    root = 1.0 if scale is None else math.sqrt(scale)

    def log_query_fn(x: Array) -> Array:
        return log_features_fn(x.astype(np.promote_types(x.dtype, np.float32)) * root)

    def log_key_fn(x: Array, visible: Array) -> Array:
        log_key = log_query_fn(x)
        return jnp.where(visible[:, None, :, None], log_key, _HIDDEN * jnp.finfo(log_key.dtype).max)

    return log_query_fn, log_key_fn


def _decode(log_features_fn: LogFeaturesFn, scale: float | None) -> RecurrentDecoding:
    """Decoding whose state is the sums over the keys that were read."""
    log_query_fn, log_key_fn = _log_features(log_features_fn, scale)

    def read(key: Array, value: Array, mask: Mask | None) -> _Sums:
        (b, s, k, h), u = key.shape, value.shape[-1]
        visible = jnp.ones((b, s), jnp.bool_) if mask is None else jnp.broadcast_to(mask[:, 0, 0], (b, s))
        one = log_query_fn(jnp.zeros((b, k, 1, h), key.dtype))
        nothing = _no_keys(one, jnp.zeros((b, k, 1, u), one.dtype))
        if not s:
            return nothing
        return _extended(nothing, log_key_fn(key.swapaxes(1, 2), visible), value.swapaxes(1, 2).astype(one.dtype))

    def step(sums: _Sums, query: Array, key: Array, value: Array) -> tuple[Array, _Sums]:
        (b, _, n, h), k = query.shape, key.shape[2]
        sums = _extended(sums, log_query_fn(key.swapaxes(1, 2)), value.swapaxes(1, 2).astype(sums.ones.dtype))
        answers = _read(log_query_fn(query.reshape(b, k, 1, n // k, h)), sums)
        return _quotient(answers).reshape(b, 1, n, -1).astype(query.dtype), sums

    return RecurrentDecoding(read, step)


class _Sums(NamedTuple):
    """All that queries need to know of some keys: the sums of phi(k) v^T and of phi(k), divided by exp(reference)."""

    reference: Float[Array, "*batch M"]
    """The largest log phi(k) of each feature: some key contributes exp(0) to `ones`, which is thus at least 1."""
    values: Float[Array, "*batch M U"]
    ones: Float[Array, "*batch M"]


class _Answers(NamedTuple):
    """What queries found among some keys: numerator and denominator of their output, divided by exp(log_scale)."""

    log_scale: Float[Array, "*batch T G"]
    numerator: Float[Array, "*batch T G U"]
    denominator: Float[Array, "*batch T G"]


def _no_keys(log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]) -> _Sums:
    """The sums of none of these, made from them: within shard_map, the state of a loop varies as they do."""
    ones, of_value = jnp.zeros_like(log_key[..., 0, :]), jnp.zeros_like(value[..., 0, :])
    return _Sums(ones + _LEAST * jnp.finfo(ones.dtype).max, ones[..., :, None] * of_value[..., None, :], ones)


def _largest(log_key: Float[Array, "*batch S M"]) -> Float[Array, "*batch M"]:
    # References cancel, whatever they are; therefore no gradient flows through them.
    largest = jax.lax.stop_gradient(log_key).max(axis=-2)
    return jnp.maximum(largest, _LEAST * jnp.finfo(largest.dtype).max)


def _extended(sums: _Sums, log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]) -> _Sums:
    """Adds keys and values to the sums."""
    reference = jnp.maximum(sums.reference, _largest(log_key))
    decay = jnp.exp(sums.reference - reference)
    features = jnp.exp(log_key - reference[..., None, :])
    values = sums.values * decay[..., None] + jnp.einsum("...SM,...SU->...MU", features, value)
    return _Sums(reference, values, sums.ones * decay + features.sum(axis=-2))


def _query_features(
    log_query: Float[Array, "*batch T G M"], reference: Float[Array, "*batch M"]
) -> tuple[Float[Array, "*batch T G"], Float[Array, "*batch T G M"]]:
    """phi(q) exp(reference) = exp(log_scale) * features, with 1 as the largest feature of each query."""
    log_query = log_query + reference[..., None, None, :]
    log_scale = jax.lax.stop_gradient(log_query).max(axis=-1)
    return log_scale, jnp.exp(log_query - log_scale[..., None])


def _read(log_query: Float[Array, "*batch T G M"], sums: _Sums) -> _Answers:
    """Answers queries that see all keys of the sums."""
    log_scale, features = _query_features(log_query, sums.reference)
    numerator = jnp.einsum("...TGM,...MU->...TGU", features, sums.values)
    return _Answers(log_scale, numerator, jnp.einsum("...TGM,...M->...TG", features, sums.ones))


def _read_pairs(
    log_query: Float[Array, "*batch T G M"], log_key: Float[Array, "*batch S M"], value: Float[Array, "*batch S U"]
) -> _Answers:
    """Answers queries that see all of these keys, pair by pair: cheaper than sums for fewer keys than features."""
    reference = _largest(log_key)
    log_scale, features = _query_features(log_query, reference)
    weights = jnp.einsum("...TGM,...SM->...TGS", features, jnp.exp(log_key - reference[..., None, :]))
    return _Answers(log_scale, jnp.einsum("...TGS,...SU->...TGU", weights, value), weights.sum(axis=-1))


def _read_past(
    log_query: Float[Array, "B K P T G M"], log_key: Float[Array, "B K P T M"], value: Float[Array, "B K P T U"]
) -> _Answers:
    """Answers queries that see the keys up to their own position, in each of P parts of T tokens, a power of two.

    Relative to the largest key of the whole part, queries would be rounded by keys of their future. But the second half
    of a part sees all keys of the first, whose largest is therefore safe, and each half is a part of its own.
    """
    b, k, p, t = log_key.shape[:4]
    if t == 1:
        return _read_pairs(log_query, log_key, value)

    log_query, log_key, value = (x.reshape(b, k, 2 * p, t // 2, *x.shape[4:]) for x in (log_query, log_key, value))
    own = _read_past(log_query, log_key, value)
    others = _read_pairs(log_query[:, :, 1::2], log_key[:, :, ::2], value[:, :, ::2])
    first = _Answers(*(x[:, :, ::2] for x in own))
    second = _merged(_Answers(*(x[:, :, 1::2] for x in own)), others)
    return _Answers(*(jnp.concatenate(halves, axis=3) for halves in zip(first, second, strict=True)))


def _merged(some: _Answers, others: _Answers) -> _Answers:
    """The answers of the same queries from two sets of keys together."""
    log_scale = jnp.maximum(some.log_scale, others.log_scale)
    decays = tuple(jnp.exp(x.log_scale - log_scale) for x in (some, others))
    numerator = some.numerator * decays[0][..., None] + others.numerator * decays[1][..., None]
    return _Answers(log_scale, numerator, some.denominator * decays[0] + others.denominator * decays[1])


def _quotient(answers: _Answers) -> Float[Array, "*batch T G U"]:
    """The denominator is zero for queries without keys only, and at least 1 for all others."""
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
    """Scans blocks of tokens, with the sums over all blocks before as the carry."""
    num_queries, longest = query.shape[2], max(query.shape[2], key.shape[2])
    block_size = min(block_size, 1 << (longest - 1).bit_length())
    num_blocks = -(-longest // block_size)

    def blocks(x: Array, axis: int) -> Array:
        """Padded in front, since the last query meets the last key; [num_blocks, ..., block_size, ...]."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (num_blocks * block_size - x.shape[axis], 0)
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], num_blocks, block_size, *x.shape[axis + 1 :]), axis, 0)

    def step(sums: _Sums, block: tuple[Array, ...]) -> tuple[_Sums, Array]:
        query, key, value, visible = block
        log_query, log_key = log_query_fn(query), log_key_fn(key, visible)
        inside = _read_past(*(x[:, :, None] for x in (log_query, log_key, value)))
        answers = _merged(_Answers(*(x[:, :, 0] for x in inside)), _read(log_query, sums))
        return _extended(sums, log_key, value), _quotient(answers)

    sums = _no_keys(log_key_fn(key[:, :, :1], visible[:, :1]), value)
    xs = blocks(query, 2), blocks(key, 2), blocks(value, 2), blocks(visible, 1)
    # Without checkpoints, the backward pass would keep the features of all tokens and the weights of all blocks.
    _, out = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), sums, xs)
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], -1, *out.shape[4:])[:, :, -num_queries:]


def _check_options(
    bias: Bias | None, mask: Mask | None, scale: float | None, block_size: int, dropout_rate: float
) -> None:
    if bias is not None:
        raise ValueError("linear attention takes no bias: it never forms the logits of pairs that a bias is added to")
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"linear attention takes a padding mask only, [B, 1, 1, S], got shape {mask.shape}: it sums over keys "
            "before it meets a query. Pass is_causal=True for causality; it has no segment_ids: give each its own row"
        )
    if dropout_rate:
        raise ValueError(f"linear attention has no weights to drop, got dropout_rate={dropout_rate}; drop the output")
    if scale is not None and scale < 0:
        raise ValueError(f"scale must not be negative, because its root multiplies queries and keys, got {scale}")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")


def _seeded(query: Array, *arguments: Any, seed: int = 0, num_features: int | None = None, **options: Any) -> Any:
    """`favor_attention` with the same random features at every step."""
    return favor_attention(query, *arguments, projection=_projection(query.shape[-1], seed, num_features), **options)


def _projection(size: int, seed: int, num_features: int | None) -> Float[Array, "M H"]:
    return orthogonal_features(jax.random.key(seed), num_features or 4 * size, size)


def _decode_linear(scale: float | None = None, block_size: int = 128) -> RecurrentDecoding:
    del block_size
    return _decode(log_elu_features, scale)


def _decode_favor(
    seed: int = 0, num_features: int | None = None, scale: float | None = None, block_size: int = 128
) -> RecurrentDecoding:
    del block_size

    def log_features_fn(x: Array) -> Array:
        size = x.shape[-1]
        x = x if scale is not None else x * size**-0.25
        return log_softmax_features(x, _projection(size, seed, num_features))

    return _decode(log_features_fn, scale)


_BLOCK_SIZE = Option("tokens of a causal block, a power of two")

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
        "num_features": Option("random features; None: four for each number of a head", at_least=1),
        "block_size": _BLOCK_SIZE,
        "seed": Option("seed of the features, the same at every step", at_least=0, at_most=2**32 - 1),
    },
    decoding=_decode_favor,
)
