"""Greedy and beam search against exhaustive search and a plain beam search, both without cache or early stop."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfx_jax.functional.search import BeamSearchResult, _follow, beam_search, greedy_search

PAD, BOS, EOS = 0, 1, 2


# A toy language model whose every next token depends on all tokens before it, through each kind of cache leaf there is.


def make_toy(seed, *, batch, vocab_size, max_length, scale=1.5):
    """Parameters of the model, [B]-shaped inputs included; a pytree, so that new ones need no new compilation."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (scale * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    width = 6
    return {
        "embed": normal(vocab_size, width),
        "recur": normal(width, width) / np.float32(scale),
        "out": normal(width, vocab_size),
        "by_position": normal(max_length, vocab_size),
        "by_token_sum": normal(7, vocab_size),
        "memory": normal(batch, vocab_size),
        "state": normal(batch, width),
    }


def toy_step(toy, dtype=jnp.float32):
    toy = jax.tree.map(jnp.asarray, toy)

    def step_fn(tokens, cache):
        position = cache["position"]
        state = jnp.tanh(cache["states"][0] @ toy["recur"] + toy["embed"][tokens])
        history = cache["history"].at[:, position].set(tokens)
        logits = state @ toy["out"] + toy["by_token_sum"][history.sum(axis=1) % 7] + toy["by_position"][position][None]
        by_row = logits.reshape(len(toy["memory"]), -1, logits.shape[-1]) + toy["memory"][:, None]
        cache = {"states": (state,), "history": history, "position": position + 1}
        return by_row.reshape(logits.shape).astype(dtype), cache

    return step_fn


def toy_cache(toy):
    history = jnp.zeros((len(toy["state"]), len(toy["by_position"])), jnp.int32)
    return {"states": (toy["state"],), "history": history, "position": 0}


def toy_oracle(toy, row):
    """Returns log P(next token | tokens so far) of one row in float64, recomputed from the first token each time."""

    @functools.cache
    def log_probs(tokens):
        state = toy["state"][row].astype(np.float64)
        for token in tokens:
            state = np.tanh(state @ toy["recur"] + toy["embed"][token])
        logits = state @ toy["out"] + toy["memory"][row]
        logits = logits + toy["by_position"][len(tokens) - 1] + toy["by_token_sum"][sum(tokens) % 7]
        logits[PAD] = -np.inf
        return logits - np.log(np.sum(np.exp(logits)))

    return log_probs


def log_prob_of(log_probs, start, tokens):
    prefixes = itertools.accumulate(tokens[:-1], lambda prefix, token: (*prefix, token), initial=(start,))
    return sum(log_probs(prefix)[token] for prefix, token in zip(prefixes, tokens, strict=True))


def penalised(log_prob, length, length_penalty):
    """`length_penalty` may be a function of the length instead."""
    return log_prob / (length_penalty(length) if callable(length_penalty) else ((5 + length) / 6) ** length_penalty)


def exhaustive(log_probs, start, vocab_size, limit, length_penalty):
    """Every sequence that ends in EOS, best score first."""
    others = [token for token in range(vocab_size) if token not in (PAD, EOS)]
    bodies = itertools.chain.from_iterable(itertools.product(others, repeat=length) for length in range(limit))
    found = [(*body, EOS) for body in bodies]
    return sorted(
        ((penalised(log_prob_of(log_probs, start, y), len(y), length_penalty), y) for y in found), reverse=True
    )


def plain_beam_search(
    log_probs, start, vocab_size, beam_size, limit, length_penalty, is_allowed=lambda tokens, token: True
):
    """One row, Python lists, all steps up to the limit."""
    living, finished = [(0.0, ())], []
    for length in range(1, limit + 1):
        candidates = [
            (log_prob + log_probs((start, *tokens))[token], (*tokens, token))
            for log_prob, tokens in living
            for token in range(vocab_size)
            if token != PAD and (token == EOS or length < limit) and is_allowed((start, *tokens), token)
        ]
        candidates.sort(reverse=True)
        finished += [(penalised(p, length, length_penalty), y) for p, y in candidates[:beam_size] if y[-1] == EOS]
        living = [(p, y) for p, y in candidates if y[-1] != EOS][:beam_size]
    return sorted(finished, reverse=True)[:beam_size]


