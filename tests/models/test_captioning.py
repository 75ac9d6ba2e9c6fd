"""The captioner against the paper's equations in float64 NumPy, pixel by pixel and place by place."""

import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, log_softmax, softmax, xlogy

from tests.nn.programs import draw, initial, jitted, normal, params_of, started
from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.functional.search import beam_search
from tfx_jax.models.captioning import Captioner, CaptionerConfig
from tfx_jax.nn.decoding import DecodingModel

B, T, V, SIDE, D = 3, 4, 11, 12, 6
SIZES = {"vocab_size": V, "image_size": SIDE, "channels": (5, 4), "d_model": D}
IMAGES = np.random.default_rng(0).integers(0, 256, (B, SIDE, SIDE, 3)).astype(np.uint8)
CAPTIONS = np.array([[5, 9, 10, 2], [7, 2, 0, 0], [2, 0, 0, 0]], np.int32)
LENGTHS = (CAPTIONS != 0).sum(axis=1)


@functools.cache
def make(variant="soft", **overrides):
    return draw(lambda: Captioner(CaptionerConfig(**SIZES | overrides, variant=variant), rngs=nnx.Rngs(0)))


teach = jitted(lambda model, images, captions: model.teach(images, captions))
forward = jitted(lambda model, images, captions: model(images, captions))


class Oracle:
    """One image at a time."""

    def __init__(self, model):
        self.config, self.params = model.config, params_of(model, np.float64)

    def convolution(self, x, kernel, bias, is_last):
        """Three by three pixels, every second one; zeros are added before the first or behind the last."""
        side, ends = len(x) // 2, (0, 1) if is_last else (1, 0)
        x, out = np.pad(x, (ends, ends, (0, 0))), np.zeros((side, side, len(bias)))
        for row, column in np.ndindex(side, side):
            out[row, column] = bias
            for i, j, channel in np.ndindex(3, 3, x.shape[2]):
                out[row, column] += x[2 * row + i, 2 * column + j, channel] * kernel[i, j, channel]
        return np.maximum(out, 0)

    def encode(self, image):
        x = image / 127.5 - 1
        for index in range(len(self.config.channels)):
            p = self.params["convolutions"][index]
            x = self.convolution(x, p["kernel"], p["bias"], index + 1 == len(self.config.channels))
        return x.reshape(-1, x.shape[2]) + self.params["positions"]["table"]

    def begin(self, a):
        """Section 3.1.2: from the mean of the annotation vectors."""
        drawn = np.tanh(a.mean(axis=0) @ self.params["initial"] + self.params["initial_bias"])
        return drawn[:D], drawn[D:]

    def look(self, a, h):
        """Equations 4 and 5."""
        p = self.params
        return softmax(np.array([p["v"] @ np.tanh(h @ p["w_query"] + place @ p["w_key"]) for place in a]))

    def step(self, a, state, token, alpha):
        """Equations 1 to 3, 6 and 7, with a gate that is told the state before."""
        p, (h, c) = self.params, state
        word = p["embedding"]["table"][token]
        z = expit(h @ p["gate"] + p["gate_bias"]) * (alpha @ a)
        i, f, g, o = np.split(word @ p["kernel"] + z @ p["feed"] + h @ p["recurrent"] + p["bias"], 4)
        c = expit(f) * c + expit(i) * np.tanh(g)
        h = expit(o) * np.tanh(c)
        return (h, c), p["l_o"] @ (word + h @ p["l_h"] + z @ p["l_z"]) + p["logits_bias"]

    def __call__(self, image, caption, choose):
        """Logits, weights and probabilities of each token; `choose(t, probabilities)` gives the weights."""
        a = self.encode(image)
        state, found = self.begin(a), []
        for t, token in enumerate([1, *caption[:-1]]):
            probs = self.look(a, state[0])
            alpha = choose(t, probs)
            state, logits = self.step(a, state, token, alpha)
            found.append((logits, alpha, probs))
        return [np.array(part) for part in zip(*found, strict=True)]


CHOICES = {"soft": lambda t, probs: probs, "hard": lambda t, probs: np.eye(len(probs))[probs.argmax()]}


