"""The scores of Bahdanau et al. (2015) and Luong et al. (2015) in float64 NumPy, pair by pair."""

import numpy as np

from tests.functional.attention.oracles.dense import float64, softmax_over, visible


def weights_of(score, query, key, *, bias=0.0, mask=True, is_causal=False):
    """Softmax of `score(head, q, k)` of every pair over the visible keys, [B, N, T, S]."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    group = query.shape[2] // key.shape[2]
    scores = np.zeros(seen.shape)
    for b, n, t, s in np.ndindex(seen.shape):
        scores[b, n, t, s] = score(n, query[b, t, n], key[b, s, n // group])
    return softmax_over(scores + np.asarray(bias, np.float64), seen)


def additive_weights(query, key, *, w_query, w_key, v, **options):
    """v . tanh(W_q q + W_k k), the same parameters for every head."""
    w_query, w_key, v = float64(w_query, w_key, v)
    return weights_of(lambda _, q, k: v @ np.tanh(w_query.T @ q + w_key.T @ k), query, key, **options)


def covered_weights(query, key, *, w_query, w_key, v, coverage, w_coverage, bias=0.0, mask=True, is_causal=False):
    """v . tanh(W_q q + W_k k + w_c c), c of every pair: equation 11 of See et al. (2017)."""
    seen = visible(query, key, mask, is_causal)
    query, key, w_query, w_key, v, w_coverage = float64(query, key, w_query, w_key, v, w_coverage)
    coverage, group = np.broadcast_to(np.asarray(coverage, np.float64), seen.shape), query.shape[2] // key.shape[2]
    scores = np.zeros(seen.shape)
    for b, n, t, s in np.ndindex(seen.shape):
        hidden = query[b, t, n] @ w_query + key[b, s, n // group] @ w_key + coverage[b, n, t, s] * w_coverage
        scores[b, n, t, s] = v @ np.tanh(hidden)
    return softmax_over(scores + np.asarray(bias, np.float64), seen)


def concat_weights(query, key, *, w, v, **options):
    """v . tanh(W [q; k])."""
    w, v = float64(w, v)
    return weights_of(lambda _, q, k: v @ np.tanh(w.T @ np.concatenate([q, k])), query, key, **options)


def general_weights(query, key, *, w, **options):
    """q . W k."""
    (w,) = float64(w)
    return weights_of(lambda _, q, k: q @ w @ k, query, key, **options)
