"""Softmax attention with forget gates: the Forgetting Transformer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention
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
from tfx_jax.functional.attention.spec import AttentionSpec


@weights_on_request
@shard_like_query
@zeros_where_empty
def forgetting_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    gate: Float[Array, "B S N"],
    is_causal: bool = True,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q K^T + D + bias) V with D_ts = sum of log sigmoid(gate_j) over s < j <= t.

    Equation 4 of "Forgetting Transformer" (Lin et al., 2025, https://arxiv.org/abs/2503.02130): each token lowers the
    logits of all earlier ones by its gate. No position encoding is needed. D is computed whole and added like a
    bias, so memory grows with T * S.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions. Arguments without explanation are those of
        `dot_product_attention`.
      key: [B, S, K, H].
      value: [B, S, K, U].
      bias: added to the scaled logits.
      mask: True where a query may attend. The gates of tokens that a padding mask, [B, 1, 1, S], hides are ignored;
        with a mask of pairs or of heads all gates count.
      gate: logits of the forget gates, [B, S, N].
      is_causal: must be true, because gates act on earlier tokens.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences; 0 is padding, whose gates are ignored.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if not causal, if the gate has the wrong shape, or in the cases of `dot_product_attention`.

    >>> x = jnp.zeros((1, 3, 1, 1))
    >>> attend = jax.jit(forgetting_attention, static_argnames="return_weights")
    >>> (21 * attend(x, x, x, gate=x[..., 0], return_weights=True)[1])[0, 0].round().tolist()
    [[21.0, 0.0, 0.0], [7.0, 14.0, 0.0], [3.0, 6.0, 12.0]]
    """
    check_shapes(query, key, value, bias, mask)
    (b, t, n, _), s = query.shape, key.shape[1]
    if not is_causal:
        raise ValueError(
            "forgetting attention is causal only, because its gates act on earlier tokens: pass is_causal=True"
        )
    if gate.shape != (b, s, n):
        raise ValueError(f"gate must have shape [B, S, N] = {(b, s, n)}, got {gate.shape}")
    log_forget = jax.nn.log_sigmoid(gate.astype(statistics_dtype(gate)))
    if mask is not None and mask.shape[1:3] == (1, 1):
        log_forget = jnp.where(mask[:, 0, 0, :, None], log_forget, 0)
    if segment_ids is not None:
        is_token = pair_of_segment_ids(segment_ids, b, t, s)[1] != 0
        log_forget = jnp.where(is_token[..., None], log_forget, 0)
    # Queries are at the last T positions: the gates up to each query, [B, N, T, S], those of later tokens being 0.
    is_past = np.arange(s)[None] <= np.arange(t)[:, None] + s - t
    gates = jnp.where(is_past[None, None], log_forget.swapaxes(1, 2)[:, :, None], 0)
    # Summed over the keys after each key. Differences of sums from the first token on would lose what follows a gate
    # that forgets everything, and would depend on the gates of other sequences.
    after = jnp.pad(gates[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    decay = jax.lax.cumsum(after, axis=3, reverse=True)
    return dot_product_attention(
        query,
        key,
        value,
        decay if bias is None else decay + bias.astype(decay.dtype),
        mask,
        is_causal=True,
        scale=scale,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )


FORGETTING_ATTENTION = AttentionSpec(
    name="forgetting",
    function=forgetting_attention,
    reference="Lin et al. (2025), equation 4",
    causal_only=True,
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"gate": (num_heads,)},
)
