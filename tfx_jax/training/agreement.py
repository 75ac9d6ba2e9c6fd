"""Whether all processes of a training run the same code with the same settings: else their gradients mean nothing."""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
import zlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

import tfx_jax
from tfx_jax.errors import UserError
from tfx_jax.training.distributed import gather_arrays

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def check_agreement(describe: Callable[[], Mapping[str, str]]) -> None:
    """Compares what all processes were started with; alone, a process agrees and does not even look.

    Args:
      describe: returns, by what each part is called, what it is; the same parts in every process.

    Raises:
      UserError: in every process, if one has another part than process 0; the message names both.
    """
    if jax.process_count() == 1:
        return
    parts = describe()
    mine = np.array([zlib.crc32(part.encode()) for part in parts.values()], np.uint32)
    others = gather_arrays(mine)
    for name, values in zip(parts, others.T, strict=True):
        different = np.flatnonzero(values != values[0])
        if different.size:
            who = f"process {different[0]}" if different.size == 1 else f"processes {', '.join(map(str, different))}"
            raise UserError(f"{name} of {who} is not that of process 0: start all with the same")


@functools.cache
def library() -> str:
    """Describes the code that runs: every source file of the library, and the versions of what it stands on."""
    digest = hashlib.sha256(platform.python_version().encode())
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    folder = pathlib.Path(tfx_jax.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
