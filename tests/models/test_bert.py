"""BERT against its equations in float64 NumPy, the sizes that were published, and what must not change its output."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from tfx_jax import functional, models
from tfx_jax.models import Bert, BertClassifier, BertConfig, BertMaskedLM, BertPretraining, BertTagger

CONFIG = BertConfig(
    vocab_size=23,
    num_segments=3,
    max_length=9,
    num_layers=3,
    d_model=12,
    num_heads=2,
    d_ff=20,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    labels=("a", "b", "c", "d"),
)
HEADS = ["BertMaskedLM", "BertPretraining", "BertNextSentence", "BertClassifier", "BertTagger", "BertQuestionAnswering"]
TOKENS = jnp.array([[2, 9, 22, 5, 3, 7, 3], [2, 6, 3, 8, 8, 1, 3]])
SEGMENTS = jnp.array([[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]])

_run = jax.jit(lambda model, *args, **options: model(*args, **options), static_argnames="return_attention")


@pytest.fixture(scope="module")
def make(draw_model):
    """`make(name, **overrides)`: a model of that class."""

    @functools.cache
    def make(name, attention_fn=functional.dot_product_attention, **overrides):
        config = dataclasses.replace(CONFIG, **overrides)
        return draw_model(lambda: getattr(models, name)(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))

    return make


def _oracle(model, tokens, segments):
    """All that a model computes of one text without padding: sequence, pooled, attention maps and logits by head."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))
    body = params["bert"]

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * p["scale"] + p["bias"]

    def gelu(x):
        return x * (1 + erf(x / math.sqrt(2))) / 2

    def linear(x, p):
        return x @ p["kernel"] + p["bias"]

    x = np.stack(
        [
            body["embedding"]["table"][token]
            + body["segments"]["table"][segment]
            + body["positions"]["table"][position]
            for position, (token, segment) in enumerate(zip(tokens, segments, strict=True))
        ]
    )
    x, maps = norm(x, body["norm"]), []
    for index in range(3):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], body["encoder_layers"])
        attention, feed_forward = p["self_attention"], p["feed_forward"]
        y = attention["out"]["bias"]
        for head in range(2):
            query, key, value = (
                x @ attention[name]["kernel"][:, head] + attention[name]["bias"][head]
                for name in ("query", "key", "value")
            )
            weights = np.exp(query @ key.T / math.sqrt(6))
            maps.append(weights / weights.sum(-1, keepdims=True))
            y = y + maps[-1] @ value @ attention["out"]["kernel"][head]
        x = norm(x + y, p["self_attention_residual"]["norm"])
        y = gelu(x @ feed_forward["up"] + feed_forward["up_bias"]) @ feed_forward["down"] + feed_forward["down_bias"]
        x = norm(x + y, p["feed_forward_residual"]["norm"])
    results = {"sequence": x, "maps": np.stack(maps)}
    pooled = results["pooled"] = np.tanh(linear(x[0], body["pooler"])) if "pooler" in body else None
    if (p := params.get("masked_lm")) is not None:
        hidden = norm(gelu(linear(x, p["dense"])), p["norm"])
        results["masked_lm"] = hidden @ body["embedding"]["table"].T + p["bias"]
    if "next_sentence" in params:
        results["next_sentence"] = linear(pooled, params["next_sentence"])
    if "classifier" in params:
        results["classifier"] = linear(x if pooled is None else pooled, params["classifier"])
    if "span" in params:
        results["start"], results["end"] = linear(x, params["span"]).T
    return results


