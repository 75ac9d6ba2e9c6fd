"""Pytrees of arrays: copies between host and devices, and the paths of leaves."""

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


def path_name(path: Any) -> str:
    """Returns the path of a leaf, as `jax.tree_util` has it, as text, such as "bert/layers/out/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by `path_name`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
