"""Attention on a mesh: with kernels each device attends by itself, and rings drop weights of their own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.functional import dot_product_attention
from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.planning.programs import collectives
from tfx_jax.training.sharding import layers as sharded_layers
from tfx_jax.training.sharding.layers import BATCH_AXES, shard_attention
from tfx_jax.training.sharding.strategies import make_mesh

DIMS = chex.Dimensions(B=4, T=6, S=5, N=4, K=2, H=8, U=3)


def test_rings_of_other_rows_and_heads_drop_other_weights():
    attend = shard_attention(make_mesh(2, sequence=2, tensor=2))
    x = np.broadcast_to(np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32), (2, 8, 2, 4))
    drop = jax.jit(lambda x, rng: attend(dot_product_attention, x, x, x, dropout_rate=0.5, dropout_rng=rng))
    out = drop(x, jax.random.key(0))
    assert len({np.asarray(out[row, :, head]).tobytes() for row in range(2) for head in range(2)}) == 4


@pytest.fixture
def compiling_for_tpus(tpu_devices):
    """`tpu_devices`, while kernels are given their precision, and programs are not kept that JAX could not read."""
    with jax.default_matmul_precision("default"), without_compilation_cache():
        yield tpu_devices


def _random(axes):
    return np.random.default_rng(len(axes)).normal(size=DIMS[axes]).astype(np.float32)


def _pairs(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": _pairs(1, 4, 6, 5), "mask": _pairs(4, 1, 1, 5) < 0.5},
        {"bias": _pairs(4, 1, 1, 5), "mask": _pairs(1, 1, 1, 5) < 0.5, "is_causal": True},
        {"segment_ids": (np.array([[1, 1, 2, 2, 3, 0]] * 4), np.array([[1, 2, 2, 3, 0]] * 2 + [[2, 1, 1, 3, 3]] * 2))},
        {"sinks": _pairs(4), "query_lengths": np.array([6, 3, 1, 0]), "key_lengths": np.array([5, 0, 2, 3])},
    ],
    ids=lambda options: "-".join(options),
)
def test_devices_together_attend_as_one_does(monkeypatch, options):
    """With gradients and weights, whatever comes with queries and keys; the formula is the kernel of each device."""
    arrays = {"query": _random("BTNH"), "key": _random("BSKH"), "value": _random("BSKU")}
    arrays |= {name: x for name, x in options.items() if name in ("bias", "sinks")}
    rest = {name: x for name, x in options.items() if name not in arrays}

    def answers(attend):
        def loss(arrays):
            out, weights = attend(**arrays, **rest, return_weights=True)
            return jnp.square(out - 1).sum() + jnp.square(weights).sum(), (out, weights)

        return jax.jit(jax.grad(loss, has_aux=True))(arrays)

    monkeypatch.setattr(sharded_layers, "_kernel", lambda core: "the formula")
    on_mesh = shard_attention(make_mesh(2, fsdp=2, tensor=2))
    got = answers(functools.partial(on_mesh, dot_product_attention))
    assert "tensor" in str(got[1][0].sharding.spec)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(answers(dot_product_attention)), atol=1e-5)


@pytest.mark.parametrize(
    ("by_device", "options"),
    [
        (True, {}),
        (True, {"mask": jax.ShapeDtypeStruct((4, 1, 1, 1024), jnp.bool_)}),
        (False, {"mask": jax.ShapeDtypeStruct((4, 1, 1024, 1024), jnp.bool_)}),
        (False, {"dropout_rng": jax.eval_shape(lambda: jax.random.key(0))}),
        (False, {"query": jax.ShapeDtypeStruct((4, 1023, 4, 8), jnp.float32)}),
    ],
    ids=str,
)
def test_each_device_attends_where_there_are_kernels_and_programs_are_else_what_they_were(by_device, options):
    like = jax.ShapeDtypeStruct((4, 1024, 4, 8), jnp.float32)
    arrays = {"query": like, "key": like, "value": like} | options
    attend = functools.partial(shard_attention(make_mesh(4, tensor=2)), dot_product_attention, dropout_rate=0.1)
    program = str(jax.make_jaxpr(lambda arrays: attend(**arrays))(arrays))
    assert ("shard_map" in program, "sharding_constraint" in program) == (by_device, not by_device)


def test_a_ring_has_the_sinks_of_its_heads():
    arrays = [_random(axes)[:, :4] for axes in ("BTNH", "BSKH", "BSKU")]
    attend = functools.partial(dot_product_attention, is_causal=True, sinks=_pairs(4))
    ring = functools.partial(shard_attention(make_mesh(2, sequence=2, tensor=2)), dot_product_attention)
    got = jax.jit(functools.partial(ring, is_causal=True, sinks=_pairs(4)))(*arrays)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(jax.jit(attend)(*arrays)), atol=1e-5)


def test_one_device_of_many_has_kernels_too():
    like = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
    attend = jax.jit(functools.partial(shard_attention(make_mesh(1)), dot_product_attention))
    assert "tpu_custom_call" in attend.trace(like, like, like).lower(lowering_platforms=("tpu",)).as_text()
    assert "shard_map" not in str(attend.trace(*(jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32),) * 3).jaxpr)


@pytest.mark.parametrize("shape", [(3, 8, 4, 8), (4, 8, 3, 8)], ids=["rows", "heads"])
def test_kernels_want_whole_rows_and_heads(shape):
    splash = functools.partial(dot_product_attention, implementation="splash")
    attend = functools.partial(shard_attention(make_mesh(2, fsdp=2, tensor=2)), splash)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(UserError, match=r'^config\.model\.attention\.name="splash" needs a batch and key heads that'):
        jax.eval_shape(attend, x, x, x)


@pytest.mark.aot
@pytest.mark.parametrize("implementation", slow_but(["splash", "flash", None], "splash", None))
def test_kernels_compile_for_a_mesh_and_exchange_nothing(compiling_for_tpus, implementation):
    mesh = make_mesh(2, fsdp=2, tensor=2, devices=compiling_for_tpus("v5e:2x4"))
    core = dot_product_attention
    if implementation:
        core = functools.partial(dot_product_attention, implementation=implementation)
    attend = functools.partial(shard_attention(mesh), core, is_causal=True)

    def like(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(BATCH_AXES, *spec)))

    x = like((8, 1024, 4, 64), jnp.bfloat16, None, "tensor")
    ids = like((8, 1024), jnp.int32)

    def gradients(query, key, value, ids):
        out, pull_back = jax.vjp(functools.partial(attend, segment_ids=ids), query, key, value)
        return pull_back(out)

    program = jax.jit(gradients).lower(x, x, x, ids).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    assert not collectives(program)


@pytest.mark.aot
def test_layers_keep_for_the_gradient_what_the_kernel_needs_alone(compiling_for_tpus):
    """And not what the formula would have needed on another platform: the weights of all pairs, of each layer."""
    mesh = make_mesh(1, devices=compiling_for_tpus("v5e:1x1"))
    x, scales = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        for shape in ((1, 1024, 4, 64), (3,))
    )

    def memory(**implementation):
        core = functools.partial(dot_product_attention, **implementation) if implementation else dot_product_attention
        attend = functools.partial(shard_attention(mesh), core, is_causal=True)

        def loss(x, scales):
            out, _ = jax.lax.scan(lambda x, scale: (x + attend(scale * x, x, x), None), x, scales)
            return out.astype(jnp.float32).sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, scales).compile()
        return program.memory_analysis().temp_size_in_bytes

    weights = 4 * 4 * 1024**2  # bytes, of one layer
    assert memory() <= memory(implementation="splash") < weights


def test_devices_drop_weights_of_their_own(monkeypatch):
    monkeypatch.setattr(sharded_layers, "_kernel", lambda core: "the formula")
    attend = shard_attention(make_mesh(2, tensor=2))
    x = np.broadcast_to(np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32), (2, 8, 2, 4))
    drop = jax.jit(lambda x, rng: attend(dot_product_attention, x, x, x, dropout_rate=0.5, dropout_rng=rng))
    out = drop(x, jax.random.key(0))
    assert len({np.asarray(out[row, :, head]).tobytes() for row in range(2) for head in range(2)}) == 4


@pytest.mark.aot
@pytest.mark.parametrize(
    "case",
    slow_but(
        [("bfloat16", 256, (4, 32), False), ("bfloat16", 1024, (2, 64), True), ("float32", 1024, (1, 256), False)]
    ),
    ids=str,
)
def test_rows_compile_for_a_tpu_with_dropout_and_keep_nothing(compiling_for_tpus, case):
    dtype, length, heads, is_causal = case
    mesh = make_mesh(2, tensor=1, devices=compiling_for_tpus("v5e:2x2"))
    attend = functools.partial(shard_attention(mesh), dot_product_attention, is_causal=is_causal, dropout_rate=0.1)

    def like(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(BATCH_AXES)))

    x, mask = like(2, length, *heads, dtype=dtype), like(2, 1, 1, length, dtype=bool)

    def gradients(query, key, value, mask, rng):
        out, pull_back = jax.vjp(functools.partial(attend, mask=mask, dropout_rng=rng), query, key, value)
        return pull_back(out)

    program = jax.jit(gradients).lower(x, x, x, mask, jax.eval_shape(lambda: jax.random.key(0))).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert not collectives(program.as_text())
    weights = heads[0] * length**2 * x.dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < weights
