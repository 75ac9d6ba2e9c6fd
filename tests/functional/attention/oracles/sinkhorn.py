"""Sinkhorn attention in float64 NumPy, one row, one head and one block at a time, of the visible tokens alone."""

import functools

import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible
from tfx_jax.functional import sinkhorn_attention


def balanced(logits, num_iterations):
    """Rows and columns of exp(logits) divided by their sums in turn."""
    matrix = np.exp(logits - logits.max())
    for _ in range(num_iterations):
        matrix = matrix / matrix.sum(axis=1, keepdims=True)
        matrix = matrix / matrix.sum(axis=0, keepdims=True)
    return matrix


def text_weights(q, k, block_size, num_iterations, temperature, scale):
    """Weights of one text and head, [n, n]."""
    n = len(q)
    blocks = [np.arange(i, min(i + block_size, n)) for i in range(0, n, block_size)]
    means_q, means_k = (np.stack([x[block].mean(axis=0) for block in blocks]) for x in (q, k))
    order = balanced(scale * means_q @ means_k.T / temperature, num_iterations)
    weights = np.zeros((n, n))
    for i, block in enumerate(blocks):
        sorted_keys = np.zeros((len(blocks[0]), q.shape[1]))
        for j, other in enumerate(blocks):
            sorted_keys[: len(other)] += order[i, j] * k[other]
        found = softmax_over(scale * q[block] @ np.concatenate([k[block], sorted_keys]).T, np.array(True))
        weights[np.ix_(block, block)] += found[:, : len(block)]
        for j, other in enumerate(blocks):
            weights[np.ix_(block, other)] += order[i, j] * found[:, len(block) :][:, : len(other)]
    return weights


def sinkhorn_weights(query, key, *, block_size, num_iterations=8, temperature=0.75, mask=True, scale=None):
    """Equations of sections 3.1 and 3.2, [B, N, T, T]; `mask` hides tokens."""
    seen = visible(query, key, mask)
    query, key = float64(query, key)
    key, scale = per_query_head(key, query.shape[2]), query.shape[-1] ** -0.5 if scale is None else scale
    weights = np.zeros(seen.shape)
    for row, head in np.ndindex(seen.shape[:2]):
        tokens = np.flatnonzero(seen[row, head].any(axis=0))
        if tokens.size:
            q, k = query[row, tokens, head], key[row, tokens, head]
            weights[row, head][np.ix_(tokens, tokens)] = text_weights(
                q, k, block_size, num_iterations, temperature, scale
            )
    return weights


CASES = (
    Case(
        "sinkhorn",
        functools.partial(sinkhorn_attention, block_size=4),
        functools.partial(sinkhorn_weights, block_size=4),
        is_distribution=False,
    ),
)
