"""Other normalizations of the logits in float64 NumPy, one query at a time."""

import functools

import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, per_query_head, visible
from tfx_jax.functional import entmax_attention, sigmoid_attention, stick_breaking_attention, topk_attention


def row_weights(normalize, query, key, *, bias=0.0, mask=True, is_causal=False, scale=None):
    """`normalize(logits)` of the visible keys of each query, in their order, [B, N, T, S]."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("btnh,bsnh->bnts", query, per_query_head(key, query.shape[2])) * scale
    logits = logits + np.asarray(bias, np.float64)
    weights = np.zeros(seen.shape)
    for row in np.ndindex(seen.shape[:3]):
        if seen[row].any():
            weights[row][seen[row]] = normalize(logits[row][seen[row]])
    return weights


def softmax(logits):
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def sigmoid(logits):
    return 1 / (1 + np.exp(-(logits - np.log(len(logits)))))


def entmax(logits, alpha):
    """Weights relu((alpha - 1) l - tau)^(1 / (alpha - 1)), with tau found by bisection."""
    x = (alpha - 1) * logits
    low, high = x.max() - 1, x.max()
    for _ in range(60):
        tau = (low + high) / 2
        is_heavy = (np.maximum(x - tau, 0) ** (1 / (alpha - 1))).sum() > 1
        low, high = (tau, high) if is_heavy else (low, tau)
    return np.maximum(x - low, 0) ** (1 / (alpha - 1))


def topk(logits, num_keys):
    least = np.sort(logits)[::-1][:num_keys][-1]
    weights = np.zeros_like(logits)
    weights[logits >= least] = softmax(logits[logits >= least])
    return weights


def stick_breaking(logits):
    weights, rest = np.zeros_like(logits), 1.0
    for s in reversed(range(len(logits))):
        part = 1 / (1 + np.exp(-logits[s]))
        weights[s], rest = rest * part, rest * (1 - part)
    return weights


CASES = (
    Case("sigmoid_attention", sigmoid_attention, functools.partial(row_weights, sigmoid), is_distribution=False),
    Case(
        "entmax_attention",
        entmax_attention,
        functools.partial(row_weights, functools.partial(entmax, alpha=1.5)),
    ),
    Case(
        "sparsemax",
        functools.partial(entmax_attention, alpha=2.0),
        functools.partial(row_weights, functools.partial(entmax, alpha=2.0)),
    ),
    Case(
        "topk_attention",
        functools.partial(topk_attention, num_keys=3),
        functools.partial(row_weights, functools.partial(topk, num_keys=3)),
        dense=functools.partial(topk_attention, num_keys=17),
    ),
    Case(
        "stick_breaking_attention",
        stick_breaking_attention,
        functools.partial(row_weights, stick_breaking, is_causal=True),
        is_distribution=False,
    ),
)
