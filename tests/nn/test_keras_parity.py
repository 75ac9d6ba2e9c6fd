"""The layer against `keras.layers.MultiHeadAttention` on the JAX backend, with its weights copied."""

import os

import jax
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted
from tfx_jax.nn import MultiHeadAttention

pytestmark = pytest.mark.parity

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras", reason="needs Keras")

N, H = 3, 5


def _pair(d_query, d_key, d_value_input, d_v, d_out, axes):
    """Keras's layer, and ours with its weights; Keras's numbers of axes do not count heads either."""
    theirs = keras.layers.MultiHeadAttention(
        num_heads=N, key_dim=H, value_dim=d_v, output_shape=d_out, attention_axes=axes, bias_initializer="normal"
    )
    ours = MultiHeadAttention(
        d_query,
        N,
        d_k=H,
        d_v=d_v,
        d_key_input=d_key,
        d_value_input=d_value_input,
        d_out=d_out,
        use_bias=True,
        attention_axes=axes,
        rngs=nnx.Rngs(0),
    )
    return theirs, ours


def _copy(theirs, ours):
    pairs = ("query", "key", "value", "output"), ("query", "key", "value", "out")
    for their_name, our_name in zip(*pairs, strict=True):
        kernel, bias = (variable.value for variable in getattr(theirs, f"_{their_name}_dense").weights)
        layer = getattr(ours, our_name)
        layer.kernel[...], layer.bias[...] = kernel, bias


@pytest.mark.compiles(80, "Keras computes each operation by itself")
@pytest.mark.parametrize(
    ("axes", "queries", "keys"),
    [
        (None, (2, 7), (2, 9)),
        ((1,), (2, 7), (2, 9)),
        ((2,), (2, 3, 7), (2, 3, 9)),
        ((1, 2), (2, 3, 7), (2, 4, 5)),
        ((2, 3), (2, 4, 3, 2), (2, 4, 2, 5)),
        ((1, 2, 3), (2, 3, 2, 4), (2, 2, 3, 5)),
        ((-2,), (2, 3, 7), (2, 3, 9)),
        ((-3, -2), (2, 4, 3, 2), (2, 4, 2, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("widths", [(12, 12, 12, H, 12), (12, 10, 9, 6, 8)], ids=["equal", "unequal"])
def test_equals_keras(axes, queries, keys, widths):
    d_query, d_key, d_value_input, _, _ = widths
    random = np.random.default_rng(0)
    shapes = (*queries, d_query), (*keys, d_key), (*keys, d_value_input)
    x, memory, value_memory = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    if axes is not None and min(axes) < 0:  # Keras took these for other axes (keras#21714), so it gets the others
        theirs, _ = _pair(*widths, tuple(axis + x.ndim for axis in axes))
        _, ours = _pair(*widths, axes)
    else:
        theirs, ours = _pair(*widths, axes)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # Keras relies on both
        want, want_weights = theirs(x, value_memory, memory, return_attention_scores=True)
    _copy(theirs, ours)
    out, weights = jitted(lambda layer, *inputs: layer(*inputs, return_weights=True))(ours, x, memory, value_memory)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(weights, want_weights, atol=1e-5)