@pytest.mark.parametrize("variant", CHOICES)
def test_equals_the_equations_in_float64(variant):
    found = teach(make(variant), IMAGES, CAPTIONS)
    assert {part.dtype.name for part in found[:4]} == {"float32"}
    assert not found.is_drawn.any()
    oracle = Oracle(make(variant))
    for row, length in enumerate(LENGTHS):
        logits, weights, probs = oracle(IMAGES[row], CAPTIONS[row, :length], CHOICES[variant])
        np.testing.assert_allclose(found.logits[row, :length], logits, atol=5e-5, rtol=5e-5)
        np.testing.assert_allclose(found.weights[row, :length], weights, atol=1e-5)
        np.testing.assert_allclose(found.entropy[row, :length], -xlogy(probs, probs).sum(axis=1), atol=1e-5)
        if variant == "hard":
            np.testing.assert_allclose(found.log_prob[row, :length], np.log(probs.max(axis=1)), atol=1e-4)
    assert found.weights.shape == (B, T, 9)


def test_the_future_padding_and_other_rows_change_no_bit():
    before, other, images = forward(make(), IMAGES, CAPTIONS), CAPTIONS.copy(), IMAGES.copy()
    other[:, 2:], images[2] = 8, 255 - images[2]
    after = forward(make(), images, other)
    np.testing.assert_array_equal(before[:2, :3], after[:2, :3])  # the third is told the second
    assert np.abs(before[:2, 3] - after[:2, 3]).min(axis=-1).max() > 1e-4
    assert np.abs(before[2] - after[2]).max() > 1e-3


def test_a_place_of_the_grid_sees_the_pixels_around_it():
    """Three on each side of its square of eight, and one more behind: the gradient reaches these, and no others."""
    model = make(image_size=48, channels=(3, 3, 3))

    def feature(image, place):
        return model.encode(image[None]).features[0, place].std()

    image = normal(0, 48, 48, 3) * 40 + 128
    seen = np.abs(jitted(jax.grad(feature))(image, 2 * 6 + 3)).sum(axis=-1) > 0
    assert np.flatnonzero(seen.any(axis=1)).tolist() == list(range(16 - 3, 24 + 4))
    assert np.flatnonzero(seen.any(axis=0)).tolist() == list(range(24 - 3, 32 + 4))


def exact_choices(model, image, caption):
    """Of all choices of places, their probabilities and log p(y | s, a)."""
    oracle, places = Oracle(model), model.config.grid_size**2
    table = []
    for path in itertools.product(range(places), repeat=len(caption)):
        logits, _, probs = oracle(image, caption, lambda t, probs, path=path: np.eye(places)[path[t]])
        log_likelihood = log_softmax(logits, axis=-1)[np.arange(len(caption)), caption].sum()
        table.append((np.prod(probs[np.arange(len(caption)), path]), log_likelihood))
    return np.array(table).T


def test_drawn_choices_have_their_probabilities_and_some_images_get_the_expectation():
    """The mean over many draws of any function of the choices is that over all choices, each with its probability."""
    model, rows = make("hard", channels=(3, 3), image_size=8, soft_share=0.25), 4_000
    image, caption = IMAGES[0, :8, :8], CAPTIONS[0, 2:]
    run = jitted(lambda model, seed: model.teach(
        np.broadcast_to(image, (rows, 8, 8, 3)), np.tile(caption, (rows, 1)), rngs=nnx.Rngs(dropout=seed)
    ))  # fmt: skip
    found = run(model, jax.random.key(3))
    assert 0.7 < found.is_drawn.mean() < 0.8
    likelihood = np.take_along_axis(log_softmax(found.logits, axis=-1), np.tile(caption, (rows, 1))[..., None], 2)
    likelihood = likelihood.sum(axis=(1, 2))
    probabilities, exact = exact_choices(model, image, caption)
    assert probabilities.sum() == pytest.approx(1)
    drawn = likelihood[found.is_drawn]
    mean, error = probabilities @ exact, np.sqrt(probabilities @ exact**2 - (probabilities @ exact) ** 2)
    assert abs(drawn.mean() - mean) < 3.5 * error / np.sqrt(len(drawn))
    assert set(found.weights[found.is_drawn].ravel()) == {0.0, 1.0}
    chosen = found.weights[found.is_drawn].argmax(axis=-1)
    log_prob = found.log_prob[found.is_drawn].sum(axis=1)
    for path, probability in zip(np.ndindex(4, 4), probabilities, strict=True):
        same = (chosen == path).all(axis=1)
        assert abs(same.mean() - probability) < 4 * np.sqrt(probability / len(drawn))
        np.testing.assert_allclose(log_prob[same], np.log(probability), atol=1e-4)
    soft, weights, _ = Oracle(model)(image, caption, CHOICES["soft"])
    np.testing.assert_allclose(found.logits[~found.is_drawn] - soft, 0, atol=5e-5)
    np.testing.assert_allclose(found.weights[~found.is_drawn] - weights, 0, atol=1e-5)
    assert not found.log_prob[~found.is_drawn].any()


