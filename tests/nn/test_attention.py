"""Multi-head attention against the paper's equations, in float64 and one head at a time."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.functional import dot_product_attention
from tfx_jax.nn import MultiHeadAttention

B, T, S, D, N, K, H, U = 2, 5, 7, 12, 4, 2, 3, 6
D_KEY, D_VALUE, D_OUT = 8, 10, 9


def _shapes(layer):
    return jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(nnx.state(layer)))


def _abstract(*sizes, **options):
    return nnx.eval_shape(lambda: MultiHeadAttention(*sizes, **options, rngs=nnx.Rngs(0)))


def _randomised(layer):
    """Biases start at zero, which would hide that they are forgotten."""
    graphdef, params = nnx.split(layer)
    leaves, structure = jax.tree.flatten(params)
    rngs = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [0.5 * jax.random.normal(rng, leaf.shape) for rng, leaf in zip(rngs, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, drawn))


@functools.cache
def _unequal(**options):
    """A layer in which every size is different, and biases are not zero."""
    options = {"d_k": H, "d_v": U, "num_kv_heads": K, "use_bias": True} | options
    sizes = {"d_key_input": D_KEY, "d_value_input": D_VALUE, "d_out": D_OUT}
    return _randomised(MultiHeadAttention(D, N, **sizes, **options, rngs=nnx.Rngs(0)))


def _inputs():
    rngs = jax.random.split(jax.random.key(2), 3)
    shapes = (B, T, D), (B, S, D_KEY), (B, S, D_VALUE)
    return [jax.random.normal(rng, shape) for rng, shape in zip(rngs, shapes, strict=True)]


def _mask():
    """The second sentence ends after 3 keys, and one query of the first sees nothing."""
    mask = np.ones((B, 1, T, S), bool)
    mask[1, ..., 3:] = False
    mask[0, 0, 2] = False
    return mask


def _oracle(layer, queries, keys, values, mask):
    """Section 3.2.2: head_n = attention(x Wq_n, memory Wk_n, memory Wv_n); the heads side by side, times Wo."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(layer)))

    def project(name, x, head):
        projection = params[name]
        return np.asarray(x, np.float64) @ projection["kernel"][:, head] + projection["bias"][head]

    heads, weights = [], np.zeros((B, N, T, S))
    for head in range(N):
        group = head // (N // K)
        query, key, value = (
            project("query", queries, head),
            project("key", keys, group),
            project("value", values, group),
        )
        logits = np.where(mask[:, 0], query @ key.swapaxes(1, 2) / math.sqrt(H), -np.inf)
        scores = np.where(mask[:, 0], np.exp(logits - logits.max(-1, keepdims=True, initial=-1e9)), 0)
        weights[:, head] = scores / np.maximum(scores.sum(-1, keepdims=True), 1e-300)
        heads.append(weights[:, head] @ value)
    kernel = params["out"]["kernel"].reshape(N * U, D_OUT)
    return np.concatenate(heads, -1) @ kernel + params["out"]["bias"], weights


def test_equals_paper_equations():
    layer, inputs, mask = _unequal(), _inputs(), _mask()
    out, weights = layer(*inputs, mask=jnp.asarray(mask), return_weights=True)
    want, want_weights = _oracle(layer, *inputs, mask)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(weights, want_weights, atol=1e-6)
    np.testing.assert_array_equal(out, layer(*inputs, mask=jnp.asarray(mask)))


def test_projecting_the_memory_ahead_changes_nothing():
    layer, (x, keys, values) = _unequal(), _inputs()
    ahead = layer.attend(x, *layer.project_memory(keys, values), mask=jnp.asarray(_mask()))
    np.testing.assert_array_equal(ahead, layer(x, keys, values, mask=jnp.asarray(_mask())))


def test_memory_defaults():
    layer = MultiHeadAttention(D, N, rngs=nnx.Rngs(0))
    x, memory = jnp.split(jax.random.normal(jax.random.key(3), (B, 2 * T, D)), 2, axis=1)
    np.testing.assert_array_equal(layer(x), layer(x, x, x))
    np.testing.assert_array_equal(layer(x, memory), layer(x, memory, memory))
    assert jnp.abs(layer(x, memory) - layer(x, memory, x)).max() > 1e-2


@pytest.mark.parametrize(
    ("d_model", "num_heads", "d_k", "d_v", "want_k", "want_v"),
    [
        (512, 8, None, None, 64, 64),  # base
        (512, 1, None, None, 512, 512),  # row A
        (512, 32, None, None, 16, 16),
        (512, 8, 16, 64, 16, 64),  # row B
        (512, 8, 16, None, 16, 16),
        (1024, 16, None, None, 64, 64),  # big
        (10, 4, 3, None, 3, 3),  # d_model is not a multiple of the heads, and need not be
    ],
)
def test_shapes_follow_table_3(d_model, num_heads, d_k, d_v, want_k, want_v):
    keys_and_queries = {"kernel": (d_model, num_heads, want_k)}
    want = {
        "query": keys_and_queries,
        "key": keys_and_queries,
        "value": {"kernel": (d_model, num_heads, want_v)},
        "out": {"kernel": (num_heads, want_v, d_model)},
    }
    chex.assert_trees_all_equal(_shapes(_abstract(d_model, num_heads, d_k=d_k, d_v=d_v)), want)


def test_every_size_can_differ():
    want = {
        "query": {"kernel": (D, N, H), "bias": (N, H)},
        "key": {"kernel": (D_KEY, K, H), "bias": (K, H)},
        "value": {"kernel": (D_VALUE, K, U), "bias": (K, U)},
        "out": {"kernel": (N, U, D_OUT), "bias": (D_OUT,)},
    }
    chex.assert_trees_all_equal(_shapes(_unequal()), want)


