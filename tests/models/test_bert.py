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

from tests.nn.programs import count_draws, count_rematerialized, draw, jitted, params_of
from tfx_jax import functional, models
from tfx_jax.models import Bert, BertClassifier, BertConfig, BertMaskedLM, BertPretraining, BertTagger
from tfx_jax.nn import AttentionConfig, LoraConfig, adapt

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
TOKENS = np.array([[2, 9, 22, 5, 3, 7, 3], [2, 6, 3, 8, 8, 1, 3]])
SEGMENTS = np.array([[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]])

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])
_drop = jitted(lambda model, seed: model(TOKENS, SEGMENTS, rngs=nnx.Rngs(dropout=jax.random.key(seed))))


@functools.cache
def make_bert(name, attention_fn=functional.dot_product_attention, **overrides):
    """A model of that class, the same parameters each time."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: getattr(models, name)(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))


def _oracle(model, tokens, segments):
    """All that a model computes of one text without padding: sequence, pooled, attention maps and logits by head."""
    params = params_of(model, np.float64)
    body = params.get("bert", params)

    def norm(x, p):
        centerd = x - x.mean(-1, keepdims=True)
        return centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + 1e-12) * p["scale"] + p["bias"]

    def gelu(x):
        return x * (1 + erf(x / math.sqrt(2))) / 2

    def linear(x, p):
        return x @ p["kernel"] + p["bias"]

    x = np.stack(
        [
            body["embedding"]["table"][token]
            + body["token_types"]["table"][segment]
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


def test_body_equals_the_equations_in_float64():
    model = make_bert("Bert")
    output, _ = _run(model, TOKENS, SEGMENTS, return_attention=True)
    for row in range(2):
        want = _oracle(model, TOKENS[row], SEGMENTS[row])
        np.testing.assert_allclose(output.sequence[row], want["sequence"], atol=2e-5)
        np.testing.assert_allclose(output.pooled[row], want["pooled"], atol=2e-5)


@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_the_equations_in_float64(name):
    model = make_bert(name)
    logits, maps = _run(model, TOKENS, SEGMENTS, return_attention=True)
    assert list(maps) == [f"encoder/{layer}/self" for layer in range(3)]
    body = jax.eval_shape(lambda: model.bert(TOKENS, SEGMENTS))
    for row in range(2):
        want = _oracle(model, TOKENS[row], SEGMENTS[row])
        np.testing.assert_allclose(np.concatenate([w[row] for w in maps.values()]), want["maps"], atol=1e-5)
        assert (body.pooled is None) == (want["pooled"] is None)
        got = logits._asdict() if hasattr(logits, "_asdict") else {next(reversed(want)): logits}
        assert len(want) == 3 + len(got)
        for key, value in got.items():
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(value[row], want[key], atol=5e-5)


def test_every_parameter_has_a_gradient():
    rng = np.random.default_rng(1)

    def total(model):
        logits = jax.tree.leaves(model(TOKENS, SEGMENTS))
        return sum((x * rng.normal(size=x.shape).astype(np.float32)).sum() for x in logits)

    gradients = params_of(jitted(jax.grad(total))(make_bert("BertPretraining")))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        size = np.abs(leaf).max()
        name = jax.tree_util.keystr(path)
        # What is added to all the keys of a query alike changes no weight.
        assert size < 1e-4 if name.endswith("['key']['bias']") else size > 1e-3, (name, size)


@pytest.mark.parametrize("pads", [(0, 2), (2, 0), (1, 1)], ids=["right", "left", "both sides"])
def test_padding_changes_nothing(pads):
    model = make_bert("BertTagger")
    columns = ((0, 0), pads)
    inside = slice(pads[0], pads[0] + TOKENS.shape[1])
    padded = np.random.default_rng(2).integers(0, 23, (2, 9))
    padded[:, inside] = TOKENS
    token_mask = np.pad(np.ones(TOKENS.shape, bool), columns)
    segments = np.pad(SEGMENTS, columns, constant_values=2)
    logits, maps = _run(model, padded, segments, token_mask=token_mask, return_attention=True)
    np.testing.assert_allclose(logits[:, inside], _run(model, TOKENS, SEGMENTS), atol=2e-5)
    for weights in maps.values():
        hidden = np.delete(weights, np.arange(inside.start, inside.stop), axis=-1)
        assert hidden.size
        np.testing.assert_array_equal(hidden, 0)


def test_positions_are_looked_up():
    model = make_bert("BertTagger")
    positions = np.array([[8, 0, 3, 3, 1, 2, 7], [6, 5, 4, 3, 2, 1, 0]])
    moved = _run(model, TOKENS, SEGMENTS, positions=positions)
    shuffled = np.array([6, 2, 0, 5, 4, 1, 3])
    again = _run(model, TOKENS[:, shuffled], SEGMENTS[:, shuffled], positions=positions[:, shuffled])
    np.testing.assert_allclose(again, moved[:, shuffled], atol=5e-5)  # a set of tokens, but for these
    counted = _run(model, TOKENS, SEGMENTS, positions=np.arange(7)[None].repeat(2, axis=0))
    np.testing.assert_array_equal(counted, _run(model, TOKENS, SEGMENTS))
    assert np.abs(counted - moved).max() > 0.1


def test_without_segments_there_is_one_text():
    model = make_bert("BertTagger")
    one = _run(model, TOKENS)
    np.testing.assert_array_equal(one, _run(model, TOKENS, np.zeros_like(TOKENS)))
    assert np.abs(one - _run(model, TOKENS, SEGMENTS)).max() > 0.01


def test_another_attention():
    other = functools.partial(functional.sliding_window_attention, window=9)
    got = _run(make_bert("BertTagger", attention_fn=other), TOKENS, SEGMENTS)
    np.testing.assert_allclose(got, _run(make_bert("BertTagger"), TOKENS, SEGMENTS), atol=1e-5)
    narrow = functools.partial(functional.sliding_window_attention, window=1)
    assert np.abs(_run(make_bert("BertTagger", attention_fn=narrow), TOKENS, SEGMENTS) - got).max() > 0.01


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate", "head_dropout_rate"])
def test_each_dropout_draws_from_the_stream(rate):
    model = make_bert("BertTagger", **{rate: 0.3})
    first, again, other = (_drop(model, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    plain = _run(make_bert("BertTagger"), TOKENS, SEGMENTS)
    assert min(np.abs(first - x).max() for x in (other, plain)) > 0.01


@pytest.mark.parametrize(
    ("name", "rates", "draws"),
    [
        ("BertTagger", {}, 0),
        ("BertTagger", {"dropout_rate": 0.3}, 1 + 3 * 2 + 1),  # the sum of embeddings, sublayers, and the head
        ("BertTagger", {"dropout_rate": 0.3, "head_dropout_rate": 0.0}, 1 + 3 * 2),
        ("BertTagger", {"attention_dropout_rate": 0.3}, 3),
        ("BertTagger", {"head_dropout_rate": 0.3}, 1),
        ("BertMaskedLM", {"head_dropout_rate": 0.3}, 0),
        ("BertClassifier", {"dropout_rate": 0.4}, 1 + 3 * 2 + 1),
        ("BertClassifier", {"head_dropout_rate": 0.3}, 1),
    ],
)
def test_dropout_needs_a_rate(name, rates, draws):
    """That of heads is the others' unless it is given."""
    model = make_bert(name, **rates)
    assert count_draws(lambda seed: model(TOKENS, rngs=nnx.Rngs(dropout=jax.random.key(seed))), 0) == draws