@pytest.mark.parametrize("variant", slow_but(CHOICES, "soft"))
def test_a_search_that_drops_nothing_finds_the_best_of_all_captions(variant):
    """Three words, and up to two of them before the end: a beam with room for all of them, against each by itself."""
    model, length, beam = make(variant, vocab_size=5), 3, 16

    def run(images):
        step, cache, start = started(model.decoder(), images, max_length=length, num_beams=beam)
        return beam_search(step, cache, start, beam_size=beam, max_length=length, eos_id=2, length_penalty=0.0)

    found, oracle = jitted(run)(IMAGES), Oracle(model)
    texts = [
        (*words, 2) for count in range(length) for words in itertools.product((1, 3, 4), repeat=count)
    ]  # all that end; padding is never written
    for row, image in enumerate(IMAGES):
        scores = {}
        for text in texts:
            logits, _, _ = oracle(image, text, CHOICES[variant])
            logits[:, 0] = -np.inf
            scores[text] = log_softmax(logits, axis=-1)[np.arange(len(text)), text].sum()
        best = max(scores, key=scores.__getitem__)
        assert tuple(found.tokens[row, 0, : len(best)]) == best
        assert found.scores[row, 0] == pytest.approx(scores[best], abs=1e-4)


def test_it_is_a_decoder_of_images():
    model = make()
    assert isinstance(model, DecodingModel)
    assert model.max_input_length(99) is None
    assert (model.vocab_size, model.pad_id) == (V, 0)
    with pytest.raises(UserError, match="does not support int8"):
        model.decoder(int8=True)
    _, maps = jax.eval_shape(lambda model: model(IMAGES, CAPTIONS, return_attention=True), model)
    assert {name: weights.shape for name, weights in maps.items()} == {"decoder/0/cross": (B, 1, T, 9)}


def test_gradients_reach_every_parameter_but_the_baseline():
    graphdef, params, state = nnx.split(make("hard", soft_share=0.5), nnx.Param, ...)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [()]

    def total(params):
        found = nnx.merge(graphdef, params, state).teach(IMAGES, CAPTIONS, rngs=nnx.Rngs(dropout=1))
        return found.logits.std() + found.log_prob.sum()

    grads = jitted(jax.grad(total))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_dropout_is_drawn_anew_for_each_key_and_half_precision_is_near():
    train = jitted(lambda model, key: model(IMAGES, CAPTIONS, rngs=nnx.Rngs(dropout=key)))
    first, again, other = (train(make(dropout_rate=0.5), jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    expected, narrow = forward(make(), IMAGES, CAPTIONS), forward(make(dtype="bfloat16"), IMAGES, CAPTIONS)
    assert narrow.dtype == np.float32
    assert 0 < np.abs(narrow - expected).max() < 0.1 * np.abs(expected).max()


def test_parameters_by_hand():
    sizes = [(path[-1], leaf.size) for path, leaf in nnx.to_flat_state(nnx.state(make()))]
    encoder = (27 * 5 + 5) + (45 * 4 + 4) + 9 * 4
    lstm = 4 * D * (D + 4 + D + 1)
    attention = D * D + 4 * D + D
    first, gate, last = 2 * D * (4 + 1), D + 1, D * D + 4 * D + V * D + V
    assert sum(size for _, size in sizes) == encoder + V * D + lstm + attention + first + gate + last


@pytest.mark.slow
def test_the_forget_gate_starts_open():
    bias = params_of(initial(lambda: Captioner(CaptionerConfig(**SIZES), rngs=nnx.Rngs(0))))["bias"]
    np.testing.assert_array_equal(bias.reshape(4, D), np.eye(4)[1][:, None] * np.ones(D))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": ()}, r"^channels must be one or more positive numbers, got \(\)"),
        ({"channels": (4, 0)}, "^channels must be"),
        ({"image_size": 10}, r"^image_size=10 must be divisible by 4, because each of channels=\(5, 4\) halves"),
        ({"variant": "local"}, 'variant must be "soft" or "hard", got \'local\''),
        ({"start_id": V}, f"^start_id={V} must be in 0 .. {V - 1}"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Captioner(CaptionerConfig(**SIZES | fields), rngs=nnx.Rngs(0))


def test_images_of_another_size_are_refused():
    with pytest.raises(
        ValueError, match=r"^images must be RGB with image_size=12 rows and columns, got shape \(12, 8, 3\)"
    ):
        make().encode(normal(0, 2, 12, 8, 3))
