"""Position encodings: what tells a set of tokens from a sequence.

Absolute ones are added to embeddings (`sinusoidal_positions`, `learned_positions`), `rotary_embedding` turns queries
and keys, and the rest are biases of attention scores that depend on the distance from query to key. Where keys precede
the first query, as in a cache or a memory, positions or an `offset` say how many.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from tfx_jax.functional.attention.masks import ScoreMod, check_floats
from tfx_jax.functional.layers import lookup


def sinusoidal_positions(
    positions: Int[Array, "*shape"],
    d_model: int,
    *,
    base: float = 10_000.0,
    is_interleaved: bool = True,
    reaches_base: bool = False,
) -> Float[Array, "*shape D"]:
    r"""Encodes each position as sines and cosines of geometrically spaced wavelengths, 2 pi to base * 2 pi.

    Section 3.5 of Vaswani et al. (2017): PE(pos, 2i) = sin(pos / base^(2i / d)), PE(pos, 2i + 1) = cos(same). The step
    pos -> pos + k is a rotation of every (2i, 2i + 1) pair, so attention can learn to look k tokens away. Positions
    beyond `base` do not repeat earlier ones: the periods of the columns have no common multiple.

    Args:
      positions: token positions, counted from 0, any shape.
      d_model: D, even.
      base: the paper's 10,000.
      is_interleaved: whether a sine and its cosine are side by side as in the paper; else all sines come first, as in
        its authors' code and in Marian. For weights trained from scratch the order does not matter.
      reaches_base: whether the longest wavelength is base * 2 pi itself, as in the authors' code and in M2M-100:
        frequencies base^(-i / (d / 2 - 1)); else those of the paper, which end one step before it.

    Returns:
      float32 [*shape, D], within 3e-7 + 7.4e-10 * position of the exact value: 2e-5 at position 30,000, where angles
      multiplied in float32 would be off by 2e-3.

    Raises:
      ValueError: if `d_model` is odd.

    >>> print(np.asarray(sinusoidal_positions(jnp.arange(2), 4)).round(2))
    [[0.   1.   0.   1.  ]
     [0.84 0.54 0.01 1.  ]]
    """
    if d_model < 2 or d_model % 2:
        raise ValueError(f"d_model must be even for sinusoidal positions, got {d_model}")
    angle = _angles(positions, d_model, base, num_steps=max(d_model // 2 - 1, 1) if reaches_base else None)
    if not is_interleaved:
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions.shape, d_model)


def _angles(
    positions: Int[Array, "*shape"],
    d_model: int,
    base: float,
    dtype: np.dtype | type = np.float32,
    num_steps: int | None = None,
) -> Float[Array, "*shape angles"]:
    """Position times angular frequency, modulo 2 pi where that is float32: d_model / 2 of them.

    From 1 down to 1 / base it is `num_steps` steps; None means d_model / 2.
    """
    frequencies = float(base) ** (-np.arange(0, d_model, 2) / (2 * num_steps if num_steps else d_model))
    frequencies = np.expand_dims(frequencies, tuple(range(positions.ndim)))
    if dtype == np.float64:
        return positions[..., None].astype(dtype) * frequencies
    # Angles are fractions of a turn in units of 2^-32: that their product overflows is the reduction modulo 2 pi.
    steps = np.round(frequencies / (2 * np.pi) * 2.0**32).astype(np.int64).astype(np.int32)
    return (positions[..., None].astype(jnp.int32) * steps).astype(jnp.float32) * (2 * np.pi / 2.0**32)


def learned_positions(table: Float[Array, "P D"], positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks positions up in a learned table (Gehring et al., 2017; row E of Table 3 in Vaswani et al., 2017).

    Args:
      table: one row for each position 0 .. P - 1.
      positions: positions, any shape; the last axis is the length of a sequence.

    Returns:
      [*shape, D] in the dtype of `table`. A position outside the table is NaN: training on it would be a
      silent lie.

    Raises:
      ValueError: if the sequences are longer than the table, which is all that shapes can tell.

    >>> learned_positions(jnp.array([[0.5], [0.25]]), jnp.array([1, 0])).tolist()
    [[0.25], [0.5]]
    """
    if positions.ndim and positions.shape[-1] > table.shape[0]:
        raise ValueError(f"{positions.shape[-1]} positions, but the table of learned positions has {table.shape[0]}")
    return lookup(table, positions)


