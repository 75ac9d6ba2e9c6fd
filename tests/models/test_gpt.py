"""GPT: sizes of the literature, causality, padding, packing, and decoding against the whole sequence at once."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, count_rematerialized, draw, initial, jitted, params_of, started
from tfx_jax.functional import beam_search, dot_product_attention, greedy_search
from tfx_jax.models import GPT, GPTConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions

B, T, V = 3, 9, 41
CONFIG = GPTConfig(vocab_size=V, max_length=24, num_layers=2, d_model=12, num_heads=3)
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


@functools.cache
def make_model(**overrides):
    """With parameters that are nowhere at their start."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: GPT(config, rngs=nnx.Rngs(0)), stddev=0.5, mean=lambda name: 0.1, seed=1)


OPTIONS = [{}, {"pre_norm": False}, {"use_bias": False, "activation": "relu", "d_k": 5, "d_ff": 7}]
forward = jitted(lambda model, tokens, **options: model(tokens, **options))
models = pytest.mark.parametrize("options", OPTIONS, ids=["gpt-2", "gpt", "other"])


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt", 116.534784),  # the released ones exactly
        ("gpt2", 124.439808),
        ("gpt2-medium", 354.823168),
        ("gpt2-large", 774.030080),
        ("gpt2-xl", 1557.611200),
    ],
)
def test_published_parameter_counts(name, millions):
    assert _num_params(GPTConfig.published(name)) == round(millions * 1e6)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-small", 0.125),
        ("gpt3-medium", 0.350),
        ("gpt3-large", 0.760),
        ("gpt3-2.7b", 2.7),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13.0),
        ("gpt3", 175.0),
    ],
)
def test_gpt3_counts_are_those_of_table_2_1(name, billions):
    assert _num_params(GPTConfig.published(name)) == pytest.approx(billions * 1e9, rel=0.02)


def test_gpt3_xl_has_more_than_its_name_says():
    """Table 2.1 gives 24 heads of 128 for a width of 2,048: half as much again as 16 heads, which make 1.3 B."""
    assert _num_params(GPTConfig.published("gpt3-xl")) == pytest.approx(1.517e9, rel=0.001)
    assert _num_params(GPTConfig.published("gpt3-xl", num_heads=16)) == pytest.approx(1.3e9, rel=0.02)


def _num_params(config):
    params = nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no published GPT is called 'gpt4'"):
        GPTConfig.published("gpt4")
    with pytest.raises(ValueError, match=r"activation must be .* or .*, got 'tanh'"):
        nnx.eval_shape(lambda: GPT(dataclasses.replace(CONFIG, activation="tanh"), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="at most max_length=24 tokens, got 25"):
        jax.eval_shape(make_model(), np.zeros((1, 25), int))


def test_starts_as_gpt_2_does():
    config = dataclasses.replace(CONFIG, d_model=96, d_ff=384)
    model = initial(lambda: GPT(config, rngs=nnx.Rngs(0)))
    params = params_of(model)
    layers = params["decoder_layers"]
    for kernel, want in (
        (params["embedding"]["table"], 0.02),
        (params["positions"]["table"], 0.02),
        (layers["self_attention"]["value"]["kernel"], 0.02),
        (layers["feed_forward"]["up"], 0.02),
        (layers["self_attention"]["out"]["kernel"], 0.02 / 2),  # two layers: sqrt(2 * 2)
        (layers["feed_forward"]["down"], 0.02 / 2),
    ):
        assert float(kernel.std()) == pytest.approx(want, rel=0.05)
    layer_kernels = layers["self_attention"]["query"]["kernel"]
    assert np.abs(layer_kernels[0] - layer_kernels[1]).max() > 0.01
    # Nothing is known yet but the token itself, which its own row of the tied output resembles.
    loss = -np.take_along_axis(_log_softmax(forward(model, TOKENS))[:, :-1], TOKENS[:, 1:, None], axis=-1).mean()
    assert float(loss) == pytest.approx(np.log(V), abs=0.2)


def _log_softmax(logits):
    logits = np.float64(logits)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@models
def test_only_later_tokens_see_a_change(options):
    changed = TOKENS.copy()
    changed[:, 4] += 1
    before, after = (forward(make_model(**options), tokens) for tokens in (TOKENS, changed))
    chex.assert_shape(before, (B, T, V))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=(0, 2)).min() > 1e-3


