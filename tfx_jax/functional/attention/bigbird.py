"""BigBird attention (Zaheer et al., 2020): global, window and random blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention.blocks import cut
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.lsh import visible_tokens
from tfx_jax.functional.attention.signature import (
    Bias,
    check_integers,
    check_shapes,
    refuse_segment_ids,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option


def bigbird_block_mask(
    num_blocks: int,
    *,
    num_global_blocks: int,
    num_window_blocks: int,
    num_random_blocks: int,
    num_last_global_blocks: int = 0,
    seed: int = 0,
) -> Bool[np.ndarray, "blocks blocks"]:
    """Returns which blocks of keys (columns) each block of queries (rows) sees in `bigbird_attention`.

    For tests and plots; `bigbird_attention` does not use it.

    Args:
      num_blocks: number of blocks of the sequence, its length over `block_size`, rounded up.
      num_global_blocks: as in `bigbird_attention`, like the arguments below.
      num_window_blocks: blocks in the window, odd.
      num_random_blocks: random blocks that each block sees.
      num_last_global_blocks: global blocks at the end.
      seed: seed of the random blocks.

    Returns:
      bool [num_blocks, num_blocks], a NumPy array.

    Raises:
      ValueError: if a number of blocks is negative or the window is even.

    >>> blocks = bigbird_block_mask(5, num_global_blocks=1, num_window_blocks=3, num_random_blocks=0)
    >>> print(blocks.astype(int))
    [[1 1 1 1 1]
     [1 1 1 0 0]
     [1 1 1 1 0]
     [1 0 1 1 1]
     [1 0 0 1 1]]
    """
    num_global = num_global_blocks + num_last_global_blocks
    counts = num_global, num_window_blocks, num_random_blocks
    check_blocks(*counts)
    window, random = (x[0] for x in list_blocks(num_blocks, np.array([num_blocks]), *counts, seed, numpy=np))
    num_global = num_blocks - len(window)
    visible = np.zeros((num_blocks, num_blocks + 1), bool)  # block -1, an empty slot, marks the extra last column
    visible[:num_global] = True
    visible[:, :num_global] = True
    np.put_along_axis(visible[num_global:], np.concatenate([window, random], axis=1), True, axis=1)
    # All global blocks came first so far: move the last ones to the end.
    return np.roll(visible[:, :-1], (-num_last_global_blocks, -num_last_global_blocks), axis=(0, 1))


def check_blocks(num_global: int, num_window: int, num_random: int) -> None:
    """Raises ValueError if a number of blocks is negative or the window even."""
    check_integers(num_global_blocks=num_global, num_window_blocks=num_window, num_random_blocks=num_random)
    if min(num_global, num_random) < 0:
        raise ValueError(
            f"numbers of global and random blocks must be at least 0, got {num_global} global and {num_random} random"
        )
    if num_window < 1 or num_window % 2 == 0:
        raise ValueError(f"num_window_blocks must be odd and at least 1 (it counts the block itself), got {num_window}")


def list_blocks(
    num_array_blocks: int,
    num_blocks: Int[Array, "#B"] | Int[np.ndarray, "#B"],
    num_global: int,
    num_window: int,
    num_random: int,
    seed: int,
    numpy: Any = jnp,
) -> tuple[Any, Any]:
    """Lists the window blocks and the random blocks that each block that is not global sees; -1 marks an empty slot.

    Args:
      num_array_blocks: blocks of the arrays: the length of the longest sequence.
      num_blocks: blocks of each sequence. Its random blocks depend on this number and the seed only.
      num_global: global blocks; they come first.
      num_window: blocks in the window, odd.
      num_random: random blocks per block.
      seed: seed of the random blocks.
      numpy: the module that computes, `jax.numpy` or NumPy.

    Returns:
      int32 [#B, rows, window] and [#B, rows, random]; a row is a block of queries that is not global.
    """
    num_global = min(num_global, num_array_blocks)
    side = min(num_window // 2, num_array_blocks - 1)
    rows = numpy.arange(num_global, num_array_blocks, dtype=np.int32)[None, :, None]
    num_blocks = num_blocks.astype(np.int32)[:, None, None]
    window = rows + numpy.arange(-side, side + 1, dtype=np.int32)[None, None]  # [1, rows, window]
    window = numpy.where((window >= num_global) & (window < num_blocks), window, -1)

    # The blocks of a window that exist and are not global: first .. end - 1.
    first, end = numpy.maximum(rows - side, num_global), numpy.minimum(rows + side + 1, num_blocks)
    num_others = numpy.maximum(num_blocks - num_global - (end - first), 0)  # neither global nor in the window
    # Floyd's sampling without replacement: sample from 0 .. last, and take `last` if the sample was taken before.
    random = numpy.zeros((*np.broadcast_shapes(num_blocks.shape, rows.shape)[:2], 0), np.int32)
    max_random = min(num_random, max(rows.size - 1, 0))  # no more blocks than these exist outside of the window
    for k in range(max_random, 0, -1):
        last = num_others - k
        sample = (_hash(seed, rows, k, numpy) % numpy.maximum(last + 1, 1).astype(np.uint32)).astype(np.int32)
        sample = numpy.where((random == sample).any(axis=-1, keepdims=True), last, sample)
        random = numpy.concatenate([random, numpy.where(last < 0, -1, sample)], axis=-1)
    # A sample is an index among the blocks that are neither global nor in the window: shift it past both.
    random = numpy.where(random < 0, -1, num_global + random)
    random = numpy.where(random < first, random, random + end - first)
    return window, numpy.where(rows < num_blocks, random, -1)


def _hash(seed: int, row: Any, k: int, numpy: Any) -> Any:
    """Returns a pseudo-random uint32 for each row, by rounds of the finalizer of MurmurHash3.

    Args:
      seed: seed, modulo 2**32.
      row: integers of any shape, the shape of the result.
      k: number of the sample, so that a row gets another number for each sample.
      numpy: the module that computes, `jax.numpy` or NumPy.
    """
    x = numpy.zeros(row.shape, np.uint32)
    for number in (np.uint32(seed % 2**32), row.astype(np.uint32), np.uint32(k)):
        x = (x ^ number) + np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        x = x ^ (x >> np.uint32(16))
    return x


@weights_on_request
@shard_like_query
@zeros_where_empty
def bigbird_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: Bias | None = None,
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    block_size: int,
    num_global_blocks: int,
    num_window_blocks: int,
    num_random_blocks: int,
    num_last_global_blocks: int = 0,
    first_block_times: int = 1,
    dense_length: int = 0,
    seed: int = 0,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes self-attention of every block over its neighbors, some random blocks and the global blocks.

    Section 2 and the block-sparse implementation (appendix D) of "Big Bird: Transformers for Longer Sequences" (Zaheer
    et al., 2020, https://arxiv.org/abs/2007.14062), with internal global tokens (ITC): the first blocks see all tokens
    and all tokens see them. `bigbird_block_mask` returns the pattern. The paper's base model has block_size 64 with 2
    global, 3 window and 3 random blocks. Time and memory grow as
    T * block_size * (2 * global blocks + window blocks + random blocks).

    `num_last_global_blocks`, `first_block_times` and `dense_length` reproduce published models of Hugging Face's
    transformers. There the first and the last block are global, and short sequences use dense attention. In evaluation
    every random block is the first block, so its keys count several times in the softmax of non-global queries.

    **Padding.** Blocks consist of visible tokens: the tokens that `mask` shows are moved together in each row before
    they are cut into blocks. The random blocks depend on `seed` and on the number of blocks of the sequence. So a
    sequence gets the same output alone, padded anywhere, or in a batch with others. Packed sequences would share
    blocks, so `segment_ids` is rejected.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, T].
      mask: True for visible tokens, [B or 1, 1, 1, T]. A hidden token gets a zero output.
      block_size: tokens in a block; it need not divide T.
      num_global_blocks: blocks at the start that see all blocks and that all blocks see.
      num_window_blocks: consecutive blocks that a block sees, with itself in the middle; odd. The window is cut off at
        both ends of the sequence.
      num_random_blocks: further blocks that a block sees, sampled without replacement from the blocks that are neither
        global nor in its window; if there are fewer, it sees all of them.
      num_last_global_blocks: global blocks at the end of each sequence; the last one may be shorter.
      first_block_times: how often the keys of the first block count in the softmax of queries that are not global.
      dense_length: sequences of at most this many visible tokens use dense attention.
      seed: seed of the random blocks, which all heads share. Give each layer another seed.
      is_causal: must be False: global tokens see the future and every token sees them, so BigBird has no causal form.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: must be None.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the pattern; needs O(T * T) memory.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match, bias or mask differs between queries (its query axis is not 1), segment_ids
        are passed, or an option is out of range.

    >>> blocks = {"num_global_blocks": 1, "num_window_blocks": 1, "num_random_blocks": 1}
    >>> attend = jax.jit(lambda x: bigbird_attention(x, x, x, block_size=2, **blocks, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 8, 1, 2)))
    >>> (np.asarray(weights)[0, 0] > 0).sum(axis=-1).tolist()
    [8, 8, 6, 6, 6, 6, 6, 6]
    """
    _check(query, key, value, bias, mask, is_causal, block_size, num_last_global_blocks, first_block_times)
    refuse_segment_ids(segment_ids, "BigBird attention")
    counts = num_global_blocks + num_last_global_blocks, num_window_blocks, num_random_blocks
    check_blocks(*counts)
    b, t = query.shape[:2]
    options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "return_weights": return_weights}
    if t <= dense_length:
        ids = None if mask is None else visible_tokens(None, mask, b, t).astype(jnp.int32)
        return dot_product_attention(query, key, value, bias, segment_ids=ids, dropout_rng=dropout_rng, **options)
    rngs = (None, None, None) if dropout_rng is None else tuple(jax.random.split(dropout_rng, 3))
    layout = _layout(None if mask is None else visible_tokens(None, mask, b, t), t, block_size, num_last_global_blocks)
    query, key, value = (layout.arrange(x, 1) for x in (query, key, value))
    bias = bias if bias is None or bias.shape[3] == 1 else layout.arrange(bias, 3)
    first_block_bias = None
    if first_block_times > 1:
        is_first = (layout.rank < block_size)[:, None, None]
        first_block_bias = jnp.where(is_first, np.float32(np.log(first_block_times)), np.float32(0))
    result = _attend(
        query,
        key,
        value,
        list_blocks(-(-t // block_size), layout.num_blocks, *counts, seed),
        is_token=layout.is_token,
        bias=bias,
        first_block_bias=first_block_bias,
        block_size=block_size,
        rngs=rngs[:2],
        **options,
    )
    if dense_length and mask is not None:
        num_slots = min(block_size * max(-(-dense_length // block_size), num_last_global_blocks), query.shape[1])
        dense = _dense(query, key, value, bias, layout.is_token, num_slots, dropout_rng=rngs[2], **options)
        is_short = layout.num_tokens <= dense_length
        result = jax.tree.map(lambda x, y: jnp.where(is_short[:, None, None, None], x, y), dense, result)
    if not return_weights:
        return layout.restore(result, (1,))
    return layout.restore(result[0], (1,)), layout.restore(result[1], (2, 3))


def _check(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    is_causal: bool,
    block_size: int,
    num_last_global_blocks: int,
    first_block_times: int,
) -> None:
    """Raises ValueError for arguments that `bigbird_attention` does not support."""
    check_shapes(query, key, value, bias, mask)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"BigBird is self-attention and needs as many keys as queries, got {query.shape[1]} queries and "
            f"{key.shape[1]} keys"
        )
    if bias is not None and bias.shape[2] != 1:
        raise ValueError(
            f"bias must be the same for all queries, got shape {bias.shape}: one for each pair of query and key takes "
            "the memory that sparse attention saves; pass [B, 1, 1, T]"
        )
    if is_causal:
        raise ValueError(
            "BigBird has no causal form, because its global tokens see the future and every token sees them: pass "
            "is_causal=False"
        )
    check_integers(1, block_size=block_size)
    check_integers(first_block_times=first_block_times, num_last_global_blocks=num_last_global_blocks)
    if first_block_times < 1 or num_last_global_blocks < 0:
        raise ValueError(
            "first_block_times must be at least 1 and num_last_global_blocks at least 0, got "
            f"first_block_times={first_block_times} and num_last_global_blocks={num_last_global_blocks}"
        )


class _Layout(NamedTuple):
    """Maps the visible tokens of each row to slots: first the last global blocks, then the other blocks in order.

    Without a mask all rows have the same layout, and the arrays have one row.
    """

    arrange: Callable[[Array, int], Array]
    """`arrange(x, axis)` moves tokens along an axis into their slots."""
    restore: Callable[[Array, tuple[int, ...]], Array]
    """`restore(x, axes)` moves tokens from their slots back along some axes; hidden tokens get zeros."""
    rank: Int[Array, "#B slots"]
    """For each slot, the index of its token among the visible tokens of the row."""
    is_token: Bool[Array, "#B slots"]
    """Whether the slot holds a token."""
    num_tokens: Int[Array, "#B"]
    num_blocks: Int[Array, "#B"]


def _layout(visible: Bool[Array, "B T"] | None, length: int, block_size: int, num_last: int) -> _Layout:
    """Returns the layout of rows of `length` positions with `num_last` global blocks at the end of each sequence.

    `visible` is True for tokens and False for padding; None means no padding.
    """
    num_array_blocks = -(-length // block_size)
    num_last, num_slots = min(num_last, num_array_blocks), num_array_blocks * block_size
    num_tokens = jnp.full(1, length, jnp.int32) if visible is None else visible.sum(axis=1, dtype=jnp.int32)
    num_blocks = -(-num_tokens // block_size)
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None]
    # Slots of the last global blocks come first; a sequence with fewer blocks leaves the first of these slots empty.
    first = jnp.where(slot < num_last * block_size, num_blocks[:, None] - num_last, -num_last) * block_size
    rank = first + slot
    is_token = (rank >= 0) & (rank < num_tokens[:, None])
    # A slot of the other blocks must not repeat a token of the last global blocks.
    is_token = is_token & ((slot < num_last * block_size) | (rank < (num_blocks[:, None] - num_last) * block_size))
    if visible is None:  # moving the last blocks to the front is a rotation

        def arrange(x: Array, axis: int) -> Array:
            padding = [(0, num_slots - length if i == axis else 0) for i in range(x.ndim)]
            return jnp.roll(jnp.pad(x, padding), num_last * block_size, axis=axis)

        def restore(x: Array, axes: tuple[int, ...]) -> Array:
            for axis in axes:
                x = jax.lax.slice_in_dim(jnp.roll(x, -num_last * block_size, axis=axis), 0, length, axis=axis)
            return x

        return _Layout(arrange, restore, rank, is_token, num_tokens, num_blocks)

    position = jnp.argsort(~visible, axis=1, stable=True).astype(jnp.int32)  # positions of the visible tokens, in order
    position_of_slot = jnp.take_along_axis(position, jnp.clip(rank, 0, length - 1), axis=1)
    rank_of_token = jnp.cumsum(visible, axis=1, dtype=jnp.int32) - 1
    is_in_last = rank_of_token // block_size >= num_blocks[:, None] - num_last
    slot_of_token = rank_of_token + block_size * jnp.where(is_in_last, num_last - num_blocks[:, None], num_last)

    def gather(x: Array, index: Array, exists: Array, axis: int) -> Array:
        """Gathers entries of `x` along an axis by `index`, [B, entries]; entries that do not exist are 0."""
        shape = [1] * x.ndim
        shape[0], shape[axis] = index.shape
        gathered = jnp.take_along_axis(x, index.reshape(shape), axis=axis)
        return jnp.where(exists.reshape(shape), gathered, jnp.zeros((), x.dtype))

    def arrange(x: Array, axis: int) -> Array:
        return gather(x, position_of_slot, is_token, axis)

    def restore(x: Array, axes: tuple[int, ...]) -> Array:
        for axis in axes:
            x = gather(x, jnp.clip(slot_of_token, 0, num_slots - 1), visible, axis)
        return x

    return _Layout(arrange, restore, rank, is_token, num_tokens, num_blocks)


def _dense(
    query: Array, key: Array, value: Array, bias: Array | None, is_token: Array, num_slots: int, **options: Any
) -> Any:
    """Computes dense attention among the first `num_slots` slots, [B, slots, N, H]; later slots get zeros."""
    first = [x[:, :num_slots] for x in (query, key, value)]
    bias = bias if bias is None or bias.shape[3] == 1 else bias[..., :num_slots]
    result = dot_product_attention(*first, bias, is_token[:, None, None, :num_slots], **options)
    no_padding, padding = (0, 0), (0, query.shape[1] - num_slots)
    out_padding = (no_padding, padding, no_padding, no_padding)
    if not isinstance(result, tuple):
        return jnp.pad(result, out_padding)
    out, weights = result
    return jnp.pad(out, out_padding), jnp.pad(weights, (no_padding, no_padding, padding, padding))


def _attend(
    query: Array,
    key: Array,
    value: Array,
    blocks: tuple[Array, Array],
    *,
    is_token: Bool[Array, "#B slots"],
    bias: Array | None,
    first_block_bias: Array | None,
    block_size: int,
    rngs: tuple[Array | None, Array | None],
    return_weights: bool,
    **options: Any,
) -> Any:
    """Computes the attention of the global blocks, whose slots come first, and of the other blocks.

    Args:
      query: queries in their slots, [B, slots, N, H].
      key: keys in their slots, [B, slots, K, H].
      value: values in their slots, [B, slots, K, U].
      blocks: window blocks and random blocks of each block that is not global, from `list_blocks`.
      is_token: whether a slot holds a token.
      bias: added to the logits of all queries, broadcastable to [B, N, 1, slots].
      first_block_bias: added to the logits of queries that are not global, [#B, 1, 1, slots].
      block_size: tokens in a block.
      rngs: PRNG keys of dropout, for the global and for the other queries.
      return_weights: also return the weights, [B, N, slots, slots].
      options: further options of `dot_product_attention`.
    """
    window, random = blocks
    (b, num_slots, n, _), num_rows = query.shape, window.shape[1]
    num_global = num_slots - num_rows * block_size
    options["return_weights"] = return_weights
    mask = is_token[:, None, None]
    attend: Callable[..., Any] = dot_product_attention
    of_global = attend(query[:, :num_global], key, value, bias, mask, dropout_rng=rngs[0], **options)
    if not num_rows:
        return of_global
    key_slots = _key_slots(window, random, num_global, block_size)

    def over_keys(x: Array) -> Array:  # [#B, #N, 1, #slots] to [B * rows, #N, 1, J]
        per_key = jnp.broadcast_to(x, (b, *x.shape[1:3], num_slots))[:, :, 0].swapaxes(1, 2)
        return merge_rows(_keys(per_key, window, random, block_size)).swapaxes(1, 2)[:, :, None]

    def merge_rows(x: Shaped[Array, "B rows *rest"]) -> Shaped[Array, "B*rows *rest"]:
        """Makes each block of queries a row of the batch."""
        return x.reshape(b * num_rows, *x.shape[2:])

    if first_block_bias is not None:
        bias = first_block_bias if bias is None else bias + first_block_bias
    has_key = jnp.broadcast_to(key_slots >= 0, (b, *key_slots.shape[1:]))
    of_others = attend(
        merge_rows(cut(query, num_global, num_rows, block_size, block_size)),
        *(merge_rows(_keys(x, window, random, block_size)) for x in (key, value)),
        None if bias is None else over_keys(bias),
        over_keys(mask) & merge_rows(has_key)[:, None, None],
        dropout_rng=rngs[1],
        **options,
    )
    if not isinstance(of_global, tuple):
        return jnp.concatenate([of_global, of_others.reshape(b, -1, *of_others.shape[2:])], axis=1)
    out, weights = of_others
    weights = weights.reshape(b, num_rows, *weights.shape[1:])  # [B, rows, N, I, J]
    index = jnp.where(key_slots < 0, num_slots, key_slots)  # out of range, so it is dropped; -1 would be the last slot

    def to_slots(block: Array, index: Array) -> Array:
        """Scatters the weights of one block of queries, [N, I, J], into an array over all slots, [N, I, slots]."""
        return jnp.zeros((*block.shape[:-1], num_slots), block.dtype).at[..., index].set(block, mode="drop")

    weights = jax.vmap(jax.vmap(to_slots))(weights, jnp.broadcast_to(index, (b, *index.shape[1:])))
    weights = weights.swapaxes(1, 2).reshape(b, n, -1, num_slots)
    out = jnp.concatenate([of_global[0], out.reshape(b, -1, *out.shape[2:])], axis=1)
    return out, jnp.concatenate([of_global[1], weights], axis=2)


def _key_slots(
    window: Int[Array, "#B rows window"], random: Int[Array, "#B rows random"], num_global: int, block_size: int
) -> Int[Array, "#B rows J"]:
    """Returns the slots of the J keys that `_keys` returns for each block; -1 in empty slots of `window` and `random`.

    `num_global` is the number of global slots, not of blocks.
    """
    shape = (*random.shape[:2], num_global // block_size)
    global_blocks = jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32)[None, None], shape)
    window = jnp.broadcast_to(window, (*random.shape[:2], window.shape[2]))
    blocks = jnp.concatenate([global_blocks, window, random], axis=2)[..., None]
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, None, None]
    return jnp.where(blocks < 0, -1, blocks * block_size + offset).reshape(*random.shape[:2], -1)


def _keys(
    x: Shaped[Array, "B slots *rest"],
    window: Int[Array, "#B rows window"],
    random: Int[Array, "#B rows random"],
    block_size: int,
) -> Shaped[Array, "B rows J *rest"]:
    """Gathers the keys of each block that is not global: the global blocks, its window and its random blocks."""
    num_rows, num_blocks = window.shape[1], x.shape[1] // block_size
    num_global, side = num_blocks - num_rows, window.shape[2] // 2
    batch, _, *rest = x.shape
    in_global = x[:, None, : num_global * block_size]
    in_global = jnp.broadcast_to(in_global, (batch, num_rows, *in_global.shape[2:]))
    in_window = cut(x, (num_global - side) * block_size, num_rows, block_size, window.shape[2] * block_size)
    blocks = x.reshape(batch, num_blocks, block_size, *rest)
    index = jnp.broadcast_to(jnp.maximum(random, 0), (batch, *random.shape[1:]))  # -1, an empty slot, reads block 0
    in_random = jax.vmap(lambda blocks, index: blocks[index])(blocks, index)
    in_random = in_random.reshape(batch, num_rows, random.shape[2] * block_size, *rest)
    return jnp.concatenate([in_global, in_window, in_random], axis=2)


BIGBIRD = AttentionSpec(
    name="bigbird",
    function=bigbird_attention,
    reference="Zaheer et al. (2020), section 2",
    options={
        "block_size": Option("tokens in a block", required=True),
        "num_global_blocks": Option("blocks at the start that see all blocks and that all blocks see", required=True),
        "num_window_blocks": Option("blocks in the window of a block, counting itself; odd", required=True),
        "num_random_blocks": Option("random blocks that each block sees", required=True),
        "num_last_global_blocks": Option("global blocks at the end of each sequence"),
        "first_block_times": Option("how often the keys of the first block count; transformers counts them twice"),
        "dense_length": Option("sequences of at most this many tokens use dense attention"),
    },
    example=lambda length: {
        "block_size": min(64, max(length // 16, 2)),
        "num_global_blocks": 2 if length >= 1024 else 1,
        "num_window_blocks": 3,
        "num_random_blocks": 3 if length >= 1024 else 1,
    },
    causal=False,
    bias=False,
    segments=False,
    cross=False,
)
