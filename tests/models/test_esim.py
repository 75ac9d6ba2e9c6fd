"""ESIM against loops over words in float64 NumPy, from the formulas of the paper; its counts; padded sentences."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, softmax

from tests.nn.programs import count_draws, draw, jitted, params_of
from tfx_jax.models import Esim, EsimConfig

B, T, S, E, D = 4, 6, 5, 9, 7
LABELS, PAD = ("no", "maybe", "yes", "other"), 3
CONFIG = EsimConfig(vocab_size=11, d_embedding=E, d_model=D, dropout_rate=0.0, labels=LABELS, pad_id=PAD)
LENGTHS = (6, 2, 4, 0), (5, 3, 1, 2)

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model():
    """The same parameters each time."""
    return draw(lambda: Esim(CONFIG, rngs=nnx.Rngs(0)))


def make_pairs():
    """The longest row of each side has no padding, and the last premise nothing else."""
    rng = np.random.default_rng(1)
    sides = [rng.choice(np.delete(np.arange(11, dtype=np.int32), PAD), (B, size)) for size in (T, S)]
    for tokens, lengths in zip(sides, LENGTHS, strict=True):
        tokens[np.arange(tokens.shape[1]) >= np.array(lengths)[:, None]] = PAD
    return sides


def lstm(p, xs):
    h, c, outputs = np.zeros(D), np.zeros(D), []
    for x in xs:
        i, f, g, o = np.split(x @ p["kernel"] + h @ p["recurrent"] + p["bias"], 4)
        c = expit(f) * c + expit(i) * np.tanh(g)
        h = expit(o) * np.tanh(c)
        outputs.append(h)
    return np.array(outputs).reshape(-1, D)


def both_ways(p, xs):
    return np.concatenate([lstm(p["forward"], xs), lstm(p["backward"], xs[::-1])[::-1]], axis=1)


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def esim(p, premise, hypothesis):
    """Logits, and the weights of premise and hypothesis, of one pair without padding."""
    a, b = (both_ways(p["encoder"], p["embedding"]["table"][tokens] * E**0.5) for tokens in (premise, hypothesis))
    e, vectors, maps = np.array([[x @ y for y in b] for x in a]).reshape(len(a), len(b)), [], []
    for words, others, scores in ((a, b, e), (b, a, e.T)):
        weights = [softmax(row) if row.size else row for row in scores]
        compared = []
        for word, row in zip(words, weights, strict=True):
            aligned = sum((weight * other for weight, other in zip(row, others, strict=True)), np.zeros(2 * D))
            m = np.concatenate([word, aligned, word - aligned, word * aligned])
            compared.append(np.maximum(dense(p["projection"], m), 0))
        v = both_ways(p["composition"], np.array(compared).reshape(-1, D))
        vectors += [v.mean(axis=0), v.max(axis=0)] if len(v) else [np.zeros(2 * D)] * 2
        maps.append(np.reshape(weights, scores.shape))
    return dense(p["classifier"], np.tanh(dense(p["hidden"], np.concatenate(vectors)))), maps


def test_equals_the_equations_in_float64():
    """Of sentences of any length, none included, whatever stands behind them."""
    model, pairs = make_model(), make_pairs()
    p = params_of(model, np.float64)
    logits, maps = _run(model, *pairs, return_attention=True)
    assert logits.shape == (B, len(LABELS))
    assert logits.dtype == np.float32
    assert maps["decoder/0/cross"].shape == (B, 1, S, T)
    assert maps["encoder/0/cross"].shape == (B, 1, T, S)
    for row, (t, s) in enumerate(zip(*LENGTHS, strict=True)):
        expected, (of_premise, of_hypothesis) = esim(p, pairs[0][row, :t], pairs[1][row, :s])
        np.testing.assert_allclose(logits[row], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(maps["encoder/0/cross"][row, 0, :t, :s], of_premise, atol=1e-5)
        np.testing.assert_allclose(maps["decoder/0/cross"][row, 0, :s, :t], of_hypothesis, atol=1e-5)


def test_what_is_said_of_padding_changes_nothing_bit_for_bit():
    """Whatever the vector of the padding is; gradients are finite, of a sentence of nothing but padding too."""
    model, pairs = make_model(), make_pairs()
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)

    @jax.jit
    def run(params):
        def total(params):
            logits = nnx.merge(graphdef, params)(*pairs)
            return (logits * logits).sum(), logits

        return jax.grad(total, has_aux=True)(params)

    table = np.array(params["embedding"]["table"])
    table[PAD] = 77.0
    before, after = (jax.device_get(run(p)) for p in (params, params | {"embedding": {"table": table}}))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(before))
    assert not before[0]["embedding"]["table"][PAD].any()


def test_more_padding_changes_nothing():
    """A sentence alone is what it is in a batch, whose longer ones widen it."""
    pairs = make_pairs()
    wide = [np.pad(tokens, ((0, 0), (0, 3)), constant_values=PAD) for tokens in pairs]
    np.testing.assert_allclose(_run(make_model(), *wide), _run(make_model(), *pairs), rtol=1e-6, atol=1e-6)


def test_parameters_are_those_of_table_1():
    """4.3 M without the vectors of words (Chen et al., 2017, table 1), by hand."""
    config = EsimConfig(labels=("entailment", "neutral", "contradiction"))
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Esim(config, rngs=nnx.Rngs(0)))))
    del shapes["embedding"]
    lstm, wide, linear = 2 * 4 * (300 * 300 + 300 * 300 + 300), 8 * 300 * 300 + 300, 300 * 3 + 3
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 2 * lstm + 2 * wide + linear == 4_326_303


def test_dropout_is_of_what_layers_read_and_of_training_alone():
    """What both LSTMs read of both sentences, what the tanh layer reads, and the classifier."""
    config = dataclasses.replace(CONFIG, dropout_rate=0.5)
    model = draw(lambda: Esim(config, rngs=nnx.Rngs(0)))
    assert count_draws(lambda: model(*make_pairs(), rngs=nnx.Rngs(dropout=0))) == 6
    assert count_draws(lambda: model(*make_pairs())) == 0


def test_a_model_without_labels_is_refused():
    with pytest.raises(ValueError, match="needs labels"):
        nnx.eval_shape(lambda: Esim(dataclasses.replace(CONFIG, labels=()), rngs=nnx.Rngs(0)))
