"""Softmax attention with all its options in float64 NumPy: soft cap, sinks, windows, lengths, changed logits."""

import functools

import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import float64, per_query_head, visible
from tfx_jax.functional import chunked_attention, dot_product_attention


def option_logits(query, key, *, bias=0.0, scale=None, cap=None, score=None):
    """score(c tanh(scale * Q K^T / c)) + bias, [B, N, T, S]; `score(logits, b, n, t, s)` takes one pair."""
    query, key = float64(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.einsum("btnh,bsnh->bnts", query, per_query_head(key, query.shape[2])) * scale
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    if score is not None:
        logits = np.array([score(logits[place], *place) for place in np.ndindex(logits.shape)]).reshape(logits.shape)
    return logits + np.asarray(bias, np.float64)


def option_pairs(query, key, *, mask=True, is_causal=False, window=None, lengths=None, query_lengths=None, seen=None):
    """Which pairs may meet, bool [B, N, T, S]; `seen(b, n, t, s)` takes one pair, `lengths` are those of the keys.

    Where they are given and T < S, the queries of a row are the last ones of its keys.
    """
    shift = key.shape[1] - query.shape[1]
    pairs = visible(query, key, mask, False).copy()
    for b, n, t, s in np.ndindex(pairs.shape):
        if lengths is not None and query.shape[1] < key.shape[1]:
            shift = lengths[b] - (query.shape[1] if query_lengths is None else query_lengths[b])
        if is_causal:
            pairs[b, n, t, s] &= s <= t + shift
        if window is not None:
            pairs[b, n, t, s] &= -window[1] <= t + shift - s <= window[0]
        if lengths is not None:
            pairs[b, n, t, s] &= s < lengths[b]
        if seen is not None:
            pairs[b, n, t, s] &= seen(b, n, t, s)
    return pairs


def weights_and_lse(logits, pairs, sinks=None):
    """Softmax over pairs and a sink for each head, [B, N, T, S], and the logarithm of its denominator, [B, N, T]."""
    terms = np.where(pairs, np.exp(logits), 0.0)
    total = terms.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(float64(sinks)[0])[None, :, None]
    with np.errstate(divide="ignore"):
        return terms / np.where(total == 0, 1, total)[..., None], np.log(total)


_CAP, _SINKS = 1.25, np.array([0.5, -1.0, 0.0, 2.0], np.float32)


def _score(logits, b, n, t, s):
    return logits * (1 + n / 8)


def _weights(query, key, *, bias=0.0, mask=True, is_causal=False):
    logits = option_logits(query, key, bias=bias, cap=_CAP, score=_score)
    return weights_and_lse(logits, option_pairs(query, key, mask=mask, is_causal=is_causal), _SINKS)[0]


def _attend(attention, query, *arguments, **options):
    sinks = _SINKS[: query.shape[2]]
    return attention(query, *arguments, logits_soft_cap=_CAP, sinks=sinks, score_mod=_score, **options)


CASES = (
    Case("dense-options", functools.partial(_attend, dot_product_attention), _weights, is_distribution=False),
    Case(
        "chunked-options",
        functools.partial(_attend, functools.partial(chunked_attention, chunk_size=5)),
        _weights,
        is_lean=True,
        is_distribution=False,
    ),
)
