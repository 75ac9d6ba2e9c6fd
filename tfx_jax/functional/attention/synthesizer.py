"""Attention without products of queries and keys: Synthesizers, whose logits are parameters or depend on one token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_shapes,
    pair_of_segment_ids,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option


@weights_on_request
@shard_like_query
@zeros_where_empty
def synthesizer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    logits: Float[Array, "N L L"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * R + bias) V with a learned logit R for each pair of positions, independent of tokens.

    Section 3.1.2 of "Synthesizer" (Tay et al., 2020, https://arxiv.org/abs/2005.00743), the random variant.

    Args:
      query: [B, T, N, H], at the last T of the S positions; only the shapes and dtypes of `query` and `key` are used.
        Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend. Tokens that a padding mask, [B, 1, 1, S], hides are not counted in positions;
        a mask of pairs does not change positions.
      logits: R, [N, L, L], indexed by the positions of query and key, which count the tokens of a sequence from 0.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1.
      segment_ids: packed sequences; positions start at 0 in each. 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if a sequence is longer than L, the logits have the wrong shape, or in the cases of
        `dot_product_attention`.

    >>> x, logits = jnp.arange(2.0).reshape(1, 2, 1, 1), jnp.array([[[0.0, 99.0], [99.0, 0.0]]])
    >>> jax.jit(synthesizer_attention)(x, x, x, logits=logits).ravel().tolist()
    [1.0, 0.0]
    """
    check_shapes(query, key, value, bias, mask)
    (b, t, n, _), s = query.shape, key.shape[1]
    if logits.ndim != 3 or logits.shape[0] != n or logits.shape[1] != logits.shape[2]:
        raise ValueError(f"logits must have shape [N, L, L] with N = {n}, got {logits.shape}")
    if max(t, s) > logits.shape[1]:
        raise ValueError(
            f"sequences must have at most max_length={logits.shape[1]} tokens, the size of the logits, got {max(t, s)}"
        )
    logits = jnp.asarray(logits, statistics_dtype(query)) * (1.0 if scale is None else scale)
    query_positions, key_positions = _positions(mask, segment_ids, b, t, s)
    pair_logits = logits[:, query_positions[:, :, None], key_positions[:, None]].swapaxes(0, 1)  # [B, N, T, S]
    options = {"is_causal": is_causal, "segment_ids": segment_ids}
    dropping = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    out, weights = attention_from_logits(pair_logits, value, bias, mask, **options, **dropping)
    out = out.astype(query.dtype)
    return (out, weights) if return_weights else out


