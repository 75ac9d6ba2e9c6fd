"""Decoding with a cache gives, token by token, the logits of teacher forcing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted, started
from tfx_jax.functional import beam_search, greedy_search

B, W, S, T, V = 2, 3, 6, 5, 23
SOURCE = np.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGETS = np.random.default_rng(0).integers(3, V, (B * W, T))


@jitted
def _logits_by_steps(model, source, targets):
    """Feeds the targets one by one to W beams of every sentence."""
    step_fn, cache, _ = started(model.decoder(), source, max_length=T + 2, num_beams=W)
    cache = cache | {"beam_ancestry": jnp.repeat(cache["beam_ancestry"], W, axis=0)}
    inputs = jnp.concatenate([jnp.ones_like(targets[:, :1]), targets[:, :-1]], axis=1)

    def step(cache, tokens):
        logits, cache = step_fn(tokens, cache)
        return cache, logits

    _, logits = jax.lax.scan(step, cache, inputs.T)
    return logits.swapaxes(0, 1)


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [({}, 1e-5), ({"pre_norm": True}, 1e-5), ({"learned_positions": 9}, 1e-5), ({"dtype": "bfloat16"}, 0.2)],
    ids=["post-norm", "pre-norm", "learned-positions", "bfloat16"],
)
def test_every_step_of_every_beam_equals_teacher_forcing(make_model, forward, overrides, tolerance):
    model = make_model(**overrides)
    stepwise = _logits_by_steps(model, SOURCE, TARGETS)
    assert stepwise.dtype == jnp.float32
    want = forward(model, np.repeat(SOURCE, W, axis=0), TARGETS)
    for step in range(T):
        np.testing.assert_allclose(stepwise[:, step], want[:, step], atol=tolerance)


def test_rows_can_be_exchanged(make_model, forward):
    """Beam search reorders its hypotheses: who wrote its tokens is all that a row need know of its past."""
    first, order, second = np.array([3, 4, 5]), np.array([2, 0, 0]), np.array([6, 7, 8])

    @jitted
    def run(model):
        step_fn, cache, _ = started(model.decoder(), SOURCE[:1], max_length=3, num_beams=W)
        cache = cache | {"beam_ancestry": jnp.repeat(cache["beam_ancestry"], W, axis=0)}
        for tokens in (np.ones_like(first), first):
            _, cache = step_fn(tokens, cache)
        exchanged = cache | {"beam_ancestry": cache["beam_ancestry"][order]}
        return step_fn(second, exchanged)[0]

    targets = np.stack([first[order], second, second], axis=1)
    want = forward(make_model(), np.repeat(SOURCE[:1], W, axis=0), targets)[:, 2]
    np.testing.assert_allclose(run(make_model()), want, atol=1e-5)


def test_greedy_search_finds_the_greedy_continuation(make_model, forward):
    """Against the full model, run again on every prefix."""
    model = make_model()

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), SOURCE, max_length=T)
        return greedy_search(step_fn, cache, start, max_length=T, eos_id=2)[0]

    found, target = search(model), np.zeros((B, T), int)
    for step in range(T):
        logits = forward(model, SOURCE, target)[:, step].copy()
        logits[:, 0] = -np.inf  # padding is never generated
        ended = (target[:, :step] == 2).any(axis=1)
        choice = logits.argmax(axis=-1) if step < T - 1 else 2
        target[:, step] = np.where(ended, 0, choice)
    np.testing.assert_array_equal(found, target)


def test_beam_search_moves_no_keys_and_values(make_model):
    """What follows the beams is one small table; the rest is written in place."""
    cache = jax.eval_shape(lambda model: started(model.decoder(), SOURCE, max_length=9, num_beams=W)[1], make_model())
    assert {leaf.shape for leaf in jax.tree.leaves(cache["past"].value)} == {(B, 2, 5, 9 * W), (B, 2, 9 * W, 7)}
    assert (cache["beam_ancestry"].shape, cache["position"].shape) == ((B, 9), ())

    def search(model):
        step_fn, cache, start = started(model.decoder(), SOURCE, max_length=9, num_beams=W)
        return beam_search(step_fn, cache, start, beam_size=W, max_length=9, eos_id=2)

    compiled = str(jax.jit(search).lower(make_model()).compile().as_text())
    assert f"s32[{B * W},9]" in compiled
    moved = re.findall(rf"= f32\[{B},2,(?:5,{9 * W}|{9 * W},7)\]\S* (?:copy|gather|transpose)\(", compiled)
    assert len(moved) <= 4 * 3, "more than the copies at the ends of the loop"


@jitted
def _first_logits(decoder):
    step_fn, cache, start = started(decoder, SOURCE, max_length=T)
    return step_fn(start, cache)[0]


def test_arranged_once_or_in_every_program_is_the_same(make_model):
    inside = jitted(lambda model: _first_logits(model.decoder()))
    np.testing.assert_allclose(_first_logits(make_model().decoder()), inside(make_model()), atol=1e-5)


def test_arranging_leaves_the_parameters_where_they_are(make_model):
    """A copy of them would take as much memory again."""
    model = make_model()
    kept = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(model))}
    assert kept < {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(model.decoder()))}


def test_eight_bits_decode_nearly_the_same(make_model):
    exact, rounded = (_first_logits(make_model().decoder(int8=int8)) for int8 in (False, True))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


def test_eight_bits_also_encode(make_model):
    encode = jitted(lambda decoder: decoder.encode(SOURCE).output)
    exact, rounded = (encode(make_model().decoder(int8=int8)) for int8 in (False, True))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


def test_as_many_rows_as_beams_were_announced(make_model):
    def step(model):
        step_fn, cache, start = started(model.decoder(), SOURCE, max_length=T, num_beams=2)
        return step_fn(start, cache)[0]

    with pytest.raises(ValueError, match=r"num_beams = 2 \* 2 rows, got 2"):
        jax.eval_shape(step, make_model())
