"""Short causal convolutions over tokens, which skip padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped


def short_convolution(
    x: Float[Array, "B T *features"],
    kernel: Float[Array, "W *features"],
    past: Float[Array, "B W-1 *features"] | None = None,
    *,
    token_mask: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T *features"]:
    r"""Computes y_t = sum_j kernel[W - 1 - j] * x_{t - j}: a separate causal filter for each feature.

    The convolution of queries, keys and values in Mamba-2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060) and
    Gated DeltaNet (Yang et al., 2024, https://arxiv.org/abs/2412.06464), without its activation. t counts tokens:
    padding is skipped, wherever it is. Tokens before the first one are zeros.

    Args:
      x: [B, T, *features].
      kernel: one number for each feature and distance, [W, *features]; the last row multiplies the token itself.
      past: the W - 1 tokens before `x`, from `last_tokens`; None means zeros.
      token_mask: True for tokens, False for padding, [B, T]; None means no padding.
      segment_ids: packed sequences, which do not see each other; 0 is padding. The tokens of a sequence must be
        consecutive.

    Returns:
      [B, T, *features] in the dtype of `x`, summed in that of `kernel` if it is more precise; zeros at padding.

    Raises:
      ValueError: for `past` together with `segment_ids`, and if shapes do not fit.

    >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    >>> short_convolution(x, jnp.array([[10.0], [1.0]])).ravel().tolist()
    [1.0, 12.0, 23.0]
    """
    if past is not None and segment_ids is not None:
        raise ValueError("a short convolution takes either past or segment_ids, got both")
    if kernel.ndim < 1 or kernel.shape[1:] != x.shape[2:]:
        raise ValueError(f"kernel must be [W, *features] with the features {x.shape[2:]} of x, got {kernel.shape}")
    width, length, dtype = kernel.shape[0], x.shape[1], x.dtype
    x, exists = _with_past(x, width, past, _is_token(token_mask, segment_ids))
    x = x.astype(np.promote_types(dtype, kernel.dtype))
    kernel = kernel.astype(x.dtype)[:, None, None]
    if exists is None:
        taps = [x[:, start : start + length] for start in range(width)]
        return functools.reduce(jnp.add, map(jnp.multiply, taps, kernel)).astype(dtype)
    previous = _previous(exists)
    ids = None if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (width - 1, 0)))
    # With padding, follow each token back to the token before it, once for each row of the kernel. `index` is the token
    # that each position has reached, and `is_inside` whether it exists and is of the same sequence.
    index = jnp.broadcast_to(jnp.arange(width - 1, width - 1 + length), (x.shape[0], length))
    out, is_inside = 0, exists[:, width - 1 :]
    for row in kernel[::-1]:
        out = out + jnp.where(_expanded(is_inside, x), _at(x, index), 0) * row
        index = jnp.take_along_axis(previous, index, axis=1)
        is_inside &= index >= 0
        index = jnp.maximum(index, 0)
        if ids is not None:
            is_inside &= jnp.take_along_axis(ids, index, axis=1) == ids[:, width - 1 :]
    return jnp.asarray(out).astype(dtype)


def last_tokens(
    x: Float[Array, "B T *features"],
    count: int,
    past: Float[Array, "B count *features"] | None = None,
    *,
    token_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B count *features"]:
    """Returns the last tokens of `past` and `x` together, without padding: the next `past` of `short_convolution`.

    Args:
      x: [B, T, *features].
      count: number of tokens, W - 1 for a kernel of W rows.
      past: the tokens before `x`; None means zeros.
      token_mask: True for tokens, False for padding, [B, T]; None means no padding.

    Raises:
      ValueError: if `past` has another shape.

    >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    >>> last = jax.jit(last_tokens, static_argnums=1)(x, 2, token_mask=jnp.array([[True, True, False]]))
    >>> last.ravel().tolist()
    [1.0, 2.0]
    """
    x, exists = _with_past(x, count + 1, past, token_mask)
    if exists is None or not count:
        return x[:, x.shape[1] - count :]
    previous = _previous(jnp.pad(exists, ((0, 0), (0, 1))))
    indices = [previous[:, -1:]]  # of the last token; then of the one before it, and so on
    while len(indices) < count:
        indices.append(jnp.take_along_axis(previous, indices[-1], axis=1))
    return _at(x, jnp.concatenate(indices[::-1], axis=1))


def _is_token(token_mask: Array | None, segment_ids: Array | None) -> Array | None:
    """Returns True for tokens that neither `token_mask` nor segment 0 marks as padding; None means all."""
    if segment_ids is None:
        return token_mask
    return segment_ids != 0 if token_mask is None else token_mask & (segment_ids != 0)


def _with_past(x: Array, width: int, past: Array | None, exists: Array | None) -> tuple[Array, Array | None]:
    """Joins `x` and the tokens before it, and sets padding to 0.

    Args:
      x: [B, T, *features].
      width: W of the convolution.
      past: the W - 1 tokens before `x`, [B, W - 1, *features]; None means zeros.
      exists: True for tokens of `x`, False for padding; None means no padding.

    Returns:
      [B, W - 1 + T, *features], and True for its tokens, [B, W - 1 + T]; None if `exists` is None.
    """
    if exists is not None:
        exists = jnp.broadcast_to(exists, x.shape[:2])
        x = jnp.where(_expanded(exists, x), x, 0)  # not a product, because padding may hold NaN
        exists = jnp.pad(exists, ((0, 0), (width - 1, 0)), constant_values=True)
    shape = (x.shape[0], width - 1, *x.shape[2:])
    if past is not None and past.shape != shape:
        raise ValueError(f"past must be {shape}, the {width - 1} tokens before x, got {past.shape}")
    past = jnp.zeros_like(x, shape=shape) if past is None else past.astype(x.dtype)
    return jnp.concatenate([past, x], axis=1), exists


def _previous(exists: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the index of the last token before each position, -1 if there is none."""
    newest = jax.lax.cummax(jnp.where(exists, jnp.arange(exists.shape[1])[None], -1), axis=1)
    return jnp.pad(newest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def _at(x: Float[Array, "B S *features"], index: Int[Array, "B T"]) -> Float[Array, "B T *features"]:
    """Returns the tokens at some indices of each row."""
    return jnp.take_along_axis(x, _expanded(index, x), axis=1)


def _expanded(x: Shaped[Array, "B T"], like: Array) -> Shaped[Array, "B T *ones"]:
    """Appends axes of size 1 until the rank is that of `like`."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - 2))
