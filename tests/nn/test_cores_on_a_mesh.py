"""What devices exchange where batch and heads are divided over a mesh and the compiler divides the work.

Rows and heads are independent in nearly all attentions, so devices that have different ones need nothing of each other,
forward or backward. But compilers gather whole arrays on each device for an operation that they cannot divide, such as
a scatter that names the rows by index.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attentions import ON_CPU, example
from tests.tiers import slow_but
from tfx_jax.functional import dot_product_attention
from tfx_jax.functional.attention import SPECS
from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.planning.programs import collectives

B, T, N, K, H = 4, 16, 8, 4, 8
EXCHANGED = {
    "talking_heads": {"dot_general"},  # its parameters mix logits and weights of all heads
    "routing": {"top_k"},  # XLA cannot divide the TopK of CPUs; a sort, which it can, takes more than ten times as long
    # As for routing; and the devices agree on the length of their loop over tiles, one number in each call.
    "moba": {"top_k", "reduce_max"},
    "native_sparse": {"top_k", "reduce_max"},
}
"""Attentions for which CPU devices exchange something, and the operations that need it."""


def _mesh(devices):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def _array(mesh, *shape, axes=("data",), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def _inputs(mesh, name):
    """Query, key and value; and gates, divided by heads too where they have any."""
    spec, config = SPECS[name], example(name)
    sizes = config.head_sizes(H)
    k = K if spec.grouped_queries else N
    inputs = {"query": (N, H), "key": (k, sizes.key), "value": (k, sizes.value)}
    gates = spec.gates(num_heads=N, num_kv_heads=k, d_k=H, **config.options.given) if spec.gates else {}
    per_row = [gate for gate in gates if gate.startswith("index_")]  # the heads of the indexer are others
    inputs, gates = (
        {
            key: _array(mesh, B, T, *shape, axes=("data",) if key in per_row else ("data", None, "model"))
            for key, shape in shapes.items()
        }
        for shapes in (inputs, gates)
    )
    return inputs, gates


def _calls(mesh, name):
    """Calls, as pairs of static options and arrays, that together take every option that hides keys."""
    spec = SPECS[name]
    causal = {"is_causal": True} if spec.causal else {}
    always = causal if spec.causal_only else {}
    padding = {"mask": _array(mesh, B, 1, 1, T, dtype=bool)}
    calls = [(always, {}), (always, padding), (causal | {"return_weights": True}, padding)]
    if spec.segments:
        calls.append((causal, {"segment_ids": _array(mesh, B, T, dtype=jnp.int32)}))
    if spec.bias:
        pairs = functools.partial(_array, mesh, B, N, T, T, axes=("data", "model"))
        calls.append((causal, {"mask": pairs(dtype=bool), "bias": pairs()}))
    if spec.dropout:
        calls.append((always | {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, {}))
    return calls


def _exchanged(attend, inputs, gates, calls):
    """What devices exchange in a program of all calls, with the gradients of query, key and value of each."""

    def outputs_and_gradients(inputs, gates, options, arrays):
        def loss(inputs):
            outputs = attend(**inputs, **gates, **options, **arrays)
            return sum(jnp.square(x).sum() for x in jax.tree.leaves(outputs)), outputs

        return jax.grad(loss, has_aux=True)(inputs)

    static_options, arrays = zip(*calls, strict=True)

    @jax.jit
    def program(inputs, gates, arrays):
        return [outputs_and_gradients(inputs, gates, *call) for call in zip(static_options, arrays, strict=True)]

    return collectives(program.lower(inputs, gates, arrays).compile().as_text())


def _exchanged_by(mesh, name):
    inputs, gates = _inputs(mesh, name)
    attend = example(name).make(N, H, num_kv_heads=inputs["key"].shape[2], rngs=nnx.Rngs(0))
    return _exchanged(attend, inputs, gates, _calls(mesh, name))


@pytest.mark.parametrize("name", slow_but(ON_CPU, "routing", "moba", "strided"))
def test_cpu_devices_with_other_rows_and_heads_exchange_nothing(name):
    exchanged = _exchanged_by(_mesh(jax.devices()[:4]), name)
    assert bool(exchanged) == (name in EXCHANGED), exchanged
    if jax.__version_info__ < (0, 11):  # newer versions name the operations around it
        operations = {exchange.source.rpartition("/")[2].rstrip(")") for exchange in exchanged}
        assert operations == EXCHANGED.get(name, set())


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_lengths_of_rows_exchange_nothing(implementation):
    """With fewer queries than keys, the position of a query depends on the length of its row."""
    mesh = _mesh(jax.devices()[:4])
    inputs, _ = _inputs(mesh, "dense")
    inputs["query"] = _array(mesh, B, 3, N, H, axes=("data", None, "model"))
    attend = functools.partial(dot_product_attention, implementation=implementation, is_causal=True)
    assert not _exchanged(attend, inputs, {}, [({}, {"key_lengths": _array(mesh, B, dtype=jnp.int32)})])


@pytest.mark.aot
def test_tpus_exchange_nothing_for_what_cpus_cannot_divide(tpu_devices):
    with jax.default_matmul_precision("default"), without_compilation_cache():
        assert not _exchanged_by(_mesh(tpu_devices("v5e:2x2")), "routing")
