"""What the devices of one process, or of one ring, have for themselves."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from tfx_jax.training.sharding import attention_on, make_mesh, shard_batch


def test_a_process_gives_the_rows_of_its_own_block(monkeypatch):
    asked = {}

    def assemble(shape, _, part):
        asked["shape"], asked["part"] = shape, part((slice(4, 6), slice(None)))

    own_devices = {device: (slice(device, device + 2),) for device in (4, 6)}  # of eight parts, the second half
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda *_: own_devices)
    monkeypatch.setattr(jax, "make_array_from_callback", assemble)
    shard_batch({"source": np.arange(12).reshape(4, 3)}, make_mesh())
    assert asked["shape"] == (8, 3)
    np.testing.assert_array_equal(asked["part"], [[0, 1, 2], [3, 4, 5]])


def test_rings_of_other_rows_and_heads_drop_other_weights():
    attend = attention_on(make_mesh(2, sequence=2, tensor=2))
    x = np.broadcast_to(np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32), (2, 8, 2, 4))
    out = jax.jit(lambda x, rng: attend(x, x, x, dropout_rate=0.5, dropout_rng=rng))(x, jax.random.key(0))
    seen = {np.asarray(out[row, :, head]).tobytes() for row in range(2) for head in range(2)}
    assert len(seen) == 4
