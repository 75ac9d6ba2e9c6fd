"""Softmax attention to keys that each query selects by their content: MoBA, native sparse attention, an indexer.

MoBA and native sparse attention select blocks of keys, and compute no other pairs (`selected_blocks.py`). Only where
the caller holds or asks for an array of all pairs, a bias, a mask or the weights, do they hide keys by a mask instead.
The indexer selects single keys. It hides the others by a mask, a chunk of queries at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.blocks import check_over_keys
from tfx_jax.functional.attention.chunked import chunked_attention, equal_chunks, split_axis
from tfx_jax.functional.attention.dense import (
    among_largest,
    dot_product_logits,
    dot_product_weights,
    masked_softmax,
    weighted_values,
)
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.selected_blocks import attend_to_selected_blocks
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    check_shapes,
    segment_mask,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.attention.token_order import attend_to_tokens, positions_of
from tfx_jax.functional.layers import dropout

_PAIR_CHUNK = 32
"""Queries of a chunk that has an array of all pairs of its queries with keys."""
_CAUSAL_PARTS = 4
"""Groups of consecutive queries that skip the keys after the last of them."""
_THRESHOLD = "threshold of selected keys"
"""Name of an array that the backward pass does not recompute, because finding it is slow."""


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
    blocks ahead compete as well. No gradient passes through the choice.

    Memory grows as T * num_blocks, time as T * (num_blocks * block_size + S / block_size): blocks that are not chosen
    are not read. With a bias, a mask other than a padding mask, or `return_weights`, both grow as T * S.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`. A query at padding gets zeros.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits; it does not affect the choice of blocks.
      mask: True where a query may attend. Tokens that a padding mask, [B, 1, 1, S], hides are not counted in positions;
        a mask of pairs hides keys within the chosen blocks.
      block_size: tokens of a block; the first block starts at the first token of a sequence.
      num_blocks: blocks that a query reads, its own among them. Of blocks with equal scores, the first are read.
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
        blocks = _list_blocks(segment_ids, b, t, s, block_size, only_complete=is_causal)
        sums, sizes = (_sums_of_blocks(jax.lax.stop_gradient(x), blocks) for x in (key, jnp.ones_like(key[..., :1])))
        means = sums / jnp.maximum(sizes, 1)

        def choose(query: Array, rows: _Rows) -> Int[Array, "B C N L"]:
            """Returns the blocks that a chunk of queries reads."""
            return _choose_blocks(dot_product_logits(query, means), blocks, rows, num_blocks, is_causal)

        chosen = _over_queries(choose, jax.lax.stop_gradient(query), blocks.rows).swapaxes(1, 2)  # [B, N, T, L]
        options: dict[str, Any] = {"scale": scale, "dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        if bias is None and mask is None and not return_weights:
            group = query.shape[2] // key.shape[2]
            key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
            return attend_to_selected_blocks(
                query, key, value, blocks.first, chosen, block_size=block_size, is_causal=is_causal, **options
            )
        tokens = _chosen_tokens(chosen, blocks)
        return dot_product_attention(
            query,
            key,
            value,
            bias,
            tokens if mask is None else tokens & mask,
            is_causal=is_causal,
            segment_ids=segment_ids,
            return_weights=return_weights,
            **options,
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

    Memory grows as T * num_blocks, time as T * (num_blocks * I + window + S / I): blocks that are not chosen are not
    read. With `return_weights` both grow as T * S.

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
      num_blocks: blocks that a query selects, its own among them. Of blocks with equal weights, the first are read.
      window: tokens of the third branch.
      is_causal: must be true: blocks are compressed when they are complete.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, each divided into blocks separately; 0 is padding.
      dropout_rate: probability in [0, 1) of dropping a weight of a branch.
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
    dtype = statistics_dtype(query)
    key_mix, value_mix, key_positions = (jnp.asarray(x, dtype) for x in (key_mix, value_mix, key_positions))

    def attend(query: Array, key: Array, value: Array, bias: None, mask: None, *, segment_ids: Any, gate: Array) -> Any:
        """Attends among tokens that are contiguous and in order."""
        blocks = _list_blocks(segment_ids, b, t, s, size, only_complete=True)
        index_in_block = blocks.position % size
        # Each token's part of the compressed key and value of its block, [B, S, K, H] and [B, S, K, U].
        of_key, of_value = (x[index_in_block][:, :, None, None] for x in (key_mix, value_mix))
        of_key = of_key * (key.astype(dtype) + key_positions[index_in_block][:, :, None])
        of_value = of_value * value.astype(dtype)
        compressed_key, compressed_value = (_sums_of_blocks(x, blocks) for x in (of_key, of_value))
        rngs = (None, None, None) if dropout_rng is None else tuple(jax.random.split(dropout_rng, 3))

        def compress(query: Array, rows: _Rows) -> tuple[Array, Array, Array | None]:
            """Returns output and choices of the compressed branch for a chunk of queries, and weights on request."""
            logits = dot_product_logits(query.astype(dtype), compressed_key, scale)  # [B, N, C, M]
            is_complete = blocks.starts[:, None] + size - 1 <= rows.index[:, :, None]
            weights = masked_softmax(logits, (_is_visible(blocks, rows, True) & is_complete)[:, None])
            scores = jax.lax.stop_gradient(weights).reshape(b, k, n // k, *weights.shape[2:]).sum(axis=2)
            out = weighted_values(dropout(weights, dropout_rate, _fold_in(rngs[0], rows)), compressed_value)
            chosen = _choose_blocks(scores, blocks, rows, num_blocks, True)
            return out, chosen, weights.swapaxes(1, 2) if return_weights else None

        compressed, chosen, weights = _over_queries(compress, query, blocks.rows)
        chosen = chosen.swapaxes(1, 2)  # [B, K, T, L]
        options: dict[str, Any] = {"is_causal": True, "scale": scale, "dropout_rate": dropout_rate}
        selected = attend_to_selected_blocks(
            query, key, value, blocks.first, chosen, block_size=size, dropout_rng=rngs[1], **options
        )
        options |= {"segment_ids": segment_ids, "local_window_size": (window - 1, 0)}
        near = chunked_attention(query, key, value, dropout_rng=rngs[2], **options)
        gates = jax.nn.sigmoid(gate[:, s - t :].astype(dtype))  # [B, T, N, 3]
        outs: tuple[Any, ...] = compressed, selected, near
        out = sum(gates[..., i, None] * out.astype(dtype) for i, out in enumerate(outs))
        out = jnp.asarray(out).astype(query.dtype)
        if weights is None:
            return out
        # A compressed value is a mixture of values, so its weight is spread over the tokens of its block.
        is_of_block = (blocks.starts[:, :, None] == blocks.first[:, None]).astype(dtype)  # [B, M, S]
        spread = jnp.einsum("BTNM,BMS->BNTS", weights, is_of_block, precision="highest")
        spread = spread * value_mix[index_in_block][:, None, None]
        tokens = jnp.repeat(_chosen_tokens(chosen, blocks), n // k, axis=1)
        masks: dict[str, Any] = {"is_causal": True, "scale": scale, "segment_ids": segment_ids}
        of_selected = dot_product_weights(query, key, mask=tokens, **masks)
        of_near = dot_product_weights(query, key, window=(window - 1, 0), **masks)
        return out, jnp.einsum("BTNI,IBNTS->BNTS", gates, jnp.stack([spread, of_selected, of_near]))

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
    the report trains it with a separate loss to follow the weights of dense attention.

    Keys that are not selected are hidden by a mask, some queries at a time, so memory grows as T + S, and time as
    T * S, like that of the indexer's scores.

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
        rows = _rows(segment_ids, b, t, s)
        # A bias or a mask of pairs is cut into chunks with the queries, [B, T, N, S]; others are the same for all.
        of_pairs = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None and x.shape[2] > 1}
        of_pairs = {name: jnp.broadcast_to(x, (b, *x.shape[1:])).swapaxes(1, 2) for name, x in of_pairs.items()}
        of_queries = of_pairs | {name: index[name][:, s - t :] for name in ("index_query", "index_weight")}
        of_queries["query"] = query

        def attend_to_first(num_visible: int, chunk: dict[str, Array], rows: _Rows) -> tuple[Array, Array | None]:
            """Attends from a chunk of queries to the first `num_visible` keys, after which none of them sees a key."""

            def over_keys(name: str, x: Array | None) -> Array | None:
                """Returns the bias or the mask of the chunk, for these keys."""
                x = chunk[name].swapaxes(1, 2) if name in chunk else x
                return x if x is None or x.shape[3] == 1 else x[..., :num_visible]

            chunk_bias, visible = over_keys("bias", bias), over_keys("mask", mask)
            if is_causal:
                in_past = (jnp.arange(num_visible)[None, None] <= rows.index[:, :, None])[:, None]
                visible = in_past if visible is None else visible & in_past
            if segment_ids is not None and rows.ids is not None:
                of_text = segment_mask(rows.ids, segment_ids[1][:, :num_visible])
                visible = of_text if visible is None else visible & of_text
            if chunk_bias is not None:  # a bias of minus infinity hides a key, so the key must not be selected
                is_finite = chunk_bias != -jnp.inf
                visible = is_finite if visible is None else visible & is_finite
            scores = index_scores(chunk["index_query"], index["index_key"][:, :num_visible], chunk["index_weight"])
            outputs: Any = dot_product_attention(
                chunk["query"],
                key[:, :num_visible],
                value[:, :num_visible],
                chunk_bias,
                visible if num_visible <= num_keys else _above_threshold(scores[:, None], visible, num_keys),
                scale=scale,
                dropout_rate=dropout_rate,
                dropout_rng=_fold_in(dropout_rng, rows),
                return_weights=return_weights,
            )
            if not return_weights:
                return outputs, None
            padding = ((0, 0), (0, 0), (0, 0), (0, s - num_visible))
            return outputs[0], jnp.pad(outputs[1], padding).swapaxes(1, 2)

        if not is_causal:
            out, weights = _over_queries(functools.partial(attend_to_first, s), of_queries, rows, _PAIR_CHUNK)
        else:  # the earlier queries see fewer keys
            size = -(-t // min(_CAUSAL_PARTS, -(-t // _PAIR_CHUNK)))
            parts = [
                _over_queries(
                    functools.partial(attend_to_first, s - t + min(begin + size, t)),
                    *jax.tree.map(lambda x, begin=begin: x[:, begin : begin + size], (of_queries, rows)),
                    chunk_size=_PAIR_CHUNK,
                    first_number=begin,
                )
                for begin in range(0, t, size)
            ]
            out, weights = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
        return out if weights is None else (out, weights.swapaxes(1, 2))

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
    dtype = statistics_dtype(query)
    query, key, weight = (x.astype(dtype) for x in (query, key, weight))
    return jnp.einsum("BTJS,BTJ->BTS", jax.nn.relu(jnp.einsum("BTJI,BSI->BTJS", query, key)), weight)


class _Rows(NamedTuple):
    """Where queries are among the keys."""

    index: Int[Array, "B T"]
    """Index on axis S."""
    ids: Int[Array, "B T"] | None = None
    """Segments of packed sequences; 0 is padding."""
    own: Int[Array, "B T"] | None = None
    """Index of the first token of the query's own block; S where the query does not see it."""
    number: Int[Array, ""] | None = None
    """Number of the chunk of queries."""