@models
@pytest.mark.parametrize("left", [0, 2, 5])
def test_padding_on_either_side_changes_nothing(options, left):
    model, columns = make_model(**options), ((0, 0), (left, 5 - left))
    padded = np.pad(TOKENS, columns, constant_values=7)
    token_mask = np.pad(np.ones((B, T), bool), columns)
    found = forward(model, padded, token_mask=token_mask)[:, left : left + T]
    np.testing.assert_allclose(found, forward(model, TOKENS), atol=2e-5)


NEAR = {
    "window,dense": {"window": 2},
    "local": {"block_size": 4},
    "relative": {},
    "window,local,relative": {"window": 3, "block_size": 3},
}
"""Attentions that count tokens, by name: padding and other texts of a row may be anywhere."""
near = pytest.mark.parametrize(
    "name", [*list(NEAR)[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in list(NEAR)[2:])]
)


def make_near(name):
    options = AttentionOptions(**NEAR[name])
    return make_model(attention=AttentionConfig(name, options), num_layers=len(name.split(",")))


@near
def test_distances_are_counted_between_tokens(name):
    """Padding on the left, on the right and in between, and texts that begin anywhere, which share a row."""
    model = make_near(name)
    alone, shorter = (np.asarray(forward(model, tokens)) for tokens in (TOKENS[:1], TOKENS[1:2, :5]))
    columns = [range(9), range(6, 15), (0, 1, 3, 4, 7, 8, 11, 12, 14), (1, 2, 3, 5, 6, 9, 10, 11, 12)]
    rows, token_mask = np.full((4, 15), 7), np.zeros((4, 15), bool)
    for row, places in enumerate(columns):
        rows[row, list(places)], token_mask[row, list(places)] = TOKENS[0], True
    found = np.asarray(forward(model, rows, token_mask=token_mask))
    np.testing.assert_allclose(found[token_mask], np.concatenate([alone[0]] * 4), atol=2e-5)

    packed, ids, positions = np.full((1, 15), 7), np.zeros((1, 15), int), np.zeros((1, 15), int)
    first, second = np.arange(9), np.array([9, 10, 12, 13, 14])
    packed[0, first], packed[0, second] = TOKENS[0], TOKENS[1, :5]
    ids[0, first], ids[0, second] = 4, 2
    positions[0, first], positions[0, second] = np.arange(9), np.arange(5)
    found = np.asarray(forward(model, packed, segment_ids=ids, positions=positions))[0]
    np.testing.assert_allclose(found[first], alone[0], atol=2e-5)
    np.testing.assert_allclose(found[second], shorter[0], atol=2e-5)


@near
def test_steps_count_tokens_as_the_whole_does(name):
    """Prompts with padding in front, between and behind, and tokens that are given."""
    model = make_near(name)
    token_mask = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1]], bool)
    later = np.random.default_rng(2).integers(0, V, (B, 4))
    logits = np.asarray(_step_by_step(model, TOKENS[:, :6], token_mask, later))
    for row in range(B):
        text = np.concatenate([TOKENS[row, :6][token_mask[row]], later[row]])
        padded = np.pad(text, (0, 10 - len(text)))[None]  # one program
        alone = np.asarray(forward(model, padded))[0, : len(text)]
        np.testing.assert_allclose(logits[:, row], alone[-5:], rtol=1e-5, atol=3e-5)


def test_packed_texts_do_not_see_each_other():
    """Apart, the texts are two rows: behind the shorter stands what it does not see."""
    model, apart = make_model(), np.zeros((2, 5), int)
    apart[0, :4], apart[1] = TOKENS[0, :4], TOKENS[0, 4:]
    segments, positions = np.array([[1] * 4 + [2] * 5]), np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = forward(model, TOKENS[:1], segment_ids=segments, positions=positions)[0]
    first, second = forward(model, apart)
    np.testing.assert_allclose(packed, np.concatenate([first[:4], second]), atol=2e-5)


