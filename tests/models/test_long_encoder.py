"""The encoder of long sequences: against NumPy in float64, its size by hand, and every attention beside padding."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

from tests.attentions import KINDS, ON_CPU, example
from tests.tiers import slow_but
from tfx_jax.functional.attention import SPECS
from tfx_jax.models.long_encoder import LongEncoder, LongEncoderConfig

V, D, F, N = 19, 12, 10, 3
CONFIG = LongEncoderConfig(V, num_layers=2, d_model=D, num_heads=N, d_ff=F, labels=("a", "b", "c", "d", "e"))
PAIRS = dataclasses.replace(CONFIG, num_sequences=2)
LENGTHS = (7, 16, 0)
RNG = np.random.default_rng(4)
TOKENS, OTHERS = (
    np.where(np.arange(16) < np.array(lengths)[:, None], RNG.integers(1, V, (3, 16)), 0).astype(np.int32)
    for lengths in (LENGTHS, (12, 3, 0))
)


def with_attention(config, name):
    """Two heads, because differential attention takes pairs of them; causal where there is no other form."""
    is_causal = SPECS[name].causal_only
    return dataclasses.replace(config, num_heads=2, attention=example(name), is_causal=is_causal)


@pytest.fixture(scope="module")
def drawn(draw_model):
    """`drawn(config)`: `fn(params, *tokens)`, compiled, and parameters of which none is what it starts as."""

    def draw(config):
        graphdef, params = nnx.split(draw_model(lambda: LongEncoder(config, rngs=nnx.Rngs(0))))
        return jax.jit(lambda params, *tokens: nnx.merge(graphdef, params)(*tokens)), nnx.to_pure_dict(params)

    return draw


def layer_norm(x, norm):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * norm["scale"] + norm["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attended(x, p, is_causal):
    query, key, value = (np.einsum("td,dnh->nth", x, p[name]["kernel"]) for name in ("query", "key", "value"))
    scores = query @ key.swapaxes(1, 2) / math.sqrt(D / N)
    if is_causal:
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("nth,nhd->td", weights / weights.sum(axis=-1, keepdims=True) @ value, p["out"]["kernel"])


def vector(tokens, p, is_causal=False):
    """The mean over the tokens of one sequence, of which nothing else is computed."""
    tokens = tokens[tokens != 0]
    if not tokens.size:
        return np.zeros(D)
    angle = np.arange(len(tokens))[:, None] / 10_000.0 ** (np.arange(0, D, 2) / D)
    x = p["embedding"]["table"][tokens] + np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(-1, D)
    for index in range(2):
        layer = jax.tree.map(lambda leaf: leaf[index], p["encoder_layers"])  # noqa: B023
        x = x + attended(layer_norm(x, layer["self_attention_residual"]["norm"]), layer["self_attention"], is_causal)
        y, feed_forward = layer_norm(x, layer["feed_forward_residual"]["norm"]), layer["feed_forward"]
        y = gelu(y @ feed_forward["up"] + feed_forward["up_bias"])
        x = x + y @ feed_forward["down"] + feed_forward["down_bias"]
    return layer_norm(x, p["norm"]).mean(axis=0)


def logits_of(vectors, p):
    for index in range(len(p["hidden"])):
        hidden = p["hidden"][index]
        vectors = np.maximum(vectors @ hidden["kernel"] + hidden["bias"], 0)
    return vectors @ p["classifier"]["kernel"] + p["classifier"]["bias"]


@pytest.mark.parametrize("is_causal", [False, True], ids=["both ways", "causal"])
def test_logits_are_those_of_the_formulas(is_causal, drawn):
    read, params = drawn(dataclasses.replace(CONFIG, is_causal=is_causal))
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    want = logits_of(np.stack([vector(row, exact, is_causal) for row in TOKENS]), exact)
    np.testing.assert_allclose(read(params, TOKENS), want, atol=2e-5)


def test_logits_of_pairs_are_those_of_both_vectors_their_product_and_their_difference(drawn):
    read, params = drawn(PAIRS)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    u, v = (np.stack([vector(row, exact) for row in side]) for side in (TOKENS, OTHERS))
    want = logits_of(np.concatenate([u, v, u * v, u - v], axis=-1), exact)
    np.testing.assert_allclose(read(params, TOKENS, OTHERS), want, atol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, PAIRS], ids=["one", "pairs"])
def test_there_are_as_many_parameters_as_by_hand(config):
    model = nnx.eval_shape(lambda: LongEncoder(config, rngs=nnx.Rngs(0)))
    layer = 4 * D * D + 2 * D * F + F + D + 2 * 2 * D
    one = D * F + F + F * 5 + 5
    pairs = 4 * D * F + F + F * (F // 2) + F // 2 + F // 2 * 5 + 5
    want = V * D + 2 * layer + 2 * D + (one if config is CONFIG else pairs)
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == want


@pytest.mark.parametrize("name", slow_but(ON_CPU, *KINDS))
def test_with_every_attention_padding_changes_nothing(name, drawn):
    """Other vectors where there is no token change no bit; another token changes the logits of its own row alone."""
    read, params = drawn(with_attention(CONFIG, name))
    found = np.asarray(read(params, TOKENS))
    assert np.isfinite(found).all()
    table = np.array(params["embedding"]["table"])
    table[0] = 50 + 9 * table[0]
    strange = params | {"embedding": {"table": jax.device_put(table)}}
    np.testing.assert_array_equal(read(strange, TOKENS), found)
    changed = TOKENS.copy()
    changed[1, 5] = 1 + changed[1, 5] % (V - 1)
    other = np.asarray(read(params, changed))
    np.testing.assert_array_equal(other[[0, 2]], found[[0, 2]])
    assert np.abs(other[1] - found[1]).max() > 1e-4


@pytest.mark.parametrize("name", slow_but(ON_CPU, *KINDS))
def test_more_padding_changes_nothing(name, drawn):
    read, params = drawn(with_attention(CONFIG, name))
    wide = np.pad(TOKENS, ((0, 0), (0, 9)))
    np.testing.assert_allclose(read(params, wide), read(params, TOKENS), atol=2e-5)


def test_padding_moves_no_centroid(draw_model):
    config = dataclasses.replace(with_attention(CONFIG, "routing"), dropout_rate=0.0)
    graphdef, drawn = nnx.split(draw_model(lambda: LongEncoder(config, rngs=nnx.Rngs(0))))
    params = nnx.to_pure_dict(drawn)

    @jax.jit
    def centroids(params):
        model = nnx.merge(graphdef, params)
        (before,) = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
        model(TOKENS, rngs=nnx.Rngs(dropout=0))
        (after,) = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
        return before, after

    before, after = centroids(params)
    assert np.abs(after - before).max() > 1e-4
    table = np.array(params["embedding"]["table"])
    table[0] += 9
    _, strange = centroids(params | {"embedding": {"table": jax.device_put(table)}})
    np.testing.assert_array_equal(strange, after)


def test_maps_are_those_of_each_layer(drawn):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: LongEncoder(PAIRS, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, np.int32)
    model = lambda params, *tokens: nnx.merge(graphdef, params)(*tokens, return_attention=True)  # noqa: E731
    logits, maps = jax.eval_shape(model, params, tokens, tokens)
    assert logits.shape == (3, 5)
    assert {name: weights.shape for name, weights in maps.items()} == {
        f"encoder/{index}/self": (6, N, 16, 16) for index in range(2)
    }


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="needs labels"):
        LongEncoder(dataclasses.replace(CONFIG, labels=()), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="bigbird attention has no causal form"):
        LongEncoder(dataclasses.replace(with_attention(CONFIG, "bigbird"), is_causal=True), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="delta_rule attention is causal only"):
        LongEncoder(dataclasses.replace(with_attention(CONFIG, "delta_rule"), is_causal=False), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"d_model=9 must be even and divisible"):
        LongEncoder(dataclasses.replace(CONFIG, d_model=9), rngs=nnx.Rngs(0))
    model = nnx.eval_shape(lambda: LongEncoder(PAIRS, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"the model has num_sequences=2, got 1 sequences per example"):
        model(TOKENS)
