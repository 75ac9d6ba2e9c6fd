"""Ring attention over eight devices is dense attention of the whole sequence, and no device ever holds it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.functional.attention.oracles.dense import dense_weights, mixed
from tfx_jax.functional import dot_product_attention, ring_attention

DIMS = chex.Dimensions(B=2, T=24, S=40, N=4, K=2, H=8, U=6)  # 3 queries and 5 keys on each of 8 devices
SEQUENCE, PAIRS = P(None, "sequence"), P(None, None, None, "sequence")


def _inputs(dims=DIMS, seed=0):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=dims[axes]).astype(np.float32) for axes in ("BTNH", "BSKH", "BSKU"))


def _ring(num_devices=8, **options):
    """Ring attention of whole arrays: query, key, value, bias, mask, ids of queries and of keys, PRNG key."""
    mesh = jax.make_mesh((num_devices,), ("sequence",), axis_types=(AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", **options)

    def on_a_device(query, key, value, bias=None, mask=None, query_ids=None, key_ids=None, rng=None):
        ids = None if query_ids is None else (query_ids, key_ids)
        return attend(query, key, value, bias, mask, segment_ids=ids, dropout_rng=rng)

    specs = (SEQUENCE, SEQUENCE, SEQUENCE, PAIRS, PAIRS, SEQUENCE, SEQUENCE, P())
    out_specs = (SEQUENCE, P(None, None, "sequence")) if options.get("return_weights") else SEQUENCE

    def whole(*arrays):
        return jax.shard_map(on_a_device, mesh=mesh, in_specs=specs[: len(arrays)], out_specs=out_specs)(*arrays)

    return whole


def _gradients(attend, arrays, *others):
    """Of the square distance to 1, with respect to query, key, value and bias; and the output."""

    def loss(arrays):
        out = attend(*arrays, *others)
        return jnp.square(out - 1.0).sum(), out

    return jax.jit(jax.grad(loss, has_aux=True))(arrays)


def _bias():
    return np.random.default_rng(1).normal(size=(1, DIMS.N, 1, DIMS.S)).astype(np.float32)


def _padding():
    return np.arange(DIMS.S)[None, None, None] < np.array([31, 40])[:, None, None, None]


def test_with_causality_padding_bias_and_segments_and_all_gradients():
    query_ids = np.array([[1] * 10 + [2] * 14, [3] * 22 + [0] * 2])
    key_ids = np.array([[1] * 17 + [2] * 23, [3] * 38 + [0] * 2])
    mask = _padding()
    mask[..., 2] = False
    arrays = (*_inputs(), _bias())
    got = _gradients(_ring(is_causal=True, chunk_size=2), arrays, mask, query_ids, key_ids)
    same = (query_ids[:, None, :, None] == key_ids[:, None, None]) & (query_ids != 0)[:, None, :, None]
    seen = mask & same & np.tri(DIMS.T, DIMS.S, DIMS.S - DIMS.T, dtype=bool)[None, None]
    want = _gradients(dot_product_attention, arrays, seen)
    assert not seen.any(axis=-1).all()
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(got[1])[1, -2:], 0)


@pytest.mark.parametrize(
    ("window", "is_causal"),
    [((9, 4), False), pytest.param(7, True, marks=pytest.mark.slow)],
    ids=["both sides", "past"],
)
def test_soft_cap_sinks_and_window_with_all_gradients(window, is_causal):
    """The sinks are counted once, not on each device, and their gradient comes from all of them."""
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,))
    options = {"logits_soft_cap": 1.5, "local_window_size": window, "is_causal": is_causal, "return_weights": True}
    attend = functools.partial(ring_attention, axis_name="sequence", chunk_size=2, **options)
    specs = {"in_specs": (SEQUENCE, SEQUENCE, SEQUENCE, P()), "out_specs": (SEQUENCE, P(None, None, "sequence"))}
    ring = jax.shard_map(lambda *x: attend(*x[:3], sinks=x[3]), mesh=mesh, **specs)

    def answers(attend):
        def loss(arrays):
            out, weights = attend(*arrays)
            return jnp.square(out - 1.0).sum(), (out, weights)

        return jax.jit(jax.grad(loss, has_aux=True))((*_inputs(), np.float32([0.5, -1, 0, 2])))

    want = answers(lambda *x: dot_product_attention(*x[:3], sinks=x[3], **options))
    chex.assert_trees_all_close(answers(ring), want, atol=2e-5, rtol=1e-5)


def test_more_queries_than_keys_with_causality():
    """Bottom-right: the first queries of the whole sequence, on several devices, see nothing."""
    dims = chex.Dimensions(B=1, T=32, S=16, N=2, K=1, H=8, U=6)
    got = _gradients(_ring(is_causal=True, chunk_size=3), _inputs(dims))
    want = _gradients(functools.partial(dot_product_attention, is_causal=True), _inputs(dims))
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(got[1])[:, :16], 0)


def test_weights_over_the_keys_of_all_devices():
    mask, bias = _padding(), _bias()
    query_ids, key_ids = np.ones((2, DIMS.T), int), np.ones((2, DIMS.S), int)
    key_ids[:, 5] = 2
    attend = jax.jit(_ring(is_causal=True, return_weights=True))
    out, weights = attend(*_inputs(), bias, mask, query_ids, key_ids)
    query, key, value = _inputs()
    want = dense_weights(query, key, bias=bias, mask=mask & (key_ids == 1)[:, None, None], is_causal=True)
    assert weights.dtype == jnp.float32
    chex.assert_trees_all_close((out, weights), (mixed(want, value), want), atol=1e-5)


def test_dropout_differs_between_devices_and_its_gradient_agrees():
    """Values are unit vectors: the output is the dropped weights, and linear in the values with those as slopes."""
    dims = chex.Dimensions(B=1, T=64, S=64, N=1, K=1, H=8, U=64)
    query, key, _ = _inputs(dims)
    value = np.eye(64, dtype=np.float32)[None, :, None]
    attend = _ring(chunk_size=4, dropout_rate=0.3)

    def loss(value):
        out = attend(query, key, value, None, None, None, None, jax.random.key(0))
        return (out * jnp.arange(64.0)[None, :, None, None]).sum(), out

    gradient, out = map(np.asarray, jax.jit(jax.grad(loss, has_aux=True))(value))
    is_dropped = out[0, :, 0] == 0
    sigma = np.sqrt(0.3 * 0.7 / is_dropped.size)
    assert abs(is_dropped.mean() - 0.3) < 3 * sigma
    blocks = is_dropped.reshape(16, 4, 16, 4).transpose(0, 2, 1, 3).reshape(256, 16)
    assert len(np.unique(blocks, axis=0)) > 240  # of 256; were a pattern repeated on each device, 32 at most
    want = (out[0, :, 0] * np.arange(64, dtype=np.float32)[:, None]).sum(axis=0)
    np.testing.assert_allclose(gradient[0, :, 0], np.broadcast_to(want[:, None], (64, 64)), rtol=1e-4)


def test_no_device_ever_holds_all_keys():
    """Forward and backward, temporary memory of a device is of the size of its share, and nothing is gathered."""

    def program(num_devices, length):
        like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        attend = _ring(num_devices, is_causal=True, chunk_size=128)

        def loss(query, key, value):
            return jnp.square(attend(query, key, value)).sum()

        mesh = jax.make_mesh((num_devices,), ("sequence",), axis_types=(AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, SEQUENCE)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), in_shardings=sharding).lower(like, like, like).compile()

    ring, alone = program(8, 65536), program(1, 8192)
    text = ring.as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert "all-to-all" not in text
    used, used_alone = (x.memory_analysis().temp_size_in_bytes for x in (ring, alone))
    # Eight times the sequence on eight devices is the same for each, but for blocks that travel: those of jax 0.12 have
    # a second buffer, to be sent from while the next ones arrive.
    assert used < 2.5 * used_alone
    assert used < 2 * 65536 * 16 * 4  # all keys and values, without anything else


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_differs_between_queries_is_refused(name):
    pairs = np.ones((1, 1, 3, 5), bool if name == "mask" else np.float32)
    query, key, value = (x[:, : 3 if x.shape[1] == 24 else 5] for x in _inputs())
    with pytest.raises(ValueError, match=rf"{name} must have shape .* between 3 queries.*is_causal .* segment_ids"):
        ring_attention(query, key, value, axis_name="sequence", **{name: pairs})
