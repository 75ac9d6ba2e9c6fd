"""TPU slices that programs can be compiled for where there are none: libtpu describes them, and compiles."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies

from tfx_jax.errors import UserError

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_SHAPES = {"v4": _CUBIC, "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT, "tpu7x": _CUBIC}

TOPOLOGIES = tuple(f"{generation}:{shape}" for generation, shapes in _SHAPES.items() for shape in shapes)
"""Generations of TPUs, and how many chips a slice of theirs has in each direction of its torus."""

ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process of a machine may load libtpu
    "TPU_LOG_DIR": "disabled",  # else every process leaves a file behind
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # this and the next two: else it asks the network what machine this is
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu must find in the environment when a process without TPUs loads it."""


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Returns the devices of TPU slices, for which programs can be lowered and compiled but not run.

    JAX's own devices stay what they are. A process that has not said `JAX_PLATFORMS=cpu` may have loaded libtpu when it
    asked for those, without our `ENVIRONMENT`; another one that does so at that time is refused.

    Args:
      topology: one of `TOPOLOGIES`.
      num_slices: how many such slices.

    Raises:
      UserError: if there is no such topology, or no libtpu.
    """
    if topology not in TOPOLOGIES:
        raise UserError(f"unknown topology {topology}: there are {', '.join(TOPOLOGIES)}")
    if not importlib.util.find_spec("libtpu"):
        raise UserError(f'{topology} needs libtpu: pip install "tfx-jax[plan]", also on a machine without TPUs')
    options: dict[str, Any] = {}
    if topology.startswith("v4"):
        options["chip_config_name"] = "megacore"  # one device a chip, as real ones have
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = [1, 1, 1]  # a host has 2x2 otherwise
    if num_slices > 1:
        options["num_slices"] = num_slices
    with _environment():
        return topologies.get_topology_desc(topology, platform="tpu", **options).devices


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets `ENVIRONMENT`, and afterwards what was there before: programs that this one starts are not to inherit it."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
