"""The coverage loss of recurrent models: equations 12 and 13 of See et al. (2017), and what it leaves alone."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import log_softmax

from tests.models.test_seq2seq import CASES, SIZES, SOURCE, TARGET, Oracle, forward, lengths, make
from tests.nn.programs import draw, initial, jitted, started
from tests.tiers import slow_but
from tfx_jax.functional import beam_search, greedy_search
from tfx_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.step import new_state, split_variables, update

COVERING = [name for name in CASES if name.startswith("coverage")]
WEIGHT = 1.75  # unlike the paper's 1, it shows where it is forgotten


def step_of(model, **options):
    """A step of gradient descent from the parameters of a model, of a batch."""
    (params, model_state), optimizer = split_variables(model), optax.sgd(1.0)

    def step(source, target):
        batch, key = {"source": source, "target": target}, jax.random.key(0)
        with jax.numpy_dtype_promotion("standard"):  # as tasks have it
            state = new_state(params, optimizer, model_state=model_state)
            return update(nnx.graphdef(model), translation_loss, optimizer, state, batch, key, **options)

    return step


def losses_of(oracle):
    """Mean cross entropy and mean coverage loss over the target tokens, sentence by sentence and step by step."""
    nll, again = [], []
    for row, (s, t) in enumerate(zip(lengths(SOURCE), lengths(TARGET), strict=True)):
        target = TARGET[row, :t]
        logits, maps = oracle(SOURCE[row, :s], target)
        nll += [-log_softmax(step)[token] for step, token in zip(logits, target, strict=True)]
        for step, weights in enumerate(maps):
            coverage = [sum(before[place] for before in maps[:step]) for place in range(s)]  # equation 10
            again.append(sum(min(pair) for pair in zip(weights, coverage, strict=True)))  # equation 12
    assert len(nll) == len(again) == np.count_nonzero(TARGET)
    return np.mean(nll), np.mean(again)


@pytest.mark.parametrize("name", slow_but(COVERING, "coverage-gru"))
@pytest.mark.parametrize("accumulate", slow_but((1, 3), 1))
def test_training_goes_down_equation_13(name, accumulate):
    """Against differences of the float64 loss, along a direction in which every parameter moves."""
    model = make(name, coverage=WEIGHT)
    state, metrics = jitted(step_of(model, accumulate=accumulate))(SOURCE, TARGET)
    oracle = Oracle(model)
    start, (nll, again) = oracle.params, losses_of(oracle)
    assert metrics.means["coverage_loss"].mean == pytest.approx(again, rel=1e-5)
    assert metrics.means["loss"].mean == pytest.approx(nll, rel=1e-5)
    start = {name: start[name] for name in state.params}  # without what is no parameter
    rng = np.random.default_rng(3)
    directions = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), state.params)
    gradients = jax.tree.map(np.subtract, start, state.params)
    slope = sum(np.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (gradients, directions)), strict=True))

    def total(size):
        oracle.params = jax.tree.map(lambda leaf, along: leaf + size * along, start, directions)
        return np.dot((1, WEIGHT), losses_of(oracle))

    assert slope == pytest.approx((total(1e-6) - total(-1e-6)) / 2e-6, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(COVERING, "coverage-gru"))
def test_padding_changes_nothing(name):
    """Neither more of it behind sources and targets, nor a row of nothing else."""
    step = jitted(step_of(make(name, coverage=WEIGHT)))
    state, metrics = step(SOURCE, TARGET)
    padded, told = step(np.pad(SOURCE, ((0, 1), (0, 3))), np.pad(TARGET, ((0, 1), (0, 2))))
    np.testing.assert_allclose(told.means["coverage_loss"].mean, metrics.means["coverage_loss"].mean, rtol=1e-6)
    for found, want in zip(jax.tree.leaves(padded.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)
    _, nothing = step(np.zeros_like(SOURCE), np.zeros_like(TARGET))
    assert nothing.means["coverage_loss"].mean == 0


@pytest.mark.slow
def test_of_weight_0_it_is_seen_and_told_but_not_learnt():
    """The paper's ablation: its logits are those of any weight, and its step is that of the cross entropy alone."""
    model = make("coverage-gru", coverage=0.0)
    state, metrics = jitted(step_of(model))(SOURCE, TARGET)
    assert metrics.means["coverage_loss"].mean > 0.1
    np.testing.assert_array_equal(forward(model, SOURCE, TARGET), forward(make("coverage-gru"), SOURCE, TARGET))
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def cross_entropy(params):
        output = translation_loss(nnx.merge(graphdef, params, others), {"source": SOURCE, "target": TARGET}, None)
        return output.loss / output.weight

    with jax.numpy_dtype_promotion("standard"):
        gradients = jitted(jax.grad(cross_entropy))(nnx.to_pure_dict(params))
    for name in ("w_coverage", "b_score", "v", "w_query"):
        gradient, before, after = (tree["attention"][name] for tree in (gradients, params, state.params))
        assert np.abs(gradient).max() > 1e-4
        np.testing.assert_allclose(np.array(before[...]) - after, gradient, atol=1e-6)


