"""What devices could compute at most.

The FLOPs of a step (`tfx_jax.models.flops`) over this is the model FLOP utilisation (MFU) of PaLM (Chowdhery et al.,
2022, appendix B, https://arxiv.org/abs/2204.02311).
"""

from collections.abc import Sequence

# Peak dense bfloat16 FLOP/s of one JAX device, by `device_kind`. Sparsity, which doubles what datasheets print, is left
# out. A kind that is not listed has no known peak: better no utilisation than a wrong one.
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
