"""Decoding with a cache gives, token by token, the logits of teacher forcing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfx_jax.functional import greedy_search

B, W, S, T, V = 2, 3, 6, 5, 23
SOURCE = jnp.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGETS = jnp.asarray(np.random.default_rng(0).integers(3, V, (B * W, T)), jnp.int32)

_forward = jax.jit(lambda model, source, target: model(source, target))


@jax.jit
def _logits_by_steps(model, source, targets):
    """Feeds the targets one by one to W beams of every sentence."""
    step_fn, cache = model.start_decoding(source, max_length=T + 2)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, W, axis=0) if leaf.ndim else leaf, cache)
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


def test_rows_of_the_cache_can_be_exchanged(make_model):
    """Beam search reorders its hypotheses: a row's cache is all that it knows of its past."""
    first, order, second = jnp.array([3, 4, 5]), jnp.array([2, 0, 0]), jnp.array([6, 7, 8])

    @jax.jit
    def run(model):
        step_fn, cache = model.start_decoding(SOURCE[:1], max_length=3)
        cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, W, axis=0) if leaf.ndim else leaf, cache)
        for tokens in (jnp.ones_like(first), first):
            _, cache = step_fn(tokens, cache)
        exchanged = jax.tree.map(lambda leaf: leaf[order] if leaf.ndim else leaf, cache)
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


def test_empty_cache_has_one_row_a_sentence(make_model):
    cache = jax.eval_shape(lambda model: model.start_decoding(SOURCE, max_length=9)[1], make_model())
    assert {leaf.shape for leaf in jax.tree.leaves(cache)} == {(), (B, 9, 2, 5), (B, 9, 2, 7)}