@pytest.mark.parametrize("name", HEADS)
def test_equals_the_equations_in_float64(make, name):
    model = make(name)
    (logits, maps), output = _run(_with_body(model), TOKENS, SEGMENTS)
    assert list(maps) == [f"encoder/{layer}/self" for layer in range(3)]
    for row in range(2):
        want = _oracle(model, np.asarray(TOKENS[row]), np.asarray(SEGMENTS[row]))
        np.testing.assert_allclose(output.sequence[row], want["sequence"], atol=2e-5)
        np.testing.assert_allclose(np.concatenate([w[row] for w in maps.values()]), want["maps"], atol=1e-5)
        if output.pooled is None:
            assert want["pooled"] is None
        else:
            np.testing.assert_allclose(output.pooled[row], want["pooled"], atol=2e-5)
        got = logits._asdict() if hasattr(logits, "_asdict") else {next(reversed(want)): logits}
        assert len(want) == 3 + len(got)
        for key, value in got.items():
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(value[row], want[key], atol=5e-5)


def _with_body(model):
    return jax.tree_util.Partial(lambda model, *args: (model(*args, return_attention=True), model.bert(*args)), model)


def test_every_parameter_has_a_gradient(make):
    model = make("BertPretraining")
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(1)
    weights = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), model(TOKENS, SEGMENTS))

    @jax.jit
    @jax.grad
    def grad(params):
        logits = nnx.merge(graphdef, params)(TOKENS, SEGMENTS)
        return sum(jax.tree.leaves(jax.tree.map(lambda x, w: (x * w).sum(), logits, weights)))

    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grad(params))):
        size = np.abs(leaf).max()
        name = jax.tree_util.keystr(path)
        # What is added to all the keys of a query alike changes no weight.
        assert size < 1e-4 if name.endswith("['key']['bias']") else size > 1e-3, (name, size)


@pytest.mark.parametrize("pads", [(0, 2), (2, 0), (1, 1)], ids=["right", "left", "both sides"])
def test_padding_changes_nothing(make, pads):
    model = make("BertTagger")
    rng = np.random.default_rng(2)
    before, after = (jnp.asarray(rng.integers(0, 23, (2, pad))) for pad in pads)
    padded = jnp.concatenate([before, TOKENS, after], axis=1)
    inside = slice(pads[0], pads[0] + TOKENS.shape[1])
    is_token = jnp.zeros(padded.shape, bool).at[:, inside].set(True)
    segments = jnp.full(padded.shape, 2).at[:, inside].set(SEGMENTS)
    logits, maps = _run(model, padded, segments, is_token=is_token, return_attention=True)
    np.testing.assert_allclose(logits[:, inside], _run(model, TOKENS, SEGMENTS), atol=2e-5)
    for weights in maps.values():
        hidden = np.delete(weights, np.arange(inside.start, inside.stop), axis=-1)
        assert hidden.size
        np.testing.assert_array_equal(hidden, 0)


def test_positions_are_looked_up(make):
    model = make("BertMaskedLM")
    positions = jnp.array([[8, 0, 3, 3, 1, 2, 7], [6, 5, 4, 3, 2, 1, 0]])
    moved = _run(model, TOKENS, SEGMENTS, positions=positions)
    shuffled = jnp.array([6, 2, 0, 5, 4, 1, 3])
    again = _run(model, TOKENS[:, shuffled], SEGMENTS[:, shuffled], positions=positions[:, shuffled])
    np.testing.assert_allclose(again, moved[:, shuffled], atol=5e-5)  # a set of tokens, but for these
    counted = _run(model, TOKENS, SEGMENTS, positions=jnp.arange(7)[None].repeat(2, axis=0))
    np.testing.assert_array_equal(counted, _run(model, TOKENS, SEGMENTS))
    assert np.abs(counted - moved).max() > 0.1


def test_without_segments_there_is_one_text(make):
    model = make("BertClassifier")
    one = _run(model, TOKENS)
    np.testing.assert_array_equal(one, _run(model, TOKENS, jnp.zeros_like(TOKENS)))
    assert np.abs(one - _run(model, TOKENS, SEGMENTS)).max() > 0.01


