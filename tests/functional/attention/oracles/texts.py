"""Attention of the texts of a batch, each read alone: what padding and packing must not change."""

import numpy as np


def of_texts(oracle, query, key, *, bias=None, mask=True, segment_ids=None, is_causal=False):
    """Weights, [B, N, T, S], of each text alone, in the columns of its tokens; padding sees nothing.

    `oracle(query, key, columns=..., **options)` gives the weights of one text, whose tokens are in `columns`; the
    queries are the last of them. It gets a bias, a mask and causality where there are any. A mask of all pairs says
    nothing about padding.
    """
    (b, t, n, _), s = query.shape, key.shape[1]
    mask = np.asarray(mask)
    full = np.broadcast_to(mask, (b, n, t, s))
    options = {"is_causal": True} if is_causal else {}
    is_padding_mask = mask.ndim == 4 and mask.shape[2] == 1
    ids = np.ones((b, s), int) if segment_ids is None else np.asarray(segment_ids)
    weights = np.zeros((b, n, t, s))
    for row in range(b):
        exists = full[row].any(axis=(0, 1)) if is_padding_mask else np.ones(s, bool)
        for segment in set(ids[row]) - {0}:
            columns = np.flatnonzero(exists & (ids[row] == segment))
            queries = columns[columns >= s - t] - (s - t)
            if t == 1:  # the columns behind the last token are a cache's room
                queries = np.array([0] if ids[row][ids[row] != 0][-1] == segment else [], int)
            if not len(queries) or not len(columns):
                continue
            place = (slice(row, row + 1), slice(None), queries[:, None], columns)
            if bias is not None:
                options["bias"] = np.broadcast_to(bias, full.shape)[place]
            if not full[place].all():
                options["mask"] = full[place]
            part = query[row : row + 1, queries], key[row : row + 1, columns]
            weights[place] = oracle(*part, columns=columns, **options)
            options.pop("mask", None)
    return weights