def assert_found(found, row, expected):
    """Row `row` of `found` holds exactly the (score, tokens) of `expected`, then nothing.

    Of two that float32 cannot tell apart, either may come first.
    """
    tokens, scores = np.asarray(found.tokens[row]), np.asarray(found.scores[row], np.float64)
    assert len(expected) <= len(tokens)
    score_of = {sequence: score for score, sequence in expected}
    for place, (want, _) in enumerate(expected):
        sequence = tuple(tokens[place][tokens[place] != PAD].tolist())
        assert not tokens[place, len(sequence) :].any()
        np.testing.assert_allclose([score_of.pop(sequence), scores[place]], want, rtol=1e-5, atol=1e-5)
    assert (tokens[len(expected) :] == PAD).all()
    assert np.isneginf(scores[len(expected) :]).all()


def compiled(**static):
    """`search` of the toy, jitted; its results are NumPy's, so that taking a row compiles nothing."""

    def decorate(search):
        jitted = jax.jit(search, **static)
        return lambda *arguments, **options: jax.tree.map(np.asarray, jitted(*arguments, **options))

    return decorate


@compiled(static_argnames=("beam_size", "max_length", "length_penalty", "length_penalty_fn"))
def toy_beam_search(toy, starts, limits, **options):
    return beam_search(toy_step(toy), toy_cache(toy), starts, length_limits=limits, eos_id=EOS, **options)


@compiled(static_argnames="max_length")
def toy_greedy_search(toy, starts, limits, **options):
    return greedy_search(toy_step(toy), toy_cache(toy), starts, length_limits=limits, eos_id=EOS, **options)


def may_follow(token_sum, token):
    """Which tokens `allowed_fn` allows here: they depend on the tokens so far, the start included."""
    return (token_sum + 2 * token) % 5 != 0


@compiled(static_argnames=("beam_size", "max_length"))
def toy_allowed_beam_search(toy, starts, limits, **options):
    def allowed_fn(cache):
        return may_follow(cache["history"].sum(axis=1, keepdims=True), jnp.arange(toy["out"].shape[1])[None])

    return beam_search(
        toy_step(toy), toy_cache(toy), starts, length_limits=limits, eos_id=EOS, allowed_fn=allowed_fn, **options
    )


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), limits=st.tuples(*[st.integers(1, 6)] * 2))
def test_tokens_that_may_not_follow_keep_their_share_of_the_probability(seed, limits):
    """The scores are those of the model, not renormalized: the search sees what a forced token costs."""
    toy = make_toy(seed, batch=2, vocab_size=7, max_length=6)
    starts = np.array([BOS, 4])
    found = toy_allowed_beam_search(toy, starts, np.array(limits), beam_size=3, max_length=6)
    for row in range(2):
        expected = plain_beam_search(
            toy_oracle(toy, row),
            int(starts[row]),
            7,
            3,
            limits[row],
            0.6,
            lambda tokens, token: may_follow(sum(tokens), token),
        )
        assert_found(found, row, expected)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, *(pytest.param(a, marks=pytest.mark.slow) for a in (1.0, 2.5))])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), limits=st.tuples(*[st.integers(1, 4)] * 3))
def test_wide_beam_is_exhaustive_search(length_penalty, seed, limits):
    """3 ** 3 sequences at most live at a time and 9 + 27 candidates compete, so that 41 places drop none of the 40."""
    toy = make_toy(seed, batch=3, vocab_size=5, max_length=4)
    starts = np.array([BOS, 3, 4])
    found = toy_beam_search(toy, starts, np.array(limits), beam_size=41, max_length=4, length_penalty=length_penalty)
    for row, limit in enumerate(limits):
        assert_found(found, row, exhaustive(toy_oracle(toy, row), starts[row], 5, limit, length_penalty))