def test_another_attention(make):
    other = functools.partial(functional.sliding_window_attention, window=9)
    got = _run(make("BertTagger", attention_fn=other), TOKENS, SEGMENTS)
    np.testing.assert_allclose(got, _run(make("BertTagger"), TOKENS, SEGMENTS), atol=1e-5)
    narrow = functools.partial(functional.sliding_window_attention, window=1)
    assert np.abs(_run(make("BertTagger", attention_fn=narrow), TOKENS, SEGMENTS) - got).max() > 0.01


@pytest.mark.parametrize(
    ("name", "rates", "is_random"),
    [
        ("BertTagger", {}, False),
        ("BertTagger", {"dropout_rate": 0.3}, True),
        ("BertTagger", {"attention_dropout_rate": 0.3}, True),
        ("BertTagger", {"head_dropout_rate": 0.3}, True),
        ("BertMaskedLM", {"head_dropout_rate": 0.3}, False),
        ("BertClassifier", {"head_dropout_rate": 0.3}, True),
    ],
)
def test_dropout_needs_a_stream_and_a_rate(make, name, rates, is_random):
    model = make(name, **rates)
    keys = jax.random.key_data(jax.vmap(jax.random.key)(jnp.array([0, 0, 1])))

    @jax.jit
    def run(model):
        draw = jax.vmap(lambda key: model(TOKENS, SEGMENTS, rngs=nnx.Rngs(dropout=jax.random.wrap_key_data(key))))
        return model(TOKENS, SEGMENTS), draw(keys)

    evaluated, (first, again, other) = run(model)
    np.testing.assert_array_equal(first, again)
    assert (np.abs(first - other).max() > 0.01) == (np.abs(first - evaluated).max() > 0.01) == is_random


def test_head_dropout_is_the_others_unless_it_is_given(make):
    """The mean of many draws of the last dropout alone is what evaluation gives, within three standard errors."""
    model = make("BertClassifier", head_dropout_rate=0.4)
    draws = jax.jit(jax.vmap(lambda key: model(TOKENS, SEGMENTS, rngs=nnx.Rngs(dropout=key))))(
        jax.random.split(jax.random.key(0), 4000)
    )
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - model(TOKENS, SEGMENTS)) < 3 * error).all()
    pooled, kernel = model.bert(TOKENS, SEGMENTS).pooled, model.classifier.kernel[...]
    variance = (0.4 / 0.6) * jnp.square(pooled) @ jnp.square(kernel)
    np.testing.assert_allclose(draws.var(axis=0), variance, rtol=0.1)
    inherited = make("BertClassifier", dropout_rate=0.4, head_dropout_rate=0.0)
    silent = make("BertClassifier", dropout_rate=0.4)
    rngs = [nnx.Rngs(dropout=5), nnx.Rngs(dropout=5)]
    assert np.abs(inherited(TOKENS, rngs=rngs[0]) - silent(TOKENS, rngs=rngs[1])).max() > 0.01


def test_rematerialisation_changes_no_gradient(make):
    def grad(model):
        graphdef, params = nnx.split(model)
        return jax.jit(jax.grad(lambda params: jnp.square(nnx.merge(graphdef, params)(TOKENS)).sum()))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
        nnx.to_pure_dict(grad(make("BertClassifier", remat="dots"))),
        nnx.to_pure_dict(grad(make("BertClassifier"))),
    )


def test_bfloat16_is_near_and_its_logits_float32(make):
    for name in ("BertPretraining", "BertTagger"):
        want, got = (jax.tree.leaves(_run(make(name, dtype=d), TOKENS, SEGMENTS)) for d in ("float32", "bfloat16"))
        for a, b in zip(want, got, strict=True):
            assert b.dtype == jnp.float32
            assert 0 < np.abs(a - b).max() < 0.1 * np.abs(a).max()


def _drawn(name, seed=1, **overrides):
    return getattr(models, name)(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(seed))


def _params(module):
    return nnx.to_pure_dict(nnx.state(module))


