"""Boolean attention masks, rank 4, [B, N, T, S] or broadcastable to it. True means "may attend"; combine with `&`.

Also the types of an attention's arguments, and the checks that all attentions make of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Bias = Float[Array, "#B #N #T #S"]
"""Added to the scaled logits of each pair of query and key."""
Mask = Bool[Array, "#B #N #T #S"]
"""True where a query may attend to a key."""
SegmentIds = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""Numbers of the texts that are packed into one row, of all tokens or of (queries, keys); 0 is padding."""
Window = int | tuple[int, int]
"""How many positions a query sees on each side besides its own, or to the left and to the right."""
ScoreMod = Callable[..., Float[Array, "B N T S"]]
"""`score_mod(logits, b, n, t, s)` returns new logits for those of a block.

The logits are [B, N, T, S] of the block; `b`, `n`, `t` and `s` are the numbers of its rows, heads, queries and keys,
int32 [B, 1, 1, 1], [1, N, 1, 1], [1, 1, T, 1] and [1, 1, 1, S]. Queries and keys of a block are consecutive. On a mesh
with explicit axes, arrays that it reads are bound by `jax.tree_util.Partial`.
"""
MaskMod = Callable[..., Bool[Array, "#B #N #T #S"]]
"""`mask_mod(b, n, t, s)` returns True where a query may attend; the arguments are those of a `ScoreMod`."""


class AttentionMask(NamedTuple):
    """Which keys each query sees: a value that implementations ask, instead of guessing from shapes."""

    pairs: Mask | None = None
    """True where a query may attend."""
    is_causal: bool = False
    window: tuple[int, int] | None = None
    """How many keys a query sees to the left and to the right of its position."""
    ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Segments of the queries and of the keys; 0 is padding."""
    mask_mod: MaskMod | None = None

    @property
    def is_padding(self) -> bool:
        """Whether `pairs` hides keys alone, from all heads and queries alike, if any, and no function hides more."""
        return self.mask_mod is None and (self.pairs is None or self.pairs.shape[1:3] == (1, 1))

    def without_queries(self, number: int) -> "AttentionMask":
        """The mask of all queries but the first."""
        pairs = self.pairs
        if pairs is not None and pairs.shape[2] > 1:
            pairs = pairs[:, :, number:]
        return self._replace(pairs=pairs, ids=None if self.ids is None else (self.ids[0][:, number:], self.ids[1]))


def causal_mask(
    num_queries: int, num_keys: int | None = None, *, offset: int | Int[Array, ""] | None = None
) -> Bool[Array, "1 1 T S"]:
    """Lets query t see keys 0 .. t + offset.

    Args:
      num_queries: T.
      num_keys: S; None means T.
      offset: how many keys precede the first query; None means S - T, which aligns the last query with the last key
        as decoding with a cache needs it.

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
    """Hides the keys at or past the length (in tokens) of their sequence.

    >>> padding_mask(jnp.array([2, 0]), 3)[:, 0, 0].astype(int).tolist()
    [[1, 1, 0], [0, 0, 0]]
    """
    return (jnp.arange(num_keys)[None, :] < lengths[:, None])[:, None, None, :]


