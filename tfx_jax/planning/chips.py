"""Published speeds of accelerators, by JAX's name of the device kind."""

import dataclasses
import os
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Chip:
    """Speeds of one device; for links, in one direction.

    Attributes:
      memory: bytes available to programs.
      memory_bandwidth: bytes/s.
      clock: cycles per second in the compiler's estimates; None if it makes none, as for a GPU.
      near_bandwidth: bytes/s from a device to others of its TPU slice, on a ring along one axis of the torus, or to
        other GPUs of its node.
      far_bandwidth: bytes/s from a device to another slice or node.
    """

    memory: float
    memory_bandwidth: float
    clock: float | None
    near_bandwidth: float
    far_bandwidth: float

    @property
    def program_memory(self) -> int:
        """Bytes of `memory` that JAX uses: on a GPU three quarters, or the fraction XLA_PYTHON_CLIENT_MEM_FRACTION."""
        share = 1.0 if self.clock else float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
        return round(share * self.memory)

    def bandwidth(self, devices: Sequence[int], num_near: int) -> float:
        """Returns the bytes/s of the slowest link that a group of devices needs.

        Args:
          devices: device numbers, counted slice by slice or node by node.
          num_near: devices per slice or node.
        """
        groups = {device // num_near for device in devices}  # slices or nodes
        return self.near_bandwidth if len(groups) == 1 else self.far_bandwidth


_GIB = 2**30

# TPUs: https://cloud.google.com/tpu/docs (one page per version). `near_bandwidth` counts two links of the interconnect,
# one per direction, because a ring along one axis of the torus uses two; `far_bandwidth` is a chip's data-center
# network. Memory that libtpu reserves for itself is subtracted: a program on v5e may use 15.75 GiB. Clocks are those of
# the compiler's estimates, see `tfx_jax.planning.programs`; a device of v7x is half a chip.
# GPUs: NVIDIA's datasheets of the H100 SXM and the H200 SXM (80 GB at 3.35 TB/s, 141 GB at 4.8 TB/s; the values are
# what a process sees), NVLink with 450 GB/s per direction between the eight GPUs of a node, and the eight network
# adapters of a DGX, 400 Gbit/s per GPU.
CHIPS = {
    "TPU v4": Chip(
        memory=31.75 * _GIB, memory_bandwidth=1228e9, clock=1.05e9, near_bandwidth=100e9, far_bandwidth=6.25e9
    ),
    "TPU v5 lite": Chip(
        memory=15.75 * _GIB, memory_bandwidth=819e9, clock=1.5e9, near_bandwidth=100e9, far_bandwidth=3.125e9
    ),
    "TPU v5": Chip(memory=95 * _GIB, memory_bandwidth=2765e9, clock=1.75e9, near_bandwidth=200e9, far_bandwidth=6.25e9),
    "TPU v6 lite": Chip(
        memory=31.25 * _GIB, memory_bandwidth=1640e9, clock=1.75e9, near_bandwidth=224e9, far_bandwidth=12.5e9
    ),
    "TPU7x": Chip(memory=96 * _GIB, memory_bandwidth=3690e9, clock=1.9e9, near_bandwidth=200e9, far_bandwidth=6.25e9),
    "NVIDIA H100 80GB HBM3": Chip(
        memory=79.1 * _GIB, memory_bandwidth=3350e9, clock=None, near_bandwidth=450e9, far_bandwidth=50e9
    ),
    "NVIDIA H200": Chip(
        memory=139.8 * _GIB, memory_bandwidth=4800e9, clock=None, near_bandwidth=450e9, far_bandwidth=50e9
    ),
}
