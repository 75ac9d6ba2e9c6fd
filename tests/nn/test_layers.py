"""Residual connections, encoder and decoder layers against their sublayers, and decoding against teacher forcing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, jitted, normal
from tfx_jax.functional import alibi_bias, gated_delta_rule, retention
from tfx_jax.nn import DecoderLayer, EncoderLayer, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from tfx_jax.nn.attention import KVCache, RotaryConfig
from tfx_jax.nn.decoding import fused_step, fusing_obstacle, init_fused_cache
from tfx_jax.nn.layers import FusedKVCache, FusedLinear, Residual, fused, quantized
from tfx_jax.nn.moe import MixtureOfExperts
from tfx_jax.nn.stack import stack_layers

B, W, S, T, D, N, H, U, F = 2, 3, 7, 5, 12, 4, 2, 5, 20
MASK = (np.arange(S)[None, :] < np.array([S, 3])[:, None])[:, None, None, :]
"""The second sentence is three tokens long."""

_drawn = functools.partial(draw, mean=lambda name: 0.3)


def _attention(**options):
    return MultiHeadAttention(D, N, **{"d_k": H, "d_v": U, "use_bias": True} | options)


@functools.cache
def _encoder_layer(pre_norm=False, dropout_rate=0.0, is_parallel=False, **options):
    def make(rngs):
        residual = functools.partial(Residual, D, pre_norm=pre_norm, dropout_rate=dropout_rate)
        attention, feed_forward = _attention(rngs=rngs, **options), FeedForward(D, F, rngs=rngs)
        return EncoderLayer(attention, feed_forward, residual, is_parallel=is_parallel)

    return _drawn(lambda: make(nnx.Rngs(0)))


@functools.cache
def _decoder_layer(pre_norm=False, **options):
    def make(rngs):
        residual = functools.partial(Residual, D, pre_norm=pre_norm)
        attentions = _attention(rngs=rngs, **options), _attention(rngs=rngs, **options)
        return DecoderLayer(*attentions, FeedForward(D, F, rngs=rngs), residual)

    return _drawn(lambda: make(nnx.Rngs(0)))


def test_residual_of_the_paper_normalizes_the_sum():
    x = normal(0, B, T, D)
    out, want = jitted(lambda x: (Residual(D)(lambda x: 3 * x + 1, x), LayerNorm(D)(4 * x + 1)))(x)
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_pre_norm_residual_normalizes_the_branch():
    x = normal(0, B, T, D)
    residual = functools.partial(Residual, D, pre_norm=True)
    out, normalized = jitted(lambda x: (residual()(lambda x: 3 * x + 1, x), LayerNorm(D)(x)))(x)
    np.testing.assert_allclose(out, x + 3 * normalized + 1, atol=1e-5)


def test_scaled_residual_multiplies_the_branch_and_never_x():
    x = normal(0, B, T, D)
    residual = functools.partial(Residual, D, pre_norm=True, output_norm=True, scale=0.22)
    out, branch = jitted(lambda x: (residual()(lambda x: x**2, x), LayerNorm(D)(LayerNorm(D)(x) ** 2)))(x)
    np.testing.assert_allclose(out, x + np.float32(0.22) * branch, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_residual_hands_the_extra_of_its_sublayer_through(pre_norm):
    extras = []

    def run(x):
        out, extra = Residual(D, pre_norm=pre_norm).with_extra(lambda x: (x, "extra"), x)
        extras.append(extra)
        return out

    jax.eval_shape(run, normal(0, B, T, D))
    assert extras == ["extra"]


def test_residual_drops_the_branch_and_never_x():
    x, branch = normal(0, B, T, D), np.ones((B, T, D), np.float32)

    def run(x, branch):
        residual = Residual(D, dropout_rate=0.25, pre_norm=True)
        return [residual(lambda _: branch, x, rngs) for rngs in (None, nnx.Rngs(dropout=0))]

    plain, dropped = jitted(run)(x, branch)
    kept = np.isclose(dropped, x + 4 / 3, atol=1e-5)
    assert (kept | np.isclose(dropped, x)).all()
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_array_equal(plain, x + branch)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_encoder_layer_is_its_sublayers(pre_norm):
    @jitted
    def run(layer, x):
        norms = layer.self_attention_residual.norm, layer.feed_forward_residual.norm
        if pre_norm:
            middle = x + layer.self_attention(norms[0](x), mask=MASK)
            want = middle + layer.feed_forward(norms[1](middle))
        else:
            middle = norms[0](x + layer.self_attention(x, mask=MASK))
            want = norms[1](middle + layer.feed_forward(middle))
        return want, layer(x, mask=MASK), layer(x, mask=MASK, return_weights=True)

    want, (out, nothing), (with_weights, weights) = run(_encoder_layer(pre_norm), normal(0, B, S, D))
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert nothing is None
    np.testing.assert_array_equal(with_weights, out)
    chex.assert_shape(weights["self"], (B, N, S, S))
    assert not weights["self"][1, ..., 3:].any()


@pytest.mark.parametrize("pre_norm", [False, True])
def test_parallel_sublayers_are_added(pre_norm):
    @jitted
    def run(layer, x):
        norm = layer.self_attention_residual.norm
        y = norm(x) if pre_norm else x
        want = x + layer.self_attention(y, mask=MASK) + layer.feed_forward(y)
        return want if pre_norm else norm(want), layer(x, mask=MASK)[0]

    layer = _encoder_layer(pre_norm, is_parallel=True)
    want, out = run(layer, normal(0, B, S, D))
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert layer.feed_forward_residual is None


@pytest.mark.parametrize("pre_norm", [False, True])
def test_decoder_layer_is_its_sublayers(pre_norm):
    @jitted
    def run(layer, x, memory):
        sublayers = (
            (layer.self_attention_residual.norm, lambda x: layer.self_attention(x, is_causal=True)),
            (layer.cross_attention_residual.norm, lambda x: layer.cross_attention(x, memory, mask=MASK)),
            (layer.feed_forward_residual.norm, layer.feed_forward),
        )
        want = x
        for norm, sublayer in sublayers:
            want = want + sublayer(norm(want)) if pre_norm else norm(want + sublayer(want))
        options = {"memory_mask": MASK}
        return want, layer(x, memory, **options), layer(x, memory, **options, return_weights=True)

    want, (out, nothing), (_, weights) = run(_decoder_layer(pre_norm), normal(0, B, T, D), normal(1, B, S, D))
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert nothing is None
    chex.assert_shape([weights["self"], weights["cross"]], [(B, N, T, T), (B, N, T, S)])
    assert not np.triu(weights["self"], 1).any()
    assert not weights["cross"][1, ..., 3:].any()


def test_encoder_layer_drops_only_with_rngs():
    @jitted
    def run(layer, dropping, x):
        return layer(x)[0], dropping(x)[0], dropping(x, rngs=nnx.Rngs(0))[0]

    plain, silent, dropped = run(_encoder_layer(), _encoder_layer(dropout_rate=0.5), normal(0, B, S, D))
    np.testing.assert_array_equal(silent, plain)
    assert np.abs(dropped - plain).max() > 1e-2


def _seen(beam_ancestry):
    """The masks, position by position, of rows whose token t was written by beam beam_ancestry[r, t]."""
    mine = beam_ancestry.reshape(B, W, -1, 1) == np.arange(W)
    past = np.arange(T + 2) <= np.arange(T)[:, None, None, None, None]
    return (mine & past[..., None]).reshape(T, B, 1, W, -1)


OWN = np.tile(np.arange(W), B)[:, None].repeat(T + 2, 1)
"""Every row has written all of its tokens itself."""


@functools.partial(jitted, static=["int8"])
def _teach_and_step(layer, taught, x, memory, seen, int8=False):
    """Runs W beams of each text all at once, and token by token from a cache with something in it: outputs, cache."""
    rows, mask = jnp.repeat(memory, W, axis=0), np.repeat(MASK, W, axis=0)
    want, _ = layer(taught, rows, memory_mask=mask)
    keys_values = FusedKVCache.of(*layer.cross_attention.project_memory(memory))
    layer = fused(layer, int8=int8)
    _, heads, size, _ = keys_values.key.shape
    room = (T + 2) * W
    past = FusedKVCache(jnp.full((B, heads, size, room), 9.0), jnp.full((B, heads, room, U), 9.0))

    def advance(past, given):
        token, position, seen = given
        place = {"entry": position * W, "positions": position[None, None]}
        out, past = layer.step(token[:, None], past, keys_values, MASK, **place, mask=seen)
        return past, out[:, 0]

    past, outs = jax.lax.scan(advance, past, (x.swapaxes(0, 1), jnp.arange(T), seen))
    return want, outs.swapaxes(0, 1), past


@pytest.mark.parametrize(
    ("pre_norm", "options"),
    [
        pytest.param(False, {}, id="post-norm"),
        pytest.param(True, {}, id="pre-norm"),
        pytest.param(False, {"num_kv_heads": 2}, id="post-norm-grouped", marks=pytest.mark.slow),
        pytest.param(True, {"num_kv_heads": 2}, id="pre-norm-grouped"),
        pytest.param(False, {"use_bias": False}, id="post-norm-no-bias"),
        pytest.param(True, {"use_bias": False}, id="pre-norm-no-bias", marks=pytest.mark.slow),
    ],
)
def test_steps_equal_teacher_forcing_for_every_beam(pre_norm, options):
    layer, x = _decoder_layer(pre_norm, **options), normal(2, B * W, T, D)  # every row another beam
    want, got, past = _teach_and_step(layer, x, x, normal(1, B, S, D), _seen(OWN))
    # Without normalization at the end values reach 20, where float32 resolves 2e-6.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    assert (past.key[..., T * W :] == 9.0).all(), "room that is not used yet was touched"
    assert (past.value[..., T * W :, :] == 9.0).all()


def test_beams_go_on_from_what_another_has_written():
    """After two tokens all beams follow what the last of them has seen, though nothing was moved."""
    x, beam_ancestry = normal(2, B * W, T, D), OWN.copy()
    last = np.arange(W - 1, B * W, W).repeat(W)
    history = np.concatenate([x[last, :2], x[:, 2:]], axis=1)
    beam_ancestry[:, :2] = W - 1
    seen = np.concatenate([_seen(OWN)[:2], _seen(beam_ancestry)[2:]])
    want, got, _ = _teach_and_step(_decoder_layer(), history, x, normal(1, B, S, D), seen)
    np.testing.assert_allclose(got[:, 2:], want[:, 2:], rtol=1e-6, atol=1e-5)
    assert np.abs(got[:, 1] - want[:, 1]).max() > 1e-2, "what follows has nothing to do with what was written"


@pytest.mark.parametrize(
    ("num_past", "is_gated"),
    [
        (0, False),
        (3, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_steps_go_on_after_a_prompt(num_past, is_gated):
    """Two layers without an encoder, a bias by distance, W beams that share a prompt of which one token is padding."""

    def make(rngs):
        feed_forward = FeedForward(D, F, is_gated=is_gated, use_bias=not is_gated, rngs=rngs)
        residual = functools.partial(Residual, D, pre_norm=True, make_norm=RMSNorm)
        return EncoderLayer(_attention(rngs=rngs), feed_forward, residual)

    prompt, x = normal(1, B, num_past, D), normal(2, B * W, T, D)
    is_past = np.ones((B, num_past), bool)
    is_past[1, 1:2] = False
    whole = np.concatenate([np.repeat(prompt, W, axis=0), x], axis=1)
    mask = np.repeat(np.pad(is_past, ((0, 0), (0, T)), constant_values=True), W, axis=0)[:, None, None, :]

    @jitted
    def run(layers):
        bias, want, past, read = alibi_bias(N, num_past + T), whole, [], prompt
        before = {"bias": bias[..., :num_past, :num_past], "mask": is_past[:, None, None, :]}
        for layer in layers:
            want, _ = layer(want, bias=bias, mask=mask, is_causal=True)
            read, extras = layer(read, **before, is_causal=True, cache=KVCache.empty(B, N, H, U))
            past.append(extras["cache"])
        layers = [fused(layer) for layer in layers]
        cache = init_fused_cache(layers, past, max_new_tokens=T, num_beams=W, is_past=is_past)
        cache |= {"beam_ancestry": jnp.repeat(cache["beam_ancestry"], W, axis=0)}  # as a search does

        def embed(places, positions):
            """Tokens are their places in `x` here; the positions that rows are given count no padding."""
            before = jnp.repeat(is_past.sum(axis=1), W)
            return jnp.where(
                (positions == before + places)[:, None, None], jnp.asarray(x)[jnp.arange(B * W), places][:, None], 0.0
            )

        def step(cache, places):
            bias_fn = lambda place, _: jax.lax.dynamic_slice_in_dim(bias, place, 1, axis=2)  # noqa: E731
            return fused_step(layers, embed, lambda x: x[:, 0], places, cache, bias=bias_fn)[::-1]

        places = jnp.repeat(jnp.arange(T)[:, None], B * W, axis=1)
        return want, jax.lax.scan(step, cache, places)[1]

    want, steps = run([_drawn(lambda: make(nnx.Rngs(0))) for _ in range(2)])
    np.testing.assert_allclose(steps.swapaxes(0, 1), want[:, num_past:], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("first", [0, 3])
def test_a_target_read_in_parts_with_a_cache_is_the_target_read_at_once(first):
    x, memory, bias = normal(1, B, T, D), normal(2, B, S, D), normal(3, 1, N, T, T)

    @jitted
    def run(layer):
        want, _ = layer(x, memory, bias=bias)
        parts, cache = [], KVCache.empty(B, N, H, U)
        for start, stop in ((0, first), (first, T)):
            y, found = layer(x[:, start:stop], memory, bias=bias[..., start:stop, :stop], cache=cache)
            parts, cache = [*parts, y], found["cache"]
        return want, jnp.concatenate(parts, axis=1)

    want, found = run(_decoder_layer())
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("first", "convolution_width"), [(0, 3), (1, 0), (3, 3)])
def test_a_text_read_in_parts_with_a_cache_is_the_text_read_at_once(first, convolution_width):
    """What the cache holds then are the keys and values of the whole; one token of the text is padding."""
    x, exists = normal(1, B, T, D), np.ones((B, T), bool)
    exists[1, 2] = False

    @jitted
    def run(layer):
        whole, extras = layer(x, cache=KVCache.empty(B, N, H, U), mask=exists[:, None, None], is_causal=True)
        parts, cache = [], KVCache.empty(B, N, H, U)
        for start, stop in ((0, first), (first, T)):
            mask = exists[:, None, None, :stop]
            y, found = layer(x[:, start:stop], cache=cache, mask=mask, is_causal=True)
            parts, cache = [*parts, y], found["cache"]
        return (whole, extras["cache"]), (jnp.concatenate(parts, axis=1), cache)

    want, found = run(_encoder_layer(convolution_width=convolution_width))
    assert found[1].key.shape == (B, T, N, H)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5), found, want)


@pytest.mark.parametrize(
    "option",
    [
        {"logits_soft_cap": 5.0},
        {"use_sinks": True},
        {"rotary": RotaryConfig()},
        {"convolution_width": 2},
        {"use_output_gate": True},
    ],
    ids=str,
)
def test_a_layer_whose_cross_attention_has_more_than_a_scale_is_not_fused(option):
    def make(own, cross):
        attentions = _attention(rngs=nnx.Rngs(0), **own), _attention(rngs=nnx.Rngs(0), **cross)
        return DecoderLayer(*attentions, FeedForward(D, F, rngs=nnx.Rngs(0)), functools.partial(Residual, D))

    assert fusing_obstacle(nnx.eval_shape(lambda: make(option, {}))) is None
    obstacle = fusing_obstacle(nnx.eval_shape(lambda: make({}, option)))
    assert obstacle.startswith("cross-attention must have only projections and a scale")


def test_step_requires_rearranged_weights_and_a_memory_for_cross_attention_only():
    x, past = normal(0, B, 1, D), FusedKVCache(np.zeros((B, N, H, 1)), np.zeros((B, N, 1, U)))
    options = {"position": np.int32(0), "mask": np.ones((B, 1, 1, 1), bool)}
    memory = {"memory": FusedKVCache(np.ones((B, N, H, S)), np.ones((B, N, S, U)))}
    for layer, given, error, message in (
        (fused(_decoder_layer()), {}, ValueError, "this layer has cross-attention: pass memory"),
        (fused(_encoder_layer()), memory, ValueError, "this layer has no cross-attention: pass no memory"),
        (_decoder_layer(), memory, TypeError, r"fused\(layer\)"),
        (_encoder_layer(), {}, TypeError, r"fused\(layer\)"),
    ):
        with pytest.raises(error, match=message):
            layer.step(x, past, **given, **options)


def test_a_fused_layer_holds_the_output_gate_in_its_joined_projection():
    for int8, dtype in ((False, np.float32), (True, np.int8)):
        make = functools.partial(fused, int8=int8)
        kernel = nnx.eval_shape(make, _encoder_layer(use_output_gate=True)).self_attention.projections.kernel
        size = N * (H + H + U + U)
        assert (kernel.shape, kernel.dtype) == ((size, D), dtype)


def test_a_cache_of_packed_texts_has_no_convolution():
    x, options = normal(1, B, T, D), {"is_causal": True, "segment_ids": np.array([[1, 1, 2, 2, 2]] * B)}
    layer = _encoder_layer(convolution_width=3)
    jax.eval_shape(lambda: layer(x, **options))
    with pytest.raises(ValueError, match="a short convolution has no cache of packed sequences: pass no segment_ids"):
        layer(x, return_cache=True, **options)


def test_steps_with_weights_of_eight_bits_are_near():
    layer, x = _decoder_layer(), normal(2, B * W, T, D)
    exact, rounded = (
        _teach_and_step(layer, x, x, normal(1, B, S, D), _seen(OWN), **options)[1] for options in ({}, {"int8": True})
    )
    error = np.sqrt(np.square(rounded - exact).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.05
    assert jax.eval_shape(lambda: fused(layer, int8=True).feed_forward.up.kernel[...]).dtype == jnp.int8


@pytest.mark.parametrize("int8", [False, True])
def test_a_step_has_experts_in_its_own_dtype_and_not_in_eight_bits(int8):
    """The matrices of experts are rounded once; their biases and the router are as they were."""

    def make():
        experts = MixtureOfExperts(D, F, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        layer = EncoderLayer(_attention(rngs=nnx.Rngs(1)), experts, functools.partial(Residual, D))
        mixture = fused(layer, int8=int8).feed_forward
        experts = mixture.experts
        matrices, others = (experts.up, experts.down), (experts.up_bias, experts.down_bias, mixture.router)
        return [leaf[...] for leaf in matrices], [leaf[...] for leaf in others]

    matrices, others = jax.eval_shape(make)
    assert {leaf.dtype for leaf in matrices} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in others} == {jnp.dtype(jnp.float32)}


_quantized = jax.jit(quantized)


def test_a_quantized_layer_reads_sequences_nearly_as_before():
    layer, x = _encoder_layer(use_output_gate=True), normal(2, B, T, D)
    run = jitted(lambda layer, x: layer(x, is_causal=True)[0])
    exact, rounded = run(layer, x), run(_quantized(layer), x)
    error = np.sqrt(np.square(rounded - exact).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.05
    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {np.dtype(np.float32)}  # it is a copy that is quantized


def test_what_is_quantized_of_a_stack():
    """The matrices of projections and feed-forward networks, each for itself; no gates, norms and biases."""

    def make(rngs):
        attention = _attention(rngs=rngs, attention_fn=gated_delta_rule)
        return EncoderLayer(attention, FeedForward(D, F, rngs=rngs), functools.partial(Residual, D))

    layers = draw(lambda: stack_layers(make, 3, nnx.Rngs(0)))
    small = _quantized(layers)
    assert {name for name, value in nnx.to_flat_state(nnx.state(small)) if value[...].dtype == jnp.int8} == {
        *(("self_attention", name, "kernel") for name in ("query", "key", "value", "out")),
        *(("feed_forward", name) for name in ("up", "down")),
    }
    kernel, query = np.asarray(layers.self_attention.query.kernel[...]), small.self_attention.query
    values, scales = np.asarray(query.kernel[...], np.float32), np.asarray(query.kernel_scales[...])
    assert (values.shape, scales.shape) == ((3, N, H, D), (3, N, H))
    restored = np.moveaxis(values * scales[..., None], -1, 1)
    assert (np.abs(restored - kernel) <= np.abs(kernel).max(axis=1, keepdims=True) / 254 * 1.01).all()


def test_experts_and_routers_are_not_quantized():
    def make():
        experts = MixtureOfExperts(D, F, 2, shared_d_ff=F, use_shared_gate=True, rngs=nnx.Rngs(0))
        return EncoderLayer(_attention(rngs=nnx.Rngs(0)), experts, functools.partial(Residual, D))

    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: quantized(make())).feed_forward))
    assert {name for name, value in state if value.dtype == jnp.int8} == {("shared", "up"), ("shared", "down")}
    assert len(state) > 4


@pytest.mark.parametrize("int8", [False, True])
def test_product_adds_its_bias_and_takes_a_dtype_for_its_result(int8):
    kernel, bias, x = normal(0, D, F), normal(1, F), normal(2, B, T, D)

    @jitted
    def run(kernel, bias, x):
        product = FusedLinear(kernel, bias, dtype=jnp.bfloat16, int8=int8)
        return product(x), product(x, jnp.float32)

    half, full = run(kernel, bias, x)
    chex.assert_type([half, full], [jnp.bfloat16, jnp.float32])
    np.testing.assert_allclose(full, x @ kernel + bias, atol=0.15)


def test_a_recurrent_cross_attention_has_no_fused_step():
    with pytest.raises(ValueError, match=r"^cross-attention must decode from cached keys and values, got an attention"):
        nnx.eval_shape(lambda: fused(_decoder_layer(attention_fn=retention), int8=False))
