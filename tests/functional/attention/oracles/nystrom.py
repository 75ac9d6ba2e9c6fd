"""Xiong et al. (2021) in float64 NumPy: one row and one head at a time, of the tokens that are there and no others."""

import itertools

import numpy as np

from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible


def segment_means(x, num_landmarks):
    """Equation 16 for any number of tokens, x [n, H]: the j-th of m segments begins at token ceil(j n / m)."""
    n, m = len(x), num_landmarks
    if n <= m:
        return x
    starts = [-(-j * n // m) for j in range(m + 1)]
    return np.stack([x[start:end].mean(axis=0) for start, end in itertools.pairwise(starts)])


def iterated_inverse(a, num_iterations):
    """Equation 14, from the Z_0 that stands below it."""
    z = a.T / (max(np.abs(a).sum(axis=0)) * max(np.abs(a).sum(axis=1)))
    one = np.eye(len(a))
    for _ in range(num_iterations):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    return z


def nystrom_weights(query, key, *, mask=True, num_landmarks, num_iterations=None, scale=None):
    """Equation 15, [B, N, T, T]; without a number of iterations equation 13, by singular values.

    `mask` hides tokens: in every row of a head the same ones.
    """
    b, t, n, h = query.shape
    seen = visible(query, key, mask)
    query, key = float64(query, key)
    key, scale = per_query_head(key, n), h**-0.5 if scale is None else scale
    weights = np.zeros((b, n, t, t))
    for batch, head in np.ndindex(b, n):
        tokens = np.flatnonzero(seen[batch, head].all(axis=0))
        if not tokens.size:
            continue
        q, k = query[batch, :, head], key[batch, tokens, head]
        landmarks = segment_means(q[tokens], num_landmarks), segment_means(k, num_landmarks)
        f, a, b_ = (
            softmax_over(scale * x @ y.T, np.array(True)) for x, y in ((q, landmarks[1]), landmarks, (landmarks[0], k))
        )
        z = np.linalg.pinv(a) if num_iterations is None else iterated_inverse(a, num_iterations)
        weights[batch, head][:, tokens] = f @ z @ b_
    return weights
