"""TPU slices and GPU nodes as compilation targets on machines that have none.

libtpu describes TPUs and compiles for them. JAX's CUDA plugin compiles for NVIDIA GPUs, which this module describes.
"""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies

from tfx_jax.errors import UserError, install_command

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_SHAPES = {"v4": _CUBIC, "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT, "tpu7x": _CUBIC}

TOPOLOGIES = tuple(f"{generation}:{shape}" for generation, shapes in _SHAPES.items() for shape in shapes)
"""Names of TPU topologies: the generation, and the chips of a slice in each dimension of its torus."""

# For each family of Google Cloud's TPU types: its generation, and what a type counts per chip; v4 and v5p count cores.
_FAMILIES = {"v4": ("v4", 2), "v5litepod": ("v5e", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}

CLOUD_TYPES = {
    f"{family}-{math.prod(map(int, shape.split('x'))) * count_per_chip}": f"{generation}:{shape}"
    for family, (generation, count_per_chip) in _FAMILIES.items()
    for shape in _SHAPES[generation]
}
"""Topology of each of Google Cloud's TPU types: {"v4-8": "v4:2x2x1", ...}."""

_UNDESCRIBED = ("tpu8i", "tpu8t")

ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise only one process per machine may load libtpu
    "TPU_LOG_DIR": "disabled",  # otherwise every process leaves log files
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # this and the next two: otherwise it queries the metadata server
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "LIBTPU_INIT_ARGS": "--install_signal_handlers=false",  # otherwise SIGTERM prints a stack trace of C++
}
"""Environment variables that libtpu needs when a process without TPUs loads it."""

# By name: JAX's name of the GPU, GiB of memory that a process sees, and GB/s of that memory; from NVIDIA's datasheets.
_GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 79.1, 3_350),
    "h200": ("NVIDIA H200", 139.8, 4_800),
}

# The compiler's description of a GPU (GpuTargetConfigProto of OpenXLA). Limits: CUDA C++ Programming Guide, table of
# technical specifications, compute capability 9.0; multiprocessors, caches and clock: NVIDIA's H100 Tensor Core GPU
# Architecture, SXM5, whose chip an H200 has as well.
_HOPPER = """
platform_name: "CUDA"
device_description_str: "{name}"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
"""


def absent_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Returns devices for which programs can be lowered and compiled but not run.

    Args:
      topology: name for `tpu_devices` or `gpu_devices`.
      num_slices: number of TPU slices; a GPU topology includes it.

    Raises:
      UserError: if there is no such topology, or its compiler is not installed.
    """
    if topology.partition(":")[0] not in _GPUS:
        return tpu_devices(topology, num_slices)
    if num_slices > 1:
        raise UserError(f"{topology} includes the number of slices, such as 2 in h100:2x8x8: leave --slices at 1")
    return gpu_devices(topology)


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Returns the devices of TPU slices, for which programs can be lowered and compiled but not run.

    JAX's own devices do not change. A process without `JAX_PLATFORMS=cpu` may have loaded libtpu for its own devices,
    without `ENVIRONMENT`; then a second process that loads libtpu at the same time fails.

    Args:
      topology: one of `TOPOLOGIES`.
      num_slices: number of such slices.

    Raises:
      UserError: if there is no such topology, or libtpu is not installed.
    """
    if topology.partition(":")[0] in _UNDESCRIBED:
        raise UserError(
            f"{topology} cannot be planned: JAX knows this TPU, but no libtpu up to 0.0.52 describes it; use one of "
            f"{', '.join(TOPOLOGIES)}"
        )
    if topology not in TOPOLOGIES:
        cloud_type = topology.replace("v5e-", "v5litepod-")  # people call a v5litepod-8 v5e-8
        if cloud_type in CLOUD_TYPES:
            raise UserError(f"unknown topology {topology}: the shape of that TPU type is {CLOUD_TYPES[cloud_type]}")
        raise UserError(
            f"unknown topology {topology}: use one of {', '.join(TOPOLOGIES)}, or for GPUs a name such as h100:1x8x8"
        )
    if not has_libtpu():
        raise UserError(f"{topology} needs libtpu: {install_command('plan')}, also on a machine without TPUs")
    options: dict[str, Any] = {}
    if topology.startswith("v4"):
        options["chip_config_name"] = "megacore"  # one device per chip, as on real v4
    if topology.endswith(":1x1"):
        options["chips_per_host_bounds"] = [1, 1, 1]  # otherwise a host has 2x2 chips
    if num_slices > 1:
        options["num_slices"] = num_slices
    with _environment():
        return topologies.get_topology_desc(topology, platform="tpu", **options).devices


def gpu_devices(topology: str) -> list[Any]:
    """Returns the devices of nodes with NVIDIA GPUs, for which programs can be lowered and compiled but not run.

    Lower programs for them with `lowering_platforms=("cuda",)`. JAX calls their platform "gpu", which has several
    kinds, and would look for the kind among the devices of this machine.

    Args:
      topology: such as "h100:1x8x8": slices (nodes with a fast network between them), nodes per slice, GPUs per node.

    Raises:
      UserError: if there is no such topology, or JAX's CUDA plugin is not installed.
    """
    kind, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-8]", shape) else []
    if kind not in _GPUS or not sizes:
        known = ", ".join(_GPUS)
        raise UserError(
            f"unknown topology {topology}: GPU topologies ({known}) are slices x nodes x GPUs per node (at most 8), as "
            "in h100:1x8x8"
        )
    if not has_cuda():
        raise UserError(
            f"{topology} needs JAX for CUDA: {install_command('plan-cuda')}, also on a machine without GPUs"
        )
    name, memory, bandwidth = _GPUS[kind]
    target = _HOPPER.format(name=name, memory=round(memory * 2**30), bandwidth=round(bandwidth * 1e9))
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices


def has_libtpu() -> bool:
    """Returns whether libtpu, which compiles for `tpu_devices`, is installed."""
    return importlib.util.find_spec("libtpu") is not None


def has_cuda() -> bool:
    """Returns whether JAX's CUDA plugin, which compiles for `gpu_devices`, is installed."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    )


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets `ENVIRONMENT` in the block and restores the variables afterwards, so that child processes do not get it."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    flags = f"{before['LIBTPU_INIT_ARGS'] or ''} {ENVIRONMENT['LIBTPU_INIT_ARGS']}"  # with those of the user
    os.environ.update(ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags.strip()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