class _Blocks(NamedTuple):
    """Blocks of keys. The tokens of a sequence are contiguous and in order (see `attend_to_tokens`)."""

    position: Int[Array, "B S"]
    """Position of each key in its sequence."""
    first: Int[Array, "B S"]
    """Index on axis S of the first token of each token's block."""
    starts: Int[Array, "B M"]
    """Index of the first token of each block that other queries than its own may choose; S for an empty place."""
    ids: Int[Array, "B M"] | None
    """Segments of these blocks."""
    rows: _Rows
    """The queries, the last of the S positions."""


def _rows(segment_ids: tuple[Array, Array] | None, batch: int, num_queries: int, num_keys: int) -> _Rows:
    """Returns where the queries are: at the last positions."""
    index = jnp.broadcast_to(jnp.arange(num_keys - num_queries, num_keys, dtype=jnp.int32), (batch, num_queries))
    return _Rows(index, None if segment_ids is None else segment_ids[0])


def _list_blocks(
    segment_ids: tuple[Array, Array] | None,
    batch: int,
    num_queries: int,
    num_keys: int,
    block_size: int,
    *,
    only_complete: bool,
) -> _Blocks:
    """Cuts each sequence into blocks; those that end early are not listed in `starts` with `only_complete`."""
    index = jnp.broadcast_to(jnp.arange(num_keys, dtype=jnp.int32), (batch, num_keys))
    rows, first_query = _rows(segment_ids, batch, num_queries, num_keys), num_keys - num_queries
    if segment_ids is None:
        first, end = index - index % block_size, num_keys - block_size + 1 if only_complete else num_keys
        starts = jnp.arange(0, max(end, 0), block_size, dtype=jnp.int32)
        starts = jnp.broadcast_to(starts, (batch, len(starts)))
        return _Blocks(index, first, starts, None, rows._replace(own=first[:, first_query:]))
    query_ids, key_ids = segment_ids
    position = positions_of(key_ids).astype(jnp.int32)
    first = index - position % block_size
    # The only block of a sequence is the own block of its queries, so it is listed only if it is complete. Then at
    # most S / block_size blocks are complete, and at most as many sequences have an incomplete one.
    reach = min(block_size - 1, num_keys)
    first_of_last = jnp.pad(first[:, reach:], ((0, 0), (0, reach)), constant_values=-1)
    is_listed = first_of_last == index
    if not only_complete:
        is_listed = is_listed | (position > 0)
    is_listed = is_listed & (first == index) & (key_ids != 0)
    num_listed = num_keys // block_size if only_complete else min(2 * num_keys // block_size, num_keys)
    starts = jnp.sort(jnp.where(is_listed, index, num_keys), axis=1)[:, :num_listed]
    ids = jnp.where(starts < num_keys, jnp.take_along_axis(key_ids, jnp.minimum(starts, num_keys - 1), axis=1), -1)
    sees_own = (query_ids == key_ids[:, first_query:]) & (query_ids != 0)
    own = jnp.where(sees_own, first[:, first_query:], num_keys)
    return _Blocks(position, first, starts, ids, rows._replace(own=own))


