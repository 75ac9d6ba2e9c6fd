"""Scaled dot-product attention, equation 1 of "Attention Is All You Need"."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dense import attention_from_logits, dot_product_logits, dot_product_weights
from tfx_jax.functional.attention.implementations import best_kernels, is_undivided, kernel_attention
from tfx_jax.functional.attention.masks import Bias, Mask, SegmentIds, check_shapes
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option, Visibility
from tfx_jax.functional.attention.wrappers import divided_as_queries, weights_on_request


@weights_on_request
@divided_as_queries
def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: SegmentIds | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: Literal["xla", "chunked", "cudnn", "splash", "flash", "rows"] | None = None,
    return_weights: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"]]:
    r"""Computes softmax(scale * Q K^T + bias) V for every head.

    Equation 1 of "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762); with K < N
    heads of keys and values, the grouped queries of Ainslie et al. (2023, https://arxiv.org/abs/2305.13245).

    Args:
      query: queries, [B, T, N, H]; H is the paper's d_k.
      key: keys, [B, S, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, S, K, U]; U is the paper's d_v and may differ from H.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. Minus infinity
        hides a key, but `mask` does so with less.
      mask: True where a query may attend, broadcastable to [B, N, T, S]. A query that may see no key gets a zero
        output, never a NaN and never the mean value. Hidden keys and values change nothing, but must be finite: 0 * NaN
        is NaN.
      is_causal: query t sees keys 0 .. t + S - T only.
      scale: multiplies the logits; None means 1 / sqrt(H). T5 passes 1.0.
      segment_ids: packed sequences, [B, T] for self-attention or a pair ([B, T], [B, S]); a query sees the keys of its
        own segment, and segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      implementation: what computes the same values. "xla" is the formula as it stands, "chunked" needs memory linear in
        the length (`chunked_attention`), and both take everything. Kernels have one derivative, in reverse, and but for
        "rows" no dropout; "cudnn" is for NVIDIA GPUs, half precision and d_v = d_k, in linear memory but with a bias,
        segments, or padding beside causality; those for TPUs are "splash", without bias, with padding masks only;
        "flash", with a bias, K = N and d_v = d_k; and "rows", which keeps nothing for the gradient, without bias or
        segments, with padding masks only, K = N, d_v = d_k, and lengths that are multiples of 128 up to 1024. No
        compiler divides kernels over devices: call them in `jax.shard_map`, those for TPUs with `check_vma=False`. None
        is "splash" or "cudnn", whichever the program is lowered for, where lengths are 1024 or more, there is no bias
        nor a mask of all pairs, it takes what is asked, and the call is in `jax.shard_map` or there is but one device;
        otherwise it is "xla".
      return_weights: also return the softmax weights, before dropout; the formula computes them, whatever else.

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`; with `return_weights` a pair of these and the weights,
      [B, N, T, S]. Logits, softmax and weights are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if the sizes do not fit together, a mask is not boolean or not of rank 4, or the implementation cannot
        do what is asked for.

    >>> import jax
    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> attend = jax.jit(dot_product_attention, static_argnames=("is_causal", "return_weights"))
    >>> out, weights = attend(x, x, x, is_causal=True, return_weights=True)
    >>> out.shape, weights[0, 0].round(2).tolist()[:2]
    ((1, 3, 2, 4), [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    """
    check_shapes(query, key, value, bias, mask)
    options: dict[str, Any] = {"is_causal": is_causal, "segment_ids": segment_ids}
    dropping: dict[str, Any] = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    if implementation is None:
        arrays = query, key, value, bias, mask
        kernels = best_kernels(*arrays, scale=scale, return_weights=return_weights, **options, **dropping)
        if kernels and is_undivided():
            return _best_of(kernels, query, key, value, mask, segment_ids, is_causal=is_causal, scale=scale)
        implementation = "xla"
    if implementation != "xla":
        out = kernel_attention(implementation, query, key, value, bias, mask, scale=scale, **options, **dropping)
        return (out, dot_product_weights(query, key, bias, mask, scale=scale, **options)) if return_weights else out
    logits = dot_product_logits(query, key, scale)
    out, weights = attention_from_logits(logits, value, bias, mask, **options, **dropping)
    out = out.astype(query.dtype)
    return (out, weights) if return_weights else out


def _best_of(
    kernels: dict[str, str],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask | None,
    segment_ids: SegmentIds | None,
    **options: Any,
) -> Float[Array, "B T N U"]:
    """Attends by the kernel of the platform that this is lowered for, which may be another than this one."""

    def by(name: str, query: Array, key: Array, value: Array, mask: Mask | None, ids: SegmentIds | None) -> Any:
        attend = functools.partial(dot_product_attention, query, key, value, mask=mask, segment_ids=ids, **options)
        try:
            return attend(implementation=name)
        except ValueError:  # not even traced: cuDNN where there is no CUDA, Pallas where shard_map has check_vma
            return attend(implementation="xla")

    branches = {platform: functools.partial(by, name) for platform, name in kernels.items()}
    arrays = query, key, value, mask, segment_ids
    return jax.lax.platform_dependent(*arrays, default=functools.partial(by, "xla"), **branches)


@functools.cache
def decode_densely(is_visible: Visibility | None = None, scale: float | None = None) -> CachedDecoding:
    """Returns the decoding of an attention that is dense over the keys that `is_visible` shows."""
    attend = dot_product_attention if scale is None else functools.partial(dot_product_attention, scale=scale)
    return CachedDecoding(attend, is_visible)


DENSE = AttentionSpec(
    name="dense",
    function=dot_product_attention,
    reference="Vaswani et al. (2017), equation 1",
    is_exact=True,
    decoding=lambda scale=None, **_: decode_densely(scale=scale),
)
CHUNKED = dataclasses.replace(
    DENSE,
    name="chunked",
    function=chunked_attention,
    reference="Rabe and Staats (2021)",
    options={"chunk_size": Option("queries and keys computed together")},
    example=lambda length: {"chunk_size": max(length // 4, 4)},
)
SPLASH = dataclasses.replace(
    DENSE,
    name="splash",
    function=functools.partial(dot_product_attention, implementation="splash"),
    reference="Pallas kernel of JAX for TPUs",
    bias=False,
    dropout=False,
    platform="tpu",
)
FLASH = dataclasses.replace(
    DENSE,
    name="flash",
    function=functools.partial(dot_product_attention, implementation="flash"),
    reference="Pallas kernel of JAX for TPUs",
    grouped_queries=False,
    dropout=False,
    platform="tpu",
)
CUDNN = dataclasses.replace(
    DENSE,
    name="cudnn",
    function=functools.partial(dot_product_attention, implementation="cudnn"),
    reference="cuDNN through jax.nn",
    dropout=False,
    bfloat16_only=True,
    platform="gpu",
)
