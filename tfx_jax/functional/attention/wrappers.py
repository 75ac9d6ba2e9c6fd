"""Decorators that every attention function shares: empty inputs, explicit mesh axes, overloads for weights."""

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
"""The options that ask for more than the output, in the order of what they ask for: [B, N, T, ...] all."""


def check_outputs(return_weights: bool, return_lse: bool) -> None:
    """Raises ValueError where both are asked for."""
    if return_weights and return_lse:
        raise ValueError("return_weights and return_lse exclude each other: call twice, and jit computes it once")


def zeros_where_empty(attention: Callable[P, R]) -> Callable[P, R]:
    """Gives an attention its answer for no rows, no queries or no keys, of which blocks and reductions have no idea.

    A query that sees no key gets zeros, so one of no keys at all does; no other check of arguments is made then.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and its options.

    Returns:
      The same function. Where B, T or S is 0 it returns zeros, [B, T, N, U], in the dtype of `query`, and those of what
      else is asked for: weights, [B, N, T, S], log-probabilities, [B, N, T], and probabilities, [B, N, T, S]; the
      logarithm of a softmax's denominator, [B, N, T], is minus infinity.
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
        asked = [
            jnp.full(shape, -jnp.inf if option == "return_lse" else 0, dtype)
            for option, shape in shapes.items()
            if kwargs.get(option)
        ]
        out = jnp.zeros((b, t, n, u), query.dtype)
        return cast(R, (out, *asked) if asked else out)

    return attend


def bind_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Finds query, key and value among the arguments, however they were passed."""
    names = ("query", "key", "value")
    query, key, value = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
    return query, key, value


def _canonical(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype in (np.float64, np.complex128):
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def divided_as_queries(attention: Callable[P, R]) -> Callable[P, R]:
    """Lets an attention take arrays of a mesh with explicit axes.

    There every operation has to know how its result is divided, which those that cut a sequence into blocks or sort it
    cannot. Of an attention it is known as a whole: its results are divided as its queries are, and the compiler
    decides inside, as usual on axes of the kind Auto.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and its options.

    Returns:
      The same function. Where a mesh has explicit axes, batch, queries and heads of what it returns are divided as
      those of `query`, and the rest is whole.
    """

    @functools.wraps(attention)
    def attend(*args: P.args, **kwargs: P.kwargs) -> R:
        # float64 of NumPy becomes float32 unless jax_enable_x64 is set; once here, instead of with a warning per use.
        args, kwargs = jax.tree.map(_canonical, (args, kwargs), is_leaf=lambda x: x is None)
        sharding = jax.typeof(bind_inputs(args, kwargs)[0]).sharding
        axes = sharding.mesh.explicit_axes
        if not axes:
            return attention(*args, **kwargs)
        b, t, n, _ = (*sharding.spec, None, None, None, None)[:4]
        specs = [PartitionSpec(b, t, n), *(PartitionSpec(b, n, t) for option in EXTRA_OUTPUTS if kwargs.get(option))]
        shardings = [NamedSharding(sharding.mesh, spec) for spec in specs]
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def attend_to(*arrays: Any) -> R:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            given = jax.tree.unflatten(structure, filled.values())
            return cast(Callable[..., R], attention)(*given[0], **given[1])

        out_sharding = tuple(shardings) if len(shardings) > 1 else shardings[0]
        divided: Any = jax.sharding.auto_axes(attend_to, axes=axes, out_sharding=out_sharding)
        return divided(*(leaves[place] for place in places))

    return attend


class WeightsOnRequest(Protocol[P]):
    """An attention: an array, or with `return_weights=True` a pair of arrays."""

    # Who asks for weights gives up the check of the other arguments: no annotation adds an option to a ParamSpec.
    @overload
    def __call__(self, *args: Any, return_lse: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: bool, **options: Any) -> Array | tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Array: ...


def weights_on_request(attention: Callable[P, Array | tuple[Array, Array]]) -> WeightsOnRequest[P]:
    """Says so of an attention, and changes nothing of it."""
    return cast(Any, attention)
