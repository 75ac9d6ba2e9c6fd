"""Transformer-XL: an oracle in float64, the memory against one long pass, no gradient into it, and decoding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.functional.attention.oracles.dense import softmax_over
from tests.nn.programs import count_draws, draw, jitted, params_of, started
from tfx_jax.errors import UserError
from tfx_jax.models.transformer_xl import Memories, TransformerXL, TransformerXLConfig

B, T, V, M = 3, 4, 41, 5  # segments of 4, memories of 5: a memory holds parts of two segments
SEGMENTS = 4
CONFIG = TransformerXLConfig(vocab_size=V, memory_length=M, num_layers=2, d_model=12, num_heads=3, d_ff=20)
TOKENS = np.random.default_rng(0).integers(0, V, (B, SEGMENTS * T))


@functools.cache
def make_model(**overrides):
    """With parameters that are nowhere at their start."""
    config = dataclasses.replace(CONFIG, **overrides)
    return draw(lambda: TransformerXL(config, rngs=nnx.Rngs(0)), seed=1)


def expected_logits(model, tokens, sees):
    """One long pass over a row in float64, one pair of positions at a time; `sees(i, j)`: whether i may see j <= i."""
    params, d, num_heads = params_of(model, np.float64), CONFIG.d_model, CONFIG.num_heads
    table = params["embedding"]["table"]
    x = table[tokens] * np.sqrt(d)
    length = len(tokens)
    seen = np.array([[j <= i and sees(i, j) for j in range(length)] for i in range(length)])
    frequencies = 10_000.0 ** (-np.arange(0, d, 2) / d)
    for number in range(CONFIG.num_layers):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["decoder_layers"])
        attention = layer["self_attention"]
        core = attention["attention_fn"]
        mixed = np.zeros_like(x)
        for head in range(num_heads):
            q, k, v = (x @ attention[name]["kernel"][:, head] for name in ("query", "key", "value"))
            logits = np.zeros((length, length))
            for i, j in zip(*np.nonzero(seen), strict=True):
                encoding = np.stack([np.sin((i - j) * frequencies), np.cos((i - j) * frequencies)], axis=-1).ravel()
                r = encoding @ core["relative_key"][:, head]
                content, distance = core["content_bias"][head], core["position_bias"][head]
                logits[i, j] = (q[i] + content) @ k[j] + (q[i] + distance) @ r
            weights = softmax_over(logits / np.sqrt(d // num_heads), seen)
            mixed += weights @ v @ attention["out"]["kernel"][head]
        x = _normalized(x + mixed, layer["self_attention_residual"]["norm"])
        network = layer["feed_forward"]
        hidden = np.maximum(x @ network["up"] + network["up_bias"], 0)
        x = _normalized(x + hidden @ network["down"] + network["down_bias"], layer["feed_forward_residual"]["norm"])
    return x @ table.T


def _normalized(x, norm):
    centerd = x - x.mean(axis=-1, keepdims=True)
    return norm["scale"] * centerd / np.sqrt((centerd**2).mean(axis=-1, keepdims=True) + 1e-6) + norm["bias"]


@functools.partial(jitted, static=["memory_length", "length"])
def read(model, tokens, memory_length=M, length=T, memories=None):
    """Segment after segment."""
    found = []
    for start in range(0, tokens.shape[1], length):
        segment = tokens[:, start : start + length]
        logits, memories = model(segment, memories, memory_length=memory_length)
        found.append(logits)
    return jnp.concatenate(found, axis=1), memories


@pytest.mark.parametrize("memory_length", [M, 2, 0, 16])
def test_segments_equal_one_long_pass_that_sees_as_far(memory_length):
    """Of another length than in training, longer than a segment and shorter, none, and longer than all."""

    def sees(i, j):
        return j >= i // T * T - memory_length

    logits, memories = read(make_model(), TOKENS, memory_length)
    chex.assert_shape(logits, (B, SEGMENTS * T, V))
    for row in range(B):
        expected = expected_logits(make_model(), TOKENS[row], sees)
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)
    chex.assert_shape(memories.inputs, (B, 2, memory_length, 12))
    np.testing.assert_array_equal(memories.lengths, min(memory_length, TOKENS.shape[1]))


def test_a_memory_of_everything_equals_one_call():
    whole, _ = read(make_model(), TOKENS, 16, 16)
    parts, _ = read(make_model(), TOKENS, 16)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)


def test_what_does_not_exist_in_a_memory_is_not_seen():
    """A row that begins has numbers in its memory that mean nothing, and changes them without effect; no other row."""
    _, memories = read(make_model(), TOKENS[:, :8])
    forgotten = memories.lengths * np.array([1, 0, 1], np.int32)
    noise = np.where((forgotten == 0)[:, None, None, None], np.float32(7), memories.inputs)
    with_noise, after = read(make_model(), TOKENS[:, 8:12], memories=Memories(noise, forgotten))
    kept, kept_after = read(make_model(), TOKENS[:, 8:12], memories=memories)
    begun, _ = read(make_model(), TOKENS[:, 8:12])
    np.testing.assert_array_equal(with_noise[[0, 2]], kept[[0, 2]])
    np.testing.assert_allclose(with_noise[1], begun[1], rtol=1e-5, atol=1e-5)
    assert np.abs(with_noise[1] - kept[1]).max() > 1e-2
    assert (after.lengths.tolist(), kept_after.lengths.tolist()) == ([M, T, M], [M] * B)
    forget = jitted(lambda rows: memories.forget(rows).lengths)
    np.testing.assert_array_equal(forget(np.array([False, True, False])), forgotten)


def test_only_later_tokens_see_a_change():
    changed = TOKENS.copy()
    changed[:, 6] = (changed[:, 6] + 1) % V
    before, after = (read(make_model(), tokens)[0] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:8] - after[:, 6:8]).max(axis=(0, 2)).min() > 1e-3
    # By two layers the change reaches the segment after the last that remembers it.
    assert np.abs(before[:, 12:] - after[:, 12:]).max() > 1e-4


def test_no_gradient_goes_into_the_memory():
    """That of both segments is the sum of that of each, its memories given as numbers; and every parameter has one."""

    def loss(model, segment, memories):
        logits, memories = model(TOKENS[:, segment * T : (segment + 1) * T], memories, memory_length=M)
        return jnp.square(logits).sum(), memories

    def both(model):
        first, memories = loss(model, 0, None)
        return first + loss(model, 1, memories)[0]

    @jitted
    def gradients(model, memories):
        return (
            jax.grad(both)(model),
            jax.grad(lambda model: loss(model, 0, None)[0])(model),
            jax.grad(lambda model: loss(model, 1, memories)[0])(model),
            jax.grad(lambda memories: loss(model, 1, memories._replace(lengths=jnp.full(B, M)))[0], allow_int=True)(
                memories
            ).inputs,
        )

    _, memories = read(make_model(), TOKENS[:, :T])
    together, first, second, into_memory = gradients(make_model(), memories)
    chex.assert_trees_all_close(together, jax.tree.map(np.add, first, second), rtol=2e-4, atol=2e-3)
    assert (into_memory == 0).all()
    for leaf in jax.tree.leaves(together):
        assert np.abs(leaf).max() > 0


def test_dropout_needs_rngs():
    def logits(model, seed=None):
        rngs = None if seed is None else nnx.Rngs(dropout=jax.random.key(seed))
        return model(TOKENS[:, :T], rngs=rngs)[0]

    model = make_model(attention_dropout_rate=0.1)
    assert count_draws(logits, model) == 0
    # The embeddings and the last output; of each layer its sublayers and its attention.
    assert count_draws(lambda model: logits(model, 0), model) == 2 + 2 * (2 + 1)


@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_steps_equal_one_long_pass(num_beams, is_left):
    """Prompts of 6, 1 and 3 tokens, padded on either side, then tokens that each beam is given; memories of 3."""
    model, lengths, memory_length = make_model(eval_memory_length=3), np.array([6, 1, 3]), 3
    columns = np.arange(6)[None]
    token_mask = columns >= 6 - lengths[:, None] if is_left else columns < lengths[:, None]
    later = np.random.default_rng(2).integers(0, V, (B * num_beams, 5))
    found = _step_by_step(model, TOKENS[:, :6], token_mask, later)
    chex.assert_shape(found, (6, B * num_beams, V))
    for row in range(B * num_beams):
        text = np.concatenate([TOKENS[row // num_beams, :6][token_mask[row // num_beams]], later[row]])
        expected = expected_logits(model, text, lambda i, j: i - j <= memory_length)
        np.testing.assert_allclose(found[:, row], expected[-6:], rtol=1e-4, atol=1e-4)


@jitted
def _step_by_step(model, prompt, token_mask, later):
    num_beams = later.shape[0] // B
    step_fn, cache, start = started(model.decoder(), prompt, token_mask, max_length=6, num_beams=num_beams)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_beams, axis=0), cache)  # as a search does
    given = jnp.concatenate([jnp.repeat(start, num_beams)[:, None], later], axis=1)
    return jax.lax.scan(lambda cache, tokens: step_fn(tokens, cache)[::-1], cache, given.T)[1]


def test_parameters_are_those_of_the_paper():
    """Table 2: 41 M on enwik8; each layer five square matrices, u and v, the feed-forward network and two norms."""
    params = nnx.state(nnx.eval_shape(lambda: TransformerXL(TransformerXLConfig(), rngs=nnx.Rngs(0))))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    d, d_ff = 512, 2048
    assert count == 204 * d + 12 * (5 * d * d + 2 * d + 2 * d * d_ff + d_ff + d + 2 * 2 * d)
    assert round(count / 1e6) == 41


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    model = make_model(dtype="bfloat16")
    logits, memories = jax.eval_shape(lambda model: model(TOKENS[:, :T], model.init_memories(B)), model)
    assert (logits.dtype.name, memories.inputs.dtype.name) == ("float32", "bfloat16")
    assert jax.eval_shape(lambda: model.init_memories(B)).inputs == memories.inputs
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_what_is_refused():
    for overrides, message in (
        ({"num_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ({"d_model": 9}, "d_model=9 must be even"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **overrides).validate()
    config = dataclasses.replace(CONFIG)
    config.attention = type(config.attention)("dense")
    with pytest.raises(ValueError, match=r'attention\.name must be "relative" in a Transformer-XL, got "dense"'):
        config.validate()
    with pytest.raises(UserError, match="does not support int8"):
        make_model().decoder(int8=True)
