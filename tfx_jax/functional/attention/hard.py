"""Hard attention: every query reads the value of one sampled key; a reward trains the sampling."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    set_options,
    shard_like_query,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding
from tfx_jax.functional.layers import dropout


@shard_like_query
@zeros_where_empty
def hard_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    attention_fn: Callable[..., Any] = dot_product_attention,
    rng: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    return_log_prob: bool = False,
    return_probs: bool = False,
) -> Array | tuple[Array, ...]:
    r"""Returns one value for every query, sampled with the weights of a soft attention as probabilities.

    Section 4.1 of "Show, Attend and Tell" (Xu et al., 2015, https://arxiv.org/abs/1502.03044): s ~ Categorical(softmax
    weights), out = v_s. The sampled index has no gradient, so queries and keys learn through its log-probability, by
    `score_function_loss`; values learn as usual, through `out`.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N.
      value: values, [B, S, K, U].
      bias: added to the scores, broadcastable to [B, N, T, S]. Minus infinity
        hides a key; a `mask` takes less memory.
      mask: True where a query may attend, broadcastable to [B, N, T, S]. A query that sees no key gets zeros.
      attention_fn: the soft attention whose weights are the probabilities; the paper's is an `additive_attention`.
      rng: PRNG key for sampling. None means evaluation: the most probable key is taken.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the scores; None is the default of `attention_fn`.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping the chosen key, which leaves the query with zeros.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights, [B, N, T, S]: 1 for the chosen key and 0 for the others.
      return_log_prob: also return the log-probability of each choice, [B, N, T], differentiable; 0 for a query that
        sees no key. Sum the log-probabilities of all choices that led to one reward.
      return_probs: also return the probabilities, [B, N, T, S], differentiable; for an entropy term or the expected
        value.

    Returns:
      The chosen values, [B, T, N, U], in the dtype of `query`. With any of the `return_` options a tuple: the values,
      then the requested weights, log-probabilities and probabilities, float32 (float64 for float64 inputs).

    Raises:
      ValueError: if `attention_fn` raises it.

    >>> x = jnp.eye(3)[None, :, None]
    >>> jax.jit(hard_attention)(x, x, x)[0, :, 0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> draw = jax.jit(lambda x, rng: hard_attention(x, x, x, rng=rng, return_log_prob=True))
    >>> out, log_prob = draw(x, jax.random.key(0))
    >>> out.shape, log_prob.shape
    ((1, 3, 1, 3), (1, 1, 3))
    """
    options = set_options(is_causal=is_causal, scale=scale, segment_ids=segment_ids)
    _, probs = attention_fn(query, key, value, bias, mask, return_weights=True, **options)
    (b, n, t, s), (k, u) = probs.shape, value.shape[2:]
    logits = jnp.log(jax.lax.stop_gradient(probs))
    # Indices of keys, [B, N, T].
    chosen = logits.argmax(axis=-1) if rng is None else jax.random.categorical(rng, logits)
    probability = jnp.take_along_axis(probs, chosen[..., None], axis=-1)[..., 0]
    has_key = probability > 0

    # The N / K query heads that share a value head are joined along the axis of queries, [B, K, N / K * T, U].
    chosen_value = jnp.take_along_axis(value.transpose(0, 2, 1, 3), chosen.reshape(b, k, -1)[..., None], axis=2)
    keep = dropout(has_key.astype(value.dtype), dropout_rate, dropout_rng)
    out = (chosen_value.reshape(b, n, t, u) * keep[..., None]).transpose(0, 2, 1, 3).astype(query.dtype)

    results = [out]
    if return_weights:
        results.append(jnp.where(has_key[..., None], jax.nn.one_hot(chosen, s, dtype=probs.dtype), 0))
    if return_log_prob:
        results.append(jnp.log(jnp.where(has_key, probability, 1)))
    if return_probs:
        results.append(probs)
    return tuple(results) if len(results) > 1 else out


def score_function_loss(
    log_prob: Float[Array, "*shape"],
    reward: Float[Array, "*shape"],
    baseline: float | Float[Array, ""] | Float[Array, "*shape"] = 0.0,
) -> Float[Array, "*shape"]:
    r"""Computes a loss whose gradient is an unbiased estimate of the gradient of -E[reward] (REINFORCE).

    The loss is -(reward - baseline) log_prob, with a gradient through `log_prob` only. The gradient of E[r] is
    E[(r - b) grad log p] (Williams, 1992, https://doi.org/10.1007/BF00992696; section 4.1 of Xu et al., 2015) for
    every b that does not depend on the sample. A b near the mean reward reduces the variance: Xu et al. use a moving
    average of past rewards, others a learned prediction with its own loss. If the reward is itself differentiable, for
    example because a network computes it from the sampled values, add -reward to the loss.

    Args:
      log_prob: log-probability of all choices that led to each reward, any shape.
      reward: rewards, same shape. Xu et al. use the log-likelihood of the caption.
      baseline: b, one number, or one for each reward.

    Returns:
      The loss of each reward; take the mean. Only its gradient is meaningful, not its value.

    Raises:
      ValueError: if the shapes differ: broadcasting would pair choices with the wrong rewards.

    >>> loss = lambda log_prob: score_function_loss(log_prob, jnp.array([3.0, 1.0]), baseline=2.0).sum()
    >>> jax.grad(loss)(jnp.array([-0.5, -0.5])).tolist()
    [-1.0, 1.0]
    """
    if log_prob.shape != reward.shape or jnp.shape(baseline) not in ((), reward.shape):
        raise ValueError(
            f"log_prob {log_prob.shape}, reward {reward.shape} and baseline {jnp.shape(baseline)} must have equal "
            "shapes (baseline may be a scalar): sum the log-probabilities of the choices that led to one reward"
        )
    return -jax.lax.stop_gradient(reward - baseline) * log_prob


def _decode_from_cache(scale: float | None = None, **options: Any) -> CachedDecoding | None:
    """Returns decoding that takes the most probable key; sampling would need a PRNG key for each token."""
    del scale
    return None if options else CachedDecoding()


HARD = AttentionSpec(
    name="hard",
    function=hard_attention,
    reference="Xu et al. (2015), section 4.1",
    decoding=_decode_from_cache,
)
