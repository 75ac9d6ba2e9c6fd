"""Decoding token by token with a state of constant size, for the attentions that have one."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from tfx_jax.functional.attention.delta_rules import DELTA_RULE, GATED_DELTA_RULE, KIMI_DELTA_ATTENTION
from tfx_jax.functional.attention.kernel_features import FAVOR, LINEAR, favor_attention
from tfx_jax.functional.attention.linear_recurrences import GATED_LINEAR_ATTENTION, RETENTION, STATE_SPACE_DUALITY
from tfx_jax.functional.attention.signature import Mask, check_shapes
from tfx_jax.functional.attention.spec import RecurrentDecoding, unbound

_SPECS = {
    spec.function: spec
    for spec in (
        LINEAR,
        RETENTION,
        GATED_LINEAR_ATTENTION,
        STATE_SPACE_DUALITY,
        DELTA_RULE,
        GATED_DELTA_RULE,
        KIMI_DELTA_ATTENTION,
    )
} | {favor_attention: FAVOR}  # whose own function is that of configurations, which takes a seed


def recurrent_decoding(attention_fn: Callable[..., Any], **options: Any) -> RecurrentDecoding:
    r"""Returns `read` and `step`, which decode token by token with a state of constant size instead of a cache.

    `read` returns the state after a prompt, and `step` processes one more token. Together they compute what
    `attention_fn` does for the whole text (with `is_causal`). Both can be jitted, and the state is a pytree of arrays
    with a leading axis B.

    Args:
      attention_fn: `linear_attention`, `favor_attention`, `retention`, `gated_linear_attention`, `state_space_duality`,
        `delta_rule`, `gated_delta_rule` or `kimi_delta_attention`, or a `functools.partial` that binds its options.
      **options: options of the attention that are the same for all tokens, such as `scale` and `block_size`,
        `temperature` of `gated_linear_attention`, and `projection` of `favor_attention`.

    Returns:
      The pair (read, step).

      - `read(key, value, mask=None, **gates)` returns the state after keys, [B, S, K, H], and values, [B, S, K, U]. S
        may be 0: then it is the state before the first token. `mask` is a padding mask, [B or 1, 1, 1, S].
      - `step(state, query, key, value, **gates)` takes a query, [B, 1, N, H], a key, [B, 1, K, H], and a value,
        [B, 1, K, U], and returns the output, [B, 1, N, U], and the new state.

      `gates` are the gates and parameters of the attention by name. Gates, such as `beta`, have the length of the keys:
      [B, S, ...] in `read` and [B, 1, ...] in `step`.

    Raises:
      ValueError: if the attention has no such state (others decode from a cache of keys and values, with a mask or
        `key_lengths`), or, when `read` or `step` is called, if a gate is missing or shapes do not match.

    >>> import jax
    >>> from tfx_jax.functional import retention
    >>> read, step = recurrent_decoding(retention)
    >>> @jax.jit
    ... def last(x, decay):  # the output of the third token of [1, 3, 1, 1]
    ...     state = read(x[:, :2], x[:, :2], decay=decay)
    ...     out, state = step(state, x[:, 2:], x[:, 2:], x[:, 2:], decay=decay)
    ...     return out
    >>> last(jax.numpy.ones((1, 3, 1, 1)), jax.numpy.array([0.5])).item()  # `retention` returns 1, 1.5, 1.75
    1.75
    """
    function, bound = unbound(attention_fn)
    options = bound | options
    spec, name = _SPECS.get(function), _name(function)
    if spec is None or spec.decoding is None:
        names = ", ".join(sorted(map(_name, _SPECS)))
        raise ValueError(
            f"{name} has no state of constant size: keep its keys and values in a cache, and pass `mask` or "
            f"`key_lengths`. Those with a state are {names}"
        )
    if not options.pop("is_causal", True):
        raise ValueError(f"{name} decodes causally only: pass is_causal=True or leave it out")
    parameters = inspect.signature(function).parameters.values()
    required = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY and x.default is x.empty} - options.keys()
    taken = inspect.signature(spec.decoding).parameters
    if unknown := options.keys() - taken.keys():
        raise ValueError(
            f"the state of {name} does not depend on {', '.join(sorted(unknown))}: pass gates and parameters to "
            f"`read` and `step`, and only {', '.join(sorted(taken))} here"
        )
    if missing := required & taken.keys():
        raise ValueError(f"{name} also needs {', '.join(sorted(missing))}: pass it here, and not to `read` and `step`")
    gates_of, (read_fn, step_fn) = spec.gates or (lambda **_: {}), _recurrent(spec.decoding(**options))

    def check(query: Array, key: Array, value: Array, mask: Mask | None, gates: dict[str, Array]) -> None:
        """Raises ValueError if a gate is missing or shapes do not match."""
        check_shapes(query, key, value, None, mask)
        if mask is not None and mask.shape[1:3] != (1, 1):
            raise ValueError(f"mask must be a padding mask, [B or 1, 1, 1, S], got shape {mask.shape}")
        if missing := required - gates.keys():
            raise ValueError(f"{name} also needs {', '.join(sorted(missing))}, in `read` and in `step`")
        shapes = gates_of(num_heads=query.shape[2], num_kv_heads=key.shape[2], d_k=key.shape[3])
        for gate, features in shapes.items():
            if gates[gate].shape != (*key.shape[:2], *features):
                raise ValueError(f"{gate} must have shape {(*key.shape[:2], *features)}, got {gates[gate].shape}")

    def read(key: Array, value: Array, mask: Mask | None = None, **gates: Array) -> Any:
        """Returns the state after a prompt."""
        check(key, key, value, mask, gates)
        return read_fn(key, value, mask, **gates)

    def step(state: Any, query: Array, key: Array, value: Array, **gates: Array) -> tuple[Array, Any]:
        """Returns the output of one token, [B, 1, N, U], and the new state."""
        check(query, key, value, None, gates)
        if query.shape[1] != 1 or key.shape[1] != 1:
            raise ValueError(
                f"step takes one token: query and key must be [B, 1, heads, size], got {query.shape} and {key.shape}"
            )
        return step_fn(state, query, key, value, **gates)

    return RecurrentDecoding(read, step)


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _recurrent(decoding: Any) -> RecurrentDecoding:
    """Returns the decoding of an attention of `_SPECS`, which all have a state."""
    assert isinstance(decoding, RecurrentDecoding)
    return decoding
