"""Checksums: the same for any sharding, another for any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tfx_jax.training.checkpoint import checkpoints as module
from tfx_jax.training.checkpoint.checkpoints import checksums

VALUES = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)


def hash_of(*leaves):
    return checksums({"part": list(leaves)})["part"]


def oracle(*leaves):
    """The definition, element by element, with Python's unlimited integers."""
    total, place = 0, 0
    for leaf in leaves:
        for element in np.asarray(leaf).ravel():
            mixed = (int.from_bytes(element.tobytes(), "little") ^ place * int(module._GOLDEN)) % 2**64
            mixed = mixed * int(module._MIX) % 2**64
            total += (mixed ^ mixed >> 32) * int(module._GOLDEN)
            place += 1
    return f"{total % 2**64:016x}"


def test_is_its_definition(monkeypatch):
    leaves = VALUES, np.arange(5, dtype=np.int8), np.float64(0.1), jnp.ones(3, jnp.bfloat16), np.zeros((0, 3)), True
    assert hash_of(*leaves) == oracle(*leaves)
    monkeypatch.setattr(module, "_BLOCK", 7)  # a row and a half
    assert hash_of(*leaves) == oracle(*leaves)


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b"), P(None, "b", "a"), P(("a", "b")), P(None, None, "a")])
def test_does_not_depend_on_the_mesh(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    assert hash_of(jax.device_put(VALUES, NamedSharding(mesh, spec))) == hash_of(VALUES)


def test_every_bit_and_every_place_counts():
    seen = {hash_of(VALUES)}
    for bit in range(32):
        changed = VALUES.copy()
        changed.view(np.uint32)[3, 2, 1] ^= np.uint32(1 << bit)
        seen.add(hash_of(changed))
    assert len(seen) == 33
    assert hash_of(VALUES[::-1]) not in seen
    assert hash_of(VALUES[0], VALUES[1]) != hash_of(VALUES[1], VALUES[0])
