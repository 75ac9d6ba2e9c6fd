"""Losses over a vocabulary, computed without one-hot matrices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention.signature import statistics_dtype


def label_smoothed_cross_entropy(
    logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], *, smoothing: float = 0.0
) -> Float[Array, "*batch"]:
    r"""Computes the cross entropy with the smoothed target q = (1 - e) * onehot(target) + e / V.

    Szegedy et al. (2016); e = 0.1 in Vaswani et al. (2017). -sum_v q_v log p_v = log Z - (1 - e) * logit[target]
    - e * mean(logits): three reductions of the logits, without another array of their size. The minimum is the entropy
    of q, not 0.

    Args:
      logits: unnormalized scores, [*batch, V], any float dtype.
      targets: class indices, [*batch]. For an index outside 0 .. V - 1 the loss is NaN.
      smoothing: the probability mass e in [0, 1) that is spread evenly over all V classes, the target included.

    Returns:
      Loss in nats of each position, float32 (float64 for float64 logits), [*batch]. Padding is not masked: the caller
      weights and sums the losses.

    Raises:
      ValueError: if `smoothing` is outside [0, 1) or the shapes do not match.

    >>> loss_fn = jax.jit(label_smoothed_cross_entropy, static_argnames="smoothing")
    >>> loss = loss_fn(jnp.zeros((1, 4)), jnp.array([2]), smoothing=0.1)
    >>> loss.shape, round(loss.item(), 4)
    ((1,), 1.3863)
    """
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of logits without the last axis, {logits.shape[:-1]}, got {targets.shape}"
        )
    logits = logits.astype(statistics_dtype(logits))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1, wrap_negative_indices=False)[..., 0]
    loss = log_z - (1.0 - smoothing) * target_logit
    return loss - smoothing * logits.mean(axis=-1) if smoothing else loss


def z_loss(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Computes log^2 Z with Z = sum_v exp(logit_v); added with a small weight, it keeps Z near 1.

    Section 5 of PaLM (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311) uses the weight 1e-4. Under jit, log Z
    is shared with the cross entropy of the same logits, so there is no second pass over them.

    Args:
      logits: unnormalized scores, [*batch, V], any float dtype.

    Returns:
      log^2 Z of each position, float32 (float64 for float64 logits), [*batch].

    >>> jax.jit(z_loss)(jnp.zeros((2, 1))).tolist()
    [0.0, 0.0]
    """
    return jnp.square(jax.nn.logsumexp(logits.astype(statistics_dtype(logits)), axis=-1))


def symmetric_kl_divergence(
    logits: Float[Array, "*batch V"], others: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    r"""Computes (KL(p || q) + KL(q || p)) / 2 = sum_v (p_v - q_v) (log p_v - log q_v) / 2 of two predictions.

    R-Drop (Liang et al., 2021, https://arxiv.org/abs/2106.14448), equation 2: p and q are what a model predicts for the
    same input in two passes with different dropout.

    Args:
      logits: unnormalized scores of p, [*batch, V], any float dtype, finite.
      others: those of q, of the same shape and dtype.

    Returns:
      Divergence in nats of each position, 0 where p = q, float32 (float64 for float64 logits), [*batch].

    Raises:
      ValueError: if the shapes differ.

    >>> jax.jit(symmetric_kl_divergence)(jnp.zeros((2, 4)), jnp.ones((2, 4))).tolist()
    [0.0, 0.0]
    """
    if logits.shape != others.shape:
        raise ValueError(f"logits and others must have the same shape, got {logits.shape} and {others.shape}")
    dtype = statistics_dtype(logits)
    log_p, log_q = jax.nn.log_softmax(logits.astype(dtype)), jax.nn.log_softmax(others.astype(dtype))
    return 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(axis=-1)
