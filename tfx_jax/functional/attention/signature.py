"""The signature that all attention functions share: types of the arguments, masks, checks and decorators.

Boolean masks have rank 4, [B, N, T, S] or broadcastable to it. True means "may attend"; combine them with `&`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

_P = ParamSpec("_P")
_R = TypeVar("_R")

Bias = Float[Array, "#B #N #T #S"]
"""Added to the scaled logits of each pair of query and key."""
Mask = Bool[Array, "#B #N #T #S"]
"""True where a query may attend to a key."""
SegmentIds = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""Index of each token's sequence among those packed into a row, one array or a pair (queries, keys); 0 is padding."""
Window = int | tuple[int, int]
"""How many positions a query sees on each side, besides its own; a pair is (left, right).

Hugging Face's `sliding_window` counts the query's own position too: pass `sliding_window - 1`.
"""
ScoreMod = Callable[..., Float[Array, "B N T S"]]
"""`score_mod(logits, b, n, t, s)` returns modified logits of a block.

The logits of the block are [B, N, T, S]; `b`, `n`, `t` and `s` are the indices of its rows, heads, queries and keys,
int32 [B, 1, 1, 1], [1, N, 1, 1], [1, 1, T, 1] and [1, 1, 1, S]. Queries and keys of a block are consecutive. On a mesh
with explicit axes, bind the arrays that the function needs by `jax.tree_util.Partial`.
"""
MaskMod = Callable[..., Bool[Array, "#B #N #T #S"]]
"""`mask_mod(b, n, t, s)` returns True where a query may attend; the arguments are those of a `ScoreMod`."""


