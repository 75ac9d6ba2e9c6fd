"""Algorithm 1 of Roy et al. (2020) in float64 NumPy, cluster by cluster."""

import numpy as np

from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible


def normalized(x):
    """LayerNorm without gain and offset."""
    (x,) = float64(x)
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6)


def routing_centroids(query_shape, num_clusters=None):
    """As many normalized Gaussian centroids as the square root of the length, float32 [N, C, H]."""
    _, t, n, h = query_shape
    shape = (n, num_clusters or round(t**0.5), h)
    return normalized(np.random.default_rng(0).normal(size=shape)).astype(np.float32)


def nearest(vectors, centroid, counts, window):
    """The positions of the tokens with the largest products, where float32 could not choose others."""
    tokens = np.flatnonzero(counts)
    closeness = vectors[tokens] @ centroid
    best_first = np.argsort(-closeness, kind="stable")
    if 0 < window < len(tokens):
        last, next_one = closeness[best_first[window - 1 : window + 1]]
        assert last - next_one > 1e-5, "choose another seed: two tokens are equally near to a centroid"
    return tokens[best_first[:window]]


def routing_weights(query, key, *, window, mask=True, is_causal=False, centroids=None, scale=None, bias=None):
    """The weights of every pair, [B, N, T, T]; `mask` hides tokens, [B, 1, 1, T]."""
    b, t, n, h = query.shape
    is_token, seen = visible(query, key, mask)[:, 0, 0], visible(query, key, mask, is_causal)
    centroids = routing_centroids(query.shape) if centroids is None else np.asarray(centroids, np.float64)
    query, key = normalized(query), per_query_head(normalized(key), n)
    weights, times = np.zeros((b, n, t, t)), np.zeros((b, n, t, 1))
    for batch, head, cluster in np.ndindex(*weights.shape[:2], centroids.shape[1]):
        q, k, centroid = query[batch, :, head], key[batch, :, head], centroids[head, cluster]
        of_queries, of_keys = (nearest(x, centroid, is_token[batch], window) for x in (q, k))
        pairs = np.ix_(of_queries, of_keys)
        logits = q[of_queries] @ k[of_keys].T * (h**-0.5 if scale is None else scale)
        if of_keys.size:
            weights[batch, head][pairs] += softmax_over(logits, seen[batch, head][pairs])
            times[batch, head, of_queries, 0] += seen[batch, head][pairs].any(axis=-1)
    return weights / np.maximum(times, 1)