def rotary_embedding(
    x: Float[Array, "B T N H"],
    positions: Int[Array, " T"] | Int[Array, "B T"],
    *,
    base: float = 10_000.0,
    frequencies: Float[Array, " P"] | Float[np.ndarray, " P"] | None = None,
    scale: float = 1.0,
) -> Float[Array, "B T N H"]:
    r"""Rotates pairs of features by angles that grow with the position, so that q . k depends on the distance alone.

    Section 3.2.2 of "RoFormer" (Su et al., 2021, https://arxiv.org/abs/2104.09864): pair i turns by the angle
    pos / base^(2i / H), those of `sinusoidal_positions`. Pair i consists of the features i and i + H / 2, as in
    GPT-NeoX and Llama and because halves are cheaper to take than every other feature; the paper pairs 2i and 2i + 1,
    which differs by a fixed order of the features of W_Q and W_K.

    Args:
      x: queries or keys, [B, T, N, H], H even. Rotate both; keys go into a cache rotated.
      positions: [T] or [B, T]; of any size, negative ones too.
      base: the paper's 10,000.
      frequencies: radians per position of P pairs, from `rotary_frequencies`; None means those of `base`. The first 2P
        features are rotated, the others stay.
      scale: multiplies the rotated features.

    Returns:
      Rotated `x`, same shape and dtype, computed in float32 at least, float64 in float64, angles too.

    Raises:
      ValueError: if `x` has another rank, H is odd, or `positions` or `frequencies` do not fit.

    >>> import jax
    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> print(np.asarray(jax.jit(rotary_embedding)(x, jnp.array([1]))).round(2).ravel())
    [0.54 0.84]
    """
    if x.ndim != 4:
        raise ValueError(f"queries or keys must be [batch, length, heads, size], got {x.ndim} axes: {x.shape}")
    check_floats(x=x)
    b, t, _, h = x.shape
    if h % 2:
        raise ValueError(f"head size must be even for a rotary embedding, got {h}")
    if positions.shape not in ((t,), (b, t)):
        hint = "; x must be [batch, length, heads, size]" if positions.shape in ((x.shape[2],), (b, x.shape[2])) else ""
        raise ValueError(f"positions must have shape [T] = {(t,)} or [B, T] = {(b, t)}, got {positions.shape}{hint}")
    dtype = np.promote_types(x.dtype, np.float32)
    if frequencies is None:
        angle = _angles(positions, h, base, dtype)
    else:
        shape = (1,) * positions.ndim + frequencies.shape
        angle = positions[..., None].astype(dtype) * jnp.asarray(frequencies, dtype).reshape(shape)
    angle = angle[..., None, :]
    sin, cos = (scale * (x if x.ndim == 4 else x[None]) for x in (jnp.sin(angle), jnp.cos(angle)))
    x, rest = jnp.split(x, [2 * angle.shape[-1]], axis=-1)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


ROTARY_SCALINGS = ("none", "linear", "llama3", "yarn")
"""How `rotary_frequencies` fits texts that are longer than those of the first training."""


