"""What beam search does to be quick: it ranks blocks of the vocabulary first, and moves no pinned cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.functional import BeamInvariant, beam_search, greedy_search
from tfx_jax.functional.search import _BLOCKS, _best_alive, _Past


def rank_all(logits, past, is_last):
    """The definition: all continuations of a row in one list."""
    batch, beam_size, vocab_size = logits.shape
    totals = past.extended_by(jnp.where(is_last[:, None, None], -jnp.inf, logits))
    log_probs, places = jax.lax.top_k(totals.reshape(batch, -1), beam_size)
    return log_probs, places // vocab_size, places % vocab_size


BOTH = jax.jit(lambda *arguments: (_best_alive(*arguments), rank_all(*arguments)))
SHAPES = [(3, 5), (129, 1), (300, 4), (1031, 5)]  # vocabulary and beam; compiled once each


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SHAPES), levels=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_best_alive_are_those_of_ranking_everything(shape, levels, seed):
    """Ties too: few levels of logits make many."""
    vocab_size, beam_size = shape
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (3, beam_size, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    past = _Past(*rng.integers(-3, 1, (3, 3, beam_size)).astype(np.float32))
    is_last = np.array([False, seed % 2 == 0, False])
    found, want = jax.tree.map(np.asarray, BOTH(logits, past, is_last))
    np.testing.assert_array_equal(found[0], want[0])
    exists = np.isfinite(want[0])  # of what does not exist, parent and token mean nothing
    for got, expected in zip(found[1:], want[1:], strict=True):
        np.testing.assert_array_equal(got[exists], expected[exists])
    assert (found[2] >= 0).all()
    assert (found[2] < vocab_size).all()


@pytest.mark.parametrize("vocab_size", [37_000, 32_000, 10_000, 30_522])
def test_common_vocabularies_are_ranked_without_a_copy_of_the_logits(vocab_size):
    shapes = jax.ShapeDtypeStruct((2, 4, vocab_size), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.bool_)
    past = _Past(*[jax.ShapeDtypeStruct((2, 4), jnp.float32)] * 3)
    memory = jax.jit(_best_alive).lower(shapes[0], past, shapes[1]).compile().memory_analysis()
    has_divisor = any(vocab_size % block == 0 for block in _BLOCKS)
    size = 2 * 4 * vocab_size * 4
    assert memory.temp_size_in_bytes < (0.2 if has_divisor else 1.3) * size


def test_pinned_parts_are_neither_repeated_nor_moved():
    """The step writes its beams' tokens beside each other; no one moves them."""
    seen = []

    def step_fn(tokens, cache):
        log = cache["log"].value
        seen.append(log.shape)
        log = jax.lax.dynamic_update_slice(log, tokens[None], (cache["position"], 0))
        logits = jnp.zeros((tokens.size, 5)).at[:, 2].set(-1.0).at[jnp.arange(6), 3 + cache["position"] % 2].set(4.0)
        return logits, {"log": BeamInvariant(log), "position": cache["position"] + 1}

    cache = {"log": BeamInvariant(np.zeros((7, 6), np.int32)), "position": np.zeros((), np.int32)}
    starts = np.ones(2, np.int32)
    jax.eval_shape(lambda cache: beam_search(step_fn, cache, starts, beam_size=3, max_length=7, eos_id=2), cache)
    assert set(seen) == {(7, 6)}


def test_pinned_parts_may_have_any_shape():
    def step_fn(tokens, cache):
        return jnp.zeros((tokens.size, 4)).at[:, 2].set(1.0), cache

    starts = np.ones(2, np.int32)
    search = jax.jit(lambda cache: greedy_search(step_fn, cache, starts, max_length=3, eos_id=2))
    tokens, _ = search(BeamInvariant(np.zeros(9, np.float32)))
    assert tokens.tolist() == [[2, 0, 0]] * 2


def test_the_last_token_of_a_vocabulary_that_blocks_do_not_divide_survives_once():
    vocab_size, beam_size = 1031, 3  # a prime beyond the largest block
    logits = np.zeros((1, beam_size, vocab_size), np.float32)
    logits[0, :, -1] = [1, 3, 2]
    past = _Past(*np.zeros((3, 1, beam_size), np.float32))
    log_probs, parents, tokens = jax.jit(_best_alive)(logits, past, np.zeros(1, bool))
    np.testing.assert_array_equal(log_probs, [[3, 2, 1]])
    np.testing.assert_array_equal(parents, [[1, 2, 0]])
    np.testing.assert_array_equal(tokens, [[vocab_size - 1] * 3])
