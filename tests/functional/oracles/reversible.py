"""The reversible residual layers of Gomez et al. (2017, equation 6), one row at a time in float64 NumPy."""

import numpy as np


def reversible(layers, x1, x2):
    """The streams behind all layers, each a pair of matrices: F(x) = tanh(x A), G(x) = tanh(x B)."""
    y1, y2 = np.asarray(x1, np.float64), np.asarray(x2, np.float64)
    for a, b in layers:
        y1 = np.stack([row + np.tanh(other @ a) for row, other in zip(y1, y2, strict=True)])
        y2 = np.stack([row + np.tanh(other @ b) for row, other in zip(y2, y1, strict=True)])
    return y1, y2
