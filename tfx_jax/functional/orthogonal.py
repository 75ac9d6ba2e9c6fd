"""Random orthogonal matrices."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_batching.custom_vmap
def orthogonal_of_normal(normal: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """Makes a matrix of independent normals orthogonal: uniform over all orthogonal matrices (Mezzadri, 2007).

    Of a batch, under `jax.vmap`, one after the other. On CPUs jaxlib divides the QR of a batch among the threads of a
    pool, and waits in one of them: as many batches at once as there are threads, such as those of two layers' weights
    on two cores, wait for ever (jaxlib 0.10.2, `ParallelBatchMap`).

    Args:
      normal: a sample of N(0, 1) for each element, [D, D].

    Returns:
      [D, D] in the dtype of `normal`.

    >>> rotation = orthogonal_of_normal(jax.random.normal(jax.random.key(0), (3, 3)))
    >>> bool(jnp.abs(rotation @ rotation.T - jnp.eye(3)).max() < 1e-5)
    True
    """
    basis, triangle = jnp.linalg.qr(normal)
    # QR fixes signs by convention; multiplied by those of R's diagonal, the basis is uniform.
    return basis * jnp.sign(jnp.diagonal(triangle))[None]


@orthogonal_of_normal.def_vmap
def _one_by_one(axis_size: int, in_batched: Any, normals: Float[Array, "B D D"]) -> tuple[Float[Array, "B D D"], bool]:
    del axis_size, in_batched  # it has one argument, and is called where that is a batch
    return jax.lax.map(orthogonal_of_normal, normals), True
