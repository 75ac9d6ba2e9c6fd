"""Reversible residual layers: the backward pass recomputes activations from outputs instead of storing them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Residual = Callable[..., Array]
"""`f(params, x, rng, *shared)` with the parameters and the PRNG key of one layer returns an array like x."""

Streams = tuple[Float[Array, "*shape"], Float[Array, "*shape"]]
"""The pair (x1, x2), or (y1, y2) after a layer."""


def reversible_stack(
    f: Residual,
    g: Residual,
    params: tuple[Any, Any],
    x1: Float[Array, "*shape"],
    x2: Float[Array, "*shape"],
    *shared: Any,
    rng: Array | None = None,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    r"""Runs a stack of reversible residual layers with activation memory that does not grow with their number.

    Equations 7 and 8 of "The Reversible Residual Network" (Gomez et al., 2017, https://arxiv.org/abs/1707.04585); in
    section 3 of the Reformer (Kitaev et al., 2020, https://arxiv.org/abs/2001.04451) f is attention and g the
    feed-forward layer. Every layer computes

        y1 = x1 + f(x2),   y2 = x2 + g(y1).

    The backward pass starts from the outputs of the stack and recovers the inputs of each layer, x2 = y2 - g(y1) and
    x1 = y1 - f(x2), instead of reading them from memory; f and g are each computed three times instead of two. Rounded
    sums are not undone exactly, so keep x1 and x2 in float32, whatever the dtype inside of f and g. A function with
    comparisons (LSH buckets, top-k) may still decide a near tie differently in the backward pass.

    Args:
      f: called as f(params, x, rng, *shared); returns an array like x. It must be a pure function and must not close
        over traced arrays: pass these in `params` or `shared`. It gets the same rng in both passes, so that dropout is
        repeated exactly.
      g: like f.
      params: (parameters of f, parameters of g), pytrees of floating-point arrays with a leading layer axis, [L, ...].
      x1: the stream that f is added to, [*shape]. The Reformer starts both streams from the same embeddings.
      x2: the stream that g is added to, [*shape].
      shared: further inputs of all layers (a mask, the output of an encoder): any pytrees; floating-point arrays get
        gradients.
      rng: PRNG key, split for all calls of f and g; None passes None to all.

    Returns:
      y1 and y2 of the last layer.

    Raises:
      ValueError: if the streams differ in shape or dtype, or the parameters do not share their leading axis.

    >>> double = lambda weight, x, rng: weight * x
    >>> y1, y2 = reversible_stack(double, double, (jnp.ones(3), jnp.ones(3)), jnp.array(1.0), jnp.array(0.0))
    >>> y1.item(), y2.item()
    (5.0, 8.0)
    """
    if (x1.shape, x1.dtype) != (x2.shape, x2.dtype):
        raise ValueError(
            f"x1 and x2 must have equal shapes and dtypes, got {x1.dtype} {x1.shape} and {x2.dtype} {x2.shape}"
        )
    f_params, g_params = params
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(params)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(f"all parameters must have the same leading layer axis, got {sorted(lengths)}")
    rngs = None if rng is None else jax.random.split(rng, (*lengths.pop(), 2))
    # Two trees with the structure of `shared`, one of its differentiable arrays, one of its other leaves. A leaf of one
    # is None in the other.
    floats = jax.tree.map(lambda x: x if _is_float(x) else None, shared)
    others = jax.tree.map(lambda x: None if _is_float(x) else x, shared)
    return _stack(f, g, (f_params, g_params), (x1, x2), rngs, floats, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stack(
    f: Residual, g: Residual, params: Any, streams: Streams, rngs: Array | None, floats: Any, others: Any
) -> Streams:
    """Computes y1 = x1 + f(x2) and y2 = x2 + g(y1) in each layer; `floats` and `others` are the arguments `shared`."""

    def layer(streams: Streams, params_and_rngs: Any) -> tuple[Streams, None]:
        """Returns the outputs of one layer."""
        x1, x2 = streams
        (f_params, g_params), rngs = params_and_rngs
        y1 = x1 + _call(f, rngs, others, which=0)(f_params, x2, floats)
        y2 = x2 + _call(g, rngs, others, which=1)(g_params, y1, floats)
        return (y1, y2), None

    return jax.lax.scan(layer, streams, (params, rngs))[0]


def _stack_forward(
    f: Residual, g: Residual, params: Any, streams: Streams, rngs: Array | None, floats: Any, others: Any
) -> tuple[Streams, Any]:
    """Returns the outputs of `_stack` and the residuals of its backward pass, which hold no inputs of layers."""
    outputs: Any = _stack(f, g, params, streams, rngs, floats, others)
    return outputs, (params, outputs, rngs, floats, others)


def _stack_backward(f: Residual, g: Residual, saved: Any, gradients: Streams) -> Any:
    """Recomputes the inputs of each layer, last layer first: x2 = y2 - g(y1) and x1 = y1 - f(x2).

    Args:
      f: first residual function of a layer.
      g: second residual function of a layer.
      saved: residuals of `_stack_forward`: parameters, outputs of the last layer, keys, `floats` and `others`.
      gradients: gradients of the outputs of the last layer.

    Returns:
      Gradients of the array arguments of `_stack`: parameters, streams, None for the keys, floats, None for the others.
    """
    params, outputs, rngs, floats, others = saved

    def layer(carry: Any, params_and_rngs: Any) -> tuple[Any, Any]:
        """Steps back through one layer; `d_` marks gradients. Returns the new carry and those of its parameters."""
        (y1, y2), (d_y1, d_y2), d_floats = carry
        (f_params, g_params), rngs = params_and_rngs
        g_of_y1, g_vjp = jax.vjp(_call(g, rngs, others, which=1), g_params, y1, floats)
        x2 = y2 - g_of_y1
        d_g_params, d_y1_by_g, d_floats_by_g = g_vjp(d_y2)
        d_x1 = d_y1 + d_y1_by_g  # x1 reaches the outputs through y1 only, as y1 = x1 + f(x2)
        f_of_x2, f_vjp = jax.vjp(_call(f, rngs, others, which=0), f_params, x2, floats)
        x1 = y1 - f_of_x2
        d_f_params, d_x2_by_f, d_floats_by_f = f_vjp(d_x1)
        d_x2 = d_y2 + d_x2_by_f
        d_floats = jax.tree.map(lambda *parts: sum(parts), d_floats, d_floats_by_f, d_floats_by_g)
        return ((x1, x2), (d_x1, d_x2), d_floats), (d_f_params, d_g_params)

    # The carry: outputs of a layer, gradients of these, and running sums of the gradients of `floats`.
    start = outputs, gradients, jax.tree.map(jnp.zeros_like, floats)
    (_, d_streams, d_floats), d_params = jax.lax.scan(layer, start, (params, rngs), reverse=True)
    return d_params, d_streams, None, d_floats, None


_stack.defvjp(_stack_forward, _stack_backward)


def _call(residual: Residual, rngs: Array | None, others: Any, *, which: int) -> Callable[..., Array]:
    """Returns f or g of one layer as a function of its differentiable inputs; `which` is 0 for f, 1 for g."""

    def call(params: Any, x: Array, floats: Any) -> Array:
        # Join the differentiable and the other leaves of the inputs `shared` of `reversible_stack`.
        shared = jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda x: x is None)
        return residual(params, x, None if rngs is None else rngs[which], *shared).astype(x.dtype)

    return call


def _is_float(x: Any) -> bool:
    """Returns whether a leaf has a floating-point or complex dtype, and so a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
