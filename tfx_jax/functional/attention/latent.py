"""Multi-head latent attention of DeepSeek-V2 and V3: keys and values of all heads come from one small vector."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    SegmentIds,
    check_shapes,
    shard_like_query,
    weights_on_request,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, HeadSizes, Option


@weights_on_request
@shard_like_query
def latent_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K R"],
    value: Float[Array, "B S K C"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    key_up: Float[Array, "N C H-R"],
    value_up: Float[Array, "N C U"],
    absorbed: bool | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax attention with keys [r, c W_K] and values c W_V of each head, of a latent c.

    Section 2.1 of "DeepSeek-V2" (2024, https://arxiv.org/abs/2405.04434), equations 9 to 19. Only a
    rotary key r and a latent c, R + C numbers per token, have to be cached. Two forms give the same result. The
    expanded one computes keys and values of all heads. The absorbed one does not: queries [q_r, q_c W_K^T] attend to
    [r, c] itself, and the weighted mean of c is multiplied by W_V afterwards.

    Args:
      query: [B, T, N, H]: first q_r, R features, already rotated, for the rotary key, then q_c, H - R features.
        Arguments without explanation are those of `dot_product_attention`.
      key: r, already rotated, [B, S, K, R]; the paper has K = 1, one for all heads.
      value: latents c, [B, S, K, C]; this function does not normalize them.
      bias: added to the scaled logits.
      mask: True where a query may attend.
      key_up: W_K, [N, C, H - R].
      value_up: W_V, [N, C, U].
      absorbed: True for the absorbed form, False for the expanded one. None means the absorbed one if T < S: with few
        queries and a cache it reads less memory.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H).
      segment_ids: packed sequences.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key.
      return_weights: also return the weights.

    Returns:
      The same results as `dot_product_attention`.

    Raises:
      ValueError: if R > H, a matrix has the wrong shape, or in the cases of `dot_product_attention`.

    >>> x = jnp.arange(2.0).reshape(1, 2, 1, 1)
    >>> eye = jnp.ones((1, 1, 1))
    >>> jax.jit(latent_attention)(0 * jnp.ones((1, 2, 1, 2)), x, x, key_up=eye, value_up=6 * eye).ravel().tolist()
    [3.0, 3.0]
    """
    n, h, r, (k, c) = *query.shape[-2:], key.shape[-1], value.shape[-2:]
    if r > h:
        raise ValueError(f"the rotary keys must be at most as wide as the queries, H={h}, got R={r}")
    check_shapes(query[..., :r], key, value, bias, mask)
    if key_up.shape != (n, c, h - r):
        raise ValueError(f"key_up must have shape [N, C, H - R] = {(n, c, h - r)}, got {key_up.shape}")
    if value_up.ndim != 3 or value_up.shape[:2] != (n, c):
        raise ValueError(f"value_up must have shape [N, C, U] with N, C = {(n, c)}, got {value_up.shape}")
    scale = h**-0.5 if scale is None else scale
    is_absorbed = query.shape[1] < key.shape[1] if absorbed is None else absorbed
    if is_absorbed:
        latent_query = jnp.einsum("BTNH,NCH->BTNC", query[..., r:], key_up.astype(query.dtype))  # q_c W_K^T
        query = jnp.concatenate([query[..., :r], latent_query], axis=-1)
        key = jnp.concatenate([key, value.astype(key.dtype)], axis=-1)
    else:
        key, latent = (jnp.repeat(x, n // k, axis=2) for x in (key, value))
        content_key = jnp.einsum("BSNC,NCH->BSNH", latent, key_up.astype(latent.dtype))  # c W_K
        key = jnp.concatenate([key, content_key.astype(key.dtype)], axis=-1)
        value = jnp.einsum("BSNC,NCU->BSNU", latent, value_up.astype(latent.dtype))
    result = dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        scale=scale,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        return_weights=return_weights,
    )
    out, *weights = result if isinstance(result, tuple) else (result,)
    if is_absorbed:
        out = jnp.einsum("BTNC,NCU->BTNU", out, value_up.astype(out.dtype))
    return (out, weights[0]) if weights else out


def _size_of_rotary_key(d_k: int, rope_size: int | None) -> int:
    """Returns `rope_size`, or half of a head, d_k, if it is None; raises ValueError if it is above d_k."""
    size = max(d_k // 2, 1) if rope_size is None else rope_size
    if size > d_k:
        raise ValueError(f"rope_size={size} must be at most the size of a head, d_k={d_k}")
    return size


def _attend_with_split_key(
    query: Array, key: Array, *arguments: Any, rope_size: int | None = None, **options: Any
) -> Any:
    """Calls `latent_attention` with the first `rope_size` features of `key` as the rotary key; None: half a head."""
    return latent_attention(query, key[..., : _size_of_rotary_key(query.shape[-1], rope_size)], *arguments, **options)


def _head_sizes(
    d_k: int, rope_size: int | None = None, latent_size: int | None = None, value_size: int | None = None
) -> HeadSizes:
    """Returns the sizes of a rotary key, a latent, and the value of a head that is computed from it."""
    return HeadSizes(_size_of_rotary_key(d_k, rope_size), latent_size or d_k, value_size or d_k)


def _init_up(rng: Array, *, num_heads: int, d_k: int, dtype: DTypeLike, **options: Any) -> dict[str, Array]:
    """Returns `key_up` and `value_up` from a normal distribution of variance 1 / C."""
    sizes = _head_sizes(d_k, **{name: size for name, size in options.items() if name in LATENT.options})
    arrays: dict[str, Array] = {}
    for (name, size), key in zip(
        {"key_up": d_k - sizes.key, "value_up": sizes.output}.items(), jax.random.split(rng), strict=True
    ):
        noise = jax.random.normal(key, (num_heads, sizes.value, size), jnp.float32)
        arrays[name] = (noise * sizes.value**-0.5).astype(dtype)
    return arrays


# In a layer, the value projections compute the latents, one for each of num_kv_heads; the paper has one.
LATENT = AttentionSpec(
    name="latent",
    function=_attend_with_split_key,
    reference="DeepSeek-V2 (2024), section 2.1",
    options={
        "rope_size": Option("first features of a query that are for the rotary key; None: half", at_least=1),
        "latent_size": Option("features of a latent; None: those of a query", at_least=1, is_passed=False),
        "value_size": Option("features of the value of a head; None: those of a query", at_least=1, is_passed=False),
    },
    head_sizes=_head_sizes,
    parameters=_init_up,
    decoding=lambda **options: CachedDecoding(),
)
