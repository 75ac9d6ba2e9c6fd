"""Attention of each block to itself and to one sorted block: the Sinkhorn Transformer, whose sorting is soft."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import dot_product_weights, hidden_logit, weighted_values
from tfx_jax.functional.attention.signature import (
    check_integers,
    check_shapes,
    refuse_pairs,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option
from tfx_jax.functional.attention.token_order import attend_to_tokens
from tfx_jax.functional.layers import dropout


@weights_on_request
@shard_like_query
@zeros_where_empty
def sinkhorn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    block_size: int,
    num_iterations: int = 8,
    temperature: float = 0.75,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Computes softmax(scale * Q_i [K_i, sum_j P_ij K_j]^T) [V_i, sum_j P_ij V_j] for each block i of tokens.

    Sections 3.1 and 3.2 of "Sparse Sinkhorn Attention" (Tay et al., 2020, https://arxiv.org/abs/2002.11296): a doubly
    stochastic matrix P sorts blocks, and a block attends to itself and to the block that is sorted to it. P is
    `doubly_stochastic` of scale * mean(Q_i) . mean(K_j) / temperature. The paper has a small network instead of the
    products of means, for a fixed number of blocks, and adds Gumbel noise. The package sinkhorn-transformer compares
    means too, but takes log(relu(logits) + 1e-6) of them, adds the noise in evaluation as well, and (in version 0.11.4)
    reads sorted keys where sorted values belong; by default it selects one block instead of a mixture. Memory grows as
    T * block_size + (T / block_size)^2; under differentiation the second term counts once per iteration.

    Args:
      query: [B, T, N, H]. A query at padding gets zeros. Arguments without explanation are those of
        `dot_product_attention`.
      key: keys of the same tokens, [B, T, K, H].
      value: [B, T, K, U].
      bias: refused, because the logits of pairs are never formed.
      mask: True for tokens that may be seen, [B or 1, 1, 1, T]. Blocks count visible tokens.
      block_size: tokens of a block; the last one may have fewer.
      num_iterations: iterations of the Sinkhorn normalization.
      temperature: above 0; the lower, the nearer P is to a permutation.
      is_causal: must be False: blocks are compared as a whole.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: refused: packed sequences would be sorted together.
      dropout_rate: probability in [0, 1) of dropping the weight of a key of either block.
      dropout_rng: PRNG key.
      return_weights: also return how much of each value is in an output, [B, N, T, T], which adds up to 1 as far as P
        is doubly stochastic and blocks are full; quadratic in memory.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if the numbers of queries and keys differ, an option is out of range, or for a refused argument.

    >>> import functools
    >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
    >>> attend = functools.partial(sinkhorn_attention, block_size=2)
    >>> jax.jit(attend)(0 * x, x, x).ravel().tolist()  # means of the own block and of a mixture of both
    [1.0, 1.0, 2.0, 2.0]
    """
    check_shapes(query, key, value, None, mask)
    refuse_pairs("Sinkhorn attention", "sorted blocks", bias, mask, is_causal, segment_ids)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "Sinkhorn attention is self-attention and needs as many keys as queries, "
            f"got {query.shape[1]} queries and {key.shape[1]} keys"
        )
    check_integers(block_size=block_size, num_iterations=num_iterations)
    if block_size < 1 or num_iterations < 1 or temperature <= 0:
        options = f"block_size={block_size}, num_iterations={num_iterations} and temperature={temperature}"
        raise ValueError(f"block_size and num_iterations must be at least 1 and temperature above 0, got {options}")

    def attend(query: Array, key: Array, value: Array, bias: None, mask: None, *, segment_ids: Any) -> Any:
        """Attends among tokens that are contiguous; padding is in segment 0."""
        (b, t, n, h), result_dtype, dtype = query.shape, query.dtype, statistics_dtype(query)
        num_blocks = -(-t // block_size)

        def cut(x: Array) -> Array:
            """Pads x, [B, T, ...], and splits it into blocks, [B, blocks, block_size, ...]."""
            x = jnp.pad(x, ((0, 0), (0, num_blocks * block_size - t), *[(0, 0)] * (x.ndim - 2)))
            return x.reshape(b, num_blocks, block_size, *x.shape[2:])

        # [B, blocks, block_size]: whether there is a token.
        exists = cut(jnp.ones((b, t), jnp.bool_) if segment_ids is None else segment_ids[1] != 0)
        key, value = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (key, value))
        query, key, value = (
            jnp.where(exists[..., None, None], cut(x.astype(dtype)), 0) for x in (query, key, value)
        )  # [B, blocks, block_size, N, H]
        num_tokens = exists.sum(axis=2)
        # Mean query and mean key of each block, [B, blocks, N, H].
        means = [x.sum(axis=2) / jnp.maximum(num_tokens, 1).astype(dtype)[..., None, None] for x in (query, key)]
        factor = (h**-0.5 if scale is None else scale) / temperature
        logits = jnp.einsum("BINH,BJNH->BNIJ", *means) * factor
        is_block = num_tokens > 0
        # The docstring's P, [B, N, blocks, blocks].
        order = doubly_stochastic(logits, (is_block[:, :, None] & is_block[:, None])[:, None], num_iterations)

        # For each block, its own keys (or values) and then those of the block that is sorted to it.
        keys_and_values = [
            jnp.concatenate([x, jnp.einsum("BNIJ,BJPNH->BIPNH", order, x)], axis=2) for x in (key, value)
        ]
        # Position p of a sorted block, a mixture of blocks, exists if any block has a token at p.
        exists_in_sorted = exists.any(axis=1)[:, None] & is_block[..., None]
        visible = exists[..., None] & jnp.concatenate([exists, exists_in_sorted], axis=2)[:, :, None]
        # Blocks become entries of the batch.
        query, key, value, visible = (x.reshape(-1, *x.shape[2:]) for x in (query, *keys_and_values, visible))
        weights = dot_product_weights(query, key, mask=visible[:, None], scale=scale)
        out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value)
        out = out.reshape(b, -1, *out.shape[2:])[:, :t].astype(result_dtype)
        if not return_weights:
            return out
        weights = weights.reshape(b, num_blocks, n, block_size, 2, block_size)
        # weights[..., 0, :] are those of keys in the query's block, weights[..., 1, :] those of the sorted block.
        sorted_weights = jnp.einsum("BINPQ,BNIJ->BNIPJQ", weights[..., 1, :], order)
        own_weights = jnp.einsum("BINPQ,IJ->BNIPJQ", weights[..., 0, :], jnp.eye(num_blocks, dtype=dtype))
        dense = jnp.where(exists[:, None, None, None], sorted_weights + own_weights, 0)
        return out, dense.reshape(b, n, *[num_blocks * block_size] * 2)[:, :, :t, :t]

    return attend_to_tokens(attend, query, key, value, None, mask, None)


