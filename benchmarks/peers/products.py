"""A square matrix product by each library: what the machine's arithmetic can do at most, in FLOP."""

# pyright: reportMissingImports=false

import numpy as np

from benchmarks.peers.worker import Workload, cores


def by_numpy(*, size: int) -> Workload:
    """Returns the product by NumPy's BLAS, float32."""
    a, b = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32)
    return Workload(lambda: a @ b, 2 * size**3)


def by_xla(*, size: int, dtype: str) -> Workload:
    """Returns the product by JAX."""
    from tfx_jax.planning.measure import product

    return Workload(product(size, dtype), 2 * size**3)


def by_torch(*, size: int, dtype: str, device: str) -> Workload:
    """Returns the product by PyTorch."""
    import torch

    torch.set_num_threads(cores())
    a, b = torch.randn(2, size, size, dtype=getattr(torch, dtype), device=device)

    def run() -> None:
        torch.matmul(a, b)
        if device == "cuda":
            torch.cuda.synchronize()

    return Workload(run, 2 * size**3)
