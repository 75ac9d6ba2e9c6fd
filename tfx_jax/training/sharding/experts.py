"""Mixtures of experts on a mesh: each device routes its own tokens, and sends them to the devices of their experts."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tfx_jax.functional.moe import Exchange
from tfx_jax.nn.moe import ExpertsOnMesh, MixtureOfExperts
from tfx_jax.training.sharding.mesh_axes import BATCH_AXES, num_batch_shards

_BY_GROUP = P(BATCH_AXES)
_BY_EXPERT = P(tuple(axis for axis in BATCH_AXES if axis != "expert"), "expert")


def shard_experts(mesh: Mesh, model: nnx.Module) -> None:
    """Tells the mixtures of a model how tokens and experts lie on a mesh (GShard: Lepikhin et al., 2020, section 3.2).

    A mixture whose groups or experts the mesh does not divide evenly leaves the exchange to the compiler.
    """
    num_groups = num_batch_shards(mesh)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MixtureOfExperts):
            is_even = module.num_groups % num_groups == 0 and module.num_experts % mesh.shape["expert"] == 0
            exchange = _exchange(mesh) if mesh.shape["expert"] > 1 and is_even else None
            module.on_mesh = ExpertsOnMesh(num_groups, exchange)


@functools.cache  # the same functions for every layer and every trace, as parts of modules are compared
def _exchange(mesh: Mesh) -> Exchange:
    def exchanged(split: int, concatenated: int, before: P, after: P) -> Callable[[Array], Array]:
        return jax.shard_map(
            lambda buffers: jax.lax.all_to_all(buffers, "expert", split, concatenated, tiled=True),
            mesh=mesh,
            in_specs=before,
            out_specs=after,
        )

    return exchanged(1, 0, _BY_GROUP, _BY_EXPERT), exchanged(0, 1, _BY_EXPERT, _BY_GROUP)
