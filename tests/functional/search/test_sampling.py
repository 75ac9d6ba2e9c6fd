"""Sampling against exact distributions: what may be drawn, how often, and with which log-probability."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tfx_jax.functional.search import _nucleus, greedy_search, sample

PAD, BOS, EOS = 0, 1, 2

# Probability of the next token given the last; columns are PAD, BOS, EOS and three words.
MARKOV = np.array(
    [
        [0.0, 0.0, 0.2, 0.3, 0.4, 0.1],
        [0.0, 0.0, 0.1, 0.2, 0.3, 0.4],
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.5, 0.1, 0.3, 0.1],
        [0.0, 0.0, 0.2, 0.5, 0.1, 0.2],
        [0.0, 0.0, 0.3, 0.3, 0.4, 0.0],
    ]
)


def markov_step(table):
    logits = jnp.log(jnp.asarray(table, jnp.float32))
    return lambda tokens, cache: (logits[tokens], cache)


STATIC = ("max_length", "eos_id", "pad_id", "temperature", "top_k", "top_p")


@functools.partial(jax.jit, static_argnames=STATIC)
def compiled_sample(table, starts, rng, length_limits, **options):
    return sample(markov_step(table), None, starts, rng=rng, length_limits=length_limits, **options)


def draw(table, *, starts, seed=0, max_length=1, limits=None, **options):
    limits = np.full(len(starts), max_length) if limits is None else np.array(limits)
    options = {"max_length": max_length, "eos_id": EOS} | options
    return jax.tree.map(np.asarray, compiled_sample(table, np.array(starts), jax.random.key(seed), limits, **options))


def assert_frequencies(drawn, expected):
    """Pearson's statistic within five of its standard deviations; what is impossible does not occur."""
    counts = {}
    for row in map(tuple, drawn.tolist()):
        counts[row] = counts.get(row, 0) + 1
    assert counts.keys() <= expected.keys()
    statistic = sum((counts.get(row, 0) - len(drawn) * p) ** 2 / (len(drawn) * p) for row, p in expected.items())
    degrees = len(expected) - 1
    assert statistic <= degrees + 5 * math.sqrt(2 * degrees)


def renormalized(weights):
    return {(token,): weight / sum(weights.values()) for token, weight in weights.items()}


def test_draws_sequences_as_often_as_the_model_says():
    """Sequences of up to three tokens; those cut at the limit have the probability of their beginning."""
    expected = {}
    for sequence in itertools.product(range(2, 6), repeat=3):
        end = sequence.index(EOS) + 1 if EOS in sequence else 3
        sequence = sequence[:end]
        probability = math.prod(MARKOV[last, token] for last, token in itertools.pairwise((BOS, *sequence)))
        if probability > 0:
            expected[(*sequence, *[PAD] * (3 - end))] = probability
    assert math.isclose(sum(expected.values()), 1)
    tokens, log_probs = draw(MARKOV, starts=[BOS] * 20_000, max_length=3)
    assert_frequencies(tokens, expected)
    np.testing.assert_allclose(np.exp(log_probs), [expected[tuple(row)] for row in tokens.tolist()], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"top_k": 2}, {4: 0.3, 5: 0.4}),
        ({"top_k": 99, "top_p": 1.0}, {2: 0.1, 3: 0.2, 4: 0.3, 5: 0.4}),
        ({"top_p": 0.75}, {3: 0.2, 4: 0.3, 5: 0.4}),
        # The nucleus is that of the three kept, 0.2, 0.3 and 0.4 of 0.9: 0.7 of 0.9 falls short of 0.8.
        ({"top_k": 3, "top_p": 0.8}, {3: 0.2, 4: 0.3, 5: 0.4}),
        # Squared, 0.16 of 0.30 is in: 0.09 more make 0.83 of it.
        ({"temperature": 0.5, "top_p": 0.8}, {4: 0.3**2, 5: 0.4**2}),
        ({"top_p": 1e-60}, {5: 1.0}),  # 0 in float32
    ],
)
def test_truncated_distributions(options, weights):
    """The log-probability stays that of the whole model."""
    tokens, log_probs = draw(MARKOV, starts=[BOS] * 5_000, **options)
    assert set(np.unique(tokens)) == set(weights)
    assert_frequencies(tokens, renormalized(weights))
    np.testing.assert_allclose(log_probs, np.log(MARKOV[BOS, tokens[:, 0]]), rtol=1e-5)


def test_a_temperature_may_be_an_array():
    sampled = jax.jit(
        lambda temperature: sample(
            markov_step(MARKOV),
            None,
            jnp.full(200, BOS),
            rng=jax.random.key(0),
            max_length=4,
            eos_id=EOS,
            temperature=temperature,
        )
    )
    for temperature in (0.3, 3.0):
        expected = draw(MARKOV, starts=[BOS] * 200, max_length=4, temperature=temperature)
        jax.tree.map(np.testing.assert_array_equal, sampled(np.float32(temperature)), expected)
    assert sampled._cache_size() == 1


def test_top_k_keeps_the_lower_ids_of_equals():
    tokens, _ = draw(np.full((6, 6), 1 / 6), starts=[BOS] * 200, top_k=3)
    assert set(np.unique(tokens)) == {1, 2, 3}


NUCLEUS = jax.jit(_nucleus)


