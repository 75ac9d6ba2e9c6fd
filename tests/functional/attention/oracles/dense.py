"""Equation 1 of Vaswani et al. (2017) in float64 NumPy, and what every oracle shares."""

import jax.numpy as jnp
import numpy as np


def visible(query, key, mask=True, is_causal=False):
    """Which pairs may meet, bool [B, N, T, S]."""
    (b, t, n, _), s = query.shape, key.shape[1]
    seen = np.broadcast_to(np.asarray(mask), (b, n, t, s))
    if is_causal:
        seen = seen & np.array([[j <= i + s - t for j in range(s)] for i in range(t)])
    return seen


def float64(*arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def numbers_of(key):
    """What gates are made of: the keys in float32 at least; zeros for keys that an attention refuses."""
    if not jnp.issubdtype(key.dtype, jnp.floating) or 0 in key.shape[2:]:
        return np.zeros((*key.shape[:2], max(key.shape[2], 1), key.shape[3] or 8), np.float32)
    is_numpy = isinstance(key, np.ndarray)  # whose float64 becomes float32 with a warning
    return key.astype(np.float32 if is_numpy else np.promote_types(key.dtype, np.float32))


def per_query_head(keys, num_heads):
    """Repeats the heads of keys or values so that every query head has its own, [B, S, N, _]."""
    return np.repeat(keys, num_heads // keys.shape[2], axis=2)


def softmax_over(logits, seen):
    """Softmax over the visible keys of each row; zeros in a row without any."""
    largest = np.where(seen, logits, -np.inf).max(axis=-1, keepdims=True)
    exponentials = np.exp(np.where(seen, logits - np.where(np.isfinite(largest), largest, 0.0), -np.inf))
    return exponentials / np.where(seen.any(axis=-1, keepdims=True), exponentials.sum(axis=-1, keepdims=True), 1.0)


def dense_weights(query, key, *, bias=0.0, mask=True, is_causal=False, scale=None):
    """softmax(scale * Q K^T + bias) over the visible keys, [B, N, T, S]."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("btnh,bsnh->bnts", query, per_query_head(key, query.shape[2])) * scale
    return softmax_over(logits + np.asarray(bias, np.float64), seen)


def mixed(weights, value):
    """weights @ value for every head, [B, T, N, U]."""
    return np.einsum("bnts,bsnu->btnu", weights, per_query_head(np.asarray(value, np.float64), weights.shape[1]))
