"""Position encodings.

Absolute encodings are added to embeddings (`sinusoidal_positions`, `learned_positions`). `rotary_embedding` rotates
queries and keys. The other functions are biases of attention scores that depend on the distance from query to key. If
keys precede the first query, as in a cache or a memory, pass `positions`, or their number as `offset`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from tfx_jax.functional.attention.signature import ScoreMod, check_floats, statistics_dtype
from tfx_jax.functional.layers import lookup


def sinusoidal_positions(
    positions: Num[Array, "*shape"],
    d_model: int,
    *,
    base: float = 10_000.0,
    is_interleaved: bool = True,
    reaches_base: bool = False,
) -> Float[Array, "*shape D"]:
    r"""Encodes each position as sines and cosines of geometrically spaced wavelengths, 2 pi to base * 2 pi.

    Section 3.5 of Vaswani et al. (2017): PE(pos, 2i) = sin(pos / base^(2i / d)), PE(pos, 2i + 1) = cos(same). The step
    pos -> pos + k is a rotation of every (2i, 2i + 1) pair, so attention can learn to look k tokens away. Positions
    beyond `base` do not repeat earlier ones, because the periods of the columns have no common multiple.

    Args:
      positions: token positions, counted from 0, any shape; or fractions of them.
      d_model: D, even.
      base: the paper's 10,000.
      is_interleaved: whether sines and cosines alternate as in the paper; otherwise all sines come first, as in the
        authors' code and in Marian. For weights trained from scratch the order does not matter.
      reaches_base: whether the longest wavelength is base * 2 pi, as in the authors' code and in M2M-100: frequencies
        base^(-i / (d / 2 - 1)). Otherwise frequencies are those of the paper, which end one step before it.

    Returns:
      float32 [*shape, D], with an error of at most 3e-7 + 7.4e-10 * position: 2e-5 at position 30,000, where angles
      computed in float32, as those of fractions are, have an error of 2e-3.

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
    positions: Num[Array, "*shape"],
    d_model: int,
    base: float,
    dtype: np.dtype | type = np.float32,
    num_steps: int | None = None,
) -> Float[Array, "*shape angles"]:
    """Returns d_model / 2 angles of each position, position times angular frequency, in radians.

    Frequencies fall from 1 by a factor of base^(-1 / num_steps) each; None means d_model / 2 steps. Angles are modulo
    2 pi and float32, unless `dtype` is float64 or positions are fractions: then they are plain products in `dtype`.
    """
    frequencies = float(base) ** (-np.arange(0, d_model, 2) / (2 * num_steps if num_steps else d_model))
    frequencies = np.expand_dims(frequencies, tuple(range(positions.ndim)))
    if dtype == np.float64 or not jnp.issubdtype(positions.dtype, jnp.integer):
        return positions[..., None].astype(dtype) * frequencies.astype(dtype)
    # Frequencies are in units of 2^-32 turns, so that the overflow of the int32 product is the reduction modulo 2 pi.
    int_frequencies = np.round(frequencies / (2 * np.pi) * 2.0**32).astype(np.int64).astype(np.int32)
    int_angles = positions[..., None].astype(jnp.int32) * int_frequencies
    return int_angles.astype(jnp.float32) * (2 * np.pi / 2.0**32)


