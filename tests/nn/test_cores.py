"""Attention cores that own parameters, against their formulas in float64; and which cores decode from a cache."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.attentions import ON_CPU, example
from tests.nn.programs import draw, initial, jitted, normal, params_of
from tfx_jax.functional import hard_attention
from tfx_jax.functional.attention import SPECS
from tfx_jax.nn import AttentionConfig, MultiHeadAttention
from tfx_jax.nn.attention import decoding_of

B, T, S, N, H = 2, 3, 5, 2, 4


def test_the_relative_core_scores_content_and_distance():
    """Dai et al. (2019), section 3.3: (q + u) . k + (q + v) . W R(distance), of queries that stand at the keys' end."""
    core = draw(lambda: AttentionConfig("relative").make(N, H, rngs=nnx.Rngs(0)))
    query, key, value = normal(1, B, T, N, H), normal(2, B, S, N, H), normal(3, B, S, N, H)
    found = jitted(lambda core, *arguments: core(*arguments))(core, query, key, value)
    params, (q, k, v) = params_of(core, np.float64), map(np.float64, (query, key, value))

    def encoding(distance):
        """Sines and cosines of the paper, side by side."""
        angles = distance / 10_000 ** (np.arange(0, N * H, 2) / (N * H))
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(-1)

    logits = np.zeros((B, N, T, S))
    for t in range(T):
        for s in range(S):
            relative = np.einsum("d,dnh->nh", encoding(t + S - T - s), params["relative_key"])
            content = np.einsum("bnh,bnh->bn", q[:, t] + params["content_bias"], k[:, s])
            logits[:, :, t, s] = (
                content + np.einsum("bnh,nh->bn", q[:, t] + params["position_bias"], relative)
            ) / H**0.5
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("bnts,bsnh->btnh", weights, v), atol=2e-5)


def test_the_biases_of_the_relative_core_start_at_zero():
    start = params_of(initial(lambda: AttentionConfig("relative").make(N, H, rngs=nnx.Rngs(0))), np.float64)
    assert not start["content_bias"].any()
    assert not start["position_bias"].any()
    assert start["relative_key"].any()


@pytest.mark.compiles(25, "arrays of a core and of a layer are drawn outside of the jitted gradients")
@pytest.mark.parametrize("name", [name for name in ON_CPU if SPECS[name].parameters])
def test_learned_arrays_get_gradients_in_a_layer(name):
    """Of multi-head attention, whose gates are learned too; a first output that they do not change has none."""
    core = example(name).make(N, H, rngs=nnx.Rngs(0))
    layer = MultiHeadAttention(N * H, N, attention_fn=core, rngs=nnx.Rngs(1))
    x = normal(1, B, 7, N * H)

    @jitted
    def gradients(layer, x):
        return jax.grad(lambda layer: (layer(x, is_causal=SPECS[name].causal) ** 2).sum())(layer)

    found = nnx.to_flat_state(nnx.state(gradients(layer, x).attention_fn, nnx.Param))
    assert found
    for _, gradient in found:
        assert np.isfinite(gradient[...]).all()
    assert any(np.abs(gradient[...]).max() > 0 for _, gradient in found)


@pytest.mark.parametrize("name", [name for name in ON_CPU if SPECS[name].dropout and SPECS[name].causal])
def test_dropout_drops(name):
    """The same weights with the same key, others with another."""
    core = example(name).make(N, H, rngs=nnx.Rngs(0))
    layer = MultiHeadAttention(N * H, N, attention_fn=core, dropout_rate=0.4, rngs=nnx.Rngs(1))
    x = normal(1, B, 7, N * H)
    run = jitted(lambda layer, x, key: layer(x, is_causal=True, rngs=nnx.Rngs(dropout=key)))
    first, again, other = (run(layer, x, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-4


def test_hard_attention_decodes_from_a_cache_unless_it_draws():
    scaled = functools.partial(hard_attention, scale=0.5)
    for core in (hard_attention, scaled):
        step = decoding_of(core)
        assert step is not None
        assert step.attention_fn is core
    assert decoding_of(functools.partial(scaled, rng=jax.random.key(0))) is None
