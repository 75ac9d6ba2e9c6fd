"""MoBA, native sparse attention and DeepSeek's indexer in float64 NumPy, query by query of the tokens of a text."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import (
    float64,
    numbers_of,
    per_query_head,
    softmax_over,
    visible,
)
from tests.functional.attention.oracles.texts import of_texts
from tfx_jax.functional import indexed_attention, moba_attention, native_sparse_attention

_random = np.random.default_rng(15)
COMPRESSION = {
    "key_mix": _random.normal(size=3).astype(np.float32),
    "value_mix": _random.normal(size=3).astype(np.float32),
    "key_positions": _random.normal(size=(3, 8)).astype(np.float32),
}
_TO_GATES, _TO_QUERIES, _TO_KEYS, _TO_WEIGHTS = (
    (_random.normal(size=size) / 2).astype(np.float32) for size in ((8, 4, 3), (8, 3, 5), (8, 5), (8, 3))
)


def best(scores, number):
    """The places of the largest scores; those equal to the last of them too."""
    return np.flatnonzero(scores >= np.sort(scores)[::-1][:number][-1])


def rows_of(weights_fn, query, key, *, bias=0.0, mask=True, is_causal=False, scale=None):
    """Returns an oracle: `weights_fn(query, key, head, t, logits, seen, scale)` gives the weights of query t, [S]."""

    def oracle(query, key, columns=None, *, bias=0.0, mask=True, is_causal=False):
        seen = visible(query, key, mask, is_causal)
        q, k = float64(query, key)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        logits = np.einsum("btnh,bsnh->bnts", q, per_query_head(k, q.shape[2])) * factor
        logits, weights = logits + np.asarray(bias, np.float64), np.zeros(seen.shape)
        for row, head, t in np.ndindex(seen.shape[:3]):
            of_query = weights_fn(q[row], k[row], head, t, logits[row, head, t], seen[row, head, t], factor)
            weights[row, head, t] = of_query
        return weights

    bias = None if np.ndim(bias) == 0 else bias
    return of_texts(oracle, query, key, bias=bias, mask=mask, is_causal=is_causal)


def moba(q, k, head, t, logits, seen, scale, *, block_size, num_blocks, is_causal):
    """The own block, and the blocks before it, or all, whose mean keys have the largest products."""
    own, of = (t + len(k) - len(q)) // block_size, head * k.shape[1] // q.shape[1]
    blocks = range(own + 1 if is_causal else -(-len(k) // block_size))
    cut = [slice(i * block_size, (i + 1) * block_size) for i in blocks]
    scores = np.array([np.inf if i == own else q[t, head] @ k[cut[i], of].mean(axis=0) for i in blocks])
    chosen = np.isin(np.arange(len(k)) // block_size, best(scores, num_blocks))
    return softmax_over(logits, chosen & seen)


def native_sparse(q, k, head, t, logits, seen, scale, *, num_blocks, window):
    """Three branches with gates; the heads of a group select blocks together."""
    n, size, place = q.shape[1], len(COMPRESSION["key_mix"]), t + len(k) - len(q)
    of, group = head * k.shape[1] // n, n // k.shape[1]
    mix, value_mix, offsets = float64(*COMPRESSION.values())
    keys = [mix @ (k[i : i + size, of] + offsets) for i in range(0, place + 2 - size, size)]
    by_head = {
        h: softmax_over(scale * np.array(keys) @ q[t, h], np.array(True)) if keys else np.zeros(0)
        for h in range(of * group, (of + 1) * group)
    }
    scores = np.append(sum(by_head.values()), -np.inf)[: place // size + 1]
    scores[place // size] = np.inf
    chosen = np.isin(np.arange(len(k)) // size, best(scores, num_blocks))
    compressed = np.zeros(len(k))
    for block, weight in enumerate(by_head[head]):
        compressed[block * size : (block + 1) * size] = weight * value_mix
    selected = softmax_over(logits, chosen & seen)
    near = softmax_over(logits, seen & (place - np.arange(len(k)) < window))
    gates = 1 / (1 + np.exp(-np.einsum("h,hi->i", k[place, 0], _TO_GATES.astype(np.float64)[:, head])))
    return gates @ np.stack([compressed, selected, near])


def indexed(q, k, head, t, logits, seen, scale, *, num_keys):
    """The keys of the largest index scores."""
    x, place = k[:, 0], t + len(k) - len(q)
    queries = np.einsum("h,hji->ji", x[place], _TO_QUERIES.astype(np.float64))
    scores = np.maximum(queries @ (x @ _TO_KEYS).T, 0).T @ (x[place] @ _TO_WEIGHTS)
    if not seen.any():
        return np.zeros(len(k))
    chosen = np.zeros(len(k), bool)
    chosen[best(np.where(seen, scores, -np.inf), num_keys)] = True
    return softmax_over(logits, chosen & seen)


def _moba_weights(query, key, *, is_causal=False, **options):
    weights_fn = functools.partial(moba, block_size=3, num_blocks=2, is_causal=is_causal)
    return rows_of(weights_fn, query, key, is_causal=is_causal, **options)


def _native_weights(query, key, *, is_causal=True, **options):
    weights_fn = functools.partial(native_sparse, num_blocks=2, window=4)
    return rows_of(weights_fn, query, key, is_causal=is_causal, **options)


def _native_sparse(query, key, *arguments, **options):
    gate = jnp.einsum("bsh,hni->bsni", numbers_of(key)[:, :, 0], _TO_GATES[:, : query.shape[2]])
    parameters = {name: jnp.asarray(x) for name, x in COMPRESSION.items()}
    options = {"num_blocks": 2, "window": 4} | options
    return native_sparse_attention(query, key, *arguments, gate=gate, **parameters, **options)


def _indexed(query, key, *arguments, **options):
    x = numbers_of(key)[:, :, 0]
    index = {
        "index_query": jnp.einsum("bsh,hji->bsji", x, _TO_QUERIES),
        "index_key": jnp.einsum("bsh,hi->bsi", x, _TO_KEYS),
        "index_weight": jnp.einsum("bsh,hj->bsj", x, _TO_WEIGHTS),
    }
    return indexed_attention(query, key, *arguments, **index, **{"num_keys": 4} | options)


CASES = (
    Case(
        "moba",
        functools.partial(moba_attention, block_size=3, num_blocks=2),
        _moba_weights,
        dense=functools.partial(moba_attention, block_size=3, num_blocks=6),
        is_lean=True,
    ),
    Case("native_sparse", _native_sparse, _native_weights, is_distribution=False, is_lean=True),
    Case(
        "indexed",
        _indexed,
        functools.partial(rows_of, functools.partial(indexed, num_keys=4)),
        dense=functools.partial(_indexed, num_keys=17),
        is_lean=True,
    ),
)
