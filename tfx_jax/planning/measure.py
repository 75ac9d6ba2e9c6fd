"""How to time fairly: what compiling takes apart from running, rivals in turn, the machine's own peak beside them."""

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
_LONG_ENOUGH = 0.05  # seconds of a product beside which starting it is nothing


class Workload(NamedTuple):
    """Something to measure: one unit of work, and what it took to get ready for it."""

    run: Callable[[], Any]
    """Does one unit and returns when the devices are done: of a search the best hypotheses, else nothing."""
    trace_seconds: float
    """Of Python, which traces and lowers the program."""
    compile_seconds: float
    """Of XLA."""
    first_seconds: float
    """Of the first unit, which is not measured with the others."""
    target_tokens: int
    """Of a unit."""
    flops: int | None
    """Model FLOPs of a unit, see `tfx_jax.training.reporting.meter`; None where no formula is agreed on."""
    program_bytes: int
    """What XLA plans to hold at once on each device: arguments, results and temporary buffers."""
    num_devices: int = 1


class Compilation(NamedTuple):
    """A compiled program and what compiling took."""

    program: Any  # a jax.stages.Compiled
    trace_seconds: float
    compile_seconds: float
    program_bytes: int


def compile_apart(function: Any, *arguments: Any) -> Compilation:
    """Compiles a jitted function for these arguments; a call with the same arguments does not compile again.

    The times are those of a cold start only without a persistent compilation cache.

    Raises:
      UserError: if a device has not the memory to run the program.
    """
    lowered, trace_seconds = timed(lambda: function.lower(*arguments))
    program, compile_seconds = timed(lowered.compile)
    analysis = program.memory_analysis()
    planned = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    planned -= analysis.alias_size_in_bytes  # donated arguments hold results
    available = device_memory(make_mesh())
    if planned > available:
        raise UserError(f"it takes {planned / 2**30:,.1f} GiB of a device's {available / 2**30:,.1f}: {SMALLER_WORK}")
    return Compilation(program, trace_seconds, compile_seconds, planned)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compiles again what is in the persistent cache: what compiling takes should not be what reading a file takes."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache

    def update(enabled: bool) -> None:
        config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # JAX looks at the setting once, then never again

    update(False)
    try:
        yield
    finally:
        update(before)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, computed to its end, and the seconds it took."""
    started = time.perf_counter()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - started


def alternate(runs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Times rivals in turn, so that whatever else the machine does meets them all.

    Args:
      runs: each does one unit of work; what compiles or warms up in it must have happened before.
      rounds: how often each gets its turn.

    Returns:
      For each of `runs` the seconds of its rounds.

    >>> ours, theirs = alternate([lambda: sorted("tfx"), lambda: max("jax")], rounds=3)
    >>> len(ours), len(theirs)
    (3, 3)
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            seconds.append(timed(run)[1])
    return times


class Products:
    """Large square matrix products, whose best rate is what the machine's other work is held against.

    Attributes:
      runs: each computes one; for `alternate`, beside what is measured.
    """

    def __init__(self, dtype: str):
        """Prepares products of growing sizes, up to the first that takes long enough to be timed, and two below it."""
        self._sizes, self.runs = [], []
        for size in _PRODUCT_SIZES:
            run = product(size, dtype)
            run()  # compiles
            self._sizes.append(size)
            self.runs.append(run)
            if timed(run)[1] > _LONG_ENOUGH:
                break
        del self._sizes[:-3], self.runs[:-3]

    def peak(self, times: Sequence[Sequence[float]], num_devices: int) -> float:
        """FLOP/s of so many devices, from the seconds of several of each of `runs` on one: of the best, the median."""
        copies = 1 if jax.default_backend() == "cpu" else num_devices  # those of a CPU share its cores
        rates = [2 * size**3 / statistics.median(seconds) for size, seconds in zip(self._sizes, times, strict=True)]
        return copies * max(rates)


def product(size: int, dtype: str) -> Callable[[], Any]:
    """What multiplies two square matrices of normal numbers and waits for the result; its first call compiles."""
    rng = jax.random.key(0)
    left, right = (jax.random.normal(jax.random.fold_in(rng, side), (size, size), jnp.dtype(dtype)) for side in (0, 1))
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(left, right).block_until_ready()


def peak_memory(program_bytes: int) -> dict[str, Any]:
    """What a program takes of a device's memory: the device's own high-water mark, or else what the compiler planned.

    A device's mark is that of the process so far, so measure one program in a process. A CPU keeps none; there the mark
    of the whole process, Python and compiler included, is told besides.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"peak_memory_bytes": stats["peak_bytes_in_use"], "peak_memory_source": "device"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_memory_bytes": program_bytes,
        "peak_memory_source": "compiled program",
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def measured(workload: Workload, *, steps: int, dtype: str) -> dict[str, Any]:
    """Runs a workload in turn with large matrix products.

    Args:
      workload: ready to run.
      steps: units to time, after one more that is not.
      dtype: of the products.

    Returns:
      What `tfx-jax bench` says about it, by names that end in their unit; None where nothing is known.
    """
    workload.run()
    memory = peak_memory(workload.program_bytes)  # before the products, which take memory too
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
