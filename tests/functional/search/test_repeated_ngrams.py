"""No n-gram twice, against a scan of each row in Python."""

import functools

import jax
import numpy as np
import pytest

from tfx_jax.functional import without_repeated_ngrams

V, P, L = 5, 6, 4


def forbidden(tokens, size):
    """Tokens that would complete an n-gram of the row again."""
    if len(tokens) < size - 1:
        return set()
    last = tuple(tokens[len(tokens) - size + 1 :])
    return {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tuple(tokens[i : i + size - 1]) == last}


@functools.partial(jax.jit, static_argnames="size")
def run(tokens, lengths, inputs, logits, *, size):
    """The logits of each step, [L, B, V], where the inputs of the steps are given, [L, B]."""
    step_fn, cache = without_repeated_ngrams(
        lambda tokens, cache: (logits, cache), None, tokens, lengths, size=size, max_length=L
    )
    return jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, inputs)[1]


@pytest.mark.parametrize(
    "size", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_a_token_that_completes_an_ngram_again_is_forbidden(size):
    rng = np.random.default_rng(0)
    lengths = np.int32([6, 0, 3, 5] * 8)
    tokens, inputs = rng.integers(0, 3, (32, P), np.int32), rng.integers(0, 3, (L, 32), np.int32)
    logits = rng.normal(size=(32, V)).astype(np.float32)
    found = np.asarray(run(tokens, lengths, inputs, logits, size=size))
    expected = np.broadcast_to(logits, found.shape).copy()
    for step in range(L):
        for row, length in enumerate(lengths):
            so_far = [*tokens[row, :length].tolist(), *inputs[: step + 1, row].tolist()]
            expected[step, row, list(forbidden(so_far, size))] = -np.inf
    np.testing.assert_array_equal(found, expected)
    assert np.isneginf(expected).any() == (size < 9)


def test_an_ngram_has_a_token():
    with pytest.raises(ValueError, match="at least 1 token, got size=0"):
        without_repeated_ngrams(None, None, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), size=0, max_length=1)
