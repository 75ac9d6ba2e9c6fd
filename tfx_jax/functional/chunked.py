"""Dense attention, exactly, in memory linear in the length."""

import functools

import jax
from jaxtyping import Array, Float

from tfx_jax.functional.attention_from_logits import dot_product_weights
from tfx_jax.functional.empty import zeros_where_empty
from tfx_jax.functional.explicit_axes import divided_as_queries
from tfx_jax.functional.masks import Bias, Mask, SegmentIds, check_shapes, pair_of_segment_ids
from tfx_jax.functional.online_softmax import (
    Keys,
    Options,
    Queries,
    Residuals,
    add_gradients,
    as_cotangents,
    attend,
    before_any_key,
    finish,
    join_queries,
    no_gradients,
    split_inputs,
)
from tfx_jax.functional.weights_on_request import weights_on_request


@weights_on_request
@divided_as_queries
@zeros_where_empty
def chunked_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    chunk_size: int = 512,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q K^T + bias) V, exactly, without ever holding the T x S weights.

    A chunk of queries meets the keys chunk by chunk, and what it saw is rescaled whenever a larger logit turns up:
    "Self-attention Does Not Need O(n^2) Memory" (Rabe and Staats, 2021, section 2 of https://arxiv.org/abs/2112.05682).
    The gradient keeps the output and two numbers for each query and computes the weights once more, chunk by chunk
    (FlashAttention, Dao et al., 2022, algorithm 4 of https://arxiv.org/abs/2205.14135). Chunks that causality hides
    entirely cost nothing.

    The gradient is a `jax.custom_vjp`: `jax.grad` works, and so does `jax.jvp` of a gradient, but not `jax.jvp` of this
    function itself; `dot_product_attention` has that too.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, H]; K divides N, and keys are not repeated for the queries that share them.
      value: values, [B, S, K, U].
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. It and its gradient are stored as given: one for
        all pairs costs the memory that this function saves elsewhere.
      mask: True where a query may attend, broadcastable to [B, N, T, S]; best a padding mask, [B, 1, 1, S].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits, a Python number; None means 1 / sqrt(H).
      chunk_size: the most queries and the most keys that meet at once. Memory grows with its square, [B, N, chunk_size,
        chunk_size]; any length works.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight. Which are dropped depends on `chunk_size`.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the weights before dropout, which are dense: O(T S).

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`, zero for a query without keys; with `return_weights` a
      pair of these and the weights, [B, N, T, S]. All sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the sizes do not fit together, a mask is not boolean or of rank 4, or `chunk_size` is below 1.

    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> jax.jit(functools.partial(chunked_attention, is_causal=True, chunk_size=2))(x, x, x).shape
    (1, 3, 2, 4)
    """
    check_shapes(query, key, value, bias, mask)
    b, t, _, h = query.shape
    s = key.shape[1]
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    queries, keys = split_inputs(query, key, value, bias, mask, ids, dropout_rng, chunk_size)
    options = Options(h**-0.5 if scale is None else scale, is_causal, dropout_rate, t, s)
    out = join_queries(_attend(options, queries, keys, dropout_rng), t)
    if not return_weights:
        return out
    return out, dot_product_weights(query, key, bias, mask, is_causal=is_causal, scale=scale, segment_ids=segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, queries: Queries, keys: Keys, rng: Array | None) -> Float[Array, "I B K G T U"]:
    return _forward(options, queries, keys, rng)[0]


def _forward(
    options: Options, queries: Queries, keys: Keys, rng: Array | None
) -> tuple[Float[Array, "I B K G T U"], Residuals]:
    shift = options.num_keys - options.num_queries
    running = attend(options, queries, keys, before_any_key(queries, keys), shift, rng)
    saved = finish(running, queries.query.dtype)
    return saved.out, Residuals(queries, keys, rng, saved)


def _backward(options: Options, residuals: Residuals, cotangent: Array) -> tuple[Queries, Keys, None]:
    queries, keys, rng, saved = residuals
    shift = options.num_keys - options.num_queries
    gradients = no_gradients(queries, keys)
    gradients = add_gradients(options, queries, keys, saved, cotangent, gradients, shift, rng)
    return *as_cotangents(gradients, queries, keys), None


_attend.defvjp(_forward, _backward)