def rotary_frequencies(
    size: int,
    *,
    base: float = 10_000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_max_length: int = 8192,
    low_frequency_factor: float = 1.0,
    high_frequency_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    is_truncated: bool = True,
) -> tuple[np.ndarray, float]:
    r"""Computes the frequencies of `rotary_embedding`, base^(-2i / size), with the published ways to scale them.

    "linear" divides all by `factor` (Chen et al., 2023, https://arxiv.org/abs/2306.15595). "llama3" and "yarn" (Peng et
    al., 2023, https://arxiv.org/abs/2309.00071) divide only those of long wavelengths, by how often a pair turns in
    `original_max_length` tokens, and interpolate in between; YaRN also multiplies queries and keys.

    Args:
      size: features that are rotated, even.
      base: of the geometric sequence.
      scaling: one of `ROTARY_SCALINGS`.
      factor: how much longer texts become.
      original_max_length: tokens of the first training.
      low_frequency_factor: for "llama3", turns below which a frequency is divided by `factor`.
      high_frequency_factor: for "llama3", turns above which it stays.
      beta_fast: for "yarn", turns above which a frequency stays.
      beta_slow: for "yarn", turns below which it is divided by `factor`.
      attention_factor: for "yarn", the `scale` of `rotary_embedding`; None means 0.1 log(factor) + 1.
      is_truncated: for "yarn", whether the pairs between which it interpolates are whole ones; not so in gpt-oss.

    Returns:
      float32 frequencies in radians per position, [size / 2], and the `scale` of `rotary_embedding`.

    Raises:
      ValueError: for an odd `size`, another scaling, or options that divide by zero.

    >>> rotary_frequencies(4)[0].tolist(), rotary_frequencies(4, scaling="linear", factor=2.0)[0].tolist()
    ([1.0, 0.009999999776482582], [0.5, 0.004999999888241291])
    """
    if size % 2 or size < 2:
        raise ValueError(f"a rotary embedding needs an even number of features, got {size}")
    if scaling not in ROTARY_SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(ROTARY_SCALINGS)}, got {scaling!r}")
    if scaling == "llama3" and not low_frequency_factor < high_frequency_factor:
        raise ValueError(
            f"low_frequency_factor={low_frequency_factor} must be below high_frequency_factor={high_frequency_factor}"
        )
    if scaling == "yarn" and not (base > 1 and beta_fast > 0 and beta_slow > 0):
        raise ValueError(f"yarn needs base above 1 and positive betas, got {base}, {beta_fast} and {beta_slow}")
    pairs = np.arange(0, size, 2, dtype=np.float64)
    frequencies = base ** (-pairs / size)
    if scaling == "none":
        return frequencies.astype(np.float32), 1.0
    if scaling == "linear":
        return (frequencies / factor).astype(np.float32), 1.0
    if scaling == "llama3":
        turns = original_max_length * frequencies / (2 * np.pi)
        share = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
        kept, scale = np.clip(share, 0, 1), 1.0
    else:
        # The pair that turns so often in the texts of the first training, as a real number.
        pair_of = [
            size * np.log(original_max_length / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (beta_fast, beta_slow)
        ]
        low, high = (np.floor(pair_of[0]), np.ceil(pair_of[1])) if is_truncated else pair_of
        low, high = max(low, 0), min(high, size - 1)
        kept = 1 - np.clip((pairs / 2 - low) / max(high - low, 0.001), 0, 1)
        scale = 0.1 * np.log(factor) + 1 if attention_factor is None else attention_factor
    return (frequencies * kept + frequencies / factor * (1 - kept)).astype(np.float32), float(scale)


def relative_position_bucket(
    relative_positions: Int[Array, "*shape"],
    num_buckets: int = 32,
    *,
    max_distance: int = 128,
    is_bidirectional: bool = True,
) -> Int[Array, "*shape"]:
    r"""Numbers the distances from query to key so that far ones share a bucket.

    Section 2.1 of "T5" (Raffel et al., 2020, https://arxiv.org/abs/1910.10683). With b buckets for a direction and
    e = b // 2, a distance n is in bucket n if n < e, and otherwise in bucket
    min(b - 1, e + floor((b - e) log(n / e) / log(max_distance / e))). Bidirectional attention has b = num_buckets / 2
    and numbers the keys after the query from b on; causal attention has b = num_buckets, and keys after the query are
    in bucket 0. The limits of the buckets are computed in integers, so no device can round a logarithm across one.

    Args:
      relative_positions: position of the key minus that of the query, any shape.
      num_buckets: of both directions together.
      max_distance: the distance from which on all are in the last bucket.
      is_bidirectional: whether keys after the query are told from those before it; decoders have False.

    Returns:
      Bucket numbers in 0 .. num_buckets - 1, int32, same shape.

    Raises:
      ValueError: if there are too few buckets, or `max_distance` lies within those of one distance each.

    >>> relative_position_bucket(jnp.array([-200, -16, -1, 0, 1, 9, 200])).tolist()
    [15, 10, 1, 0, 17, 24, 31]
    """
    b = num_buckets // 2 if is_bidirectional else num_buckets
    e = b // 2
    if not 1 <= e < max_distance:
        raise ValueError(f"max_distance={max_distance} and num_buckets={num_buckets} leave no buckets to share")
    # Bucket e + j begins at the first n with (n / e)^(b - e) >= (max_distance / e)^j.
    limits = list(range(1, e + 1))
    for j in range(1, b - e):
        n = limits[-1]
        while n ** (b - e) * e**j < e ** (b - e) * max_distance**j:
            n += 1
        limits.append(n)
    limits = np.asarray(limits, np.int32)
    relative_positions = relative_positions.astype(jnp.int32)
    distance = jnp.abs(relative_positions) if is_bidirectional else jnp.maximum(-relative_positions, 0)
    bucket = jnp.searchsorted(limits, distance, side="right", method="compare_all").astype(jnp.int32)
    return jnp.where(relative_positions > 0, bucket + b, bucket) if is_bidirectional else bucket


def relative_position_bias(
    table: Float[Array, "P N"],
    num_queries: int,
    num_keys: int | None = None,
    *,
    offset: int | Int[Array, ""] | None = None,
    max_distance: int = 128,
    is_bidirectional: bool = True,
) -> Float[Array, "1 N T S"]:
    r"""The bias of T5: a learned number for every head and bucket of distances (`relative_position_bucket`).

    Args:
      table: [buckets, N].
      num_queries: T.
      num_keys: S; None means T.
      offset: how many keys precede the first query; None means S - T, as in `causal_mask`. It may be traced: a step of
        decoding is `relative_position_bias(table, 1, cache_size, offset=step, is_bidirectional=False)`.
      max_distance: the distance from which on all share a bucket.
      is_bidirectional: False for decoders.

    Returns:
      [1, N, T, S] in the dtype of `table`, to be passed as `bias`. T5 does not scale its logits: `scale=1.0`.

    >>> import jax
    >>> table = jnp.arange(32)[:, None]
    >>> jax.jit(relative_position_bias, static_argnums=1)(table, 3)[0, 0].tolist()
    [[0, 17, 18], [1, 0, 17], [2, 1, 0]]
    """
    num_keys = num_queries if num_keys is None else num_keys
    offset = num_keys - num_queries if offset is None else offset
    # Only T + S - 1 distances occur: look those up, and shift. A lookup of all pairs costs a scatter in the gradient.
    relative = jnp.arange(num_queries + num_keys - 1) - (num_queries - 1) - offset
    buckets = relative_position_bucket(
        relative, table.shape[0], max_distance=max_distance, is_bidirectional=is_bidirectional
    )
    rows = table[buckets].T[:, None]
    return relative_shift(jnp.broadcast_to(rows, (rows.shape[0], num_queries, rows.shape[2])))[None]


def t5_score_mod(
    table: Float[Array, "P N"],
    *,
    offset: int | Int[Array, ""] = 0,
    max_distance: int = 128,
    is_bidirectional: bool = True,
) -> ScoreMod:
    r"""The bias of T5 as a `score_mod`: what `relative_position_bias` holds for all pairs, computed block by block.

    Section 2.1 of "T5" (Raffel et al., 2020, https://arxiv.org/abs/1910.10683). With
    `dot_product_attention(..., score_mod=t5_score_mod(table), scale=1.0, implementation="chunked")` no array of all
    pairs exists, forward or backward, and `table` gets its gradient.

    Args:
      table: [buckets, N].
      offset: how many keys precede the first query.
      max_distance: the distance from which on all share a bucket.
      is_bidirectional: False for decoders.

    >>> from tfx_jax.functional import dot_product_attention
    >>> x, table = jnp.zeros((1, 2, 1, 4)), jnp.log(jnp.arange(1.0, 33) ** 2)[:, None]
    >>> attend = lambda x, table: dot_product_attention(x, x, x, score_mod=t5_score_mod(table), return_weights=True)
    >>> print(np.asarray(jax.jit(attend)(x, table)[1][0, 0]).round(2))  # buckets 0 and 17, 1 and 0
    [[0.  1. ]
     [0.8 0.2]]
    """
    mod = functools.partial(_add_t5_bias, max_distance=max_distance, is_bidirectional=is_bidirectional)
    return jax.tree_util.Partial(mod, table, offset)


def _add_t5_bias(
    table: Array, offset: int | Array, logits: Array, b: Array, n: Array, t: Array, s: Array, **kinds: Any
) -> Array:
    del b, n
    first = s[0, 0, 0, 0] - t[0, 0, 0, 0] - offset  # a block is consecutive, so its distances are too
    return logits + relative_position_bias(table, *logits.shape[2:], offset=-first, **kinds).astype(logits.dtype)


def alibi_score_mod(slopes: Float[Array, " N"], *, offset: int | Int[Array, ""] = 0) -> ScoreMod:
    r"""Attention with linear biases as a `score_mod`: logits - slope * distance, computed block by block.

    Section 3 of "Train Short, Test Long" (Press et al., 2022, https://arxiv.org/abs/2108.12409); see `alibi_bias`.

    Args:
      slopes: one for each head, [N], such as `alibi_slopes(N)`; learned ones get gradients.
      offset: how many keys precede the first query.

    >>> from tfx_jax.functional import dot_product_attention
    >>> x, slopes = jnp.zeros((1, 2, 1, 4)), jnp.log(jnp.array([3.0]))
    >>> attend = lambda x: dot_product_attention(x, x, x, score_mod=alibi_score_mod(slopes), return_weights=True)
    >>> jax.jit(attend)(x)[1][0, 0].round(2).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    return jax.tree_util.Partial(_subtract_distances, slopes, offset)


def _subtract_distances(
    slopes: Array, offset: int | Array, logits: Array, b: Array, n: Array, t: Array, s: Array
) -> Array:
    del b
    return logits - slopes.astype(logits.dtype)[n] * jnp.abs(s - t - offset).astype(logits.dtype)


def relative_shift(scores: Num[Array, "*shape T P"], num_keys: int | None = None) -> Num[Array, "*shape T S"]:
    r"""Turns scores of relative positions into scores of keys, out[t, s] = scores[t, s - t + T - 1], without a gather.

    Appendix B of "Transformer-XL" (Dai et al., 2019, https://arxiv.org/abs/1901.02860). Column c holds the scores of
    keys at distance c - (T - 1) - offset from the query, where `offset` keys precede the first query: T + S - 1 columns
    from the first key as the last query sees it, to the last key as the first query sees it. Causal attention with a
    memory of S - T tokens, as in the paper, needs the first S of them alone, distances -(S - 1) .. 0.

    Args:
      scores: [..., T, P].
      num_keys: S; None means P - T + 1. Columns that `scores` does not have are zeros; with P = S they are the future.

    Returns:
      [..., T, S].

    Raises:
      ValueError: if there are fewer columns than queries and `num_keys` is not given.

    >>> import jax
    >>> shift = jax.jit(relative_shift, static_argnums=1)
    >>> shift(jnp.array([[-2, -1, 0, 1, 2]] * 3)).tolist()
    [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]
    >>> shift(jnp.array([[3, 2, 1]] * 2), 3).tolist()
    [[2, 1, 0], [3, 2, 1]]
    """
    *shape, t, p = scores.shape
    s = p - t + 1 if num_keys is None else num_keys
    if s < 1:
        raise ValueError(f"{p} relative positions are too few for {t} queries")
    # In rows of width W, element (t, s - t + T - 1) lies at T - 1 + t (W - 1) + s: element (t, s) of rows of W - 1.
    width = max(p, s + 1)
    padded = jnp.pad(scores, [(0, 0)] * (len(shape) + 1) + [(0, width - p)])
    flat = padded.reshape(*shape, t * width)[..., t - 1 : -1]
    shifted = flat.reshape(*shape, t, width - 1)[..., :s]
    if p >= t + s - 1:
        return shifted
    has_column = jnp.arange(s)[None, :] - jnp.arange(t)[:, None] + t - 1 < p
    return jnp.where(jnp.expand_dims(has_column, tuple(range(len(shape)))), shifted, 0)


def alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    r"""The slopes of ALiBi, one for each head.

    Section 3 of "Train Short, Test Long" (Press et al., 2022, https://arxiv.org/abs/2108.12409): for N a power of two,
    2^(-8/N), 2^(-16/N) .. 2^-8. For other N, as their code has it, those of the power of two below, and then every
    other one of the power of two above, from the first on.

    >>> alibi_slopes(4).tolist(), alibi_slopes(3).tolist()
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    below = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * (i + 1) / below for i in range(below)]
    exponents += [-4 * (i + 1) / below for i in range(0, 2 * (num_heads - below), 2)]
    return jnp.asarray(np.exp2(exponents), jnp.float32)


def alibi_bias(
    num_heads: int, num_queries: int, num_keys: int | None = None, *, offset: int | Int[Array, ""] | None = None
) -> Float[Array, "1 N T S"]:
    r"""Attention with linear biases: -slope * distance, nothing learned and nothing added to embeddings.

    Press et al. (2022, https://arxiv.org/abs/2108.12409), who use it with causal attention; for keys after the query
    the distance counts alike. Softmax ignores what is the same for all keys of a query, so causal attention may take
    `slope * s` for it, a bias [1, N, 1, S] that the attentions without an array of all pairs accept too.

    Args:
      num_heads: N.
      num_queries: T.
      num_keys: S; None means T.
      offset: how many keys precede the first query; None means S - T, as in `causal_mask`. It may be traced.

    Returns:
      float32 [1, N, T, S], to be passed as `bias`.

    >>> import jax
    >>> jax.jit(alibi_bias, static_argnums=(0, 1))(8, 3)[0, 0].tolist()
    [[-0.0, -0.5, -1.0], [-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """
    num_keys = num_queries if num_keys is None else num_keys
    offset = num_keys - num_queries if offset is None else offset
    distance = jnp.abs(jnp.arange(num_keys)[None, :] - jnp.arange(num_queries)[:, None] - offset)
    return -alibi_slopes(num_heads)[None, :, None, None] * distance[None, None].astype(jnp.float32)