def segment_mask(query_ids: Int[Array, "B T"], key_ids: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """Lets tokens see those of their own segment only; segment 0 is padding, which sees and is seen by nothing.

    >>> import jax
    >>> query_ids, key_ids = jnp.array([[1, 2, 0]]), jnp.array([[1, 1, 2, 0]])
    >>> jax.jit(segment_mask)(query_ids, key_ids)[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    same = query_ids[:, :, None] == key_ids[:, None, :]
    return (same & (query_ids != 0)[:, :, None])[:, None]


def window_mask(
    num_queries: int, num_keys: int, window: tuple[int, int], *, offset: int | Int[Array, ""] | None = None
) -> Bool[Array, "1 1 T S"]:
    """Lets query t, at position p = t + offset, see keys p - left .. p + right, with window = (left, right).

    The offset is as in `causal_mask`.

    >>> window_mask(3, 4, (1, 0))[0, 0].astype(int).tolist()
    [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    offset = num_keys - num_queries if offset is None else offset
    distance = jnp.arange(num_queries)[:, None] + offset - jnp.arange(num_keys)[None, :]
    return ((distance <= window[0]) & (distance >= -window[1]))[None, None]


def check_window(local_window_size: Window | None, is_causal: bool) -> tuple[tuple[int, int] | None, bool]:
    """Returns the window as (left, right) and whether attention is causal, which it is where the window has no right.

    >>> check_window(3, True), check_window((3, 0), False), check_window(None, False)
    (((3, 0), True), ((3, 0), True), (None, False))
    """
    if local_window_size is None:
        return None, is_causal
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size must not be negative, got {local_window_size}")
    right = 0 if is_causal else right
    return (left, right), right == 0


def add_key_lengths(mask: Mask | None, key_lengths: Int[Array, " B"] | None, key: Array) -> Mask | None:
    """Hides in `mask` the keys at or past the length of their row."""
    if key_lengths is None:
        return mask
    _check_lengths("key_lengths", key_lengths, key)
    seen = padding_mask(key_lengths, key.shape[1])
    return seen if mask is None else mask & seen


def zero_past_lengths(query_lengths: Int[Array, " B"] | None, query: Array, results: Any) -> Any:
    """Puts zeros for the queries at or past the length of their row, in an output [B, T, N, U] or in this and others.

    These are weights, [B, N, T, S], or the logarithm of the softmax's denominator, [B, N, T], which is minus infinity.
    """
    if query_lengths is None:
        return results
    _check_lengths("query_lengths", query_lengths, query)
    exists = jnp.arange(query.shape[1])[None] < query_lengths[:, None]
    out, *others = results if isinstance(results, tuple) else (results,)
    out = jnp.where(exists[:, :, None, None], out, jnp.zeros((), out.dtype))
    others = [
        jnp.where(exists[:, None, :, None], x, jnp.zeros((), x.dtype))
        if x.ndim == 4
        else jnp.where(exists[:, None], x, jnp.asarray(-jnp.inf, x.dtype))
        for x in others
    ]
    return (out, *others) if others else out


def _check_lengths(name: str, lengths: Array, array: Array) -> None:
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
    """Who may attend to whom, by everything that is said about it; None means everyone to everything."""
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
    """The segments of the queries and of the keys, checked."""
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    shapes, want = (query_ids.shape, key_ids.shape), ((batch, num_queries), (batch, num_keys))
    if shapes != want:
        raise ValueError(f"segment_ids must have shapes [B, T] = {want[0]} and [B, S] = {want[1]}, got {shapes}")
    return query_ids, key_ids


def refuse_segment_ids(segment_ids: SegmentIds | None, attention: str) -> None:
    """Raises ValueError where an attention is given packed texts that it cannot keep apart."""
    if segment_ids is not None:
        raise ValueError(
            f"{attention} cannot keep texts apart that share a row, so it takes no segment_ids: unpack them"
        )


def refuse_pairs(
    attention: str,
    shared: str,
    bias: Bias | None,
    mask: Mask | None,
    is_causal: bool,
    segment_ids: SegmentIds | None,
) -> None:
    """Raises ValueError for an option of pairs, where all queries share something that is made of all keys.

    Args:
      attention: its name, first in the message.
      shared: what they share, a plural.
      bias: refused.
      mask: refused unless it hides the same keys from all queries and heads, [#B, 1, 1, #S].
      is_causal: refused.
      segment_ids: refused.
    """
    refuse_segment_ids(segment_ids, attention)
    if bias is not None:
        raise ValueError(f"{attention} takes no bias: it never forms the logits of pairs that a bias is added to")
    if mask is not None and mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"{attention} takes a padding mask only, [B, 1, 1, S], got shape {mask.shape}: all queries share the "
            f"{shared}. It has neither is_causal nor segment_ids: give each text its own row"
        )
    if is_causal:
        raise ValueError(f"{attention} has no causal form: {shared} are means over the future too")


def visible_keys(mask: Mask | None, batch: int, num_keys: int) -> Bool[Array, "B S"]:
    """Which keys a mask of keys alone, [#B, 1, 1, #S], lets all queries see."""
    if mask is None:
        return jnp.ones((batch, num_keys), jnp.bool_)
    return jnp.broadcast_to(mask[:, 0, 0], (batch, num_keys))


_LAYOUT = "; the layout of query, key and value is [batch, length, heads, size], not [batch, heads, length, size]"


def check_floats(**arrays: Any) -> None:
    """Raises ValueError for an array of integers, booleans or complex numbers, by its name."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must hold floating-point numbers, got {array.dtype}: cast it to float32")


def check_heads(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError for inputs that hold no floating-point numbers, or have no head or no feature."""
    check_floats(query=query, key=key, value=value)
    for name, array in (("query", query), ("key", key)):
        if array.ndim == 4 and 0 in array.shape[2:]:
            raise ValueError(f"{name} must have a head and a feature, [batch, length, heads, size], got {array.shape}")


def check_shapes(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> None:
    """Raises ValueError, with both sizes in it, for arrays that no attention takes."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have rank 4, [batch, length, heads, size], got shape {array.shape}")
    check_heads(query, key, value)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key head sizes differ: {query.shape[-1]} != {key.shape[-1]}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value differ in batch, length or heads: {key.shape[:3]} != {value.shape[:3]}")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key batch sizes differ: {query.shape[0]} != {key.shape[0]}")
    if query.shape[2] % key.shape[2]:
        hint = _LAYOUT if query.shape[1] % key.shape[1] == 0 else ""
        raise ValueError(f"{key.shape[2]} key heads do not divide {query.shape[2]} query heads{hint}")
    check_pairs(bias, mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))


def check_pairs(bias: Array | None, mask: Array | None, full: tuple[int, ...]) -> None:
    """Raises ValueError for a bias or a mask that does not fit logits of the shape [B, N, T, S] = `full`."""
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and (
            array.ndim != 4 or any(size not in (1, want) for size, want in zip(array.shape, full, strict=True))
        ):
            b, n, t, _ = full
            # Whether it would fit if the axes of length and heads were exchanged in all arrays: n would be T.
            is_exchanged = array.ndim == 4 and all(
                size in (1, want) for size, want in zip(array.shape[:3], (b, t, n), strict=True)
            )
            raise ValueError(
                f"{name} must be broadcastable to [B, N, T, S] = {full}, got shape {array.shape}"
                f"{_LAYOUT if is_exchanged else ''}"
            )
    check_floats(bias=bias)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean (True = may attend), got {mask.dtype}; use bias for additive terms")
