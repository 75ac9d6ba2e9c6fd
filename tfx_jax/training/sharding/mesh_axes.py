"""The mesh axes that divide the rows of a batch."""

import math

from jax.sharding import Mesh

BATCH_AXES = ("data", "fsdp", "expert")
"""Their names, the slowest first."""


def num_batch_shards(mesh: Mesh) -> int:
    """How many shards the rows of a batch are divided into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
