"""Reformer: its formulas in float64, gradients of layers run backwards, their memory, and what hashing must keep."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.functional.attention.oracles.dense import softmax_over
from tests.nn.programs import draw, jitted, params_of, started
from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.models import Reformer, ReformerConfig

B, T, V, D, N = 3, 11, 41, 12, 3
CONFIG = ReformerConfig(V, 24, num_layers=2, d_model=D, num_heads=N, d_ff=20, dropout_rate=0.1, chunk_size=4)
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


@functools.cache
def make_model(**overrides):
    """With parameters that are nowhere at their start."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: Reformer(config, rngs=nnx.Rngs(0)), seed=1)


forward = jitted(lambda model, tokens, **options: model(tokens, **options))
FULL = {"full_attention": True}
hashes = pytest.mark.parametrize("options", [FULL, {}, {"num_hashes": 1}], ids=["full", "lsh-4", "lsh-1"])


def _normalized(x, norm):
    centerd = x - x.mean(axis=-1, keepdims=True)
    return norm["scale"] * centerd / np.sqrt((centerd**2).mean(axis=-1, keepdims=True) + 1e-6) + norm["bias"]


def _attended(x, p):
    """Every token sees the earlier ones, the first alone itself; keys are queries of length 1."""
    x = _normalized(x, p["norm"])
    earlier = np.tri(len(x), k=-1, dtype=bool)
    earlier[0, 0] = True
    mixed = np.zeros_like(x)
    for head in range(N):
        query, value = (x @ p[name]["kernel"][:, head] for name in ("query_key", "value"))
        key = query / np.linalg.norm(query, axis=-1, keepdims=True)
        mixed += softmax_over(query @ key.T / np.sqrt(D // N), earlier) @ value @ p["out"]["kernel"][head]
    return mixed


def test_full_attention_is_the_formula():
    model = make_model(**FULL)
    p = params_of(model, np.float64)
    found = forward(model, TOKENS)
    chex.assert_shape(found, (B, T, V))
    for row, tokens in enumerate(TOKENS):
        x1 = x2 = p["embedding"]["table"][tokens] + p["positions"]["table"][:T]
        for number in range(2):
            attention, network = (
                jax.tree.map(lambda leaf, number=number: leaf[number], p[name])
                for name in ("attention_layers", "feed_forward_layers")
            )
            x1 = x1 + _attended(x2, attention)
            weights = network["feed_forward"]
            hidden = np.maximum(_normalized(x1, network["norm"]) @ weights["up"] + weights["up_bias"], 0)
            x2 = x2 + hidden @ weights["down"] + weights["down_bias"]
        both = _normalized(np.concatenate([x1, x2], axis=-1), p["norm"])
        expected = both @ p["output"]["kernel"] + p["output"]["bias"]
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)


def _loss(model, seed=None, **options):
    rngs = None if seed is None else nnx.Rngs(dropout=jax.random.key(seed))
    result = model(TOKENS, rngs=rngs, **options)
    log_probs = jax.nn.log_softmax(result[0] if options else result)
    return -jnp.take_along_axis(log_probs[:, :-1], TOKENS[:, 1:, None], axis=-1).mean()


@pytest.mark.slow
@hashes
def test_gradients_are_those_of_layers_that_keep_everything(options):
    """Maps are made layer by layer, without anything run backwards."""
    gradients = jitted(jax.value_and_grad(_loss), static=["return_attention"])
    loss, backwards = gradients(make_model(**options))
    expected, kept = gradients(make_model(**options), return_attention=True)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    chex.assert_trees_all_close(nnx.to_pure_dict(nnx.state(backwards)), nnx.to_pure_dict(nnx.state(kept)), atol=1e-4)
    for leaf in jax.tree.leaves(backwards):
        assert np.abs(leaf).max() > 0


@pytest.mark.slow
def test_memory_of_training_does_not_grow_with_layers():
    """Of wide texts, so that the activations of a layer are more than its parameters."""
    tokens = np.zeros((4, 512), np.int32)
    sizes = {"vocab_size": 8, "d_model": 32, "num_heads": 2, "d_ff": 32, "max_length": 512, "chunk_size": 32}

    def temporaries(num_layers):
        config = ReformerConfig(**sizes, num_layers=num_layers, num_hashes=1)
        model = nnx.eval_shape(lambda: Reformer(config, rngs=nnx.Rngs(0)))
        program = jax.jit(jax.grad(lambda model: model(tokens, rngs=nnx.Rngs(dropout=jax.random.key(0))).sum()))
        return program.lower(model).compile().memory_analysis().temp_size_in_bytes

    of_a_layer = 4 * 512 * 32 * 4  # bytes of one stream
    assert temporaries(8) - temporaries(2) < 2 * of_a_layer


@pytest.mark.parametrize("size", slow_but([1, 4, 5], 4))
def test_pieces_of_the_feed_forward_layer_change_nothing(size):
    whole, found = (jitted(jax.value_and_grad(_loss))(make_model(feed_forward_chunk_size=n)) for n in (None, size))
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
    states = (nnx.to_pure_dict(nnx.state(gradients)) for _, gradients in (found, whole))
    chex.assert_trees_all_close(*states, atol=1e-5)


@hashes
def test_only_later_tokens_see_a_change(options):
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % V
    before, after = (forward(make_model(**options), tokens) for tokens in (TOKENS, changed))
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-5)
    assert np.abs(before[:, 4] - after[:, 4]).max(axis=-1).min() > 1e-3


