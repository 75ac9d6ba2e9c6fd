"""ELMo against loops over characters and words in float64 NumPy, from the formulas of the papers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import expit, log_softmax, softmax

from tests.nn.programs import draw, jitted, params_of
from tfx_jax.models.elmo import (
    LSTM,
    CharacterConfig,
    Elmo,
    ElmoConfig,
    ElmoLanguageModel,
    ElmoTagger,
    ElmoTaggerConfig,
    scalar_mix,
)
from tfx_jax.tasks.text.bidirectional_language_modeling import bidirectional_language_model_loss
from tfx_jax.tasks.text.tagging import IGNORED, tagging_loss
from tfx_jax.training.step import new_state, split_variables, update

B, T, W, V, D, H = 3, 5, 9, 11, 6, 7
CHARACTERS = CharacterConfig(4, (1, 3, 2), (5, 4, 3), 2)
TAGGER = ElmoTaggerConfig(True, CharacterConfig(3, (2,), (8,), 1), 5, 4, 0.0)
CONFIG = ElmoConfig(V, W, CHARACTERS, 2, H, D, 0.0, TAGGER, labels=("O", "B-x", "I-x"))
LENGTHS = np.array([5, 3, 1])
MASK = np.arange(T) < LENGTHS[:, None]


def make_words(seed=0):
    """Rows of characters, the longest of them full; where there is no word, there is no character."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, W, (B, T))
    sizes[0, 1] = W
    rows = np.where(np.arange(W) < sizes[..., None], rng.integers(1, 260, (B, T, W)), 0)
    return np.where(MASK[..., None], rows, 0).astype(np.int32)


WORDS = make_words()
read = jitted(lambda model, words, mask: model.elmo(words, token_mask=mask))


@functools.cache
def make():
    return draw(lambda: ElmoLanguageModel(CONFIG, rngs=nnx.Rngs(0)))


@functools.cache
def make_tagger(use_elmo=True):
    config = dataclasses.replace(CONFIG, tagger=dataclasses.replace(TAGGER, use_elmo=use_elmo))
    return draw(lambda: ElmoTagger(config, rngs=nnx.Rngs(0)))


def relu(x):
    return np.maximum(x, 0)


def word_vector(p, row):
    """Section 2 of Kim et al. (2016): filters over the characters that there are, the largest answer, highways."""
    codes = row[row > 0]
    vectors = [p["table"][code - 1] for code in codes]
    features = []
    for index in range(len(p["filters"])):
        kernel, bias = p["filters"][index]["kernel"], p["filters"][index]["bias"]
        answers = []
        for place in range(len(codes)):
            window = [(vectors[place + k], kernel[k]) for k in range(len(kernel)) if place + k < len(codes)]
            answers.append(sum(vector @ part for vector, part in window) + bias)
        features += relu(np.max(answers, axis=0)).tolist()
    x = np.array(features)
    for index in range(len(p["highway"])):
        layer = p["highway"][index]
        gate = expit(x @ layer["gate"]["kernel"] + layer["gate"]["bias"])
        x = gate * relu(x @ layer["transform"]["kernel"] + layer["transform"]["bias"]) + (1 - gate) * x
    return x @ p["projection"]["kernel"] + p["projection"]["bias"]