def test_attention_maps():
    logits, maps = jitted(lambda model: model(TOKENS, return_attention=True))(make_model())
    np.testing.assert_allclose(logits, forward(make_model(), TOKENS), atol=1e-5)
    assert sorted(maps) == ["decoder/0/self", "decoder/1/self"]
    for weights in maps.values():
        chex.assert_shape(weights, (B, 3, T, T))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
        assert (np.triu(weights, k=1) == 0).all()


def _loss(model, seed=None):
    rngs = None if seed is None else nnx.Rngs(dropout=jax.random.key(seed))
    log_probs = jax.nn.log_softmax(model(TOKENS, rngs=rngs))
    return -jnp.take_along_axis(log_probs[:, :-1], TOKENS[:, 1:, None], axis=-1).mean()


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_every_parameter_has_a_gradient(remat):
    for leaf in jax.tree.leaves(jitted(jax.grad(_loss))(make_model(remat=remat))):
        assert np.abs(leaf).max() > 0


def test_layers_are_rematerialized_where_it_is_wanted():
    assert count_rematerialized(make_model(remat="full"), TOKENS) == 2
    assert count_rematerialized(make_model(), TOKENS) == 0


def test_dropout_needs_rngs():
    loss = jitted(_loss)
    plain, first, again, other = (loss(make_model(), *seed) for seed in ((), (0,), (0,), (1,)))
    assert plain != first == again != other
    assert count_draws(_loss, make_model()) == 0
    # The sum of embeddings; of each layer its sublayers and its attention.
    assert count_draws(lambda model: _loss(model, 0), make_model()) == 1 + 2 * (2 + 1)


@pytest.mark.parametrize(
    ("options", "num_beams"),
    [
        pytest.param(OPTIONS[0], 1, id="gpt-2-1"),
        pytest.param(OPTIONS[0], 3, id="gpt-2-3"),
        pytest.param(OPTIONS[1], 1, id="gpt-1", marks=pytest.mark.slow),
        pytest.param(OPTIONS[1], 3, id="gpt-3"),
        pytest.param(OPTIONS[2], 1, id="other-1", marks=pytest.mark.slow),
        pytest.param(OPTIONS[2], 3, id="other-3"),
    ],
)
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
def test_steps_equal_the_whole_at_once(options, num_beams, is_left):
    """Prompts of 6, 1 and 3 tokens, padded on either side, then tokens that each beam is given."""
    model, lengths = make_model(**options), np.array([6, 1, 3])
    columns = np.arange(6)[None]
    token_mask = columns >= 6 - lengths[:, None] if is_left else columns < lengths[:, None]
    prompt = TOKENS[:, :6]
    later = np.random.default_rng(2).integers(0, V, (B * num_beams, 4))
    whole = np.concatenate([np.repeat(prompt, num_beams, axis=0), later], axis=1)
    exists = np.concatenate([np.repeat(token_mask, num_beams, axis=0), np.ones(later.shape, bool)], axis=1)
    want = forward(model, whole, token_mask=exists)
    last = np.repeat(np.full(B, 5) if is_left else lengths - 1, num_beams)
    for number, logits in enumerate(_step_by_step(model, prompt, token_mask, later)):
        place = last if number == 0 else np.full_like(last, 5 + number)
        np.testing.assert_allclose(logits, want[np.arange(B * num_beams), place], rtol=1e-5, atol=2e-5)


@jitted
def _step_by_step(model, prompt, token_mask, later):
    num_beams = later.shape[0] // B
    step_fn, cache, start = started(model.decoder(), prompt, token_mask, max_length=5, num_beams=num_beams)
    if num_beams > 1:
        cache |= {"beam_ancestry": jnp.repeat(cache["beam_ancestry"], num_beams, axis=0)}  # as a search does
    given = jnp.concatenate([jnp.repeat(start, num_beams)[:, None], later], axis=1)
    return jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, given.T)[1]