class AttentionMask(NamedTuple):
    """Which keys each query sees, from all arguments that say so."""

    pairs: Mask | None = None
    """The `mask` argument: True where a query may attend."""
    is_causal: bool = False
    window: tuple[int, int] | None = None
    """How many keys a query sees to the left and to the right of its position."""
    ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Segments of the queries and of the keys; 0 is padding."""
    mask_mod: MaskMod | None = None

    @property
    def is_padding(self) -> bool:
        """Whether `pairs` is None or hides keys from all heads and queries alike, and there is no `mask_mod`."""
        return self.mask_mod is None and (self.pairs is None or self.pairs.shape[1:3] == (1, 1))

    def without_queries(self, number: int) -> "AttentionMask":
        """Returns the mask without the first `number` queries."""
        pairs = self.pairs
        if pairs is not None and pairs.shape[2] > 1:
            pairs = pairs[:, :, number:]
        return self._replace(pairs=pairs, ids=None if self.ids is None else (self.ids[0][:, number:], self.ids[1]))


def are_static_sizes(*sizes: Any) -> bool:
    """Returns whether sizes are numbers; `jax.export` traces with symbols for the sizes of dynamic axes."""
    return all(isinstance(size, int) for size in sizes)


def causal_mask(
    num_queries: int, num_keys: int | None = None, *, offset: int | Int[Array, ""] | None = None
) -> Bool[Array, "1 1 T S"]:
    """Returns the mask in which query t sees keys 0 .. t + offset.

    Args:
      num_queries: T.
      num_keys: S; None means T.
      offset: number of keys before the first query; None means S - T, which aligns the last query with the last key, as
        decoding with a cache needs.

    >>> import jax
    >>> mask = jax.jit(causal_mask, static_argnums=(0, 1))
    >>> mask(3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    >>> mask(2, 4)[0, 0].astype(int).tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    num_keys = num_queries if num_keys is None else num_keys
    offset = num_keys - num_queries if offset is None else offset
    query_position = jnp.arange(num_queries)[:, None]
    key_position = jnp.arange(num_keys)[None, :]
    return (key_position <= query_position + offset)[None, None]


def padding_mask(lengths: Int[Array, " B"], num_keys: int) -> Bool[Array, "B 1 1 S"]:
    """Returns the mask that hides the keys at or past the length (in tokens) of their sequence.

    >>> padding_mask(jnp.array([2, 0]), 3)[:, 0, 0].astype(int).tolist()
    [[1, 1, 0], [0, 0, 0]]

    Raises:
      ValueError: if `lengths` does not have one axis.
    """
    if lengths.ndim != 1:
        raise ValueError(
            f"lengths must be [B], got shape {lengths.shape}; of the mask of tokens [B, S] itself the mask is "
            "tokens.astype(bool)[:, None, None]"
        )
    return (jnp.arange(num_keys)[None, :] < lengths[:, None])[:, None, None, :]


def segment_mask(query_ids: Int[Array, "B T"], key_ids: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """Returns the mask in which tokens see tokens of their own segment only; segment 0 is padding, always hidden.

    >>> import jax
    >>> query_ids, key_ids = jnp.array([[1, 2, 0]]), jnp.array([[1, 1, 2, 0]])
    >>> jax.jit(segment_mask)(query_ids, key_ids)[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    is_same = query_ids[:, :, None] == key_ids[:, None, :]
    return (is_same & (query_ids != 0)[:, :, None])[:, None]


def window_mask(
    num_queries: int, num_keys: int, window: tuple[int, int], *, offset: int | Int[Array, ""] | None = None
) -> Bool[Array, "1 1 T S"]:
    """Returns the mask in which query t, at position p = t + offset, sees keys p - left .. p + right.

    `window` is (left, right); `offset` is that of `causal_mask`.

    >>> window_mask(3, 4, (1, 0))[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    offset = num_keys - num_queries if offset is None else offset
    distance = jnp.arange(num_queries)[:, None] + offset - jnp.arange(num_keys)[None, :]
    return ((distance <= window[0]) & (distance >= -window[1]))[None, None]


def check_integers(at_least: int | None = None, /, **options: Any) -> None:
    """Raises ValueError unless all options, such as sizes of blocks, are integers, and at least `at_least`."""
    for name, value in options.items():
        if not is_int(value):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if at_least is not None and value < at_least:
            raise ValueError(f"{name} must be at least {at_least}, got {value}")


def is_int(value: Any) -> bool:
    """Returns whether a value is an integer, a static one: also of NumPy, or a symbolic size of `jax.export`."""
    return hasattr(value, "__index__") and not isinstance(value, bool | jax.Array | np.ndarray)


def check_sides(name: str, window: Any) -> tuple[int, int]:
    """Returns a window as (left, right); raises ValueError unless it is an integer or a pair of integers, from 0 on."""
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(is_int(side) for side in sides):
        raise ValueError(
            f"{name} must be an integer or a pair of integers (left, right), the numbers of tokens that a query sees "
            f"besides itself, got {window!r}"
        )
    if min(sides) < 0:
        raise ValueError(f"{name} must be at least 0, got {window}")
    return sides


def check_window(local_window_size: Window | None, is_causal: bool) -> tuple[tuple[int, int] | None, bool]:
    """Returns the window as (left, right), and whether attention is causal: always so if right is 0.

    >>> check_window(3, True), check_window((3, 0), False), check_window(None, False)
    (((3, 0), True), ((3, 0), True), (None, False))
    """
    if local_window_size is None:
        return None, is_causal
    left, right = check_sides("local_window_size", local_window_size)
    right = 0 if is_causal else right
    return (left, right), right == 0


def check_soft_cap(cap: Any) -> None:
    """Raises ValueError for a soft cap that is not above 0: tanh(logits / 0) * 0 would make all logits equal."""
    if isinstance(cap, int | float | np.number) and not cap > 0:
        raise ValueError(f"logits_soft_cap must be above 0, or None for no cap, got {cap}")


class Positions(NamedTuple):
    """What depends on the positions of the queries: causality, the window, and what `mask_mod` hides."""

    is_causal: bool
    window: tuple[int, int] | None
    mask_mod: MaskMod | None


def count_from_lengths(
    positions: Positions,
    query: Array,
    key: Array,
    query_lengths: Int[Array, " B"] | None,
    key_lengths: Int[Array, " B"] | None,
) -> Positions:
    """Returns causality and window as a `mask_mod` where the queries are the last ones of `key_lengths` keys.

    That is the case in decoding with a cache, T < S. Then query t of a row is at position t + key length - query length
    and not at t + S - T. "chunked" computes it block by block. Otherwise returns `positions` as they are.
    """
    (t, s), (is_causal, window, mask_mod) = (query.shape[1], key.shape[1]), positions
    # A single query is the last one of its keys, whether S is known or not.
    if key_lengths is None or not (is_int(t) and (t == 1 or (are_static_sizes(t, s) and t < s))):
        return positions
    if window is None and (t == 1 or not is_causal):  # nothing but the lengths hides a key
        return positions
    _check_lengths("key_lengths", key_lengths, key)
    if query_lengths is not None:
        _check_lengths("query_lengths", query_lengths, query)
    num_queries = t if query_lengths is None else jnp.asarray(query_lengths).astype(jnp.int32)
    offsets = jnp.asarray(key_lengths).astype(jnp.int32) - num_queries

    def is_visible(b: Array, n: Array, t: Array, s: Array) -> Array:
        """Returns which keys a query sees from its position in the row's keys."""
        distance = t + offsets[:, None, None, None] - s  # a block has all rows: b is 0 .. B - 1
        visible = distance >= -(0 if is_causal or window is None else window[1])
        if window is not None:
            visible = visible & (distance <= window[0])
        return visible if mask_mod is None else visible & mask_mod(b, n, t, s)

    return Positions(False, None, is_visible)


def add_key_lengths(mask: Mask | None, key_lengths: Int[Array, " B"] | None, key: Array) -> Mask | None:
    """Returns `mask` with the keys at or past the length of their row hidden as well."""
    if key_lengths is None:
        return mask
    _check_lengths("key_lengths", key_lengths, key)
    is_within_length = padding_mask(key_lengths, key.shape[1])
    return is_within_length if mask is None else mask & is_within_length


def zero_past_lengths(query_lengths: Int[Array, " B"] | None, query: Array, results: Any) -> Any:
    """Zeroes the results of queries at or past the length of their row.

    `results` is the output, [B, T, N, U], or a tuple of the output and weights, [B, N, T, S], or logarithms of the
    softmax denominator, [B, N, T], which become minus infinity.
    """
    if query_lengths is None:
        return results
    _check_lengths("query_lengths", query_lengths, query)
    exists = jnp.arange(query.shape[1])[None] < query_lengths[:, None]
    out, *others = results if isinstance(results, tuple) else (results,)
    out = jnp.where(exists[:, :, None, None], out, jnp.zeros((), out.dtype))
    zeroed: list[Array] = []
    for x in others:
        if x.ndim == 4:  # weights, [B, N, T, S]
            zeroed.append(jnp.where(exists[:, None, :, None], x, jnp.zeros((), x.dtype)))
        else:  # logarithms, [B, N, T]
            zeroed.append(jnp.where(exists[:, None], x, jnp.asarray(-jnp.inf, x.dtype)))
    return (out, *zeroed) if zeroed else out


def _check_lengths(name: str, lengths: Array, array: Array) -> None:
    """Raises ValueError unless `lengths` has one integer for each row of `array`."""
    if not hasattr(lengths, "shape"):
        raise ValueError(f"{name} must be an array of integers of shape [B] = {array.shape[:1]}, got {lengths!r}")
    if lengths.shape != array.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape [B] = {array.shape[:1]}, got {lengths.dtype} {lengths.shape}"
        )


def combine_masks(
    mask: Mask | None,
    is_causal: bool,
    segment_ids: SegmentIds | None,
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    window: tuple[int, int] | None = None,
) -> Mask | None:
    """Returns the conjunction of mask, causality, segments and window; None if every query sees every key."""
    masks = [] if mask is None else [mask]
    if window is not None:
        masks.append(window_mask(num_queries, num_keys, window))
    if is_causal:
        masks.append(causal_mask(num_queries, num_keys))
    if segment_ids is not None:
        masks.append(segment_mask(*pair_of_segment_ids(segment_ids, batch, num_queries, num_keys)))
    combined = None
    for part in masks:
        combined = part if combined is None else combined & part
    return combined


def pair_of_segment_ids(
    segment_ids: SegmentIds, batch: int, num_queries: int, num_keys: int
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns the segment ids of the queries and of the keys; raises ValueError if their shapes do not fit."""
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    shapes, required = (query_ids.shape, key_ids.shape), ((batch, num_queries), (batch, num_keys))
    if shapes != required:
        raise ValueError(
            f"segment_ids must have shapes [B, T] = {required[0]} and [B, S] = {required[1]}, got {shapes}"
        )
    return query_ids, key_ids


def refuse_segment_ids(segment_ids: SegmentIds | None, attention: str) -> None:
    """Raises ValueError if `segment_ids` is passed to an attention that does not support packed sequences."""
    if segment_ids is not None:
        raise ValueError(
            f"{attention} does not support packed sequences: pass segment_ids=None and give each sequence its own row"
        )


def refuse_pairs(
    attention: str,
    shared: str,
    bias: Bias | None,
    mask: Mask | None,
    is_causal: bool,
    segment_ids: SegmentIds | None,
) -> None:
    """Raises ValueError for options that differ between queries, for attentions whose queries share means of keys.

    Args:
      attention: name of the attention, first in the message.
      shared: what the queries share, a plural such as "landmarks".
      bias: must be None.
      mask: must be None or hide the same keys from all queries and heads, [#B, 1, 1, #S].
      is_causal: must be False.
      segment_ids: must be None.
    """
    refuse_segment_ids(segment_ids, attention)
    if bias is not None:
        raise ValueError(f"{attention} takes no bias, because it never computes the logits of pairs: pass bias=None")
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"{attention} takes only a padding mask, [B, 1, 1, S], got shape {mask.shape}, because all queries share "
            f"the {shared}. It has neither is_causal nor segment_ids: give each sequence its own row"
        )
    if is_causal:
        raise ValueError(
            f"{attention} has no causal form, because {shared} are means that include future tokens: "
            "pass is_causal=False"
        )


def visible_keys(mask: Mask | None, batch: int, num_keys: int) -> Bool[Array, "B S"]:
    """Returns True for the keys that a padding mask, [#B, 1, 1, #S], shows; None shows all."""
    if mask is None:
        return jnp.ones((batch, num_keys), jnp.bool_)
    return jnp.broadcast_to(mask[:, 0, 0], (batch, num_keys))


_LAYOUT = "; the layout of query, key and value is [batch, length, heads, size], not [batch, heads, length, size]"


def set_options(**options: Any) -> dict[str, Any]:
    """Returns the options that are neither None nor False.

    A function that takes an attention passes on only these: a default would override what is bound to the attention.
    """
    return {name: option for name, option in options.items() if option is not None and option is not False}


def statistics_dtype(x: Array) -> np.dtype:
    """Returns the dtype of sums and exponentials of `x`: float32 at least.

    >>> statistics_dtype(jnp.zeros(2, jnp.bfloat16)), statistics_dtype(np.zeros(2))
    (dtype('float32'), dtype('float64'))
    """
    return np.promote_types(x.dtype, np.float32)  # NumPy's rule: JAX's raises under strict promotion


def check_floats(**arrays: Any) -> None:
    """Raises ValueError, with the argument's name, for an array that is not floating-point."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must hold floating-point numbers, got {array.dtype}: cast it to float32")


def check_heads(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError for inputs that are not floating-point, or have no heads or no features."""
    check_floats(query=query, key=key, value=value)
    for name, array in (("query", query), ("key", key)):
        if array.ndim == 4 and 0 in array.shape[2:]:
            raise ValueError(
                f"{name} must have at least one head and one feature, [batch, length, heads, size], got {array.shape}"
            )


def check_shapes(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> None:
    """Raises ValueError for query, key, value, bias and mask whose ranks, sizes or dtypes do not fit together."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            hint = f"; for one example, as under jax.vmap, pass {name}[None] and take [0] of the output"
            raise ValueError(
                f"{name} must have rank 4, [batch, length, heads, size], got shape {array.shape}"
                f"{hint if array.ndim == 3 else ''}"
            )
    check_heads(query, key, value)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have equal head sizes, got {query.shape[-1]} != {key.shape[-1]}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must have equal batch, length and heads, got {key.shape[:3]} != {value.shape[:3]}"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have equal batch sizes, got {query.shape[0]} != {key.shape[0]}")
    if query.shape[2] % key.shape[2]:
        hint = _LAYOUT if key.shape[1] and query.shape[1] % key.shape[1] == 0 else ""
        raise ValueError(
            f"the number of key heads must divide that of query heads, got {key.shape[2]} key heads and "
            f"{query.shape[2]} query heads{hint}"
        )
    check_pairs(bias, mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))


def check_pairs(bias: Array | None, mask: Array | None, full: tuple[int, ...]) -> None:
    """Raises ValueError for a bias or a mask with a wrong dtype or not broadcastable to [B, N, T, S] = `full`."""
    _check_is_no_mask(bias)
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and (
            array.ndim != 4 or any(size not in (1, required) for size, required in zip(array.shape, full, strict=True))
        ):
            b, n, t, _ = full
            # Whether it would fit if all arrays had the layout [batch, heads, length, size]: then n would be T.
            is_exchanged = array.ndim == 4 and all(
                size in (1, required) for size, required in zip(array.shape[:3], (b, t, n), strict=True)
            )
            raise ValueError(
                f"{name} must be broadcastable to [B, N, T, S] = {full}, got shape {array.shape}"
                f"{_LAYOUT if is_exchanged else _new_axes(name, array.ndim)}"
            )
    check_floats(bias=bias)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be boolean (True = may attend), got {mask.dtype}: pass mask.astype(bool) for one of zeros and "
            "ones, and terms that are added to the logits as bias"
        )


def _check_is_no_mask(bias: Array | None) -> None:
    """Raises ValueError if the bias is boolean: other libraries have their mask in its place."""
    if bias is not None and bias.dtype == jnp.bool_:
        raise ValueError("bias, the fourth argument, is boolean: pass a mask (True = may attend) by name, mask=...")


def _new_axes(name: str, rank: int) -> str:
    """Returns how to make a bias or a mask of another rank one of rank 4, for a message; "" if it has rank 4."""
    ways = {
        2: f"for [T, S] pass {name}[None, None], for [B, S] {name}[:, None, None]",
        3: f"for [B, T, S] pass {name}[:, None], for [N, T, S] {name}[None]",
    }
    return "" if rank == 4 else f"; it needs 4 axes{': ' * (rank in ways)}{ways.get(rank, '')}"


EXTRA_OUTPUTS = ("return_weights", "return_log_prob", "return_probs", "return_lse")
"""Options that request further results, in the order of these results; all results are [B, N, T, ...]."""


def check_outputs(return_weights: bool, return_lse: bool) -> None:
    """Raises ValueError if both weights and logarithms of the softmax denominator are requested."""
    if return_weights and return_lse:
        raise ValueError(
            "return_weights and return_lse exclude each other: call twice under jit, which computes the logits once"
        )


def zeros_where_empty(attention: Callable[_P, _R], *, front: str | None = None) -> Callable[_P, _R]:
    """Makes an attention return zeros for empty inputs, which blocks and reductions do not support.

    Zeros are also the output of a query that sees no key. For empty inputs only heads and dtypes are checked.

    Args:
      attention: a function of query [B, T, N, H], key [B, S, K, H], value [B, S, K, U] and options.
      front: option with further keys, [B, G, K, H], whose weights come before those of `key`; None: there is none.

    Returns:
      The function with empty inputs handled. If B, T or S is 0, it returns zeros, [B, T, N, U], in the dtype of
      `query`, and zeros for the other requested results: weights, [B, N, T, S], log-probabilities, [B, N, T], and
      probabilities, [B, N, T, S]. The logarithm of the softmax denominator, [B, N, T], is the sink of the head, minus
      infinity without sinks.
    """

    @functools.wraps(attention)
    def attend(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Returns zeros if B, T or S is 0, otherwise the results of `attention`."""
        query, key, value = bind_inputs(args, kwargs)
        check_heads(query, key, value)
        if query.size and key.size:
            return attention(*args, **kwargs)
        (b, t, n, _), s, u = query.shape, key.shape[1], value.shape[-1]
        if front is not None and (further_key := cast(Any, kwargs.get(front))) is not None:
            s += further_key.shape[1]
        shapes = dict(zip(EXTRA_OUTPUTS, ((b, n, t, s), (b, n, t), (b, n, t, s), (b, n, t)), strict=True))
        dtype = statistics_dtype(query)
        sinks: Any = kwargs.get("sinks")
        lse = -jnp.inf if sinks is None else sinks[None, :, None].astype(dtype)
        requested = [
            jnp.broadcast_to(jnp.asarray(lse if option == "return_lse" else 0, dtype), shape)
            for option, shape in shapes.items()
            if kwargs.get(option)
        ]
        out = jnp.zeros((b, t, n, u), query.dtype)
        return cast(_R, (out, *requested) if requested else out)

    return attend


def bind_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns query, key and value from positional and keyword arguments."""
    names = ("query", "key", "value")
    passed_by_name = [kwargs[name] for name in names[len(args) :]]
    query, key, value = (*args[:3], *passed_by_name)
    return query, key, value


def _canonical(x: Any) -> Any:
    """Casts NumPy's float64 and complex128 arrays to the dtype that JAX would use."""
    if isinstance(x, np.ndarray) and x.dtype in (np.float64, np.complex128):
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def shard_like_query(attention: Callable[_P, _R]) -> Callable[_P, _R]:
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
    def attend(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls `attention`; on a mesh with explicit axes, with these axes as Auto and results sharded like `query`."""
        # NumPy float64 becomes float32 unless jax_enable_x64 is set. Cast once here, to avoid a warning at each use.
        args, kwargs = jax.tree.map(_canonical, (args, kwargs), is_leaf=lambda x: x is None)
        fourth: Any = args[3] if len(args) > 3 else kwargs.get("bias")
        _check_is_no_mask(fourth)
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

        def attend_to(*arrays: Any) -> _R:
            """Calls `attention` with these arrays in place of those of the arguments."""
            traced_leaves = dict(enumerate(leaves)) | dict(zip(array_indices, arrays, strict=True))
            traced_args, traced_kwargs = jax.tree.unflatten(structure, traced_leaves.values())
            return cast(Callable[..., _R], attention)(*traced_args, **traced_kwargs)

        out_sharding = tuple(shardings) if len(shardings) > 1 else shardings[0]
        sharded: Any = jax.sharding.auto_axes(attend_to, axes=axes, out_sharding=out_sharding)
        return sharded(*(leaves[i] for i in array_indices))

    return attend


class WeightsOnRequest(Protocol[_P]):
    """Type of an attention: returns an array, or with `return_weights=True` a pair of arrays."""

    # Calls with `return_weights` or `return_lse` are not type-checked further: a ParamSpec cannot be extended.
    @overload
    def __call__(self, *args: Any, return_lse: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: Literal[True], **options: Any) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: Any, return_weights: bool, **options: Any) -> Array | tuple[Array, Array]: ...
    @overload
    def __call__(self, *args: _P.args, **options: _P.kwargs) -> Array: ...


def weights_on_request(attention: Callable[_P, Array | tuple[Array, Array]]) -> WeightsOnRequest[_P]:
    """Casts an attention to the overloaded type `WeightsOnRequest`; has no effect at run time."""
    return cast(Any, attention)
