"""Sequence to vector against its equations in float64 NumPy, event by event, and what must not change its output."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import log_softmax

from tests.nn.programs import count_draws, draw, initial, jitted, normal, params_of
from tfx_jax.models import Seq2Vec, Seq2VecConfig
from tfx_jax.tasks.events import event_loss
from tfx_jax.training.step import new_state, split_variables, update

B, T, V, D, F, K, N = 4, 6, 5, 7, 8, 3, 9
PENALTY = 1.75  # unlike the default of 1, it shows where it is forgotten
CONFIG = Seq2VecConfig(V, D, F, K, num_hops=N, penalty=PENALTY, dropout_rate=0.0)
POOLINGS = ("additive", "dot", "mean", "structured")
RNG = np.random.default_rng(0)
VARIABLE = RNG.integers(V, size=(B, T)).astype(np.int32)
VALUE, TIME = RNG.uniform(-0.2, 1.2, (2, B, T)).astype(np.float32)  # some of them outside of [0, 1]
VALUE[0, :3] = 0.0, 1.0, 0.5  # both ends, and a knot
LENGTHS = np.array([6, 4, 1, 0])
MASK = np.arange(T) < LENGTHS[:, None]
EVENTS = VARIABLE, VALUE, TIME, MASK

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model(pooling="additive"):
    """The same parameters each time; most hidden units are not 0."""
    config = dataclasses.replace(CONFIG, pooling=pooling)
    return draw(lambda: Seq2Vec(config, rngs=nnx.Rngs(0)), mean=lambda name: float(name == "hidden/bias"))


def at_place(table, place):
    """A curve through equally distant knots, one coordinate after the other."""
    knots = np.linspace(0, 1, len(table))
    return np.array([np.interp(float(place), knots, column) for column in table.T])


def oracle(model, row, params=None):
    """Logits and rows of weights of one record without padding."""
    p, pooling = params or params_of(model, np.float64), model.config.pooling
    count = LENGTHS[row]
    events = [
        np.sqrt(D) * (at_place(p["values"][VARIABLE[row, t]], VALUE[row, t]) + at_place(p["times"], TIME[row, t]))
        for t in range(count)
    ]
    scores = {
        "additive": lambda e: [p["score"] @ np.tanh(p["query"] + e @ p["key"])],
        "dot": lambda e: [p["query"] @ e / np.sqrt(D)],
        "mean": lambda e: [0.0],
        "structured": lambda e: [w_s2 @ np.tanh(p["key"].T @ e) for w_s2 in p["score"].T],
    }
    hops = N if pooling == "structured" else 1
    weights = np.exp([scores[pooling](event) for event in events]).reshape(count, hops).T
    weights = weights / weights.sum(axis=1, keepdims=True)
    means = [sum((w * e for w, e in zip(row, events, strict=True)), np.zeros(D)) for row in weights]
    pooled = np.concatenate(means)
    hidden = np.maximum(pooled @ p["hidden"]["kernel"] + p["hidden"]["bias"], 0)
    return hidden @ p["classifier"]["kernel"] + p["classifier"]["bias"], weights


@pytest.mark.parametrize("pooling", POOLINGS)
def test_equals_the_equations_in_float64(pooling):
    logits, maps = _run(make_model(pooling), *EVENTS, return_attention=True)
    assert logits.shape == (B, 2)
    assert logits.dtype == np.float32
    (weights,) = maps.values()
    assert weights.shape == (B, N if pooling == "structured" else 1, 1, T)
    for row, count in enumerate(LENGTHS):
        expected, expected_weights = oracle(make_model(pooling), row)
        np.testing.assert_allclose(logits[row], expected, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(weights[row, :, 0, :count], expected_weights, atol=1e-6)
        assert not weights[row, :, 0, count:].any()


@pytest.mark.parametrize("pooling", ["additive", "structured"])
def test_padding_changes_nothing_bit_for_bit(pooling):
    """Not what stands there, not even an impossible variable. The order of rows changes rounding at most."""
    model = make_model(pooling)
    logits = _run(model, *EVENTS)
    junk = VARIABLE + 1000, np.full_like(VALUE, 1e30), np.full_like(TIME, -7)
    changed = [np.where(MASK, part, other) for part, other in zip(EVENTS[:3], junk, strict=True)]
    np.testing.assert_array_equal(_run(model, *changed, MASK), logits)
    order = [2, 0, 3, 1]  # on some processors, in which order a matrix product adds depends on the place of a row
    np.testing.assert_allclose(_run(model, *(part[order] for part in EVENTS)), logits[order], rtol=1e-6)


def test_the_order_of_events_means_nothing():
    order = np.array([3, 1, 0, 2, 4, 5])  # of the first four, which two rows have at least
    logits = _run(make_model(), *(part[:2] for part in EVENTS))
    other = _run(make_model(), *(part[:2, order] for part in EVENTS))
    np.testing.assert_allclose(other, logits, atol=1e-5)


def test_it_starts_as_the_mean_and_attention_has_a_gradient():
    for pooling in ("additive", "dot", "structured"):
        config = dataclasses.replace(CONFIG, pooling=pooling)
        model = initial(lambda config=config: Seq2Vec(config, rngs=nnx.Rngs(0)))
        _, maps = _run(model, *EVENTS, return_attention=True)
        for weights in maps["pool/0/cross"][1, :, 0]:
            np.testing.assert_allclose(weights, [0.25] * 4 + [0.0] * 2, atol=1e-6)
        graphdef, params = nnx.split(model)
        grad = jax.jit(jax.grad(lambda params, graphdef=graphdef: (nnx.merge(graphdef, params)(*EVENTS)[:, 1]).sum()))
        found = jax.device_get(nnx.to_pure_dict(grad(params)))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        assert np.abs(found["query" if pooling == "dot" else "score"]).max(axis=0).min() > 0  # in every row


def test_parameters_are_those_counted_by_hand():
    counts = {"additive": 2 * F + D * F, "dot": D, "mean": 0, "structured": D * F + F * N}
    for pooling, count in counts.items():
        config = dataclasses.replace(CONFIG, pooling=pooling)
        model = nnx.eval_shape(lambda config=config: Seq2Vec(config, rngs=nnx.Rngs(0)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        hops = N if pooling == "structured" else 1
        tables, classifier = V * K * D + K * D, hops * D * F + F + F * 2 + 2
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == tables + count + classifier


def test_whole_events_are_dropped_in_training_alone():
    """Weights of 0 or of a mean of those left, about half of them."""
    config = dataclasses.replace(CONFIG, pooling="mean", event_dropout_rate=0.5)
    model = draw(lambda: Seq2Vec(config, rngs=nnx.Rngs(0)))

    def weights(seed):
        rows = [np.zeros((200, T), part.dtype) for part in EVENTS[:3]]
        rngs = None if seed is None else nnx.Rngs(dropout=jax.random.key(seed))
        return model(*rows, np.ones((200, T), bool), rngs=rngs, return_attention=True)[1]["pool/0/cross"][:, 0, 0]

    found = jax.device_get(jax.jit(weights)(0))
    left = (found > 0).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, (found > 0) / np.maximum(left, 1), atol=1e-6)
    assert 0.4 < (found > 0).mean() < 0.6
    assert count_draws(weights, 0) == 1
    assert count_draws(lambda: weights(None)) == 0


def test_values_are_numbers_from_0_to_1():
    """What is outside counts as the nearer end."""
    ends = np.clip(VALUE, 0, 1), np.clip(TIME, 0, 1)
    np.testing.assert_array_equal(_run(make_model(), VARIABLE, *ends, MASK), _run(make_model(), *EVENTS))
    moved = _run(make_model(), VARIABLE, normal(1, B, T), TIME, MASK)
    assert (moved != _run(make_model(), *EVENTS))[:3].all()


LABEL, ROW_WEIGHTS = np.array([1, 0, 0, 1], np.int32), np.float32(LENGTHS > 0)
BATCH = dict(zip(("variable", "value", "time", "event_mask"), EVENTS, strict=True))


def step_of(model):
    """A step of gradient descent of the loss of records, the last of which is padding: the state, and what it tells."""
    (params, model_state), optimizer = split_variables(model), optax.sgd(1.0)
    with jax.numpy_dtype_promotion("standard"):  # as tasks have it
        state = new_state(params, optimizer, model_state=model_state)
        batch = {**BATCH, "label": LABEL, "row_weights": ROW_WEIGHTS}
        return jitted(lambda: update(nnx.graphdef(model), event_loss, optimizer, state, batch, jax.random.key(0)))()


def test_training_goes_down_the_cross_entropy_and_the_penalty():
    """Against differences of the float64 loss, along a direction in which every parameter moves."""
    model = make_model("structured")
    state, metrics = step_of(model)
    start = {name: value for name, value in params_of(model, np.float64).items() if name in state.params}

    def losses(params):
        rows = [oracle(model, row, params) for row in range(3)]
        nll = [-log_softmax(logits)[label] for (logits, _), label in zip(rows, LABEL[:3], strict=True)]
        penalties = [np.square(weights @ weights.T - np.eye(N)).sum() for _, weights in rows]
        return np.array([np.mean(nll), np.mean(penalties)])

    nll, penalty = losses(start)
    assert metrics.means["loss"].mean == pytest.approx(nll, rel=1e-4)
    assert metrics.means["redundancy"].mean == pytest.approx(penalty, rel=1e-5)
    rng = np.random.default_rng(3)
    directions = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), start)
    gradients = jax.tree.map(np.subtract, start, state.params)
    slope = sum(np.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (gradients, directions)), strict=True))
    ends = [losses(jax.tree.map(lambda a, b, size=size: a + size * b, start, directions)) for size in (1e-6, -1e-6)]
    assert slope == pytest.approx(np.dot((1, PENALTY), ends[0] - ends[1]) / 2e-6, rel=1e-3)


def test_evaluation_leaves_no_penalty_behind():
    def left(model, rngs):
        before = model.auxiliary_loss[...]
        model(*EVENTS, rngs=rngs)
        return model.auxiliary_loss[...] - before

    assert jitted(lambda model: left(model, None))(make_model("structured")) == 0
    assert jitted(lambda model: left(model, nnx.Rngs(dropout=0)))(make_model("structured")) != 0


def test_off_there_is_none_of_the_penalty():
    off = [{"pooling": pooling} for pooling in POOLINGS[:3]] + [{"pooling": "structured", "penalty": 0.0}]
    for fields in off:
        config = dataclasses.replace(CONFIG, **fields)
        model = nnx.eval_shape(lambda config=config: Seq2Vec(config, rngs=nnx.Rngs(0)))
        assert not jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