def lstm(p, xs):
    h, c, outputs = np.zeros(p["recurrent"].shape[0]), np.zeros(p["kernel"].shape[1] // 4), []
    for x in xs:
        i, f, g, o = np.split(x @ p["kernel"] + h @ p["recurrent"] + p["bias"], 4)
        c = expit(f) * c + expit(i) * np.tanh(g)
        h = (expit(o) * np.tanh(c)) @ p["projection"]
        outputs.append(h)
    return np.array(outputs)


def all_layers(p, rows):
    """The layers of one sentence without padding: [L + 1, T, 2, D]."""
    words = np.array([word_vector(p["words"], row) for row in rows])
    layers = [np.stack([words, words], axis=1)]
    for index in range(len(p["layers"])):
        x, layer = layers[-1], p["layers"][index]
        y = np.stack([lstm(layer["forward"], x[:, 0]), lstm(layer["backward"], x[::-1, 1])[::-1]], axis=1)
        layers.append(y + x if index else y)
    return np.array(layers)


def test_layers_are_those_of_a_loop():
    layers, p = read(make(), WORDS, MASK), params_of(make().elmo, np.float64)
    assert layers.shape == (3, B, T, 2, D)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(layers[:, row, :length], all_layers(p, WORDS[row, :length]), atol=2e-5, rtol=2e-5)


def test_neither_direction_sees_what_is_not_its():
    """To the last bit: the forward layers at a word know no later one, the backward layers no earlier one."""
    before, other = read(make(), WORDS, MASK), WORDS.copy()
    other[0, 2] = make_words(1)[0, 2]
    after = read(make(), other, MASK)
    same = before == after
    assert same[:, 0, :2, 0].all()
    assert same[:, 0, 3:, 1].all()
    assert same[:, 1:].all()
    assert not same[1:, 0, 2:, 0].all(axis=-1).any()
    assert not same[1:, 0, :3, 1].all(axis=-1).any()


def test_padding_changes_nothing():
    """To the last bit; in front of a sentence as well as behind it, so that each direction starts at a word."""
    before = read(make(), WORDS, MASK)
    other = np.where(MASK[..., None], WORDS, make_words(2)[:, ::-1] + 1)
    np.testing.assert_array_equal(read(make(), other, MASK)[:, MASK], before[:, MASK])
    moved = [np.roll(rows, 2, axis=0) for rows in (WORDS[1], MASK[1])]
    there = read(make(), np.stack([WORDS[0], moved[0], WORDS[2]]), np.stack([MASK[0], moved[1], MASK[2]]))
    np.testing.assert_array_equal(there[:, 1, 2:], before[:, 1, :3])
    # Rows that are wider than their words need.
    wide = read(make(), np.pad(WORDS, ((0, 0), (0, 0), (0, 4))), MASK)
    np.testing.assert_allclose(wide[:, MASK], before[:, MASK], atol=1e-6)


FILTERS = (32, 32, 64, 128, 256, 512, 1024)


def test_the_published_size_is_that_of_hand_arithmetic():
    """93.6 million: the paper's "original" model without its softmax, which has 262 characters where we have 259."""
    filters = sum(16 * width * number + number for width, number in zip(range(1, 8), FILTERS, strict=True))
    highway = 2 * 2 * (2048 * 2048 + 2048)
    lstm = 4 * (2 * 512 * 4 * 4096 + 4 * 4096 + 4096 * 512)
    others = filters + highway + 2048 * 512 + 512 + lstm
    assert others + 262 * 16 == 93_600_864  # as published
    model = nnx.eval_shape(lambda: Elmo(ElmoConfig(), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))) == others + 259 * 16


TARGETS = np.random.default_rng(3).integers(V, size=(B, T, 2)).astype(np.int32)


def test_the_loss_is_the_sum_of_both_directions_which_share_words_and_softmax():
    graphdef, params = nnx.split(make())
    batch = {"characters": WORDS, "targets": TARGETS, "token_mask": jnp.asarray(MASK)}

    def of_directions(params):
        """The loss of each direction; beside them what the task says of both."""
        model = nnx.merge(graphdef, params)
        log_probs = jax.nn.log_softmax(model(WORDS, token_mask=batch["token_mask"]))
        picked = jnp.take_along_axis(log_probs, TARGETS[..., None], axis=-1)[..., 0]
        total = bidirectional_language_model_loss(model, batch, None)
        return -jnp.where(MASK[..., None], picked, 0.0).sum(axis=(0, 1)), total

    with jax.numpy_dtype_promotion("standard"):  # as tasks have it
        grads, output = jitted(jax.jacrev(of_directions, has_aux=True))(nnx.to_pure_dict(params))
    p = params_of(make(), np.float64)
    expected = 0.0
    for row, length in enumerate(LENGTHS):
        last = all_layers(p["elmo"], WORDS[row, :length])[-1]
        for t in range(length):
            for direction in (0, 1):
                logits = last[t, direction] @ p["softmax"]["kernel"] + p["softmax"]["bias"]
                expected -= log_softmax(logits)[TARGETS[row, t, direction]]
    assert output.loss == pytest.approx(expected, rel=1e-5)
    assert (output.weight, output.num_tokens) == (2 * LENGTHS.sum(), LENGTHS.sum())
    for direction, names in enumerate((("forward", "backward"), ("backward", "forward"))):
        mine = jax.tree.map(lambda leaf, direction=direction: leaf[direction], grads)
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((mine["softmax"], mine["elmo"]["words"])))
        for layer in mine["elmo"]["layers"].values():
            own, other = (jax.tree.leaves(layer[name]) for name in names)
            assert all(np.abs(leaf).max() > 0 for leaf in own)
            assert not any(leaf.any() for leaf in other)