def learned_positions(table: Float[Array, "P D"], positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks up positions in a learned table (Gehring et al., 2017; row E of Table 3 in Vaswani et al., 2017).

    Args:
      table: one row for each position 0 .. P - 1.
      positions: positions, any shape; the last axis is the length of a sequence.

    Returns:
      [*shape, D] in the dtype of `table`. The row of a position outside the table is NaN, so that the mistake is
      noticed.

    Raises:
      ValueError: if a sequence is longer than the table. Other positions outside the table are not detected.

    >>> learned_positions(jnp.array([[0.5], [0.25]]), jnp.array([1, 0])).tolist()
    [[0.25], [0.5]]
    """
    if positions.ndim and positions.shape[-1] > table.shape[0]:
        raise ValueError(
            f"sequences must have at most {table.shape[0]} tokens, the size of the table of learned positions, got "
            f"{positions.shape[-1]}"
        )
    return lookup(table, positions)


def rotary_embedding(
    x: Float[Array, "B T N H"],
    positions: Num[Array, " T"] | Num[Array, "B T"],
    *,
    base: float = 10_000.0,
    frequencies: Float[Array, "*B P"] | Float[np.ndarray, "*B P"] | None = None,
    scale: float = 1.0,
) -> Float[Array, "B T N H"]:
    r"""Rotates pairs of features by angles proportional to the position, so that q . k depends on the distance only.

    Section 3.2.2 of "RoFormer" (Su et al., 2021, https://arxiv.org/abs/2104.09864): pair i is rotated by the angle
    pos / base^(2i / H), as in `sinusoidal_positions`. Pair i consists of the features i and i + H / 2, as in GPT-NeoX
    and Llama, because halves are faster to slice than every other feature. The paper pairs 2i and 2i + 1, which is the
    same up to a permutation of the features of W_Q and W_K.

    Args:
      x: queries or keys, [B, T, N, H], H even. Rotate both; store rotated keys in a cache.
      positions: [T] or [B, T]; any integers, negative ones too, or fractions.
      base: the paper's 10,000.
      frequencies: radians per position of P pairs, [P] or [B, P], from `rotary_frequencies`; None means those of
        `base`. The first 2P features are rotated; the others are unchanged.
      scale: multiplies the rotated features.

    Returns:
      Rotated `x`, same shape and dtype; angles and rotation are computed in float32, for float64 inputs in float64.

    Raises:
      ValueError: if `x` does not have rank 4, H is odd, or `positions` or `frequencies` have the wrong shape.

    >>> import jax
    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> print(np.asarray(jax.jit(rotary_embedding)(x, jnp.array([1]))).round(2).ravel())
    [0.54 0.84]
    """
    if x.ndim != 4:
        raise ValueError(f"x must have rank 4, [batch, length, heads, size], got shape {x.shape}")
    check_floats(x=x)
    b, t, _, h = x.shape
    if h % 2:
        raise ValueError(f"head size must be even for a rotary embedding, got {h}")
    if not hasattr(positions, "shape"):
        raise ValueError(f"positions must be an array of shape [T] = {(t,)} or [B, T] = {(b, t)}, got {positions!r}")
    if positions.shape not in ((t,), (b, t)):
        hint = "; x must be [batch, length, heads, size]" if positions.shape in ((x.shape[2],), (b, x.shape[2])) else ""
        raise ValueError(f"positions must have shape [T] = {(t,)} or [B, T] = {(b, t)}, got {positions.shape}{hint}")
    dtype = statistics_dtype(x)
    if frequencies is None:
        angle = _angles(positions, h, base, dtype)  # [T, P] or [B, T, P]
    else:
        num_pairs = frequencies.shape[-1] if frequencies.ndim else 0
        if frequencies.shape not in ((num_pairs,), (b, num_pairs)) or not 1 <= num_pairs <= h // 2:
            raise ValueError(
                f"frequencies must have shape [P] or [B, P] with B = {b} and 1 to {h // 2} pairs P, got "
                f"{frequencies.shape}"
            )
        frequencies = jnp.asarray(frequencies, dtype).reshape(-1, 1, num_pairs)
        angle = positions.astype(dtype).reshape(-1, t, 1) * frequencies
    angle = angle[..., None, :]  # one rotation for all heads
    angle = angle if angle.ndim == 4 else angle[None]  # [B or 1, T, 1, P]
    sin, cos = scale * jnp.sin(angle), scale * jnp.cos(angle)
    x, unrotated = jnp.split(x, [2 * angle.shape[-1]], axis=-1)  # the features after the first 2P are not rotated
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)  # pair i is (first[i], second[i])
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, unrotated], axis=-1) if unrotated.shape[-1] else rotated


ROTARY_SCALINGS = ("none", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Methods of `rotary_frequencies` to extend a model to sequences longer than those of its original training."""


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
    short_factors: Sequence[float] = (),
    long_factors: Sequence[float] = (),
    length: int | Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "*B P"] | np.ndarray, float]:
    r"""Computes the frequencies of `rotary_embedding`, base^(-2i / size), with published scalings for long sequences.

    "linear" divides all frequencies by `factor` (Chen et al., 2023, https://arxiv.org/abs/2306.15595). "llama3" and
    "yarn" (Peng et al., 2023, https://arxiv.org/abs/2309.00071) divide only low frequencies and interpolate between
    these and the unchanged high ones. The criterion is the number of turns of a pair in `original_max_length` tokens.
    YaRN also multiplies queries and keys.

    In two scalings the frequencies depend on the length of the text. "dynamic" enlarges the base as soon as a text is
    longer than `original_max_length` (NTK-aware scaling, appendix A of Peng et al., 2023). "longrope" divides each pair
    by its factor, from one of two lists (Ding et al., 2024, https://arxiv.org/abs/2402.13753).

    Args:
      size: number of rotated features, even.
      base: base of the geometric sequence.
      scaling: one of `ROTARY_SCALINGS`.
      factor: ratio of the new to the original length; of "longrope" only the default of `attention_factor`.
      original_max_length: sequence length of the original training, in tokens.
      low_frequency_factor: for "llama3", number of turns below which a frequency is divided by `factor`.
      high_frequency_factor: for "llama3", number of turns above which a frequency is unchanged.
      beta_fast: for "yarn", number of turns above which a frequency is unchanged.
      beta_slow: for "yarn", number of turns below which a frequency is divided by `factor`.
      attention_factor: the returned `scale`; None means 0.1 log(factor) + 1 for "yarn" and
        sqrt(1 + log(factor) / log(original_max_length)) for "longrope".
      is_truncated: for "yarn", whether the interpolation starts and ends at whole pairs; False in gpt-oss.
      short_factors: for "longrope" only, the divisors in texts of at most `original_max_length` tokens, size / 2
        numbers.
      long_factors: those in longer texts, as many.
      length: for "dynamic" and "longrope", the number of tokens of the text, or of each text of a batch, [B]; None
        means `original_max_length`.

    Returns:
      float32 frequencies in radians per position, [size / 2], or [B, size / 2] for an array of lengths, and the `scale`
      of `rotary_embedding`.

    Raises:
      ValueError: if `size` is odd, the scaling is unknown, or an option is out of range.

    >>> rotary_frequencies(4)[0].tolist(), rotary_frequencies(4, scaling="linear", factor=2.0)[0].tolist()
    ([1.0, 0.009999999776482582], [0.5, 0.004999999888241291])
    """
    if size % 2 or size < 2:
        raise ValueError(f"size, the number of rotated features, must be even and at least 2, got {size}")
    if scaling not in ROTARY_SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(ROTARY_SCALINGS)}, got {scaling!r}")
    if not (base > 0 and factor > 0 and original_max_length > 0):
        raise ValueError(
            f"base, factor and original_max_length must be above 0, got {base}, {factor} and {original_max_length}"
        )
    if scaling == "llama3" and not low_frequency_factor < high_frequency_factor:
        raise ValueError(
            f"low_frequency_factor={low_frequency_factor} must be below high_frequency_factor={high_frequency_factor}"
        )
    if scaling == "yarn" and not (base > 1 and beta_fast > 0 and beta_slow > 0):
        raise ValueError(
            "scaling='yarn' needs base above 1, and beta_fast and beta_slow above 0, got "
            f"base={base}, beta_fast={beta_fast} and beta_slow={beta_slow}"
        )
    if scaling == "dynamic" and size < 4:
        raise ValueError(f"scaling='dynamic' needs a size of at least 4, got {size}")
    if scaling != "longrope" and (short_factors or long_factors):
        raise ValueError(f"short_factors and long_factors are for scaling='longrope' only, got scaling={scaling!r}")
    if len(short_factors) != len(long_factors):
        raise ValueError(
            f"short_factors and long_factors must have equal lengths, got {len(short_factors)} and {len(long_factors)}"
        )
    if scaling == "longrope" and len(short_factors) != size // 2:
        raise ValueError(
            f"scaling='longrope' needs {size // 2} short_factors and long_factors, one for each pair, got "
            f"{len(short_factors)} of each"
        )
    if scaling == "longrope" and not (original_max_length > 1 and min(*short_factors, *long_factors) > 0):
        raise ValueError(
            "scaling='longrope' needs original_max_length above 1, and short_factors and long_factors above 0"
        )
    features = np.arange(0, size, 2, dtype=np.float64)  # 2i of each pair i
    frequencies = base ** (-features / size)
    if scaling == "none":
        return frequencies.astype(np.float32), 1.0
    if scaling == "linear":
        return (frequencies / factor).astype(np.float32), 1.0
    if scaling in ("dynamic", "longrope"):
        xp: Any = jnp if isinstance(length, jax.Array) else np  # NumPy for static lengths, so that nothing is traced
        lengths = xp.asarray(original_max_length if length is None else length)[..., None]
        ones = (1,) * (lengths.ndim - 1)  # axes of the batch
        scale = 1.0
        if scaling == "dynamic":
            # The new base is base * growth^(size / (size - 2)).
            growth = factor * (xp.maximum(lengths, original_max_length) / original_max_length - 1) + 1
            divisors = growth ** (features / (size - 2)).astype(np.float32).reshape(*ones, -1)
        else:
            long, short = (
                np.asarray(factors, np.float32).reshape(*ones, -1) for factors in (long_factors, short_factors)
            )
            divisors = xp.where(lengths > original_max_length, long, short)
            if attention_factor is not None:
                scale = attention_factor
            elif factor > 1:
                scale = math.sqrt(1 + math.log(factor) / math.log(original_max_length))
        return (frequencies.reshape(*ones, -1).astype(np.float32) / divisors).astype(np.float32), scale
    if scaling == "llama3":
        turns = original_max_length * frequencies / (2 * np.pi)
        share = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
        unscaled_share, scale = np.clip(share, 0, 1), 1.0
    else:
        # The (fractional) pairs that turn beta_fast and beta_slow times in original_max_length tokens.
        fast_pair, slow_pair = (
            size * np.log(original_max_length / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (beta_fast, beta_slow)
        )
        low, high = (np.floor(fast_pair), np.ceil(slow_pair)) if is_truncated else (fast_pair, slow_pair)
        low, high = max(low, 0), min(high, size - 1)
        unscaled_share = 1 - np.clip((features / 2 - low) / max(high - low, 0.001), 0, 1)
        scale = 0.1 * np.log(factor) + 1 if attention_factor is None else attention_factor
    mixed = frequencies * unscaled_share + frequencies / factor * (1 - unscaled_share)
    return mixed.astype(np.float32), float(scale)


def relative_position_bucket(
    relative_positions: Int[Array, "*shape"],
    num_buckets: int = 32,
    *,
    max_distance: int = 128,
    is_bidirectional: bool = True,
) -> Int[Array, "*shape"]:
    r"""Assigns distances from query to key to buckets; large distances share a bucket.

    Section 2.1 of "T5" (Raffel et al., 2020, https://arxiv.org/abs/1910.10683). With b buckets per direction and
    e = b // 2, a distance n is in bucket n if n < e, and otherwise in bucket
    min(b - 1, e + floor((b - e) log(n / e) / log(max_distance / e))). Bidirectional attention has b = num_buckets / 2,
    and buckets from b on are for keys after the query. Causal attention has b = num_buckets, and keys after the query
    are in bucket 0. The bucket limits are computed in integers, so that rounding cannot change a bucket.

    Args:
      relative_positions: position of the key minus position of the query, any shape.
      num_buckets: number of buckets, for both directions together.
      max_distance: distances from this one on are in the last bucket.
      is_bidirectional: whether keys after the query get separate buckets; False for decoders.

    Returns:
      Bucket numbers in 0 .. num_buckets - 1, int32, same shape.

    Raises:
      ValueError: if there are too few buckets, `max_distance` is not above e, or positions are not integers.

    >>> relative_position_bucket(jnp.array([-200, -16, -1, 0, 1, 9, 200])).tolist()
    [15, 10, 1, 0, 17, 24, 31]
    """
    b = num_buckets // 2 if is_bidirectional else num_buckets
    e = b // 2
    if not 1 <= e < max_distance:
        raise ValueError(
            f"num_buckets must be at least {4 if is_bidirectional else 2}, and max_distance above {e}, the number of "
            f"distances with their own bucket, got num_buckets={num_buckets} and max_distance={max_distance}"
        )
    # `limits` has the first distance of each bucket from bucket 1 on. Bucket e + j starts at the first n with
    # (n / e)^(b - e) >= (max_distance / e)^j.
    limits = list(range(1, e + 1))
    for j in range(1, b - e):
        n = limits[-1]
        while n ** (b - e) * e**j < e ** (b - e) * max_distance**j:
            n += 1
        limits.append(n)
    limits = np.asarray(limits, np.int32)
    if not jnp.issubdtype(relative_positions.dtype, jnp.integer):
        raise ValueError(f"relative positions must be integers, got {relative_positions.dtype}")
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
    r"""Computes the attention bias of T5: a learned number for each head and bucket of `relative_position_bucket`.

    Args:
      table: [buckets, N].
      num_queries: T.
      num_keys: S; None means T.
      offset: number of keys before the first query; None means S - T, as in `causal_mask`. It may be traced: a step of
        decoding is `relative_position_bias(table, 1, cache_size, offset=step, is_bidirectional=False)`.
      max_distance: distances from this one on share a bucket.
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
    # Only T + S - 1 distances occur: look these up, then shift. A lookup for all pairs has a large scatter as gradient.
    relative = jnp.arange(num_queries + num_keys - 1) - (num_queries - 1) - offset
    buckets = relative_position_bucket(
        relative, table.shape[0], max_distance=max_distance, is_bidirectional=is_bidirectional
    )
    rows = table[buckets].T[:, None]  # [N, 1, T + S - 1]
    return relative_shift(jnp.broadcast_to(rows, (rows.shape[0], num_queries, rows.shape[2])))[None]


def t5_score_mod(
    table: Float[Array, "P N"],
    *,
    offset: int | Int[Array, ""] = 0,
    max_distance: int = 128,
    is_bidirectional: bool = True,
) -> ScoreMod:
    r"""Returns the bias of T5 as a `score_mod`: `relative_position_bias`, computed block by block.

    Section 2.1 of "T5" (Raffel et al., 2020, https://arxiv.org/abs/1910.10683). With
    `dot_product_attention(..., score_mod=t5_score_mod(table), scale=1.0, implementation="chunked")` no array of all
    pairs exists, forward or backward, and `table` gets its gradient.

    Args:
      table: [buckets, N], with a column for each query head.
      offset: number of keys before the first query; it may be traced. One query against a cache needs its position.
      max_distance: distances from this one on share a bucket.
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
    table: Array, offset: int | Array, logits: Array, b: Array, n: Array, t: Array, s: Array, **bucket_options: Any
) -> Array:
    """Adds the T5 bias to a block of logits, [B, N, T, S]: the `score_mod` of `t5_score_mod`.

    Args:
      table: [buckets, N].
      offset: number of keys before the first query.
      logits: a block of logits.
      b: unused.
      n: indices of its heads, of rank 4.
      t: indices of the queries of the block, of rank 4.
      s: indices of its keys, of rank 4.
      **bucket_options: options of `relative_position_bias`.
    """
    del b
    _check_number_of_heads("table must have one column", table.shape[1:], n)
    if np.ndim(offset):
        raise ValueError(f"offset must be one number for all rows, got shape {np.shape(offset)}")
    # Queries and keys of a block are consecutive, so its first distance determines all others.
    first_distance = s[0, 0, 0, 0] - t[0, 0, 0, 0] - offset
    bias = relative_position_bias(table, *logits.shape[2:], offset=-first_distance, **bucket_options)
    return logits + bias.astype(logits.dtype)


def _check_number_of_heads(requirement: str, shape: tuple[int, ...], n: Array) -> None:
    """Raises ValueError unless `shape` is (N,), for the indices n, [1, N, 1, 1], of all query heads."""
    if shape != (n.shape[1],):
        raise ValueError(
            f"{requirement} for each query head, [N] = {(n.shape[1],)}, got {shape}; with grouped queries, too, N is "
            "the number of query heads, not of key heads"
        )


def alibi_score_mod(slopes: Float[Array, " N"], *, offset: int | Int[Array, ""] | Int[Array, " B"] = 0) -> ScoreMod:
    r"""Returns ALiBi as a `score_mod`: logits - slope * distance, computed block by block.

    Section 3 of "Train Short, Test Long" (Press et al., 2022, https://arxiv.org/abs/2108.12409); see `alibi_bias`.

    Args:
      slopes: one for each query head, [N], such as `alibi_slopes(N)`; learned ones get gradients.
      offset: number of keys before the first query, of all rows or of each row, [B]; it may be traced. Query indices of
        a `score_mod` count from 0, so one query against a cache needs its position here.

    Raises:
      ValueError: if `slopes` is no array of rank 1; when it is called, if the number of slopes is not that of query
        heads, or the number of offsets not that of rows.

    >>> from tfx_jax.functional import dot_product_attention
    >>> x, slopes = jnp.zeros((1, 2, 1, 4)), jnp.log(jnp.array([3.0]))
    >>> attend = lambda x: dot_product_attention(x, x, x, score_mod=alibi_score_mod(slopes), return_weights=True)
    >>> jax.jit(attend)(x)[1][0, 0].round(2).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    if np.ndim(slopes) != 1:
        raise ValueError(f"slopes must have one number for each query head, such as alibi_slopes(8), got {slopes!r}")
    return jax.tree_util.Partial(_subtract_distances, slopes, offset)


def _subtract_distances(
    slopes: Array, offset: int | Array, logits: Array, b: Array, n: Array, t: Array, s: Array
) -> Array:
    """Subtracts slope * distance from a block of logits: the `score_mod` of `alibi_score_mod`; see `ScoreMod`."""
    _check_number_of_heads("slopes must have one number", slopes.shape, n)
    if np.ndim(offset):
        if np.shape(offset) != b.shape[:1]:
            raise ValueError(f"offset must be one number or have shape [B] = {b.shape[:1]}, got {np.shape(offset)}")
        offset = jnp.asarray(offset)[:, None, None, None]  # a block has all rows: b is 0 .. B - 1
    return logits - slopes.astype(logits.dtype)[n] * jnp.abs(s - t - offset).astype(logits.dtype)


def relative_shift(scores: Num[Array, "*shape T P"], num_keys: int | None = None) -> Num[Array, "*shape T S"]:
    r"""Maps scores of relative positions to scores of keys, out[t, s] = scores[t, s - t + T - 1], without a gather.

    Appendix B of "Transformer-XL" (Dai et al., 2019, https://arxiv.org/abs/1901.02860). Column c has the scores of the
    relative position (key minus query) c - (T - 1) - offset, where `offset` keys precede the first query. The
    T + S - 1 columns range from the first key relative to the last query to the last key relative to the first query.
    Causal attention with a memory of S - T tokens, as in the paper, needs the first S columns only: -(S - 1) .. 0.

    Args:
      scores: [..., T, P].
      num_keys: S; None means P - T + 1. Columns that `scores` lacks are taken as zeros; if P = S, these are the future.

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
        raise ValueError(f"scores must have at least as many relative positions (columns) as queries, got {p} < {t}")
    # In rows of width W, element (t, s - t + T - 1) has the flat index T - 1 + t (W - 1) + s. Without the first T - 1
    # elements that is element (t, s) in rows of width W - 1.
    width = max(p, s + 1)
    padded = jnp.pad(scores, [(0, 0)] * (len(shape) + 1) + [(0, width - p)])
    flat = padded.reshape(*shape, t * width)[..., t - 1 : -1]
    shifted = flat.reshape(*shape, t, width - 1)[..., :s]
    if p >= t + s - 1:
        return shifted
    has_column = jnp.arange(s)[None, :] - jnp.arange(t)[:, None] + t - 1 < p
    return jnp.where(jnp.expand_dims(has_column, tuple(range(len(shape)))), shifted, 0)


def alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    r"""Returns the slopes of ALiBi, one for each head.

    Section 3 of "Train Short, Test Long" (Press et al., 2022, https://arxiv.org/abs/2108.12409): if N is a power of
    two, 2^(-8/N), 2^(-16/N) .. 2^-8. For other N, as in the authors' code, the slopes of the next lower power of two,
    followed by every other slope of the next higher power of two, starting with the first.

    >>> alibi_slopes(4).tolist(), alibi_slopes(3).tolist()
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is at most N
    exponents = [-8 * (i + 1) / power for i in range(power)]
    exponents += [-4 * (i + 1) / power for i in range(0, 2 * (num_heads - power), 2)]  # -8 / (2 * power) per step
    return jnp.asarray(np.exp2(exponents), jnp.float32)


def alibi_bias(
    num_heads: int,
    num_queries: int,
    num_keys: int | None = None,
    *,
    offset: int | Int[Array, ""] | Int[Array, " B"] | None = None,
) -> Float[Array, "#B N T S"]:
    r"""Computes the bias of ALiBi, -slope * distance, which replaces position embeddings and has no parameters.

    Press et al. (2022, https://arxiv.org/abs/2108.12409), who use it with causal attention. Here the distance is
    symmetric: keys after the query have a negative bias too. A softmax does not change if the same number is added to
    all logits of a query, so causal attention can use `slope * s` instead, a bias [1, N, 1, S] that attentions without
    an array of all pairs support.

    Args:
      num_heads: N.
      num_queries: T.
      num_keys: S; None means T.
      offset: number of keys before the first query, of all rows or of each row, [B]; None means S - T, as in
        `causal_mask`. It may be traced.

    Returns:
      float32 [1, N, T, S], or [B, N, T, S] with an offset of each row, to be passed as `bias`.

    >>> import jax
    >>> jax.jit(alibi_bias, static_argnums=(0, 1))(8, 3)[0, 0].tolist()
    [[-0.0, -0.5, -1.0], [-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """
    num_keys = num_queries if num_keys is None else num_keys
    offset = num_keys - num_queries if offset is None else offset
    offset = jnp.reshape(jnp.asarray(offset), (-1, 1, 1, 1))
    distance = jnp.abs(
        jnp.arange(num_keys)[None, None, None, :] - jnp.arange(num_queries)[None, None, :, None] - offset
    )
    return -alibi_slopes(num_heads)[None, :, None, None] * distance.astype(jnp.float32)
