"""Kernel attention in its quadratic form, float64: the weight of a pair is phi(q) . phi(k)."""

import numpy as np

from tests.functional.attention.oracles.dense import float64, per_query_head, visible


def kernel_weights(phi, query, key, *, mask=True, is_causal=False):
    """phi(q) . phi(k) over its sum for the visible keys, [B, N, T, S]."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    kernel = np.einsum("btnm,bsnm->bnts", phi(query), phi(per_query_head(key, query.shape[2]))) * seen
    return kernel / np.where(seen.any(axis=-1, keepdims=True), kernel.sum(axis=-1, keepdims=True), 1.0)


def favor_weights(query, key, *, projection, scale=None, **options):
    """The random features of lemma 1 of Choromanski et al. (2021)."""
    (projection,) = float64(projection)
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def phi(x):
        x = np.sqrt(scale) * x
        return np.exp(x @ projection.T - np.square(x).sum(axis=-1, keepdims=True) / 2) / np.sqrt(len(projection))

    return kernel_weights(phi, query, key, **options)


def linear_weights(query, key, *, power=1, **options):
    """The features of equation 7 of Katharopoulos et al. (2020), or a power of them."""
    return kernel_weights(lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) ** power, query, key, **options)
