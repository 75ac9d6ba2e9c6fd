"""Linear attention with a decaying state: retention, gated linear attention, state space duality (Mamba-2).

`recurrent` has their state, the chunked computation and decoding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.recurrent import (
    BLOCK_SIZE,
    Updates,
    check_recurrent,
    check_size,
    decoding_of_updates,
    per_channel,
    recurrent_attention,
    to_float32,
)
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    shard_like_query,
    weights_on_request,
    zeros_where_empty,
)
from tfx_jax.functional.attention.spec import AttentionSpec, Option, RecurrentDecoding


@weights_on_request
@shard_like_query
@zeros_where_empty
def retention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    decay: Float[Array, " K"] | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    block_size: int = 64,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes o_t = scale * S_t^T q_t with S_t = gamma_n S_{t-1} + k_t v_t^T: attention with a fixed decay per head.

    Equations 1 to 7 of "Retentive Network" (Sun et al., 2023, https://arxiv.org/abs/2307.08621) without the rotation of
    queries and keys; with gamma_n = exp(-slope_n) the lightning attention of MiniMax-01 (2025,
    https://arxiv.org/abs/2501.08313). In the parallel form the weight of key s is scale * q_t . k_s gamma_n^(t - s),
    where t - s counts tokens. It may be negative, and there is no softmax. Both papers normalize the output of each
    head; this function does not. `recurrent_decoding` decodes with a state of constant size.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H]; K divides N, query head n reads the state of key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      decay: gamma, [K], above 0 and at most 1; None means 1 - 2^(-5 - i), with i evenly spaced from 0 to 3 over heads.
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies queries; None means 1 / sqrt(H).
      block_size: tokens in a chunk, a power of two. Memory is linear in S * block_size and S / block_size * H * U.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding. The tokens of a sequence must be
        consecutive; each sequence starts with a state of zeros.
      dropout_rate: must be 0, because no weights are computed that could be dropped. Drop the output instead.
      dropout_rng: unused; part of the common signature.
      return_weights: also return the coefficient of each value in each output, quadratic in memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, S]. The
      state is float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, the mask is not a padding mask, or an option is out of range.

    >>> x = jnp.ones((1, 3, 1, 1))
    >>> jax.jit(retention)(x, x, x, decay=jnp.array([0.5])).ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    check_recurrent("retention", query, key, value, bias, mask, **options)
    return recurrent_attention(
        _scaled(query, scale),
        _retention(key, decay=decay),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


def _retention(key: Float[Array, "B S K H"], decay: Float[Array, " K"] | None = None) -> Updates:
    """Returns the updates of the state by each key in `retention`: the keys, and the decay of each head."""
    key, num_heads = to_float32(key), key.shape[2]
    if decay is None:
        exponents = np.linspace(0.0, 3.0, num_heads) if num_heads > 1 else np.zeros(1)
        decay = jnp.asarray(1 - 2 ** (-5 - exponents), key.dtype)
    check_size("decay", decay, num_heads)
    log_decay = jnp.log(decay.astype(key.dtype))[None, None, :, None]
    return Updates(key, jnp.broadcast_to(log_decay, (*key.shape[:3], 1)))


@weights_on_request
@shard_like_query
@zeros_where_empty
def gated_linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    gate: Float[Array, "B S K H"],
    temperature: float = 16.0,
    is_causal: bool = True,
    scale: float | None = None,
    block_size: int = 64,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes o_t = scale * S_t^T q_t with S_t = diag(a_t) S_{t-1} + k_t v_t^T: a decay per channel, from a gate.

    Section 4 of "Gated Linear Attention Transformers" (Yang et al., 2023, https://arxiv.org/abs/2312.06635), with
    a_t = sigmoid(gate_t)^(1 / temperature). `recurrent_decoding` decodes with a state of constant size.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H]; K divides N, and query head n reads the state of key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      gate: logits of the gates, [B, S, K, H].
      temperature: the paper's tau; a larger value means a slower decay.
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies queries; None means 1 / sqrt(H).
      block_size: tokens in a chunk, a power of two. Memory is linear in S * block_size and S / block_size * H * U.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding. The tokens of a sequence must be
        consecutive; each sequence starts with a state of zeros.
      dropout_rate: must be 0, because no weights are computed that could be dropped. Drop the output instead.
      dropout_rng: unused; part of the common signature.
      return_weights: also return the coefficient of each value in each output, quadratic in memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, S]. The
      state is float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, those of a gate included, the mask is not a padding mask, or an option is out
        of range.

    >>> x = jnp.ones((1, 3, 1, 1))
    >>> attend = jax.jit(gated_linear_attention, static_argnames="temperature")
    >>> attend(x, x, x, gate=0 * x, temperature=1.0).ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    check_recurrent("gated linear", query, key, value, bias, mask, gate=(gate, key.shape[2:]), **options)
    return recurrent_attention(
        _scaled(query, scale),
        _gated_linear(key, gate=gate, temperature=temperature),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


def _gated_linear(key: Float[Array, "B S K H"], gate: Float[Array, "B S K H"], temperature: float = 16.0) -> Updates:
    """Returns the updates of the state by each key in `gated_linear_attention`, with a decay per channel."""
    return Updates(to_float32(key), jax.nn.log_sigmoid(to_float32(gate)) / temperature)


@weights_on_request
@shard_like_query
@zeros_where_empty
def state_space_duality(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    dt: Float[Array, "B S K"],
    log_rate_scale: Float[Array, " K"],
    dt_bias: Float[Array, " K"],
    is_causal: bool = True,
    scale: float | None = None,
    block_size: int = 64,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes y_t = S_t^T C_t with S_t = exp(-rate d_t) S_{t-1} + d_t B_t x_t^T, the state space model of Mamba-2.

    Section 6 of "Transformers are SSMs" (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060): C are the queries, B the
    keys, x the values, d_t = softplus(dt_t + dt_bias) the step size and rate = exp(log_rate_scale) the paper's -A.
    Mamba-2's block also has a convolution before this function, and adds D x_t, a gate and a norm after it.
    `recurrent_decoding` decodes with a state of constant size.

    Args:
      query: C, [B, T, N, H], at the last T of the S positions.
      key: B, [B, S, K, H]; K divides N, and query head n reads the state of key head n // (N / K).
      value: x, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      dt: step sizes before bias and softplus, [B, S, K].
      log_rate_scale: logarithm of the decay rate, [K]; the start that the paper trains from is that of
        `SPECS["state_space_duality"].parameters`.
      dt_bias: added to `dt`, [K].
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies queries; None means 1.
      block_size: tokens in a chunk, a power of two. Memory is linear in S * block_size and S / block_size * H * U.
      segment_ids: packed sequences, [B, T] or a pair ([B, T], [B, S]); 0 is padding. The tokens of a sequence must be
        consecutive; each sequence starts with a state of zeros.
      dropout_rate: must be 0, because no weights are computed that could be dropped. Drop the output instead.
      dropout_rng: unused; part of the common signature.
      return_weights: also return the coefficient of each value in each output, quadratic in memory.

    Returns:
      [B, T, N, U] in the dtype of `query`; with `return_weights` a pair of output and weights, [B, N, T, S]. The
      state is float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, those of gates and parameters included, the mask is not a padding mask, or an
        option is out of range.

    >>> x, zeros = jnp.ones((1, 3, 1, 1)), jnp.zeros(1)
    >>> dt = jnp.full((1, 3, 1), float(jnp.log(jnp.e - 1)))  # steps of length 1
    >>> out = jax.jit(state_space_duality)(x, x, x, dt=dt, log_rate_scale=jnp.log(jnp.log(2 + zeros)), dt_bias=zeros)
    >>> (4 * out).ravel().round().tolist()
    [4.0, 6.0, 7.0]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    check_recurrent("state space", query, key, value, bias, mask, dt=(dt, key.shape[2:3]), **options)
    return recurrent_attention(
        _scaled(query, 1.0 if scale is None else scale),
        _state_space(key, dt=dt, log_rate_scale=log_rate_scale, dt_bias=dt_bias),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


def _state_space(
    key: Float[Array, "B S K H"],
    dt: Float[Array, "B S K"],
    log_rate_scale: Float[Array, " K"],
    dt_bias: Float[Array, " K"],
) -> Updates:
    """Returns the updates of the state by each key in `state_space_duality`: step size times key, with its decay."""
    key = to_float32(key)
    step, rate = steps_and_rates(key, dt, log_rate_scale, dt_bias)
    return Updates(key * per_channel(step[..., None], key.shape[-1]), -(rate * step)[..., None])


def steps_and_rates(
    key: Float[Array, "B S K H"],
    dt: Float[Array, "B S K *Z"],
    log_rate_scale: Float[Array, " K"],
    dt_bias: Float[Array, "K *Z"],
) -> tuple[Float[Array, "B S K *Z"], Float[Array, "#B #S K *#Z"]]:
    """Returns step sizes softplus(dt + dt_bias) and decay rates exp(log_rate_scale), both in the dtype of `key`.

    With Z = H there is a step for each channel, without Z one for each head.
    """
    check_size("log_rate_scale", log_rate_scale, key.shape[2])
    check_size("dt_bias", dt_bias, *dt.shape[2:])
    dt, log_rate, dt_bias = (x.astype(key.dtype) for x in (dt, log_rate_scale, dt_bias))
    return jax.nn.softplus(dt + dt_bias[None, None]), jnp.exp(log_rate).reshape(1, 1, -1, *(1,) * (dt.ndim - 3))


def init_steps_and_rates(rng: Array, num_heads: int, dtype: DTypeLike, *features: int) -> dict[str, Array]:
    """Initializes decay rates between 1 and 16 and step sizes between 0.001 and 0.1, as Mamba-2 does.

    Returns:
      `log_rate_scale`, [K], and `dt_bias`, [K, *features], with which softplus(dt_bias) is the step size.
    """
    rng_rate, rng_step = jax.random.split(rng)
    rate = jax.random.uniform(rng_rate, (num_heads,), jnp.float32, 1.0, 16.0)
    step = jnp.exp(jax.random.uniform(rng_step, (num_heads, *features), jnp.float32, np.log(0.001), np.log(0.1)))
    # log(expm1(x)) is the inverse of softplus.
    return {"log_rate_scale": jnp.log(rate).astype(dtype), "dt_bias": jnp.log(jnp.expm1(step)).astype(dtype)}


def _scaled(query: Float[Array, "B T N H"], scale: float | None) -> Float[Array, "B T N H"]:
    """Returns scaled queries in float32 at least; None means 1 / sqrt(H)."""
    return to_float32(query) * (query.shape[-1] ** -0.5 if scale is None else scale)


def _decode_retention(scale: float | None = None, block_size: int = 64) -> RecurrentDecoding:
    """Returns decoding of `retention` with the default decay."""
    return decoding_of_updates(_retention, functools.partial(_scaled, scale=scale), block_size)


def _decode_gated_linear(
    temperature: float = 16.0, scale: float | None = None, block_size: int = 64
) -> RecurrentDecoding:
    """Returns decoding of `gated_linear_attention`."""
    updates = functools.partial(_gated_linear, temperature=temperature)
    return decoding_of_updates(updates, functools.partial(_scaled, scale=scale), block_size)


def _decode_state_space(scale: float | None = None, block_size: int = 64) -> RecurrentDecoding:
    """Returns decoding of `state_space_duality`."""
    query_fn = functools.partial(_scaled, scale=1.0 if scale is None else scale)
    return decoding_of_updates(_state_space, query_fn, block_size)


RETENTION = AttentionSpec(
    name="retention",
    function=retention,
    reference="RetNet: Sun et al. (2023); lightning attention: MiniMax (2025)",
    options={"block_size": BLOCK_SIZE},
    causal_only=True,
    bias=False,
    dropout=False,
    decoding=_decode_retention,
)
GATED_LINEAR_ATTENTION = dataclasses.replace(
    RETENTION,
    name="gated_linear",
    function=gated_linear_attention,
    reference="Yang et al. (2023), section 4",
    options={
        "block_size": BLOCK_SIZE,
        "temperature": Option("temperature of the gates; a larger value means a slower decay", float, at_least=1),
    },
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"gate": (num_kv_heads, d_k)},
    decoding=_decode_gated_linear,
)
STATE_SPACE_DUALITY = dataclasses.replace(
    RETENTION,
    name="state_space_duality",
    function=state_space_duality,
    reference="Mamba-2: Dao and Gu (2024), section 6",
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"dt": (num_kv_heads,)},
    parameters=lambda rng, *, num_kv_heads, dtype, **_: init_steps_and_rates(rng, num_kv_heads, dtype),
    decoding=_decode_state_space,
)
