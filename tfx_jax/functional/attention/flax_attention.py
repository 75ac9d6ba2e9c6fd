"""Attention functions for the slot that Flax's own layers have for one."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.routing import routing_attention


def flax_attention_fn(attention: Callable[..., Any]) -> Callable[..., Array]:
    """Makes an attention fit `attention_fn` of `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadAttention`.

    What differs between both conventions is settled here. Flax may have no batch axis or several, masks of numbers, a
    dtype and a precision to compute in, and it asks for dropout by `deterministic`. With `sow_weights` the weights are
    left in the layer, as its own function does. Two things stay as they are in ours: a query that sees no key gets
    zeros, where Flax gives it the mean of all values; and dropout drops each weight by itself, whatever
    `broadcast_dropout` says.

    With `decode=True` one query meets a cache of full length, whose mask shows what is written: the query is the last
    of these tokens, and sees none after it, whatever `is_causal` says. An attention that needs the queries of all
    tokens at once raises ValueError.

    Args:
      attention: any attention of `tfx_jax.functional` with its options bound, or a function with their signature. It
        has to take what the layer asks for, such as a mask or dropout, or raises as it does elsewhere.

    Returns:
      A function of query [*batch, T, N, H], key [*batch, S, K, H] and value [*batch, S, K, U] to [*batch, T, N, U]
      with Flax's options.

    >>> import functools
    >>> from flax import nnx
    >>> from tfx_jax.functional import sliding_window_attention
    >>> attention_fn = flax_attention_fn(functools.partial(sliding_window_attention, window=2))
    >>> make = functools.partial(nnx.MultiHeadAttention, 2, 8, attention_fn=attention_fn, decode=False)
    >>> jax.eval_shape(lambda x: make(rngs=nnx.Rngs(0))(x), jnp.ones((1, 5, 8))).shape
    (1, 5, 8)
    """

    def attend(
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K U"],
        bias: Float[Array, "*#batch #N #T #S"] | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch T N U"]:
        del broadcast_dropout
        if dtype is None:
            dtype = jnp.result_type(query, key, value)
        *batch, t, n, _ = query.shape
        query, key, value = (x.astype(dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        options: dict[str, Any] = {"bias": _with_one_batch_axis(bias, batch)}
        options["mask"] = _with_one_batch_axis(None if mask is None else mask.astype(bool), batch)
        is_step = t == 1 < key.shape[1] and mask is not None  # of decode=True: the mask hides the cache's room
        if is_step:
            _check_step(attention)
        elif is_causal and t != key.shape[1]:  # Flax aligns both at their beginnings, this library at their ends
            options["mask"] = _and(options["mask"], jnp.tril(jnp.ones((t, key.shape[1]), bool)))
        elif is_causal:
            options["is_causal"] = True
        options = {name: option for name, option in options.items() if option is not None}
        if dropout_rate and not deterministic:
            options |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        if module is not None:
            options["return_weights"] = True
        with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(_name(precision)):
            found = attention(query, key, value, **options)
        if module is not None:
            found, weights = found[:2]
            module.sow("intermediates", "attention_weights", weights.reshape(*batch, *weights.shape[1:]))
        return found.reshape(*batch, t, n, found.shape[-1])

    return attend


def _check_step(attention: Callable[..., Any]) -> None:
    """Refuses an attention that takes one query for many keys, but not as a causal pass does."""
    while isinstance(attention, functools.partial):
        attention = attention.func
    if attention is routing_attention:
        raise ValueError("routing attention clusters all tokens at once, so a layer with decode=True cannot use it")


def _with_one_batch_axis(x: Array | None, batch: list[int]) -> Array | None:
    """Makes [B, N, T, S] of [*batch, N, T, S], any of these axes absent or 1."""
    if x is None or x.ndim <= 3 or len(batch) == 1:
        return x if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def _and(mask: Bool[Array, "#B #N #T #S"] | None, other: Bool[Array, "T S"]) -> Bool[Array, "#B #N T S"]:
    return other[None, None] if mask is None else mask & other[None, None]


def _name(precision: Any) -> Any:
    """The name by which JAX's context manager knows a precision; an algorithm has none, and is taken as it is."""
    return precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
