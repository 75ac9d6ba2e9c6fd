"""Every attention compiles for a TPU, forward and backward, on a machine without one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tiers import slow_but
from tfx_jax.functional import decomposable_attention, dot_product_attention, kernel_regression
from tfx_jax.functional.attention import SPECS
from tfx_jax.planning.attentions import ATTENTIONS
from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.training.sharding.layers import shard_attention
from tfx_jax.training.sharding.strategies import make_mesh

CANNOT = {"cudnn": "is for NVIDIA GPUs: see test_lowers_for_cuda"}


@pytest.fixture(autouse=True)
def _as_programs_for_tpus_need_it():
    """Kernels multiply bfloat16 at the default precision only, and JAX cannot read such programs that were kept."""
    ordinary = jax.default_matmul_precision("default"), jax.numpy_dtype_promotion("standard")
    with ordinary[0], ordinary[1], without_compilation_cache():
        yield


def _compiled(attend, *shapes, mesh, axes=()):
    """The program of the output and the gradients of all arrays."""

    def forward_and_backward(*arrays):
        out, pull_back = jax.vjp(attend, *arrays)
        return out, pull_back(out)

    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes))) for shape in shapes]
    return jax.jit(forward_and_backward).lower(*like).compile().as_text()


@pytest.mark.aot
@pytest.mark.parametrize("name", slow_but(SPECS, "splash", "flash", "local"))
def test_every_core_compiles(tpu_devices, name):
    if name in CANNOT:
        pytest.skip(f"{name} {CANNOT[name]}")
    core = functools.partial(ATTENTIONS[name].make(128, 2, 32), is_causal=SPECS[name].causal)
    mesh = make_mesh(1, devices=tpu_devices("v5e:1x1"))
    program = _compiled(core, *[(1, 128, 2, 32)] * 3, mesh=mesh)
    assert ("tpu_custom_call" in program) == (name in ("splash", "flash"))


@pytest.mark.aot
@pytest.mark.slow
def test_what_is_no_core_compiles(tpu_devices):
    one = make_mesh(1, devices=tpu_devices("v5e:1x1"))
    _compiled(kernel_regression, (96, 3), (128, 3), (128, 2), mesh=one)
    layers = dict.fromkeys(("attend_fn", "compare_fn", "aggregate_fn"), jnp.tanh)
    _compiled(functools.partial(decomposable_attention, **layers), (2, 12, 8), (2, 10, 8), mesh=one)
    many = make_mesh(2, sequence=2, tensor=2, devices=tpu_devices("v5e:2x4"))
    ring = functools.partial(shard_attention(many), dot_product_attention, is_causal=True)
    assert "collective-permute" in _compiled(
        ring, *[(2, 128, 2, 32)] * 3, mesh=many, axes=("data", "sequence", "tensor")
    )
