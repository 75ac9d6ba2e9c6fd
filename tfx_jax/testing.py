"""A conformance kit for attention functions, of this package or of any other.

`check_attention` calls a function with the signature of `jax.nn.dot_product_attention` on some ninety small cases and
compares values and gradients with the formula in float64 NumPy:

    import jax
    from tfx_jax.testing import check_attention, summarize

    print(summarize(check_attention(jax.nn.dot_product_attention)))

A case has one of four outcomes. "passed": the function agrees with the formula. "refused": it raised an exception.
"unsupported": it has no such argument. "wrong": it returned something else, and `detail` says what and by how much.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CASES", "Check", "check_attention", "summarize"]

AttentionFunction = Callable[..., Any]
"""Maps query [B, T, N, H], key [B, S, K, H] and value [B, S, K, U] to the output [B, T, N, U]."""

_OUR_NAMES = {"query_seq_lengths": "query_lengths", "key_value_seq_lengths": "key_lengths"}
"""Names in `tfx_jax.functional` of arguments that `jax.nn.dot_product_attention` calls otherwise."""


class Check(NamedTuple):
    """The outcome of one case.

    Attributes:
      case: name of the case, "group: what is checked".
      outcome: "passed", "refused", "unsupported" or "wrong".
      detail: the exception, the missing argument or the difference; empty for most that passed.
    """

    case: str
    outcome: str
    detail: str = ""


class _WrongError(Exception):
    """The function returned something else than the formula."""


class _UnsupportedError(Exception):
    """The function has no such argument."""


class _Subject:
    """The function under test, called with the options of a case under the names that the function has for them."""

    def __init__(self, function: AttentionFunction):
        """Reads the names of the function's arguments."""
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function of C has no signature
            parameters = ()
        self._names = {parameter.name for parameter in parameters}
        # With **kwargs or an unknown signature, every option is passed, and the function may refuse it.
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) or not self._names

    def __call__(self, query: Any, key: Any, value: Any, *, is_jitted: bool = True, **options: Any) -> Any:
        """Calls the function with those options that are not None, under `jax.jit` unless `is_jitted` is False.

        Raises:
          _UnsupportedError: if the function has no argument of that name.
        """
        options = {name: option for name, option in options.items() if option is not None}
        # Cases use JAX's names; a function of this package has other names for some.
        for name, our_name in _OUR_NAMES.items():
            if name in options and our_name in self._names:
                options[our_name] = options.pop(name)
        for name in options:
            if not self._takes_all and name not in self._names:
                raise _UnsupportedError(f"no argument {name}")
        # Arrays are arguments of the jitted function; other options, such as is_causal, are constants in it.
        arrays = {name: option for name, option in options.items() if isinstance(option, np.ndarray | jax.Array)}
        static = {name: option for name, option in options.items() if name not in arrays}

        def call(query: Any, key: Any, value: Any, arrays: dict[str, Any]) -> Any:
            return self._function(query, key, value, **arrays, **static)

        inputs = jax.tree.map(jnp.asarray, (query, key, value, arrays))
        return jax.jit(call)(*inputs) if is_jitted else call(*inputs)


_CASES: dict[str, Callable[[_Subject], str | None]] = {}


def _case(name: str) -> Callable[[Callable[[_Subject], str | None]], Callable[[_Subject], str | None]]:
    """Decorates a check as the case `name`.

    A check gets the function under test; it returns a detail of the outcome or None, and raises _WrongError if the
    function returned something else than the formula.
    """

    def register(check: Callable[[_Subject], str | None]) -> Callable[[_Subject], str | None]:
        _CASES[name] = check
        return check

    return register


