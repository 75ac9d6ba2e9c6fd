"""Relative positions, one pair at a time in float64 NumPy."""

import numpy as np


def t5_bucket(relative_position, num_buckets, max_distance, is_bidirectional):
    """Raffel et al. (2020), section 2.1: exact numbers for near tokens, logarithmically wider ones up to a maximum."""
    buckets = num_buckets // 2 if is_bidirectional else num_buckets
    later = buckets if is_bidirectional and relative_position > 0 else 0
    distance = abs(relative_position) if is_bidirectional else max(0, -relative_position)
    exact = buckets // 2
    if distance < exact:
        return later + distance
    share = np.log(distance / exact) / np.log(max_distance / exact)  # 0 at the first shared bucket, 1 at the maximum
    return later + min(exact + int(share * (buckets - exact)), buckets - 1)


def turned(vector, position, base=10_000.0):
    """Section 3.2.2 of Su et al. (2021): the pair (2i, 2i + 1) turned by position / base^(2i / H)."""
    out = np.zeros(len(vector))
    for i in range(len(vector) // 2):
        angle = position / base ** (2 * i / len(vector))
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        out[2 * i : 2 * i + 2] = turn @ np.asarray(vector, np.float64)[2 * i : 2 * i + 2]
    return out


def transformer_xl_scores(query, key, relative, u, v):
    """Dai et al. (2019), section 3.3, (a) to (d), one head: q.k + q.r_(i-j) + u.k + v.r_(i-j); T queries, S >= T keys.

    `relative(distance)` is the vector of query minus key. The future is left out: it has no score in the paper.
    """
    scores = np.zeros((len(query), len(key)))
    for i, j in np.ndindex(scores.shape):
        distance = i + len(key) - len(query) - j
        if distance >= 0:
            scores[i, j] = (query[i] + u) @ key[j] + (query[i] + v) @ relative(distance)
    return scores
