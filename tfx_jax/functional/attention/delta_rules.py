"""Delta rules: linear attention that overwrites the value stored for a key, with or without decay.

`recurrent` has their state, the chunked computation and decoding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfx_jax.functional.attention.linear_recurrences import RETENTION, init_steps_and_rates, steps_and_rates
from tfx_jax.functional.attention.recurrent import (
    Updates,
    check_recurrent,
    decoding_of_updates,
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
from tfx_jax.functional.attention.spec import RecurrentDecoding


@weights_on_request
@shard_like_query
@zeros_where_empty
def delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    beta: Float[Array, "B S K"],
    is_causal: bool = True,
    scale: float | None = None,
    block_size: int = 64,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes o_t = scale * S_t^T q_t with S_t = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T: values are overwritten.

    The fast weights of Schlag et al. (2021, https://arxiv.org/abs/2102.11174, equations 23 to 25), in the form of
    DeltaNet (Yang et al., 2024, https://arxiv.org/abs/2406.06484): this function divides queries and keys by their
    length, and b_t = sigmoid(beta_t) is the share of the value stored for k_t that is replaced. `recurrent_decoding`
    decodes with a state of constant size.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H]; K divides N, and query head n reads the state of key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      beta: logits of the write strength, [B, S, K].
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies the normalized queries; None means 1 / sqrt(H).
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

    >>> key, value = jnp.ones((1, 3, 1, 1)), jnp.array([2.0, 3.0, 5.0]).reshape(1, 3, 1, 1)
    >>> jax.jit(delta_rule)(key, key, value, beta=jnp.full((1, 3, 1), 99.0)).ravel().round().tolist()
    [2.0, 3.0, 5.0]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    check_recurrent("delta rule", query, key, value, bias, mask, beta=(beta, key.shape[2:3]), **options)
    return recurrent_attention(
        _normalized(query, scale),
        _delta(key, beta=beta),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


def _delta(key: Float[Array, "B S K H"], beta: Float[Array, "B S K"]) -> Updates:
    """Returns the updates of the state by each key in `delta_rule`, without decay."""
    beta = jax.nn.sigmoid(to_float32(beta))
    return Updates(_unit(key), log_decay=jnp.zeros_like(beta)[..., None], beta=beta)


@weights_on_request
@shard_like_query
@zeros_where_empty
def gated_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    beta: Float[Array, "B S K"],
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
    r"""Computes `delta_rule` of a state that decays: S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T.

    Equation 10 of "Gated Delta Networks" (Yang et al., 2024, https://arxiv.org/abs/2412.06464), with the decay
    a_t = exp(-rate softplus(dt_t + dt_bias)) of Mamba-2, rate = exp(log_rate_scale). Qwen3-Next also has a convolution
    before this function and a norm and a gate after it, which are not part of it. As in `delta_rule`, the function
    divides queries and keys by their length: pass them without normalization. `recurrent_decoding` decodes with a state
    of constant size.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H]; K divides N, and query head n reads the state of key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      beta: logits of the write strength, [B, S, K].
      dt: step sizes before bias and softplus, [B, S, K].
      log_rate_scale: logarithm of the decay rate, [K]; the start that the paper trains from is that of
        `SPECS["gated_delta_rule"].parameters`.
      dt_bias: added to `dt`, [K].
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies the normalized queries; None means 1 / sqrt(H).
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

    >>> x, large = jnp.ones((1, 2, 1, 1)), jnp.full((1, 2, 1), 99.0)
    >>> parameters = {"log_rate_scale": jnp.zeros(1), "dt_bias": jnp.zeros(1)}
    >>> jax.jit(gated_delta_rule)(x, x, x, beta=large, dt=large, **parameters).ravel().round(3).tolist()
    [1.0, 1.0]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    gates = {"beta": (beta, key.shape[2:3]), "dt": (dt, key.shape[2:3])}
    check_recurrent("gated delta rule", query, key, value, bias, mask, **gates, **options)
    return recurrent_attention(
        _normalized(query, scale),
        _gated_delta(key, beta=beta, dt=dt, log_rate_scale=log_rate_scale, dt_bias=dt_bias),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


@weights_on_request
@shard_like_query
@zeros_where_empty
def kimi_delta_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    beta: Float[Array, "B S K"],
    dt: Float[Array, "B S K H"],
    log_rate_scale: Float[Array, " K"],
    dt_bias: Float[Array, "K H"],
    is_causal: bool = True,
    scale: float | None = None,
    block_size: int = 64,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes `gated_delta_rule` with a separate decay per channel: diag(a_t) S_{t-1} instead of a_t S_{t-1}.

    Equation 1 of "Kimi Linear" (2025, https://arxiv.org/abs/2510.26692). As in `delta_rule`, the function
    divides queries and keys by their length: pass them without normalization. `recurrent_decoding` decodes with a state
    of constant size.

    Args:
      query: queries, [B, T, N, H], at the last T of the S positions.
      key: keys, [B, S, K, H]; K divides N, and query head n reads the state of key head n // (N / K).
      value: values, [B, S, K, U].
      bias: must be None: the logit of a pair, which a bias is added to, is never computed.
      mask: padding, [B or 1, 1, 1, S]. Hidden keys do not change the state; it does not decay at padding either.
      beta: logits of the write strength, [B, S, K].
      dt: step sizes before bias and softplus, [B, S, K, H].
      log_rate_scale: logarithm of the decay rate, [K]; the start that the paper trains from is that of
        `SPECS["kimi_delta"].parameters`.
      dt_bias: added to `dt`, [K, H].
      is_causal: must be true, because the state holds past tokens only.
      scale: multiplies the normalized queries; None means 1 / sqrt(H).
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

    >>> x, large = jnp.ones((1, 2, 1, 1)), jnp.full((1, 2, 1), 99.0)
    >>> parameters = {"log_rate_scale": jnp.zeros(1), "dt_bias": jnp.zeros((1, 1))}
    >>> jax.jit(kimi_delta_attention)(x, x, x, beta=large, dt=99 * x, **parameters).ravel().round(3).tolist()
    [1.0, 1.0]
    """
    options = {"is_causal": is_causal, "block_size": block_size, "dropout_rate": dropout_rate}
    gates = {"beta": (beta, key.shape[2:3]), "dt": (dt, key.shape[2:])}
    check_recurrent("Kimi delta", query, key, value, bias, mask, **gates, **options)
    return recurrent_attention(
        _normalized(query, scale),
        _gated_delta(key, beta=beta, dt=dt, log_rate_scale=log_rate_scale, dt_bias=dt_bias),
        value,
        mask,
        segment_ids,
        dtype=query.dtype,
        block_size=block_size,
        return_weights=return_weights,
    )


def _gated_delta(
    key: Float[Array, "B S K H"],
    beta: Float[Array, "B S K"],
    dt: Float[Array, "B S K *Z"],
    log_rate_scale: Float[Array, " K"],
    dt_bias: Float[Array, "K *Z"],
) -> Updates:
    """Returns the updates of the state by each key in both gated rules.

    `dt` has one step size per head, [B, S, K], in `gated_delta_rule`, or per channel, [B, S, K, H], in
    `kimi_delta_attention`.
    """
    key = _unit(key)
    step, rate = steps_and_rates(key, dt, log_rate_scale, dt_bias)
    log_decay = -rate * step
    log_decay = log_decay if dt.ndim == 4 else log_decay[..., None]
    return Updates(key, log_decay, jax.nn.sigmoid(to_float32(beta)))


def _unit(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Divides vectors by their length, in float32 at least; the epsilon is that of the reference implementations."""
    x = to_float32(x)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _normalized(query: Float[Array, "B T N H"], scale: float | None) -> Float[Array, "B T N H"]:
    """Returns queries of length `scale`; None means 1 / sqrt(H)."""
    return _unit(query) * (query.shape[-1] ** -0.5 if scale is None else scale)


def _decode_delta(scale: float | None = None, block_size: int = 64) -> RecurrentDecoding:
    """Returns decoding of `delta_rule`."""
    return decoding_of_updates(_delta, functools.partial(_normalized, scale=scale), block_size)


def _decode_gated_delta(scale: float | None = None, block_size: int = 64) -> RecurrentDecoding:
    """Returns decoding of `gated_delta_rule` and `kimi_delta_attention`."""
    return decoding_of_updates(_gated_delta, functools.partial(_normalized, scale=scale), block_size)


DELTA_RULE = dataclasses.replace(
    RETENTION,
    name="delta_rule",
    function=delta_rule,
    reference="Schlag et al. (2021); DeltaNet: Yang et al. (2024)",
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"beta": (num_kv_heads,)},
    decoding=_decode_delta,
)
GATED_DELTA_RULE = dataclasses.replace(
    RETENTION,
    name="gated_delta_rule",
    function=gated_delta_rule,
    reference="Gated DeltaNet: Yang et al. (2024), equation 10",
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"beta": (num_kv_heads,), "dt": (num_kv_heads,)},
    parameters=lambda rng, *, num_kv_heads, dtype, **_: init_steps_and_rates(rng, num_kv_heads, dtype),
    decoding=_decode_gated_delta,
)
KIMI_DELTA_ATTENTION = dataclasses.replace(
    GATED_DELTA_RULE,
    name="kimi_delta",
    function=kimi_delta_attention,
    reference="Kimi Linear (2025), equation 1",
    gates=lambda num_heads, num_kv_heads, d_k, **_: {"beta": (num_kv_heads,), "dt": (num_kv_heads, d_k)},
    parameters=lambda rng, *, num_kv_heads, d_k, dtype, **_: init_steps_and_rates(rng, num_kv_heads, dtype, d_k),
)
