"""The machine that was measured, and the versions of what was compared."""

import importlib.metadata
import pathlib
import platform
import re
import subprocess
import sys

from benchmarks.peers.worker import cores

_CPUINFO = pathlib.Path("/proc/cpuinfo")
_PACKAGES = ("jax", "flax", "torch", "ctranslate2", "transformers")
_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "amx_int8": "AMX"}


def processor(device: str) -> str:
    """Returns the make of the processor with its widest vectors ("AMD CPU, AVX2") or that of the GPU."""
    if device == "gpu":
        # Ask a separate process: JAX would reserve memory of the GPU here, which the sides need.
        command = [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    vectors = [name for name in _instructions() if name.startswith("AVX")][-1:]
    return ", ".join([f"{_VENDORS.get(_cpu('vendor_id'), platform.machine())} CPU", *vectors])


def description() -> str:
    """Returns a sentence with the processor, its instructions for matrices, its cores and the packages' versions."""
    name = _cpu("model name") or platform.processor() or platform.machine()
    hardware = [name, *_instructions(), f"{cores()} core{'s' * (cores() != 1)}"]
    packages = [f"{package} {found}" for package in _PACKAGES if (found := version(package))]
    software = [f"Python {platform.python_version()}", *packages]
    return f"{', '.join(hardware)}; {', '.join(software)}."


def _instructions() -> list[str]:
    flags = _cpu("flags").split()
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def version(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu(field: str) -> str:
    """Returns a field of Linux' description of the first core; empty if there is none."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    found = re.search(rf"^{field}\s*: *(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
