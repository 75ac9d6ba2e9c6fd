"""Linformer and induced attention in float64 NumPy, one row and one head at a time, of the visible tokens alone."""

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible
from tfx_jax.functional import induced_attention, linformer_attention

_random = np.random.default_rng(14)
E, F = (_random.normal(size=(2, 5, 8192)) / 2).astype(np.float32)
INDUCING = _random.normal(size=(4, 3, 8)).astype(np.float32)


def weights_through(weights_fn, query, key, *, mask=True, scale=None):
    """`weights_fn(head, q, k, scale)` gives the weights of the visible keys of a head, [T, n]."""
    seen = visible(query, key, mask)
    query, key = float64(query, key)
    key, scale = per_query_head(key, query.shape[2]), query.shape[-1] ** -0.5 if scale is None else scale
    weights = np.zeros(seen.shape)
    for row, head in np.ndindex(seen.shape[:2]):
        tokens = np.flatnonzero(seen[row, head].any(axis=0))
        if tokens.size:
            weights[row, head][:, tokens] = weights_fn(head, query[row, :, head], key[row, tokens, head], scale)
    return weights


def linformer_weights(query, key, **options):
    """Softmax over mixtures of keys, times how much of each value is in them."""

    def weights_fn(head, q, k, scale):
        keys = E[:, : len(k)].astype(np.float64) @ k
        return softmax_over(scale * q @ keys.T, np.array(True)) @ F[:, : len(k)]

    return weights_through(weights_fn, query, key, **options)


def induced_weights(query, key, **options):
    """Tokens to inducing points, and these to tokens."""

    def weights_fn(head, q, k, scale):
        inward = softmax_over(scale * INDUCING[head].astype(np.float64) @ k.T, np.array(True))
        return softmax_over(scale * q @ (inward @ k).T, np.array(True)) @ inward

    return weights_through(weights_fn, query, key, **options)


def _linformer(*arguments, **options):
    projections = {"key_projection": jnp.asarray(E), "value_projection": jnp.asarray(F)}
    return linformer_attention(*arguments, **projections, **options)


def _induced(query, *arguments, **options):
    inducing = jnp.asarray(INDUCING[: query.shape[2], :, : query.shape[3]])  # one head in the test of memory
    return induced_attention(query, *arguments, inducing=inducing, **options)


CASES = (
    Case("linformer", _linformer, linformer_weights, is_lean=True, is_distribution=False),
    Case("induced", _induced, induced_weights, is_lean=True),
)
