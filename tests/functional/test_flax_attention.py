"""The attentions of this library in the slot that Flax's layers have for one: Linen's and NNX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests.functional.test_contract import ATTENTIONS
from tfx_jax.functional import dot_product_attention, flax_attention_fn

D, N, K, H = 24, 4, 2, 6
DENSE = flax_attention_fn(dot_product_attention)


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _nnx(**options):
    return nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)


def _call_linen(layer, *arguments, **options):
    parameters = layer.init(jax.random.key(0), *arguments, **options)
    return layer.apply(parameters, *arguments, **options)


@pytest.mark.parametrize("batch", [(), (3,), (3, 2)], ids=str)
def test_equals_that_of_flax(batch):
    """With a mask of numbers, as Flax makes them, and any batch axes."""
    query, key, value = _draw(*batch, 5, N, H), _draw(*batch, 7, K, H, seed=1), _draw(*batch, 7, K, H, seed=2)
    mask = np.tril(np.ones((5, 7), np.float32), k=1) * np.ones((*batch, 1, 1, 1), np.float32)
    bias = _draw(*batch, N, 5, 7, seed=3)
    program = lambda attend: jax.jit(functools.partial(attend, bias=bias, mask=mask))  # noqa: E731
    found = program(DENSE)(query, key, value)
    np.testing.assert_allclose(found, program(nnx.dot_product_attention)(query, key, value), atol=1e-5)


def test_is_causal_from_the_beginning_of_both():
    """As Flax has it, where the number of queries is not that of keys, and beside a mask."""
    query, key = _draw(2, 5, N, H), _draw(2, 7, N, H, seed=1)
    mask = np.arange(7)[None, None, None] != 1
    options = {"mask": mask, "is_causal": True}
    found = jax.jit(functools.partial(DENSE, **options))(query, key, key)
    wanted = jax.jit(functools.partial(nnx.dot_product_attention, mask=mask & np.tril(np.ones((5, 7), bool))))
    np.testing.assert_allclose(found, wanted(query, key, key), atol=1e-5)


def test_computes_in_the_dtype_and_the_precision_of_the_layer():
    query = _draw(2, 5, N, H)
    assert DENSE(query, query, query, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    for precision in (jax.lax.Precision.HIGHEST, "highest"):
        traced = str(jax.make_jaxpr(functools.partial(DENSE, precision=precision))(query, query, query))
        assert traced.count("Precision.HIGHEST, Precision.HIGHEST") == 2, traced


def test_drops_only_where_the_layer_is_not_deterministic():
    query = _draw(2, 5, N, H)
    rng = jax.random.key(0)

    @jax.jit
    def attend(query):
        attend = functools.partial(DENSE, query, query, query)
        return attend(), *(attend(dropout_rate=0.5, dropout_rng=rng, deterministic=is_off) for is_off in (True, False))

    kept, deterministic, dropped = attend(query)
    np.testing.assert_array_equal(deterministic, kept)
    assert not np.allclose(dropped, kept)


def test_leaves_its_weights_in_either_layer():
    x = _draw(3, 5, D)

    @jax.jit
    def of_nnx(x):
        _, state = nnx.capture(_nnx(attention_fn=DENSE), nnx.Intermediate)(x, sow_weights=True)
        return state["attention_weights"].get_value()

    @jax.jit
    def of_linen(x):
        model = linen.MultiHeadAttention(N, attention_fn=DENSE)
        parameters = {"params": model.init(jax.random.key(0), x)["params"]}
        _, state = model.apply(parameters, x, sow_weights=True, mutable="intermediates")
        return state["intermediates"]["attention_weights"]

    for program in (of_nnx, of_linen):
        (weights,) = program(x)
        assert weights.shape == (3, N, 5, 5)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda attention: attention.name)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_any_attention_fits(attention, framework):
    """The layer traces with it, to the shapes of Flax's own."""
    attention_fn = flax_attention_fn(attention.attend)
    size = 8  # of a head, in the contract's options
    x = jax.ShapeDtypeStruct((2, 16, D), jnp.float32)
    if framework == "nnx":
        make = functools.partial(nnx.MultiHeadAttention, N, D, 4 * size, decode=False, attention_fn=attention_fn)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        out = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    else:
        layer = linen.MultiHeadAttention(N, qkv_features=4 * size, attention_fn=attention_fn)
        out = jax.eval_shape(functools.partial(_call_linen, layer), x)
    assert out.shape == x.shape
