"""Every attention in every model, by its configuration: causal, decoded as it is trained, or refused with a line."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.attentions import CAUSAL, ENCODING, ON_CPU, PATTERNS, example
from tests.nn.programs import started
from tfx_jax.errors import UserError
from tfx_jax.functional import dot_product_attention, greedy_search, sliding_window_attention
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.spec import RecurrentDecoding
from tfx_jax.functional.search import beam_search
from tfx_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    hf,
)
from tfx_jax.models.llama import QK_NORMS
from tfx_jax.models.vit import ViT, ViTConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions, ExpertsConfig, MultiHeadAttention
from tfx_jax.nn.attention import KVCache, decoding_of
from tfx_jax.nn.decoding import fusing_obstacle

V, LENGTH, PROMPT = 13, 12, 5
WITH_BIAS = [name for name in CAUSAL if SPECS[name].bias]

SMALL = {"num_layers": 2, "d_model": 8, "num_heads": 2}
CONFIGS = {
    "gpt": GPTConfig(V, max_length=LENGTH + PROMPT, d_ff=8, **SMALL),
    "llama": LlamaConfig(V, max_length=LENGTH + PROMPT, d_ff=8, num_kv_heads=1, **SMALL),
    "transformer": TransformerConfig(V, d_ff=8, **SMALL),
    "t5": T5Config(V, d_k=4, d_ff=8, **SMALL),
    "bert": BertConfig(V, max_length=LENGTH, d_ff=8, **SMALL),
    "vit": ViTConfig(image_size=12, patch_size=4, d_ff=8, **SMALL),
}
EXPERTS = ExpertsConfig(num_experts=3)  # of the second layer
SPARSE = {
    "gpt with experts": dataclasses.replace(CONFIGS["gpt"], experts=EXPERTS),
    "transformer with experts": dataclasses.replace(CONFIGS["transformer"], experts=EXPERTS),
    "t5 with experts": dataclasses.replace(CONFIGS["t5"], experts=EXPERTS),
}
CONFIGS |= SPARSE
CONVOLVED = {
    "gpt with convolutions": dataclasses.replace(CONFIGS["gpt"], convolution_width=4, use_output_gate=True),
    "llama with convolutions": dataclasses.replace(CONFIGS["llama"], convolution_width=2),
}
CONFIGS |= CONVOLVED
MODELS = {"gpt": GPT, "llama": Llama, "transformer": Transformer, "t5": T5, "bert": Bert, "vit": ViT}
# Of each way to decode one in each model: from cached keys and values, of those that a window leaves, from all tokens.
QUICK = {
    ("llama", "window,dense"),
    ("gpt", "local"),
    ("gpt", "lsh"),
    ("transformer", "window"),
    ("t5", "relative"),
    ("gpt", "window,dense"),
}


def takes_one_key_head(name):
    """Whether the attentions of a pattern share one head of keys; differential attention pairs heads."""
    return name != "differential" and all(SPECS[part].grouped_queries for part in name.split(","))


GENERATING = [
    pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.slow)
    for kind, names in (
        ("gpt", CAUSAL + PATTERNS),
        ("llama", [name for name in CAUSAL + PATTERNS if takes_one_key_head(name)]),
        ("transformer", CAUSAL + PATTERNS),
        ("t5", [*WITH_BIAS, "additive,dense"]),
        *((kind, ["gated_delta_rule,dense", "linear"]) for kind in CONVOLVED),
        ("gpt with convolutions", ["lsh"]),  # which takes no grouped queries
        *((kind, ["dense"] if "t5" in kind else ["dense", "window,dense"]) for kind in SPARSE),
    )
    for name in names
]


def configured(kind, name):
    attention = example(name)
    return dataclasses.replace(CONFIGS[kind], attention=attention)


@functools.cache
def make_model(kind, name):
    """A model of which no parameter is what it starts as, so that its texts are not all alike."""
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: MODELS[kind.split()[0]](configured(kind, name), rngs=nnx.Rngs(0)))
    )
    random = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(random.normal(0, 0.7, leaf.shape), leaf.dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(draw, nnx.to_pure_dict(params)))


SOURCE = np.array([[5, 6, 7, 3, 8, 2], [9, 4, 2, 0, 0, 0]], np.int32)
TOKENS = np.random.default_rng(1).integers(3, V, (2, LENGTH)).astype(np.int32)
IS_TOKEN = np.array([[True] * PROMPT, [False, False, True, True, True]])  # the padding of the second is in front


@functools.cache
def scored(kind, name):
    """`fn(tokens [B, LENGTH])`: the logits after each token, one program for all rows of any content."""
    model = make_model(kind, name)
    if kind.startswith(("gpt", "llama")):
        return jax.jit(lambda tokens: model(tokens))
    return jax.jit(lambda tokens: model(jnp.asarray(SOURCE), jnp.pad(tokens, ((0, 0), (0, 1)))[:, 1:]))


def start_token(kind):
    return 0 if kind.startswith("t5") else 1


def with_start(kind, tokens):
    """What a decoder reads: its start token first; a language model starts with whatever it is given."""
    tokens = tokens.copy()
    if not kind.startswith(("gpt", "llama")):
        tokens[:, 0] = start_token(kind)
    return tokens


@functools.cache
def searched(kind, name):
    """Greedy and beam texts with their log-probabilities, and the logits of every step when it is told the tokens."""
    model = make_model(kind, name)

    def start(num_beams, tokens):
        if kind.startswith(("gpt", "llama")):
            return started(model.decoder(), tokens[:, :1], max_length=LENGTH - 1, num_beams=num_beams)
        return started(model.decoder(), jnp.asarray(SOURCE), max_length=LENGTH, num_beams=num_beams)

    def run(tokens):
        step_fn, cache, _ = start(1, tokens)

        def told(cache, newest):
            logits, cache = step_fn(newest, cache)
            return cache, logits

        _, logits = jax.lax.scan(told, cache, tokens[:, : LENGTH - 1].T)
        step_fn, cache, first = start(1, tokens)
        greedy = greedy_search(step_fn, cache, first, max_length=LENGTH - 1, eos_id=2, pad_id=-1)
        step_fn, cache, first = start(3, tokens)
        beams = beam_search(
            step_fn, cache, first, beam_size=3, max_length=LENGTH - 1, eos_id=2, pad_id=-1, length_penalty=0.0
        )
        return logits.swapaxes(0, 1), greedy, (beams.tokens[:, 0], beams.scores[:, 0])

    return jax.jit(run)


def log_probs_of(logits):
    """Float64 log-probabilities."""
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("kind", "name"), GENERATING)
def test_no_token_sees_a_later_one(kind, name):
    tokens = with_start(kind, TOKENS)
    before = np.asarray(scored(kind, name)(tokens))
    for place in (3, 8):
        later = tokens.copy()
        later[:, place:] = 3 + (later[:, place:] - 2) % (V - 3)
        after = np.asarray(scored(kind, name)(later))
        np.testing.assert_allclose(after[:, :place], before[:, :place], atol=1e-5)
        assert np.abs(after[:, place:] - before[:, place:]).max() > 1e-3


@pytest.mark.parametrize(("kind", "name"), GENERATING)
def test_a_step_gives_the_logits_of_the_whole_text(kind, name):
    tokens = with_start(kind, TOKENS)
    logits, _, _ = searched(kind, name)(tokens)
    want = scored(kind, name)(tokens)[:, : LENGTH - 1]
    np.testing.assert_allclose(logits, want, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(("kind", "name"), GENERATING)
def test_searches_find_what_the_model_itself_scores_best(kind, name):
    tokens = with_start(kind, TOKENS)
    _, greedy, beams = searched(kind, name)(tokens)
    for found, log_probs in (greedy, beams):
        found, texts = np.asarray(found), np.zeros((2, LENGTH), np.int32)
        texts[:, 0], texts[:, 1:] = tokens[:, 0], np.maximum(found, 0)
        scores = log_probs_of(scored(kind, name)(texts))[:, : LENGTH - 1]
        told = np.take_along_axis(scores, np.maximum(found, 0)[..., None], axis=-1)[..., 0]
        is_last = np.cumsum(found == 2, axis=1) - (found == 2) > 0  # behind the end
        np.testing.assert_allclose(np.where(is_last | (found < 0), 0, told).sum(axis=1), log_probs, atol=1e-3)
    (first, _), free = greedy, log_probs_of(scored(kind, name)(texts_of(greedy, tokens)))[:, : LENGTH - 2]
    first = np.asarray(first)[:, : LENGTH - 2]  # the last one is an end in any case
    reads = first >= 0
    assert (free.argmax(axis=-1)[reads] == first[reads]).all()
    assert (np.asarray(beams[1]) >= np.asarray(greedy[1]) - 1e-4).any()


def texts_of(search, tokens):
    texts = np.zeros((2, LENGTH), np.int32)
    texts[:, 0], texts[:, 1:] = tokens[:, 0], np.maximum(np.asarray(search[0]), 0)
    return texts


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("gpt", n, marks=() if n in ("local", "lsh") else pytest.mark.slow) for n in CAUSAL),
        ("gpt with convolutions", "gated_delta_rule,dense"),
    ],
)
def test_a_prompt_is_gone_on_with_whatever_padding_is_beside_it(kind, name):
    model = make_model(kind, name)
    prompt = TOKENS[:, :PROMPT]

    @jax.jit
    def steps(prompt, token_mask, after):
        step_fn, cache, start = started(model.decoder(), prompt, token_mask, max_length=4)

        def told(cache, newest):
            logits, cache = step_fn(newest, cache)
            return cache, logits

        return jax.lax.scan(told, cache, jnp.concatenate([start[None], after.T[:3]]))[1]

    after = TOKENS[:, PROMPT : PROMPT + 4]
    logits = np.asarray(steps(prompt, IS_TOKEN, after))
    for row in range(2):
        text = np.concatenate([prompt[row][IS_TOKEN[row]], after[row]])
        padded = np.pad(text, (0, LENGTH - text.size))[None]
        want = np.asarray(scored(kind, name)(np.concatenate([padded, padded])))[0]
        first = IS_TOKEN[row].sum() - 1
        np.testing.assert_allclose(logits[:, row], want[first : first + 4], atol=3e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "bigbird" else pytest.mark.slow) for n in [*ENCODING, "local,window"]]
)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_encoders_read_with_every_attention(kind, name):
    model = make_model(kind, name)
    images = np.random.default_rng(2).normal(size=(2, 12, 12, 3)).astype(np.float32)
    inputs = TOKENS if kind == "bert" else images
    if kind == "vit" and name == "bigbird":
        pytest.skip("nine patches and a class token are no whole blocks beside the global ones")
    read = jax.jit(lambda inputs: model(inputs).sequence)
    out = read(inputs)
    assert np.isfinite(out).all()
    changed = inputs.copy()
    changed[:, -1] += 1
    assert not np.allclose(read(changed)[:, -1], out[:, -1])


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("gpt", "bigbird", "bigbird attention has no causal form"),
        ("transformer", "bigbird", "bigbird attention has no causal form"),
        ("gpt", "routing", "routing attention has no causal form"),
        ("bert", "retention", "retention attention is causal only, and this model is not"),
        ("vit", "delta_rule", "delta_rule attention is causal only, and this model is not"),
        ("gpt", "nystrom", "nystrom attention has no causal form"),
        ("gpt", "linformer", "linformer attention has no causal form"),
        ("bert", "native_sparse", "native_sparse attention is causal only, and this model is not"),
        *(("t5", name, f"{name} attention takes no bias") for name in CAUSAL if name not in WITH_BIAS),
        ("gpt", "widnow", r"attention.name='widnow' must be one of dense, .*; did you mean 'window'\?"),
        ("gpt", "window,dense,dense", r"num_layers=2 must be a multiple of 3, the layers of the pattern"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_line(kind, name, message):
    with pytest.raises(ValueError, match=message):
        MODELS[kind](configured(kind, name), rngs=nnx.Rngs(0))


def test_the_name_of_a_function_is_that_of_its_attention():
    names = "sliding_window_attention,local_attention,dot_product_attention,delta_rule"
    assert AttentionConfig(names).names == ["window", "local", "dense", "delta_rule"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("window", {}, r"window attention needs attention\.options\.window"),
        (
            "dense",
            {"window": 3},
            r"attention\.options\.window is not an option of dense attention; its options are: none",
        ),
        ("lsh", {"num_hashes": 3}, r"lsh attention needs attention\.options\.num_buckets"),
        ("routing", {"num_clusters": 3}, r"routing attention needs attention\.options\.window"),
        ("lsh", {"window": 3}, r"its options are: num_hashes, num_buckets, chunk_size, seed"),
    ],
)
def test_options_belong_to_their_attention(name, options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(name, AttentionOptions(**options)).check()


def test_texts_that_share_a_row_need_an_attention_that_keeps_them_apart():
    for name in ON_CPU:
        attention = example(name)
        is_causal = SPECS[name].causal_only
        if not SPECS[name].segments:
            with pytest.raises(ValueError, match=f"{name} attention does not support packed sequences"):
                attention.check(is_packed=True)
        else:
            attention.check(is_packed=True, is_causal=is_causal)


class Louder(MultiHeadAttention):
    """A subclass with an attention of its own."""

    def attend(self, x, key, value, **options):
        return 2 * super().attend(x, key, value, **options)


def test_a_layer_that_the_fused_step_does_not_know_decodes_through_itself_and_says_so(caplog):
    graphdef, params = nnx.split(make_model("gpt", "dense"))
    model = nnx.merge(graphdef, params)
    assert fusing_obstacle(model.decoder_layers) is None
    model.decoder_layers.self_attention.__class__ = Louder

    @jax.jit
    def last_two(tokens):
        step_fn, cache, start = started(model.decoder(), tokens[:, :4], max_length=2)
        first, cache = step_fn(start, cache)
        second, _ = step_fn(tokens[:, 4], cache)
        return jnp.stack([first, second], axis=1), model(tokens[:, :6])[:, 3:5]

    got, want = last_two(TOKENS)
    assert "processes all earlier tokens again: self_attention must be MultiHeadAttention, got Louder" in caplog.text
    np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))


def test_attentions_of_which_nothing_is_known_have_no_step():
    assert decoding_of(lambda *arguments, **options: None) is None
    assert decoding_of(functools.partial(dot_product_attention, scale=2.0)) is not None
    window = decoding_of(functools.partial(sliding_window_attention, window=(3, 1)))
    assert window.is_visible(5, np.arange(2, 6)).all()
    assert not window.is_visible(5, np.arange(2)).any()


def test_a_function_is_the_same_object_for_equal_options():
    """Models of one configuration are then the same program to `jax.jit`."""
    make = lambda: AttentionConfig("window", AttentionOptions(window=3)).make(2, 4, rngs=nnx.Rngs(0))  # noqa: E731
    assert make() is make()


@pytest.mark.parametrize("kind", ["gpt", "transformer"])
def test_integers_are_refused_where_nothing_would_use_them(kind):
    with pytest.raises(UserError, match="int8 needs a model whose attention decodes from a cache"):
        make_model(kind, "lsh").decoder(int8=True)
    assert make_model(kind, "lsh").decoder().fused is None


@pytest.mark.parametrize(("kind", "name"), GENERATING)
def test_weights_of_eight_bits_read_the_source_or_the_prompt_and_decode(kind, name):
    model = make_model(kind, name)
    if any(map(fusing_obstacle, model.stacks if kind.startswith(("gpt", "llama")) else [model.decoder_layers])):
        with pytest.raises(UserError, match="int8 needs a model whose attention decodes from a cache"):
            model.decoder(int8=True)
        return

    @functools.partial(jax.jit, static_argnames="int8")
    def logits(model, int8):
        inputs = TOKENS[:, :PROMPT] if kind.startswith(("gpt", "llama")) else SOURCE
        step_fn, cache, start = started(model.decoder(int8=int8), jnp.asarray(inputs), max_length=1)
        return step_fn(start, cache)[0]

    exact, rounded = (np.asarray(logits(model, int8)) for int8 in (False, True))
    error = np.sqrt(np.square(exact - rounded).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.2, error


def test_a_folder_is_refused_where_it_cannot_say_which_attention_a_model_has(tmp_path):
    with pytest.raises(ValueError, match="no Hugging Face architecture supports window attention"):
        hf.save(make_model("gpt", "window"), tmp_path)


RECURRENT = [
    name for name in CAUSAL if isinstance(decoding_of(example(name).make(2, 4, rngs=nnx.Rngs(0))), RecurrentDecoding)
]


def _decoding_of(name, length):
    """Of a GPT of two layers: `read(params, tokens)`, `step(params, newest, cache)` and shapes of what `read` takes."""
    config = dataclasses.replace(CONFIGS["gpt"], attention=example(name), max_length=length + 8)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))

    def read(params, tokens):
        decoder = nnx.merge(graphdef, params).decoder()
        return decoder.init_cache(decoder.encode(tokens), max_length=8)

    def step(params, newest, cache):
        return nnx.merge(graphdef, params).decoder().step(newest, cache)

    return read, step, (params, jax.ShapeDtypeStruct((1, length), jnp.int32))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_attention_decodes_from_a_state_of_constant_size(name):
    def states(length):
        read, _, shapes = _decoding_of(name, length)
        cache, _ = jax.eval_shape(read, *shapes)
        assert cache["past"].value == [None] * 2
        return cache["states"]

    assert states(1_024) == states(16_384)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECURRENT, "dense"])
def test_a_token_of_a_recurrent_attention_costs_the_same_after_any_text(name):
    """Operations of the compiled step after 1,024 and 16,384 tokens; those of dense attention grow with the text."""

    def operations(length):
        read, step, (params, tokens) = _decoding_of(name, length)
        cache, newest = jax.eval_shape(read, params, tokens)
        return jax.jit(step).lower(params, newest, cache).compile().cost_analysis()["flops"]

    ratio = operations(16_384) / operations(1_024)
    assert ratio > 8 if name == "dense" else ratio < 1.01


def test_the_recurrent_attentions_are_these():
    recurrences = {"retention", "gated_linear", "delta_rule", "gated_delta_rule", "kimi_delta", "state_space_duality"}
    assert {*RECURRENT} == recurrences | {"linear", "favor"}


@pytest.mark.parametrize("qk_norm", QK_NORMS)
@pytest.mark.parametrize("name", CAUSAL + PATTERNS)
def test_norms_of_queries_keys_and_values_fit_the_heads_of_every_attention(name, qk_norm):
    num_kv_heads = 1 if takes_one_key_head(name) else 2
    config = dataclasses.replace(
        CONFIGS["llama"], num_kv_heads=num_kv_heads, qk_norm=qk_norm, use_value_norm=True, attention=example(name)
    )
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    logits = nnx.eval_shape(lambda model: model(TOKENS), model)
    assert logits.shape == (*TOKENS.shape, V)


def test_options_are_checked_with_the_sizes_of_the_model():
    """Rotary features of 16 fit the heads of 24 here; in packed rows too, and in a GPT, whose heads have 32."""
    attention = AttentionConfig("latent", AttentionOptions(latent_size=8, rope_size=16))
    llama = LlamaConfig(V, max_length=LENGTH, num_layers=1, d_model=48, num_heads=2, d_ff=8, attention=attention)
    gpt = GPTConfig(V, max_length=LENGTH, num_layers=1, d_model=64, num_heads=2, d_ff=8, attention=attention)
    for make in (functools.partial(Llama, llama), functools.partial(GPT, gpt)):
        model = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
        logits = nnx.eval_shape(lambda model: model(TOKENS, segment_ids=np.ones(TOKENS.shape, np.int32)), model)
        assert logits.shape == (*TOKENS.shape, V)


@pytest.mark.parametrize("name", [name for name in CAUSAL if SPECS[name].gates is not None])
def test_an_empty_cache_with_a_prompt_takes_attentions_with_gates(name):
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)

    @jax.jit
    def run(x):
        core = example(name).make(2, 4, rngs=nnx.Rngs(0))
        layer = MultiHeadAttention(8, 2, attention_fn=core, rngs=nnx.Rngs(1))
        entries = layer.project_cache(x)
        cache = KVCache.empty(2, 2, *entries.key.shape[3:], *entries.value.shape[3:])
        for start, stop in ((0, 3), (3, 5)):  # a prompt, and the tokens after it
            cache = cache.append(layer.project_cache(x[:, start:stop]))
        return cache._replace(recent=None), entries._replace(recent=None)

    chex.assert_trees_all_close(*run(x), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CAUSAL if SPECS[name].head_sizes is not None])
def test_attentions_with_their_own_sizes_refuse_a_size_of_values(name):
    config = dataclasses.replace(CONFIGS["transformer"], d_v=4, attention=example(name))
    with pytest.raises(ValueError, match=f"d_v must be None with {name} attention.*got 4"):
        Transformer(config, rngs=nnx.Rngs(0))
