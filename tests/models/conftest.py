"""Small models in which every size is another and no parameter is what it starts as."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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


def _draw(make_model):
    graphdef, params = nnx.split(nnx.eval_shape(make_model))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return jnp.asarray(rng.normal(mean, 0.4, leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params)))


@functools.cache
def _make_model(attention_fn=dot_product_attention, **overrides):
    config = TransformerConfig(**SIZES | overrides)
    return _draw(lambda: Transformer(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def make_model():
    """`make_model(**overrides)`: fields of the configuration, and `attention_fn`; the same parameters each time."""
    return _make_model


@pytest.fixture(scope="session")
def draw_model():
    """`draw_model(make)`: what `make()` builds, with other parameters than it draws, the same each time."""
    return _draw
