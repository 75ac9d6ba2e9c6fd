"""Checksums of sharded arrays that do not depend on how they are sharded.

Orbax itself does not notice when a byte of a large array has changed on disk. A CRC of each array would, but needs all
of it, in order, in one place. Here every element is hashed with its place and the hashes are summed: each process sums
over its own shards, and the total is the same for any mesh and any number of processes. The hash is a bijection of the
element's bits, so that no change of one element goes unnoticed, and none of several but by a chance of 2^-64.
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tfx_jax.training.distributed import gather_arrays

# Odd, so that multiplying by them is a bijection; from splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BLOCK = 1 << 18  # elements hashed at once: a few MB


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    """The checksum of each tree of arrays; where several processes train, all of them call it.

    >>> checksums({"params": {"a": np.arange(3.0)}, "rest": np.int32(7)})
    {'params': 'b27b9e32861ba857', 'rest': 'a3349cb258289b04'}
    """
    mine = np.array([_sum_of_own(part) for part in parts.values()], np.uint64)
    total = gather_arrays(mine.view(np.uint32)).view(np.uint64).sum(axis=0)
    return {name: f"{checksum:016x}" for name, checksum in zip(parts, total, strict=True)}


def all_checksums(parts: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the arrays, and "metadata" of the JSON values beside them, which say where the data goes on."""
    text = json.dumps(extra, sort_keys=True)
    return checksums(parts) | {"metadata": f"{zlib.crc32(text.encode()):08x}"}


def _sum_of_own(tree: Any) -> np.uint64:
    """Sum, modulo 2^64, of the hashes of the elements that this process answers for."""
    total, offset = np.uint64(0), 0
    for leaf in jax.tree.leaves(tree):
        for starts, values in _own_shards(leaf):
            for block, places in _blocks(values, starts, np.shape(leaf), offset):
                bits = block.view(f"u{block.itemsize}").astype(np.uint64)
                hashes = (bits ^ (places * _GOLDEN)) * _MIX
                hashes = (hashes ^ (hashes >> np.uint64(32))) * _GOLDEN
                total = np.add(total, hashes.sum(), dtype=np.uint64)
        offset += np.size(leaf)
    return total


def _own_shards(leaf: Any) -> Iterator[tuple[list[int], np.ndarray]]:
    """Where each shard begins and its values: of shards that several devices hold, only the first."""
    if not isinstance(leaf, jax.Array):
        yield [0] * np.ndim(leaf), np.asarray(leaf)
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def _blocks(
    values: np.ndarray, starts: list[int], shape: tuple[int, ...], offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts a shard into blocks of whole rows, each [n], with the places of the elements, [n] uint64."""
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    if not shape:
        values, starts, strides = values[None], [0], [1]
    rows = max(1, _BLOCK // max(1, int(np.prod(values.shape[1:], dtype=np.int64))))
    for first in range(0, values.shape[0], rows):
        block = np.ascontiguousarray(values[first : first + rows])
        places = np.full((1,) * block.ndim, offset, np.uint64)
        for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
            start += first if axis == 0 else 0
            along = np.arange(start, start + block.shape[axis], dtype=np.uint64) * np.uint64(stride)
            places = places + along.reshape([-1 if other == axis else 1 for other in range(block.ndim)])
        yield block.ravel(), places.ravel()
