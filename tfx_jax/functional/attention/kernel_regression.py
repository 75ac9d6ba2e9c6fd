"""Kernel regression, which is attention without parameters: the points are keys, the observations are values."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.signature import check_floats, statistics_dtype, weights_on_request


@weights_on_request
def kernel_regression(
    query_points: Float[Array, " T"] | Float[Array, "T D"],
    points: Float[Array, " S"] | Float[Array, "S D"],
    values: Float[Array, " S"] | Float[Array, "S U"],
    mask: Bool[Array, "#T #S"] | None = None,
    *,
    inverse_bandwidth: float | Float[Array, ""] | Float[Array, " D"] = 1.0,
    return_weights: bool = False,
) -> Array | tuple[Array, Float[Array, "T S"]]:
    r"""Estimates f(x) = sum_i softmax_i(-1/2 |(x - x_i) w|^2) y_i from the points (x_i, y_i).

    The estimator of Nadaraya and Watson with a Gaussian kernel of standard deviation 1 / w: equations 15.36 to 15.41 of
    "Probabilistic Machine Learning: An Introduction" (Murphy, 2022, https://probml.github.io/book1). A large w uses the
    nearest points only, w = 0 the mean of all. Far from every point, where all kernels underflow, the estimate is the
    value of the nearest point instead of 0 / 0, as long as the squares in the formula do not overflow.

    Args:
      query_points: where to estimate f, [T] numbers or [T, D] points. For a batch use `jax.vmap`.
      points: x_i, where f was observed, [S] or [S, D].
      values: y_i, the observations, [S] or [S, U].
      mask: True where a query may use a point, broadcastable to [T, S]. To fit w, pass `~jnp.eye(S, dtype=bool)`, which
        leaves each point out of its own estimate; otherwise an infinite w minimizes the training error. A query that
        may use no point gets zero.
      inverse_bandwidth: w; one number, or one for each of the D coordinates; differentiable.
      return_weights: also return the weights.

    Returns:
      Estimates, [T] or [T, U], in the dtype of `values`; with `return_weights` a pair of output and weights, [T, S],
      which are float32 at least.

    Raises:
      ValueError: if `query_points` and `points` differ in rank or in D, the numbers of values and points differ, or the
        mask is not boolean or has the wrong shape.

    >>> x, y = jnp.array([0.0, 1.0, 2.0]), jnp.array([5.0, 7.0, 9.0])
    >>> import jax
    >>> jax.jit(kernel_regression)(jnp.array([1.0, 50.0]), x, y, inverse_bandwidth=3.0).tolist()
    [7.0, 9.0]
    """
    if query_points.shape[1:] != points.shape[1:] or points.ndim not in (1, 2):
        raise ValueError(
            "query_points and points must have shapes [T] and [S], or [T, D] and [S, D], got "
            f"{query_points.shape} and {points.shape}"
        )
    if values.shape[:1] != points.shape[:1] or values.ndim not in (1, 2):
        raise ValueError(
            f"values must have shape [S] or [S, U] with S = {points.shape[0]}, the number of points, got {values.shape}"
        )
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"mask must have rank 2, [T, S], got shape {mask.shape}")
    check_floats(query_points=query_points, points=points, values=values)
    dtype = statistics_dtype(points)
    (t, s), d = (query_points.shape[0], points.shape[0]), math.prod(points.shape[1:])
    inverse_bandwidths = jnp.broadcast_to(jnp.asarray(inverse_bandwidth, dtype), (d,))
    # Subtract before squaring: x^2 - 2 x x_i + x_i^2 cancels for points that are close to each other and far from 0.
    difference = query_points.astype(dtype).reshape(t, 1, d) - points.astype(dtype).reshape(1, s, d)
    scores = -0.5 * jnp.square(difference * inverse_bandwidths[None, None]).sum(axis=-1)
    mask = None if mask is None else mask[None, None]
    out, weights = attention_from_logits(
        scores[None, None], values.reshape(1, s, 1, math.prod(values.shape[1:])), mask=mask
    )
    out = out.reshape(t, *values.shape[1:])
    return (out, weights[0, 0]) if return_weights else out
