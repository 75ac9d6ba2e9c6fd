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
from tfx_jax.functional.attention.masks import Bias, check_shapes, refuse_segment_ids
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request, zeros_where_empty


def bigbird_block_mask(
    num_blocks: int,
    *,
    num_global_blocks: int,
    num_window_blocks: int,
    num_random_blocks: int,
    num_last_global_blocks: int = 0,
    seed: int = 0,
) -> Bool[np.ndarray, "blocks blocks"]:
    """Tells which blocks see which in `bigbird_attention`, row sees column, for tests and pictures.

    Args:
      num_blocks: of the sequence, its length over `block_size`, rounded up.
      num_global_blocks: as in `bigbird_attention`, like the rest.
      num_window_blocks: odd.
      num_random_blocks: drawn for each row.
      num_last_global_blocks: at the end.
      seed: of the random blocks.

    Returns:
      bool [num_blocks, num_blocks], a NumPy array.

    Raises:
      ValueError: if a number is negative or the window even.

    >>> blocks = bigbird_block_mask(5, num_global_blocks=1, num_window_blocks=3, num_random_blocks=0)
    >>> print(blocks.astype(int))
    [[1 1 1 1 1]
     [1 1 1 0 0]
     [1 1 1 1 0]
     [1 0 1 1 1]
     [1 0 0 1 1]]
    """
    num_global = num_global_blocks + num_last_global_blocks
    numbers = num_global, num_window_blocks, num_random_blocks
    check_blocks(*numbers)
    window, random = (x[0] for x in list_blocks(num_blocks, np.array([num_blocks]), *numbers, seed, numpy=np))
    num_global = num_blocks - len(window)
    seen = np.zeros((num_blocks, num_blocks + 1), bool)  # the empty slots, -1, fall into the last column
    seen[:num_global] = True
    seen[:, :num_global] = True
    np.put_along_axis(seen[num_global:], np.concatenate([window, random], axis=1), True, axis=1)
    return np.roll(seen[:, :-1], (-num_last_global_blocks, -num_last_global_blocks), axis=(0, 1))


def check_blocks(num_global: int, num_window: int, num_random: int) -> None:
    """Raises ValueError if a number of blocks is negative or the window even."""
    if min(num_global, num_random) < 0:
        raise ValueError(f"there cannot be {num_global} global and {num_random} random blocks: both are at least 0")
    if num_window < 1 or num_window % 2 == 0:
        raise ValueError(f"num_window_blocks must be odd, the block itself in the middle, got {num_window}")


