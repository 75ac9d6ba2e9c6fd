"""Small models in which every size is another."""

import functools

import pytest
from flax import nnx

from tfx_jax.functional import dot_product_attention
from tfx_jax.models import Transformer, TransformerConfig

SIZES = {
    "vocab_size": 23,
    "num_layers": 3,
    "d_model": 12,
    "num_heads": 2,
    "d_k": 5,
    "d_v": 7,
    "d_ff": 20,
    "dropout_rate": 0.0,
    "attention_bias": True,
}


@pytest.fixture(scope="session")
def make_model(draw_model):
    """`make_model(**overrides)`: fields of the configuration, and `attention_fn`; the same parameters each time."""

    @functools.cache
    def make(attention_fn=dot_product_attention, **overrides):
        config = TransformerConfig(**SIZES | overrides)
        return draw_model(lambda: Transformer(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))

    return make
