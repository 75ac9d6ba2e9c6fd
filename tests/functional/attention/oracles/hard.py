"""Hard attention at evaluation: all weight on the key that soft attention weighs most."""

import numpy as np

from tests.functional.attention.oracles.dense import dense_weights


def most_probable(query, key, **options):
    """One-hot [B, N, T, S]; zeros where a query sees nothing."""
    soft = dense_weights(query, key, **options)
    hard = np.zeros_like(soft)
    for row in np.ndindex(soft.shape[:3]):
        if soft[row].any():
            hard[row][np.argmax(soft[row])] = 1.0
    return hard
