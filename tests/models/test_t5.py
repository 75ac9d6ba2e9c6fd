"""T5 against what the paper says of it, and what must not change its output."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, count_rematerialized, draw, initial, jitted, params_of, started
from tests.tiers import slow_but
from tfx_jax.functional import beam_search, dot_product_attention, greedy_search, relative_position_bucket
from tfx_jax.models import T5, T5Config

V, D, N, H = 23, 12, 2, 5
SOURCE = np.array([[4, 9, 22, 5, 7, 3, 11, 1], [8, 6, 6, 1, 0, 0, 0, 0]])
TARGET = np.array([[5, 21, 13, 6, 7, 9, 1], [7, 7, 1, 0, 0, 0, 0]])
B, S = SOURCE.shape
T = TARGET.shape[1]
W = 3
VERSIONS = {"1.0": {}, "1.1": {"activation": "gelu_tanh", "is_gated": True, "is_tied": False}}

_forward = jitted(lambda model, source, target: model(source, target))
_drop = jitted(lambda model, seed: model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=jax.random.key(seed))))


@functools.cache
def make_model(**overrides):
    """Every size is another; buckets are few, so that far distances share one."""
    sizes = {"vocab_size": V, "num_layers": 2, "num_decoder_layers": 3, "d_model": D, "num_heads": N, "d_k": H}
    sizes |= {"d_ff": 20, "num_buckets": 6, "max_distance": 6, "dropout_rate": 0.0}
    config = T5Config(**sizes | overrides)
    stddev = lambda name: 1.0 if name == "embedding/table" else 0.3  # noqa: E731
    return draw(lambda: T5(config, rngs=nnx.Rngs(0)), stddev=stddev)


_buckets = jitted(
    lambda distances, num_buckets, max_distance, is_bidirectional: relative_position_bucket(
        distances, num_buckets, max_distance=max_distance, is_bidirectional=is_bidirectional
    ),
    static=["num_buckets", "max_distance", "is_bidirectional"],
)


def oracle(model, source, target):
    """Logits of one pair without padding, in float64: sections 2.1 and 3.1.1 of the paper, and Shazeer (2020)."""
    p = params_of(model, np.float64)
    c = model.config

    def norm(x, p):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]

    def bias(side, size):
        distances = np.arange(size)[None] - np.arange(size)[:, None]  # of the key from the query
        buckets = _buckets(distances, c.num_buckets, c.max_distance, side == "encoder")
        return p[f"{side}_bias"]["table"][buckets].transpose(2, 0, 1)

    def attend(p, x, memory, bias, causal=False):
        query, key, value = (
            np.einsum("TD,DNH->NTH", y, p[name]["kernel"])
            for name, y in (("query", x), ("key", memory), ("value", memory))
        )
        scores = np.exp(query @ key.swapaxes(1, 2) + bias)
        scores = np.tril(scores) if causal else scores
        return np.einsum("NTH,NHD->TD", scores / scores.sum(-1, keepdims=True) @ value, p["out"]["kernel"])

    def transform(p, x):
        hidden = x @ p["up"]
        if not c.is_gated:
            return np.maximum(hidden, 0) @ p["down"]
        gelu = hidden * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        return gelu * (x @ p["gate"]) @ p["down"]

    def run(side, tokens, memory):
        x, distances = p["embedding"]["table"][tokens], bias(side, len(tokens))
        for index in range(len(p[f"{side}_layers"]["feed_forward"]["up"])):
            layer = jax.tree.map(lambda leaf, index=index: leaf[index], p[f"{side}_layers"])
            y = norm(x, layer["self_attention_residual"]["norm"])
            x = x + attend(layer["self_attention"], y, y, distances, side == "decoder")
            if memory is not None:
                y = norm(x, layer["cross_attention_residual"]["norm"])
                x = x + attend(layer["cross_attention"], y, memory, 0.0)
            x = x + transform(layer["feed_forward"], norm(x, layer["feed_forward_residual"]["norm"]))
        return norm(x, p[f"{side}_norm"])

    x = run("decoder", np.concatenate([[c.start_id], target[:-1]]), run("encoder", source, None))
    return x / math.sqrt(D) @ p["embedding"]["table"].T if c.is_tied else x @ p["output_embedding"]["table"].T


@pytest.mark.parametrize("version", VERSIONS)
def test_equals_the_paper_text_by_text(version):
    model = make_model(**VERSIONS[version])
    logits = _forward(model, SOURCE, TARGET)
    chex.assert_shape(logits, (B, T, V))
    for row, source, target in zip(logits, SOURCE, TARGET, strict=True):
        source, target = source[source != 0], target[target != 0]
        np.testing.assert_allclose(row[: len(target)], oracle(model, source, target), atol=2e-5)


@pytest.mark.parametrize("changed", range(T))
def test_future_target_token_changes_nothing(changed):
    target = TARGET.copy()
    target[:, changed] = 12
    before, after = (_forward(make_model(), SOURCE, tokens) for tokens in (TARGET, target))
    np.testing.assert_array_equal(after[:, : changed + 1], before[:, : changed + 1])
    assert (after[:, changed + 1 :] != before[:, changed + 1 :]).any(axis=-1).all(), "what follows must read it"


@pytest.mark.parametrize("sides", [(0, 3), (3, 0), (2, 1)])
def test_padding_of_the_source_on_either_side_changes_nothing(sides):
    """Only distances count, so a text may stand anywhere."""
    before = _forward(make_model(), SOURCE, TARGET)
    after = _forward(make_model(), np.pad(SOURCE, ((0, 0), sides)), np.pad(TARGET, ((0, 0), (0, 2))))
    np.testing.assert_allclose(after[:, :T], before, atol=2e-5)


def test_other_special_tokens():
    """Ids exchanged everywhere, in the table too, change nothing."""
    swap = np.arange(V)
    swap[[0, 20]] = 20, 0
    model, other = make_model(), nnx.clone(make_model(pad_id=20, start_id=20))
    other.embedding.table[...] = jax.device_put(np.asarray(model.embedding.table)[swap])
    want = _forward(model, SOURCE, TARGET)
    np.testing.assert_allclose(_forward(other, swap[SOURCE], swap[TARGET])[..., swap], want, atol=1e-5)


def test_drops_only_with_rngs_and_everywhere():
    plain = _forward(make_model(), SOURCE, TARGET)
    model = make_model(dropout_rate=0.3)
    first, again, other = (_drop(model, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(again, first)
    assert (other != first).any()
    assert np.abs(first - plain).max() > 1e-2
    assert count_draws(model, SOURCE, TARGET) == 0, "no stream"
    drop = lambda model: model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=0))  # noqa: E731
    assert count_draws(drop, make_model()) == 0, "no rate"
    # Inputs and last outputs of both sides; of a layer its sublayers, their attentions and the hidden units.
    assert count_draws(drop, model) == 4 + 2 * (2 + 1 + 1) + 3 * (3 + 2 + 1)


def _gradient(model):
    return jax.grad(lambda model: jnp.square(model(SOURCE, TARGET)).mean())(model)


def test_gradients_reach_every_parameter():
    gradients = params_of(jitted(_gradient)(make_model(**VERSIONS["1.1"])))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 1e-4, path


def test_attention_maps_are_those_of_what_was_computed():
    model = make_model()
    logits, maps = jitted(lambda model: model(SOURCE, TARGET, return_attention=True))(model)
    np.testing.assert_allclose(logits, _forward(model, SOURCE, TARGET), atol=1e-5)
    shapes = {f"encoder/{index}/self": (B, N, S, S) for index in range(2)}
    for index in range(3):
        shapes |= {f"decoder/{index}/self": (B, N, T, T), f"decoder/{index}/cross": (B, N, T, S)}
    assert {name: weights.shape for name, weights in maps.items()} == shapes
    for name, weights in maps.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        if name.startswith("encoder") or name.endswith("cross"):
            assert not weights[1, :, :, 4:].any()
        else:
            assert not np.triu(weights, 1).any()


def test_layers_are_rematerialized_where_it_is_wanted():
    assert count_rematerialized(make_model(remat="full"), SOURCE, TARGET) == 2 + 3
    assert count_rematerialized(make_model(), SOURCE, TARGET) == 0


@pytest.mark.slow
def test_remat_changes_no_gradient():
    want, got = (params_of(jitted(_gradient)(make_model(remat=kind))) for kind in ("none", "full"))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def test_bfloat16_gives_float32_logits_near_those_of_float32():
    half = make_model(dtype="bfloat16", **VERSIONS["1.1"])
    assert jax.eval_shape(half.encode, SOURCE)[0].output.dtype == jnp.bfloat16
    logits, want = (_forward(model, SOURCE, TARGET) for model in (half, make_model(**VERSIONS["1.1"])))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, want, atol=0.05 * np.abs(want).max())


TARGETS = np.random.default_rng(0).integers(2, V, (B * W, T))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_step_of_every_beam_equals_teacher_forcing(version):
    @jitted
    def by_steps(model):
        step_fn, cache, _ = started(model.decoder(), SOURCE, max_length=T + 2, num_beams=W)
        cache = cache | {"beam_ancestry": jnp.repeat(cache["beam_ancestry"], W, axis=0)}
        inputs = np.concatenate([np.zeros_like(TARGETS[:, :1]), TARGETS[:, :-1]], axis=1)
        _, logits = jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, inputs.T)
        return logits.swapaxes(0, 1)

    want = _forward(make_model(**VERSIONS[version]), np.repeat(SOURCE, W, axis=0), TARGETS)
    np.testing.assert_allclose(by_steps(make_model(**VERSIONS[version])), want, atol=2e-5)


def test_searches_score_what_they_find_as_teacher_forcing_does():
    model = make_model(**VERSIONS["1.1"])

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), SOURCE, max_length=T)
        greedy = greedy_search(step_fn, cache, start, max_length=T, eos_id=1)
        step_fn, cache, start = started(model.decoder(), SOURCE, max_length=T, num_beams=W)
        return greedy, beam_search(step_fn, cache, start, beam_size=W, max_length=T, eos_id=1, length_penalty=0.0)

    (tokens, scores), found = search(model)
    every = np.concatenate([tokens[:, None], found.tokens], axis=1)  # the greedy one of each source, and its beams
    logits = _forward(model, np.repeat(SOURCE, W + 1, axis=0), every.reshape(-1, T)).astype(np.float64)
    logits[..., 0] = -np.inf
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_probs = np.take_along_axis(log_probs.reshape(B, W + 1, T, V), every[..., None], -1)[..., 0]
    want = np.where(every != 0, log_probs, 0).sum(axis=-1)
    np.testing.assert_allclose(scores, want[:, 0], atol=1e-4)
    np.testing.assert_allclose(found.scores, want[:, 1:], atol=1e-4)
    assert (found.scores[:, 0] >= scores - 1e-4).all()


def test_int8_decoding_is_near():
    @functools.partial(jitted, static=["int8"])
    def logits(model, int8):
        step_fn, cache, start = started(model.decoder(int8=int8), SOURCE, max_length=T)
        return step_fn(start, cache)[0]

    want, got = (logits(make_model(), int8) for int8 in (False, True))
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_any_attention_plugs_in_unscaled():
    def spy(query, key, value, *args, scale, **options):
        return dot_product_attention(query, key, value, *args, scale=scale * 0.0, **options)

    model = make_model()
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: T5(model.config, attention_fn=spy, rngs=nnx.Rngs(0))))
    flat = _forward(nnx.merge(graphdef, nnx.state(model)), SOURCE, TARGET)
    assert np.abs(flat - _forward(model, SOURCE, TARGET)).max() > 1e-2


# Parameters of the released models.
COUNTS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", slow_but(COUNTS, "t5-small", "t5-v1_1-small"))
def test_parameters_of_published_models(name):
    model = nnx.eval_shape(lambda: T5(T5Config.published(name), rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model))) == COUNTS[name]


def test_drawn_as_in_the_paper():
    config = T5Config(
        vocab_size=300, num_layers=2, d_model=48, num_heads=4, d_k=16, d_ff=100, is_tied=False, is_gated=True
    )
    params = params_of(initial(lambda: T5(config, rngs=nnx.Rngs(0))))
    stddevs = {"query": (48 * 16) ** -0.5, "key": 48**-0.5, "value": 48**-0.5, "out": 64**-0.5}
    layer = params["decoder_layers"]
    drawn = {name: (layer["cross_attention"][name]["kernel"], stddev) for name, stddev in stddevs.items()}
    drawn |= {
        name: (layer["feed_forward"][name], size**-0.5) for name, size in (("up", 48), ("gate", 48), ("down", 100))
    }
    drawn |= {
        "embedding": (params["embedding"]["table"], 1.0),
        "output": (params["output_embedding"]["table"], 48**-0.5),
    }
    drawn |= {"bias": (params["encoder_bias"]["table"], 48**-0.5)}
    for name, (values, stddev) in drawn.items():
        error = 3 * stddev / math.sqrt(2 * values.size)
        assert abs(values.std() - stddev) < error, name
        assert abs(values.mean()) < 3 * stddev / math.sqrt(values.size), name


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="no published T5 is called 't5-huge'; there are t5-small"):
        T5Config.published("t5-huge")
    for wrong, message in (
        ({"activation": "tanh"}, r"activation must be \"relu\" or .*, got 'tanh'"),
        ({"start_id": 32_128}, "start_id"),
    ):
        config = dataclasses.replace(T5Config(), **wrong)
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(lambda config=config: T5(config, rngs=nnx.Rngs(0)))
