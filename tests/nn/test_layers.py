"""Residual connections, encoder and decoder layers against their sublayers, and decoding against teacher forcing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.functional import alibi_bias
from tfx_jax.nn import DecoderLayer, EncoderLayer, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from tfx_jax.nn.decoder_step import DecoderStep, KeysValues, Product, start_steps
from tfx_jax.nn.layers import Residual

B, W, S, T, D, N, H, U, F = 2, 3, 7, 5, 12, 4, 2, 5, 20


def _attention(**options):
    return MultiHeadAttention(D, N, **{"d_k": H, "d_v": U, "use_bias": True} | options)


@functools.cache
def _encoder_layer(pre_norm=False, dropout_rate=0.0):
    def make(rngs):
        residual = functools.partial(Residual, D, pre_norm=pre_norm, dropout_rate=dropout_rate)
        return EncoderLayer(_attention(rngs=rngs), FeedForward(D, F, rngs=rngs), residual)

    return _randomised(lambda: make(nnx.Rngs(0)))


@functools.cache
def _decoder_layer(pre_norm=False, **options):
    def make(rngs):
        residual = functools.partial(Residual, D, pre_norm=pre_norm)
        attentions = _attention(rngs=rngs, **options), _attention(rngs=rngs, **options)
        return DecoderLayer(*attentions, FeedForward(D, F, rngs=rngs), residual)

    return _randomised(lambda: make(nnx.Rngs(0)))


def _randomised(make_layer):
    """No parameter at its start, where gains of 1 and offsets of 0 would hide that one is used for another."""
    graphdef, params = nnx.split(nnx.eval_shape(make_layer))
    rng = np.random.default_rng(0)
    return nnx.merge(
        graphdef, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.3, 0.4, leaf.shape), jnp.float32), params)
    )


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _mask():
    """The second sentence is three tokens long."""
    return (jnp.arange(S)[None, :] < jnp.array([S, 3])[:, None])[:, None, None, :]


def test_residual_of_the_paper_normalises_the_sum():
    residual, x = Residual(D), _normal(0, B, T, D)
    out, extra = residual(lambda x: (3 * x + 1, "extra"), x)
    np.testing.assert_allclose(out, LayerNorm(D)(4 * x + 1), atol=1e-6)
    assert extra == "extra"


def test_pre_norm_residual_normalises_the_branch():
    residual, x = Residual(D, pre_norm=True), _normal(0, B, T, D)
    out, extra = residual(lambda x: (3 * x + 1, "extra"), x)
    np.testing.assert_allclose(out, x + 3 * LayerNorm(D)(x) + 1, atol=1e-5)
    assert extra == "extra"


def test_residual_drops_the_branch_and_never_x():
    residual, x = Residual(D, dropout_rate=0.25, pre_norm=True), _normal(0, B, T, D)
    branch = jnp.ones_like(x)
    dropped, _ = residual(lambda _: (branch, None), x, nnx.Rngs(dropout=0))
    kept = np.isclose(dropped, x + 4 / 3, atol=1e-5)
    assert (kept | np.isclose(dropped, x)).all()
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_array_equal(residual(lambda _: (branch, None), x)[0], x + branch)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_encoder_layer_is_its_sublayers(pre_norm):
    layer, x = _encoder_layer(pre_norm), _normal(0, B, S, D)
    norms = layer.self_attention_residual.norm, layer.feed_forward_residual.norm
    if pre_norm:
        middle = x + layer.self_attention(norms[0](x), mask=_mask())
        want = middle + layer.feed_forward(norms[1](middle))
    else:
        middle = norms[0](x + layer.self_attention(x, mask=_mask()))
        want = norms[1](middle + layer.feed_forward(middle))
    out, weights = layer(x, mask=_mask())
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert weights is None
    with_weights, weights = layer(x, mask=_mask(), return_weights=True)
    np.testing.assert_array_equal(with_weights, out)
    chex.assert_shape(weights["self"], (B, N, S, S))
    assert not weights["self"][1, ..., 3:].any()


@pytest.mark.parametrize("pre_norm", [False, True])
def test_decoder_layer_is_its_sublayers(pre_norm):
    layer, x, memory = _decoder_layer(pre_norm), _normal(0, B, T, D), _normal(1, B, S, D)
    sublayers = (
        (layer.self_attention_residual.norm, lambda x: layer.self_attention(x, is_causal=True)),
        (layer.cross_attention_residual.norm, lambda x: layer.cross_attention(x, memory, mask=_mask())),
        (layer.feed_forward_residual.norm, layer.feed_forward),
    )
    want = x
    for norm, sublayer in sublayers:
        want = want + sublayer(norm(want)) if pre_norm else norm(want + sublayer(want))
    out, weights = layer(x, memory, memory_mask=_mask())
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert weights is None
    _, weights = layer(x, memory, memory_mask=_mask(), return_weights=True)
    chex.assert_shape([weights["self"], weights["cross"]], [(B, N, T, T), (B, N, T, S)])
    assert not jnp.triu(weights["self"], 1).any()
    assert not weights["cross"][1, ..., 3:].any()


def test_encoder_layer_drops_only_with_rngs():
    x = _normal(0, B, S, D)
    plain, _ = _encoder_layer()(x)
    layer = _encoder_layer(dropout_rate=0.5)
    np.testing.assert_array_equal(layer(x)[0], plain)
    assert jnp.abs(layer(x, rngs=nnx.Rngs(0))[0] - plain).max() > 1e-2


def _seen(writers, position):
    """The mask of rows whose token t was written by beam writers[r, t]."""
    num_beams = writers.shape[0] // B
    mine = writers.reshape(B, num_beams, -1, 1) == jnp.arange(num_beams)[None, None, None]
    return (mine & (jnp.arange(T + 2) <= position)[None, None, :, None]).reshape(B, 1, num_beams, -1)


def _own(num_beams):
    """Every row has written all of its tokens itself."""
    return jnp.tile(jnp.arange(num_beams), B)[:, None].repeat(T + 2, 1)


def _steps(layer, x, memory, *, int8=False):
    """Feeds tokens one by one to rows that never change places; returns the outputs and the past."""
    step, keys_values = DecoderStep(layer, int8=int8), KeysValues.of(*layer.cross_attention.project_memory(memory))
    num_beams, (_, heads, size, _) = x.shape[0] // B, keys_values.key.shape
    room = (T + 2) * num_beams
    past = KeysValues(jnp.full((B, heads, size, room), 9.0), jnp.full((B, heads, room, U), 9.0))  # whatever was there
    outs = []
    for position in range(T):
        seen = _seen(_own(num_beams), position)
        out, past = step(x[:, position : position + 1], past, jnp.int32(position), seen, keys_values, _mask())
        outs.append(out)
    return jnp.concatenate(outs, axis=1), past


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"use_bias": False}], ids=["plain", "grouped", "no-bias"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_steps_equal_teacher_forcing_for_every_beam(pre_norm, options):
    layer, memory = _decoder_layer(pre_norm, **options), _normal(1, B, S, D)
    x = _normal(2, B * W, T, D)  # every row another beam
    want, _ = layer(x, jnp.repeat(memory, W, axis=0), memory_mask=jnp.repeat(_mask(), W, axis=0))
    got, past = _steps(layer, x, memory)
    # Without normalisation at the end values reach 20, where float32 resolves 2e-6.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    assert (past.key[..., T * W :] == 9.0).all(), "room that is not used yet was touched"
    assert (past.value[..., T * W :, :] == 9.0).all()


def test_beams_go_on_from_what_another_has_written():
    """After two tokens all beams follow what the last of them has seen, though nothing was moved."""
    layer, memory = _decoder_layer(), _normal(1, B, S, D)
    x = _normal(2, B * W, T, D)
    last = jnp.arange(W - 1, B * W, W).repeat(W)
    history = jnp.concatenate([x[last, :2], x[:, 2:]], axis=1)
    want, _ = layer(history, jnp.repeat(memory, W, axis=0), memory_mask=jnp.repeat(_mask(), W, axis=0))
    _, past = _steps(layer, x, memory)
    step, keys_values = DecoderStep(layer), KeysValues.of(*layer.cross_attention.project_memory(memory))
    writers = _own(W).at[:, :2].set(W - 1)
    for position in range(2, T):
        seen = _seen(writers, position)
        out, past = step(x[:, position : position + 1], past, jnp.int32(position), seen, keys_values, _mask())
        np.testing.assert_allclose(out[:, 0], want[:, position], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_past", [0, 3])
def test_steps_go_on_after_a_prompt(num_past, is_gated):
    """Two layers without an encoder, a bias by distance, W beams that share a prompt of which one token is padding."""

    def make(rngs):
        feed_forward = FeedForward(D, F, is_gated=is_gated, use_bias=not is_gated, rngs=rngs)
        residual = functools.partial(Residual, D, pre_norm=True, make_norm=RMSNorm)
        return EncoderLayer(_attention(rngs=rngs), feed_forward, residual)

    layers = [_randomised(lambda: make(nnx.Rngs(0))) for _ in range(2)]
    bias = alibi_bias(N, num_past + T)
    prompt, x = _normal(1, B, num_past, D), _normal(2, B * W, T, D)
    is_past = jnp.ones((B, num_past), bool).at[1, 1:2].set(False)
    whole = jnp.concatenate([jnp.repeat(prompt, W, axis=0), x], axis=1)
    mask = jnp.repeat(jnp.pad(is_past, ((0, 0), (0, T)), constant_values=True), W, axis=0)[:, None, None, :]
    want, past, read = whole, [], prompt
    for layer in layers:
        want, _ = layer(want, bias=bias, mask=mask, is_causal=True)
        read, extras = layer(
            read,
            bias=bias[..., :num_past, :num_past],
            mask=is_past[:, None, None, :],
            is_causal=True,
            return_memory=True,
        )
        past.append(KeysValues.of(*extras["memory"]))
    step_fn, cache = start_steps(
        [DecoderStep(layer) for layer in layers],
        lambda tokens, position: jax.lax.dynamic_slice_in_dim(x, position, 1, axis=1),
        lambda x: x[:, 0],
        past,
        room=T,
        num_beams=W,
        is_past=is_past,
        memories=[None, None],
        bias=lambda position: jax.lax.dynamic_slice_in_dim(bias, position, 1, axis=2),
    )
    cache |= {"writers": jnp.repeat(cache["writers"], W, axis=0)}  # as a search does
    for position in range(T):
        out, cache = step_fn(jnp.zeros(B * W, jnp.int32), cache)
        np.testing.assert_allclose(out, want[:, num_past + position], rtol=1e-6, atol=1e-5)


def test_steps_want_a_memory_if_and_only_if_there_is_an_encoder():
    x, past = _normal(0, B, 1, D), KeysValues(jnp.zeros((B, N, H, 1)), jnp.zeros((B, N, 1, U)))
    mask, memory = jnp.ones((B, 1, 1, 1), bool), KeysValues(jnp.ones((B, N, H, S)), jnp.ones((B, N, S, U)))
    for layer, wrong in ((_decoder_layer(), None), (_encoder_layer(), memory)):
        with pytest.raises(ValueError, match="memory of an encoder"):
            DecoderStep(layer)(x, past, jnp.int32(0), mask, wrong)


def test_steps_with_weights_of_eight_bits_are_near():
    layer, memory = _decoder_layer(), _normal(1, B, S, D)
    x = _normal(2, B, T, D)
    exact, _ = _steps(layer, x, memory)
    rounded, _ = _steps(layer, x, memory, int8=True)
    error = jnp.sqrt(jnp.square(rounded - exact).mean() / jnp.square(exact).mean())
    assert 1e-4 < error < 0.05
    assert DecoderStep(layer, int8=True).up.kernel[...].dtype == jnp.int8


@pytest.mark.parametrize("int8", [False, True])
def test_product_adds_its_bias_and_takes_a_dtype_for_its_result(int8):
    kernel, bias, x = _normal(0, D, F), _normal(1, F), _normal(2, B, T, D)
    product = Product(kernel, bias, dtype=jnp.bfloat16, int8=int8)
    chex.assert_type([product(x), product(x, jnp.float32)], [jnp.bfloat16, jnp.float32])
    np.testing.assert_allclose(product(x, jnp.float32), x @ kernel + bias[None, None], atol=0.15)
