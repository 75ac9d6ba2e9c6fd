"""The attention of section 3.3 of Dai et al. (2019) in float64 NumPy, one pair of query and key at a time."""

import numpy as np

from tests.functional.attention.oracles.dense import float64, per_query_head, softmax_over, visible
from tests.functional.attention.oracles.texts import of_texts


def relative_weights(
    query, key, *, relative_key, content_bias, position_bias, bias=0.0, mask=True, is_causal=False, scale=None
):
    """Softmax over the visible keys of the four terms (a) to (d), [B, N, T, S]; row S - 1 - d of r is distance d."""
    seen = visible(query, key, mask, is_causal)
    query, key, r, u, v = float64(query, key, relative_key, content_bias, position_bias)
    key = per_query_head(key, query.shape[2])
    (_, t, _, h), s = query.shape, key.shape[1]
    logits = np.zeros(seen.shape)
    for b, n, i, j in zip(*np.nonzero(seen), strict=True):
        distance = i + s - t - j
        q, k, r_ij = query[b, i, n], key[b, j, n], r[s - 1 - distance, n]
        logits[b, n, i, j] = q @ k + q @ r_ij + u[n] @ k + v[n] @ r_ij
    scale = h**-0.5 if scale is None else scale
    return softmax_over(scale * logits + np.asarray(bias, np.float64), seen)


def relative_weights_of_texts(query, key, *, relative_key, **options):
    """The same of each text alone; `relative_key` has the distances of the whole row."""
    num_keys = key.shape[1]

    def oracle(query, key, columns, **options):
        rows = slice(num_keys - len(columns), num_keys - 1 + query.shape[1])
        return relative_weights(query, key, relative_key=relative_key[rows], **parameters, **options)

    parameters = {name: options.pop(name) for name in ("content_bias", "position_bias")}
    return of_texts(oracle, query, key, **options)
