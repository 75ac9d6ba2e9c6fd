"""Relative attention of Transformer-XL: scores by content and by distance, over a memory and the current segment."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_shapes,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec
from tfx_jax.functional.attention.token_order import attend_in_order, order_tokens
from tfx_jax.functional.positions import relative_shift, sinusoidal_positions


@weights_on_request
@shard_like_query
@zeros_where_empty
def relative_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    relative_key: Float[Array, "P N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * ((q_i + u) k_j^T + (q_i + v) r_{i-j}^T) + bias) V, with i - j the distance.

    Section 3.3 of "Transformer-XL" (Dai et al., 2019, https://arxiv.org/abs/1901.02860): scores by content and by
    distance, with the two biases u and v. For the recurrence of section 3.2, pass keys and values of the memory
    followed by those of the segment. With `is_causal` query t then sees keys up to t + S - T, and distances continue
    into the memory.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H], of the memory and of the segment; K divides N.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, broadcastable to [B, N, T, S].
      mask: True where a query may attend, broadcastable to [B, N, T, S]. With a mask that is the same for all queries,
        [B, N, 1, S], tokens hidden from all heads are padding: distances do not count them, and they get zeros. With
        T = 1 the query is the last visible token. A mask of pairs does not change distances.
      relative_key: r, the encodings of all distances projected by the paper's W_{k,R}, largest distance first: row p is
        for distance S - 1 - p. With `is_causal`, [S, N, H] suffices, down to distance 0; otherwise [S + T - 1, N, H],
        down to distance 1 - T.
      content_bias: u, [N, H].
      position_bias: v, [N, H].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding, which distances do not count.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, S]. A query that sees no key gets zeros.

    Raises:
      ValueError: if shapes do not match.

    >>> x, near = jnp.zeros((1, 3, 1, 2)), jnp.array([[[0.0, 0.0]], [[0.0, 0.0]], [[9.0, 9.0]]])
    >>> biases = {"content_bias": jnp.zeros((1, 2)), "position_bias": jnp.ones((1, 2))}
    >>> import jax
    >>> attend = jax.jit(relative_attention, static_argnames=("is_causal", "return_weights"))
    >>> out, weights = attend(x, x, x, relative_key=near, **biases, is_causal=True, return_weights=True)
    >>> weights[0, 0].round(2).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    check_shapes(query, key, value, bias, mask)
    _check_positions(query, key, relative_key, content_bias, position_bias, is_causal)
    attend = functools.partial(
        _attend,
        relative_key=relative_key,
        content_bias=content_bias,
        position_bias=position_bias,
        is_causal=is_causal,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )
    order = order_tokens(mask, segment_ids, query.shape[0], query.shape[1], key.shape[1])
    if order is None:
        return attend(query, key, value, bias, mask, segment_ids=None)
    return attend_in_order(attend, query, key, value, bias, mask, order)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    relative_key: Array,
    content_bias: Array,
    position_bias: Array,
    scale: float | None,
    **options: Any,
) -> Any:
    """Computes `relative_attention` with distances counted in columns, padding included."""
    relative_key, u, v = (x.astype(query.dtype) for x in (relative_key, content_bias, position_bias))
    dtype = statistics_dtype(query)
    # Logits by distance, [B, N, T, P], shifted to those of keys, [B, N, T, S], are a bias of the logits by content.
    distance_logits = jnp.einsum("BTNH,PNH->BNTP", query + v[None, None], relative_key, preferred_element_type=dtype)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    distance_logits = relative_shift(distance_logits, key.shape[1]) * factor
    bias = distance_logits if bias is None else distance_logits + bias.astype(dtype)
    return dot_product_attention(query + u[None, None], key, value, bias, mask, scale=scale, **options)


def _check_positions(query: Array, key: Array, relative_key: Array, u: Array, v: Array, is_causal: bool) -> None:
    """Raises ValueError if a parameter of the relative positions has the wrong shape."""
    (_, t, n, h), s = query.shape, key.shape[1]
    lengths = (s, s + t - 1) if is_causal else (s + t - 1,)
    if relative_key.shape not in [(length, n, h) for length in lengths]:
        required = " or ".join(f"[{length}, {n}, {h}]" for length in lengths)
        raise ValueError(
            f"relative_key must have shape {required} for {t} queries and {s} keys with is_causal={is_causal},"
            f" got {relative_key.shape}"
        )
    for name, array in (("content_bias", u), ("position_bias", v)):
        if array.shape != (n, h):
            raise ValueError(f"{name} must have shape [N, H] = {(n, h)}, got {array.shape}")


def _relative_to_sinusoids(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *arguments: Any,
    relative_key: Array,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Calls `relative_attention` with sinusoids of the distances, projected by `relative_key`, [D, N, H]."""
    distances = jnp.arange(key.shape[1] - 1, -1 if is_causal else -query.shape[1], -1)
    encodings = sinusoidal_positions(distances, relative_key.shape[0]).astype(query.dtype)
    projected = jnp.einsum("PD,DNH->PNH", encodings, relative_key)
    return relative_attention(query, key, *arguments, relative_key=projected, is_causal=is_causal, **options)


def _init(rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, **_: Any) -> dict[str, Array]:
    """Initializes the projection of the distances' sinusoids, [D, N, H] with D = N * H, and biases of zeros."""
    d_model = num_heads * d_k
    relative_key = jax.nn.initializers.glorot_uniform()(rng, (d_model, d_model), dtype)
    return {
        "relative_key": relative_key.reshape(d_model, num_heads, d_k),
        "content_bias": jnp.zeros((num_heads, d_k), dtype),
        "position_bias": jnp.zeros((num_heads, d_k), dtype),
    }


RELATIVE = AttentionSpec(
    name="relative",
    function=_relative_to_sinusoids,
    reference="Transformer-XL: Dai et al. (2019), section 3.3",
    parameters=_init,
)