def test_dropout_needs_a_stream():
    rates = dict.fromkeys(("dropout_rate", "attention_dropout_rate", "head_dropout_rate"), 0.3)
    for name in HEADS:
        assert count_draws(make_bert(name, **rates), TOKENS, SEGMENTS) == 0


def test_dropout_of_the_head_keeps_its_mean_and_has_its_variance():
    """The mean of many draws of the last dropout alone is what evaluation gives, within three standard errors."""
    model = make_bert("BertClassifier", head_dropout_rate=0.4)

    @jitted
    def run(model):
        draw = jax.vmap(lambda key: model(TOKENS, SEGMENTS, rngs=nnx.Rngs(dropout=key)))
        keys = jax.random.split(jax.random.key(0), 4000)
        return draw(keys), model(TOKENS, SEGMENTS), model.bert(TOKENS, SEGMENTS).pooled

    draws, evaluated, pooled = run(model)
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - evaluated) < 3 * error).all()
    variance = (0.4 / 0.6) * np.square(pooled) @ np.square(np.asarray(model.classifier.kernel))
    np.testing.assert_allclose(draws.var(axis=0), variance, rtol=0.1)


def _gradient(model):
    return jax.grad(lambda model: jnp.square(model(TOKENS)).sum())(model)


def test_layers_are_rematerialized_where_it_is_wanted():
    assert count_rematerialized(make_bert("BertClassifier", remat="dots"), TOKENS) == 3
    assert count_rematerialized(make_bert("BertClassifier"), TOKENS) == 0