def test_a_body_changes_heads(make):
    masked_lm, tagger = make("BertMaskedLM"), _drawn("BertTagger", labels=("x",))
    kernel, bias = tagger.classifier.kernel[...], tagger.classifier.bias[...]
    for other in (masked_lm, masked_lm.bert):
        tagger.take_body(other)
        want = masked_lm.bert(TOKENS, SEGMENTS).sequence @ kernel + bias[None, None]
        np.testing.assert_allclose(tagger(TOKENS, SEGMENTS), want, atol=1e-6)


@pytest.mark.parametrize("source", ["BertMaskedLM", "BertPretraining"])
@pytest.mark.parametrize("target", ["BertTagger", "BertClassifier"])
def test_a_head_takes_the_body_of_any_other(make, source, target):
    """The pooler that one of the two lacks stays as it was drawn, or is left out; the other model keeps all it had."""
    source, target = make(source), _drawn(target, dropout_rate=0.25)
    before, head = _params(source), {name: part for name, part in _params(target).items() if name != "bert"}
    want = {**_params(target.bert), **_params(source.bert)}
    if target.bert.pooler is None:
        want.pop("pooler", None)
    target.take_body(source)
    target.bert.embedding.table[...] = target.bert.embedding.table[...] + 1.0  # not the other's
    want["embedding"]["table"] = want["embedding"]["table"] + 1.0
    jax.tree.map(np.testing.assert_array_equal, _params(target), {"bert": want, **head})
    jax.tree.map(np.testing.assert_array_equal, _params(source), before)
    assert target.bert.config.dropout_rate == 0.25
    jax.eval_shape(target, TOKENS, SEGMENTS)


@pytest.mark.parametrize("sizes", [{"num_layers": 2}, {"max_length": 8}])
def test_a_body_of_other_sizes_is_refused(make, sizes):
    tagger = _drawn("BertTagger", **sizes)
    before = _params(tagger)
    with pytest.raises(ValueError, match="body of other sizes"):
        tagger.take_body(make("BertMaskedLM"))
    jax.tree.map(np.testing.assert_array_equal, _params(tagger), before)


def test_starts_as_the_authors_program():
    """Normal with deviation 0.02, matrices cut off at two deviations, offsets 0, gains 1."""
    config = dataclasses.replace(CONFIG, d_model=96, d_ff=None, vocab_size=500)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(BertPretraining(config, rngs=nnx.Rngs(0)))))()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "bias" in name or "scale" in name:
            np.testing.assert_array_equal(leaf, 1.0 if "scale" in name else 0.0)
            continue
        deviation = 0.02 if "table" in name else 0.02 * 0.8796  # of a normal distribution cut off at two
        assert abs(np.std(leaf) / deviation - 1) < 3 / math.sqrt(2 * leaf.size) + 1e-3, name
        assert abs(np.mean(leaf)) < 3 * deviation / math.sqrt(leaf.size), name
        if "table" not in name:
            assert np.abs(leaf).max() <= 0.04 + 1e-6, name
    stack = params["bert"]["encoder_layers"]["feed_forward"]["up"]
    assert np.abs(stack[0] - stack[1]).max() > 0.01


