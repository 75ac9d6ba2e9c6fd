"""Adapter from attention functions to the `attention_fn` argument of Flax's `MultiHeadAttention`."""

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
    """Adapts an attention to the `attention_fn` of `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadAttention`.

    It translates Flax's conventions: no batch axis or several, masks of numbers, a dtype and a precision of the
    computation, and dropout switched by `deterministic`. With `sow_weights` the weights are sown into the layer, as by
    Flax's own function. Two things differ from Flax: a query that sees no key gets zeros, not the mean of all values;
    and dropout is independent for each weight, whatever `broadcast_dropout` says.

    With `decode=True` Flax passes one query and a cache of full length, with a mask of the tokens written so far. The
    query is the last of these tokens, so it sees no later token, whatever `is_causal` says. An attention that needs the
    queries of all tokens at once raises ValueError.

    Args:
      attention: any attention of `tfx_jax.functional` with its options bound, or a function with the same signature.
        It raises its usual errors if it does not support an option of the layer, such as a mask or dropout.

    Returns:
      A function with Flax's options that maps query [*batch, T, N, H], key [*batch, S, K, H] and value
      [*batch, S, K, U] to [*batch, T, N, U].

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
        """Calls `attention` with the arguments of Flax's `dot_product_attention`."""
        del broadcast_dropout
        if dtype is None:
            dtype = jnp.result_type(query, key, value)
        *batch, t, n, _ = query.shape
        query, key, value = (x.astype(dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        options: dict[str, Any] = {"bias": _with_one_batch_axis(bias, batch)}
        options["mask"] = _with_one_batch_axis(None if mask is None else mask.astype(bool), batch)
        is_step = t == 1 < key.shape[1] and mask is not None  # decode=True: the mask hides the unwritten cache
        if is_step:
            _check_step(attention)
        elif is_causal and t != key.shape[1]:  # Flax aligns first query and first key, this library the last ones
            options["mask"] = _and(options["mask"], jnp.tril(jnp.ones((t, key.shape[1]), bool)))
        elif is_causal:
            options["is_causal"] = True
        options = {name: option for name, option in options.items() if option is not None}
        if dropout_rate and not deterministic:
            options |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        if module is not None:
            options["return_weights"] = True
        with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(_name(precision)):
            out = attention(query, key, value, **options)
        if module is not None:
            out, weights = out[:2]
            module.sow("intermediates", "attention_weights", weights.reshape(*batch, *weights.shape[1:]))
        return out.reshape(*batch, t, n, out.shape[-1])

    return attend


def _check_step(attention: Callable[..., Any]) -> None:
    """Raises ValueError for an attention whose result for one query and many keys differs from that of a full pass."""
    while isinstance(attention, functools.partial):
        attention = attention.func
    if attention is routing_attention:
        raise ValueError(
            "routing attention clusters all tokens at once, so a layer with decode=True cannot use it: use another "
            "attention to decode"
        )


def _with_one_batch_axis(x: Array | None, batch: list[int]) -> Array | None:
    """Reshapes a mask or a bias, [*batch, N, T, S], to [B, N, T, S]; any of the axes may be absent or of size 1."""
    if x is None or x.ndim <= 3 or len(batch) == 1:
        return x if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def _and(mask: Bool[Array, "#B #N #T #S"] | None, other: Bool[Array, "T S"]) -> Bool[Array, "#B #N T S"]:
    """Combines a mask, or None, with another one that all rows and heads share."""
    return other[None, None] if mask is None else mask & other[None, None]


def _name(precision: Any) -> Any:
    """Returns the name of a precision for JAX's context manager; dot algorithms are returned unchanged."""
    return precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
