"""The attentions of this library in the slot that Flax's layers have for one: Linen's and NNX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tests.functional.attention.test_contract import ATTENTIONS, one_of_each_kind
from tfx_jax.functional import (
    additive_attention,
    aligned_attention,
    bigbird_attention,
    chunked_attention,
    dot_product_attention,
    favor_attention,
    flax_attention_fn,
    general_attention,
    hard_attention,
    linear_attention,
    local_attention,
    longformer_attention,
    lsh_attention,
    nystrom_attention,
    orthogonal_features,
    relative_attention,
    routing_attention,
    sinusoidal_positions,
    sliding_window_attention,
)

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


@one_of_each_kind(ATTENTIONS)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_any_attention_fits(case, framework):
    """The layer traces with it, to the shapes of Flax's own."""
    attention_fn = flax_attention_fn(case.attend)
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


def _by_distance(query, key, *arguments, **options):
    """Relative attention with encodings of the distances, however many there are."""
    distances = jnp.arange(key.shape[1] - 1, -query.shape[1], -1)
    relative_key = sinusoidal_positions(distances, H)[:, None] * jnp.ones((1, N, 1))
    biases = {name: jnp.full((N, H), 0.3) for name in ("content_bias", "position_bias")}
    return relative_attention(query, key, *arguments, relative_key=relative_key, **biases, **options)


def _parameters(*shapes):
    return [jnp.asarray(_draw(*shape, seed=seed)) for seed, shape in enumerate(shapes)]


_W, _V = _parameters((H, H), (H,))
STEPPING = {
    "dense": dot_product_attention,
    "chunked": functools.partial(chunked_attention, chunk_size=2),
    "window": functools.partial(sliding_window_attention, window=2),
    "wide window": functools.partial(sliding_window_attention, window=(3, 2), block_size=2),
    "local": functools.partial(local_attention, block_size=3),
    "relative": _by_distance,
    "hard": hard_attention,
    "additive": functools.partial(additive_attention, w_query=_W, w_key=_W + 1, v=_V),
    "general": functools.partial(general_attention, w=_W),
    "linear": linear_attention,
    "favor": functools.partial(favor_attention, projection=orthogonal_features(jax.random.key(0), 8, H)),
    "aligned": functools.partial(aligned_attention, position=jnp.full((1, 1, 1), 2.0), window=2),
}
QUICK = ("window", "local", "relative", "linear")
LENGTH, ROOM = 7, 3


def _decoded_by_nnx(attention_fn, x, is_causal):
    layer = nnx.MultiHeadAttention(N, D, decode=True, rngs=nnx.Rngs(0), attention_fn=attention_fn)
    layer.init_cache((2, LENGTH + ROOM, D))
    graphdef, state = nnx.split(layer)

    @jax.jit
    def step(state, x):
        layer = nnx.merge(graphdef, state)
        out = layer(x, is_causal=is_causal)
        return nnx.state(layer), out

    outs = []
    for place in range(LENGTH):
        state, out = step(state, x[:, place : place + 1])
        outs.append(out)
    return np.concatenate(outs, axis=1)


def _decoded_by_linen(attention_fn, x, parameters):
    layer = linen.MultiHeadAttention(N, decode=True, attention_fn=attention_fn)
    cache = jax.jit(lambda x: layer.init(jax.random.key(0), x)["cache"])(np.zeros((2, LENGTH + ROOM, D), np.float32))
    step = jax.jit(lambda cache, x: layer.apply({"params": parameters, "cache": cache}, x, mutable=["cache"]))
    outs = []
    for place in range(LENGTH):
        out, new = step(cache, x[:, place : place + 1])
        cache = new["cache"]
        outs.append(out)
    return np.concatenate(outs, axis=1)


def _cases(quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in STEPPING]


@pytest.mark.parametrize("is_causal", [False, True], ids=["as it is", "asked for causality"])
@pytest.mark.parametrize("name", _cases(QUICK))
def test_decoding_in_nnx_equals_a_causal_pass(name, is_causal):
    """Also if the layer is told once more that it is causal, which its mask says already."""
    x = _draw(2, LENGTH, D)
    attention_fn = flax_attention_fn(STEPPING[name])
    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn)
    graphdef, state = nnx.split(layer)
    expected = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, is_causal=True))(state, x)
    np.testing.assert_allclose(_decoded_by_nnx(attention_fn, x, is_causal), expected, atol=1e-5)


@pytest.mark.parametrize("name", _cases(("local",)))
def test_decoding_in_linen_equals_a_causal_pass(name):
    x = _draw(2, LENGTH, D)
    causal = flax_attention_fn(functools.partial(STEPPING[name], is_causal=True))
    layer = linen.MultiHeadAttention(N, attention_fn=causal)
    parameters = jax.jit(lambda x: layer.init(jax.random.key(0), x)["params"])(x)
    expected = jax.jit(lambda x: layer.apply({"params": parameters}, x))(x)
    found = _decoded_by_linen(flax_attention_fn(STEPPING[name]), x, parameters)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (
            functools.partial(routing_attention, centroids=jnp.ones((N, 2, H)), window=4),
            "routing.*all tokens.*decode=True",
        ),
        (
            functools.partial(lsh_attention, rng=jax.random.key(0), num_buckets=2),
            "needs as many keys as queries, got 1 queries and 10 keys",
        ),
        (functools.partial(longformer_attention, window=2), "needs as many keys as queries, got 1 queries and 10 keys"),
        (nystrom_attention, "needs as many keys as queries, got 1 queries and 10 keys"),
        (
            functools.partial(
                bigbird_attention, block_size=2, num_global_blocks=1, num_window_blocks=3, num_random_blocks=0
            ),
            "needs as many keys as queries, got 1 queries and 10 keys",
        ),
    ],
    ids=["routing", "lsh", "longformer", "nystrom", "bigbird"],
)
def test_attentions_of_whole_sequences_refuse_to_decode(attend, message):
    query, key = (jax.ShapeDtypeStruct((2, length, N, H), jnp.float32) for length in (1, 10))
    mask = jax.ShapeDtypeStruct((2, 1, 1, 10), jnp.bool_)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k, mask: flax_attention_fn(attend)(q, k, k, mask=mask), query, key, mask)


def test_an_attention_without_the_wrapper_is_refused_by_flax():
    layer = nnx.MultiHeadAttention(4, 8, attention_fn=dot_product_attention, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'broadcast_dropout'"):
        layer(jnp.ones((1, 3, 8)))
