"""Softmax attention to keys that each query selects by their content: MoBA, native sparse attention, an indexer.

Keys that are not selected are hidden by a mask, so time and memory are those of dense attention.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.blocks import check_over_keys
from tfx_jax.functional.attention.dense import among_largest, dot_product_logits, masked_softmax, weighted_values
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    causal_mask,
    check_integers,
    check_shapes,
    combine_masks,
    segment_mask,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.attention.token_order import attend_to_tokens, positions_of
from tfx_jax.functional.layers import dropout


@weights_on_request
@shard_like_query
@zeros_where_empty
def moba_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    block_size: int,
    num_blocks: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax attention to a query's own block and to the blocks whose mean key fits it best.

    Equations 2 to 6 of "MoBA: Mixture of Block Attention for Long-Context LLMs" (Lu et al., 2025,
    https://arxiv.org/abs/2502.13189): a block scores q . mean(k of block). The paper is causal; without causality the
    blocks ahead compete as well. No gradient passes through the choice. Memory grows as T * S.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`. A query at padding gets zeros.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits; it does not affect the choice of blocks.
      mask: True where a query may attend. Tokens that a padding mask, [B, 1, 1, S], hides are not counted in positions;
        a mask of pairs hides keys within the chosen blocks.
      block_size: tokens of a block; the first block starts at the first token of a sequence.
      num_blocks: blocks that a query reads, its own among them. Blocks that tie with the last of them are read too.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, each divided into blocks separately; 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if a size is below 1, there are more queries than keys, or in the cases of `dot_product_attention`.

    >>> import functools
    >>> x = jnp.array([1.0, 1.0, 0.0, 0.0, 1.0]).reshape(1, 5, 1, 1)
    >>> attend = functools.partial(moba_attention, block_size=2, num_blocks=2, is_causal=True, return_weights=True)
    >>> (3 * jax.jit(attend)(x, x, x)[1])[0, 0, -1].round().tolist()
    [1.0, 1.0, 0.0, 0.0, 1.0]
    """
    check_shapes(query, key, value, bias, mask)
    check_integers(1, block_size=block_size, num_blocks=num_blocks)

    def attend(
        query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None, *, segment_ids: Any
    ) -> Any:
        """Attends among tokens that are contiguous and in order."""
        (b, t), s = query.shape[:2], key.shape[1]
        position, first = _blocks(segment_ids, b, s, block_size)
        # Means of blocks at the index of their first token; other entries are not used.
        sums, sizes = _sums_of_blocks(key, first), _sums_of_blocks(jnp.ones_like(key[..., :1]), first)
        scores = dot_product_logits(query, (sums / jnp.maximum(sizes, 1)).astype(sums.dtype))
        can_choose = combine_masks((position % block_size == 0)[:, None, None], is_causal, segment_ids, b, t, s)
        chosen = _chosen_tokens(scores, can_choose, position // block_size, first, num_blocks)
        return dot_product_attention(
            query,
            key,
            value,
            bias,
            chosen if mask is None else chosen & mask,
            is_causal=is_causal,
            scale=scale,
            segment_ids=segment_ids,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )

    return attend_to_tokens(attend, query, key, value, bias, mask, segment_ids)


@weights_on_request
@shard_like_query
@zeros_where_empty
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #S"] | None = None,
    *,
    gate: Float[Array, "B S N 3"],
    key_mix: Float[Array, " I"],
    value_mix: Float[Array, " I"],
    key_positions: Float[Array, "I H"],
    num_blocks: int,
    window: int,
    is_causal: bool = True,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes g_1 attention to compressed blocks + g_2 to selected blocks + g_3 to the nearest tokens.

    Equations 5 to 12 of "Native Sparse Attention" (Yuan et al., 2025, https://arxiv.org/abs/2502.11089), with
    g = sigmoid(gate):

    - Each complete block of I tokens before the query has one compressed key, sum of key_mix_i (k_i +
      key_positions_i), and one compressed value, sum of value_mix_i v_i. The paper has a small network here, and blocks
      may overlap.
    - The weights of the compressed branch, added up over the query heads that share a key head, choose the blocks of
      the selected branch; the query's own block is always chosen. The paper always chooses the first block and the
      one before the query's own as well.
    - The third branch reads the last `window` tokens, the query's own among them.

    The three branches share keys and values, which the paper projects for each. The package
    native-sparse-attention-pytorch (0.2.3) chooses by mean logits instead of added weights, and a query that ends a
    block does not read that block's compressed key, which equation 7 includes. No gradient passes through the choice.
    Memory grows as T * S.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`. A query at padding gets zeros.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: refused: a compressed key belongs to no pair.
      mask: True for keys that may be seen, [B or 1, 1, 1, S]; hidden tokens are not counted in positions.
      gate: logits of the gates of the three branches, one entry per key position, [B, S, N, 3]; the last T positions,
        of the queries, are used.
      key_mix: weights of the tokens of a block in its compressed key, [I].
      value_mix: the same for its compressed value, [I].
      key_positions: added to the keys of a block before they are mixed, [I, H].
      num_blocks: blocks that a query selects, its own among them.
      window: tokens of the third branch.
      is_causal: must be true: blocks are compressed when they are complete.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, each divided into blocks separately; 0 is padding.
      dropout_rate: probability in [0, 1) of dropping a weight of the sum of branches.
      dropout_rng: PRNG key.
      return_weights: also return the weights of the sum, [B, N, T, S], which do not add up to 1.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if `is_causal` is False, for a bias or a mask of pairs, if a size is below 1, an array has the wrong
        shape, or there are more queries than keys.

    >>> import functools
    >>> x, gate, mean = jnp.ones((1, 4, 1, 1)), jnp.full((1, 4, 1, 3), 99.0), jnp.full(2, 0.5)
    >>> parameters = {"key_mix": mean, "value_mix": mean, "key_positions": jnp.zeros((2, 1))}
    >>> attend = functools.partial(native_sparse_attention, num_blocks=1, window=1, return_weights=True)
    >>> jax.jit(attend)(x, x, x, gate=gate, **parameters)[1][0, 0, 2].tolist()  # a block before, itself twice
    [0.5, 0.5, 2.0, 0.0]
    """
    check_over_keys(query, key, value, None, mask)
    if bias is not None:
        raise ValueError("native sparse attention takes no bias: a compressed key belongs to no pair")
    if mask is not None and mask.shape[1] != 1:
        raise ValueError(f"native sparse attention takes one mask for all heads, [B, 1, 1, S], got {mask.shape}")
    if not is_causal:
        raise ValueError("native sparse attention is causal only, because it compresses the past: pass is_causal=True")
    check_integers(1, num_blocks=num_blocks, window=window)
    (b, t, n, h), (s, k), size = query.shape, key.shape[1:3], len(key_mix)
    for name, x, shape in (
        ("gate", gate, (b, s, n, 3)),
        ("value_mix", value_mix, (size,)),
        ("key_positions", key_positions, (size, h)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    dtype = np.promote_types(query.dtype, np.float32)
    key_mix, value_mix, key_positions = (jnp.asarray(x, dtype) for x in (key_mix, value_mix, key_positions))

    def attend(query: Array, key: Array, value: Array, bias: None, mask: None, *, segment_ids: Any, gate: Array) -> Any:
        """Attends among tokens that are contiguous and in order."""
        position, first = _blocks(segment_ids, b, s, size)
        index_in_block, query_position = position % size, position[:, s - t :]
        # Each key's part of its block's compressed key, [B, S, K, H].
        share = key_mix[index_in_block][:, :, None, None]
        parts = share * (key.astype(dtype) + key_positions[index_in_block][:, :, None])
        visible = causal_mask(t, s)
        if segment_ids is not None:
            visible = visible & segment_mask(*segment_ids)
        can_choose = visible & (index_in_block == 0)[:, None, None]
        is_complete = (position[:, None] + size - 1 <= query_position[:, :, None])[:, None]
        logits = dot_product_logits(query.astype(dtype), _sums_of_blocks(parts, first), scale)
        compressed = masked_softmax(logits, can_choose & is_complete)  # [B, N, T, S], at the first token of each block

        scores = compressed.reshape(b, k, n // k, t, s).sum(axis=2)
        chosen = _chosen_tokens(scores, can_choose, position // size, first, num_blocks)
        in_window = (query_position[:, :, None] - position[:, None] < window)[:, None]
        logits = dot_product_logits(query, key, scale)
        branches = (
            # A compressed value is a mixture of values, so its weight is spread over the tokens of its block.
            _at_tokens(compressed, first) * value_mix[index_in_block][:, None, None],
            masked_softmax(logits, jnp.repeat(chosen, n // k, axis=1) & visible),
            masked_softmax(logits, in_window & visible),
        )
        gates = jax.nn.sigmoid(gate[:, s - t :].astype(dtype)).transpose(3, 0, 2, 1)[..., None]  # [3, B, N, T, 1]
        weights = sum((g * branch for g, branch in zip(gates, branches, strict=True)), start=jnp.zeros_like(logits))
        out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value).astype(query.dtype)
        return (out, weights) if return_weights else out

    return attend_to_tokens(attend, query, key, value, None, mask, segment_ids, gate=gate)


@weights_on_request
@shard_like_query
@zeros_where_empty
def indexed_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    index_query: Float[Array, "B S J I"],
    index_key: Float[Array, "B S I"],
    index_weight: Float[Array, "B S J"],
    num_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax attention to the `num_keys` keys that get the highest scores of an indexer with small heads.

    The sparse attention of DeepSeek-V3.2 (2025, https://arxiv.org/abs/2512.02556), equations 1 and 2, with the scores
    of `index_scores`. All heads read the same keys. No gradient passes through the choice, so none reaches the indexer:
    the report trains it with a separate loss to follow the weights of dense attention. Memory grows as T * S.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`. A query at padding gets zeros.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend; hidden keys are not selected.
      index_query: queries of the indexer's J heads, one entry per key position, [B, S, J, I]; the last T positions, of
        the queries, are used.
      index_key: keys of the indexer, shared by its heads, [B, S, I].
      index_weight: weights of the indexer's heads, [B, S, J]; the last T positions are used.
      num_keys: keys that a query reads. Keys that tie with the last of them are read too.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences; 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if `num_keys` is below 1, there are more queries than keys, an array has the wrong shape, or in the
        cases of `dot_product_attention`.

    >>> import functools
    >>> x = jnp.array([1.0, 3.0, 2.0]).reshape(1, 3, 1, 1)
    >>> indexer = {"index_query": x, "index_key": x[..., 0], "index_weight": x[..., 0]}
    >>> attend = functools.partial(indexed_attention, num_keys=1, return_weights=True)
    >>> jax.jit(attend)(x, x, x, **indexer)[1][0, 0, 0].tolist()
    [0.0, 1.0, 0.0]
    """
    check_shapes(query, key, value, bias, mask)
    check_integers(1, num_keys=num_keys)
    b, s = key.shape[:2]
    if index_query.ndim != 4:
        raise ValueError(f"index_query must have shape [B, S, J, I], got {index_query.shape}")
    *_, j, i = index_query.shape
    for name, x, shape in (
        ("index_query", index_query, (b, s, j, i)),
        ("index_key", index_key, (b, s, i)),
        ("index_weight", index_weight, (b, s, j)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        mask: Array | None,
        *,
        segment_ids: Any,
        **index: Any,
    ) -> Any:
        """Attends among tokens that are contiguous and in order."""
        t = query.shape[1]
        index_arrays = index["index_query"][:, s - t :], index["index_key"], index["index_weight"][:, s - t :]
        visible = combine_masks(mask, is_causal, segment_ids, b, t, s)
        if bias is not None:  # a bias of minus infinity hides a key, so the key must not be selected
            visible = (bias != -jnp.inf) if visible is None else visible & (bias != -jnp.inf)
        return dot_product_attention(
            query,
            key,
            value,
            bias,
            among_largest(index_scores(*index_arrays)[:, None], visible, num_keys),
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )

    index = {"index_query": index_query, "index_key": index_key, "index_weight": index_weight}
    return attend_to_tokens(attend, query, key, value, bias, mask, segment_ids, **index)


def index_scores(
    query: Float[Array, "B T J I"], key: Float[Array, "B S I"], weight: Float[Array, "B T J"]
) -> Float[Array, "B T S"]:
    r"""Computes the scores of DeepSeek's lightning indexer, sum over its heads j of w_tj relu(q_tj . k_s).

    Equation 1 of DeepSeek-V3.2 (2025). The released code divides by sqrt(I J), which does not change the order.

    Args:
      query: [B, T, J, I].
      key: [B, S, I], shared by the J heads.
      weight: [B, T, J].

    Returns:
      [B, T, S], float32 at least.

    >>> one = jnp.ones((1, 1, 2))
    >>> jax.jit(index_scores)(jnp.array([[[[1.0], [-1.0]]]]), jnp.array([[[3.0], [-5.0]]]), one).tolist()
    [[[3.0, 5.0]]]
    """
    dtype = np.promote_types(query.dtype, np.float32)
    query, key, weight = (x.astype(dtype) for x in (query, key, weight))
    return jnp.einsum("BTJS,BTJ->BTS", jax.nn.relu(jnp.einsum("BTJI,BSI->BTJS", query, key)), weight)


def _blocks(
    segment_ids: tuple[Array, Array] | None, batch: int, num_keys: int, block_size: int
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Returns each key's position in its sequence, and the index on axis S of the first token of its block.

    The tokens of a sequence are contiguous and in order (see `attend_to_tokens`).
    """
    index = jnp.broadcast_to(jnp.arange(num_keys), (batch, num_keys))
    position = index if segment_ids is None else positions_of(segment_ids[1])
    return position, index - position % block_size


def _sums_of_blocks(x: Float[Array, "B S K H"], first: Int[Array, "B S"]) -> Float[Array, "B S K H"]:
    """Returns the sum of each block at the index of its first token, and 0 elsewhere, in float32 at least.

    `first` is the index of the first token of each token's block, from `_blocks`.
    """
    x = x.astype(np.promote_types(x.dtype, np.float32))
    # Under `vmap` compilers know that rows are independent; with indices of rows they would sum over all devices.
    return jax.vmap(lambda row, first: jnp.zeros_like(row).at[first].add(row))(x, first)


def _at_tokens(x: Array, first: Int[Array, "B S"]) -> Array:
    """Copies the entries of x, [B, N, T, S], at the first token of each block to all tokens of the block."""
    return jax.vmap(lambda row, first: row[..., first])(x, first)


def _chosen_tokens(
    scores: Float[Array, "B N T S"],
    can_choose: Bool[Array, "#B 1 #T S"] | None,
    block: Int[Array, "B S"],
    first: Int[Array, "B S"],
    num_blocks: int,
) -> Bool[Array, "B N T S"]:
    """Returns True for the tokens of the blocks with the highest scores; the query's own block is always chosen.

    Args:
      scores: score of each block at the index of its first token; other entries are not used.
      can_choose: True at the first tokens of the blocks that the query may choose.
      block: index of each token's block in its sequence.
      first: index of the first token of each token's block, from `_blocks`.
      num_blocks: blocks of a query.
    """
    is_own = block[:, -scores.shape[2] :, None] == block[:, None]  # [B, T, S]
    scores = jnp.where(is_own[:, None], jnp.asarray(jnp.inf, scores.dtype), scores)
    return _at_tokens(among_largest(scores, can_choose, num_blocks), first)


def _init_compression(rng: Array, *, d_k: int, dtype: DTypeLike, block_size: int, **_: Any) -> Any:
    """Returns parameters with which a compressed key or value is the mean of its block."""
    mean = jnp.full(block_size, 1 / block_size, dtype)
    return {"key_mix": mean, "value_mix": mean, "key_positions": jnp.zeros((block_size, d_k), dtype)}


def _index_gates(
    num_heads: int, num_kv_heads: int, d_k: int, num_index_heads: int = 4, index_size: int = 32, **_: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, without batch and length, of the indexer's arrays, projections of the layer's inputs."""
    return {
        "index_query": (num_index_heads, index_size),
        "index_key": (index_size,),
        "index_weight": (num_index_heads,),
    }


_BLOCK = Option("tokens of a block", required=True, at_least=1)
_CHOSEN = Option("blocks that a query reads, its own among them", required=True, at_least=1)

MOBA = AttentionSpec(
    name="moba",
    function=moba_attention,
    reference="Lu et al. (2025), equations 2 to 6",
    options={"block_size": _BLOCK, "num_blocks": _CHOSEN},
    example=lambda length: {"block_size": max(round(length**0.5), 1), "num_blocks": 2},
)
NATIVE_SPARSE = AttentionSpec(
    name="native_sparse",
    function=native_sparse_attention,
    reference="Yuan et al. (2025), equations 5 to 12",
    options={
        "block_size": dataclasses.replace(_BLOCK, is_passed=False),
        "num_blocks": _CHOSEN,
        "window": Option("nearest tokens that the third branch reads", required=True, at_least=1),
    },
    example=lambda length: {
        "block_size": min(64, max(round(length**0.5), 1)),
        "num_blocks": min(16, max(length // 128, 2)),
        "window": min(512, max(length // 4, 1)),
    },
    bias=False,
    causal_only=True,
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"gate": (num_heads, 3)},
    parameters=_init_compression,
)
INDEXED = AttentionSpec(
    name="indexed",
    function=indexed_attention,
    reference="DeepSeek-V3.2 (2025), equations 1 and 2",
    options={
        "num_keys": Option("keys that a query reads", required=True, at_least=1),
        "num_index_heads": Option("heads of the indexer; None: 4", at_least=1, is_passed=False),
        "index_size": Option("size of a head of the indexer; None: 32", at_least=1, is_passed=False),
    },
    example=lambda length: {"num_keys": min(2_048, max(length // 4, 1))},
    gates=_index_gates,
)
