"""Published speeds of accelerators, by what JAX calls one device."""

import dataclasses
import os
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Chip:
    """Speeds of one device, in one direction where there are two.

    Attributes:
      memory: bytes that programs may have.
      memory_bandwidth: bytes/s.
      clock: cycles of its compiler's estimates in a second; None where there are none, as of a GPU.
      near_bandwidth: bytes/s that leave a device for others of its TPU slice, on a ring along one axis of the torus, or
        for other GPUs of its node.
      far_bandwidth: bytes/s that leave it for another slice or node.
    """

    memory: float
    memory_bandwidth: float
    clock: float | None
    near_bandwidth: float
    far_bandwidth: float

    @property
    def program_memory(self) -> int:
        """Bytes of `memory` that JAX takes: of a GPU's three quarters, or XLA_PYTHON_CLIENT_MEM_FRACTION of them."""
        share = 1.0 if self.clock else float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
        return round(share * self.memory)

    def bandwidth(self, devices: Sequence[int], num_near: int) -> float:
        """Returns bytes/s of the slowest link that a group of devices needs.

        Args:
          devices: numbers, counted slice by slice or node by node.
          num_near: devices of a slice or node.
        """
        return self.near_bandwidth if len({device // num_near for device in devices}) == 1 else self.far_bandwidth


_GIB = 2**30

# TPUs: https://cloud.google.com/tpu/docs (a page for each version): memory and its bandwidth, the interconnect of all
# links, of which a ring along one axis of the torus uses two, one for each direction, and the data-center network of a
# chip. What libtpu keeps of the memory for itself is left out: a program of v5e may have 15.75 GiB. Clocks are those of
# the estimates, see `tfx_jax.planning.programs`; a device of v7x is half a chip.
# GPUs: NVIDIA's datasheets of the H100 SXM and the H200 SXM (80 GB at 3.35 TB/s, 141 GB at 4.8 TB/s, of which a
# process sees this much; NVLink 450 GB/s in each direction between the eight of a node) and the eight adapters of a
# DGX, 400 Gbit/s for each GPU.
CHIPS = {
    "TPU v4": Chip(31.75 * _GIB, 1228e9, 1.05e9, 100e9, 6.25e9),
    "TPU v5 lite": Chip(15.75 * _GIB, 819e9, 1.5e9, 100e9, 3.125e9),
    "TPU v5": Chip(95 * _GIB, 2765e9, 1.75e9, 200e9, 6.25e9),
    "TPU v6 lite": Chip(31.25 * _GIB, 1640e9, 1.75e9, 224e9, 12.5e9),
    "TPU7x": Chip(96 * _GIB, 3690e9, 1.9e9, 200e9, 6.25e9),
    "NVIDIA H100 80GB HBM3": Chip(79.1 * _GIB, 3350e9, None, 450e9, 50e9),
    "NVIDIA H200": Chip(139.8 * _GIB, 4800e9, None, 450e9, 50e9),
}
