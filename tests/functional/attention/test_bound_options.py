"""What is bound to an attention with `functools.partial` stays bound in everything that takes an attention."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tfx_jax.functional import (
    aligned_attention,
    attention_over_axes,
    dot_product_attention,
    flax_attention_fn,
    hard_attention,
    stick_breaking_attention,
)
from tfx_jax.functional.attention import SPECS
from tfx_jax.nn import MultiHeadAttention
from tfx_jax.nn.attention import decoding_of

B, T, N, H = 2, 5, 2, 4
BOUND = functools.partial(dot_product_attention, is_causal=True, scale=3.0)
QUERY, KEY, VALUE = np.random.default_rng(0).normal(size=(3, B, T, N, H)).astype(np.float32)


def _hard(attention_fn):
    return hard_attention(QUERY, KEY, VALUE, attention_fn=attention_fn, return_probs=True)[1]


def _aligned(attention_fn):
    position = np.zeros((B, N, T), np.float32)  # the window has all keys
    options = {"position": position, "window": T, "return_weights": True}
    return aligned_attention(QUERY, KEY, VALUE, attention_fn=attention_fn, **options)[1]


def _over_axes(attention_fn):
    return attention_over_axes(attention_fn, QUERY, KEY, VALUE, axes=(1,), return_weights=True)[1]


def _flax(attention_fn):
    """Flax asks for no weights: the outputs for unit vectors are the weights."""
    units = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, N, T))
    return flax_attention_fn(attention_fn)(QUERY, KEY, units).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("weights_fn", [_hard, _aligned, _over_axes, _flax], ids=lambda fn: fn.__name__.strip("_"))
@pytest.mark.parametrize("attention_fn", [BOUND, stick_breaking_attention], ids=["bound", "causal by default"])
def test_functions_keep_what_is_bound(weights_fn, attention_fn):
    wanted = jax.jit(lambda: attention_fn(QUERY, KEY, VALUE, return_weights=True)[1])()
    assert not np.triu(wanted, k=1).any()
    np.testing.assert_allclose(jax.jit(weights_fn, static_argnums=0)(attention_fn), wanted, atol=1e-6)


def test_layers_keep_what_is_bound_unless_they_are_told_otherwise():
    layer = MultiHeadAttention(N * H, N, attention_fn=BOUND, rngs=nnx.Rngs(0))
    told = MultiHeadAttention(
        N * H, N, attention_fn=functools.partial(dot_product_attention, scale=3.0), rngs=nnx.Rngs(0)
    )
    x = QUERY.reshape(B, T, N * H)

    @nnx.jit
    def weights_of(layer, told):
        options = {"return_weights": True}
        return layer(x, **options)[1], told(x, is_causal=True, **options)[1], layer(x, is_causal=False, **options)[1]

    bound, explicit, both_ways = weights_of(layer, told)
    np.testing.assert_array_equal(bound, explicit)
    assert not np.triu(bound, k=1).any()
    assert (np.asarray(both_ways) > 0).all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("local_window_size", (1, 0)),
        ("logits_soft_cap", 0.2),
        ("mask_mod", lambda *places: places[2] > places[3]),
        ("score_mod", lambda score, *places: score * 2),
        ("sinks", np.zeros(N, np.float32)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_decoding_would_ignore_is_decoded_without_a_cache(name, option, value):
    """In every attention that decodes from a cache; what is the attention's own option, its decoding gets."""
    spec = SPECS[name]
    function = functools.partial(spec.function, **spec.example(8))
    if option not in spec.options:
        assert decoding_of(functools.partial(function, **{option: value})) is None


def test_none_is_no_option():
    assert decoding_of(functools.partial(dot_product_attention, sinks=None)) == decoding_of(dot_product_attention)
