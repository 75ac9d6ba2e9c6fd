"""Dropout where a sequence is divided: the rings of other rows and heads draw masks of their own."""

import jax
import numpy as np

from tfx_jax.functional import dot_product_attention
from tfx_jax.training.sharding import make_mesh, shard_attention


def test_rings_of_other_rows_and_heads_drop_other_weights():
    attend = shard_attention(make_mesh(2, sequence=2, tensor=2))
    x = np.broadcast_to(np.random.default_rng(0).normal(size=(1, 8, 1, 4)).astype(np.float32), (2, 8, 2, 4))
    drop = jax.jit(lambda x, rng: attend(dot_product_attention, x, x, x, dropout_rate=0.5, dropout_rng=rng))
    out = drop(x, jax.random.key(0))
    assert len({np.asarray(out[row, :, head]).tobytes() for row in range(2) for head in range(2)}) == 4