@pytest.mark.parametrize("left", [0, 2, 5])
def test_padding_on_either_side_changes_nothing(left):
    columns = ((0, 0), (left, 5 - left))
    padded = np.pad(TOKENS, columns, constant_values=7)
    token_mask = np.pad(np.ones((B, T), bool), columns)
    model = make_model()
    found = forward(model, padded, token_mask=token_mask)[:, left : left + T]
    np.testing.assert_allclose(found, forward(model, TOKENS), atol=1e-4)


def test_packed_texts_do_not_see_each_other():
    model, apart = make_model(**FULL), np.zeros((2, 7), int)
    apart[0, :4], apart[1] = TOKENS[0, :4], TOKENS[0, 4:]
    segments, positions = np.array([[1] * 4 + [2] * 7]), np.array([[*range(4), *range(7)]])
    packed = forward(model, TOKENS[:1], segment_ids=segments, positions=positions)[0]
    first, second = forward(model, apart)
    np.testing.assert_allclose(packed, np.concatenate([first[:4], second]), atol=1e-4)


def test_attention_maps():
    maps = forward_with_maps(make_model(num_hashes=1))
    full = forward_with_maps(make_model(**FULL))
    for found in (maps, full):
        assert sorted(found) == ["decoder/0/self", "decoder/1/self"]
        for weights in found.values():
            chex.assert_shape(weights, (B, N, T, T))
            np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
            assert (np.triu(weights, k=1) == 0).all()
    earlier = np.tri(T, k=-1, dtype=bool)
    assert (full["decoder/0/self"][:, :, earlier] > 0).all()
    assert (maps["decoder/0/self"][:, :, earlier] == 0).any()  # what has another hash


forward_with_maps = jitted(lambda model: model(TOKENS, return_attention=True)[1])


def test_training_draws_dropout_and_rotations():
    """Without dropout, only the rotations differ; with full attention nothing does."""
    loss = jitted(_loss)
    for options, differs in ({"num_hashes": 1}, True), (FULL, False):
        model = make_model(**options, dropout_rate=0.0)
        plain, first, again, other = (loss(model, *seed) for seed in ((), (0,), (0,), (1,)))
        assert first == again
        assert (abs(first - other) > 1e-4) == (abs(first - plain) > 1e-4) == differs
    first, other = (loss(make_model(**FULL), seed) for seed in (0, 1))
    assert abs(first - other) > 1e-3
    first, other = (loss(make_model(**FULL, dropout_rate=0.0, attention_dropout_rate=0.2), seed) for seed in (0, 1))
    assert abs(first - other) > 1e-3


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
def test_steps_equal_the_whole_at_once(num_beams, is_left):
    """Prompts of 6, 1 and 3 tokens, padded on either side, then tokens that each beam is given."""
    model, lengths = make_model(), np.array([6, 1, 3])
    columns = np.arange(6)[None]
    token_mask = columns >= 6 - lengths[:, None] if is_left else columns < lengths[:, None]
    later = np.random.default_rng(2).integers(0, V, (B * num_beams, 4))
    whole = np.concatenate([np.repeat(TOKENS[:, :6], num_beams, axis=0), later], axis=1)
    exists = np.concatenate([np.repeat(token_mask, num_beams, axis=0), np.ones(later.shape, bool)], axis=1)
    want = forward(model, whole, token_mask=exists)
    last = np.repeat(np.full(B, 5) if is_left else lengths - 1, num_beams)
    for number, logits in enumerate(_step_by_step(model, TOKENS[:, :6], token_mask, later)):
        place = last if number == 0 else np.full_like(last, 5 + number)
        np.testing.assert_allclose(logits, want[np.arange(B * num_beams), place], atol=1e-4)


@jitted
def _step_by_step(model, prompt, token_mask, later):
    num_beams = later.shape[0] // B
    step_fn, cache, start = started(model.decoder(), prompt, token_mask, max_length=5, num_beams=num_beams)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_beams, axis=0), cache)  # as a search does
    given = jnp.concatenate([jnp.repeat(start, num_beams)[:, None], later], axis=1)
    return jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, given.T)[1]


def test_bfloat16_keeps_the_streams_in_float32():
    model = make_model(dtype="bfloat16", **FULL)
    logits = forward(model, TOKENS)
    assert logits.dtype == jnp.float32
    exact = forward(make_model(**FULL), TOKENS)
    error = np.sqrt(np.square(logits - exact).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.03
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_sizes_that_cannot_be_are_refused():
    for values, message in (
        ({"num_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ({"num_buckets": 3}, "num_buckets=3 must be even or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(lambda values=values: Reformer(dataclasses.replace(CONFIG, **values), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="at most max_length=24 tokens, got 25"):
        jax.eval_shape(make_model(), np.zeros((1, 25), int))
    with pytest.raises(ValueError, match="11 tokens of prompt and 14 more, but the model has max_length=24"):
        jax.eval_shape(lambda: started(make_model().decoder(), TOKENS, max_length=14)[1])
    with pytest.raises(UserError, match="a Reformer does not support int8"):
        make_model().decoder(int8=True)
