"""What an attention is where there is nothing to attend with or to."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax.numpy as jnp

from tfx_jax.functional.masks import check_heads

P = ParamSpec("P")
R = TypeVar("R")

EXTRA_OUTPUTS = ("return_weights", "return_log_prob", "return_probs")
"""The options that ask for more than the output, in the order of what they ask for: [B, N, T, ...] all."""


def zeros_where_empty(attention: Callable[P, R]) -> Callable[P, R]:
    """Gives an attention its answer for no rows, no queries or no keys, of which blocks and reductions have no idea.

    A query that sees no key gets zeros, so one of no keys at all does; no other check of arguments is made then.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and its options.

    Returns:
      The same function. Where B, T or S is 0 it returns zeros, [B, T, N, U], in the dtype of `query`, and those of what
      else is asked for: weights, [B, N, T, S], log-probabilities, [B, N, T], and probabilities, [B, N, T, S].
    """

    @functools.wraps(attention)
    def attend(*args: P.args, **kwargs: P.kwargs) -> R:
        query, key, value = bind_inputs(args, kwargs)
        check_heads(query, key, value)
        if query.size and key.size:
            return attention(*args, **kwargs)
        (b, t, n, _), s, u = query.shape, key.shape[1], value.shape[-1]
        shapes = dict(zip(EXTRA_OUTPUTS, ((b, n, t, s), (b, n, t), (b, n, t, s)), strict=True))
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        asked = [jnp.zeros(shape, dtype) for option, shape in shapes.items() if kwargs.get(option)]
        out = jnp.zeros((b, t, n, u), query.dtype)
        return cast(R, (out, *asked) if asked else out)

    return attend


def bind_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Finds query, key and value among the arguments, however they were passed."""
    names = ("query", "key", "value")
    query, key, value = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
    return query, key, value