@pytest.mark.parametrize(
    ("beam_size", "length_penalty"),
    [(2, 0.0), (5, 1.5), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.6), (3, 0.6)))],
)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), limits=st.tuples(*[st.integers(1, 9)] * 2))
def test_equals_plain_beam_search(beam_size, length_penalty, seed, limits):
    toy = make_toy(seed, batch=2, vocab_size=11, max_length=9)
    starts = np.array([BOS, 7])
    found = toy_beam_search(
        toy, starts, np.array(limits), beam_size=beam_size, max_length=9, length_penalty=length_penalty
    )
    for row, limit in enumerate(limits):
        assert_found(
            found, row, plain_beam_search(toy_oracle(toy, row), starts[row], 11, beam_size, limit, length_penalty)
        )


def hugging_face_penalty(length):
    return length**1.3


def steps_penalty(length):
    """The same for many lengths."""
    return np.maximum(length // 3, 1)


@pytest.mark.parametrize("penalty", [hugging_face_penalty, steps_penalty])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), limits=st.tuples(*[st.integers(1, 9)] * 2))
def test_any_length_penalty(penalty, seed, limits):
    toy = make_toy(seed, batch=2, vocab_size=11, max_length=9)
    starts, options = np.array([BOS, 7]), {"beam_size": 3, "max_length": 9}
    found = toy_beam_search(toy, starts, np.array(limits), **options, length_penalty_fn=penalty)
    for row, limit in enumerate(limits):
        assert_found(found, row, plain_beam_search(toy_oracle(toy, row), starts[row], 11, 3, limit, penalty))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), limits=st.tuples(*[st.integers(1, 8)] * 3))
def test_beam_of_one_is_greedy_search(seed, limits):
    toy = make_toy(seed, batch=3, vocab_size=7, max_length=8)
    starts = np.array([BOS, 3, 4])
    tokens, log_probs = toy_greedy_search(toy, starts, np.array(limits), max_length=8)
    found = toy_beam_search(toy, starts, np.array(limits), beam_size=1, max_length=8, length_penalty=0.0)
    np.testing.assert_array_equal(tokens, found.tokens[:, 0])
    np.testing.assert_allclose(log_probs, found.scores[:, 0], rtol=1e-5, atol=1e-6)


def test_greedy_search_takes_the_best_token():
    toy = make_toy(0, batch=4, vocab_size=9, max_length=8)
    starts, limits = np.array([BOS, 3, 4, 5]), np.array([8, 3, 1, 7])
    tokens, log_probs = toy_greedy_search(toy, starts, limits, max_length=8)
    for row in range(4):
        oracle, expected = toy_oracle(toy, row), []
        while EOS not in expected:
            is_last = len(expected) + 1 == limits[row]
            expected.append(EOS if is_last else int(np.argmax(oracle((starts[row], *expected)))))
        assert tokens[row].tolist() == expected + [PAD] * (8 - len(expected))
        np.testing.assert_allclose(log_probs[row], log_prob_of(oracle, starts[row], tuple(expected)), rtol=1e-5)


def test_limits_are_kept_and_clipped():
    """EOS is improbable, so that every row runs into its limit; one below 1 leaves EOS, one above L leaves L tokens."""
    toy = make_toy(1, batch=4, vocab_size=6, max_length=5)
    toy["memory"][:, EOS] -= 50
    limits = np.array([0, 2, 5, 99])
    found = toy_beam_search(toy, np.full(4, BOS), limits, beam_size=2, max_length=5, length_penalty=0.6)
    tokens, _ = toy_greedy_search(toy, np.full(4, BOS), limits, max_length=5)
    for best in (found.tokens[:, 0], tokens):
        np.testing.assert_array_equal(np.argmax(best == EOS, axis=1), [0, 1, 4, 4])
        np.testing.assert_array_equal(np.sum(best == PAD, axis=1), [4, 3, 0, 0])