@weights_on_request
@shard_like_query
@zeros_where_empty
def dense_synthesizer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    hidden: Float[Array, "N H H"],
    hidden_bias: Float[Array, "N H"],
    logits: Float[Array, "N H L"],
    logits_bias: Float[Array, "N L"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * (relu(Q W + b) W' + b') + bias) V: each query predicts its logit for every position.

    Equations 1 to 3 of "Synthesizer" (Tay et al., 2020, https://arxiv.org/abs/2005.00743), the dense variant, with the
    queries of a head as its input.

    Args:
      query: [B, T, N, H]. Arguments without explanation are those of `dot_product_attention`.
      key: [B, S, K, H]; only its shape and dtype are used.
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend. Tokens that a padding mask, [B, 1, 1, S], hides are not counted in positions;
        a mask of pairs does not change positions.
      hidden: W, [N, H, H].
      hidden_bias: b, [N, H].
      logits: W', [N, H, L], indexed by the positions of keys, which count the tokens of a sequence from 0.
      logits_bias: b', [N, L].
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1.
      segment_ids: packed sequences; positions start at 0 in each. 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if there are more than L keys, a parameter has the wrong shape, or in the cases of
        `dot_product_attention`.

    >>> x, one = jnp.arange(2.0).reshape(1, 2, 1, 1), jnp.ones((1, 1, 1))
    >>> parameters = {"hidden": one, "hidden_bias": one[0], "logits": 99 * jnp.array([[[-1.0, 1.0]]])}
    >>> jax.jit(dense_synthesizer_attention)(x, x, x, **parameters, logits_bias=jnp.zeros((1, 2))).ravel().tolist()
    [1.0, 1.0]
    """
    check_shapes(query, key, value, bias, mask)
    (b, t, n, h), s = query.shape, key.shape[1]
    length = logits.shape[-1]
    for name, x, shape in (
        ("hidden", hidden, (n, h, h)),
        ("hidden_bias", hidden_bias, (n, h)),
        ("logits", logits, (n, h, length)),
        ("logits_bias", logits_bias, (n, length)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    if s > length:
        raise ValueError(f"a sequence must have at most max_length={length} tokens, the size of the logits, got {s}")
    dtype = statistics_dtype(query)
    _, key_positions = _positions(mask, segment_ids, b, t, s)
    units = jnp.einsum("BTNH,NHD->BNTD", query.astype(dtype), hidden.astype(dtype))
    units = jax.nn.relu(units + hidden_bias.astype(dtype)[None, :, None])
    position_logits = jnp.einsum("BNTD,NDL->BNTL", units, logits.astype(dtype))
    position_logits = position_logits + logits_bias.astype(dtype)[None, :, None]
    pair_logits = jnp.take_along_axis(position_logits, key_positions[:, None, None], axis=-1)  # [B, N, T, S]
    pair_logits = pair_logits * (1.0 if scale is None else scale)
    options = {"is_causal": is_causal, "segment_ids": segment_ids}
    dropping = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    out, weights = attention_from_logits(pair_logits, value, bias, mask, **options, **dropping)
    out = out.astype(query.dtype)
    return (out, weights) if return_weights else out


def _positions(
    mask: Mask | None, segment_ids: SegmentIds | None, b: int, t: int, s: int
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns the positions of queries and of keys in their sequences; the last query is at the last key."""
    exists = jnp.ones((b, s), jnp.bool_)
    if mask is not None and mask.shape[1:3] == (1, 1):
        exists = jnp.broadcast_to(mask[:, 0, 0], (b, s))
    query_ids, key_ids = jnp.ones((b, t), jnp.int32), jnp.ones((b, s), jnp.int32)
    if segment_ids is not None:
        query_ids, key_ids = pair_of_segment_ids(segment_ids, b, t, s)

    def count(ids: Int[Array, "B X"], columns: np.ndarray) -> Int[Array, "B X"]:
        """Counts the earlier tokens of the same sequence, for tokens with these segment ids and indices on axis S."""
        is_before = np.arange(s)[None] <= columns[:, None]
        is_counted = (ids[..., None] == key_ids[:, None]) & exists[:, None] & is_before[None]
        return jnp.maximum(is_counted.sum(axis=-1) - 1, 0)

    return count(query_ids, np.arange(t) + s - t), count(key_ids, np.arange(s))


def _init(rng: Array, *, num_heads: int, dtype: DTypeLike, max_length: int, **_: Any) -> dict[str, Array]:
    """Samples the logits of all pairs of positions from a standard normal distribution."""
    return {"logits": jax.random.normal(rng, (num_heads, max_length, max_length), jnp.float32).astype(dtype)}


SYNTHESIZER_ATTENTION = AttentionSpec(
    name="synthesizer",
    function=synthesizer_attention,
    reference="Tay et al. (2020), the random variant",
    options={
        "max_length": Option("length of the longest sequence, in tokens", required=True, at_least=1, is_passed=False)
    },
    example=lambda length: {"max_length": 2 * length},
    parameters=_init,
)


def _init_dense(
    rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, max_length: int, **_: Any
) -> dict[str, Array]:
    """Returns matrices from Glorot's normal distribution, and biases of zero."""
    sizes = {"hidden": d_k, "logits": max_length}
    arrays = {}
    for (name, size), key in zip(sizes.items(), jax.random.split(rng), strict=True):
        noise = jax.random.normal(key, (num_heads, d_k, size), jnp.float32)
        arrays[name] = ((2 / (d_k + size)) ** 0.5 * noise).astype(dtype)
        arrays[f"{name}_bias"] = jnp.zeros((num_heads, size), dtype)
    return arrays


DENSE_SYNTHESIZER_ATTENTION = dataclasses.replace(
    SYNTHESIZER_ATTENTION,
    name="dense_synthesizer",
    function=dense_synthesizer_attention,
    reference="Tay et al. (2020), equations 1 to 3",
    parameters=_init_dense,
)