def doubly_stochastic(
    logits: Float[Array, "*batch I J"], mask: Bool[Array, "*#batch I J"] | None = None, num_iterations: int = 8
) -> Float[Array, "*batch I J"]:
    """Divides exp(logits) by its row sums and its column sums in turn: Sinkhorn and Knopp (1967), in logarithms.

    Args:
      logits: logarithms of the entries of a square matrix.
      mask: True where entries of the result may be above 0.
      num_iterations: each divides by the row sums, then by the column sums; so the columns add up to 1 at the end.

    >>> (3 * jax.jit(doubly_stochastic)(jnp.log(jnp.array([[1.0, 2.0], [2.0, 1.0]])))).round().tolist()
    [[1.0, 2.0], [2.0, 1.0]]
    """
    lowest = hidden_logit(logits.dtype)
    mask = jnp.ones(logits.shape, jnp.bool_) if mask is None else mask
    logits = jnp.where(mask, logits, lowest)
    for axis in (-1, -2) * num_iterations:
        logits = jnp.where(mask, logits - jax.nn.logsumexp(logits, axis=axis, keepdims=True), lowest)
    return jnp.where(mask, jnp.exp(logits), 0)


SINKHORN = AttentionSpec(
    name="sinkhorn",
    function=sinkhorn_attention,
    reference="Tay et al. (2020), sections 3.1 and 3.2",
    options={
        "block_size": Option("tokens of a block", required=True, at_least=1),
        "num_iterations": Option("rounds of the Sinkhorn normalization", at_least=1, at_most=100),
        "temperature": Option("the lower, the nearer blocks are to a permutation", float, at_least=0),
    },
    example=lambda length: {"block_size": max(round(length**0.5), 1)},
    causal=False,
    bias=False,
    segments=False,
    cross=False,
)