def test_row_does_not_depend_on_its_neighbors():
    toy = make_toy(2, batch=5, vocab_size=11, max_length=9)
    starts, limits = np.array([BOS, 3, 4, 5, 6]), np.array([9, 1, 4, 7, 9])
    toy["memory"][3, EOS] += 9  # ends at once
    options = {"beam_size": 3, "max_length": 9, "length_penalty": 0.6}
    together = toy_beam_search(toy, starts, limits, **options)
    tokens, log_probs = toy_greedy_search(toy, starts, limits, max_length=9)
    for row in range(5):
        alone = toy | {"memory": toy["memory"][row : row + 1], "state": toy["state"][row : row + 1]}
        found = toy_beam_search(alone, starts[row : row + 1], limits[row : row + 1], **options)
        np.testing.assert_array_equal(found.tokens[0], together.tokens[row])
        np.testing.assert_allclose(found.scores[0], together.scores[row], rtol=1e-5, atol=1e-6)
        one = toy_greedy_search(alone, starts[row : row + 1], limits[row : row + 1], max_length=9)
        np.testing.assert_array_equal(one[0][0], tokens[row])
        np.testing.assert_allclose(one[1][0], log_probs[row], rtol=1e-5, atol=1e-6)


# Models without memory: the next token depends on the last one through a table of probabilities.


def table_step(table, dtype=jnp.float32):
    """No cache, and -inf where the table is 0."""
    logits = jnp.asarray(np.log(table, where=table > 0, out=np.full(table.shape, -np.inf)), dtype)
    return lambda tokens, cache: (logits[tokens], cache)


def run(search, step_fn, starts, *, eos_id=EOS, **options):
    found = jax.jit(lambda starts: search(step_fn, None, starts, eos_id=eos_id, **options))(np.array(starts))
    return jax.tree.map(np.asarray, found)


def count_steps(search, table, **options):
    """How often `search` calls its step function, starting from BOS in each of two rows."""
    calls = []
    step_fn = table_step(table)

    def counted(tokens, cache):
        jax.debug.callback(lambda: calls.append(None))
        return step_fn(tokens, cache)

    run(search, counted, [BOS, BOS], **options)
    jax.effects_barrier()
    return len(calls)


ENDS_SOON = np.array([[0, 0, 0, 1], [0, 0, 0.9, 0.1], [0, 0, 1, 0], [0, 0, 0.9, 0.1]])
NEVER_ENDS = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("beam_size", "length_penalty", "num_steps"),
    [
        (1, 0.0, 1),  # log 0.9 at once; what lives has log 0.1
        (2, 0.0, 2),  # two finished after two steps; what lives is less probable than both
        # Three finished after three steps, the worst with log(0.009) / (8/6) = -3.53. What lives after n steps has
        # log(0.1^n) and could still reach log(0.1^n) / (105/6), which is no better from n = 27 on.
        (3, 1.0, 27),
    ],
)
def test_stops_as_soon_as_nothing_can_improve(beam_size, length_penalty, num_steps):
    assert (
        count_steps(beam_search, ENDS_SOON, beam_size=beam_size, length_penalty=length_penalty, max_length=100)
        == num_steps
    )


@pytest.mark.parametrize(("table", "num_steps"), [(ENDS_SOON, 1), (NEVER_ENDS, 7)])
def test_greedy_search_stops_with_its_last_row(table, num_steps):
    assert count_steps(greedy_search, table, max_length=100, length_limits=np.array([7, 3])) == num_steps


def test_early_stop_waits_for_longer_hypotheses():
    """With length_penalty = 2 the long hypothesis wins although the short one finishes first and is more probable."""
    table = np.array([[0, 0, 0, 1], [0, 0, 0.6, 0.4], [0, 0, 1, 0], [0, 0, 0.05, 0.95]])
    found = run(beam_search, table_step(table), [BOS], beam_size=2, max_length=30, length_penalty=2.0)
    lengths = np.sum(found.tokens[0] != PAD, axis=1)
    log_probs = np.log([0.6] + [0.4 * 0.95**n * 0.05 for n in range(28)] + [0.4 * 0.95**28 * 0.05])
    scores = log_probs / ((5 + np.arange(1, 31)) / 6) ** 2
    best = np.argsort(-scores)[:2]
    assert best[0] > 5
    np.testing.assert_array_equal(lengths, best + 1)
    np.testing.assert_allclose(found.scores[0], scores[best], rtol=1e-5)