def list_blocks(
    num_array_blocks: int,
    num_blocks: Int[Array, "#B"] | Int[np.ndarray, "#B"],
    num_global: int,
    num_window: int,
    num_random: int,
    seed: int,
    numpy: Any = jnp,
) -> tuple[Any, Any]:
    """Lists the window and the random blocks of each block that is not global; -1 where there is none.

    Args:
      num_array_blocks: blocks that an array has, the most of any row.
      num_blocks: blocks of the text of each row, on which alone its random blocks depend.
      num_global: blocks that come first and are global.
      num_window: odd.
      num_random: drawn for each block.
      seed: of the random blocks.
      numpy: the module that computes, `jax.numpy` or NumPy.

    Returns:
      int32 [#B, rows, window] and [#B, rows, random].
    """
    num_global = min(num_global, num_array_blocks)
    side = min(num_window // 2, num_array_blocks - 1)
    rows = numpy.arange(num_global, num_array_blocks, dtype=np.int32)[None, :, None]
    num_blocks = num_blocks.astype(np.int32)[:, None, None]
    window = rows + numpy.arange(-side, side + 1, dtype=np.int32)[None, None]
    window = numpy.where((window >= num_global) & (window < num_blocks), window, -1)

    first, end = numpy.maximum(rows - side, num_global), numpy.minimum(rows + side + 1, num_blocks)
    others = numpy.maximum(num_blocks - num_global - (end - first), 0)
    # Floyd's sampling without repetition: each number is drawn from 0 .. last, and is `last` if it was there before.
    random = numpy.zeros((*np.broadcast_shapes(num_blocks.shape, rows.shape)[:2], 0), np.int32)
    most = min(num_random, max(rows.size - 1, 0))  # there are no more others than that
    for k in range(most, 0, -1):
        last = others - k
        drawn = (_hash(seed, rows, k, numpy) % numpy.maximum(last + 1, 1).astype(np.uint32)).astype(np.int32)
        drawn = numpy.where((random == drawn).any(axis=-1, keepdims=True), last, drawn)
        random = numpy.concatenate([random, numpy.where(last < 0, -1, drawn)], axis=-1)
    # Drawn among the others as if the window were not there.
    random = numpy.where(random < 0, -1, num_global + random)
    random = numpy.where(random < first, random, random + end - first)
    return window, numpy.where(rows < num_blocks, random, -1)


def _hash(seed: int, row: Any, k: int, numpy: Any) -> Any:
    """Pseudo-random uint32 of each row: rounds of the finalizer of MurmurHash3."""
    x = numpy.zeros(row.shape, np.uint32)
    for number in (np.uint32(seed % 2**32), row.astype(np.uint32), np.uint32(k)):
        x = (x ^ number) + np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        x = x ^ (x >> np.uint32(16))
    return x


@weights_on_request
@divided_as_queries
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
    et al., 2020, https://arxiv.org/abs/2007.14062), with internal global tokens (ITC): the first blocks see all and are
    seen by all. `bigbird_block_mask` gives the pattern. The paper's base model has block_size 64 and 2, 3 and 3 blocks.
    Time and memory grow as T * block_size * (twice the global blocks + window blocks + random blocks).

    `num_last_global_blocks`, `first_block_times` and `dense_length` are for models that transformers (Hugging Face) has
    published: there the first block and the last are global, short texts are attended densely, and in evaluation every
    random block is the first one, whose keys so count several times in the softmax of all but the global queries.

    **Padding.** Blocks are those of the tokens that `mask` shows, wherever these stand: the visible tokens of each row
    are moved together before they are cut into blocks. Which random blocks a block sees follows from `seed` and the
    number of blocks of its own text. So a text gets the same output alone, padded anywhere, or beside other texts of a
    batch. Texts that share a row would share blocks: `segment_ids` is refused.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, T].
      mask: True for the tokens that may be seen, [B or 1, 1, 1, T]. A hidden token gets a zero output.
      block_size: tokens in a block, which need not divide T.
      num_global_blocks: blocks at the start that see all blocks and that all blocks see.
      num_window_blocks: neighbors that a block sees, itself in the middle; odd. The window ends where the text ends.
      num_random_blocks: blocks that a block sees besides, drawn without repetition from those neither global nor in its
        window; all of them where there are no more.
      num_last_global_blocks: blocks at the end of each text that are global like those at its start; the last may be
        shorter.
      first_block_times: how often the keys of the first block count where the query is in no global block.
      dense_length: visible tokens of a text up to which its attention is dense.
      seed: of the random blocks, which are the same in all heads. Give each layer its own.
      is_causal: must be False: global tokens see the future and tell it to all, so BigBird has no causal form.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: refused.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the pattern: this does take T * T.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      float32 [B, N, T, T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if the sizes do not fit together, bias or mask are over pairs, segment_ids are given, or an option is
        impossible.

    >>> blocks = {"num_global_blocks": 1, "num_window_blocks": 1, "num_random_blocks": 1}
    >>> attend = jax.jit(lambda x: bigbird_attention(x, x, x, block_size=2, **blocks, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 8, 1, 2)))
    >>> (np.asarray(weights)[0, 0] > 0).sum(axis=-1).tolist()
    [8, 8, 6, 6, 6, 6, 6, 6]
    """
    _check(query, key, value, bias, mask, is_causal, block_size, num_last_global_blocks, first_block_times)
    refuse_segment_ids(segment_ids, "BigBird attention")
    numbers = num_global_blocks + num_last_global_blocks, num_window_blocks, num_random_blocks
    check_blocks(*numbers)
    b, t = query.shape[:2]
    options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "return_weights": return_weights}
    if t <= dense_length:
        ids = None if mask is None else visible_tokens(None, mask, b, t).astype(jnp.int32)
        return dot_product_attention(query, key, value, bias, segment_ids=ids, dropout_rng=dropout_rng, **options)
    rngs = (None, None, None) if dropout_rng is None else tuple(jax.random.split(dropout_rng, 3))
    layout = _layout(None if mask is None else visible_tokens(None, mask, b, t), t, block_size, num_last_global_blocks)
    query, key, value = (layout.arrange(x, 1) for x in (query, key, value))
    bias = bias if bias is None or bias.shape[3] == 1 else layout.arrange(bias, 3)
    more_bias = None
    if first_block_times > 1:
        is_first = (layout.rank < block_size)[:, None, None]
        more_bias = jnp.where(is_first, np.float32(np.log(first_block_times)), np.float32(0))
    result = _attend(
        query,
        key,
        value,
        list_blocks(-(-t // block_size), layout.num_blocks, *numbers, seed),
        is_token=layout.is_token,
        bias=bias,
        more_bias=more_bias,
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
    check_shapes(query, key, value, bias, mask)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"BigBird is self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys")
    if bias is not None and bias.shape[2] != 1:
        raise ValueError(
            f"bias of shape {bias.shape} is over pairs of queries and keys, which takes the memory that sparse"
            " attention saves: pass [B, 1, 1, T], one for all queries"
        )
    if is_causal:
        raise ValueError("BigBird has no causal form: its global tokens see the future and are seen by all")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if first_block_times < 1 or num_last_global_blocks < 0:
        raise ValueError(
            "first_block_times must be at least 1 and num_last_global_blocks not negative, got "
            f"{first_block_times} and {num_last_global_blocks}"
        )


class _Layout(NamedTuple):
    """The tokens of each row in whole blocks: the last global blocks, then the others in their order.

    Where there is no mask, all rows are alike, and arrays of rows have one.
    """

    arrange: Callable[[Array, int], Array]
    """Moves tokens along an axis into their slots."""
    restore: Callable[[Array, tuple[int, ...]], Array]
    """Moves them back along some axes; zeros for hidden ones."""
    rank: Int[Array, "#B slots"]
    """Which of the visible tokens of its row is in each slot."""
    is_token: Bool[Array, "#B slots"]
    num_tokens: Int[Array, "#B"]
    num_blocks: Int[Array, "#B"]


def _layout(visible: Bool[Array, "B T"] | None, length: int, block_size: int, num_last: int) -> _Layout:
    num_array_blocks = -(-length // block_size)
    num_last, num_slots = min(num_last, num_array_blocks), num_array_blocks * block_size
    num_tokens = jnp.full(1, length, jnp.int32) if visible is None else visible.sum(axis=1, dtype=jnp.int32)
    num_blocks = -(-num_tokens // block_size)
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None]
    # Slots of the last global blocks come first; a text of fewer blocks leaves the first of these empty.
    first = jnp.where(slot < num_last * block_size, num_blocks[:, None] - num_last, -num_last) * block_size
    rank = first + slot
    is_token = (rank >= 0) & (rank < num_tokens[:, None])
    is_token = is_token & ((slot < num_last * block_size) | (rank < (num_blocks[:, None] - num_last) * block_size))
    if visible is None:

        def arrange(x: Array, axis: int) -> Array:
            padding = [(0, num_slots - length if i == axis else 0) for i in range(x.ndim)]
            return jnp.roll(jnp.pad(x, padding), num_last * block_size, axis=axis)

        def restore(x: Array, axes: tuple[int, ...]) -> Array:
            for axis in axes:
                x = jax.lax.slice_in_dim(jnp.roll(x, -num_last * block_size, axis=axis), 0, length, axis=axis)
            return x

        return _Layout(arrange, restore, rank, is_token, num_tokens, num_blocks)

    place = jnp.argsort(~visible, axis=1, stable=True).astype(jnp.int32)  # of each visible token in its row
    place = jnp.take_along_axis(place, jnp.clip(rank, 0, length - 1), axis=1)
    of_token = jnp.cumsum(visible, axis=1, dtype=jnp.int32) - 1
    is_last = of_token // block_size >= num_blocks[:, None] - num_last
    of_token = of_token + block_size * jnp.where(is_last, num_last - num_blocks[:, None], num_last)

    def moved(x: Array, index: Array, exists: Array, axis: int) -> Array:
        shape = [len(index) if i == 0 else index.shape[1] if i == axis else 1 for i in range(x.ndim)]
        moved = jnp.take_along_axis(x, index.reshape(shape), axis=axis)
        return jnp.where(exists.reshape(shape), moved, jnp.zeros((), x.dtype))

    def arrange(x: Array, axis: int) -> Array:
        return moved(x, place, is_token, axis)

    def restore(x: Array, axes: tuple[int, ...]) -> Array:
        for axis in axes:
            x = moved(x, jnp.clip(of_token, 0, num_slots - 1), visible, axis)
        return x

    return _Layout(arrange, restore, rank, is_token, num_tokens, num_blocks)


def _dense(
    query: Array, key: Array, value: Array, bias: Array | None, is_token: Array, num_slots: int, **options: Any
) -> Any:
    """Dense attention among the first slots, and zeros for the others."""
    first = [x[:, :num_slots] for x in (query, key, value)]
    bias = bias if bias is None or bias.shape[3] == 1 else bias[..., :num_slots]
    result = dot_product_attention(*first, bias, is_token[:, None, None, :num_slots], **options)
    more = (0, query.shape[1] - num_slots)
    if not isinstance(result, tuple):
        return jnp.pad(result, ((0, 0), more, (0, 0), (0, 0)))
    return jnp.pad(result[0], ((0, 0), more, (0, 0), (0, 0))), jnp.pad(result[1], ((0, 0), (0, 0), more, more))


def _attend(
    query: Array,
    key: Array,
    value: Array,
    blocks: tuple[Array, Array],
    *,
    is_token: Bool[Array, "#B slots"],
    bias: Array | None,
    more_bias: Array | None,
    block_size: int,
    rngs: tuple[Array | None, Array | None],
    return_weights: bool,
    **options: Any,
) -> Any:
    """Attention of the global blocks, which come first, and of the others, which have `more_bias` besides."""
    window, random = blocks
    (b, num_slots, n, _), num_rows = query.shape, window.shape[1]
    num_global = num_slots - num_rows * block_size
    options["return_weights"] = return_weights
    mask = is_token[:, None, None]
    attend: Callable[..., Any] = dot_product_attention
    of_global = attend(query[:, :num_global], key, value, bias, mask, dropout_rng=rngs[0], **options)
    if not num_rows:
        return of_global
    columns = _columns(window, random, num_global, block_size)

    def over_keys(x: Array) -> Array:  # [#B, #N, 1, #slots] to [B * rows, #N, 1, J]
        per_key = jnp.broadcast_to(x, (b, *x.shape[1:3], num_slots))[:, :, 0].swapaxes(1, 2)
        return merged(_keys(per_key, window, random, block_size)).swapaxes(1, 2)[:, :, None]

    def merged(x: Shaped[Array, "B rows *rest"]) -> Shaped[Array, "B*rows *rest"]:
        return x.reshape(b * num_rows, *x.shape[2:])

    if more_bias is not None:
        bias = more_bias if bias is None else bias + more_bias
    seen = jnp.broadcast_to(columns >= 0, (b, *columns.shape[1:]))
    of_others = attend(
        merged(cut(query, num_global, num_rows, block_size, block_size)),
        *(merged(_keys(x, window, random, block_size)) for x in (key, value)),
        None if bias is None else over_keys(bias),
        over_keys(mask) & merged(seen)[:, None, None],
        dropout_rng=rngs[1],
        **options,
    )
    if not isinstance(of_global, tuple):
        return jnp.concatenate([of_global, of_others.reshape(b, -1, *of_others.shape[2:])], axis=1)
    out, weights = of_others
    weights = weights.reshape(b, num_rows, *weights.shape[1:])  # [B, rows, N, I, J]
    index = jnp.where(columns < 0, num_slots, columns)  # a negative index would count from the end

    def place(block: Array, index: Array) -> Array:
        return jnp.zeros((*block.shape[:-1], num_slots), block.dtype).at[..., index].set(block, mode="drop")

    weights = jax.vmap(jax.vmap(place))(weights, jnp.broadcast_to(index, (b, *index.shape[1:])))
    weights = weights.swapaxes(1, 2).reshape(b, n, -1, num_slots)
    out = jnp.concatenate([of_global[0], out.reshape(b, -1, *out.shape[2:])], axis=1)
    return out, jnp.concatenate([of_global[1], weights], axis=2)


def _columns(
    window: Int[Array, "#B rows window"], random: Int[Array, "#B rows random"], num_global: int, block_size: int
) -> Int[Array, "#B rows J"]:
    """Slots of the keys that `_keys` cuts out; -1 in blocks that are not there, or there already."""
    shape = (*random.shape[:2], num_global // block_size)
    first = jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32)[None, None], shape)
    window = jnp.broadcast_to(window, (*random.shape[:2], window.shape[2]))
    blocks = jnp.concatenate([first, window, random], axis=2)[..., None]
    columns = jnp.where(blocks < 0, -1, blocks * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, None, None])
    return columns.reshape(*random.shape[:2], -1)


def _keys(
    x: Shaped[Array, "B slots *rest"],
    window: Int[Array, "#B rows window"],
    random: Int[Array, "#B rows random"],
    block_size: int,
) -> Shaped[Array, "B rows J *rest"]:
    """Cuts out for every block that is not global the global blocks, its window and its random blocks."""
    num_rows, num_blocks = window.shape[1], x.shape[1] // block_size
    num_global, side = num_blocks - num_rows, window.shape[2] // 2
    batch, _, *rest = x.shape
    first = x[:, None, : num_global * block_size]
    first = jnp.broadcast_to(first, (batch, num_rows, *first.shape[2:]))
    near = cut(x, (num_global - side) * block_size, num_rows, block_size, window.shape[2] * block_size)
    blocks = x.reshape(batch, num_blocks, block_size, *rest)
    index = jnp.broadcast_to(jnp.maximum(random, 0), (batch, *random.shape[1:]))
    far = jax.vmap(lambda blocks, index: blocks[index])(blocks, index)
    far = far.reshape(batch, num_rows, random.shape[2] * block_size, *rest)
    return jnp.concatenate([first, near, far], axis=2)


BIGBIRD = AttentionSpec(
    name="bigbird",
    function=bigbird_attention,
    reference="Zaheer et al. (2020), section 2",
    options={
        "block_size": Option("tokens of a block", required=True),
        "num_global_blocks": Option("blocks that see and are seen by all", required=True),
        "num_window_blocks": Option("blocks around each block", required=True),
        "num_random_blocks": Option("random blocks for each block", required=True),
        "num_last_global_blocks": Option("global blocks at the end"),
        "first_block_times": Option("how often the keys of the first block count; transformers counts them twice"),
        "dense_length": Option("number of tokens up to which all see all"),
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
