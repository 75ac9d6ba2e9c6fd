"""Small models in which every size is another."""

import functools

import pytest
from flax import nnx

from tests.nn.programs import draw, jitted
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


@functools.cache
def _make(attention_fn=dot_product_attention, **overrides):
    config = TransformerConfig(**SIZES | overrides)
    return draw(lambda: Transformer(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def make_model():
    """`make_model(**overrides)`: fields of the configuration, and `attention_fn`; the same parameters each time."""
    return _make


@pytest.fixture(scope="session")
def forward():
    """`forward(model, source, target)`: the logits, the program of which all files share."""
    return _forward


_forward = jitted(lambda model, source, target: model(source, target))