def check_attention(attention_fn: AttentionFunction, *, cases: Iterable[str] | None = None) -> list[Check]:
    """Compares an attention function with softmax(scale * Q K^T + bias) V in float64.

    Args:
      attention_fn: called as `attention_fn(query, key, value, **options)` with query [B, T, N, H], key [B, S, K, H] and
        value [B, S, K, U] and the options `bias`, `mask` (True where a query may attend), `is_causal`, `scale`,
        `segment_ids`, `query_seq_lengths`, `key_value_seq_lengths`, `local_window_size` (keys before,
        keys after), `logits_soft_cap`, `sinks`, `dropout_rate` with `dropout_rng`, and `return_weights`. It is only
        asked for options that it has. Returns [B, T, N, U].
      cases: names of cases, of `CASES`; None means all.

    Returns:
      The outcome of each case, in the order of `CASES`.

    Raises:
      ValueError: for a case that does not exist.
    """
    subject, names = _Subject(attention_fn), list(CASES) if cases is None else list(cases)
    for name in names:
        if name not in _CASES:
            raise ValueError(f"there is no case {name!r}; see tfx_jax.testing.CASES")
    return [_outcome(name, subject) for name in names]


def _outcome(name: str, subject: _Subject) -> Check:
    """Runs one case and returns its outcome."""
    try:
        return Check(name, "passed", _CASES[name](subject) or "")
    except _UnsupportedError as error:
        return Check(name, "unsupported", str(error))
    except _WrongError as error:
        return Check(name, "wrong", str(error))
    except Exception as error:  # whatever the function under test raises
        return Check(name, "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


_CONVENTIONS = ("causal: fewer queries than keys", "mask: a query that sees nothing is finite")
"""Cases that pass in more than one way; `detail` says in which."""


def summarize(checks: Iterable[Check]) -> str:
    """Returns a line for each case that did not pass, and the counts of outcomes as the last line.

    Two cases pass in more than one way, and so have a line that says in which: whether causality aligns the first or
    the last query with the keys, and what a query gets that sees nothing.
    """
    checks = list(checks)
    counts = {outcome: 0 for outcome in ("passed", "refused", "unsupported", "wrong")}
    for check in checks:
        counts[check.outcome] += 1
    lines = [
        f"{check.outcome:<11}  {check.case}: {check.detail}"
        for check in checks
        if check.outcome != "passed" or check.case in _CONVENTIONS
    ]
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return "\n".join([*lines, f"{len(checks)} case{'' if len(checks) == 1 else 's'}: {total}"])


# The formula, and inputs.


def _formula(query: Any, key: Any, value: Any, **options: Any) -> np.ndarray:
    """Computes the output in float64; a query that sees no key gets zeros."""
    weights = _weights(query, key, **options)
    group_size = query.shape[2] // value.shape[2]  # query heads that share a value head
    return np.einsum("bnts,bsnu->btnu", weights, np.repeat(np.asarray(value, np.float64), group_size, axis=2))


def _weights(
    query: Any,
    key: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> np.ndarray:
    """Computes the softmax weights in float64, [B, N, T, S]; causality aligns the last query with the last key."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    length, num_keys = query.shape[1], key.shape[1]
    key = np.repeat(key, query.shape[2] // max(key.shape[2], 1), axis=2)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("btnh,bsnh->bnts", query, key)
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    logits = logits if bias is None else logits + np.asarray(bias, np.float64)
    visible = np.ones(logits.shape, bool) if mask is None else np.broadcast_to(mask, logits.shape)
    if is_causal:
        visible = visible & np.tri(length, num_keys, num_keys - length, dtype=bool)
    # Softmax over the visible keys, with the largest logit subtracted. Sinks are further logits of the denominator, one
    # per head. A query that sees no key has largest = -inf, replaced by 0, and total = 0: its weights are 0.
    logits = np.where(visible, logits, -np.inf)
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, np.asarray(sinks, np.float64)[:, None, None])
    largest = np.where(np.isfinite(largest), largest, 0.0)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - largest)
    return exponentials / np.where(total == 0, 1.0, total)


def _gradients(query: Any, key: Any, value: Any, cotangent: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """Computes the gradients of sum(cotangent * output) by (query, key, value) in float64.

    Queries and keys have equally many heads; `cotangent` is [B, T, N, U].
    """
    scale = query.shape[3] ** -0.5
    weights = _weights(query, key, **options)
    query, key, value, cotangent = (np.asarray(array, np.float64) for array in (query, key, value, cotangent))
    weight_gradients = np.einsum("btnu,bsnu->bnts", cotangent, value)
    # The derivative of the softmax.
    logit_gradients = weights * (weight_gradients - (weights * weight_gradients).sum(axis=-1, keepdims=True))
    return (
        scale * np.einsum("bnts,bsnh->btnh", logit_gradients, key),
        scale * np.einsum("bnts,btnh->bsnh", logit_gradients, query),
        np.einsum("bnts,btnu->bsnu", weights, cotangent),
    )


def _inputs(
    batch: int = 2,
    length: int = 5,
    num_keys: int | None = None,
    heads: int = 3,
    kv_heads: int | None = None,
    size: int = 4,
    value_size: int | None = None,
    *,
    dtype: Any = np.float32,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples query [B, T, N, H], key [B, S, K, H] and value [B, S, K, U].

    Args:
      batch: B.
      length: T.
      num_keys: S; None means T.
      heads: N.
      kv_heads: K; None means N.
      size: H.
      value_size: U; None means H.
      dtype: dtype of the arrays.
      seed: seed of the values.
    """
    rng = np.random.default_rng(seed)
    num_keys = length if num_keys is None else num_keys
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = [(batch, length, heads, size), (batch, num_keys, kv_heads, size)]
    shapes.append((batch, num_keys, kv_heads, size if value_size is None else value_size))
    query, key, value = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return query, key, value


def _mask(*shape: int, seed: int = 1) -> np.ndarray:
    """Samples a mask of this shape in which each query sees the first key at least."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def _normal(*shape: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _equal(got: Any, want: Any, *, tolerance: float = 1e-5) -> None:
    """Raises _WrongError unless shapes are equal and values differ by at most the tolerance times the largest value."""
    got = np.asarray(got, np.float64)
    if got.shape != np.shape(want):
        raise _WrongError(f"shape {got.shape} instead of {np.shape(want)}")
    if not got.size:
        return
    if not np.isfinite(got).all():
        raise _WrongError(f"{np.size(got) - np.isfinite(got).sum()} of {got.size} values are not finite")
    error, largest = np.abs(got - want).max(), max(1.0, float(np.abs(want).max()))
    if error > tolerance * largest:
        raise _WrongError(f"differs by {error:.2g} where the largest value is {largest:.2g}")


def _finite(array: Any) -> None:
    """Raises _WrongError unless all values are finite."""
    if not np.isfinite(np.asarray(array, np.float64)).all():
        raise _WrongError("some values are NaN or infinite")


def _compare(subject: _Subject, inputs: tuple[Any, Any, Any], *, tolerance: float = 1e-5, **options: Any) -> None:
    """Compares the output with the formula, for options that both know by the same name."""
    _equal(subject(*inputs, **options), _formula(*inputs, **options), tolerance=tolerance)


def _raises(subject: _Subject, inputs: tuple[Any, Any, Any], **options: Any) -> str:
    """Passes where the function raises an exception, whose type is the detail."""
    try:
        output = subject(*inputs, **options)
    except _UnsupportedError:
        raise
    except Exception as error:  # any exception is a refusal
        return type(error).__name__
    raise _WrongError(f"returned an output of shape {np.shape(output)} instead of raising an exception")


# Shapes and scale.

_SHAPES: dict[str, dict[str, int]] = {
    "self-attention": {},
    "fewer queries than keys": {"length": 3, "num_keys": 7},
    "more queries than keys": {"length": 7, "num_keys": 3},
    "one query": {"length": 1, "num_keys": 6},
    "one key": {"length": 6, "num_keys": 1},
    "one token": {"length": 1},
    "a batch of one": {"batch": 1},
    "one head": {"heads": 1},
    "heads of size 1": {"size": 1},
    "values of another size": {"value_size": 6},
    "grouped queries": {"heads": 6, "kv_heads": 2},
    "one head of keys and values": {"heads": 4, "kv_heads": 1},
    "300 tokens": {"batch": 1, "length": 300, "heads": 2},
    "an empty batch": {"batch": 0},
}
for _name, _sizes in _SHAPES.items():
    _case(f"shape: {_name}")(lambda subject, sizes=_sizes: _compare(subject, _inputs(**sizes)))
for _name, _scale in {"given": 0.3, "0": 0.0, "negative": -0.5, "large": 20.0}.items():
    _case(f"scale: {_name}")(lambda subject, scale=_scale: _compare(subject, _inputs(), scale=scale))


# Masks. True means that a query may attend.

_MASKS = {
    "of all pairs and heads": _mask(2, 3, 5, 5),
    "shared by heads": _mask(2, 1, 5, 5),
    "shared by sequences": _mask(1, 1, 5, 5),
    "padding on the right": (np.arange(5) < np.array([[5], [2]]))[:, None, None, :].repeat(5, axis=2),
    "padding on the left": (np.arange(5) >= np.array([[0], [3]]))[:, None, None, :].repeat(5, axis=2),
    "padding in between": np.array([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]], bool)[:, None, None, :].repeat(5, axis=2),
    "broadcast over queries": _mask(2, 1, 1, 5),
    "one visible key": np.eye(5, dtype=bool)[None, None].repeat(2, axis=0),
}
for _name, _value in _MASKS.items():
    _case(f"mask: {_name}")(lambda subject, mask=_value: _compare(subject, _inputs(), mask=mask))


@_case("mask: nothing hidden equals no mask")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), mask=np.ones((2, 3, 5, 5), bool)), _formula(*_inputs()))


@_case("mask: with a bias")
def _(subject: _Subject) -> None:
    _compare(subject, _inputs(), mask=_mask(2, 1, 5, 5), bias=_normal(2, 3, 5, 5))


@_case("mask: hidden keys and values of 1e30 change nothing")
def _(subject: _Subject) -> None:
    (query, key, value), mask = _inputs(), _mask(2, 1, 1, 5).repeat(5, axis=2)
    hidden = ~mask[:, 0, 0, :, None, None]
    large_key, large_value = (np.where(hidden, 1e30, array).astype(np.float32) for array in (key, value))
    _equal(subject(query, large_key, large_value, mask=mask), _formula(query, key, value, mask=mask))


@_case("mask: a query that sees nothing is finite")
def _(subject: _Subject) -> str:
    mask = _mask(2, 1, 5, 5)
    mask[0, :, 2] = False
    inputs = _inputs()
    output = np.asarray(subject(*inputs, mask=mask))
    _finite(output)
    sees_a_key = np.ones((2, 5), bool)
    sees_a_key[0, 2] = False
    _equal(output[sees_a_key], _formula(*inputs, mask=mask)[sees_a_key])
    return "zeros" if not output[0, 2].any() else "a mean" if np.ptp(output[0, 2]) else "constant"


@_case("mask: a query that sees nothing has finite gradients")
def _(subject: _Subject) -> None:
    mask = _mask(2, 1, 5, 5)
    mask[0, :, 2] = False
    for gradient in _subject_gradients(subject, _inputs(), mask=mask):
        _finite(gradient)


# Biases.

_BIASES = {
    "of all pairs and heads": _normal(2, 3, 5, 5),
    "shared by sequences": _normal(1, 3, 5, 5),
    "shared by heads": _normal(2, 1, 5, 5),
    "broadcast over queries": _normal(2, 3, 1, 5),
    "of 1e4": 1e4 * _normal(2, 3, 5, 5),
    "minus infinity hides": np.where(_mask(2, 3, 5, 5), 0, -np.inf).astype(np.float32),
}
for _name, _value in _BIASES.items():
    _case(f"bias: {_name}")(lambda subject, bias=_value: _compare(subject, _inputs(), bias=bias))


@_case("bias: gradient")
def _(subject: _Subject) -> None:
    inputs, bias, cotangent = _inputs(), _normal(1, 3, 5, 5), _normal(2, 5, 3, 4, seed=3)
    gradient = jax.jit(jax.grad(lambda bias: (subject(*inputs, bias=bias) * cotangent).sum()))(jnp.asarray(bias))
    weights = _weights(*inputs[:2], bias=bias)
    weight_gradients = np.einsum("btnu,bsnu->bnts", cotangent, inputs[2], dtype=np.float64)
    logit_gradients = weights * (weight_gradients - (weights * weight_gradients).sum(axis=-1, keepdims=True))
    _equal(gradient, logit_gradients.sum(axis=0, keepdims=True))  # the bias is shared by the sequences of the batch


# Causality.


@_case("causal: as many queries as keys")
def _(subject: _Subject) -> None:
    _compare(subject, _inputs(), is_causal=True)


@_case("causal: fewer queries than keys")
def _(subject: _Subject) -> str:
    query, key, value = _inputs(length=3, num_keys=7)
    output = subject(query, key, value, is_causal=True)
    aligned_at_start = np.tri(3, 7, dtype=bool)[None, None]  # the other convention: query t sees keys 0 .. t
    try:
        _equal(output, _formula(query, key, value, is_causal=True))
    except _WrongError:
        _equal(output, _formula(query, key, value, mask=aligned_at_start))
        return "the first query is at the first key, as in jax.nn"
    return "the last query is at the last key, as in tfx_jax"


@_case("causal: later keys have no gradient")
def _(subject: _Subject) -> None:
    query, key, value = (jnp.asarray(array) for array in _inputs())

    def loss(key: Any, value: Any) -> Any:
        return (subject(query, key, value, is_causal=True)[:, 2] ** 2).sum()

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(key, value):
        if np.asarray(gradient)[:, 3:].any():
            raise _WrongError("query 2 depends on keys 3 and 4")


@_case("causal: the first query returns the first value")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _equal(np.asarray(subject(query, key, value, is_causal=True))[:, 0], value[:, 0])


@_case("causal: with padding")
def _(subject: _Subject) -> None:
    _compare(subject, _inputs(), is_causal=True, mask=_MASKS["padding on the right"])


@_case("causal: with a bias")
def _(subject: _Subject) -> None:
    _compare(subject, _inputs(), is_causal=True, bias=_normal(2, 3, 5, 5))


@_case("causal: grouped queries")
def _(subject: _Subject) -> None:
    _compare(subject, _inputs(heads=6, kv_heads=2), is_causal=True)


# Numbers.


@_case("numbers: logits of 1e4 do not overflow")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _compare(subject, (100 * query, 100 * key, value), tolerance=1e-4)


@_case("numbers: logits far below zero do not underflow")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _compare(subject, (query, key, value), bias=np.full((1, 1, 5, 5), -1e4, np.float32), tolerance=1e-3)


@_case("numbers: equal logits give the mean")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _equal(subject(0 * query, key, value), value.mean(axis=1, keepdims=True, dtype=np.float64).repeat(5, axis=1))


@_case("numbers: values of 1e30 do not overflow")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _equal(np.asarray(subject(query, key, 1e30 * value), np.float64) / 1e30, _formula(query, key, value))


def _in_dtype(subject: _Subject, dtype: Any, tolerance: float) -> None:
    """Compares with the formula for the same rounded inputs; the output has their dtype."""
    query, key, value = (jnp.asarray(array, dtype) for array in _inputs(length=64, size=32))
    output = subject(query, key, value)
    if output.dtype != dtype:
        raise _WrongError(f"dtype {output.dtype} instead of {jnp.dtype(dtype)}")
    _equal(output, _formula(*(np.asarray(array, np.float64) for array in (query, key, value))), tolerance=tolerance)


@_case("numbers: float32 within 1e-6")
def _(subject: _Subject) -> None:
    _in_dtype(subject, jnp.float32, 1e-6)


@_case("numbers: bfloat16 within 2^-7")
def _(subject: _Subject) -> None:
    _in_dtype(subject, jnp.bfloat16, 2**-7)


@_case("numbers: float16 within 2^-10")
def _(subject: _Subject) -> None:
    _in_dtype(subject, jnp.float16, 2**-10)


@_case("numbers: the softmax of bfloat16 is in float32")
def _(subject: _Subject) -> None:
    """Sums of 4,096 equal weights: in bfloat16 they stop growing at 256."""
    query, key = jnp.zeros((1, 1, 1, 4), jnp.bfloat16), jnp.zeros((1, 4096, 1, 4), jnp.bfloat16)
    _equal(subject(query, key, jnp.ones_like(key)), np.ones((1, 1, 1, 4)), tolerance=2**-7)


@_case("numbers: float16 products beyond 65,504 do not overflow")
def _(subject: _Subject) -> None:
    query, key, value = (jnp.asarray(array, jnp.float16) for array in _inputs())
    inputs = (200 * query, 200 * key, value)
    _equal(subject(*inputs), _formula(*(np.asarray(array, np.float64) for array in inputs)), tolerance=2**-9)


# Derivatives.


def _subject_gradients(subject: _Subject, inputs: tuple[Any, Any, Any], **options: Any) -> tuple[Any, Any, Any]:
    """Computes the gradients of `_gradients` by the function under test, for the cotangent of seed 3."""
    cotangent = _normal(*inputs[0].shape[:3], inputs[2].shape[3], seed=3)

    def loss(query: Any, key: Any, value: Any) -> Any:
        return (subject(query, key, value, **options) * cotangent).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, inputs))


def _check_gradients(subject: _Subject, which: int | None = None, **options: Any) -> None:
    """Compares the gradient by input number `which` (query, key, value), or all three, with the formula."""
    inputs = _inputs()
    want = _gradients(*inputs, _normal(2, 5, 3, 4, seed=3), **options)
    for index, pair in enumerate(zip(_subject_gradients(subject, inputs, **options), want, strict=True)):
        if which is None or which == index:
            _equal(*pair)


for _index, _name in enumerate(("query", "key", "value")):
    _case(f"gradients: by the {_name}")(lambda subject, index=_index: _check_gradients(subject, index))


@_case("gradients: with a mask")
def _(subject: _Subject) -> None:
    _check_gradients(subject, mask=_mask(2, 1, 5, 5))


@_case("gradients: causal")
def _(subject: _Subject) -> None:
    _check_gradients(subject, is_causal=True)


@_case("gradients: grouped queries")
def _(subject: _Subject) -> None:
    """The gradient of a head of keys is the sum over its query heads."""
    query, key, value = _inputs(heads=4, kv_heads=2)
    repeated = query, key.repeat(2, axis=2), value.repeat(2, axis=2)
    query_gradient, *repeated_gradients = _gradients(*repeated, _normal(2, 5, 4, 4, seed=3))
    got = _subject_gradients(subject, (query, key, value))
    _equal(got[0], query_gradient)
    for gradient, want in zip(got[1:], repeated_gradients, strict=True):
        _equal(gradient, want.reshape(2, 5, 2, 2, 4).sum(axis=3))


@_case("gradients: forward mode equals reverse mode")
def _(subject: _Subject) -> None:
    inputs, cotangent = _inputs(), _normal(2, 5, 3, 4, seed=3)
    tangents = tuple(_normal(*array.shape, seed=4 + index) for index, array in enumerate(inputs))
    _, tangent = jax.jit(lambda inputs, tangents: jax.jvp(subject, inputs, tangents))(inputs, tangents)
    gradients = zip(_gradients(*inputs, cotangent), tangents, strict=True)
    want = sum(float((gradient * tangent).sum()) for gradient, tangent in gradients)
    _equal((np.asarray(tangent, np.float64) * cotangent).sum(), want)


@_case("gradients: of gradients")
def _(subject: _Subject) -> None:
    """Compares the derivative along a direction with the central difference of two gradients in float64."""
    query, key, value = _inputs()
    cotangent, direction = _normal(2, 5, 3, 4, seed=3), _normal(*query.shape, seed=5)
    step = 1e-4

    def along(query: Any) -> Any:
        gradient = jax.grad(lambda query: (subject(query, key, value) * cotangent).sum())(query)
        return (gradient * direction).sum()

    above, below = (_gradients(query + sign * step * direction, key, value, cotangent)[0] for sign in (1, -1))
    want = np.float64(((above - below) / (2 * step) * direction).sum())
    got = jax.jit(jax.grad(along))(jnp.asarray(query))
    _equal((np.asarray(got, np.float64) * direction).sum(), want, tolerance=1e-3)


# Transformations and independence.


@_case("transformations: eager equals jitted")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), is_jitted=False), _formula(*_inputs()))


@_case("transformations: vmap")
def _(subject: _Subject) -> None:
    many = [_inputs(seed=seed) for seed in range(3)]
    output = jax.jit(jax.vmap(subject))(*(np.stack(arrays) for arrays in zip(*many, strict=True)))
    _equal(output, np.stack([_formula(*inputs) for inputs in many]))


@_case("transformations: gradients of single examples")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    cotangent = _normal(2, 5, 3, 4, seed=3)

    def loss(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        return (subject(query[None], key[None], value[None])[0] * cotangent).sum()

    _equal(jax.jit(jax.vmap(jax.grad(loss)))(query, key, value, cotangent), _gradients(query, key, value, cotangent)[0])


@_case("transformations: checkpoint")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    cotangent = _normal(2, 5, 3, 4, seed=3)
    loss = jax.checkpoint(lambda query: (subject(query, key, value) * cotangent).sum())
    _equal(jax.jit(jax.grad(loss))(jnp.asarray(query)), _gradients(query, key, value, cotangent)[0])


@_case("transformations: scan")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    output, _ = jax.lax.scan(lambda query, _: (subject(query, key, value), None), jnp.asarray(query), None, length=2)
    _equal(output, _formula(_formula(query, key, value), key, value))


@_case("transformations: eval_shape")
def _(subject: _Subject) -> None:
    shape, expected = jax.eval_shape(subject, *_inputs()).shape, (2, 5, 3, 4)
    if shape != expected:
        raise _WrongError(f"jax.eval_shape gives shape {shape} instead of {expected}")


@_case("independence: sequences of a batch")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    changed = [np.concatenate([array[:1], 1e3 * array[1:]]) for array in (query, key, value)]
    _equal(np.asarray(subject(*changed))[0], _formula(query, key, value)[0])


@_case("independence: heads")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    changed = [np.concatenate([array[:, :, :1], 1e3 * array[:, :, 1:]], axis=2) for array in (query, key, value)]
    _equal(np.asarray(subject(*changed))[:, :, 0], _formula(query, key, value)[:, :, 0])


@_case("independence: the order of keys")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    order = np.array([3, 0, 4, 1, 2])
    _equal(subject(query, key[:, order], value[:, order]), _formula(query, key, value))


@_case("independence: a constant added to the logits of a query")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), bias=np.broadcast_to(_normal(2, 3, 5, 1), (2, 3, 5, 5))), _formula(*_inputs()))


@_case("independence: one query alone")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    _equal(subject(query[:, 2:3], key, value), _formula(query, key, value)[:, 2:3])


# Decoding with a cache: the newest query sees the keys that were written.


@_case("decoding: one token at a time equals the causal pass")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    want = _formula(query, key, value, is_causal=True)
    for position in range(5):
        mask = np.broadcast_to(np.arange(5) <= position, (2, 1, 1, 5))
        step = slice(position, position + 1)
        _equal(subject(query[:, step], key, value, mask=mask), want[:, step])


@_case("decoding: a block of tokens after a cache")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    mask = np.tri(2, 5, 3, dtype=bool)[None, None].repeat(2, axis=0)
    _equal(subject(query[:, 3:], key, value, mask=mask), _formula(query, key, value, is_causal=True)[:, 3:])


# Options beyond the formula.

_LENGTHS = np.array([5, 2], np.int32)


def _seen(lengths: np.ndarray) -> np.ndarray:
    """Returns the mask [B, 1, 1, 5] of the first `lengths` [B] of five keys."""
    return (np.arange(5) < lengths[:, None])[:, None, None, :]


@_case("options: lengths of keys")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), key_value_seq_lengths=_LENGTHS), _formula(*_inputs(), mask=_seen(_LENGTHS)))


@_case("options: lengths of queries")
def _(subject: _Subject) -> None:
    output = np.asarray(subject(*_inputs(), query_seq_lengths=_LENGTHS))
    _finite(output)
    exists = np.arange(5) < _LENGTHS[:, None]
    _equal(output[exists], _formula(*_inputs())[exists])


@_case("options: a window on both sides")
def _(subject: _Subject) -> None:
    distance = np.arange(5)[:, None] - np.arange(5)[None]
    mask = (np.abs(distance) <= 1)[None, None]
    _equal(subject(*_inputs(), local_window_size=(1, 1)), _formula(*_inputs(), mask=mask))


@_case("options: a causal window")
def _(subject: _Subject) -> None:
    distance = np.arange(5)[:, None] - np.arange(5)[None]
    mask = ((distance >= 0) & (distance <= 2))[None, None]
    output = subject(*_inputs(), local_window_size=(2, 0), is_causal=True)
    _equal(output, _formula(*_inputs(), mask=mask))


@_case("options: segments of packed texts")
def _(subject: _Subject) -> None:
    ids = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2]], np.int32)
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    _equal(subject(*_inputs(), segment_ids=ids), _formula(*_inputs(), mask=mask))


@_case("options: soft cap of logits")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), logits_soft_cap=0.7), _formula(*_inputs(), soft_cap=0.7))


@_case("options: sinks")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), sinks=_normal(3)), _formula(*_inputs(), sinks=_normal(3)))


@_case("options: dropout of rate 0 changes nothing")
def _(subject: _Subject) -> None:
    _equal(subject(*_inputs(), dropout_rate=0.0, dropout_rng=jax.random.key(0)), _formula(*_inputs()))


@_case("options: dropout keeps the mean")
def _(subject: _Subject) -> None:
    query, key, value = _inputs()
    keys = jax.random.split(jax.random.key(0), 4_000)
    drop = jax.vmap(lambda key_: subject(query, key, value, dropout_rate=0.3, dropout_rng=key_))
    _equal(np.asarray(jax.jit(drop)(keys)).mean(axis=0), _formula(query, key, value), tolerance=0.1)


@_case("options: dropout is repeated by its key")
def _(subject: _Subject) -> None:
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}
    first = np.asarray(subject(*_inputs(), **options))
    _equal(subject(*_inputs(), **options), first, tolerance=0)
    if np.allclose(first, _formula(*_inputs()), atol=1e-4):
        raise _WrongError("dropout_rate=0.5 with a key changes nothing: the output equals that without dropout")


@_case("options: weights equal the softmax")
def _(subject: _Subject) -> None:
    output, weights = subject(*_inputs(), return_weights=True)
    _equal(weights, _weights(*_inputs()[:2]))
    _equal(output, _formula(*_inputs()))


# What no function should compute.


@_case("refusals: heads of queries and keys of other sizes")
def _(subject: _Subject) -> str:
    query, key, value = _inputs()
    return _raises(subject, (query, key[..., :3], value))


@_case("refusals: keys of another batch size")
def _(subject: _Subject) -> str:
    query, key, value = _inputs(batch=3)
    return _raises(subject, (query, key[:2], value[:2]))


@_case("refusals: fewer values than keys")
def _(subject: _Subject) -> str:
    query, key, value = _inputs()
    return _raises(subject, (query, key, value[:, :4]))


@_case("refusals: query heads that key heads do not divide")
def _(subject: _Subject) -> str:
    return _raises(subject, _inputs(heads=5, kv_heads=2))


@_case("refusals: integers")
def _(subject: _Subject) -> str:
    query, key, value = ((4 * array).astype(np.int32) for array in _inputs())
    return _raises(subject, (query, key, value))


@_case("refusals: a mask of numbers")
def _(subject: _Subject) -> str:
    return _raises(subject, _inputs(), mask=_mask(2, 1, 5, 5).astype(np.float32))


@_case("refusals: a mask of another length")
def _(subject: _Subject) -> str:
    return _raises(subject, _inputs(), mask=_mask(2, 1, 5, 4))


@_case("refusals: a bias of another length")
def _(subject: _Subject) -> str:
    return _raises(subject, _inputs(), bias=_normal(2, 3, 4, 5))


CASES: tuple[str, ...] = tuple(_CASES)
"""Names of all cases."""
