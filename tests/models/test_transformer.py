"""The Transformer against the paper in float64 NumPy, and what must not change its output."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.data.tokenizers_made_here import BOS_ID, EOS_ID, PAD_ID
from tests.nn.programs import count_draws, jitted, params_of, started
from tfx_jax.functional import dot_product_attention
from tfx_jax.models import Transformer, TransformerConfig, transformer

V = 23
# Sentences of 6 and 4 tokens, and of 5 and 3.
SOURCE = np.array([[4, 9, 22, 5, 7, 2], [8, 6, 6, 2, 0, 0]])
TARGET = np.array([[5, 21, 13, 6, 2], [7, 7, 2, 0, 0]])


def _oracle(model, source, target):
    """Logits of one sentence pair without padding, as section 3 of the paper has it."""
    params = params_of(model, np.float64)
    table, pre_norm = params["embedding"]["table"], "decoder_norm" in params

    def embed(tokens, side):
        size = table.shape[1]
        rows = [
            [f(t / 10_000 ** (2 * i / size)) for i in range(size // 2) for f in (math.sin, math.cos)]
            for t in range(len(tokens))
        ]
        learned = params.get(f"{side}_positions")
        positions = np.array(rows) if learned is None else learned["table"][: len(tokens)]
        return table[tokens] * math.sqrt(size) + positions

    def norm(x, p):
        centerd = x - x.mean(-1, keepdims=True)
        return centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def attend(p, x, memory, causal=False):
        def project(name, x):
            return np.einsum("TD,DNH->NTH", x, p[name]["kernel"]) + p[name]["bias"][:, None]

        query, key, value = project("query", x), project("key", memory), project("value", memory)
        scores = np.exp(query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1]))
        scores = np.tril(scores) if causal else scores
        heads = scores / scores.sum(-1, keepdims=True) @ value
        return np.einsum("NTU,NUD->TD", heads, p["out"]["kernel"]) + p["out"]["bias"]

    def add(p, x, sublayer):
        return x + sublayer(norm(x, p["norm"])) if pre_norm else norm(x + sublayer(x), p["norm"])

    def run(side, x, memory):
        for index in range(len(params[f"{side}_layers"]["feed_forward"]["up"])):
            p = jax.tree.map(lambda leaf, index=index: leaf[index], params[f"{side}_layers"])
            self_attention, cross_attention, ffn = p["self_attention"], p.get("cross_attention"), p["feed_forward"]
            x = add(p["self_attention_residual"], x, lambda x: attend(self_attention, x, x, side == "decoder"))  # noqa: B023
            if cross_attention is not None:
                x = add(p["cross_attention_residual"], x, lambda x: attend(cross_attention, x, memory))  # noqa: B023
            x = add(
                p["feed_forward_residual"],
                x,
                lambda x: np.maximum(x @ ffn["up"] + ffn["up_bias"], 0) @ ffn["down"] + ffn["down_bias"],  # noqa: B023
            )
        return norm(x, params[f"{side}_norm"]) if pre_norm else x

    memory = run("encoder", embed(source, "source"), None)
    shifted = np.concatenate([[1], target[:-1]])
    return run("decoder", embed(shifted, "target"), memory) @ table.T


@pytest.mark.parametrize(
    "overrides",
    [{}, {"pre_norm": True}, {"learned_positions": 8}, {"d_k": None, "d_v": None}],
    ids=["post-norm", "pre-norm", "learned-positions", "default-heads"],
)
def test_equals_the_paper_sentence_by_sentence(make_model, forward, overrides):
    model = make_model(**overrides)
    logits = forward(model, SOURCE, TARGET)
    chex.assert_shape(logits, (*TARGET.shape, V))
    for row, source, target in zip(logits, SOURCE, TARGET, strict=True):
        source, target = source[source != 0], target[target != 0]
        np.testing.assert_allclose(row[: len(target)], _oracle(model, source, target), atol=1e-5)


def test_vector_of_the_padding_token_changes_nothing(make_model, forward):
    model = make_model()
    graphdef, params = nnx.graphdef(model), params_of(model)
    params["embedding"]["table"][0] += 5.0
    target = np.where(TARGET == 0, 3, TARGET)
    before, after = (forward(each, SOURCE, target) for each in (model, nnx.merge(graphdef, params)))
    np.testing.assert_array_equal(after[..., 1:], before[..., 1:])  # the token's own score is another, of course
    assert (after[..., 0] != before[..., 0]).all()


@pytest.mark.parametrize("changed", range(5))
def test_future_target_token_changes_nothing(make_model, forward, changed):
    target = TARGET.copy()
    target[:, changed] = 11
    before, after = (forward(make_model(), SOURCE, tokens) for tokens in (TARGET, target))
    np.testing.assert_array_equal(after[:, : changed + 1], before[:, : changed + 1])
    assert (after[:, changed + 1 :] != before[:, changed + 1 :]).all(), "what follows must read it"


def test_more_padding_changes_nothing(make_model, forward):
    # In float64: products of other lengths sum in another order, which in float32 shows at logits of 6.
    with jax.enable_x64(True):
        model = make_model(dtype="float64")
        # Of 32 bits: JAX 0.12 confuses programs for NumPy's 64 with those of other tests, compiled without x64.
        source, target = SOURCE.astype(np.int32), TARGET.astype(np.int32)
        before = forward(model, source, target)
        after = forward(model, np.pad(source, ((0, 0), (0, 3))), np.pad(target, ((0, 0), (0, 2))))
    np.testing.assert_allclose(after[:, : TARGET.shape[1]], before, atol=1e-6)


def test_batch_neighbors_do_not_matter(make_model, forward):
    source, target = SOURCE.copy(), TARGET.copy()
    source[1], target[1] = 10, 12
    before, after = forward(make_model(), SOURCE, TARGET), forward(make_model(), source, target)
    np.testing.assert_array_equal(after[0], before[0])
    assert (after[1] != before[1]).all()


def test_source_of_only_padding_is_finite(make_model, forward):
    source = SOURCE.copy()
    source[1] = 0

    def loss(model):
        logits = model(source, TARGET)
        return jnp.square(logits).sum(), logits

    gradients, logits = jitted(jax.grad(loss, has_aux=True))(make_model())
    chex.assert_tree_all_finite((logits, params_of(gradients)))
    np.testing.assert_array_equal(logits[0], forward(make_model(), SOURCE, TARGET)[0])


class _Untied:
    """Three tables where the model has one: for the source, for the target (the second look-up) and for the output."""

    def __init__(self, source, target, output):
        self._lookups = iter((source, target))
        self.attend = output.attend

    def __call__(self, tokens):
        return next(self._lookups)(tokens)


def test_one_table_learns_from_its_three_places(make_model):
    def loss(model, embedding):
        model.embedding = embedding
        return jnp.square(model(SOURCE, TARGET)).mean()

    @jitted
    def gradients(model):
        table = model.embedding
        graphdef, params = nnx.split(model)
        fresh = lambda: nnx.merge(graphdef, params)  # noqa: E731
        together = jax.grad(lambda table: loss(fresh(), table))(table)
        places = jax.grad(lambda *tables: loss(fresh(), _Untied(*tables)), argnums=(0, 1, 2))(table, table, table)
        return together.table[...], [place.table[...] for place in places]

    together, places = gradients(make_model())
    np.testing.assert_allclose(together, sum(places), atol=1e-5)
    assert all(np.abs(place).max() > 1e-3 for place in places)


def _drop(model, seed=0):
    return model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=jax.random.key(seed)))


def test_drops_only_with_rngs_and_reproducibly(make_model, forward):
    model, train = make_model(dropout_rate=0.3, attention_dropout_rate=0.3), jitted(_drop)
    first, again, other = (train(model, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(again, first)
    assert (first != other).any()
    assert np.abs(first - forward(make_model(), SOURCE, TARGET)).max() > 1e-2
    assert count_draws(model, SOURCE, TARGET) == 0, "no stream"
    assert count_draws(_drop, make_model()) == 0, "no rate"
    # The sums of embeddings of both sides; of each layer its sublayers and their attentions.
    assert count_draws(_drop, model) == 2 + 3 * (2 + 1) + 3 * (3 + 2)


def test_drops_the_sum_of_embeddings_and_positions(make_model):
    """Layers without weights let what enters them pass to the last normalization, which moves all zeros alike."""
    model = make_model(pre_norm=True, dropout_rate=0.5)
    graphdef, params = nnx.graphdef(model), params_of(model)
    params["encoder_layers"] = jax.tree.map(np.zeros_like, params["encoder_layers"])
    params["encoder_norm"] = {"scale": np.ones(12, np.float32), "bias": np.zeros(12, np.float32)}
    source = np.arange(100)[None] % 20 + 3

    def most_common(memory):
        return np.mean([np.unique(row, return_counts=True)[1].max() for row in memory[0].round(4)]) / 12

    encode = jitted(lambda model: [model.encode(source, rngs)[0].output for rngs in (None, nnx.Rngs(0))])
    evaluated, dropped = encode(nnx.merge(graphdef, params))
    assert most_common(evaluated) < 0.2
    assert 0.4 < most_common(dropped) < 0.6


def test_any_attention_plugs_in(make_model, forward):
    paper = functools.partial(dot_product_attention, scale=5**-0.5)
    flat = functools.partial(dot_product_attention, scale=0.0)
    logits = forward(make_model(), SOURCE, TARGET)
    np.testing.assert_allclose(forward(make_model(attention_fn=paper), SOURCE, TARGET), logits, atol=1e-6)
    assert np.abs(forward(make_model(attention_fn=flat), SOURCE, TARGET) - logits).max() > 1e-2


@pytest.mark.parametrize("pre_norm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bfloat16_gives_float32_logits_near_those_of_float32(make_model, forward, pre_norm):
    half = make_model(dtype="bfloat16", pre_norm=pre_norm)
    chex.assert_type(jax.tree.leaves(nnx.state(half)), jnp.float32)
    assert jax.eval_shape(half.encode, SOURCE)[0].output.dtype == jnp.bfloat16
    logits, want = (forward(model, SOURCE, TARGET) for model in (half, make_model(pre_norm=pre_norm)))
    chex.assert_type(logits, jnp.float32)
    np.testing.assert_allclose(logits, want, atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize("pre_norm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_loss_is_that_of_unit_variance_logits(pre_norm):
    """Normalized features, a table of variance 1 / d_model: log V, and half a nat for the logits' variance."""
    config = TransformerConfig(vocab_size=400, num_layers=2, d_model=64, d_ff=128, pre_norm=pre_norm)
    source, target = np.random.default_rng(0).integers(3, 400, (2, 8, 16))
    logits = np.float64(jitted(lambda: Transformer(config, rngs=nnx.Rngs(0))(source, target))())
    np.testing.assert_allclose(logits.std(), 1, atol=0.1)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -np.take_along_axis(log_probs, target[..., None], -1).mean()
    np.testing.assert_allclose(loss, math.log(400) + 0.5, atol=0.25)


def test_special_tokens_are_those_of_the_tokenizers():
    assert (transformer.PAD_ID, transformer.BOS_ID, transformer.EOS_ID) == (PAD_ID, BOS_ID, EOS_ID)


def test_more_tokens_than_learned_positions(make_model):
    model = make_model(learned_positions=5)
    with pytest.raises(ValueError, match="at most 5 tokens, the size of the table of learned positions, got 6"):
        jax.eval_shape(model, SOURCE, TARGET)
    with pytest.raises(ValueError, match="max_length=6 must be at most 5, the number of learned positions"):
        jax.eval_shape(lambda: started(model.decoder(), SOURCE[:, :5], max_length=6)[1])


@pytest.mark.parametrize("given", [{}, {"d_k": 4}, {"d_v": 4}])
def test_heads_that_do_not_divide_the_width(given):
    config = TransformerConfig(d_model=12, num_heads=5, **given)
    with pytest.raises(ValueError, match="d_model=12 is not divisible by num_heads=5"):
        nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
