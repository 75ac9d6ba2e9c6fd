"""Scores published before the scaled dot product: additive (Bahdanau) and general (Luong).

Luong's other two scores need no separate function. "dot" is `dot_product_attention` with `scale=1.0`. "concat", which
multiplies the concatenation [query; key] by one matrix, is `additive_attention` with the two halves of that matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dense import attention_from_logits
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    shard_like_query,
    statistics_dtype,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option


@weights_on_request
@shard_like_query
@zeros_where_empty
def additive_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K J"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    w_query: Float[Array, "H F"] | Float[Array, "N H F"] | None,
    w_key: Float[Array, "J F"] | Float[Array, "K J F"] | None,
    v: Float[Array, " F"] | Float[Array, "N F"],
    coverage: Float[Array, "#B #N #T #S"] | None = None,
    w_coverage: Float[Array, " F"] | Float[Array, "N F"] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(v . tanh(W_q q + W_k k)) V for every head: a hidden layer scores each pair of query and key.

    Section 3.1 and appendix A.1.2 of Bahdanau et al. (2015, https://arxiv.org/abs/1409.0473). The concatenated form
    v . tanh(W [q; k]), which is "concat" of Luong et al. (2015, https://arxiv.org/abs/1508.04025), is the same with
    `w_query, w_key = jnp.split(w, [H])`. Bind the parameters to make it an attention like any other:
    `functools.partial(additive_attention, w_query=..., w_key=..., v=...)`.

    `coverage` c is the attention that each key got from earlier queries. With it, the score is
    v . tanh(W_q q + W_k k + w_c c): equation 11 of See et al. (2017, https://arxiv.org/abs/1704.04368), after Tu et al.
    (2016). A decoder adds the weights of each step to c; `coverage_loss` penalizes attending to the same keys again.

    The hidden layer of all pairs, [B, N, T, S, F], is never stored, not even for the gradient: queries are scored block
    by block, and no block is larger than the scores or the keys.

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, J]; K divides N, and the sizes of queries and keys may differ.
      value: values, [B, S, K, U].
      bias: added to the scores, broadcastable to [B, N, T, S]. Minus infinity
        hides a key; a `mask` takes less memory.
      mask: True where a query may attend, broadcastable to [B, N, T, S]. A query that sees no key gets zeros.
      w_query: W_q, [H, F] shared by all heads, or [N, H, F], one matrix per head. None means that `query` is already
        projected.
      w_key: W_k, [J, F] or [K, J, F]. None means that `key` is already projected: a decoder can project the keys once,
        before its first step.
      v: [F] or [N, F].
      coverage: c of each pair, broadcastable to [B, N, T, S]; differentiable.
      w_coverage: w_c, [F] or [N, F]; required with `coverage`.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the scores; None means 1.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the softmax weights, before dropout.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of output and weights,
      [B, N, T, S]. Hidden layer, scores and weights are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, or a mask is not boolean or not of rank 4.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> parameters = {"w_query": jnp.ones((4, 5)), "w_key": jnp.ones((4, 5)), "v": jnp.ones(5)}
    >>> jax.jit(additive_attention)(x, x, x, **parameters).shape
    (1, 3, 2, 4)
    """
    hidden_query, hidden_key = _multiplied(query, w_query, "query"), _multiplied(key, w_key, "key")
    n, f = hidden_query.shape[2:]
    if hidden_key.shape[3] != f or v.shape not in ((f,), (n, f)):
        raise ValueError(
            f"the hidden layer must have one width F: queries have {f}, keys {hidden_key.shape[3]}, v has shape "
            f"{v.shape}, required is [F] or [N, F]"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have equal batch sizes, got {query.shape[0]} != {key.shape[0]}")
    if n % hidden_key.shape[2]:
        raise ValueError(f"the number of key heads must divide {n} query heads, got {hidden_key.shape[2]} key heads")
    coverage_arrays = _broadcast_coverage(coverage, w_coverage, hidden_query, key.shape[1])
    v = jnp.broadcast_to(v.astype(hidden_query.dtype), (n, f))
    scores = _additive_scores(hidden_query, hidden_key, v, coverage_arrays)
    out, weights = attention_from_logits(
        scores if scale is None else scores * scale,
        value,
        bias,
        mask,
        is_causal=is_causal,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
    )
    out = out.astype(query.dtype)
    return (out, weights) if return_weights else out


@weights_on_request
@shard_like_query
@zeros_where_empty
def general_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K J"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    w: Float[Array, "H J"] | Float[Array, "N H J"],
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(q . W k) V for every head; queries and keys may differ in size.

    The score "general" in section 3.1 of Luong et al. (2015, https://arxiv.org/abs/1508.04025), also called bilinear.
    If W is the identity, it is their score "dot".

    Args:
      query: queries, [B, T, N, H].
      key: keys, [B, S, K, J].
      value: values, [B, S, K, U].
      bias: as in `dot_product_attention`, like all arguments below but `w` and `scale`.
      mask: True where a query may attend, broadcastable to [B, N, T, S].
      w: [H, J] shared by all heads, or [N, H, J], one matrix per head.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the scores; None means 1.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]).
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      return_weights: also return the softmax weights, before dropout.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if shapes do not match, or a mask is not boolean or not of rank 4.

    >>> query, key = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 5, 2, 6))
    >>> jax.jit(general_attention)(query, key, key, w=jnp.ones((4, 6))).shape
    (1, 3, 2, 6)
    """
    return dot_product_attention(
        _multiplied(query, w, "query").astype(query.dtype),
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        scale=1.0 if scale is None else scale,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )


def attentional_vector(
    context: Float[Array, "*shape U"], state: Float[Array, "*shape H"], w: Float[Array, "U+H D"]
) -> Float[Array, "*shape D"]:
    """Computes tanh([context; state] W) from a decoder state and its attention context: equation 5 of Luong et al.

    Luong's decoder (2015) predicts the next word from this vector. Bahdanau's decoder does not have it: there the
    context is an input of the next step of the recurrent cell, together with the previous word.

    >>> attentional_vector(jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.ones((7, 5))).shape
    (2, 5)
    """
    return jnp.tanh(jnp.concatenate([context, state], axis=-1) @ w.astype(state.dtype))


def coverage_loss(weights: Float[Array, "*batch S"], coverage: Float[Array, "*batch S"]) -> Float[Array, "*batch"]:
    """Sums min(a, c) over keys: how much of a query's attention goes to keys that earlier queries attended to.

    Equation 12 of See et al. (2017, https://arxiv.org/abs/1704.04368), who add it to the loss of each target token. It
    is 0 for the first query and for a query that attends to new keys only, and at most the sum of the query's weights.

    Args:
      weights: a, the attention of each query.
      coverage: c, the sum of the weights of the queries before it (equation 10).

    >>> coverage_loss(jnp.array([0.25, 0.75, 0.0]), jnp.array([0.5, 0.5, 1.0])).item()
    0.75
    """
    return jnp.minimum(weights, coverage).sum(axis=-1)


def _broadcast_coverage(
    coverage: Array | None, w_coverage: Array | None, query: Float[Array, "B T N F"], num_keys: int
) -> tuple[Float[Array, "B N T S"], Float[Array, "N F"]] | None:
    """Checks coverage and w_coverage and broadcasts them, in the dtype of `query`; None if both are None.

    Raises:
      ValueError: if only one of them is given, or a shape does not fit.
    """
    if coverage is None and w_coverage is None:
        return None
    if coverage is None or w_coverage is None:
        raise ValueError("coverage and w_coverage go together: give both or neither")
    b, t, n, f = query.shape
    full = b, n, t, num_keys
    if coverage.ndim != 4 or any(
        size not in (1, required) for size, required in zip(coverage.shape, full, strict=True)
    ):
        raise ValueError(f"coverage must be broadcastable to [B, N, T, S] = {full}, got shape {coverage.shape}")
    if w_coverage.shape not in ((f,), (n, f)):
        raise ValueError(f"w_coverage must have shape [{f}] or [{n}, {f}], got {w_coverage.shape}")
    coverage, w_coverage = coverage.astype(query.dtype), w_coverage.astype(query.dtype)
    return jnp.broadcast_to(coverage, full), jnp.broadcast_to(w_coverage, (n, f))


def _multiplied(
    x: Float[Array, "B T N H"], kernel: Float[Array, "H F"] | Float[Array, "N H F"] | None, name: str
) -> Float[Array, "B T N F"]:
    """Multiplies every head by the shared kernel or by the head's kernel, in float32 at least; None only casts.

    `name` is that of `x` in error messages.
    """
    if x.ndim != 4:
        raise ValueError(f"{name} must have rank 4, [batch, length, heads, size], got shape {x.shape}")
    dtype = statistics_dtype(x)
    if kernel is None:
        return x.astype(dtype)
    heads, size = x.shape[2:]
    if kernel.ndim not in (2, 3) or kernel.shape[-2] != size or kernel.shape[:-2] not in ((), (heads,)):
        raise ValueError(
            f"kernel of the {name} must have shape [{size}, F] or [{heads}, {size}, F] to fit a {name} of shape "
            f"{x.shape}, got {kernel.shape}"
        )
    kernel = kernel.astype(x.dtype)
    if kernel.ndim == 2:
        return jnp.einsum("BTNH,HF->BTNF", x, kernel, preferred_element_type=dtype)
    # Heads come first: XLA for CPUs (jax 0.10) cannot run a bfloat16 product whose batch axis is an inner one.
    rows = x.transpose(2, 0, 1, 3).reshape(heads, -1, size)
    product = jnp.einsum("NXH,NHF->NXF", rows, kernel, preferred_element_type=dtype)
    return product.reshape(heads, *x.shape[:2], -1).transpose(1, 2, 0, 3)


def _additive_scores(
    query: Float[Array, "B T N F"],
    key: Float[Array, "B S K F"],
    v: Float[Array, "N F"],
    coverage_arrays: tuple[Float[Array, "B N T S"], Float[Array, "N F"]] | None = None,
) -> Float[Array, "B N T S"]:
    """Computes v . tanh(q + k), with coverage v . tanh(q + k + w c), for all pairs, one block of queries at a time."""
    b, t, n, f = query.shape
    s, k = key.shape[1:3]
    # With ceil(T / F) queries in a block, its hidden layer is about as large as the scores, or as the keys if T < F.
    block = -(-t // min(t, f))  # -(-x // y) rounds the quotient up
    num_blocks = -(-t // block)

    def blocks_of(x: Float[Array, "B T N X"]) -> Float[Array, "blocks B K G C X"]:
        """Cuts queries into blocks of C and their N heads into G heads for each of K key heads."""
        padded = jnp.pad(x, ((0, 0), (0, num_blocks * block - t), (0, 0), (0, 0)))
        return padded.reshape(b, num_blocks, block, k, n // k, x.shape[-1]).transpose(1, 0, 3, 4, 2, 5)

    blocks = blocks_of(query)
    key = key.transpose(0, 2, 1, 3)[:, :, None, None]  # [B, K, 1, 1, S, F]
    v = v.reshape(1, k, n // k, 1, 1, f)  # [1, K, G, 1, 1, F]
    coverage = w = None
    if coverage_arrays is not None:
        coverage, w_coverage = coverage_arrays
        coverage, w = blocks_of(coverage.swapaxes(1, 2)), w_coverage.reshape(v.shape)

    # The backward pass recomputes tanh. prevent_cse adds barriers that a loop does not need.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block_scores(rows: tuple[Float[Array, "B K G C F"], Float[Array, "B K G C S"] | None]) -> Array:
        """Computes the scores of one block of queries, [B, K, G, C, S]."""
        query, coverage = rows
        hidden = query[..., None, :] + key  # [B, K, G, C, S, F]
        if coverage is not None and w is not None:
            hidden = hidden + coverage[..., None] * w
        return (v * jnp.tanh(hidden)).sum(axis=-1)  # unlike a dot product, the sum is fused with tanh

    scores = jax.lax.map(block_scores, (blocks, coverage))
    return jnp.moveaxis(scores, 0, 3).reshape(b, n, num_blocks * block, s)[:, :, :t]


def _additive_of_heads(query: Array, key: Array, *arguments: Any, d_hidden: int | None = None, **options: Any) -> Any:
    """Calls `additive_attention` with the keys repeated, so that each query head has its own `w_key`."""
    del d_hidden  # an option of the initializer only
    if key.shape[2] and not query.shape[2] % key.shape[2]:
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)  # [B, S, N, H]
    return additive_attention(query, key, *arguments, **options)


def _init_additive(
    rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, d_hidden: int | None = None, **_: Any
) -> dict[str, Array]:
    """Initializes the parameters of `additive_attention`; the hidden layer has `d_hidden` units, d_k by default."""
    d_hidden = d_hidden or d_k
    init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0)
    rng_query, rng_key, rng_v = jax.random.split(rng, 3)
    return {
        "w_query": init(rng_query, (num_heads, d_k, d_hidden), dtype),
        "w_key": init(rng_key, (num_heads, d_k, d_hidden), dtype),
        "v": jax.nn.initializers.normal(d_hidden**-0.5)(rng_v, (num_heads, d_hidden), dtype),
    }


def _init_general(rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, **_: Any) -> dict[str, Array]:
    """Initializes W so that the attention starts as the scaled dot product."""
    del rng
    return {"w": jnp.tile(jnp.eye(d_k, dtype=dtype)[None] * d_k**-0.5, (num_heads, 1, 1))}


ADDITIVE = AttentionSpec(
    name="additive",
    function=_additive_of_heads,
    reference="Bahdanau et al. (2015), appendix A.1.2",
    options={"d_hidden": Option("width of the hidden layer; None means the head size", at_least=1)},
    parameters=_init_additive,
    decoding=lambda **options: CachedDecoding(),
)
GENERAL = AttentionSpec(
    name="general",
    function=general_attention,
    reference="Luong et al. (2015), section 3.1",
    parameters=_init_general,
    decoding=lambda **options: CachedDecoding(),
)
