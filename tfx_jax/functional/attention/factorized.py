"""The factorized attentions of the sparse Transformer, strided and fixed: about sqrt(S) keys for each query."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dot_product import decode_densely
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    check_shapes,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option, Visibility
from tfx_jax.functional.attention.token_order import attend_to_tokens, positions_of


@dataclasses.dataclass(frozen=True)
class SeesStride:
    """A query sees the nearest `stride` positions on each side, and those whose distance is a multiple of `stride`."""

    stride: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        distance = jnp.abs(query - key)
        return (distance <= self.stride) | (distance % self.stride == 0)


@dataclasses.dataclass(frozen=True)
class SeesSummaries:
    """A query sees its own block of `size` positions, and the last `num_summaries` positions of each block."""

    size: int
    num_summaries: int

    def __call__(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        is_summary = key % self.size >= self.size - self.num_summaries
        return (query // self.size == key // self.size) | is_summary


@weights_on_request
@shard_like_query
@zeros_where_empty
def strided_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    stride: int,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes attention to the positions p - s <= l and those with (p - s) mod l = 0, for l = stride.

    The strided pattern of section 4.3 in "Generating Long Sequences with Sparse Transformers" (Child et al., 2019,
    https://arxiv.org/abs/1904.10509). Every head attends to the union of both sets of positions with one softmax, the
    second option of section 5.2. Without causality the pattern is symmetric. Memory grows as T + S; time is that of
    `chunked_attention`, because the logits of hidden keys are computed too.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`. A query at padding gets zeros.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend. Tokens that a padding mask, [B, 1, 1, S], hides are not counted in positions;
        a mask of pairs does not change positions.
      stride: l, about sqrt(S) in the paper.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences; positions start at 0 in each. 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if the stride is below 1, there are more queries than keys, or in the cases of
        `dot_product_attention`.

    >>> import functools, jax
    >>> x = jnp.zeros((1, 5, 1, 1))
    >>> attend = jax.jit(functools.partial(strided_attention, stride=2, is_causal=True, return_weights=True))
    >>> (4 * attend(x, x, x)[1])[0, 0, -1].tolist()
    [1.0, 0.0, 1.0, 1.0, 1.0]
    """
    check_integers(1, stride=stride)
    options = {"is_causal": is_causal, "scale": scale, "return_weights": return_weights}
    dropping = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    return _attend(SeesStride(stride), query, key, value, bias, mask, segment_ids, **options, **dropping)


@weights_on_request
@shard_like_query
@zeros_where_empty
def fixed_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    block_size: int,
    num_summaries: int = 1,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes attention to a query's block of l = block_size positions and the last c = num_summaries of each block.

    The fixed pattern of section 4.3 in "Generating Long Sequences with Sparse Transformers" (Child et al., 2019,
    https://arxiv.org/abs/1904.10509): floor(s / l) = floor(p / l), or s mod l >= l - c. As in `strided_attention`,
    every head attends to the union of both sets, memory grows as T + S, and time is that of `chunked_attention`.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `strided_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend.
      block_size: l, about sqrt(S) in the paper.
      num_summaries: c, 1 to l; the paper takes 8, 16 or 32.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if the block size is below 1, `num_summaries` is not in 1 .. l, there are more queries than keys, or
        in the cases of `dot_product_attention`.

    >>> import functools, jax
    >>> x = jnp.zeros((1, 5, 1, 1))
    >>> attend = jax.jit(functools.partial(fixed_attention, block_size=2, is_causal=True, return_weights=True))
    >>> (3 * attend(x, x, x)[1])[0, 0, -1].tolist()
    [0.0, 1.0, 0.0, 1.0, 1.0]
    """
    check_integers(block_size=block_size, num_summaries=num_summaries)
    if block_size < 1 or not 1 <= num_summaries <= block_size:
        sizes = f"block_size={block_size} and num_summaries={num_summaries}"
        raise ValueError(f"block_size must be at least 1 and num_summaries in 1 .. block_size, got {sizes}")
    options = {"is_causal": is_causal, "scale": scale, "return_weights": return_weights}
    dropping = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    pattern = SeesSummaries(block_size, num_summaries)
    return _attend(pattern, query, key, value, bias, mask, segment_ids, **options, **dropping)


def _attend(
    is_visible: Visibility,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    segment_ids: SegmentIds | None,
    **options: Any,
) -> Any:
    """Computes chunked attention in which a query sees the keys at positions that `is_visible(query, key)` allows.

    Positions count the tokens of a sequence; `options` are those of `chunked_attention`.
    """
    check_shapes(query, key, value, bias, mask)
    shift = key.shape[1] - query.shape[1]  # query t is at the position of key t + shift

    def attend(*arrays: Any, segment_ids: SegmentIds | None) -> Any:
        """Attends among tokens that are contiguous; `arrays` are query, key, value, bias and mask."""
        positions = None if segment_ids is None else positions_of(segment_ids[1])  # [B, S]

        # b, n, t and s are the indices of batch, head, query and key.
        def mask_mod(b: Array, n: Array, t: Array, s: Array) -> Bool[Array, "#B 1 T S"]:
            if positions is None:
                return is_visible(t + shift, s)
            # A block has all rows. Compilers do not see that in `positions[b, s]`, and would exchange positions.
            query = positions[:, t[0, 0, :, 0] + shift][:, None, :, None]  # [B, 1, T, 1]
            return is_visible(query, positions[:, s[0, 0, 0]][:, None, None])

        return chunked_attention(*arrays, segment_ids=segment_ids, mask_mod=mask_mod, **options)

    return attend_to_tokens(attend, query, key, value, bias, mask, segment_ids)


STRIDED = AttentionSpec(
    name="strided",
    function=strided_attention,
    reference="Child et al. (2019), section 4.3",
    options={"stride": Option("distance of the tokens that are seen beyond the nearest", required=True, at_least=1)},
    example=lambda length: {"stride": max(round(length**0.5), 1)},
    decoding=lambda stride, scale=None: decode_densely(SeesStride(stride), scale),
)
FIXED = dataclasses.replace(
    STRIDED,
    name="fixed",
    function=fixed_attention,
    options={
        "block_size": Option("tokens of a block", required=True, at_least=1),
        "num_summaries": Option("last tokens of each block that all later ones see", at_least=1),
    },
    example=lambda length: {"block_size": max(round(length**0.5), 1)},
    decoding=lambda block_size, num_summaries=1, scale=None: decode_densely(
        SeesSummaries(block_size, num_summaries), scale
    ),
)