@settings(deadline=None, max_examples=50)
@given(
    weights=st.lists(st.integers(0, 6), min_size=12, max_size=12).filter(any),
    top_p=st.sampled_from([2.0**-20, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.999]),
)
@example(weights=[1] * 8 + [0] * 4, top_p=0.25)
def test_nucleus_is_the_shortest_head_of_the_sorted_tokens(weights, top_p):
    """The oracle sorts, ties in the order of their ids."""
    weights = np.array(weights)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order]) / weights.sum()
    is_exact = (
        weights.sum().bit_count() == 1
    )  # then probabilities have no rounding error, which would decide at the border
    assume(is_exact or np.all(np.abs(mass - top_p) > 1e-6))
    expected = np.zeros(12, bool)
    expected[order[: 1 + np.searchsorted(mass, top_p)]] = True
    probs = np.stack([weights / weights.sum(), np.eye(12)[3]]).astype(np.float32)
    kept = np.asarray(NUCLEUS(probs, top_p))
    np.testing.assert_array_equal(kept[0], expected)
    np.testing.assert_array_equal(kept[1], np.eye(12, dtype=bool)[3])


def test_low_temperature_is_greedy_search():
    starts = np.array([BOS, 3, 4, 5])
    tokens, log_probs = draw(MARKOV, starts=starts, max_length=6, temperature=1e-30)
    search = jax.jit(lambda starts: greedy_search(markov_step(MARKOV), None, starts, max_length=6, eos_id=EOS))
    expected, expected_log_probs = search(starts)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(log_probs, expected_log_probs, rtol=1e-6)


def test_draw_depends_on_row_and_seed_but_not_on_the_batch():
    options = {"max_length": 7, "top_k": 3, "top_p": 0.9}
    tokens, _ = draw(MARKOV, starts=[BOS] * 40, **options)
    fewer, _ = draw(MARKOV, starts=[BOS, BOS], row_ids=np.arange(2), **options)
    last, _ = draw(MARKOV, starts=[BOS, BOS], row_ids=np.arange(38, 40), **options)
    other_neighbors, _ = draw(MARKOV, starts=[BOS] * 20 + [3] * 20, **options)
    other_seed, _ = draw(MARKOV, starts=[BOS] * 40, seed=1, **options)
    assert len(np.unique(tokens, axis=0)) > 10
    np.testing.assert_array_equal(fewer, tokens[:2])
    np.testing.assert_array_equal(last, tokens[38:])
    np.testing.assert_array_equal(other_neighbors[:20], tokens[:20])
    assert np.mean(np.any(other_seed != tokens, axis=1)) > 0.5


def test_limits_cut_without_eos():
    endless = np.where(np.arange(6) == EOS, 0, MARKOV)
    tokens, log_probs = draw(endless, starts=[BOS] * 4, max_length=5, limits=[1, 3, 0, 9])
    np.testing.assert_array_equal(np.sum(tokens != PAD, axis=1), [1, 3, 1, 5])
    assert EOS not in tokens
    assert np.all(np.isfinite(log_probs))


def test_model_without_eos_and_pad_uses_every_id():
    table = np.full((3, 3), 1 / 3)
    tokens, log_probs = draw(table, starts=[0] * 3_000, max_length=2, eos_id=None, pad_id=-1)
    assert_frequencies(tokens, {pair: 1 / 9 for pair in itertools.product(range(3), repeat=2)})
    np.testing.assert_allclose(log_probs, 2 * math.log(1 / 3), rtol=1e-6)


def test_row_without_a_way_on_ends_and_disturbs_nobody():
    """Row 1 starts at a dead end: PAD only, log-probability -inf, no NaN."""
    options = {"max_length": 5, "top_k": 2, "top_p": 0.7}
    table = np.where(np.arange(6)[:, None] == 5, 0.0, MARKOV)
    table[:, 5] = 0
    tokens, log_probs = draw(table, starts=[BOS, 5, 4], **options)
    np.testing.assert_array_equal(tokens[1], PAD)
    np.testing.assert_array_equal(np.isneginf(log_probs), [False, True, False])
    assert not np.any(np.isnan(log_probs))
    np.testing.assert_array_equal(tokens[[0, 2]], draw(table, starts=[BOS, 4, 4], **options)[0][[0, 2]])


def test_scalar_cache_is_shared_and_compiled_once():
    """A plain dict with a position: the model spells its answer out, then ends."""
    spelled = jnp.array([5, 3, 4, EOS])

    def step_fn(tokens, cache):
        logits = jnp.where(jnp.arange(6) == spelled[cache["position"]], 0.0, -jnp.inf)
        return jnp.tile(logits[None], (tokens.size, 1)), {"position": cache["position"] + 1}

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(starts, rng):
        return sample(step_fn, {"position": 0}, starts, rng=rng, max_length=6, eos_id=EOS)

    for seed in range(2):
        tokens, log_probs = run(np.array([BOS, 3]), jax.random.key(seed))
        assert tokens.tolist() == [[5, 3, 4, EOS, PAD, PAD]] * 2
        np.testing.assert_array_equal(log_probs, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": 0.0}, r"temperature must be in \[1e-30, 1e\+30\], got 0.0; use greedy_search"),
        ({"temperature": 1e31}, r"temperature must be .* got 1e\+31"),
        ({"temperature": -1.0}, "temperature must be .* got -1.0"),
        ({"temperature": math.nan}, "temperature must be .* got nan"),
        ({"top_k": 0}, "top_k must be .* got 0"),
        ({"top_p": 0.0}, "top_p must be .* got 0.0"),
        ({"top_p": 1.1}, "top_p must be .* got 1.1"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"eos_id": PAD}, "eos_id and pad_id must differ, got 0"),
        ({"eos_id": 6}, r"eos_id must be in 0 \.\. 5, .* got 6"),
    ],
)
def test_rejects(option, message):
    with pytest.raises(ValueError, match=message):
        draw(MARKOV, starts=[BOS], **option)
