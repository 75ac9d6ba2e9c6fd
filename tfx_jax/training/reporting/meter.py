"""Step metrics, throughput and model FLOPs utilization (MFU).

MFU is the FLOPs of a step (`tfx_jax.training.flops`) over the peak of the devices, as PaLM defines it (Chowdhery et
al., 2022, appendix B, https://arxiv.org/abs/2204.02311).
"""

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from tfx_jax.training.step import Batch, Metrics

# Peak dense bfloat16 FLOP/s of one JAX device, by `device_kind`, without the factor 2 for sparsity that datasheets
# print. Kinds that are not listed have no known peak, and no utilization is reported.
# TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages on each version, per chip. Chips of
# v2, v3 and 7x are two JAX devices each.
# GPUs: NVIDIA's datasheets of the A100, H100, H200, L4, L40S, A10, T4 and V100 products.
_PEAK_FLOPS = {
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    # These two do not support bfloat16: their float16 peak.
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
}


def peak_flops(device_kinds: Sequence[str]) -> float | None:
    """Returns the sum of the published peak dense bfloat16 FLOP/s of devices; None if one is unknown, such as a CPU's.

    >>> peak_flops(["TPU v4", "TPU v4"]), peak_flops(["cpu"])
    (550000000000000.0, None)
    """
    peaks = [_PEAK_FLOPS.get(kind) for kind in device_kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


PARTS = ("data", "compile", "step", "save", "evaluate")
"""Parts of the loop's time; every second belongs to exactly one part."""


class MetricAccumulator:
    """Accumulates metrics of many steps without stalling the device: they are fetched while the next step runs.

    Seconds are measured on the host: time outside the timed parts is "step", which starts steps and waits for them. The
    device keeps running while the host waits for data, so "data" costs training time only if "step" takes almost none.
    """

    def __init__(self, flops_fn: Callable[[Batch], int], device_kinds: Sequence[str]):
        """Starts the clock.

        Args:
          flops_fn: returns the model FLOPs of a step from its batch; called once per batch shape, and never if the peak
            of the devices is unknown.
          device_kinds: `device_kind` of each device in the mesh.
        """
        self._flops_fn = flops_fn
        self._peak = peak_flops(device_kinds)
        self._flops_by_shapes: dict[tuple[tuple[int, ...], ...], int] = {}  # by the shapes of a batch
        self._waiting: list[tuple[int, Metrics]] = []
        self._part = "step"
        self._part_began_at = time.monotonic()
        self._restart()

    def _restart(self) -> None:
        """Sets all sums to zero."""
        self._sums: Metrics | None = None
        self._steps = 0  # without skipped steps
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._flops = 0

    def add(self, step: int, metrics: Metrics) -> list[tuple[int, Metrics]]:
        """Adds the metrics of a step that has just been started; returns those of earlier steps, like `drain`."""
        finished = self.drain()
        self._waiting.append((step, metrics))
        return finished

    def drain(self) -> list[tuple[int, Metrics]]:
        """Waits for all steps; returns (step, metrics) of those that have finished since the last call."""
        finished = []
        for step, metrics in self._waiting:
            fetched = jax.tree.map(lambda value: float(np.asarray(value)), metrics)  # waits for the device
            summands = fetched
            if fetched.numbers.get("bad"):  # metrics of skipped steps are not part of the curves
                summands = jax.tree.map(lambda _: 0.0, fetched)
                summands.numbers["bad"] = 1.0
            else:
                self._steps += 1
            self._sums = jax.tree.map(operator.add, self._sums, summands) if self._sums else summands
            finished.append((step, fetched))
        self._waiting.clear()
        return finished

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Counts the seconds of the block for `part`, one of PARTS, and not for an enclosing part."""
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    @contextlib.contextmanager
    def starting(self, batch: Batch) -> Iterator[None]:
        """Times the block, which starts a step on `batch`; it compiles if the batch has a new shape."""
        shapes = tuple(array.shape for array in jax.tree.leaves(batch))
        is_new = shapes not in self._flops_by_shapes
        if is_new:  # waits first; otherwise the device's work would count as compilation
            jax.block_until_ready(self._waiting)
        with self.timed("compile" if is_new else "step"):
            if is_new:
                self._flops_by_shapes[shapes] = 0 if self._peak is None else self._flops_fn(batch)
            yield
        self._flops += self._flops_by_shapes[shapes]

    def take(self) -> dict[str, float]:
        """Returns TensorBoard scalars for the time since the last call, and resets the sums.

        Returns:
          Seconds of each part ("time/step" and so on), "train/loss" and the means of other metrics. Rates are relative
          to the seconds of "data" and "step", without compiling, saving and evaluating. "train/mfu" is included if the
          peak of the devices is known. If no step has finished, only the seconds of saving and evaluating are returned;
          if all steps were skipped, there are no means.
        """
        self._switch(self._part)
        scalars = self._means(self._sums) if self._sums else {}
        parts = PARTS if self._sums else ("save", "evaluate")
        scalars |= {f"time/{part}": self._seconds[part] for part in parts}
        self._restart()
        return scalars

    def _means(self, sums: Metrics) -> dict[str, float]:
        """Returns the scalars "train/..." of `take`; only the number of bad steps if all steps were skipped."""
        bad = {"train/bad_steps": sums.numbers["bad"]} if "bad" in sums.numbers else {}
        if not self._steps:
            return bad
        seconds = max(self._seconds["data"] + self._seconds["step"], 1e-9)  # a rate must not divide by zero
        means = {f"train/{name}": metric.mean for name, metric in sums.means.items()} | {
            "train/grad_norm": sums.numbers["grad_norm"] / self._steps,
            "train/tokens_per_second": sums.numbers["tokens"] / seconds,
            "train/tokens_per_step": sums.numbers["tokens"] / self._steps,
        }
        if self._peak is not None:
            means["train/mfu"] = self._flops / (seconds * self._peak)
        return means | bad

    def _switch(self, part: str) -> str:
        """Books the time of the current part and begins another; returns the ended one."""
        now, ended = time.monotonic(), self._part
        self._seconds[ended] += now - self._part_began_at
        self._part_began_at, self._part = now, part
        return ended
