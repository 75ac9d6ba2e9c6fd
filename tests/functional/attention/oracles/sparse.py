"""Which pairs the sparse attentions let meet, pair by pair; the rest is equation 1 over these pairs."""

import functools

import numpy as np

from tests.functional.attention.case import Case
from tests.functional.attention.oracles.dense import dense_weights
from tests.functional.attention.oracles.texts import of_texts
from tfx_jax.functional import fixed_attention, strided_attention


def local_pairs(t, s, block_size):
    """[T, S], the queries being the last T of S positions, all of them cut into blocks."""
    return np.array([[j // block_size == (i + s - t) // block_size for j in range(s)] for i in range(t)])


def window_pairs(t, s, back, ahead):
    """[T, S], the queries being the last T of S positions."""
    return np.array([[i + s - t - back <= j <= i + s - t + ahead for j in range(s)] for i in range(t)])


def strided_pairs(t, s, stride):
    """[T, S]: near ones and those at multiples of the stride."""
    places = [[abs(i + s - t - j) for j in range(s)] for i in range(t)]
    return np.array([[d <= stride or d in range(0, s, stride) for d in row] for row in places])


def fixed_pairs(t, s, block_size, num_summaries):
    """[T, S]: those of a block, and the last ones of each block."""
    summaries = [j for j in range(s) if any((j + 1 + c) % block_size == 0 for c in range(num_summaries))]
    return local_pairs(t, s, block_size) | np.isin(np.arange(s), summaries)[None]


def longformer_pairs(is_global, window):
    """[T, T]: near ones, and those of which one is global, bool [T]."""
    near = window_pairs(len(is_global), len(is_global), window, window)
    return near | is_global[:, None] | is_global[None]


def block_pairs(blocks, length, block_size):
    """[T, T] from which blocks see which."""
    return np.array([[blocks[i // block_size, j // block_size] for j in range(length)] for i in range(length)])


def weights_over(pairs, query, key, *, mask=True, **options):
    """Dense weights, [B, N, T, S], over what both `pairs(T, S)` and the mask let meet, padding or not."""
    allowed = pairs(query.shape[1], key.shape[1])[None, None]
    return dense_weights(query, key, mask=np.asarray(mask) & allowed, **options)


def weights_of_texts(pairs, query, key, **options):
    """The same of each text alone."""

    def oracle(query, key, columns, **options):
        return weights_over(pairs, query, key, **options)

    return of_texts(oracle, query, key, **options)


def longformer_weights(query, key, *, is_global, window, **options):
    """Of each text alone, the global tokens being those of the row."""

    def oracle(query, key, columns, **options):
        pairs = longformer_pairs(is_global[columns], window)
        return weights_over(lambda *_: pairs, query, key, **options)

    return of_texts(oracle, query, key, **options)


CASES = (
    Case(
        "strided",
        functools.partial(strided_attention, stride=3),
        functools.partial(weights_of_texts, functools.partial(strided_pairs, stride=3)),
        dense=functools.partial(strided_attention, stride=16),
        is_lean=True,
    ),
    Case(
        "fixed",
        functools.partial(fixed_attention, block_size=5, num_summaries=2),
        functools.partial(weights_of_texts, functools.partial(fixed_pairs, block_size=5, num_summaries=2)),
        dense=functools.partial(fixed_attention, block_size=17),
        is_lean=True,
    ),
)