def test_scalar_mix_and_its_gradient():
    rng = np.random.default_rng(4)
    layers, s = rng.normal(size=(3, 2, 4)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    weights = rng.normal(size=(2, 4)).astype(np.float32)

    def total(s, gamma):
        mixed = scalar_mix(jnp.asarray(layers), s, gamma)
        return (mixed * weights).sum(), mixed

    grads, mixed = jitted(jax.grad(total, argnums=(0, 1), has_aux=True))(s, np.float32(1.7))
    shares, each = softmax(s.astype(np.float64)), (layers.astype(np.float64) * weights).sum(axis=(1, 2))
    np.testing.assert_allclose(mixed, 1.7 * np.einsum("j,jbt->bt", shares, layers), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[0], 1.7 * shares * (each - shares @ each), rtol=1e-4, atol=1e-6)
    assert grads[1] == pytest.approx(shares @ each, rel=1e-5)


def test_a_frozen_elmo_is_never_changed_and_all_else_is():
    """By AdamW with weight decay; and what the tagger reads of it is what it says."""
    optimizer, model = optax.adamw(0.1, weight_decay=0.5), make_tagger()
    params, model_state = split_variables(model)
    batch = {"characters": WORDS, "token_mask": MASK, "targets": np.where(MASK, TARGETS[..., 0] % 3, IGNORED)}

    def step(params, model_state):
        before = new_state(params, optimizer, model_state=model_state)
        return before, update(nnx.graphdef(model), tagging_loss, optimizer, before, batch, jax.random.key(0))[0]

    with jax.numpy_dtype_promotion("standard"):  # optax
        before, after = jitted(step)(params, model_state)
    assert before.model_state.keys() == {"elmo"}
    assert before.params.keys() == before.opt_state[0].mu.keys() == {"words", "lstm", "classifier", "mix"}
    jax.tree.map(np.testing.assert_array_equal, before.model_state, after.model_state)
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True))
    names = [
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (before.model_state["elmo"], params_of(make())["elmo"])
    ]
    assert names[0] == names[1]  # so that they can be taken over


def test_with_and_without_differ_by_the_features_alone():
    without = dataclasses.replace(CONFIG, tagger=dataclasses.replace(TAGGER, use_elmo=False))
    shapes = []
    for config in (CONFIG, without):
        model = nnx.eval_shape(lambda config=config: ElmoTagger(config, rngs=nnx.Rngs(0)))
        trees = split_variables(model)
        assert (trees[1] == {}) == (config is without)
        shapes.append(jax.tree.map(jnp.shape, trees[0]))
    difference = {"mix": {"weights": (3,), "scale": ()}}
    for direction in ("forward", "backward"):
        shapes[1]["lstm"][direction]["kernel"] = (5 + 2 * D, 16)
    assert shapes[0] == shapes[1] | difference


@jitted
def tag(model, words, mask):
    return model(words, token_mask=mask)


@pytest.mark.parametrize("use_elmo", [True, False])
def test_a_tagger_is_that_of_a_loop(use_elmo):
    model = make_tagger(use_elmo)
    logits, p = tag(model, WORDS, MASK), params_of(model, np.float64)
    for row, length in enumerate(LENGTHS):
        x = np.array([word_vector(p["words"], word) for word in WORDS[row, :length]])
        if use_elmo:
            layers = all_layers(p["elmo"], WORDS[row, :length]).reshape(3, length, 2 * D)
            mixed = p["mix"]["scale"] * np.einsum("j,jtd->td", softmax(p["mix"]["weights"]), layers)
            x = np.concatenate([x, mixed], axis=1)
        sides = [p["lstm"][name] | {"projection": np.eye(4)} for name in ("forward", "backward")]
        x = np.concatenate([lstm(sides[0], x), lstm(sides[1], x[::-1])[::-1]], axis=1)
        expected = x @ p["classifier"]["kernel"] + p["classifier"]["bias"]
        np.testing.assert_allclose(logits[row, :length], expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filter_widths": (1, 2)}, r"^characters\.filter_widths=\(1, 2\) needs as many num_filters"),
        ({"num_filters": (5, 0, 3)}, "all at least 1"),
        ({"filter_widths": (), "num_filters": ()}, "needs as many num_filters"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    config = dataclasses.replace(CONFIG, characters=dataclasses.replace(CHARACTERS, **changes))
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_a_tagger_without_labels_is_refused():
    with pytest.raises(ValueError, match="needs labels"):
        jax.eval_shape(lambda: ElmoTagger(dataclasses.replace(CONFIG, labels=()), rngs=nnx.Rngs(0)))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_projected_lstm_is_that_of_pytorch(is_reversed):
    torch = pytest.importorskip("torch")
    model = draw(lambda: LSTM(5, H, 3, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(5).normal(size=(B, T, 5)).astype(np.float32)
    found = jitted(lambda model, x, mask: model(x, mask, is_reversed=is_reversed))(model, x, MASK)
    other = torch.nn.LSTM(5, H, proj_size=3, batch_first=True)
    p, state = params_of(model), {}
    for name, key in (("weight_ih_l0", "kernel"), ("weight_hh_l0", "recurrent"), ("weight_hr_l0", "projection")):
        state[name] = torch.tensor(p[key].T)
    state["bias_ih_l0"], state["bias_hh_l0"] = torch.tensor(p["bias"]), torch.zeros(4 * H)
    other.load_state_dict(state)
    for row, length in enumerate(LENGTHS):
        order = slice(None, None, -1 if is_reversed else 1)
        with torch.no_grad():
            expected = other(torch.tensor(x[row : row + 1, :length][:, order].copy()))[0].numpy()[0, order]
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-5)
