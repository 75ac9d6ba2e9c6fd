"""Scaled dot-product attention, equation 1 of "Attention Is All You Need"."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dense import Request, dense_attention, dot_product_weights, make_request
from tfx_jax.functional.attention.kernels import PLATFORMS, UnsupportedError, attend_by_kernel, check_kernel
from tfx_jax.functional.attention.signature import (
    Bias,
    Mask,
    MaskMod,
    ScoreMod,
    SegmentIds,
    Window,
    are_static_sizes,
    check_outputs,
    shard_like_query,
    weights_on_request,
    zero_past_lengths,
)
from tfx_jax.functional.attention.spec import AttentionSpec, CachedDecoding, Option, Visibility

Implementation = Literal["xla", "chunked", "cudnn", "splash", "flash", "rows"]

_BEST = ("splash", "cudnn")  # kernels that are used by default for long sequences

# The length from which kernels are the default. Compiler estimates for a TPU v5e, forward and backward pass, 8 rows, 8
# causal heads of size 64, bfloat16. At length 512 the formula keeps its weights in fast memory: 0.30 ms, against
# 0.27 ms for the operations around a kernel, without the kernel. At 1024: 4.1 ms and 385 MiB, against 0.57 ms and
# 34 MiB.
_LONG = 1024

# The length from which "rows" is the default on TPUs. Estimates with the projections, with kernels at half of the peak:
# 8 rows, 12 causal heads of size 64 with dropout, length 1024: 1.6 ms against 6.5 ms of the formula. 16 rows, 16 heads
# of size 64 with padding, length 256: 0.75 ms against 1.04 ms.
_SHORT = 256


@weights_on_request
@shard_like_query
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
    implementation: Implementation | tuple[Implementation, ...] | None = None,
    return_weights: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    local_window_size: Window | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N U"] | tuple[Float[Array, "B T N U"], Float[Array, "B N T S"] | Float[Array, "B N T"]]:
    r"""Computes softmax(scale * Q K^T + bias) V for every head.

    Equation 1 of "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762); with K < N
    heads of keys and values, the grouped queries of Ainslie et al. (2023, https://arxiv.org/abs/2305.13245).

    With all options, the weight of key s for query t is exp(l_ts) / (exp(sink) + sum of exp(l_tj) over visible keys j),
    where l = score_mod(c tanh(scale * Q K^T / c)) + bias for a soft cap c.

    **Implementations.**

    - "xla" is the formula and "chunked" is `chunked_attention`, whose memory is linear in the length. Both support all
      arguments; `logits_soft_cap` is a Python number in the latter. The others are kernels: they have only a first
      derivative, in reverse mode, and only "rows" has dropout.
    - "cudnn" is for NVIDIA GPUs, half precision and d_v = d_k. Its memory is linear in the length unless there is a
      bias, segments, or padding together with causality.
    - "splash" is for TPUs, without bias and with padding masks only.
    - "flash" is for TPUs, with bias; it needs K = N and d_v = d_k.
    - "rows" is for TPUs and stores nothing for the backward pass but its inputs. It has no bias and no segments, and
      needs a padding mask, K = N, d_v = d_k, and lengths that are multiples of 128 up to 1024.

    The compiler does not partition kernels over devices: call them in `jax.shard_map`, those for TPUs with
    `check_vma=False`. From a tuple of names, the first one is used that supports the arguments and the platform that
    the program is lowered for. None means "splash" or "cudnn", depending on the platform, if lengths are 1024 or more,
    there is neither a bias nor a mask of all pairs, the kernel supports the other arguments, and the call is inside
    `jax.shard_map` or there is only one device. Otherwise None means "xla".

    Args:
      query: queries, [B, T, N, H]; H is the paper's d_k.
      key: keys, [B, S, K, H]; K divides N, and query head n reads key head n // (N / K).
      value: values, [B, S, K, U]; U is the paper's d_v and may differ from H.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]. Minus infinity
        hides a key; a `mask` takes less memory.
      mask: True where a query may attend, broadcastable to [B, N, T, S]. A query that may see no key gets a zero
        output, never NaN and never the mean value. Hidden keys and values do not change the output, but must be finite,
        because 0 * NaN is NaN.
      is_causal: query t sees keys 0 .. t + S - T only: the last query is at the last key, which is what decoding with a
        cache needs. `jax.nn.dot_product_attention` aligns the first query with the first key.
      scale: multiplies the logits; None means 1 / sqrt(H). T5 passes 1.0.
      segment_ids: packed sequences, [B, T] for self-attention or a pair ([B, T], [B, S]); a query sees the keys of its
        own segment, and segment 0 is padding.
      dropout_rate: probability in [0, 1) of dropping an attention weight.
      dropout_rng: PRNG key; None disables dropout.
      implementation: how to compute the values, which are the same for all. See "Implementations" above.
      return_weights: also return the softmax weights, before dropout. They are computed by the formula, whatever the
        implementation.
      logits_soft_cap: c, above 0; limits the scaled logits to -c .. c by c tanh(logits / c), before bias and mask:
        section 2 of Gemma 2 (2024, https://arxiv.org/abs/2408.00118). For "xla", "chunked" and "splash".
      sinks: a logit for each query head, [N], that takes part in the softmax and has no value, so that the weights of a
        query add up to less than 1, as in gpt-oss (2025, https://arxiv.org/abs/2508.10925). Zeros add one to the
        denominator ("softmax plus one", Miller, 2023). For "xla", "chunked" and "splash".
      local_window_size: how many keys a query sees to the left and to the right of its own position, t + S - T, not
        counting the key there. One number applies to both sides; with `is_causal` only the left side counts. Unlike in
        `sliding_window_attention`, padding of a `mask` counts as positions. For "xla", "chunked" and "splash"; the last
        two skip keys outside the window.
      query_lengths: number of queries of each row, [B]; queries past it get zeros.
      key_lengths: number of keys of each row, [B]; keys past it are hidden. With T < S, as with a static cache, the
        queries are the last ones of these keys: for `is_causal` and `local_window_size`, query t is at position
        t + key_lengths - T (or - query_lengths, where they are given), which "xla" and "chunked" compute, without
        skipping keys. With T = S its position is t.
      score_mod: function of the logits of a block and of the indices of its rows, heads, queries and keys that returns
        new logits, such as `alibi_score_mod` and `t5_score_mod`: FlexAttention (Dong et al., 2024,
        https://arxiv.org/abs/2412.05496). It is called as `score_mod(logits, b, n, t, s)` with arrays [B, N, T, S],
        [B, 1, 1, 1], [1, N, 1, 1], [1, 1, T, 1] and [1, 1, 1, S]. Query indices count from 0, even if T < S. "xla",
        the default, calls it once with the logits of all pairs; "chunked" calls it for each pair of chunks, so that no
        array of all pairs is made. Arrays that it closes over get gradients.
      mask_mod: called as `mask_mod(b, n, t, s)`; returns True where a query may attend, broadcastable to [B, N, T, S].
      return_lse: also return the logarithm of the softmax denominator, sinks included, for `merge_attention`. For "xla"
        and "chunked".

    Returns:
      Weighted values, [B, T, N, U], in the dtype of `query`. With `return_weights` a pair of output and weights,
      [B, N, T, S]; with `return_lse` a pair of output and logarithms, [B, N, T], minus infinity for a query without
      keys. Logits, softmax and weights are float32 (float64 for float64 inputs) whatever the inputs.

    Raises:
      ValueError: if shapes do not match, a mask is not boolean or not of rank 4, or the implementation does not
        support an argument.

    >>> import jax
    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> attend = jax.jit(dot_product_attention, static_argnames=("is_causal", "return_weights"))
    >>> out, weights = attend(x, x, x, is_causal=True, return_weights=True)
    >>> out.shape, weights[0, 0].round(2).tolist()[:2]
    ((1, 3, 2, 4), [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    """
    check_outputs(return_weights, return_lse)
    request = make_request(
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
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        local_window_size=local_window_size,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        score_mod=score_mod,
        mask_mod=mask_mod,
        return_lse=return_lse,
    )
    if implementation is None:
        # The compiler cannot partition kernels over devices.
        names = default_implementations(request, return_weights=return_weights) if _is_single_device() else ("xla",)
    else:
        names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if return_weights and names == ("xla",):
        results = dense_attention(request)[:2]
    else:
        results = _attend_by(names, request)
        if return_weights:
            weights = dot_product_weights(query, key, bias, request.mask.pairs, sinks=sinks, **request.shaping)
            results = results, weights
    return zero_past_lengths(query_lengths, query, results)


def default_implementations(
    request: Request, *, return_weights: bool = False, platform: str | None = None
) -> tuple[str, ...]:
    """Returns the implementations to try in order, fastest first; depends on options, shapes and dtypes only.

    Args:
      request: the arguments.
      return_weights: whether the weights are returned too; then the formula is used, which computes them anyway.
      platform: platform of the devices, such as "tpu", if the caller knows it; otherwise "rows" is not chosen.
    """
    lengths = request.query.shape[1], request.key.shape[1]
    # Kernels choose their blocks by the lengths.
    if return_weights or isinstance(request.scale, jax.Array) or not are_static_sizes(*lengths):
        return ("xla",)
    length = min(lengths)
    if platform == "tpu" and length >= _SHORT and _supports("rows", request):
        return ("rows",)
    # A bias or a mask of all pairs takes the same memory with a kernel, which then saves little.
    if length < _LONG or request.drops or request.bias is not None or not request.mask.is_padding:
        return ("xla",)
    return (*(name for name in _BEST if _supports(name, request)), "xla")


def _supports(kernel: str, request: Request) -> bool:
    """Returns whether a kernel supports a request."""
    try:
        check_kernel(kernel, request)
    except UnsupportedError:
        return False
    return True


def _is_single_device() -> bool:
    """Returns whether the current trace is for a single device: inside `jax.shard_map`, or if only one device exists.

    Only then can kernels be used, because the compiler cannot partition them.
    """
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    return axis_types == {AxisType.Manual} or jax.device_count() == 1


def _attend_by(implementations: tuple[str, ...], request: Request) -> Any:
    """Computes a request by the first implementation that supports it and the platform that it is lowered for.

    Returns:
      The output, [B, T, N, U]; with `return_lse` a pair of output and logarithms, [B, N, T].

    Raises:
      UnsupportedError: if no implementation supports the request.
      ValueError: if a name is unknown or none is given.
    """
    if not implementations:
        raise ValueError("implementation must not be an empty tuple: pass None to leave the choice to tfx_jax")
    supported, errors = [], []
    for name in implementations:
        if name not in get_args(Implementation):
            names = ", ".join(get_args(Implementation))
            raise ValueError(f"implementation must be {names}, or a tuple of these, got {name!r}")
        try:
            if name in PLATFORMS:
                check_kernel(name, request)
            supported.append(name)
        except UnsupportedError as error:
            errors.append(error)
    if not supported:
        raise errors[0] if len(errors) == 1 else UnsupportedError("; ".join(map(str, errors)))
    platforms = {PLATFORMS[name] for name in supported if name in PLATFORMS}
    if len(supported) == 1 or not platforms or supported[0] not in PLATFORMS:
        return _compute(supported[0], request)
    # The platform is known at lowering only: trace one branch for each, with arrays as explicit arguments.
    leaves, structure = jax.tree.flatten(request, is_leaf=lambda x: x is None)
    # By object identity, so that arrays that occur twice, such as the segment ids of self-attention, stay one array.
    arrays = {id(x): x for x in leaves if isinstance(x, jax.Array | np.ndarray)}
    array_ids = list(arrays)

    def first_of(names: list[str], *values: Array) -> Any:
        """Computes the request by the first implementation that can be traced.

        cuDNN cannot be traced without CUDA, nor Pallas kernels inside a shard_map with check_vma.
        """
        traced = dict(zip(array_ids, values, strict=True))
        traced_request = jax.tree.unflatten(structure, [traced.get(id(x), x) for x in leaves])
        for name in names[:-1]:
            try:
                return _compute(name, traced_request)
            except ValueError:
                continue
        return _compute(names[-1], traced_request)

    branches = {}
    for platform in sorted(platforms):
        names_for_platform = [name for name in supported if PLATFORMS.get(name, platform) == platform]
        branches[platform] = functools.partial(first_of, names_for_platform)
    for_any_platform = [name for name in supported if name not in PLATFORMS] or supported
    default = functools.partial(first_of, for_any_platform)
    return jax.lax.platform_dependent(*arrays.values(), default=default, **branches)


def _compute(implementation: str, request: Request) -> Any:
    """Computes a request by one implementation; with `return_lse` returns a pair of output and logarithms."""
    if implementation in PLATFORMS:
        return attend_by_kernel(implementation, request)
    if implementation == "xla":
        out, _, lse = dense_attention(request)
        return (out, lse) if request.return_lse else out
    query, key, value, bias, mask, *_ = request
    options = request.shaping | {"dropout_rate": request.dropout_rate, "dropout_rng": request.dropout_rng}
    # `chunked_attention` has another name for the window than `dot_product_weights`.
    options |= {"local_window_size": options.pop("window"), "sinks": request.sinks, "return_lse": request.return_lse}
    return chunked_attention(query, key, value, bias, mask.pairs, **options)


@functools.cache
def decode_densely(is_visible: Visibility | None = None, scale: float | None = None) -> CachedDecoding:
    """Returns decoding by dense attention over the cached keys that `is_visible` selects; None selects all."""
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
    options={"chunk_size": Option("largest number of queries, and of keys, in a chunk")},
    example=lambda length: {"chunk_size": min(512, max(length // 4, 4))},
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
