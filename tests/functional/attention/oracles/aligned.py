"""Local attention of Luong et al. (2015), section 3.2, in float64 NumPy, query by query."""

import numpy as np

from tests.functional.attention.oracles.dense import dense_weights, float64, softmax_over, visible


def aligned_weights(query, key, *, position, window, sigma=None, key_position=None, scores=None, **options):
    """Equation 7 over the visible keys of [p - D, p + D], times equation 10's Gaussian; p is of [B, N, T].

    `scores`, [B, N, T, S], are scaled dot products unless they are given.
    """
    (b, t, n, _), s = query.shape, key.shape[1]
    (position,) = float64(np.broadcast_to(position, (b, n, t)))
    places = np.broadcast_to(np.arange(s) if key_position is None else key_position, (b, s))
    inside, gaussian = np.zeros((b, n, t, s), bool), np.ones((b, n, t, s))
    for row, head, place, column in np.ndindex(inside.shape):
        center = position[row, head, place]
        inside[row, head, place, column] = center - window <= places[row, column] <= center + window
        if sigma is not None:
            gaussian[row, head, place, column] = np.exp(-((places[row, column] - center) ** 2) / (2 * sigma**2))
    if scores is None:
        return dense_weights(query, key, **options | {"mask": inside & options.get("mask", True)}) * gaussian
    seen = visible(query, key, options.get("mask", True), options.get("is_causal", False))
    return softmax_over(scores, seen & inside) * gaussian


def predicted_position(query, length, *, w, v):
    """Equation 9: S sigmoid(v . tanh(W q)) of each query, S in `length`."""
    query, w, v = float64(query, w, v)
    places = np.zeros(query.shape[:-1])
    for index in np.ndindex(places.shape):
        hidden = np.array([np.tanh(sum(query[index][h] * w[h, f] for h in range(len(w)))) for f in range(len(v))])
        places[index] = length[index] / (1 + np.exp(-sum(v * hidden)))
    return places