def _is_visible(blocks: _Blocks, rows: _Rows, is_causal: bool) -> Bool[Array, "B C M"]:
    """Returns which of the listed blocks a query may see."""
    visible = blocks.starts[:, None] < blocks.first.shape[1]
    if is_causal:
        visible = visible & (blocks.starts[:, None] <= rows.index[:, :, None])
    if blocks.ids is not None and rows.ids is not None:
        visible = visible & (blocks.ids[:, None] == rows.ids[:, :, None])
    return visible


def _choose_blocks(
    scores: Float[Array, "B N C M"], blocks: _Blocks, rows: _Rows, num_blocks: int, is_causal: bool
) -> Int[Array, "B C N L"]:
    """Returns the first tokens of a query's own block and of the others with the highest scores, S for an empty place.

    L is `num_blocks`, or the number of blocks if there are fewer.
    """
    (num_listed, num_keys), own = (scores.shape[3], blocks.first.shape[1]), rows.own
    assert own is not None
    can_choose = _is_visible(blocks, rows, is_causal) & (blocks.starts[:, None] != own[:, :, None])
    scores = jnp.where(can_choose[:, None], scores, jnp.asarray(-jnp.inf, scores.dtype))
    size = min(num_blocks, num_listed + 1)
    best, place = jax.lax.top_k(scores, min(size, num_listed))
    chosen = jax.vmap(lambda starts, place: starts.at[place].get(mode="clip"))(blocks.starts, place)
    chosen = jnp.where(best > -jnp.inf, chosen, num_keys)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, size - chosen.shape[3])), constant_values=num_keys)
    last = jnp.where(own[:, None] < num_keys, own[:, None], chosen[..., -1])  # the last gives way to the own block
    return jnp.concatenate([chosen[..., :-1], last[..., None]], axis=3).swapaxes(1, 2)


