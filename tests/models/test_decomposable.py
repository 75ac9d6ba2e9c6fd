"""Decomposable attention as a model: the paper's counts, its equations word by word, swapped and padded sentences."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.functional.attention.oracles.decomposable import decomposable
from tests.nn.programs import count_draws, draw, initial, jitted, params_of
from tfx_jax.models import DecomposableAttention, DecomposableConfig

B, T, S = 3, 6, 5
LABELS = ("no", "maybe", "yes", "other")
CONFIG = DecomposableConfig(
    vocab_size=11, d_embedding=9, d_model=7, d_ff=8, dropout_rate=0.0, max_distance=2, labels=LABELS, pad_id=3
)
LENGTHS = (6, 2, 4), (5, 3, 1)
TOKENS = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9, 10], np.int32)  # all but padding

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model(**overrides):
    """The same parameters each time."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: DecomposableAttention(config, rngs=nnx.Rngs(0)))


def make_pairs():
    rng = np.random.default_rng(1)
    sides = [rng.choice(TOKENS, (B, size)) for size in (T, S)]
    for tokens, lengths in zip(sides, LENGTHS, strict=True):
        tokens[np.arange(tokens.shape[1]) >= np.array(lengths)[:, None]] = 3
    return sides


def layers(p):
    """F, G, H or F_intra for one vector in float64."""

    def run(x):
        for name in ("first", "second"):
            x = np.maximum(x @ p[name]["kernel"] + p[name]["bias"], 0)
        return x

    return run


def words(p, tokens, *, intra):
    """The paper's a, or with intra-sentence attention its [a; a'], one word after the other."""
    a = [p["embedding"]["table"][token] @ p["projection"]["kernel"] for token in tokens]
    if not intra:
        return np.array(a)
    f, joined = layers(p["intra"]), []
    for i in range(len(a)):
        distances = [min(max(i - j, -3), 3) for j in range(len(a))]  # beyond 2, all the same
        scores = [f(a[i]) @ f(a[j]) + p["distance_bias"][distance + 3] for j, distance in enumerate(distances)]
        weights = np.exp(scores) / np.exp(scores).sum()
        joined.append(np.concatenate([a[i], sum(w * x for w, x in zip(weights, a, strict=True))]))
    return np.array(joined)


@pytest.mark.parametrize("intra", [False, True])
def test_equals_the_equations_in_float64(intra):
    model = make_model(intra_attention=intra)
    p, pairs = params_of(model, np.float64), make_pairs()
    logits, maps = _run(model, *pairs, return_attention=True)
    assert logits.shape == (B, len(LABELS))
    assert logits.dtype == np.float32
    assert maps["decoder/0/cross"].shape == (B, 1, S, T)
    assert maps["encoder/0/cross"].shape == (B, 1, T, S)
    f, g, h = (layers(p[name]) for name in ("attend", "compare", "aggregate"))
    for row, (t, s) in enumerate(zip(*LENGTHS, strict=True)):
        a, b = (words(p, side[row, :size], intra=intra) for side, size in zip(pairs, (t, s), strict=True))
        expected = decomposable(a, b, f, g, h) @ p["classifier"]["kernel"] + p["classifier"]["bias"]
        np.testing.assert_allclose(logits[row], expected, rtol=2e-4, atol=2e-4)
        scores = np.exp([[f(x) @ f(y) for y in b] for x in a])
        np.testing.assert_allclose(
            maps["encoder/0/cross"][row, 0, :t, :s], scores / scores.sum(axis=1, keepdims=True), atol=1e-4
        )
        np.testing.assert_allclose(maps["decoder/0/cross"][row, 0, :s, :t], (scores / scores.sum(axis=0)).T, atol=1e-4)


