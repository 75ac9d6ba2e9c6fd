"""Recurrent dropout of recurrent models, that of Gal and Ghahramani (2016), with one mask at all steps."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.test_seq2seq import SOURCE, TARGET, B, D, Oracle, T, forward, lengths, make
from tests.nn.programs import count_draws, jitted
from tests.tiers import slow_but
from tfx_jax.models import seq2seq

NAMES = slow_but(("fixed-gru", "fixed-lstm", "bahdanau-gru", "general-lstm"), "fixed-gru", "general-lstm")
RATE = 0.4


def dropping(name):
    return make(name, recurrent_dropout_rate=RATE)


def in_training(model, key, target=TARGET):
    return model(SOURCE, target, rngs=nnx.Rngs(dropout=key))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_loop_with_the_same_masks(name, monkeypatch):
    """Each layer, direction and row has a mask of its own."""
    rng, asked = np.random.default_rng(0), []

    def given(shape, rate, rngs):
        assert rate == RATE
        assert rngs is not None
        asked.append((rng.random(shape) >= RATE).astype(np.float32) / np.float32(1 - RATE))
        return jax.numpy.asarray(asked[-1])

    monkeypatch.setattr(seq2seq, "dropout_mask", given)
    model = dropping(name)
    logits = jitted(lambda *given: in_training(*given))(model, jax.random.key(0))  # a program of its own
    encoder, decoder = asked
    assert (encoder.shape, decoder.shape) == ((2, 2, B, D // 2), (3, B, D))
    oracle = Oracle(model)
    for row, (s, t) in enumerate(zip(lengths(SOURCE), lengths(TARGET), strict=True)):
        oracle.kept_in_encoder, oracle.kept = encoder[:, :, row], decoder[:, row]
        expected, _ = oracle(SOURCE[row, :s], TARGET[row, :t])
        np.testing.assert_allclose(logits[row, :t], expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_training_with_the_masks_of_a_source(name):
    def told(model, key):
        memory = model._encode(SOURCE, nnx.Rngs(dropout=key))
        cache, start = model.init_cache(memory, max_length=T)

        def step(cache, newest):
            logits, cache = model.step(newest, cache)
            return cache, logits

        inputs = np.concatenate([np.broadcast_to(model.config.start_id, (B, 1)), TARGET[:, :-1]], axis=1)
        return jax.lax.scan(step, cache, jax.numpy.asarray(inputs.T.astype(start.dtype)))[1].swapaxes(0, 1)

    model, key = dropping(name), jax.random.key(1)
    np.testing.assert_allclose(jitted(told)(model, key), jitted(in_training)(model, key), atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_dropped_is_dropped_at_every_step(name):
    """A row of U whose unit no step has seen has no gradient; any one step would give it some."""
    model, source, target = dropping(name), SOURCE[:1], TARGET[:1]
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def total(params, key):
        logits = nnx.merge(graphdef, params, others)(source, target, rngs=nnx.Rngs(dropout=key))
        return jax.nn.log_softmax(logits)[..., 5].sum()

    def run(params, key):
        return jax.grad(total)(params, key), model._encode(source, nnx.Rngs(dropout=key)).kept

    grads, kept = jitted(run)(nnx.to_pure_dict(params), jax.random.key(2))
    seen = lambda layer: np.abs(layer["recurrent"]).max(axis=-1) > 0  # noqa: E731
    found = np.concatenate([seen(grads["first_layer"])[None], seen(grads["decoder_layers"])])
    np.testing.assert_array_equal(found, kept[:, 0] > 0)
    of_encoder = np.stack([seen(grads["encoder_layers"][side]) for side in ("forward", "backward")])
    for units in (found, of_encoder):
        assert 0.2 < np.mean(units) < 0.9


@pytest.mark.parametrize("name", NAMES)
def test_as_many_masks_are_drawn_whatever_the_length_and_none_in_evaluation(name):
    key, longer = jax.random.key(0), np.full((B, 40), 4)
    drawn = lambda rate, target: count_draws(  # noqa: E731
        lambda key: in_training(make(name, recurrent_dropout_rate=rate), key, target), key
    )
    assert drawn(RATE, TARGET) == drawn(RATE, longer) == 2
    assert drawn(0.0, TARGET) == 0
    program = lambda model: str(jax.make_jaxpr(lambda: model(SOURCE, TARGET))())  # noqa: E731
    assert program(dropping(name)) == program(make(name))
    memory = jax.eval_shape(lambda model: model.encode(SOURCE), dropping(name))
    assert memory.kept is None


def test_masks_are_drawn_anew_for_each_key():
    model, train = dropping("general-lstm"), jitted(in_training)
    first, again, other = (train(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    for unlike in (other, forward(model, SOURCE, TARGET)):
        assert np.abs(first - unlike).max() > 1e-2