def _over_queries(
    attend: Callable[[Any, _Rows], Any], queries: Any, rows: _Rows, chunk_size: int = 512, first_number: int = 0
) -> Any:
    """Calls `attend(queries, rows)` for one chunk of queries after another; all arrays are [B, T, ...], results too.

    The backward pass recomputes each chunk, all but the thresholds of `_above_threshold`.
    """
    batch, t = rows.index.shape
    size = equal_chunks(t, chunk_size)
    chunks = jax.tree.map(lambda x: split_axis(x, 1, size), (queries, rows))
    numbers = first_number + jnp.arange(-(-t // size), dtype=jnp.int32)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_THRESHOLD))
    def attend_chunk(chunk: Any) -> Any:
        # As in `chunked.py`, a barrier that includes the queries: in a scan over layers JAX would compute the masks of
        # all chunks before the loop, because they are the same for all layers.
        (queries, rows), number = jax.lax.optimization_barrier(chunk)
        return attend(queries, rows._replace(number=number))

    results = jax.lax.map(attend_chunk, (chunks, numbers))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :t], results)


def _above_threshold(
    scores: Float[Array, "B 1 C S"], visible: Bool[Array, "#B #N #C #S"] | None, size: int
) -> Bool[Array, "B N C S"]:
    """Returns `among_largest(scores, visible, size)` by a threshold that the backward pass reuses.

    The backward pass computes the scores again, in a program that may round otherwise. So the threshold is not the last
    of the largest scores, which may be missed then, but halfway to the next lower one.
    """
    scores = jax.lax.stop_gradient(scores)
    is_large = among_largest(scores, visible, size)
    is_left = ~is_large if visible is None else visible & ~is_large
    last = jnp.where(is_large, scores, jnp.inf).min(axis=-1, keepdims=True)
    next_lower = jnp.where(is_left, scores, -jnp.inf).max(axis=-1, keepdims=True)
    threshold = last / 2 + next_lower / 2
    threshold = jnp.where(threshold > next_lower, threshold, last)  # of neighboring numbers there is no middle
    threshold = jnp.where(next_lower == -jnp.inf, next_lower, threshold)  # no key is left: take all
    threshold = checkpoint_name(threshold, _THRESHOLD)
    return scores >= threshold if visible is None else (scores >= threshold) & visible


def _fold_in(rng: Array | None, rows: _Rows) -> Array | None:
    """Returns the PRNG key of a chunk of queries."""
    if rng is None:
        return None
    assert rows.number is not None
    return jax.random.fold_in(rng, rows.number)


def _sums_of_blocks(x: Float[Array, "B S K H"], blocks: _Blocks) -> Float[Array, "B M K H"]:
    """Returns the sum of each listed block, in float32 at least."""
    x = x.astype(statistics_dtype(x))
    # Under `vmap` compilers know that rows are independent; with indices of rows they would sum over all devices.
    sums = jax.vmap(lambda row, first: jnp.zeros_like(row).at[first].add(row))(x, blocks.first)
    return jax.vmap(lambda sums, starts: sums.at[starts].get(mode="fill", fill_value=0))(sums, blocks.starts)


def _chosen_tokens(chosen: Int[Array, "B N T L"], blocks: _Blocks) -> Bool[Array, "B N T S"]:
    """Returns True for the tokens of the blocks that a query reads."""
    return (chosen[..., None] == blocks.first[:, None, None, None]).any(axis=3)


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