@pytest.mark.parametrize("options", [{"local_window_size": (1, 0)}, {"logits_soft_cap": 0.2}], ids=str)
def test_options_bound_to_an_attention_count_in_decoding_too(options):
    bound = functools.partial(dot_product_attention, **options)
    config = GPTConfig(vocab_size=30, d_model=16, num_layers=2, num_heads=4, d_ff=16, max_length=16)
    model = draw(lambda: GPT(config, attention_fn=bound, rngs=nnx.Rngs(0)))
    tokens = np.array([[3, 4, 5, 6, 7, 8]])

    @jitted
    def last_logits(model):
        step_fn, cache, start = started(model.decoder(), tokens, max_length=4)
        return step_fn(start, cache)[0], model(tokens)[:, -1]

    stepped, want = last_logits(model)
    np.testing.assert_allclose(stepped, want, atol=1e-5)


def test_beams_share_the_keys_and_values_of_the_prompt():
    cache = jax.eval_shape(lambda model: started(model.decoder(), TOKENS, max_length=2, num_beams=3)[1], make_model())
    assert {layer.key.shape[-1] for layer in cache["past"].value} == {TOKENS.shape[1] + 2 * 3}


def test_beams_of_a_prompt_contain_the_best_continuation():
    """Two steps, searched with a beam that holds everything, against all continuations."""
    model = make_model(vocab_size=4)
    prompt = np.array([[1, 3, 2], [2, 2, 1]])

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), prompt, max_length=2, num_beams=9)
        return beam_search(step_fn, cache, start, beam_size=9, max_length=2, eos_id=3, pad_id=0, length_penalty=0.0)

    found = search(model)
    for row in range(2):
        # After one of the two other tokens only the end is left.
        logits = forward(model, np.array([[*prompt[row], first] for first in (1, 2)])).copy()
        logits[..., 0] = -np.inf
        log_probs = _log_softmax(logits)
        scores = {(first, 3): log_probs[first - 1, 2, first] + log_probs[first - 1, 3, 3] for first in (1, 2)}
        scores[3, 0] = log_probs[0, 2, 3]
        assert tuple(found.tokens[row, 0].tolist()) == max(scores, key=scores.get)


def test_eight_bits_decode_nearly_the_same():
    @functools.partial(jitted, static=["int8"])
    def logits(model, int8):
        step_fn, cache, start = started(model.decoder(int8=int8), TOKENS, max_length=1)
        return step_fn(start, cache)[0]

    exact, rounded = logits(make_model(), False), logits(make_model(), True)
    error = np.sqrt(np.square(exact - rounded).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.05


def test_eight_bits_also_read_the_prompt():
    keys = jitted(lambda decoder: [past.key for past in decoder.encode(TOKENS).past])
    exact, rounded = (keys(make_model().decoder(int8=int8)) for int8 in (False, True))
    for want, got in zip(exact, rounded, strict=True):
        assert 1e-4 < np.sqrt(np.square(want - got).mean() / np.square(want).mean()) < 0.05


def test_decoding_refuses_what_has_no_position():
    with pytest.raises(ValueError, match="9 tokens of prompt and 16 more, but the model has max_length=24"):
        jax.eval_shape(lambda: started(make_model().decoder(), TOKENS, max_length=16)[1])


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    model = make_model(dtype="bfloat16")
    logits = forward(model, TOKENS)
    assert logits.dtype == jnp.float32
    chex.assert_tree_all_finite(logits)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}

    def search(model):
        step_fn, cache, start = started(model.decoder(), TOKENS, max_length=4)
        return greedy_search(step_fn, cache, start, max_length=4, eos_id=1, pad_id=-1)[0]

    chex.assert_shape(jax.eval_shape(search, model), (B, 4))


def test_dropout_is_on_in_calls_with_rngs_alone():
    """Whatever `train` and `eval` of NNX were called."""
    model = draw(
        lambda: GPT(GPTConfig(vocab_size=20, max_length=8, num_layers=1, d_model=8, num_heads=2), rngs=nnx.Rngs(0))
    )
    call = jitted(lambda model, rngs: model(np.array([[3, 4, 5]]), rngs=rngs))
    model.train()
    in_training = call(model, None)
    model.eval()
    np.testing.assert_array_equal(call(model, None), in_training)
    assert (call(model, nnx.Rngs(dropout=0)) != in_training).any()
