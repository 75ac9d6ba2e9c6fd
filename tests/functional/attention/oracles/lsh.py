"""Section 2 of Kitaev et al. (2020) in float64 NumPy: token by token, round by round, as the paper combines them."""

import numpy as np

from tests.functional.attention.oracles.dense import float64, visible
from tfx_jax.functional.attention.lsh import _rotations


def hashed(vectors, rotation):
    """argmax([xR; -xR]) for every row, where no row is so close to a border that float32 could decide otherwise."""
    sides = np.concatenate([vectors @ rotation, -vectors @ rotation], axis=-1)
    first, second = np.sort(sides, axis=-1)[:, :-3:-1].T
    assert (first - second > 1e-5).all(), "choose another seed: a token is on the border of its bucket"
    return sides.argmax(axis=-1)


def reached(buckets, segments, chunk_size, is_causal):
    """For one round, which keys each token reaches in its own chunk and the one before, bool [T, T]; hidden: None.

    Chunks are cut from the tokens of each segment alone.
    """
    tokens = [i for i, segment in enumerate(segments) if segment is not None]
    reach = np.zeros((len(segments), len(segments)), bool)
    for segment in {segments[i] for i in tokens}:
        order = sorted((i for i in tokens if segments[i] == segment), key=lambda i: (buckets[i], i))
        for place, i in enumerate(order):
            for other, j in enumerate(order):
                if is_causal:
                    near = j < i and place - other <= chunk_size
                else:
                    near = place // chunk_size - other // chunk_size in (0, 1)
                reach[i, j] = near and i != j and buckets[i] == buckets[j]
    return reach


def combined(logits, reaches):
    """The rounds' softmaxes, weighted by exp(z^(r) - z), with keys counted once (the paper's equations for N_ij)."""
    times = np.maximum(sum(reach.astype(int) for reach in reaches), 1)
    union = np.logical_or.reduce(reaches)
    weights = np.zeros(logits.shape)
    for i in np.flatnonzero(union.any(axis=-1)):
        total = np.logaddexp.reduce(logits[i][union[i]])
        for reach in reaches:
            found = np.flatnonzero(reach[i])
            if found.size:
                discounted = logits[i][found] - np.log(times[i][found])
                z = np.logaddexp.reduce(discounted)
                weights[i, found] += np.exp(z - total) * np.exp(discounted - z)
    return weights, union


def lsh_weights(
    query, key, *, rng, num_hashes, num_buckets, chunk_size, mask=True, is_causal=False, scale=None, bias=None
):
    """The weights of every pair, [B, N, T, T]; `mask` hides keys or, as packed segments do, pairs."""
    b, t, n, h = query.shape
    seen = visible(query, key, mask)
    (query,) = float64(query)
    factors = num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)
    rotations = float64(*_rotations(rng, num_hashes, n, h, factors))
    weights = np.zeros((b, n, t, t))
    for batch, head in np.ndindex(b, n):
        is_visible = seen[batch, head].any(axis=0)
        same = seen[batch, head] if (seen[batch, head] != is_visible).any() else np.ones((t, t), bool)
        segments = [int(same[i].argmax()) if is_visible[i] else None for i in range(t)]
        vectors = query[batch, :, head]
        reaches = []
        for r in range(num_hashes):
            buckets = [tuple(digits) for digits in np.array([hashed(vectors, x[r, head]) for x in rotations]).T]
            reaches.append(reached(buckets or [()] * t, segments, chunk_size, is_causal))
        keys = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        logits = vectors @ keys.T * (h**-0.5 if scale is None else scale)
        weights[batch, head], union = combined(logits, reaches)
        weights[batch, head] += np.diag(is_visible & ~union.any(axis=-1))
    return weights
