"""The loss of captions: the penalty, the score function over all choices that there are, and the moving average."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from tests.nn.programs import jitted, normal
from tfx_jax.models.captioning import Captions
from tfx_jax.tasks.vision.captioning import captioning_loss, moving_average, object_weights

B, T, V, PLACES, SIDE = 3, 4, 5, 9, 12
CAPTIONS = np.array([[3, 4, 1, 2], [4, 2, 0, 0], [0, 0, 0, 0]], np.int32)
BOXES = np.zeros((B, T, 4), np.int32)
BOXES[0, 0], BOXES[0, 2], BOXES[1, 0] = (4, 4, 8, 8), (5, 8, 12, 9), (11, 11, 12, 12)


class Told:
    """A model that was told what it says, with soft attention unless it keeps a baseline."""

    def __init__(self, said, baseline=None):
        self.said, self.baseline = said, baseline
        self.config = SimpleNamespace(pad_id=0, image_size=SIDE)

    def teach(self, images, captions, *, rngs):
        return self.said


def make_said():
    weights = np.random.default_rng(1).dirichlet(np.ones(PLACES), (B, T)).astype(np.float32)
    said = normal(0, B, T, V), weights, -np.abs(normal(2, B, T)), np.abs(normal(3, B, T))
    return Captions(*said, is_drawn=np.array([False, True, True]))


def make_batch():
    return {"image": np.zeros((B, SIDE, SIDE, 3), np.uint8), "caption": CAPTIONS, "boxes": BOXES}


def nll_of(logits):
    """Of each token that exists, [B, T]."""
    nll = -np.take_along_axis(log_softmax(logits.astype(np.float64), axis=-1), CAPTIONS[..., None], axis=-1)[..., 0]
    return np.where(CAPTIONS > 0, nll, 0)


def test_the_penalty_is_equation_14():
    said = make_said()
    found = jitted(lambda said, batch: captioning_loss(Told(said), batch, None, attention_penalty=0.3))(
        said, make_batch()
    )
    penalty = 0.0
    for row, length in ((0, 4), (1, 2)):
        for place in range(PLACES):
            penalty += (1 - sum(said.weights[row, t, place] for t in range(length))) ** 2
    assert found.loss == pytest.approx(nll_of(said.logits).sum() + 0.3 * penalty, rel=1e-5)
    assert (found.weight, found.num_tokens) == (6, 6)
    assert found.metrics["penalty"] == pytest.approx((penalty, 2), rel=1e-5)
    assert found.metrics["entropy"] == pytest.approx((said.entropy[CAPTIONS > 0].sum(), 6), rel=1e-5)


def test_attention_on_an_object_is_counted_pixel_by_pixel():
    """A place counts if any of its pixels is in the box; a token that names nothing does not count."""
    said, total = make_said(), 0.0
    for row, step in ((0, 0), (0, 2), (1, 0)):
        top, left, bottom, right = BOXES[row, step]
        places = {(y // 4) * 3 + x // 4 for y in range(top, bottom) for x in range(left, right)}
        total += said.weights[row, step, sorted(places)].sum()
    found = jitted(functools.partial(object_weights, image_size=SIDE))(said.weights, BOXES)
    assert found == pytest.approx((total, 3), rel=1e-5)


@jax.jit
def hard(said, batch, baseline):
    """The loss of a training step and its gradient, the metrics, and the baseline behind it."""

    def loss(parts):
        model = Told(said._replace(**parts), SimpleStat(baseline))
        output = captioning_loss(model, batch, object(), score_weight=0.7, entropy_weight=0.2)
        return output.loss, (output, model.baseline.value)

    parts = {name: getattr(said, name) for name in ("logits", "log_prob", "entropy")}
    return jax.grad(loss, has_aux=True)(parts)


class SimpleStat:
    """What the loss needs of a Variable."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, index):
        return self.value[index]

    def __setitem__(self, index, value):
        self.value = value