def test_swapped_sentences_swap_the_halves_that_are_aggregated():
    """With H's first matrix swapped as well, nothing changes; without, something does."""
    model, pairs = make_model(), make_pairs()
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    first = params["aggregate"]["first"]
    swapped = first | {"kernel": np.roll(np.asarray(first["kernel"]), CONFIG.d_ff, axis=0)}
    other = nnx.merge(graphdef, params | {"aggregate": params["aggregate"] | {"first": swapped}})
    logits, maps = _run(model, *pairs, return_attention=True)
    back, maps_back = _run(other, *pairs[::-1], return_attention=True)
    np.testing.assert_allclose(back, logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(maps_back["encoder/0/cross"], maps["decoder/0/cross"], atol=1e-5)
    assert (np.abs(_run(model, *pairs[::-1]) - logits).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("intra", [False, True])
def test_what_is_said_of_padding_changes_nothing_bit_for_bit(intra):
    """Whatever the vector of the padding is."""
    model, pairs = make_model(intra_attention=intra), make_pairs()
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    table = np.array(params["embedding"]["table"])
    table[3] = 77.0
    other = nnx.merge(graphdef, params | {"embedding": {"table": table}})
    np.testing.assert_array_equal(_run(other, *pairs), _run(model, *pairs))


def test_the_order_of_words_means_nothing_but_to_intra_attention():
    pairs, order = make_pairs(), np.array([4, 0, 3, 5, 1, 2])
    shuffled = pairs[0][:, order], pairs[1]
    for intra in (False, True):
        change = np.abs(
            _run(make_model(intra_attention=intra), *shuffled) - _run(make_model(intra_attention=intra), *pairs)
        )
        assert (change[0].max() > 1e-3) == intra


def count(intra, **sizes):
    config = DecomposableConfig(labels=("entailment", "neutral", "contradiction"), intra_attention=intra, **sizes)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: DecomposableAttention(config, rngs=nnx.Rngs(0)))))
    del shapes["embedding"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_parameters_are_those_of_table_2():
    """382 k and 582 k without the vectors of words (Parikh et al., 2016, table 2), by hand."""
    projection, linear = 300 * 200, 200 * 3 + 3
    second = 200 * 200 + 200
    f, g, h = 200 * 200 + 200 + second, 400 * 200 + 200 + second, 400 * 200 + 200 + second
    assert count(False) == projection + f + g + h + linear == 381_803
    intra, distances = 200 * 200 + 200 + second, 10 + 10 + 1 + 2  # each way, none, and farther each way
    f, g = 400 * 200 + 200 + second, 800 * 200 + 200 + second
    assert count(True) == projection + intra + distances + f + g + h + linear == 582_226


def test_matching_starts_with_differences():
    """A word that is aligned with one like itself gives G's first layer nothing; plain, it does."""
    for init, is_zero in (("plain", False), ("matching", True)):
        config = dataclasses.replace(CONFIG, init=init)
        model = initial(lambda config=config: DecomposableAttention(config, rngs=nnx.Rngs(0)))
        kernel = params_of(model)["compare"]["first"]["kernel"]
        same = np.arange(1.0, 8.0)
        np.testing.assert_equal(np.abs(np.concatenate([same, same]) @ kernel).max() < 1e-5, is_zero)
        assert np.abs(kernel).min() > 0


def test_dropout_is_before_every_layer_and_of_training_alone():
    """Two layers each of F and G for both sentences, and of H; with intra-sentence attention of F_intra for both."""
    for intra, draws in ((False, 10), (True, 14)):
        model = make_model(intra_attention=intra, dropout_rate=0.5)
        assert count_draws(lambda model=model: model(*make_pairs(), rngs=nnx.Rngs(dropout=0))) == draws
        assert count_draws(lambda model=model: model(*make_pairs())) == 0


def test_a_model_without_labels_is_refused():
    config = dataclasses.replace(CONFIG, labels=())
    with pytest.raises(ValueError, match="needs labels"):
        nnx.eval_shape(lambda: DecomposableAttention(config, rngs=nnx.Rngs(0)))
