"""The random Synthesizer in float64 NumPy: a logit for each pair of positions, which count the visible tokens."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import softmax_over, visible
from tfx_jax.functional import synthesizer_attention

LOGITS = np.random.default_rng(13).normal(size=(4, 20, 20)).astype(np.float32)


def synthesizer_weights(query, key, *, bias=0.0, mask=True, is_causal=False):
    """Weights, [B, N, T, S], of one pair after the other."""
    seen, mask = visible(query, key, mask, is_causal), np.asarray(mask)
    t, s = query.shape[1], key.shape[1]
    exists = np.ones((len(key), s), int)
    if mask.ndim == 4 and mask.shape[2] == 1:
        exists = np.broadcast_to(mask[:, 0, 0], exists.shape).astype(int)
    logits = np.zeros(seen.shape)
    for b, n, i, j in zip(*np.nonzero(seen), strict=True):
        row = max(exists[b, : i + s - t + 1].sum() - 1, 0)
        logits[b, n, i, j] = LOGITS[n, row, exists[b, :j].sum()]
    return softmax_over(logits + np.asarray(bias, np.float64), seen)


CASES = (
    Case(
        "synthesizer_attention",
        functools.partial(synthesizer_attention, logits=jnp.asarray(LOGITS)),
        synthesizer_weights,
    ),
)
