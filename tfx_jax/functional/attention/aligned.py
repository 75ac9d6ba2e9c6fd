"""Local attention of one sequence to another (Luong et al., 2015): each query sees a window of keys around a position.

`tfx_jax.functional.local_attention` is different: self-attention within the blocks of one sequence.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention.dense import weighted_values
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_integers,
    check_pairs,
    set_options,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.layers import dropout


@weights_on_request
@shard_like_query
@zeros_where_empty
def aligned_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    position: Float[Array, "#B #N #T"],
    window: int,
    sigma: float | None = None,
    key_position: Int[Array, "#B S"] | None = None,
    attention_fn: Callable[..., Any] = dot_product_attention,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Attends to the keys in [p - D, p + D], p = `position` of the query and D = `window`, and prefers keys near p.

    Section 3.2 of Luong et al. (2015, https://arxiv.org/abs/1508.04025). `attention_fn` computes weights over the keys
    of the window. The weight of the key at position s is then multiplied by exp(-(s - p)^2 / (2 sigma^2)) (equation
    10) and not normalized again, so a query's weights add up to at most 1. In the paper's "local-m", p is the position
    of the target token and there is no Gaussian; in "local-p", p comes from `aligned_position` and sigma = D / 2. A
    query whose window contains no key gets zeros. All pairs are scored, so the cost is that of dense attention.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N.
      value: values, [B, S, K, U].
      bias: added to the scores, broadcastable to [B, N, T, S].
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      position: p, a real number per query, broadcastable to [B, N, T]. It gets a gradient through the Gaussian only.
      window: D, the largest distance between p and a visible key.
      sigma: standard deviation of the Gaussian; None means no Gaussian.
      key_position: s of each key, [B, S] or [1, S]; None means 0 .. S - 1. Pass it for rows that start with padding.
      attention_fn: the attention that scores pairs. It must take a mask of all pairs and return its weights.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the scores; None is the default of `attention_fn`.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights, before dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      float32 [B, N, T, S]. A query that sees no key gets zeros.

    Raises:
      ValueError: if the window is negative, sigma is not positive, a position has the wrong shape, a mask is not
        boolean or not of rank 4, or `attention_fn` raises it.

    >>> x = jnp.ones((1, 4, 1, 2))
    >>> attend = jax.jit(lambda p: aligned_attention(x, x, x, position=p, window=1, return_weights=True)[1])
    >>> attend(jnp.array([0, 1.5, 3, 5])[None, None])[0, 0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    (b, t, n, _), s = query.shape, key.shape[1]
    check_integers(window=window)
    if window < 0 or (sigma is not None and not sigma > 0):
        raise ValueError(f"window must be at least 0 and sigma above 0, got window={window} and sigma={sigma}")
    check_pairs(bias, mask, (b, n, t, s))
    _check_broadcastable("position", position.shape, (b, n, t))
    key_positions = jnp.arange(s)[None] if key_position is None else key_position
    _check_broadcastable("key_position", key_positions.shape, (b, s))
    distance = key_positions.astype(jnp.float32)[:, None, None] - position.astype(jnp.float32)[..., None]  # s - p
    in_window = jnp.abs(distance) <= window
    mask = in_window if mask is None else in_window & mask
    options = set_options(is_causal=is_causal, scale=scale, segment_ids=segment_ids)
    if sigma is None:
        if dropout_rng is not None:
            options |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        if return_weights:
            options["return_weights"] = True
        return attention_fn(query, key, value, bias, mask, **options)
    _, weights = attention_fn(query, key, value, bias, mask, return_weights=True, **options)
    weights = weights * jnp.exp(-0.5 * jnp.square(distance / sigma)).astype(weights.dtype)
    out = weighted_values(dropout(weights, dropout_rate, dropout_rng), value).astype(query.dtype)
    return (out, weights) if return_weights else out


def aligned_position(
    query: Float[Array, "*batch H"], length: Array, *, w: Float[Array, "H F"], v: Float[Array, " F"]
) -> Float[Array, "*batch"]:
    """Predicts the position that a query attends to, S * sigmoid(v . tanh(W q)): equation 9 of Luong et al. (2015).

    Args:
      query: decoder states with any leading axes, [*batch, H].
      length: S, the number of keys, of any dtype, broadcastable to [*batch].
      w: matrix W of the hidden layer.
      v: vector that maps the hidden layer to a logit.

    Returns:
      Positions in [0, S], float32 at least.

    >>> aligned_position(jnp.ones((1, 2)), jnp.array([7.0]), w=jnp.ones((2, 3)), v=jnp.zeros(3)).tolist()
    [3.5]
    """
    dtype = statistics_dtype(query)
    hidden = jnp.tanh(jnp.einsum("...H,HF->...F", query, w.astype(query.dtype), preferred_element_type=dtype))
    return length.astype(dtype) * jax.nn.sigmoid(jnp.einsum("...F,F->...", hidden, v.astype(dtype)))


def _check_broadcastable(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Raises ValueError unless an array of this shape can be broadcast to `full`, which has the same rank."""
    if len(shape) != len(full) or any(size not in (1, required) for size, required in zip(shape, full, strict=True)):
        raise ValueError(f"{name} must be broadcastable to {full}, got shape {shape}")
