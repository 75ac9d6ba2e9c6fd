"""BigBird: sparse attention over a window, some random blocks and a few global ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.functional.attention import dot_product_attention
from tfx_jax.functional.blocks import attend_in_blocks, check_over_keys, cut
from tfx_jax.functional.empty import zeros_where_empty
from tfx_jax.functional.explicit_axes import divided_as_queries
from tfx_jax.functional.masks import Bias, Mask, SegmentIds, pair_of_segment_ids
from tfx_jax.functional.weights_on_request import weights_on_request


@weights_on_request
@divided_as_queries
@zeros_where_empty
def bigbird_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
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
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes self-attention of every block over its neighbours, some random blocks and the global blocks.

    Section 2 and the block-sparse implementation (appendix D) of "Big Bird: Transformers for Longer Sequences" (Zaheer
    et al., 2020, https://arxiv.org/abs/2007.14062), with internal global tokens (ITC): the first blocks see all and are
    seen by all. `bigbird_block_mask` gives the pattern. The paper's base model has block_size 64 and 2, 3 and 3 blocks.
    Time and memory grow as T * block_size * (twice the global blocks + window blocks + random blocks).

    `num_last_global_blocks`, `first_block_times` and `dense_length` are for models that transformers (Hugging Face) has
    published: there the first block and the last are global, short texts are attended densely, and in evaluation every
    random block is the first one, whose keys so count several times in the softmax of all but the global queries.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, T, K, H]; K divides N.
      value: values, [B, T, K, U].
      bias: added to the scaled logits, the same for all queries: broadcastable to [B, N, 1, T].
      mask: True where a key may be seen, by all queries alike: broadcastable to [B, N, 1, T].
      block_size: tokens in a block, which need not divide T.
      num_global_blocks: blocks at the start that see all blocks and that all blocks see.
      num_window_blocks: neighbours that a block sees, itself in the middle; odd. The window ends where the text ends.
      num_random_blocks: blocks that a block sees besides, drawn without repetition from those neither global nor in its
        window; all of them where there are no more.
      num_last_global_blocks: blocks at the end that are global as those at the start are; the last may be shorter.
      first_block_times: how often the keys of the first block count where the query is in no global block.
      dense_length: tokens up to which this is dense attention.
      seed: of the random blocks, which are the same in all heads and fixed when the function is traced. Give each
        layer its own.
      is_causal: must be False: global tokens see the future and tell it to all, so BigBird has no causal form.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T]; 0 is padding. Global blocks, too, then see their own segments alone.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, with zeros outside the pattern: this does take T * T.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      float32 [B, N, T, T]. A query that sees no key gets zeros.

    Raises:
      ValueError: if the sizes do not fit together, bias or mask are over pairs, or an option is impossible.

    >>> blocks = {"num_global_blocks": 1, "num_window_blocks": 1, "num_random_blocks": 1}
    >>> attend = jax.jit(lambda x: bigbird_attention(x, x, x, block_size=2, **blocks, return_weights=True))
    >>> out, weights = attend(jnp.ones((1, 8, 1, 2)))
    >>> (np.asarray(weights)[0, 0] > 0).sum(axis=-1).tolist()
    [8, 8, 6, 6, 6, 6, 6, 6]
    """
    check_over_keys(query, key, value, bias, mask)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"BigBird is self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys")
    if is_causal:
        raise ValueError("BigBird has no causal form: its global tokens see the future and are seen by all")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if first_block_times < 1 or num_last_global_blocks < 0:
        raise ValueError(
            "first_block_times must be at least 1 and num_last_global_blocks not negative, got "
            f"{first_block_times} and {num_last_global_blocks}"
        )
    t, last = query.shape[1], num_last_global_blocks * block_size
    options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "return_weights": return_weights}
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, len(query), t, t)
    if t <= dense_length:
        return dot_product_attention(query, key, value, bias, mask, segment_ids=ids, dropout_rng=dropout_rng, **options)
    over_keys = {"bias": bias, "mask": mask}
    if first_block_times > 1:
        is_first = (jnp.arange(t) < block_size)[None, None, None]
        over_keys["more_bias"] = jnp.where(is_first, np.float32(np.log(first_block_times)), np.float32(0))
    if num_last_global_blocks:  # they go to the front, where the others are
        excess = -t % block_size
        if excess:  # what fills the last block is hidden, whatever else is
            shown = jnp.ones((1, 1, 1, t), jnp.bool_)
            over_keys["mask"] = shown if mask is None else mask & shown
        turned = functools.partial(_turned, excess=excess, by=last)
        query, key, value = (turned(x, 1) for x in (query, key, value))
        over_keys = {name: None if x is None else turned(x, 3) for name, x in over_keys.items()}
        ids = None if ids is None else (turned(ids[0], 1), turned(ids[1], 1))
    blocks = _blocks(
        -(-t // block_size), num_global_blocks + num_last_global_blocks, num_window_blocks, num_random_blocks, seed
    )
    result = _attend(
        query,
        key,
        value,
        *blocks,
        block_size=block_size,
        segment_ids=ids,
        dropout_rng=dropout_rng,
        **over_keys,
        **options,
    )
    if not num_last_global_blocks:
        return result
    if not return_weights:
        return jnp.roll(result, -last, axis=1)[:, :t]
    out, weights = result
    return jnp.roll(out, -last, axis=1)[:, :t], jnp.roll(weights, (-last, -last), axis=(2, 3))[:, :, :t, :t]


def _turned(x: Array, axis: int, *, excess: int, by: int) -> Array:
    """Fills the last block with zeros and takes the last `by` to the front; what is alike for all keys stays."""
    if x.shape[axis] == 1:
        return x
    return jnp.roll(jnp.pad(x, [(0, excess if i == axis else 0) for i in range(x.ndim)]), by, axis=axis)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    window: np.ndarray,
    random: np.ndarray,
    *,
    bias: Array | None,
    mask: Array | None,
    more_bias: Array | None = None,
    block_size: int,
    segment_ids: tuple[Array, Array] | None,
    dropout_rng: Array | None,
    return_weights: bool,
    **options: Any,
) -> Any:
    """Attention of the global blocks, which come first, and of the others, which have `more_bias` besides."""
    t, num_blocks = query.shape[1], -(-query.shape[1] // block_size)
    num_global = min((num_blocks - len(window)) * block_size, t)
    rngs = (None, None) if dropout_rng is None else jax.random.split(dropout_rng)
    of_global = dot_product_attention(
        query[:, :num_global],
        key,
        value,
        bias,
        mask,
        segment_ids=None if segment_ids is None else (segment_ids[0][:, :num_global], segment_ids[1]),
        dropout_rng=rngs[0],
        return_weights=return_weights,
        **options,
    )
    if num_global == t:
        return of_global
    of_others = attend_in_blocks(
        query,
        key,
        value,
        more_bias if bias is None else bias if more_bias is None else bias + more_bias,
        mask,
        cut_queries=functools.partial(
            cut, start=num_global, num_blocks=len(window), block_size=block_size, span=block_size
        ),
        cut_keys=functools.partial(_keys, window=window, random=random, block_size=block_size),
        columns=_columns(window, random, num_blocks, block_size),
        allowed=jnp.ones((1, 1), jnp.bool_),
        rows=slice(0, t - num_global),
        segment_ids=segment_ids,
        dropout_rng=rngs[1],
        return_weights=return_weights,
        **options,
    )
    if isinstance(of_global, tuple):
        out, weights = zip(of_global, of_others, strict=True)
        return jnp.concatenate(out, axis=1), jnp.concatenate(weights, axis=2)
    return jnp.concatenate([of_global, of_others], axis=1)


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
    window, random = _blocks(num_blocks, num_global, num_window_blocks, num_random_blocks, seed)
    num_global = num_blocks - len(window)
    seen = np.zeros((num_blocks, num_blocks + 1), bool)  # the empty slots, -1, fall into the last column
    seen[:num_global] = True
    seen[:, :num_global] = True
    np.put_along_axis(seen[num_global:], np.concatenate([window, random], axis=1), True, axis=1)
    return np.roll(seen[:, :-1], (-num_last_global_blocks, -num_last_global_blocks), axis=(0, 1))


def _blocks(
    num_blocks: int, num_global: int, num_window: int, num_random: int, seed: int
) -> tuple[Int[np.ndarray, "rows window"], Int[np.ndarray, "rows random"]]:
    """Lists the window and the random blocks of each block that is not global; -1 where there is none."""
    if min(num_global, num_random) < 0:
        raise ValueError(f"there cannot be {num_global} global and {num_random} random blocks: both are at least 0")
    if num_window < 1 or num_window % 2 == 0:
        raise ValueError(f"num_window_blocks must be odd, the block itself in the middle, got {num_window}")
    num_global = min(num_global, num_blocks)
    side = min(num_window // 2, num_blocks - 1)
    generator = np.random.default_rng(seed)
    rows = np.arange(num_global, num_blocks)
    window = rows[:, None] + np.arange(-side, side + 1)
    window = np.where((window >= num_global) & (window < num_blocks), window, -1)
    random = np.full((len(rows), min(num_random, max(len(rows) - 1, 0))), -1)
    for row, near in enumerate(window):
        first, width = near[near >= 0].min(), (near >= 0).sum()
        others = len(rows) - width
        # Drawn among the others as if the window were not there, which needs no list of all blocks for every row.
        drawn = num_global + generator.choice(others, min(random.shape[1], others), replace=False)
        random[row, : len(drawn)] = np.where(drawn < first, drawn, drawn + width)
    return window, random


def _columns(window: np.ndarray, random: np.ndarray, num_blocks: int, block_size: int) -> Int[Array, "rows J"]:
    """Positions of the keys that `_keys` cuts out; -1 in blocks that are not there, or there already."""
    num_global = num_blocks - len(window)
    first = np.broadcast_to(np.arange(num_global), (len(window), num_global))
    blocks = jnp.asarray(np.concatenate([first, window, random], axis=1)[:, :, None])
    columns = jnp.where(blocks < 0, -1, blocks * block_size + jnp.arange(block_size)[None, None])
    return columns.reshape(len(window), -1)


def _keys(
    x: Shaped[Array, "B S *rest"], window: np.ndarray, random: np.ndarray, block_size: int
) -> Shaped[Array, "B rows J *rest"]:
    """Cuts out for every block that is not global the global blocks, its window and its random blocks."""
    num_rows, num_blocks = len(window), -(-x.shape[1] // block_size)
    num_global, side = num_blocks - num_rows, window.shape[1] // 2
    batch, _, *rest = x.shape
    first = x[:, None, : num_global * block_size]
    first = jnp.broadcast_to(first, (batch, num_rows, *first.shape[2:]))
    near = cut(x, (num_global - side) * block_size, num_rows, block_size, window.shape[1] * block_size)
    blocks = cut(x, 0, num_blocks, block_size, block_size)
    far = blocks[:, np.maximum(random, 0)].reshape(batch, num_rows, random.shape[1] * block_size, *rest)
    return jnp.concatenate([first, near, far], axis=2)
