"""Estimates of device memory: logged before the first step; a run that cannot fit is rejected."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tfx_jax.arrays import leaves_by_path
from tfx_jax.errors import UserError
from tfx_jax.training.step import TrainState

_SMALLER_STATE = (
    'config.mesh.fsdp to spread it over more devices, config.optimizer.name="adafactor", or a smaller model'
)
_SMALLER_STEP = (
    'config.model.remat="full", more config.accumulate, fewer config.task.data.tokens_per_batch, '
    'config.model.dtype="bfloat16", or more devices'
)


class StateMemory(NamedTuple):
    """Numbers of all and of the trained parameters, and bytes per device of parameters, optimizer state and gradients.

    The bytes of frozen parameters and other model state count as parameters, a moving average as a part of the
    optimizer.
    """

    num_params: int
    num_trained: int
    params: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes that every step needs at the same time, whatever the batch."""
        return self.params + self.optimizer + self.gradients


def state_memory(state: TrainState, frozen: Collection[str] = ()) -> StateMemory:
    """Computes the bytes of a training state per device; shapes, dtypes and shardings suffice.

    Args:
      state: the state.
      frozen: paths of the parameters that are not trained, which are part of the model state.
    """

    def bytes_per_device(tree: Any) -> int:
        """Returns the bytes that the shards of a tree take on one device."""
        total = 0
        for leaf in jax.tree.leaves(tree):
            shard_shape = leaf.sharding.shard_shape(leaf.shape)  # shape of the part on one device
            total += leaf.dtype.itemsize * int(np.prod(shard_shape, dtype=np.int64))
        return total

    params = bytes_per_device(state.params)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    num_frozen = sum(leaf.size for path, leaf in leaves_by_path(state.model_state).items() if path in frozen)
    return StateMemory(
        num_params=num_trained + num_frozen,
        num_trained=num_trained,
        params=params + bytes_per_device(state.model_state),
        optimizer=bytes_per_device((state.opt_state, state.ema)),
        gradients=params,
    )


def device_memory(mesh: Mesh) -> int:
    """Returns the bytes that XLA may use on each device of this process; CPU devices share the machine's memory."""
    devices = mesh.local_devices
    stats = devices[0].memory_stats() or {}  # a CPU has none
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def check_state(memory: StateMemory, available: int) -> None:
    """Raises UserError if the state needs more than `available` bytes per device; called before it is allocated."""
    if memory.total > available:
        raise UserError(
            f"a device has {_size(available)} of memory, but needs {_size(memory.total)} for parameters, optimizer and "
            f"gradients: try {_SMALLER_STATE}"
        )


def step_memory(step_fn: Callable[..., Any], *arguments: Any) -> int | None:
    """Returns the bytes per device that a step needs in addition to the state; None if XLA does not report them.

    This compiles the program, and JAX reuses it for the first call with the same arguments.
    """
    program: Any = step_fn  # a function of jax.jit
    analysis = program.lower(*arguments).compile().memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def report(memory: StateMemory, temporary: int | None, available: int) -> str:
    """Returns one line about the memory of a step.

    Args:
      memory: memory of the state.
      temporary: result of `step_memory`.
      available: bytes that XLA may use on each device.

    Raises:
      UserError: if the step cannot fit.

    >>> mib = 2**20
    >>> line = report(StateMemory(63_000_000, 63_000_000, 240 * mib, 480 * mib, 240 * mib), 1500 * mib, 16_000 * mib)
    >>> line.partition("; ")[0], line.partition(": ")[2]
    ('63,000,000 parameters', 'parameters 240 MiB, optimizer 480 MiB, step 1,500 MiB (240 MiB of it gradients)')
    """
    if temporary is None:
        step = f"gradients {_size(memory.gradients)}"
    else:
        step = f"step {_size(temporary)} ({_size(memory.gradients)} of it gradients)"
        needed = memory.params + memory.optimizer + temporary
        if needed > available:
            raise UserError(
                f"a device has {_size(available)} of memory, but needs {_size(temporary)} for the step and "
                f"{_size(needed - temporary)} for parameters and optimizer: try {_SMALLER_STEP}"
            )
    trained = f", {memory.num_trained:,} of them trained" if memory.num_trained < memory.num_params else ""
    return (
        f"{memory.num_params:,} parameters{trained}; of the {_size(available)} of each device: "
        f"parameters {_size(memory.params)}, optimizer {_size(memory.optimizer)}, {step}"
    )


@contextlib.contextmanager
def out_of_memory_as_user_error(remedy: str = f"try {_SMALLER_STEP}") -> Iterator[None]:
    """Turns XLA's long report of a device that ran out of memory into one line that ends with the remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        line = next(iter(str(error).splitlines()), "")
        if "RESOURCE_EXHAUSTED" not in line:
            raise
        raise UserError(f"a device ran out of memory ({line[:200]}): {remedy}") from None


def _size(count: int) -> str:
    """Formats a number of bytes.

    >>> _size(3 * 2**19), _size(482 * 2**20), _size(40 * 2**30)
    ('1.5 MiB', '482 MiB', '40.0 GiB')
    """
    mib = count / 2**20
    if mib >= 10_000:
        return f"{mib / 1024:,.1f} GiB"
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"
