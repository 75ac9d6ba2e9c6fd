"""Decomposable attention, equations 15.46 to 15.53 of Murphy (2022), word by word in float64 NumPy."""

import numpy as np


def decomposable(premise, hypothesis, f, g, h):
    """The logits for one pair of sentences without padding, [T, D] and [S, D]; f, g and h map vectors to vectors."""
    a, b = np.asarray(premise, np.float64), np.asarray(hypothesis, np.float64)
    e = np.array([[f(a_i) @ f(b_j) for b_j in b] for a_i in a])
    beta = [sum(np.exp(e[i, j]) * b[j] for j in range(len(b))) / np.exp(e[i]).sum() for i in range(len(a))]
    alpha = [sum(np.exp(e[i, j]) * a[i] for i in range(len(a))) / np.exp(e[:, j]).sum() for j in range(len(b))]
    v_a = sum(g(np.concatenate([a_i, beta_i])) for a_i, beta_i in zip(a, beta, strict=True))
    v_b = sum(g(np.concatenate([b_j, alpha_j])) for b_j, alpha_j in zip(b, alpha, strict=True))
    return h(np.concatenate([v_a, v_b]))
