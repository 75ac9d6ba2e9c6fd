"""Decoding with a cache gives, token by token, the logits of teacher forcing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import beam_search, greedy_search

B, W, S, T, V = 2, 3, 6, 5, 23
SOURCE = jnp.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGETS = jnp.asarray(np.random.default_rng(0).integers(3, V, (B * W, T)), jnp.int32)

_forward = jax.jit(lambda model, source, target: model(source, target))


@jax.jit
def _logits_by_steps(model, source, targets):
    """Feeds the targets one by one to W beams of every sentence."""
    step_fn, cache = model.start_decoding(source, max_length=T + 2, num_beams=W)
    cache = cache | {"writers": jnp.repeat(cache["writers"], W, axis=0)}
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
def test_every_step_of_every_beam_equals_teacher_forcing(make_model, overrides, tolerance):
    model = make_model(**overrides)
    stepwise = _logits_by_steps(model, SOURCE, TARGETS)
    assert stepwise.dtype == jnp.float32
    want = _forward(model, jnp.repeat(SOURCE, W, axis=0), TARGETS)
    for step in range(T):
        np.testing.assert_allclose(stepwise[:, step], want[:, step], atol=tolerance)


def test_rows_can_be_exchanged(make_model):
    """Beam search reorders its hypotheses: who wrote its tokens is all that a row need know of its past."""
    first, order, second = jnp.array([3, 4, 5]), jnp.array([2, 0, 0]), jnp.array([6, 7, 8])

    @jax.jit
    def run(model):
        step_fn, cache = model.start_decoding(SOURCE[:1], max_length=3, num_beams=W)
        cache = cache | {"writers": jnp.repeat(cache["writers"], W, axis=0)}
        for tokens in (jnp.ones_like(first), first):
            _, cache = step_fn(tokens, cache)
        exchanged = cache | {"writers": cache["writers"][order]}
        return step_fn(second, exchanged)[0]

    targets = jnp.stack([first[order], second, second], axis=1)
    want = _forward(make_model(), jnp.repeat(SOURCE[:1], W, axis=0), targets)[:, 2]
    np.testing.assert_allclose(run(make_model()), want, atol=1e-5)


def test_greedy_search_finds_the_greedy_continuation(make_model):
    """Against the full model, run anew on every prefix."""
    model = make_model()

    @jax.jit
    def search(model):
        step_fn, cache = model.start_decoding(SOURCE, max_length=T)
        return greedy_search(step_fn, cache, jnp.ones(B, jnp.int32), max_length=T, eos_id=2)[0]

    found = np.asarray(search(model))
    target = np.zeros((B, T), np.int32)
    for step in range(T):
        logits = np.array(_forward(model, SOURCE, jnp.asarray(target))[:, step])
        logits[:, 0] = -np.inf  # padding is never generated
        ended = (target[:, :step] == 2).any(axis=1)
        choice = logits.argmax(axis=-1) if step < T - 1 else 2
        target[:, step] = np.where(ended, 0, choice)
    np.testing.assert_array_equal(found, target)


def test_beam_search_moves_no_keys_and_values(make_model):
    """What follows the beams is one small table; the rest is written in place."""
    cache = jax.eval_shape(lambda model: model.start_decoding(SOURCE, max_length=9, num_beams=W)[1], make_model())
    assert {leaf.shape for leaf in jax.tree.leaves(cache["past"].value)} == {(B, 2, 5, 9 * W), (B, 2, 9 * W, 7)}
    assert (cache["writers"].shape, cache["position"].shape) == ((B, 9), ())

    def search(model):
        step_fn, cache = model.start_decoding(SOURCE, max_length=9, num_beams=W)
        return beam_search(step_fn, cache, jnp.ones(B, jnp.int32), beam_size=W, max_length=9, eos_id=2)

    compiled = str(jax.jit(search).lower(make_model()).compile().as_text())
    assert f"s32[{B * W},9]" in compiled
    moved = re.findall(rf"= f32\[{B},2,(?:5,{9 * W}|{9 * W},7)\]\S* (?:copy|gather|transpose)\(", compiled)
    assert len(moved) <= 4 * 3, "more than the copies at the ends of the loop"


def test_arranged_once_or_at_every_call_is_the_same(make_model):
    model = make_model()

    @jax.jit
    def logits(model, decoder):
        step_fn, cache = model.start_decoding(SOURCE, max_length=T, decoder=decoder)
        return step_fn(jnp.ones(B, jnp.int32), cache)[0]

    np.testing.assert_allclose(logits(model, model.decoder()), logits(model, None), atol=1e-5)
    error = jnp.abs(logits(model, model.decoder(int8=True)) - logits(model, None)).max()
    assert 0 < error < 0.1 * jnp.abs(logits(model, None)).max()


def test_as_many_rows_as_beams_were_announced(make_model):
    step_fn, cache = make_model().start_decoding(SOURCE, max_length=T, num_beams=2)
    with pytest.raises(ValueError, match="2 rows for 2 sentences of num_beams=2"):
        step_fn(jnp.ones(B, jnp.int32), cache)