def test_forbidden_tokens_and_dead_ends():
    """Token 4 leads nowhere, 5 leads into it; row 1 starts there, its neighbors must not notice."""
    table = np.zeros((6, 6))
    table[BOS, [3, 5]] = 0.3, 0.7
    table[3, [EOS, 4]] = 0.2, 0.8
    table[5, 4] = 1.0
    found = run(beam_search, table_step(table), [BOS, 4, BOS], beam_size=3, max_length=4, length_penalty=0.0)
    only = [(np.log(0.3 * 0.2), (3, EOS))]
    for row, expected in enumerate([only, [], only]):
        assert_found(found, row, expected)
    tokens, log_probs = run(greedy_search, table_step(table), [BOS, 4, BOS], max_length=4)
    np.testing.assert_array_equal(tokens, [[5, 4, PAD, PAD], [PAD] * 4, [5, 4, PAD, PAD]])
    np.testing.assert_array_equal(log_probs, [-np.inf] * 3)


def test_limit_where_eos_is_forbidden():
    """Only EOS may follow, and it must not: no hypothesis."""
    assert_found(run(beam_search, table_step(NEVER_ENDS), [BOS], beam_size=2, max_length=2), 0, [])
    tokens, log_probs = run(greedy_search, table_step(NEVER_ENDS), [BOS], max_length=2)
    assert (tokens.tolist(), log_probs.tolist()) == ([[3, PAD]], [-np.inf])


def test_pad_is_never_generated():
    """PAD has nearly all the mass: what remains is renormalized."""
    table = np.array([[0.97, 0.01, 0.01, 0.01], [0.97, 0.0, 0.01, 0.02], [1, 0, 0, 0], [0.97, 0.0, 0.02, 0.01]])
    found = run(beam_search, table_step(table), [BOS], beam_size=1, max_length=3, length_penalty=0.0)
    assert_found(found, 0, [(np.log(2 / 3 * 2 / 3), (3, EOS))])


