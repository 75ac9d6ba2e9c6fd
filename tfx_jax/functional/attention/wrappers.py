"""Decorators of attention functions: empty inputs, explicit mesh axes, overloads for `return_weights`."""

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tfx_jax.functional.attention.masks import check_heads

P = ParamSpec("P")
R = TypeVar("R")

EXTRA_OUTPUTS = ("return_weights", "return_log_prob", "return_probs", "return_lse")
"""Options that request further results, in the order of these results; all results are [B, N, T, ...]."""


def check_outputs(return_weights: bool, return_lse: bool) -> None:
    """Raises ValueError if both are requested."""
    if return_weights and return_lse:
        raise ValueError(
            "return_weights and return_lse exclude each other: call twice under jit, which computes the logits once"
        )


def zeros_where_empty(attention: Callable[P, R]) -> Callable[P, R]:
    """Makes an attention return zeros for empty inputs, which blocks and reductions do not support.

    Zeros are also the output of a query that sees no key. For empty inputs only heads and dtypes are checked.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and options.

    Returns:
      The function with empty inputs handled. If B, T or S is 0, it returns zeros, [B, T, N, U], in the dtype of
      `query`, and zeros for the other requested results: weights, [B, N, T, S], log-probabilities, [B, N, T], and
      probabilities, [B, N, T, S]. The logarithm of the softmax denominator, [B, N, T], is minus infinity.
    """

    @functools.wraps(attention)
    def attend(*args: P.args, **kwargs: P.kwargs) -> R:
        query, key, value = bind_inputs(args, kwargs)
        check_heads(query, key, value)
        if query.size and key.size:
            return attention(*args, **kwargs)
        (b, t, n, _), s, u = query.shape, key.shape[1], value.shape[-1]
        shapes = dict(zip(EXTRA_OUTPUTS, ((b, n, t, s), (b, n, t), (b, n, t, s), (b, n, t)), strict=True))
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        requested = [
            jnp.full(shape, -jnp.inf if option == "return_lse" else 0, dtype)
            for option, shape in shapes.items()
            if kwargs.get(option)
        ]
        out = jnp.zeros((b, t, n, u), query.dtype)
        return cast(R, (out, *requested) if requested else out)

    return attend


def bind_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns query, key and value from positional and keyword arguments."""
    names = ("query", "key", "value")
    query, key, value = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
    return query, key, value


def _canonical(x: Any) -> Any:
    """Casts NumPy's 64-bit floating-point arrays to the dtype that JAX would use."""
    if isinstance(x, np.ndarray) and x.dtype in (np.float64, np.complex128):
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def divided_as_queries(attention: Callable[P, R]) -> Callable[P, R]:
    """Lets an attention take arrays on a mesh with explicit axes; its results are sharded like the queries.

    On explicit axes JAX must know the sharding of every intermediate result, which is ambiguous when a sequence is cut
    into blocks or sorted. Only the sharding of the results is stated here; inside, the axes are Auto, and the compiler
    decides.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and options.

    Returns:
      The function with explicit axes handled. On a mesh with explicit axes, the axes B, T and N of the results are
      sharded like those of `query`; the other axes are not sharded.
    """

    @functools.wraps(attention)
    def attend(*args: P.args, **kwargs: P.kwargs) -> R:
        # NumPy float64 becomes float32 unless jax_enable_x64 is set. Cast once here, to avoid a warning at each use.
        args, kwargs = jax.tree.map(_canonical, (args, kwargs), is_leaf=lambda x: x is None)
        sharding = jax.typeof(bind_inputs(args, kwargs)[0]).sharding
        axes = sharding.mesh.explicit_axes
        if not axes:
            return attention(*args, **kwargs)
        b, t, n, _ = (*sharding.spec, None, None, None, None)[:4]  # a spec may omit trailing axes
        # The output is [B, T, N, U] and further results are [B, N, T, ...]; the axes without a name are not sharded.
        specs = [PartitionSpec(b, t, n), *(PartitionSpec(b, n, t) for option in EXTRA_OUTPUTS if kwargs.get(option))]
        shardings = [NamedSharding(sharding.mesh, spec) for spec in specs]
        # `auto_axes` takes arrays only, so flatten the arguments, pass the arrays, and close over all other leaves.
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        array_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def attend_to(*arrays: Any) -> R:
            traced_leaves = dict(enumerate(leaves)) | dict(zip(array_indices, arrays, strict=True))
            traced_args, traced_kwargs = jax.tree.unflatten(structure, traced_leaves.values())
            return cast(Callable[..., R], attention)(*traced_args, **traced_kwargs)

        out_sharding = tuple(shardings) if len(shardings) > 1 else shardings[0]
        sharded: Any = jax.sharding.auto_axes(attend_to, axes=axes, out_sharding=out_sharding)
        return sharded(*(leaves[i] for i in array_indices))

    return attend


class WeightsOnRequest(Protocol[P]):
    """Type of an attention: returns an array, or with `return_weights=True` a pair of arrays."""

    # Calls with `return_weights` or `return_lse` are not type-checked further: a ParamSpec cannot be extended.
    @overload
    def __call__(self, *args: Any, return_lse: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: bool, **options: Any) -> Array | tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Array: ...


def weights_on_request(attention: Callable[P, Array | tuple[Array, Array]]) -> WeightsOnRequest[P]:
    """Casts an attention to the overloaded type `WeightsOnRequest`; has no effect at run time."""
    return cast(Any, attention)
