"""Mixtures of heads and forgetting in float64 NumPy, one query at a time."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import EVERYTHING, Case
from tests.functional.attention.oracles.dense import (
    dense_weights,
    float64,
    numbers_of,
    per_query_head,
    softmax_over,
    visible,
)
from tfx_jax.functional import differential_attention, forgetting_attention, talking_heads_attention

_random = np.random.default_rng(12)
LOGITS_MIX, WEIGHTS_MIX = (np.round(8 * (np.eye(4) + _random.normal(size=(2, 4, 4)) / 2)) / 8).astype(np.float32)
LAMBDAS = (np.round(8 * _random.normal(size=(2, 2, 8))) / 16).astype(np.float32)
_TO_GATES = (_random.normal(size=(4, 8)) / 2).astype(np.float32)


def talking_weights(query, key, *, bias=0.0, mask=True, is_causal=False, scale=None):
    """Weights [B, N, T, S] of one query and one head after the other."""
    seen = visible(query, key, mask, is_causal)
    query, key = float64(query, key)
    key = per_query_head(key, query.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mixed, weights = np.zeros(seen.shape), np.zeros(seen.shape)
    heads = range(seen.shape[1])
    for b, to, t, s in zip(*np.nonzero(seen), strict=True):
        mixed[b, to, t, s] = sum(query[b, t, n] @ key[b, s, n] * scale * LOGITS_MIX[n, to] for n in heads)
    soft = softmax_over(mixed + np.asarray(bias, np.float64), seen)
    for b, to, t, s in zip(*np.nonzero(seen), strict=True):
        weights[b, to, t, s] = sum(soft[b, n, t, s] * WEIGHTS_MIX[n, to] for n in heads)
    return weights


def differential_weights(query, key, *, lambda_init=0.8, **options):
    """Differences of the maps of heads 2n and 2n + 1, for both."""
    (a_1, a_2), (b_1, b_2) = np.asarray(LAMBDAS, np.float64)
    factor = np.exp(a_1 @ b_1) - np.exp(a_2 @ b_2) + lambda_init
    maps = dense_weights(query, key, **options)
    for n in range(0, maps.shape[1], 2):
        maps[:, n] = maps[:, n + 1] = maps[:, n] - factor * maps[:, n + 1]
    return maps


def forgetting_weights(query, key, *, bias=0.0, mask=True, is_causal=True, scale=None):
    """Softmax of logits that each token after a key has lowered; gates are functions of the keys."""
    assert is_causal
    n, mask = query.shape[2], np.asarray(mask)
    seen = visible(query, key, mask, is_causal)
    exists = np.ones((len(key), key.shape[1]), bool)
    if mask.ndim == 4 and mask.shape[1:3] == (1, 1):
        exists = np.broadcast_to(mask[:, 0, 0], exists.shape)
    heads = per_query_head(np.asarray(key, np.float64), n)
    forgets = -np.logaddexp(0, -np.einsum("bsnh,nh->bsn", heads, _TO_GATES)) * exists[..., None]
    lowered = np.zeros(seen.shape)
    for b, head, t, s in zip(*np.nonzero(seen), strict=True):
        lowered[b, head, t, s] = forgets[b, s + 1 : t + 1 + key.shape[1] - query.shape[1], head].sum()
    return dense_weights(query, key, bias=lowered + bias, mask=mask, is_causal=True, scale=scale)


def _forgetting(query, key, *arguments, **options):
    key_numbers = numbers_of(key)
    heads = jnp.repeat(key_numbers, len(_TO_GATES) // key_numbers.shape[2], axis=2)
    gate = jnp.einsum("bsnh,nh->bsn", heads, _TO_GATES)
    return forgetting_attention(query, key, *arguments, gate=gate, **options)


CASES = (
    Case(
        "talking_heads",
        functools.partial(
            talking_heads_attention, logits_mix=jnp.asarray(LOGITS_MIX), weights_mix=jnp.asarray(WEIGHTS_MIX)
        ),
        talking_weights,
        dense=functools.partial(talking_heads_attention, logits_mix=jnp.eye(4), weights_mix=jnp.eye(4)),
        is_distribution=False,
    ),
    # Pairs of values are shared by pairs of heads: grouped queries are in test_head_mixtures.py.
    Case(
        "differential",
        functools.partial(
            differential_attention, lambda_query=jnp.asarray(LAMBDAS[0]), lambda_key=jnp.asarray(LAMBDAS[1])
        ),
        differential_weights,
        takes=EVERYTHING - {"grouped"},
        is_distribution=False,
    ),
    Case("forgetting", _forgetting, forgetting_weights),
)