def test_vocabulary_without_pad():
    """`pad_id=-1` frees id 0 and fills the rest."""
    table = np.array([[0.2, 0.0, 0.8], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    tokens, _ = run(greedy_search, table_step(table), [BOS], max_length=4, pad_id=-1)
    assert tokens.tolist() == [[0, EOS, -1, -1]]


def test_bfloat16_logits_are_normalized_in_float32():
    logits = jnp.asarray(3 * np.random.default_rng(3).standard_normal((300, 300)), jnp.bfloat16)
    found = run(beam_search, lambda tokens, cache: (logits[tokens], cache), [BOS], max_length=6)
    exact = np.asarray(logits, np.float64)
    exact = exact - np.log(np.sum(np.exp(exact[:, 1:]), axis=1, keepdims=True))
    for tokens, score in zip(np.asarray(found.tokens[0]), found.scores[0], strict=True):
        tokens = tokens[tokens != PAD].tolist()
        log_prob = log_prob_of(lambda prefix: exact[prefix[-1]], BOS, tokens)
        np.testing.assert_allclose(score, penalised(log_prob, len(tokens), 0.6), rtol=1e-5)


def test_compiles_once():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def search(toy, starts, limits):
        options = {"beam_size": 2, "max_length": 6, "length_penalty": 0.6, "eos_id": EOS}
        return beam_search(toy_step(toy), toy_cache(toy), starts, length_limits=limits, **options)

    for seed in range(3):
        toy = make_toy(seed, batch=2, vocab_size=7, max_length=6)
        search(toy, np.array([BOS, 3 + seed]), np.array([6, 1 + seed]))


def test_sharded_rows_give_the_same_and_stay_where_they_are():
    """Eight devices, one row each; following the parents must not move cache rows between devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    toy = make_toy(4, batch=8, vocab_size=11, max_length=7)
    starts, limits = np.arange(3, 11), np.arange(1, 9)
    options = {"beam_size": 3, "max_length": 7, "length_penalty": 0.6}
    sharded = toy | {name: jax.device_put(toy[name], by_row) for name in ("memory", "state")}
    found = toy_beam_search(sharded, jax.device_put(starts, by_row), jax.device_put(limits, by_row), **options)
    expected = toy_beam_search(toy, starts, limits, **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)

    rows, parents = jax.device_put((np.zeros((24, 5), np.float32), np.zeros((8, 3), np.int32)), by_row)
    compiled = str(jax.jit(_follow).lower(rows, parents).compile().as_text())
    assert "gather" in compiled
    assert "all-" not in compiled
    assert "collective" not in compiled


def test_cache_follows_the_parents():
    cache = {"rows": np.arange(6.0).reshape(6, 1, 1), "flags": np.arange(6) % 2 == 0, "position": 4}
    followed = jax.jit(_follow)(cache, np.array([[1, 1, 0], [2, 0, 1]]))
    np.testing.assert_array_equal(followed["rows"][:, 0, 0], [1, 1, 0, 5, 3, 4])
    np.testing.assert_array_equal(followed["flags"], [False, False, True, False, False, True])
    assert followed["position"] == 4


def test_result_is_a_pytree_with_documented_types():
    found = jax.eval_shape(
        lambda: beam_search(table_step(ENDS_SOON), None, jnp.array([BOS] * 2), beam_size=3, max_length=5, eos_id=EOS)
    )
    assert isinstance(found, BeamSearchResult)
    chex.assert_shape(found, [(2, 3, 5), (2, 3)])
    chex.assert_type(found, [jnp.int32, jnp.float32])


def test_a_length_penalty_beyond_float32_is_refused():
    options = {"cache": None, "start_tokens": np.array([BOS]), "beam_size": 2, "max_length": 512, "eos_id": 2}
    with pytest.raises(ValueError, match="length_penalty=40 overflows float32 for max_length=512"):
        beam_search(table_step(ENDS_SOON), **options, length_penalty=40)


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"eos_id": 9}, r"eos_id must be in 0 \.\. 3, .* got 9"),
        ({"eos_id": -1}, r"eos_id must be in 0 \.\. 3, .* got -1"),
        ({"eos_id": PAD}, "eos_id and pad_id must differ, got 0"),
        ({"start_tokens": np.ones((2, 1), np.int32)}, r"shape \[B\], got \(2, 1\)"),
        ({"length_limits": np.array([3, 3, 3])}, r"shape \[B\], got \(2,\) and \(3,\)"),
        ({"cache": {"keys": np.zeros((3, 5))}}, r"cache keys must have 2 rows, .* got shape \(3, 5\)"),
        ({"step_fn": lambda tokens, cache: (jnp.zeros((1, 4)), cache)}, r"logits of shape \[[28], V\], got \(1, 4\)"),
    ],
)
def test_rejects(search, changed, message):
    arguments = {"step_fn": table_step(ENDS_SOON), "cache": None, "start_tokens": np.array([BOS, BOS])}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: search(**arguments | {"max_length": 5, "eos_id": EOS} | changed))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1, got 0"),
        ({"length_penalty": -0.1}, "length_penalty must be at least 0, .* got -0.1"),
        ({"length_penalty_fn": lambda length: 1 / length}, "not decrease with the length"),
        ({"length_penalty_fn": lambda length: length - 1}, "must return positive numbers"),
        ({"length_penalty_fn": lambda length: length * np.nan}, "must return positive numbers"),
    ],
)
def test_beam_search_rejects(option, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda: beam_search(table_step(ENDS_SOON), None, np.array([BOS]), max_length=5, eos_id=EOS, **option)
        )
