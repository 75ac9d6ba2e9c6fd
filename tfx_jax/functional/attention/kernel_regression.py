"""Kernel regression, which is attention without parameters: points are keys, and what was seen there are values."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.masks import check_floats
from tfx_jax.functional.attention.wrappers import weights_on_request


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

    The estimator of Nadaraya and Watson with a Gaussian kernel of standard deviation 1 / w, as equations 15.36 to 15.41
    of "Probabilistic Machine Learning: An Introduction" (Murphy, 2022, https://probml.github.io/book1) write it. A
    large w looks at the nearest points only, w = 0 takes the mean of all. Far from every point, where the kernels
    underflow and their fraction would be 0 / 0, it is the value of the nearest point.

    Args:
      query_points: where to estimate, [T] numbers or [T, D] points. For a batch use `jax.vmap`.
      points: where something was seen, [S] or [S, D].
      values: what was seen there, [S] or [S, U].
      mask: True where a query may use a point, broadcastable to [T, S]. `~jnp.eye(S, dtype=bool)` leaves each point out
        of its own estimate, without which the training error is least for an infinite w. A query without a point gets
        zero.
      inverse_bandwidth: w; one number, or one for each of the D coordinates. It has a gradient.
      return_weights: also return the weights.

    Returns:
      Estimates, [T] or [T, U], in the dtype of `values`; with `return_weights` a pair of these and the weights, [T, S],
      which are float32 at least.

    Raises:
      ValueError: if the points differ in rank or in D, there are more or fewer values than points, or the mask is not
        boolean or does not fit.

    >>> x, y = jnp.array([0.0, 1.0, 2.0]), jnp.array([5.0, 7.0, 9.0])
    >>> import jax
    >>> jax.jit(kernel_regression)(jnp.array([1.0, 50.0]), x, y, inverse_bandwidth=3.0).tolist()
    [7.0, 9.0]
    """
    if query_points.shape[1:] != points.shape[1:] or points.ndim not in (1, 2):
        raise ValueError(f"points must be [T] and [S], or [T, D] and [S, D]: got {query_points.shape}, {points.shape}")
    if values.shape[:1] != points.shape[:1] or values.ndim not in (1, 2):
        raise ValueError(f"values must be [S] or [S, U] for {points.shape[0]} points, got shape {values.shape}")
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"mask must have rank 2, [T, S], got shape {mask.shape}")
    check_floats(query_points=query_points, points=points, values=values)
    dtype = np.promote_types(points.dtype, np.float32)
    (t, s), d = (query_points.shape[0], points.shape[0]), points.size // points.shape[0]
    width = jnp.broadcast_to(jnp.asarray(inverse_bandwidth, dtype), (d,))
    # The difference first: x^2 - 2 x x_i + x_i^2 cancels where points are close to each other and far from 0.
    difference = query_points.astype(dtype).reshape(t, 1, d) - points.astype(dtype).reshape(1, s, d)
    scores = -0.5 * jnp.square(difference * width[None, None]).sum(axis=-1)
    seen = None if mask is None else mask[None, None]
    out, weights = attention_from_logits(scores[None, None], values.reshape(1, s, 1, -1), mask=seen)
    out = out.reshape(t, *values.shape[1:])
    return (out, weights[0, 0]) if return_weights else out
