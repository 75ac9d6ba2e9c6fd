"""Timing of programs: compilation apart from execution, alternatives in turn, and the machine's measured peak."""

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from tfx_jax.errors import UserError
from tfx_jax.training.guards.memory import device_memory
from tfx_jax.training.sharding.strategies import make_mesh

SMALLER_WORK = "make batch, length or model smaller"
_PRODUCT_SIZES = (512, 1_024, 2_048, 4_096, 8_192, 16_384)
_LONG_ENOUGH = 0.05  # seconds; starting a product takes a negligible part of such a duration


class Workload(NamedTuple):
    """A unit of work that is ready to be timed, and the costs of preparing it."""

    run: Callable[[], Any]
    """Runs one unit and waits for the devices; returns the best hypotheses of a search, else None."""
    trace_seconds: float
    """Seconds in Python to trace and lower the program."""
    compile_seconds: float
    """Seconds in XLA to compile it."""
    first_seconds: float
    """Seconds of the first unit, which is not timed with the others."""
    target_tokens: int
    """Target tokens of one unit."""
    flops: int | None
    """Model FLOPs of a unit, see `tfx_jax.training.flops`; None if no formula is agreed on."""
    program_bytes: int
    """Bytes that XLA plans to hold at once on each device: arguments, results and temporary buffers."""
    num_devices: int = 1


class Compilation(NamedTuple):
    """A compiled program and the costs of compiling it."""

    program: Any  # a jax.stages.Compiled
    trace_seconds: float
    compile_seconds: float
    program_bytes: int


def compile_apart(function: Any, *arguments: Any) -> Compilation:
    """Compiles a jitted function for these arguments; a later call with them does not compile again.

    Without a persistent compilation cache, the times are those of a cold start.

    Raises:
      UserError: if the program does not fit in the memory of a device.
    """
    lowered, trace_seconds = timed(lambda: function.lower(*arguments))
    program, compile_seconds = timed(lowered.compile)
    analysis = program.memory_analysis()
    planned = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    planned -= analysis.alias_size_in_bytes  # results in the buffers of donated arguments
    available = device_memory(make_mesh())
    if planned > available:
        raise UserError(
            f"the program needs {planned / 2**30:,.1f} GiB, but a device has {available / 2**30:,.1f}: {SMALLER_WORK}"
        )
    return Compilation(program, trace_seconds, compile_seconds, planned)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Disables the persistent compilation cache in the block, so that compiling is timed rather than reading files."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache

    def update(enabled: bool) -> None:
        config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # otherwise JAX keeps the setting it read first

    update(enabled=False)
    try:
        yield
    finally:
        update(enabled=before)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Calls a function and waits for its arrays; returns a pair: its result, and the duration in seconds."""
    started_at = time.perf_counter()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - started_at


def alternate(runs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Times several functions in turn, so that disturbances of the machine affect all of them.

    Args:
      runs: functions that each do one unit of work; they must have been compiled and warmed up.
      rounds: number of times each is run.

    Returns:
      For each of `runs`, the seconds of its rounds.

    >>> ours, theirs = alternate([lambda: sorted("tfx"), lambda: max("jax")], rounds=3)
    >>> len(ours), len(theirs)
    (3, 3)
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            _, duration = timed(run)
            seconds.append(duration)
    return times


class Products:
    """Large square matrix products, whose best rate is the reference for the machine's peak.

    Attributes:
      runs: functions that compute one product each, for `alternate`.
    """

    def __init__(self, dtype: str):
        """Prepares products of three sizes: the first that takes long enough to be timed, and the two below it."""
        self._sizes, self.runs = [], []
        for size in _PRODUCT_SIZES:
            run = product(size, dtype)
            run()  # compiles
            self._sizes.append(size)
            self.runs.append(run)
            _, seconds = timed(run)
            if seconds > _LONG_ENOUGH:
                break
        del self._sizes[:-3], self.runs[:-3]  # keeps the last three

    def peak(self, times: Sequence[Sequence[float]], num_devices: int) -> float:
        """Returns the peak FLOP/s of `num_devices` devices, from the best median rate on one device.

        `times` has for each of `runs` the seconds of its rounds, as from `alternate`.
        """
        copies = 1 if jax.default_backend() == "cpu" else num_devices  # CPU devices share the cores
        # A product of two matrices [size, size] takes 2 size^3 FLOPs.
        rates = [2 * size**3 / statistics.median(seconds) for size, seconds in zip(self._sizes, times, strict=True)]
        return copies * max(rates)


def product(size: int, dtype: str) -> Callable[[], Any]:
    """Returns a function that multiplies two random square matrices and waits; its first call compiles."""
    rng = jax.random.key(0)
    left = jax.random.normal(jax.random.fold_in(rng, 0), (size, size), jnp.dtype(dtype))
    right = jax.random.normal(jax.random.fold_in(rng, 1), (size, size), jnp.dtype(dtype))
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(left, right).block_until_ready()


def peak_memory(program_bytes: int) -> dict[str, Any]:
    """Returns the memory use of a program: the device's own peak counter, else the size planned by the compiler.

    A device's counter covers the whole process, so measure one program per process. CPU devices have no counter; there
    the peak of the whole process, including Python and the compiler, is reported as well.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"peak_memory_bytes": stats["peak_bytes_in_use"], "peak_memory_source": "device"}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes: `ru_maxrss` is in KiB on Linux
    return {
        "peak_memory_bytes": program_bytes,
        "peak_memory_source": "compiled program",
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def measured(workload: Workload, *, steps: int, dtype: str) -> dict[str, Any]:
    """Times a workload in turn with large matrix products.

    Args:
      workload: workload to time.
      steps: number of timed units, after one untimed unit.
      dtype: dtype of the matrix products.

    Returns:
      The result of `tfx-jax bench`, by names that end with the unit; None for unknown values.
    """
    workload.run()
    memory = peak_memory(workload.program_bytes)  # before the products, which use memory too
    products = Products(dtype)
    seconds, *product_seconds = alternate([workload.run, *products.runs], steps)
    median, peak = statistics.median(seconds), products.peak(product_seconds, workload.num_devices)
    rate = None if workload.flops is None else workload.flops / median
    return {
        "trace_seconds": workload.trace_seconds,
        "compile_seconds": workload.compile_seconds,
        "first_step_seconds": workload.first_seconds,
        "steps": steps,
        "median_step_seconds": median,
        "fastest_step_seconds": min(seconds),
        "slowest_step_seconds": max(seconds),
        "target_tokens_per_step": workload.target_tokens,
        "target_tokens_per_second": workload.target_tokens / median,
        "flops_per_step": workload.flops,
        "flops_per_second": rate,
        "matmul_peak_flops_per_second": peak,
        "utilization": None if rate is None else rate / peak,
        **memory,
    }
