"""The mesh axes that shard the examples of a batch."""

import math

from jax.sharding import Mesh

BATCH_AXES = ("data", "fsdp", "expert")
"""Names of these axes, the slowest-varying first."""


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards that the examples of a batch are divided into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
