"""Attention functions that `bench` measures: those of `SPECS`, with the options of their `example`, and a few more."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from tfx_jax import functional
from tfx_jax.functional.attention import SPECS
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions


class Measured(NamedTuple):
    """An attention function that can be measured."""

    make: Callable[[int, int, int], Callable[..., Any]]
    """`make(length, num_heads, head_size)` returns the function with its own options and parameters bound."""
    is_exact: bool = False
    """Whether its values equal those of `dot_product_attention`, and so its model FLOPs."""
    causal_only: bool = False
    """Whether it supports causal attention only."""


def _from_spec(name: str) -> Measured:
    """Returns the attention of `SPECS` with this name, with the options of its example and random parameters."""
    spec = SPECS[name]

    def make(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
        """Returns the attention for these shapes; one with gates gets them as `_with_gates` makes them."""
        options = AttentionOptions(**spec.example(length))
        core = AttentionConfig(name, options).make(num_heads, head_size, rngs=nnx.Rngs(0))
        if spec.gates is None:
            return core
        shapes = spec.gates(num_heads=num_heads, num_kv_heads=num_heads, d_k=head_size, **options.given)
        return functools.partial(_with_gates, core, shapes)

    return Measured(make, spec.is_exact, spec.causal_only)


def _with_gates(
    core: Callable[..., Any], shapes: dict[str, tuple[int, ...]], query: Array, key: Array, *args: Any, **options: Any
) -> Any:
    """Calls the attention function `core` with gates [B, S, *shape], filled with the features of the keys.

    `shapes` has the shape of each gate by name; features are repeated if a gate needs more than there are.
    """
    features = key.reshape(*key.shape[:2], -1)  # [B, S, N * H]
    gates = {}
    for name, shape in shapes.items():
        indices = np.arange(math.prod(shape)) % features.shape[-1]
        gates[name] = features[..., indices].reshape(*key.shape[:2], *shape)
    return core(query, key, *args, **gates, **options)


def _xla(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    """Returns dense attention as XLA computes it, without kernels."""
    return functools.partial(functional.dot_product_attention, implementation="xla")


def _aligned(length: int, num_heads: int, head_size: int) -> Callable[..., Any]:
    """Returns attention around each query's own position."""
    position = jnp.arange(length, dtype=jnp.float32)[None, None]
    return functools.partial(functional.aligned_attention, position=position, window=10, sigma=5.0)


# Ring attention is left out: its arguments depend on the devices that share the sequence.
ATTENTIONS = {
    **{name: _from_spec(name) for name in SPECS},
    "xla": Measured(_xla, is_exact=True),
    "aligned": Measured(_aligned),
}
