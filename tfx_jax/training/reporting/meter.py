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

# Peak dense bfloat16 FLOP/s of one JAX device, by `device_kind`. Sparsity, which doubles what datasheets print, is left
# out. A kind that is not listed has no known peak: better no utilization than a wrong one.
# TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages on each version, per chip. The chips
# of v2, v3 and 7x are two JAX devices each.
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
    # These two know no bfloat16: their float16 peak.
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
}


def peak_flops(device_kinds: Sequence[str]) -> float | None:
    """Sums the published peak dense bfloat16 FLOP/s of devices; None if that of one is not known, as of a CPU.

    >>> peak_flops(["TPU v4", "TPU v4"]), peak_flops(["cpu"])
    (550000000000000.0, None)
    """
    peaks = [_PEAK_FLOPS.get(kind) for kind in device_kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


PARTS = ("data", "compile", "step", "save", "evaluate")
"""Where time goes; every second of the loop belongs to exactly one."""


class MetricAccumulator:
    """Sums the metrics of many steps without making the device wait: a step's are fetched while the next one runs.

    The seconds are the host's: what it does not spend in a part that is timed is "step", starting steps and waiting for
    them. The device works on while the host waits for data, which therefore costs training time only where the step's
    share falls to almost nothing.
    """

    def __init__(self, flops_fn: Callable[[Batch], int], device_kinds: Sequence[str]):
        """Starts the clock.

        Args:
          flops_fn: returns the model FLOPs of a step from its batch; called once for batches of the same shapes, and
            not at all where the devices' peak is unknown.
          device_kinds: of each device that trains it, its `device_kind`.
        """
        self._flops_fn = flops_fn
        self._peak = peak_flops(device_kinds)
        self._flops_of: dict[tuple[tuple[int, ...], ...], int] = {}
        self._waiting: list[tuple[int, Metrics]] = []
        self._part = "step"
        self._since = time.monotonic()
        self._restart()

    def _restart(self) -> None:
        self._sums: Metrics | None = None
        self._steps = 0  # that were not skipped
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._flops = 0

    def add(self, step: int, metrics: Metrics) -> list[tuple[int, Metrics]]:
        """Takes the metrics of a step that was just started; returns those of the steps that are done."""
        done = self.drain()
        self._waiting.append((step, metrics))
        return done

    def drain(self) -> list[tuple[int, Metrics]]:
        """Waits for everything; returns (step, metrics) of what came in."""
        done = []
        for step, metrics in self._waiting:
            fetched = counted = jax.tree.map(lambda value: float(np.asarray(value)), metrics)
            if fetched.numbers.get("bad"):  # what a skipped step saw does not belong into the curves
                counted = jax.tree.map(lambda _: 0.0, fetched)
                counted.numbers["bad"] = 1.0
            else:
                self._steps += 1
            self._sums = jax.tree.map(operator.add, self._sums, counted) if self._sums else counted
            done.append((step, fetched))
        self._waiting.clear()
        return done

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Counts the seconds inside for `part`, one of PARTS, and not for the part around it."""
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    @contextlib.contextmanager
    def starting(self, batch: Batch) -> Iterator[None]:
        """Times the start of a step, which compiles the program if a batch has a shape not seen before."""
        shapes = tuple(array.shape for array in jax.tree.leaves(batch))
        is_new = shapes not in self._flops_of
        if is_new:  # or what the device does meanwhile would seem to take no time
            jax.block_until_ready(self._waiting)
        with self.timed("compile" if is_new else "step"):
            if is_new:
                self._flops_of[shapes] = 0 if self._peak is None else self._flops_fn(batch)
            yield
        self._flops += self._flops_of[shapes]

    def take(self) -> dict[str, float]:
        """Returns TensorBoard's scalars for what came since the last call, and starts again.

        Returns:
          The seconds of each part, "time/step" and so on, and "train/loss" and the other metrics' means. Rates are
          over the seconds of "data" and "step": compiling, saving and evaluating show for themselves. "train/mfu" is
          there if the devices' peak is known. If no step is done, there are only the seconds of saving and evaluating;
          if all of them were skipped, no means.
        """
        self._switch(self._part)
        found = self._means(self._sums) if self._sums else {}
        parts = PARTS if self._sums else ("save", "evaluate")
        found |= {f"time/{part}": self._seconds[part] for part in parts}
        self._restart()
        return found

    def _means(self, sums: Metrics) -> dict[str, float]:
        bad = {"train/bad_steps": sums.numbers["bad"]} if "bad" in sums.numbers else {}
        if not self._steps:
            return bad
        seconds = max(self._seconds["data"] + self._seconds["step"], 1e-9)
        means = {f"train/{name}": metric.mean for name, metric in sums.means.items()} | {
            "train/grad_norm": sums.numbers["grad_norm"] / self._steps,
            "train/tokens_per_second": sums.numbers["tokens"] / seconds,
            "train/tokens_per_step": sums.numbers["tokens"] / self._steps,
        }
        if self._peak is not None:
            means["train/mfu"] = self._flops / (seconds * self._peak)
        return means | bad

    def _switch(self, part: str) -> str:
        """Ends the current part and begins another; returns the one that ended."""
        now, before = time.monotonic(), self._part
        self._seconds[before] += now - self._since
        self._since, self._part = now, part
        return before