def test_starts_by_matching_tokens():
    """The first layer sees, of two texts without a token in common but one, the other place of that one."""
    config = dataclasses.replace(
        CONFIG, d_model=96, d_ff=None, num_layers=2, num_heads=3, vocab_size=500, max_length=32
    )
    config.init = "matching"
    model = BertPretraining(config, rngs=nnx.Rngs(0))
    layers = model.bert.encoder_layers
    np.testing.assert_array_equal(layers.self_attention.key.kernel, layers.self_attention.query.kernel)
    for leaf, deviation in (
        (layers.self_attention.query.kernel, 96**-0.5 * 0.8796),
        (layers.feed_forward.up, 96**-0.5 * 0.8796),
        (model.bert.embedding.table, 96**-0.5),
        (model.bert.positions.table, 96**-0.5 / 5),
        (model.next_sentence.kernel, 96**-0.5 * 0.8796),
    ):
        assert abs(np.std(leaf) / deviation - 1) < 3 / math.sqrt(2 * leaf.size) + 1e-3
    tokens = jnp.arange(3, 27)[None].at[0, 20].set(6)  # at place 3, too
    segments = (jnp.arange(24) >= 12).astype(int)[None]
    _, maps = model.bert(tokens, segments, return_attention=True)
    weights = np.asarray(maps["encoder/0/self"])[0].mean(axis=0)
    np.testing.assert_array_equal(np.sort(np.argsort(weights[3])[-2:]), [3, 20])
    np.testing.assert_array_equal(weights.argmax(axis=1)[:3], [0, 1, 2])
    assert weights[3, 20] > 5 * np.delete(weights[3], [3, 20]).max()
    with pytest.raises(ValueError, match="init='other' is none of paper, matching"):
        BertPretraining(dataclasses.replace(config, init="other"), rngs=nnx.Rngs(0))


# Of the body; of the body with both heads, which is what Devlin et al. (2019, section 3: 110M and 340M) and Turc et
# al. (2019, table 1: 4.4M, 11.3M, 29.1M, 41.7M) count; and of that for masked words alone.
@pytest.mark.parametrize(
    ("name", "body", "pretraining", "masked_lm"),
    [
        ("bert-tiny", 4_385_920, 4_433_468, 4_416_698),
        ("bert-mini", 11_170_560, 11_267_900, 11_201_594),
        ("bert-small", 28_763_648, 29_058_876, 28_795_194),
        ("bert-medium", 41_373_184, 41_668_412, 41_404_730),
        ("bert-base-uncased", 109_482_240, 110_106_428, 109_514_298),
        ("bert-base-cased", 108_310_272, 108_932_934, 108_340_804),
        ("bert-base-multilingual-uncased", 167_356_416, 168_055_961, 167_463_831),
        ("bert-base-multilingual-cased", 177_853_440, 178_566_653, 177_974_523),
        ("bert-large-uncased", 335_141_888, 336_226_108, 335_174_458),
        ("bert-large-cased", 333_579_264, 334_661_958, 333_610_308),
    ],
)
def test_published_sizes(name, body, pretraining, masked_lm):
    config = BertConfig.published(name)
    for model, want in ((Bert, body), (BertPretraining, pretraining), (BertMaskedLM, masked_lm)):
        abstract = nnx.eval_shape(lambda model=model: model(config, rngs=nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == want


def test_default_is_the_uncased_base():
    assert BertConfig() == BertConfig.published("bert-base-uncased")
    assert BertConfig.published("bert-tiny", labels=("x",), d_model=64).d_model == 64


def test_labels_are_the_width_of_a_classifier():
    for model, shape in ((BertClassifier, (2, 4)), (BertTagger, (2, 7, 4))):
        abstract = nnx.eval_shape(lambda model=model: model(CONFIG, rngs=nnx.Rngs(0))(TOKENS))
        assert abstract.shape == shape


def test_refusals(make):
    def build(model, **overrides):
        return nnx.eval_shape(lambda: model(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match="no published BERT is called 'bert-huge'; there are bert-tiny"):
        BertConfig.published("bert-huge")
    with pytest.raises(ValueError, match="activation='tanh' is none of relu, gelu"):
        build(Bert, activation="tanh")
    with pytest.raises(ValueError, match="d_model=12 is not divisible by num_heads=5"):
        build(Bert, num_heads=5)
    with pytest.raises(ValueError, match="needs labels"):
        build(BertTagger, labels=())
    with pytest.raises(ValueError, match="10 tokens, but the model has max_length=9"):
        make("BertTagger")(jnp.ones((1, 10), int))
