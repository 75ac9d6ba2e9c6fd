"""What every attention promises, so that any of them can be the `attention_fn` of any model.

To add an attention: write its oracle in `oracles/`, from the paper and in float64 NumPy, and one entry in ATTENTIONS.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.functional.oracles.additive import additive_weights, general_weights
from tests.functional.oracles.clustered import routing_centroids, routing_weights
from tests.functional.oracles.dense import dense_weights, mixed
from tests.functional.oracles.favor import favor_weights, linear_weights
from tests.functional.oracles.hard import most_probable
from tests.functional.oracles.lsh import lsh_weights
from tests.functional.oracles.relative import relative_weights
from tests.functional.oracles.sparse import block_pairs, local_pairs, weights_over, window_pairs
from tfx_jax.functional import (
    additive_attention,
    bigbird_attention,
    bigbird_block_mask,
    causal_mask,
    chunked_attention,
    dot_product_attention,
    favor_attention,
    general_attention,
    hard_attention,
    linear_attention,
    local_attention,
    lsh_attention,
    relative_attention,
    ring_attention,
    routing_attention,
    sliding_window_attention,
)

EVERYTHING = frozenset({"bias", "mask", "segments", "cross", "grouped", "causal"})


class Attention(NamedTuple):
    """An entry of the contract."""

    name: str
    attend: Callable[..., Any]
    """The function, its own options bound."""
    oracle: Callable[..., np.ndarray]
    """`oracle(query, key, *, bias, mask, is_causal)` gives the weights, float64 [B, N, T, S]."""
    takes: frozenset[str] = EVERYTHING
    """Of EVERYTHING: a bias and a mask of all pairs, segment_ids, T != S, K < N, is_causal; "future": never causal."""
    dense: Callable[..., Any] | None = None
    """The function with the options under which it equals dense attention."""
    is_lean: bool = False
    """Whether it promises never to hold an array of T x S, forward or backward."""


_projection = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
BIGBIRD = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 1}


def _bigbird_pairs(t, _):
    return block_pairs(bigbird_block_mask(6, **BIGBIRD), t, block_size=2)


def _transformer_xl(query, key):
    """The parameters of relative attention; eighths, so that bfloat16 holds them exactly."""
    (_, t, n, h), s = query.shape, key.shape[1]
    random = np.random.default_rng(3)
    shapes = {"relative_key": (s + t - 1, n, h), "content_bias": (n, h), "position_bias": (n, h)}
    return {name: np.round(8 * random.normal(size=shape)).astype(np.float32) / 8 for name, shape in shapes.items()}


def _attend_transformer_xl(query, key, *args, **options):
    parameters = {name: jnp.asarray(x) for name, x in _transformer_xl(query, key).items()}
    return relative_attention(query, key, *args, **parameters, **options)


def _transformer_xl_weights(query, key, **options):
    return relative_weights(query, key, **_transformer_xl(query, key), **options)


def _parameters(**shapes):
    random = np.random.default_rng(3)
    return {name: jnp.asarray(random.normal(size=shape) / 2, jnp.float32) for name, shape in shapes.items()}


_ADDITIVE = _parameters(w_query=(8, 5), w_key=(8, 5), v=(5,))
_GENERAL = _parameters(w=(8, 8))


def _routing(query, *arguments, **options):
    centroids = routing_centroids(query.shape)
    return routing_attention(query, *arguments, centroids=jnp.asarray(centroids), **options)


def _ring(query, key, value, bias=None, mask=None, *, segment_ids=None, return_weights=False, **options):
    """Of whole arrays: half of the sequence on each of two devices; the other devices do the same once more."""
    mesh = jax.make_mesh((2, 4), ("sequence", "copy"), axis_types=(AxisType.Auto, AxisType.Auto))
    attend = functools.partial(ring_attention, axis_name="sequence", chunk_size=4, return_weights=return_weights)
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, "segment_ids": segment_ids}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    sequence = P(None, "sequence")
    specs = {name: P(None, None, None, "sequence") if name in ("bias", "mask") else sequence for name in arrays}
    return jax.shard_map(
        lambda arrays: attend(**arrays, **options),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(sequence, P(None, None, "sequence")) if return_weights else sequence,
    )(arrays)


ATTENTIONS = (
    Attention("dense", dot_product_attention, dense_weights),
    Attention(
        "favor",
        functools.partial(favor_attention, projection=_projection, block_size=8),
        functools.partial(favor_weights, projection=_projection),
        takes=frozenset({"cross", "grouped", "causal"}),
        is_lean=True,
    ),
    Attention(
        "linear", linear_attention, linear_weights, takes=frozenset({"cross", "grouped", "causal"}), is_lean=True
    ),
    Attention(
        "local",
        functools.partial(local_attention, block_size=5),
        functools.partial(weights_over, functools.partial(local_pairs, block_size=5)),
        takes=EVERYTHING - {"bias", "mask"},
        dense=functools.partial(local_attention, block_size=17),
        is_lean=True,
    ),
    Attention(
        "window",
        functools.partial(sliding_window_attention, window=(3, 2), block_size=4),
        functools.partial(weights_over, functools.partial(window_pairs, back=3, ahead=2)),
        takes=EVERYTHING - {"bias", "mask"},
        dense=functools.partial(sliding_window_attention, window=16),
        is_lean=True,
    ),
    Attention(
        "bigbird",
        functools.partial(bigbird_attention, block_size=2, **BIGBIRD),
        functools.partial(weights_over, _bigbird_pairs),
        takes=EVERYTHING - {"bias", "mask", "cross", "causal"},
        dense=functools.partial(bigbird_attention, block_size=2, **BIGBIRD | {"num_random_blocks": 6}),
        is_lean=True,
    ),
    Attention("relative", _attend_transformer_xl, _transformer_xl_weights),
    Attention(
        "additive",
        functools.partial(additive_attention, **_ADDITIVE),
        functools.partial(additive_weights, **_ADDITIVE),
    ),
    Attention(
        "general",
        functools.partial(general_attention, **_GENERAL),
        functools.partial(general_weights, **_GENERAL),
        dense=functools.partial(general_attention, w=jnp.eye(8) * 8**-0.5),
    ),
    Attention("hard", hard_attention, most_probable),
    # Causal up to rounding only, and equal to dense attention under shared queries and keys: see test_lsh.py.
    Attention(
        "lsh",
        functools.partial(lsh_attention, rng=jax.random.key(0), num_hashes=2, num_buckets=4, chunk_size=4),
        functools.partial(lsh_weights, rng=jax.random.key(0), num_hashes=2, num_buckets=4, chunk_size=4),
        takes=frozenset({"segments"}),
        is_lean=True,
    ),
    # Later tokens change which tokens a cluster takes, and attention is on normalised vectors: see test_clustered.py.
    Attention("routing", _routing, routing_weights, takes=frozenset({"segments", "cross", "grouped"}), is_lean=True),
    Attention(
        "chunked",
        functools.partial(chunked_attention, chunk_size=5),
        dense_weights,
        dense=functools.partial(chunked_attention, chunk_size=7),
        is_lean=True,
    ),
    # Every device has as many queries and as many keys as the others: T != S is in test_ring.py.
    Attention("ring", _ring, dense_weights, takes=EVERYTHING - {"bias", "mask", "cross"}, dense=_ring, is_lean=True),
)

every = pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: case.name)


def having(feature):
    cases = [case for case in ATTENTIONS if feature in case.takes]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def _inputs(case, seed=0, dtype=jnp.float32, b=2, t=12, n=4):
    """Query, key and value of sizes that all differ, as far as the case can take them."""
    random = np.random.default_rng(seed)
    s = 17 if "cross" in case.takes else t
    k = n // 2 if "grouped" in case.takes else n
    shapes = (b, t, n, 8), (b, s, k, 8), (b, s, k, 6)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def _padding(key, hidden=(3, 4, 11)):
    """Hides some keys of every row, and all of them of the last."""
    seen = np.ones((key.shape[0], 1, 1, key.shape[1]), bool)
    seen[:, ..., list(hidden)] = False
    seen[-1] = False
    return seen


def _masks(case, query, key):
    yield {}
    yield {"mask": _padding(key)}
    if "causal" in case.takes:
        yield {"is_causal": True, "mask": _padding(key, hidden=(5,))}
    random = np.random.default_rng(1)
    pairs = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if "mask" in case.takes:
        yield {"mask": random.random(pairs) < 0.5}
    if "bias" in case.takes:
        yield {"bias": random.normal(size=pairs).astype(np.float32)}


def _jitted(case, **options):
    options = {"return_weights": True} | options
    return jax.jit(functools.partial(case.attend, **options))


@every
def test_equals_its_oracle(case):
    query, key, value = _inputs(case)
    for options in _masks(case, query, key):
        is_causal = options.get("is_causal", False)
        arrays = {name: x for name, x in options.items() if name != "is_causal"}
        out, weights = _jitted(case, is_causal=is_causal)(query, key, value, **arrays)
        want = case.oracle(query, key, **options)
        np.testing.assert_allclose(weights, want, atol=1e-5, err_msg=str(options.keys()))
        np.testing.assert_allclose(out, mixed(want, value), atol=1e-5, err_msg=str(options.keys()))
        assert (out.dtype, weights.dtype) == (jnp.float32, jnp.float32)


@every
def test_weights_are_a_distribution_or_nothing_and_asking_for_them_changes_nothing(case):
    query, key, value = _inputs(case)
    mask = _padding(key)
    out, weights = _jitted(case)(query, key, value, mask=mask)
    weights = np.asarray(weights)
    assert (weights[..., ~mask[0, 0, 0]] == 0).all()
    sees_something = case.oracle(query, key, mask=mask).any(axis=-1)  # routing may leave a query out
    np.testing.assert_allclose(weights.sum(axis=-1), sees_something, atol=1e-5)
    np.testing.assert_array_equal(weights[-1], 0)
    np.testing.assert_allclose(out, _jitted(case, return_weights=False)(query, key, value, mask=mask), atol=1e-6)


@every
def test_hidden_keys_change_nothing_bit_for_bit(case):
    query, key, value = _inputs(case)
    mask = _padding(key)
    attend = _jitted(case, return_weights=False)
    hidden = ~mask[:, 0, 0, :, None, None]
    before = attend(query, key, value, mask=mask)
    for junk in (-3.0, 1e4):
        after = attend(query, jnp.where(hidden, junk, key), jnp.where(hidden, junk, value), mask=mask)
        np.testing.assert_array_equal(before, after)


@having("causal")
def test_the_future_changes_nothing_bit_for_bit(case):
    query, key, value = _inputs(case._replace(takes=case.takes - {"cross"}))
    attend = _jitted(case, is_causal=True, return_weights=False)
    before = np.asarray(attend(query, key, value))
    for token in (1, 5, 11):
        later = (jnp.arange(12) >= token)[None, :, None, None]
        after = attend(*(jnp.where(later, x - 1.5, x) for x in (query, key, value)))
        np.testing.assert_array_equal(before[:, :token], np.asarray(after)[:, :token])
        assert not np.array_equal(before[:, token:], np.asarray(after)[:, token:])


@every
def test_queries_without_keys_are_zero_with_finite_gradients(case):
    query, key, value = _inputs(case)
    mask = _padding(key)

    def loss(inputs):
        out = case.attend(*inputs, mask=mask)
        return jnp.square(out - 1.0).sum(), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))((query, key, value))
    np.testing.assert_array_equal(out[-1], 0)
    chex.assert_tree_all_finite(gradients)
    np.testing.assert_array_equal(gradients[0][-1], 0)


@every
def test_gradients_equal_central_differences_of_the_oracle(case):
    inputs = _inputs(case)
    mask = _padding(inputs[1])
    random = np.random.default_rng(2)
    directions = [random.normal(size=x.shape) for x in inputs]
    cotangent = random.normal(size=(*inputs[0].shape[:3], inputs[2].shape[-1]))

    def oracle(step):
        query, key, value = (np.asarray(x, np.float64) + step * d for x, d in zip(inputs, directions, strict=True))
        return (mixed(case.oracle(query, key, mask=mask), value) * cotangent).sum()

    want = (oracle(1e-6) - oracle(-1e-6)) / 2e-6

    def loss(inputs):
        return (case.attend(*inputs, mask=mask) * cotangent.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(loss))(inputs)
    got = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@every
def test_bfloat16_is_close_and_stays_bfloat16(case):
    inputs = _inputs(case, dtype=jnp.bfloat16)
    mask = _padding(inputs[1])

    def loss(inputs):
        out, weights = case.attend(*inputs, mask=mask, return_weights=True)
        return out.astype(jnp.float32).sum(), (out, weights)

    gradients, (out, weights) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    chex.assert_tree_all_finite((gradients, out, weights))
    want = case.oracle(*(x.astype(jnp.float32) for x in inputs[:2]), mask=mask)
    np.testing.assert_allclose(out.astype(jnp.float32), mixed(want, inputs[2].astype(jnp.float32)), atol=3e-2)
    huge = jax.jit(case.attend)(*(x * 1e3 for x in inputs), mask=mask)
    chex.assert_tree_all_finite(huge)


@every
def test_equals_dense_attention_in_its_limit(case):
    if case.dense is None:
        pytest.skip("has no limit in which it is dense")
    inputs = _inputs(case)
    for options in ({}, {"is_causal": True}) if "causal" in case.takes else ({},):
        mask = _padding(inputs[1])
        got = jax.jit(functools.partial(case.dense, **options))(*inputs, mask=mask)
        np.testing.assert_allclose(got, dot_product_attention(*inputs, mask=mask, **options), atol=1e-5)


@every
def test_vmap_remat_and_scan(case):
    inputs = _inputs(case)
    one_by_one = jax.jit(jax.vmap(lambda *x: case.attend(*(a[None] for a in x))[0]))(*inputs)
    np.testing.assert_allclose(one_by_one, jax.jit(case.attend)(*inputs), atol=1e-5)

    def layer(scale, _):
        return scale, jnp.square(case.attend(scale * inputs[0], *inputs[1:])).sum()

    def total(scale, body):
        return jax.lax.scan(body, scale, length=2)[1].sum()

    def plain(scale):
        return 2 * layer(scale, None)[1]

    got = jax.jit(jax.value_and_grad(functools.partial(total, body=jax.checkpoint(layer))))(0.7)
    chex.assert_trees_all_close(got, jax.jit(jax.value_and_grad(plain))(0.7), rtol=1e-4, atol=1e-4)


@every
def test_sharded_over_batch_and_heads(case):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    inputs = _inputs(case, n=8)
    placed = (jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in inputs)
    mask = _padding(inputs[1])
    attend = jax.jit(case.attend)
    got = attend(*placed, mask=jax.device_put(mask, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got, attend(*inputs, mask=mask), atol=1e-5)


@having("segments")
def test_packed_segments_see_themselves_only(case):
    query, key, value = _inputs(case._replace(takes=case.takes - {"cross"}))
    ids = jnp.array([[1] * 5 + [2] * 6 + [0], [3] * 12])
    same = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids != 0)[:, None, :, None]
    out = _jitted(case, return_weights=False)(query, key, value, segment_ids=ids)
    np.testing.assert_allclose(out, mixed(case.oracle(query, key, mask=np.asarray(same)), value), atol=1e-5)


@every
def test_a_mask_of_all_pairs_is_taken_or_refused(case):
    query, key, value = _inputs(case)
    mask = jnp.broadcast_to(causal_mask(12, key.shape[1]), (1, 1, 12, key.shape[1]))
    if "mask" in case.takes:
        assert case.attend(query, key, value, mask=mask).shape == (*query.shape[:3], value.shape[-1])
    else:
        with pytest.raises(ValueError, match=r"is_causal.*segment_ids|segment_ids.*is_causal"):
            case.attend(query, key, value, mask=mask)


@pytest.mark.parametrize("case", [case for case in ATTENTIONS if case.is_lean], ids=lambda case: case.name)
def test_never_holds_an_array_of_all_pairs(case):
    length = 8192
    like = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.bool_)

    def loss(query, key, value, mask):
        return jnp.square(case.attend(query, key, value, mask=mask)).sum()

    for fn in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        used = jax.jit(fn).lower(like, like, like, mask).compile().memory_analysis().temp_size_in_bytes
        assert used < length * length  # a quarter of a float32 for each pair
