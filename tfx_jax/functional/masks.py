"""Boolean attention masks, rank 4, [B, N, T, S] or broadcastable to it. True means "may attend"; combine with `&`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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
