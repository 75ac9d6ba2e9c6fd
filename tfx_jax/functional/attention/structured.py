"""Structured self-attention: pools a sequence into a matrix whose rows are different weighted means."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.signature import check_floats, statistics_dtype


def structured_pooling(
    x: Float[Array, "B S D"],
    w_1: Float[Array, "D F"],
    w_2: Float[Array, "F N"],
    mask: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, "B N S"]]:
    r"""Computes the weights A = softmax(W_s2 tanh(W_s1 H^T)) and N weighted means M = A H of a sequence H.

    Equations 6 and 7 of Lin et al. (2017, https://arxiv.org/abs/1703.03130). The weights depend on parameters instead
    of queries. With N = 1 it equals `additive_attention` with a zero query.

    Args:
      x: the paper's H, [B, S, D].
      w_1: W_s1 transposed, [D, F].
      w_2: W_s2 transposed, [F, N]; N is the paper's r.
      mask: True for elements, False for padding, [B, S]. A sequence that is all padding gets zeros.

    Returns:
      M, [B, N, D], in the dtype of `x`, and A, [B, N, S], float32 (float64 for float64 inputs).

    >>> import jax
    >>> pool = jax.jit(structured_pooling)
    >>> [part.shape for part in pool(jnp.ones((2, 5, 4)), jnp.ones((4, 6)), jnp.ones((6, 3)))]
    [(2, 3, 4), (2, 3, 5)]
    """
    check_floats(x=x)
    dtype = statistics_dtype(x)
    hidden = jnp.tanh(jnp.einsum("BSD,DF->BSF", x, w_1.astype(x.dtype), preferred_element_type=dtype))
    scores = jnp.einsum("BSF,FN->BNS", hidden, w_2.astype(dtype))[:, :, None]  # N heads, each with one query
    mask = None if mask is None else mask[:, None, None]
    pooled, weights = attention_from_logits(scores, x[:, :, None], mask=mask)
    return pooled[:, 0], weights[:, :, 0]


def redundancy_penalty(weights: Float[Array, "*batch N S"]) -> Float[Array, "*batch"]:
    """Computes ||A A^T - I||_F^2, which is small if each row of A selects one element and no two rows the same one.

    Equation 8 of Lin et al. (2017, https://arxiv.org/abs/1703.03130), who add it to the loss with a weight. For rows
    that add up to 1, it is 0 only if the rows are one-hot vectors of different elements. For zero rows it is N.

    Args:
      weights: A, [*batch, N, S].

    >>> redundancy_penalty(jnp.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])).tolist()
    [0.0, 2.0]
    """
    overlap = jnp.einsum("...NS,...PS->...NP", weights, weights)
    identity = jnp.broadcast_to(jnp.eye(weights.shape[-2], dtype=weights.dtype), overlap.shape)
    return jnp.square(overlap - identity).sum(axis=(-2, -1))
