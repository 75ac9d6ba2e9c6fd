"""Attention through landmarks (Nyströmformer): three softmaxes of T x M, M x M and M x T instead of one of T x T."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import attention_from_logits, dot_product_logits, dot_product_weights
from tfx_jax.functional.attention.signature import (
    check_integers,
    check_shapes,
    refuse_pairs,
    shard_like_query,
    statistics_dtype,
    visible_keys,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option

# Precision of the products of the iteration: inverses have large entries of both signs, which cancel.
_PRECISION = jax.lax.Precision.HIGHEST


@weights_on_request
@shard_like_query
@zeros_where_empty
def nystrom_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K U"],
    bias: None = None,
    mask: Bool[Array, "#B 1 1 #T"] | None = None,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T T"]]:
    r"""Approximates softmax self-attention through M landmarks, in time and memory linear in T.

    "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention" (Xiong et al., 2021,
    https://arxiv.org/abs/2102.03902), equations 13 to 17, without the convolution of values that its models add. With
    Q~ and K~ the means of M segments of the queries and of the keys,

        out = softmax(scale * Q K~^T) Z softmax(scale * Q~ K^T) V,

    where Z approximates the pseudo-inverse of A = softmax(scale * Q~ K~^T) by `num_iterations` steps:

        Z_0 = A^T / (|A|_1 |A|_inf),  Z_{j+1} = Z_j (13 I - A Z_j (15 I - A Z_j (7 I - A Z_j))) / 4.

    Every matrix uses its own norms, as in the paper. The authors' code uses the largest norm of the batch, so that rows
    of a batch change each other.

    **Weights.** The weights are the product softmax(..) Z softmax(..). If Z is the inverse of A, they add up to 1 for
    every query, but some may be negative. If every token is a landmark, they are those of dense attention. Six steps do
    not reach this if A is far from the identity. In float32 more steps help up to about sixteen. Beyond, rounding
    errors grow by 13/4 per step in the null directions of A, which exist if landmarks are alike, and forty steps may
    end in NaN.

    **Padding.** The tokens that `mask` shows, wherever they are, are divided into segments whose sizes differ by at
    most one. Hidden tokens are in no mean, so padding does not change the output of other tokens. With fewer tokens
    than M, each token is a landmark, and the remaining landmarks are hidden.

    Args:
      query: queries, [B, T, N, H].
      key: keys of the same tokens, [B, T, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, T, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: True for visible tokens, [B or 1, 1, 1, T].
      num_landmarks: M, the paper's m; 64 is often enough. At most T are used.
      num_iterations: steps of the pseudo-inverse; the paper uses 6.
      is_causal: must be False, because landmarks are means that include future tokens.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: must be None, because landmarks are means over all tokens of a row.
      dropout_rate: must be 0: no weight of a pair exists that could be dropped. Drop the output instead.
      dropout_rng: unused; part of the common signature.
      return_weights: also return the dense weights; needs O(T * T) memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, T]. The
      computation is in float32 (float64 for float64 inputs). A row without visible tokens gets zeros.

    Raises:
      ValueError: if shapes do not match, the mask is not a padding mask, or an option is out of range.

    >>> attend = jax.jit(nystrom_attention, static_argnames=("num_landmarks", "return_weights"))
    >>> out, weights = attend(*jnp.ones((3, 1, 6, 2, 4)), num_landmarks=3, return_weights=True)
    >>> out.shape, (6 * weights[0, 0, 0]).round().tolist()
    ((1, 6, 2, 4), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    check_shapes(query, key, value, None, mask)
    b, t = query.shape[:2]
    if key.shape[1] != t:
        raise ValueError(
            "Nyström attention is self-attention and needs as many keys as queries, got "
            f"{t} queries and {key.shape[1]} keys"
        )
    refuse_pairs("Nyström attention", "landmarks", bias, mask, is_causal, segment_ids)
    check_integers(num_landmarks=num_landmarks, num_iterations=num_iterations)
    if num_landmarks < 1 or num_iterations < 0:
        raise ValueError(
            f"num_landmarks must be at least 1 and num_iterations at least 0, got num_landmarks={num_landmarks} and "
            f"num_iterations={num_iterations}"
        )
    if dropout_rate:
        raise ValueError(f"Nyström attention has no weights to drop, got dropout_rate={dropout_rate}; drop the output")
    visible = visible_keys(mask, b, t)
    is_member = _segments(visible, min(num_landmarks, t))  # [B, T, M]
    is_landmark = is_member.any(axis=1)  # [B, M]; False for empty segments

    result_dtype, dtype = query.dtype, statistics_dtype(query)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    query_landmarks, key_landmarks = _means(query, is_member), _means(key, is_member)
    to_landmarks = dot_product_weights(query, key_landmarks, mask=is_landmark[:, None, None], scale=scale)
    pairs = is_landmark[:, None, :, None] & is_landmark[:, None, None]
    between = dot_product_weights(query_landmarks, key_landmarks, mask=pairs, scale=scale)
    logits = dot_product_logits(query_landmarks, key, scale)
    landmark_out, from_landmarks = attention_from_logits(logits, value, mask=visible[:, None, None])

    inverse = pseudo_inverse(between, num_iterations)
    mixed = jnp.matmul(inverse, landmark_out.swapaxes(1, 2), precision=_PRECISION)
    out = (to_landmarks @ mixed).swapaxes(1, 2).astype(result_dtype)
    if not return_weights:
        return out
    return out, to_landmarks @ jnp.matmul(inverse, from_landmarks, precision=_PRECISION)


def pseudo_inverse(matrix: Float[Array, "*batch M M"], num_iterations: int) -> Float[Array, "*batch M M"]:
    """Approximates the Moore-Penrose inverse by matrix products only: equation 14 of Xiong et al. (2021).

    Where the matrix has rows and columns of zeros, the result has zeros; the inverse of a zero matrix is zero.

    >>> jax.jit(pseudo_inverse, static_argnums=1)(jnp.array([[1.0, 0.5], [0.0, 0.5]]), 6).round(3).tolist()
    [[1.0, -1.0], [0.0, 2.0]]
    """
    magnitudes = jnp.abs(matrix)
    norms = magnitudes.sum(axis=-2).max(axis=-1) * magnitudes.sum(axis=-1).max(axis=-1)  # |A|_1 |A|_inf
    inverse = matrix.mT / jnp.where(norms > 0, norms, jnp.ones((), norms.dtype))[..., None, None]
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    for _ in range(num_iterations):
        product = jnp.matmul(matrix, inverse, precision=_PRECISION)
        # 13 I - product (15 I - product (7 I - product)), from the innermost bracket outwards.
        factor = 7 * identity - product
        for multiple in (15, 13):
            factor = multiple * identity - jnp.matmul(product, factor, precision=_PRECISION)
        inverse = jnp.matmul(inverse, factor, precision=_PRECISION) / 4
    return inverse


def _segments(visible: Bool[Array, "B T"], num_landmarks: int) -> Bool[Array, "B T M"]:
    """Returns which of M segments each visible token is in; with fewer visible tokens, some segments are empty."""
    rank = jnp.cumsum(visible, axis=1) - 1  # index of each token among the visible ones
    segment = rank * num_landmarks // jnp.maximum(visible.sum(axis=1, keepdims=True), 1)
    return (segment[..., None] == jnp.arange(num_landmarks)[None, None]) & visible[..., None]


def _means(x: Float[Array, "B T N H"], is_member: Bool[Array, "B T M"]) -> Float[Array, "B M N H"]:
    """Returns the mean of the tokens of each segment; zeros for empty segments."""
    member = is_member.astype(x.dtype)
    sums = jnp.einsum("BTM,BTNH->BMNH", member, x)
    return sums / jnp.maximum(member.sum(axis=1), 1)[..., None, None]


NYSTROM = AttentionSpec(
    name="nystrom",
    function=nystrom_attention,
    reference="Nystr\u00f6mformer: Xiong et al. (2021), section 3",
    options={
        "num_landmarks": Option("number of landmarks, the means of segments of tokens"),
        "num_iterations": Option("iterations of the pseudo-inverse", at_least=0, at_most=100),
    },
    example=lambda length: {"num_landmarks": min(64, max(length // 4, 1))},
    causal=False,
    bias=False,
    segments=False,
    cross=False,
    dropout=False,
)
