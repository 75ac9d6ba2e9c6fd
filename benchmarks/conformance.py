r"""The conformance kit run on the attention functions of other packages.

    pip install flax equinox tokamax keras x-transformers torch
    python -m benchmarks.conformance [--output=docs/conformance.md]

checks the installed packages, on this machine's CPU, with the cases of `tfx_jax.testing` and prints a table and every
case that is wrong or refused. A function with another layout or other names of arguments is called through an adapter
of this file; PyTorch's functions, whose gradients PyTorch computes, through a callback.
"""

import argparse
import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

from tfx_jax.testing import CASES, check_attention


def jax_nn() -> Any:
    return jax.nn.dot_product_attention


def tfx_jax() -> Any:
    from tfx_jax.functional import dot_product_attention

    return dot_product_attention


def flax() -> Any:
    from flax import nnx

    return nnx.dot_product_attention


def tokamax() -> Any:
    function = importlib.import_module("tokamax").dot_product_attention
    return functools.partial(function, implementation="xla")  # its kernels are for GPUs and TPUs


def keras() -> Any:
    ops = importlib.import_module("keras").ops

    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: float | None = None,
        is_causal: bool = False,
        logits_soft_cap: float | None = None,
    ) -> Any:
        return ops.dot_product_attention(
            query, key, value, bias, mask, scale, is_causal, attn_logits_soft_cap=logits_soft_cap
        )

    return attention


def equinox() -> Any:
    # The function that `MultiheadAttention` calls for each head.
    dot_product_attention = importlib.import_module("equinox.nn._attention").dot_product_attention

    def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        mask = jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(mask, shape)
        over_heads = jax.vmap(dot_product_attention, in_axes=(1, 1, 1, 0), out_axes=1)
        return jax.vmap(over_heads)(query, key, value, mask)

    return attention


def pytorch() -> Any:
    return _through_torch(importlib.import_module("torch").nn.functional.scaled_dot_product_attention)


def x_transformers() -> Any:
    make_attend = importlib.import_module("x_transformers.attend").Attend

    def attend(
        query: Any, key: Any, value: Any, *, attn_mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Any:
        del enable_gqa
        module = make_attend(causal=is_causal, scale=scale)
        is_bias = attn_mask is not None and attn_mask.is_floating_point()
        options = {} if attn_mask is None else {"attn_bias" if is_bias else "mask": attn_mask}
        return module(query, key, value, **options)[0]

    return _through_torch(attend)


def _through_torch(function: Callable[..., Any]) -> Any:
    """Wraps a PyTorch function with the signature of `scaled_dot_product_attention` as a function of JAX arrays.

    PyTorch computes outputs and gradients in callbacks from JAX.
    """
    torch: Any = importlib.import_module("torch")

    def tensor(array: Any) -> Any:
        array = np.asarray(array)
        is_bfloat16 = array.dtype == jnp.bfloat16  # PyTorch cannot read this NumPy dtype, so it is passed as float32
        return torch.tensor(array.astype(np.float32)).bfloat16() if is_bfloat16 else torch.tensor(array)

    def numpy(output: Any, dtype: Any) -> Any:
        return output.detach().float().numpy().astype(dtype)

    def call(arrays: Any, options: dict[str, Any]) -> Any:
        """Returns (tensors of the inputs, output); inputs are [B, T, N, H], PyTorch's are [B, N, T, H]."""
        leaves = [tensor(array) for array in arrays]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point())
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves[:3])
        mask = leaves[3] if len(leaves) > 3 else None
        return leaves, function(query, key, value, attn_mask=mask, **options).transpose(1, 2)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> Any:
        if bias is not None and mask is not None:
            bias = jnp.where(mask, bias, -jnp.inf)
        extra = mask if bias is None else bias
        options = {"scale": scale, "is_causal": is_causal, "enable_gqa": query.shape[2] != key.shape[2]}
        shape = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)

        @jax.custom_vjp
        def attend(*arrays: Any) -> Any:
            def output(*arrays: Any) -> Any:
                return numpy(call(arrays, options)[1], shape.dtype)

            return jax.pure_callback(output, shape, *arrays, vmap_method="sequential")

        def forward(*arrays: Any) -> Any:
            return attend(*arrays), arrays

        def backward(arrays: Any, cotangent: Any) -> Any:
            floats = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays if array.dtype != bool]

            def gradients(*arrays: Any) -> Any:
                leaves, output = call(arrays[:-1], options)
                output.backward(tensor(arrays[-1]))
                return [numpy(leaf.grad, shape.dtype) for leaf in leaves if leaf.is_floating_point()]

            found = jax.pure_callback(gradients, floats, *arrays, cotangent, vmap_method="sequential")
            return (*found, *[None] * (len(arrays) - len(floats)))

        attend.defvjp(forward, backward)
        return attend(query, key, value, *([] if extra is None else [jnp.asarray(extra)]))

    return attention


PACKAGES = {
    "jax": jax_nn,
    "flax": flax,
    "tokamax": tokamax,
    "keras": keras,
    "equinox": equinox,
    "torch": pytorch,
    "x-transformers": x_transformers,
    "tfx-jax": tfx_jax,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write the report to this file")
    parser.add_argument(
        "--packages", nargs="*", default=list(PACKAGES), choices=list(PACKAGES), help="these alone (all)"
    )
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # tokamax reads its flags from it
    table = ["| package | passed | refused | unsupported | wrong |", "|---|--:|--:|--:|--:|"]
    details = []
    for package in arguments.packages:
        try:
            version, function = importlib.metadata.version(package), PACKAGES[package]()
        except ImportError:
            print(f"{package} is not installed")
            continue
        checks = check_attention(function)
        outcomes = [check.outcome for check in checks]
        counts = (str(outcomes.count(outcome)) for outcome in ("passed", "refused", "unsupported", "wrong"))
        table.append(f"| {package} {version} | {' | '.join(counts)} |")
        found = [check for check in checks if check.outcome in ("refused", "wrong")]
        details += [f"- {package}, {check.case}: {check.outcome}: {check.detail}" for check in found]
        print(table[-1], flush=True)
    report = "\n".join([f"{len(CASES)} cases, Python {platform.python_version()}, CPU.", "", *table, "", *details, ""])
    print(report)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(report)


if __name__ == "__main__":
    main()
