"""Published speeds of accelerators, by what JAX calls one device."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Chip:
    """Speeds of one device, in one direction where there are two.

    Attributes:
      memory: bytes that a program may have.
      memory_bandwidth: bytes/s.
      clock: cycles of its compiler's estimates in a second; None where there are none.
      near: how many devices share the fast network; None means all of a slice.
      near_bandwidth: bytes/s that leave a device on a ring along one axis of that network.
      far_bandwidth: bytes/s between slices, or between hosts.
    """

    memory: float
    memory_bandwidth: float
    clock: float | None
    near: int | None
    near_bandwidth: float
    far_bandwidth: float

    def bandwidth(self, devices: Sequence[int], num_slices: int, num_devices: int) -> float:
        """Returns bytes/s of the slowest link that a group of devices needs, which are numbered slice by slice."""
        near = self.near or num_devices // num_slices
        return self.near_bandwidth if len({device // near for device in devices}) == 1 else self.far_bandwidth


_GIB = 2**30

# TPUs: https://cloud.google.com/tpu/docs (a page for each version): memory and its bandwidth, the interconnect of all
# links, of which a ring along one axis of the torus uses two, one for each direction, and the data-center network of a
# chip. What libtpu keeps of the memory for itself is left out: a program of v5e may have 15.75 GiB. Clocks are those of
# the estimates, see `tfx_jax.bench.programs`; a device of v7x is half a chip.
# H100: NVIDIA's datasheet (80 GB, 3.35 TB/s, NVLink 450 GB/s in each direction between eight) and the eight adapters of
# a DGX H100, 400 Gbit/s for each GPU.
CHIPS = {
    "TPU v4": Chip(31.75 * _GIB, 1228e9, 1.05e9, None, 100e9, 6.25e9),
    "TPU v5 lite": Chip(15.75 * _GIB, 819e9, 1.5e9, None, 100e9, 3.125e9),
    "TPU v5": Chip(95 * _GIB, 2765e9, 1.75e9, None, 200e9, 6.25e9),
    "TPU v6 lite": Chip(31.25 * _GIB, 1640e9, 1.75e9, None, 224e9, 12.5e9),
    "TPU7x": Chip(96 * _GIB, 3690e9, 1.9e9, None, 200e9, 6.25e9),
    "NVIDIA H100 80GB HBM3": Chip(79.1 * _GIB, 3350e9, None, 8, 450e9, 50e9),
}