def test_values_are_made_from_what_keys_are_made_from():
    shapes = _shapes(_abstract(D, N, d_key_input=D_KEY))
    assert shapes["value"]["kernel"][0] == shapes["key"]["kernel"][0] == D_KEY


def test_kernels_start_glorot_uniform_over_all_heads():
    """Those of queries, keys and values with half the variance."""
    layer = MultiHeadAttention(64, 8, d_k=32, d_v=16, rngs=nnx.Rngs(0))
    starts = ((layer.query, 64 + 8 * 32, 0.5), (layer.value, 64 + 8 * 16, 0.5), (layer.out, 8 * 16 + 64, 1.0))
    for projection, fans, gain in starts:
        limit = math.sqrt(gain * 6 / fans)
        size = jnp.abs(projection.kernel[...])
        assert 0.99 * limit < size.max() <= limit
        np.testing.assert_allclose(size.mean(), limit / 2, rtol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(D, **options, rngs=nnx.Rngs(0))


def test_attention_fn_receives_what_was_projected_and_every_option():
    received = {}

    def attention_fn(query, key, value, **options):
        received.update(options, shapes=(query.shape, key.shape, value.shape))
        return jnp.zeros((*query.shape[:3], value.shape[-1]))

    layer = MultiHeadAttention(D, N, d_k=H, d_v=U, num_kv_heads=K, attention_fn=attention_fn, rngs=nnx.Rngs(0))
    x, memory = jnp.ones((B, T, D)), jnp.ones((B, S, D))
    options = {
        "bias": jnp.ones((1, N, T, S)),
        "mask": jnp.asarray(_mask()),
        "is_causal": True,
        "segment_ids": (jnp.ones((B, T), int), jnp.ones((B, S), int)),
    }
    layer(x, memory, **options)
    assert received.pop("shapes") == ((B, T, N, H), (B, S, K, H), (B, S, K, U))
    assert received.keys() == options.keys(), "no dropout, no weights: nothing is said of them"
    assert all(received[name] is value for name, value in options.items())


def test_any_attention_plugs_in():
    scaled = functools.partial(dot_product_attention, scale=0.1)
    layer, plugged = _unequal(), _unequal(attention_fn=scaled)
    inputs = _inputs()
    query, key, value = (project(x) for project, x in zip((layer.query, layer.key, layer.value), inputs, strict=True))
    np.testing.assert_array_equal(plugged(*inputs), layer.out(scaled(query, key, value)))
    assert jnp.abs(plugged(*inputs) - layer(*inputs)).max() > 1e-2


@pytest.mark.parametrize(
    ("axes", "queries", "keys", "out", "weights"),
    [
        (None, (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((1,), (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((-2,), (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((2, 3), (3, 5, 3, 4, 16), (3, 5, 2, 2, 7), (3, 5, 3, 4, 16), (3, 5, 500, 3, 4, 2, 2)),
        ((-4, -2), (3, 5, 3, 4, 16), (3, 2, 3, 1, 7), (3, 5, 3, 4, 16), (3, 3, 500, 5, 4, 2, 1)),
    ],
    ids=str,
)
def test_attention_axes(axes, queries, keys, out, weights):
    """The first sizes are those of our second source document: 500 heads of size 2, widths 16 and 7."""

    def attend(x, memory):
        layer = MultiHeadAttention(16, 500, d_k=2, d_key_input=7, attention_axes=axes, rngs=nnx.Rngs(0))
        return layer(x, memory, return_weights=True)

    got = jax.eval_shape(attend, jnp.ones(queries), jnp.ones(keys))
    assert tuple(x.shape for x in got) == (out, weights)


def test_drops_weights_only_with_rngs():
    layer, dropping, inputs = _unequal(), _unequal(dropout_rate=0.5), _inputs()
    np.testing.assert_array_equal(dropping(*inputs), layer(*inputs))
    np.testing.assert_array_equal(layer(*inputs, rngs=nnx.Rngs(params=0)), layer(*inputs))
    rngs = nnx.Rngs(dropout=0)
    first, second, again = (
        dropping(*inputs, rngs=rngs),
        dropping(*inputs, rngs=rngs),
        dropping(*inputs, rngs=nnx.Rngs(0)),
    )
    np.testing.assert_array_equal(dropping(*inputs, rngs=nnx.Rngs(dropout=0)), first)
    assert min(jnp.abs(first - layer(*inputs)).max(), jnp.abs(first - second).max()) > 1e-2
    assert jnp.isfinite(again).all()


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
    layer, inputs = _unequal(), _inputs()
    half = _unequal(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(half)), jnp.float32)
    out, weights = half(*inputs, return_weights=True)
    chex.assert_type([out, weights], [jnp.bfloat16, jnp.float32])
    want, want_weights = layer(*inputs, return_weights=True)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.15)
    np.testing.assert_allclose(weights, want_weights, atol=0.03)
    assert jnp.abs(out.astype(jnp.float32) - want).max() > 1e-4, "it was not computed in bfloat16"


def test_every_parameter_gets_a_gradient():
    inputs = _inputs()

    def loss(layer):
        return jnp.square(layer(*inputs, is_causal=True)).sum()

    gradients = nnx.to_pure_dict(nnx.state(jax.grad(loss)(_unequal())))
    # Adding one vector to every key moves all logits of a query alike, which softmax ignores.
    np.testing.assert_allclose(gradients["key"].pop("bias"), 0, atol=1e-3)
    for leaf in jax.tree.leaves(gradients):
        assert jnp.isfinite(leaf).all()
        assert jnp.abs(leaf).max() > 1e-2
