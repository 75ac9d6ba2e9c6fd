"""Mixtures of experts on a mesh: each device routes its own tokens and sends them to the devices of their experts."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tfx_jax.functional.moe import Exchange
from tfx_jax.training.sharding.mesh_axes import BATCH_AXES, num_batch_shards

_BY_GROUP = P(BATCH_AXES)
_BY_EXPERT = P(tuple(axis for axis in BATCH_AXES if axis != "expert"), "expert")


def expert_exchange(mesh: Mesh, num_groups: int, num_experts: int) -> Exchange | None:
    """Returns functions that send tokens to the devices of their experts and back (Lepikhin et al., 2020, section 3.2).

    Returns None if every device has all experts, or the mesh does not divide groups and experts evenly; the compiler
    then chooses how to move tokens.
    """
    if mesh.shape["expert"] == 1 or num_groups % num_batch_shards(mesh) or num_experts % mesh.shape["expert"]:
        return None

    def exchanged(split: int, concatenated: int, before: P, after: P) -> Callable[[Array], Array]:
        return jax.shard_map(
            lambda buffers: jax.lax.all_to_all(buffers, "expert", split, concatenated, tiled=True),
            mesh=mesh,
            in_specs=before,
            out_specs=after,
        )

    return exchanged(1, 0, _BY_GROUP, _BY_EXPERT), exchanged(0, 1, _BY_EXPERT, _BY_GROUP)
