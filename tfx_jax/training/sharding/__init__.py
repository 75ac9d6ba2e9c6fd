"""Meshes, shardings and processes.

`strategies` says which array is sharded over which mesh axis. `layers` runs attention and experts on a mesh; models get
this from the context of `tfx_jax.nn.distributed`. `distributed` starts and coordinates processes.
"""

from tfx_jax.training.sharding.layers import make_distribution
from tfx_jax.training.sharding.strategies import make_mesh, shard_batch, state_shardings

__all__ = ["make_distribution", "make_mesh", "shard_batch", "state_shardings"]
