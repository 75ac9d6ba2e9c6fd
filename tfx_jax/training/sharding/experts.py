"""Mixtures of experts on a mesh: each device routes its own tokens and sends them to the devices of their experts."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tfx_jax.functional.moe import Exchange
from tfx_jax.training.sharding.mesh_axes import BATCH_AXES, num_batch_shards

# Shardings of buffers [groups, experts, ...]: groups over all batch axes, or experts over the axis `expert`.
_BY_GROUP = P(BATCH_AXES)
_BY_EXPERT = P(tuple(axis for axis in BATCH_AXES if axis != "expert"), "expert")


def expert_exchange(mesh: Mesh, num_groups: int, num_experts: int) -> Exchange | None:
    """Returns the all-to-alls that send tokens to the devices of their experts and back.

    Section 3.2 of Lepikhin et al. (2020). Buffers are [groups, experts, ...].

    Args:
      mesh: with the axes of `mesh_axes`.
      num_groups: groups of tokens; the tokens of a group are routed together.
      num_experts: experts, which the axis `expert` of the mesh divides.

    Returns:
      A pair: the first function takes buffers sharded by group and returns them sharded by expert, the second is its
      inverse. None if every device has all experts, or the mesh does not divide groups and experts evenly; the compiler
      then chooses how to move tokens.
    """
    if mesh.shape["expert"] == 1 or num_groups % num_batch_shards(mesh) or num_experts % mesh.shape["expert"]:
        return None

    def make_all_to_all(*, split_axis: int, concat_axis: int, in_spec: P, out_spec: P) -> Callable[[Array], Array]:
        return jax.shard_map(
            lambda buffers: jax.lax.all_to_all(
                buffers, "expert", split_axis=split_axis, concat_axis=concat_axis, tiled=True
            ),
            mesh=mesh,
            in_specs=in_spec,
            out_specs=out_spec,
        )

    to_experts = make_all_to_all(split_axis=1, concat_axis=0, in_spec=_BY_GROUP, out_spec=_BY_EXPERT)
    to_groups = make_all_to_all(split_axis=0, concat_axis=1, in_spec=_BY_EXPERT, out_spec=_BY_GROUP)
    return to_experts, to_groups
