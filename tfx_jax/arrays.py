"""Copies of pytrees of arrays between host and devices."""

from typing import Any

import jax
from jax.experimental import multihost_utils


def to_device(tree: Any) -> Any:
    """Copies NumPy arrays to the default device; JAX arrays are returned unchanged."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), tree)


def to_host(tree: Any) -> Any:
    """Copies arrays to the host as NumPy arrays; every process gets the full value of every array.

    If an array is sharded over several processes, all of them must call this function.
    """

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))