@pytest.mark.slow
def test_rematerialization_changes_no_gradient():
    dots, none = (params_of(jitted(_gradient)(make_bert("BertClassifier", remat=kind))) for kind in ("dots", "none"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), dots, none)


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_a_body_in_bfloat16_are_float32(name):
    for leaf in jax.tree.leaves(jax.eval_shape(make_bert(name, dtype="bfloat16"), TOKENS, SEGMENTS)):
        assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("name", ["BertTagger", pytest.param("BertPretraining", marks=pytest.mark.slow)])
def test_bfloat16_is_near_float32(name):
    want, got = (jax.tree.leaves(_run(make_bert(name, dtype=d), TOKENS, SEGMENTS)) for d in ("float32", "bfloat16"))
    for a, b in zip(want, got, strict=True):
        assert 0 < np.abs(a - b).max() < 0.1 * np.abs(a).max()


def _another(name, **overrides):
    """A model with other parameters than `make_bert`'s, and its own to change."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: getattr(models, name)(config, rngs=nnx.Rngs(0)), seed=1)


def test_a_body_changes_heads():
    masked_lm, tagger = make_bert("BertMaskedLM"), _another("BertTagger", labels=("x",))
    head = params_of(tagger.classifier)

    @jitted
    def run(tagger, body):
        return tagger(TOKENS, SEGMENTS), body(TOKENS, SEGMENTS).sequence

    for other in (masked_lm, masked_lm.bert):
        tagger.load_encoder(other)
        got, sequence = run(tagger, masked_lm.bert)
        np.testing.assert_allclose(got, sequence @ head["kernel"] + head["bias"], atol=1e-6)


@pytest.mark.parametrize("source", ["BertMaskedLM", "BertPretraining"])
@pytest.mark.parametrize("target", ["BertTagger", "BertClassifier"])
def test_a_head_takes_the_body_of_any_other(source, target):
    """The pooler that one of the two lacks stays as it was drawn, or is left out; the other model keeps all it had."""
    source, target = make_bert(source), _another(target, dropout_rate=0.25)
    before, head = params_of(source), {name: part for name, part in params_of(target).items() if name != "bert"}
    want = {**params_of(target.bert), **params_of(source.bert)}
    if target.bert.pooler is None:
        want.pop("pooler", None)
    target.load_encoder(source)
    want["embedding"]["table"] = want["embedding"]["table"] + 1.0
    target.bert.embedding.table[...] = jax.device_put(want["embedding"]["table"])  # not the other's
    jax.tree.map(np.testing.assert_array_equal, params_of(target), {"bert": want, **head})
    jax.tree.map(np.testing.assert_array_equal, params_of(source), before)
    assert target.bert.config.dropout_rate == 0.25
    jax.eval_shape(target, TOKENS, SEGMENTS)


@pytest.mark.parametrize("sizes", [{"num_layers": 2}, {"max_length": 8}])
def test_a_body_of_other_sizes_is_refused(sizes):
    tagger = _another("BertTagger", **sizes)
    before = params_of(tagger)
    with pytest.raises(ValueError, match="encoders must have parameters of the same shapes"):
        tagger.load_encoder(make_bert("BertMaskedLM"))
    jax.tree.map(np.testing.assert_array_equal, params_of(tagger), before)


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
    model = nnx.eval_shape(lambda: BertPretraining(BertConfig.published(name), rngs=nnx.Rngs(0)))
    assert (_size(model.bert), _size(model)) == (body, pretraining)
    assert _size(model) - _size(model.bert.pooler) - _size(model.next_sentence) == masked_lm


def _size(module):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module)))


@pytest.mark.parametrize(
    ("cls", "lacks"), [(BertMaskedLM, {"next_sentence", "pooler"}), (Bert, {"next_sentence", "masked_lm"})]
)
def test_other_models_have_the_parameters_of_pretraining_but(cls, lacks):
    pretraining, other = (nnx.eval_shape(lambda c=c: c(CONFIG, rngs=nnx.Rngs(0))) for c in (BertPretraining, cls))
    parts = {"next_sentence": pretraining.next_sentence, "masked_lm": pretraining.masked_lm}
    parts["pooler"] = pretraining.bert.pooler
    assert _size(other) == _size(pretraining) - sum(_size(parts[name]) for name in lacks)


def test_default_is_the_uncased_base():
    assert BertConfig() == BertConfig.published("bert-base-uncased")
    assert BertConfig.published("bert-tiny", labels=("x",), d_model=64).d_model == 64


def test_labels_are_the_width_of_a_classifier():
    for model, shape in ((BertClassifier, (2, 4)), (BertTagger, (2, 7, 4))):
        abstract = nnx.eval_shape(lambda model=model: model(CONFIG, rngs=nnx.Rngs(0))(TOKENS))
        assert abstract.shape == shape


def test_refusals():
    def build(model, **overrides):
        return nnx.eval_shape(lambda: model(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match="no published BERT is called 'bert-huge'; there are bert-tiny"):
        BertConfig.published("bert-huge")
    with pytest.raises(ValueError, match=r"activation must be .* or .*, got 'tanh'"):
        build(Bert, activation="tanh")
    with pytest.raises(ValueError, match="d_model=12 is not divisible by num_heads=5"):
        build(Bert, num_heads=5)
    with pytest.raises(ValueError, match=r"init must be .paper. or .matching., got 'other'"):
        build(BertPretraining, init="other")
    with pytest.raises(ValueError, match="needs labels"):
        build(BertTagger, labels=())
    with pytest.raises(ValueError, match="at most max_length=9 tokens, got 10"):
        jax.eval_shape(make_bert("BertTagger"), np.ones((1, 10), int))


def test_shared_layers_are_one_layer_again_and_again():
    """ALBERT: one layer's parameters, which several layers with equal parameters would compute as well."""
    shared = make_bert("BertMaskedLM", share_layers=True, is_tied=False, embedding_size=6)
    params = nnx.to_pure_dict(nnx.state(shared))
    config = dataclasses.replace(shared.config, share_layers=False)
    layers = params["bert"]["encoder_layers"]
    params["bert"]["encoder_layers"] = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), 3, axis=0), layers)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: BertMaskedLM(config, rngs=nnx.Rngs(0))))
    unshared = nnx.merge(graphdef, params)
    (got, got_maps), (want, want_maps) = (
        _run(model, TOKENS, SEGMENTS, return_attention=True) for model in (shared, unshared)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert got_maps.keys() == want_maps.keys() == {f"encoder/{index}/self" for index in range(3)}
    for name, weights in want_maps.items():
        np.testing.assert_allclose(got_maps[name], weights, atol=1e-6)
    assert np.abs(got_maps["encoder/0/self"] - got_maps["encoder/2/self"]).max() > 0.01
    assert shared.masked_lm.output_embedding.table.shape == shared.bert.embedding.table.shape == (23, 6)


@pytest.mark.parametrize(("lora", "frozen"), [(LoraConfig(rank=2), ""), (LoraConfig(), "encoder_layers")])
def test_shared_layers_may_have_adapters_or_be_frozen(lora, frozen):
    model = make_bert("BertMaskedLM", share_layers=True)
    want = _run(model, TOKENS, SEGMENTS)
    adapt(model, lora, frozen=frozen)
    np.testing.assert_allclose(_run(model, TOKENS, SEGMENTS), want, atol=1e-6)  # adapters begin with zeros


def test_options_that_do_not_go_together():
    two = dataclasses.replace(CONFIG, share_layers=True, attention=AttentionConfig("dense,window"))
    with pytest.raises(ValueError, match="share_layers is for layers of one attention, not for dense,window"):
        two.validate()
    model = make_bert("Bert", num_segments=0)
    assert model.token_types is None
    with pytest.raises(ValueError, match="token_type_ids need a model with num_segments above 0: leave them out"):
        jax.eval_shape(lambda: model(TOKENS, SEGMENTS))


def test_attention_by_distance_alone():
    """With queries of zero, maps are softmaxes of the biases; below 8, each distance has a bucket on either side."""
    model = make_bert("Bert", relative_buckets=32, has_pooler=False)
    model = nnx.merge(*nnx.split(model))  # a copy, as others share the model
    query = model.encoder_layers.self_attention.query
    query.kernel[...], query.bias[...] = jnp.zeros(query.kernel.shape), jnp.zeros(query.bias.shape)
    table = np.asarray(model.relative_bias[...], np.float64)
    distance = np.arange(7)[None] - np.arange(7)[:, None]
    logits = table[np.abs(distance) + 16 * (distance > 0)]  # [T, S, N]
    want = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for weights in _run(model, TOKENS, SEGMENTS, return_attention=True)[1].values():
        np.testing.assert_allclose(weights, np.broadcast_to(want.transpose(2, 0, 1), weights.shape), atol=1e-6)


@pytest.mark.parametrize("count", [3, 512])
def test_a_number_of_buckets_that_has_no_meaning(count):
    with pytest.raises(ValueError, match=f"relative_buckets={count} must be 0 or from 4 to 511"):
        dataclasses.replace(CONFIG, relative_buckets=count).validate()
