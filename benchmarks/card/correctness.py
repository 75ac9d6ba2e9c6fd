"""Implementations of dense attention against the formula in float64, forward and backward."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tfx_jax.functional import dot_product_attention

IMPLEMENTATIONS = (None, "xla", "chunked", "cudnn", "splash", "flash", "rows")
"""All that `dot_product_attention` has; None is its own choice. Those for other devices are refused, with a reason."""

CASES: dict[str, dict[str, Any]] = {
    "all pairs": {},
    "causal, grouped queries": {"is_causal": True, "num_kv_heads": 2},
    "padding": {"lengths": True},
}
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest error by dtype, as a fraction of the largest value."""


def reference(query: Any, key: Any, value: Any, gradient: Any, visible: Any) -> dict[str, np.ndarray]:
    """Returns output and gradients of scaled dot-product attention, in float64.

    With P = softmax(Q K' s): dV = P' dO, dP = dO V', dS = P (dP - sum(dP P)), dQ = s dS K and dK = s dS' Q.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H]; each of the K heads serves N / K heads of queries.
      value: [B, S, K, H].
      gradient: gradient of the output, [B, T, N, H].
      visible: whether each query sees each key, broadcastable to [B, N, T, S].
    """
    query, key, value, gradient = (np.asarray(array).astype(np.float64) for array in (query, key, value, gradient))
    scale, groups = query.shape[-1] ** -0.5, query.shape[2] // key.shape[2]
    keys, values = (np.repeat(array, groups, axis=2) for array in (key, value))
    logits = np.where(visible, np.einsum("btnh,bsnh->bnts", query, keys) * scale, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    weights_gradient = np.einsum("btnh,bsnh->bnts", gradient, values)
    logits_gradient = weights * (weights_gradient - (weights_gradient * weights).sum(-1, keepdims=True)) * scale
    keys_gradient = np.einsum("bnts,btnh->bsnh", logits_gradient, query)
    values_gradient = np.einsum("bnts,btnh->bsnh", weights, gradient)
    return {
        "output": np.einsum("bnts,bsnh->btnh", weights, values),
        "query": np.einsum("bnts,bsnh->btnh", logits_gradient, keys),
        "key": keys_gradient.reshape(*key.shape[:3], groups, -1).sum(3),
        "value": values_gradient.reshape(*value.shape[:3], groups, -1).sum(3),
    }


def rows(size: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, dtype and implementation, with the largest errors."""
    is_full = size == "full"
    length, heads, head_size = (512, 8, 64) if is_full else (32, 4, 16)
    rng = np.random.default_rng(0)
    for case, options in CASES.items() if is_full else list(CASES.items())[1:2]:
        num_kv_heads = options.get("num_kv_heads", heads)
        shapes = [(2, length, count, head_size) for count in (heads, num_kv_heads, num_kv_heads, heads)]
        drawn = [rng.normal(size=shape) for shape in shapes]
        lengths = np.array([length, length - 5], np.int32) if options.get("lengths") else None
        columns = np.arange(length)
        visible = np.ones((1, 1, length, length), bool)
        if options.get("is_causal"):
            visible = (columns <= columns[:, None])[None, None]
        if lengths is not None:
            visible = (columns < lengths[:, None])[:, None, None]
        for dtype in LIMITS:
            arrays = [jax.numpy.asarray(array, dtype) for array in drawn]
            query, key, value, gradient = arrays
            expected = reference(query, key, value, gradient, visible)
            for name in IMPLEMENTATIONS:
                row = {"row": case, "dtype": dtype, "implementation": name or "default"}
                calling = {"is_causal": options.get("is_causal", False), "key_lengths": lengths, "implementation": name}
                try:
                    errors = errors_of(arrays, expected, calling)
                except Exception as error:
                    yield row | {"outcome": f"not here: {' '.join(str(error).split())}"}
                    continue
                is_right = max(errors.values()) <= LIMITS[dtype]
                yield row | errors | {"outcome": "correct" if is_right else f"WRONG: above {LIMITS[dtype]:g}"}


def errors_of(arrays: list[Any], expected: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, float]:
    """Returns the largest error of output and gradients, as fractions of the largest expected value."""
    *inputs, gradient = arrays

    @jax.jit
    def forward_and_backward(*arrays: Any) -> Any:
        out, pull_back = jax.vjp(lambda *inputs: dot_product_attention(*inputs, **options), *arrays[:3])
        return out, *pull_back(arrays[3])

    # Otherwise a GPU rounds factors of products of float32 to 10 bits.
    precision = "highest" if gradient.dtype == "float32" else "default"
    with jax.default_matmul_precision(precision):
        results = forward_and_backward(*inputs, gradient)
    return {
        name: float(np.abs(np.asarray(result).astype(np.float64) - expected[name]).max() / np.abs(expected[name]).max())
        for name, result in zip(expected, results, strict=True)
    }
