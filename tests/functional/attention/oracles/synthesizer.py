"""Synthesizers in float64 NumPy: a logit for each pair of positions, which count the visible tokens."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, softmax_over, visible
from tfx_jax.functional import dense_synthesizer_attention, synthesizer_attention

_random = np.random.default_rng(13)
LOGITS = _random.normal(size=(4, 20, 20)).astype(np.float32)
DENSE = {
    name: (_random.normal(size=shape) / 2).astype(np.float32)
    for name, shape in {
        "hidden": (4, 8, 8),
        "hidden_bias": (4, 8),
        "logits": (4, 8, 20),
        "logits_bias": (4, 20),
    }.items()
}


def synthesizer_weights(logits_of, query, key, *, bias=0.0, mask=True, is_causal=False):
    """Weights, [B, N, T, S], pair by pair: `logits_of(q, n, position)` are those of the key positions."""
    seen, mask = visible(query, key, mask, is_causal), np.asarray(mask)
    t, s = query.shape[1], key.shape[1]
    exists = np.ones((len(key), s), int)
    if mask.ndim == 4 and mask.shape[2] == 1:
        exists = np.broadcast_to(mask[:, 0, 0], exists.shape).astype(int)
    logits = np.zeros(seen.shape)
    (query,) = float64(query)
    for b, n, i in np.ndindex(seen.shape[:3]):
        of_positions = logits_of(query[b, i, n], n, max(exists[b, : i + s - t + 1].sum() - 1, 0))
        for j in np.flatnonzero(seen[b, n, i]):
            logits[b, n, i, j] = of_positions[exists[b, :j].sum()]
    return softmax_over(logits + np.asarray(bias, np.float64), seen)


def random_logits(q, n, position):
    return LOGITS[n, position]


def dense_logits(q, n, position):
    inner = np.maximum(q @ DENSE["hidden"][n] + DENSE["hidden_bias"][n], 0)
    return inner @ DENSE["logits"][n] + DENSE["logits_bias"][n]


CASES = (
    Case(
        "synthesizer",
        functools.partial(synthesizer_attention, logits=jnp.asarray(LOGITS)),
        functools.partial(synthesizer_weights, random_logits),
    ),
    Case(
        "dense_synthesizer",
        functools.partial(dense_synthesizer_attention, **{name: jnp.asarray(x) for name, x in DENSE.items()}),
        functools.partial(synthesizer_weights, dense_logits),
    ),
)