def test_the_score_function_is_equation_12():
    """Choices are paid with the log-likelihood of the whole caption, less the baseline; an expectation with nothing."""
    said, baseline = make_said(), np.float32(-3.5)
    grads, (output, after) = jax.device_get(hard(said, make_batch(), baseline))
    nll = nll_of(said.logits)
    assert output.loss == pytest.approx(nll.sum(), rel=1e-5)  # not what the score adds
    reward = -nll[1].sum()
    expected = np.zeros((B, T))
    expected[1, :2] = -0.7 * (reward + 3.5)
    np.testing.assert_allclose(grads["log_prob"], expected, rtol=1e-5)
    np.testing.assert_allclose(grads["entropy"], -0.2 * (CAPTIONS > 0), rtol=1e-6)
    assert after == pytest.approx(0.9 * -3.5 + 0.1 * reward, rel=1e-5)
    evaluate = jitted(lambda said, batch: captioning_loss(Told(said, SimpleStat(baseline)), batch, None).loss)
    assert evaluate(said, make_batch()) == pytest.approx(output.loss)


def test_a_moving_average_of_nothing_stays():
    run = jitted(moving_average)
    rewards = np.array([-1.0, -3.0, -50.0], np.float32)
    assert run(np.float32(-2), rewards, np.array([True, True, False])) == pytest.approx(-2.0)
    assert run(np.float32(-4), rewards, np.array([True, True, False])) == pytest.approx(-3.8)
    assert run(np.float32(-4), rewards, np.zeros(3, bool)) == -4


class TestExpectedGradient:
    """A caption of two words, each with one of three places: nine choices, whose probabilities are parameters."""

    PATHS = np.array(list(itertools.product(range(3), repeat=2)))
    CAPTION = np.array([[3, 2]], np.int32)
    PLACES, VALUES = normal(4, 2, 3), 3 * normal(5, 9, 2, V)  # logits of the places, and of the words after each path

    def likelihoods(self, values):
        """log p(y | s) of each path."""
        log_probs = jax.nn.log_softmax(values, axis=-1)
        return log_probs[:, 0, 3] + log_probs[:, 1, 2]

    def log_probs(self, places):
        """log p(s_t) of each path, [9, 2]."""
        return jax.nn.log_softmax(places, axis=-1)[jnp.arange(2)[None], self.PATHS]

    def expected(self, places, values):
        return jnp.exp(self.log_probs(places).sum(axis=1)) @ self.likelihoods(values)

    def estimates(self, baseline):
        """The gradient of the loss for each path, as if it had been drawn, [9, parameters]."""

        def loss(parameters, path):
            places, values = parameters
            log_prob = self.log_probs(places)[path][None]
            said = Captions(
                values[path][None], jnp.zeros((1, 2, PLACES)), log_prob, jnp.zeros((1, 2)), jnp.ones(1, bool)
            )
            batch = {"image": None, "caption": self.CAPTION, "boxes": np.zeros((1, 2, 4), np.int32)}
            return captioning_loss(Told(said, SimpleStat(baseline)), batch, object()).loss

        grads = jitted(jax.vmap(jax.grad(loss), in_axes=(None, 0)))((self.PLACES, self.VALUES), np.arange(9))
        return np.concatenate([np.float64(grad).reshape(9, -1) for grad in grads], axis=1)

    def test_is_exact_with_any_baseline_and_one_near_the_mean_makes_it_less_noisy(self):
        probs = np.exp(np.asarray(jax.jit(self.log_probs)(self.PLACES), np.float64).sum(axis=1))
        mean, exact = jitted(jax.value_and_grad(self.expected, argnums=(0, 1)))(self.PLACES, self.VALUES)
        exact = -np.concatenate([grad.ravel() for grad in exact])
        noise = []
        for baseline in (np.float32(0), np.float32(mean)):
            estimates = self.estimates(baseline)
            np.testing.assert_allclose(probs @ estimates, exact, atol=1e-6)
            noise.append((probs @ estimates**2 - (probs @ estimates) ** 2)[:6].sum())
        assert np.abs(exact[:6]).max() > 0.1  # there is something to estimate
        assert noise[1] < noise[0] / 3