@functools.cache
def strongly_covering(name):
    """A model that heeds its coverage so much that no step can do with that of another beam."""
    config = Seq2SeqConfig(**SIZES | CASES[name])
    spread = lambda path: {"attention/w_coverage": 4.0, "attention/v": 3.0}.get(path, 0.7)  # noqa: E731
    return draw(lambda: Seq2Seq(config, rngs=nnx.Rngs(0)), stddev=spread, seed=1)


@pytest.mark.parametrize("name", slow_but(COVERING, "coverage-lstm"))
def test_coverage_moves_with_its_beam(name):
    """Greedy and with beams, what is found has the score that the loop gives it when it is told the text."""
    model = strongly_covering(name)

    def run(source):
        asked = {"max_length": 8, "eos_id": 2}
        step, cache, start = started(model, source, max_length=8)
        tokens, scores = greedy_search(step, cache, start, **asked)
        step, cache, start = started(model, source, max_length=8, num_beams=4)
        return (tokens[:, None], scores[:, None]), beam_search(
            step, cache, start, beam_size=4, length_penalty=0.0, **asked
        )[:2]

    for found, scores in jitted(run)(SOURCE):
        uncovered = []
        for row, beam in np.ndindex(scores.shape):
            text = found[row, beam][: np.argmax(found[row, beam] == 2) + 1]
            oracle, source = Oracle(model), SOURCE[row, : lengths(SOURCE)[row]]
            assert scores[row, beam] == pytest.approx(score_of(oracle, source, text), abs=2e-4)
            attention = oracle.params["attention"]
            oracle.params = oracle.params | {"attention": attention | {"w_coverage": 0 * attention["w_coverage"]}}
            uncovered.append(abs(scores[row, beam] - score_of(oracle, source, text)))
        assert max(uncovered) > 0.1


def score_of(oracle, source, text):
    logits, _ = oracle(source, text)
    logits[:, 0] = -np.inf  # padding is never written
    return log_softmax(logits, axis=-1)[np.arange(len(text)), text].sum()


def test_evaluation_leaves_no_loss_behind():
    model = make("coverage-gru")

    def left(model, rngs):
        before = model.auxiliary_loss[...]
        model(SOURCE, TARGET, rngs=rngs)
        return model.auxiliary_loss[...] - before, model.coverage_loss[...]

    assert jitted(lambda model: left(model, None))(model)[0] == 0
    learned, told = jitted(lambda model: left(model, nnx.Rngs(dropout=0)))(model)
    assert learned != 0
    assert told > 0.1


@pytest.mark.slow
def test_it_begins_as_the_model_without_it_and_off_there_is_none_of_it():
    config = {**SIZES, "variant": "bahdanau"}
    covering = initial(lambda: Seq2Seq(Seq2SeqConfig(**config, coverage=1.0), rngs=nnx.Rngs(0)))
    plain = initial(lambda: Seq2Seq(Seq2SeqConfig(**config), rngs=nnx.Rngs(0)))
    paths = [{"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(model))} for model in (covering, plain)]
    new = {"attention/w_coverage", "attention/b_score", "auxiliary_loss", "coverage_loss"}
    assert paths[0] - paths[1] == new
    np.testing.assert_array_equal(forward(covering, SOURCE, TARGET), forward(plain, SOURCE, TARGET))
    cache, _ = jax.eval_shape(lambda model: model.init_cache(model.encode(SOURCE), max_length=4), plain)
    assert cache["state"].coverage is None


def test_steps_are_a_loop_and_not_unrolled():
    """The program of the gradient is as long for 40 target tokens as for 5."""
    step = step_of(make("coverage-gru"))
    sizes = [str(jax.make_jaxpr(step)(SOURCE, np.full((3, length), 4))).count(" = ") for length in (5, 40)]
    assert sizes[0] == sizes[1] > 100
