"""Sizes of layers: below one they are refused, and grouped queries work where the core can score them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.attentions import ON_CPU, example
from tfx_jax.functional.attention import SPECS
from tfx_jax.models import BertConfig
from tfx_jax.models.bert import Bert
from tfx_jax.nn import FeedForward, Linear, MixtureOfExperts, MultiHeadAttention
from tfx_jax.nn.attention import AttentionConfig
from tfx_jax.nn.stack import _interleaved


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (Linear, {"in_features": 8, "out_features": 2}),
        (FeedForward, {"d_model": 8, "d_ff": 2}),
        (MixtureOfExperts, {"d_model": 8, "d_ff": 2, "num_experts": 2}),
        (MultiHeadAttention, dict.fromkeys(("d_model", "num_heads", "d_k", "d_v", "num_kv_heads", "num_key_heads"), 8)),
        (MultiHeadAttention, dict.fromkeys(("d_model", "num_heads", "d_key_input", "d_value_input"), 8)),
        (MultiHeadAttention, dict.fromkeys(("d_model", "num_heads", "d_out", "query_rank"), 8)),
    ],
)
def test_sizes_below_one_are_refused(layer, sizes, number):
    for name in sizes:
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got {number}$"):
            layer(**sizes | {name: number}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ON_CPU)
def test_every_core_takes_grouped_queries_or_its_configuration_refuses_them(name):
    """What the table says is what the core does."""
    config, is_causal = example(name), SPECS[name].causal_only
    if not SPECS[name].grouped_queries:
        with pytest.raises(ValueError, match=f"^{name} attention needs as many key heads as query heads"):
            config.check(is_causal=is_causal, num_heads=4, num_kv_heads=2, d_k=8)
        return
    config.check(is_causal=is_causal, num_heads=4, num_kv_heads=2, d_k=8)

    def attend(x):
        core = config.make(4, 8, num_kv_heads=2, rngs=nnx.Rngs(0))
        return MultiHeadAttention(32, 4, num_kv_heads=2, attention_fn=core, rngs=nnx.Rngs(1))(x, is_causal=is_causal)

    assert jax.eval_shape(attend, jnp.ones((2, 6, 32))).shape == (2, 6, 32)


def test_additive_attention_with_grouped_queries_is_that_of_repeated_key_heads():
    core = AttentionConfig("additive").make(4, 8, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, 5, n, 8)).astype(np.float32) for n in (4, 2, 2))
    grouped, whole = jax.jit(
        lambda q, k, v: (core(q, k, v), core(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)))
    )(query, key, value)
    np.testing.assert_allclose(grouped, whole, atol=1e-6)


def test_columns_without_elements_are_joined():
    joined = jax.eval_shape(_interleaved, [jnp.zeros((3, 0, 2)), jnp.zeros((3, 0, 2))])
    assert joined.shape == (6, 0, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_bert_refuses_a_mask_that_is_not_boolean(dtype):
    config = BertConfig(vocab_size=8, max_length=4, num_layers=1, d_model=8, num_heads=2)
    tokens = np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match=f"token_mask must be boolean .*got {np.dtype(dtype)}"):
        jax.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0))(tokens, token_mask=np.ones((1, 4), dtype)))
