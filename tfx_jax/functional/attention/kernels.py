"""Kernels for dense attention on accelerators. They compute the same values as `dense_attention`.

All kernels but that of `row_attention` come with JAX. This file adds what they lack: causality aligned at the last
key, any length, zeros for queries without keys, and an error that says why a kernel does not support a request.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.dense import Request
from tfx_jax.functional.attention.row_kernel import LANES, LONGEST_ROW, row_attention
from tfx_jax.functional.attention.signature import AttentionMask, combine_masks

_Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
_LARGEST_BLOCK = 512
_HIDDEN_ID = np.iinfo(np.int32).min  # segment id of hidden keys in kernels, which no query has

PLATFORMS = {"cudnn": "cuda", "splash": "tpu", "flash": "tpu", "rows": "tpu"}
"""The platform of each kernel."""


class UnsupportedError(ValueError):
    """Raised if an implementation does not support the arguments; the message says why and which one does."""


def attend_by_kernel(kernel: str, request: Request) -> Float[Array, "B T N U"]:
    """Computes a request by the kernel of this name; causal queries before the first key get zeros."""
    query, bias, mask, s = request.query, request.bias, request.mask, request.key.shape[1]
    # With causality and T > S, the first T - S queries see no key. Without them T = S, as some kernels need.
    num_without_keys = max(0, query.shape[1] - s) if mask.is_causal else 0
    if num_without_keys:
        bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, num_without_keys:]
        query, mask = query[:, num_without_keys:], mask.without_queries(num_without_keys)
    query = _on_its_platform_p.bind(query, implementation=kernel)  # returns `query`; raises on other platforms
    out = _KERNELS[kernel](request._replace(query=query, bias=bias, mask=mask))
    return jnp.pad(out, ((0, 0), (num_without_keys, 0), (0, 0), (0, 0)))


def check_kernel(kernel: str, request: Request) -> None:
    """Raises UnsupportedError if a kernel cannot compute a request."""
    query, key, value, mask = request.query, request.key, request.value, request.mask
    if kernel != "rows" and request.drops:
        raise _cannot(kernel, "has no dropout", f"dropout_rate={request.dropout_rate}")
    # No kernel has the options of the first dictionary, and only splash has those of the second.
    in_no_kernel = {"score_mod": request.score_mod, "mask_mod": mask.mask_mod, "return_lse": request.return_lse or None}
    in_splash = {"logits_soft_cap": request.logits_soft_cap, "sinks": request.sinks, "local_window_size": mask.window}
    for name, x in (in_no_kernel if kernel == "splash" else in_splash | in_no_kernel).items():
        if x is not None:
            got = f"one of shape {x.shape}" if isinstance(x, jax.Array | np.ndarray) else "one" if callable(x) else x
            if name == "mask_mod":
                got = "one, or key_lengths with is_causal or local_window_size and T < S"
            is_for_splash = name in in_splash and PLATFORMS[kernel] == PLATFORMS["splash"]
            raise _cannot(kernel, f"has no {name}", got, "splash" if is_for_splash else "chunked")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise _cannot(kernel, "needs query, key and value of one dtype", dtypes)
    {"cudnn": _check_cudnn, "splash": _check_splash, "flash": _check_flash, "rows": _check_rows}[kernel](request)


def _sizes(request: Request) -> tuple[int, int]:
    """Returns T, without the causal queries that see no key, and S."""
    t, s = request.query.shape[1], request.key.shape[1]
    return (min(t, s) if request.mask.is_causal else t), s


def _check_cudnn(request: Request) -> None:
    """Raises UnsupportedError if cuDNN cannot compute a request."""
    (t, s), h, u = _sizes(request), request.query.shape[-1], request.value.shape[-1]
    if request.query.dtype not in (jnp.float16, jnp.bfloat16):
        raise _cannot("cudnn", "needs float16 or bfloat16", request.query.dtype)
    if u != h:
        raise _cannot("cudnn", "needs values as wide as keys", f"d_v={u} and d_k={h}")
    if h % 8 or h > 256:
        raise _cannot("cudnn", "needs a head size that is a multiple of 8, at most 256 (128 before Hopper)", h)
    if request.mask.is_causal and t != s:
        raise _cannot("cudnn", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}")
    has_pairs = request.bias is not None or request.mask.pairs is not None or request.mask.ids is not None
    if has_pairs and not _has_lengths(request) and (t % 2 or s % 2):
        needed = "needs even lengths with a bias, segment_ids, or a mask that is not a padding mask"
        raise _cannot("cudnn", needed, f"T={t} and S={s}")


def _check_pallas(implementation: str, request: Request) -> None:
    """Raises UnsupportedError if a request violates the constraints that all kernels for TPUs share."""
    query, mask = request.query, request.mask
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        raise _cannot(implementation, "needs float32 or bfloat16", query.dtype)
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    if query.dtype == jnp.bfloat16 and precision not in (None, "default"):
        needed = "multiplies bfloat16 at the default precision only"
        raise _cannot(implementation, needed, f"jax_default_matmul_precision={precision!r}")
    if mask.pairs is not None and not mask.is_padding:
        constraint = "takes only a padding mask, [B or 1, 1, 1, S], is_causal and segment_ids"
        raise _cannot(implementation, constraint, f"shape {mask.pairs.shape}")
    if implementation != "flash" and request.bias is not None:
        raise _cannot(implementation, "has no bias", f"one of shape {request.bias.shape}", "flash")


def _check_splash(request: Request) -> None:
    """Raises UnsupportedError if splash attention cannot compute a request."""
    _check_pallas("splash", request)
    (t, s), mask = _sizes(request), request.mask
    if mask.window is not None and t > s:
        needed = "needs at least as many keys as queries with local_window_size"
        raise _cannot("splash", needed, f"T={t} and S={s}")


def _check_square_heads(implementation: str, request: Request) -> None:
    """Raises UnsupportedError for the kernels that need K = N and d_v = d_k, if a request has other sizes."""
    _check_pallas(implementation, request)
    (n, h), (k, u) = request.query.shape[2:], request.value.shape[2:]
    if k != n:
        raise _cannot(implementation, "needs as many key heads as query heads", f"{k} and {n}", "splash")
    if u != h:
        raise _cannot(implementation, "needs values as wide as keys", f"d_v={u} and d_k={h}", "splash")


def _check_flash(request: Request) -> None:
    """Raises UnsupportedError if Pallas flash attention cannot compute a request."""
    _check_square_heads("flash", request)
    (t, s), h = _sizes(request), request.query.shape[-1]
    if h > LANES and h % LANES:
        raise _cannot("flash", f"needs a head size below {LANES} or a multiple of it", h)
    if request.mask.is_causal and t != s:
        raise _cannot("flash", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}", "splash")


def _check_rows(request: Request) -> None:
    """Raises UnsupportedError if `row_attention` cannot compute a request."""
    _check_square_heads("rows", request)
    (t, s), (n, h) = _sizes(request), request.query.shape[2:]
    if request.mask.ids is not None:
        raise _cannot("rows", "has no segment_ids", "some", "splash")
    if (LANES % h and h != 2 * LANES) or n * h % LANES:
        needed = (
            f"needs a head size that divides {LANES} or equals {2 * LANES}, and num_heads * size a multiple of {LANES}"
        )
        raise _cannot("rows", needed, f"{n} heads of size {h}", "splash")
    if t % LANES or s % LANES or max(t, s) > LONGEST_ROW:
        needed = f"needs lengths that are multiples of {LANES}, at most {LONGEST_ROW}"
        raise _cannot("rows", needed, f"T={t} and S={s}", "splash")


def _cannot(implementation: str, constraint: str, given: object, instead: str = "chunked") -> UnsupportedError:
    """Returns the error that names a constraint, the value that violates it and an implementation without it."""
    return UnsupportedError(
        f"implementation='{implementation}' {constraint}, got {given}; use implementation='{instead}'"
    )


def _has_lengths(request: Request) -> bool:
    """Returns whether cuDNN can be given the number of visible keys of each row instead of a bias for all pairs."""
    mask = request.mask
    return mask.pairs is not None and mask.is_padding and not mask.is_causal and request.bias is mask.ids is None


# An identity that raises a clear error if a kernel is lowered for the wrong platform, instead of the errors of Pallas
# and cuDNN. At trace time the platform is unknown.
_on_its_platform_p = Primitive("on_its_platform")
_on_its_platform_p.def_impl(lambda x, **params: jax.jit(lambda x: _on_its_platform_p.bind(x, **params))(x))
_on_its_platform_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_on_its_platform_p, lambda cotangent, _, **__: [cotangent])
batching.defvectorized(_on_its_platform_p)


def _lower_on_its_platform(context: mlir.LoweringRuleContext, x: Any, *, implementation: str) -> list[Any]:
    """Lowers the primitive to its input; raises UnsupportedError for a platform other than the kernel's."""
    needed = PLATFORMS[implementation]
    for platform in context.module_context.platforms:
        if platform != needed:
            name = {"tpu": "TPU", "cuda": "GPU"}[needed]
            raise _cannot(implementation, f"needs a {name}", f"platform {platform!r}")
    return [x]


mlir.register_lowering(_on_its_platform_p, _lower_on_its_platform)


def _zero_without_keys(out: Float[Array, "B T N U"], mask: AttentionMask, s: int) -> Float[Array, "B T N U"]:
    """Sets the output of queries that see no key to zero; `s` is the number of keys.

    An array of all pairs is made only for a mask of pairs, for a mask with segments, or if the segments of queries and
    keys are different arrays.
    """
    (b, t), pairs, ids = out.shape[:2], mask.pairs, mask.ids
    if pairs is None and ids is None:
        return out
    if pairs is None and ids is not None and ids[0] is ids[1]:  # self-attention: a token sees itself
        has_keys = (ids[0] != 0)[..., None, None]
    elif pairs is not None and mask.is_padding and ids is None:
        visible = pairs[:, 0, 0]  # [B, S]
        first = jnp.where(visible.any(axis=1), jnp.argmax(visible, axis=1), s)[:, None]
        last = jnp.arange(t)[None] if mask.is_causal else s - 1  # causal kernels have T = S here
        has_keys = (first <= last)[..., None, None]
    else:
        pairs = cast(Array, combine_masks(pairs, mask.is_causal, ids, b, t, s))
        has_keys = jnp.swapaxes(pairs.any(axis=-1), 1, 2)[..., None]
    return jnp.where(has_keys, out, jnp.zeros((), out.dtype))


def _rows(request: Request) -> Float[Array, "B T N H"]:
    """Computes a request by `row_attention`."""
    query, key, value, _, mask, *_ = request
    dropping: dict[str, Any] = {"dropout_rate": request.dropout_rate, "dropout_rng": request.dropout_rng}
    return row_attention(query, key, value, mask.pairs, is_causal=mask.is_causal, scale=request.factor, **dropping)


def _cudnn(request: Request) -> Float[Array, "B T N H"]:
    """Computes a request by the cuDNN kernel of `jax.nn.dot_product_attention`."""
    query, key, value, bias, mask, *_ = request
    (b, t), s = query.shape[:2], key.shape[1]
    device = jax.local_devices()[0]
    if device.platform == "gpu" and float(device.compute_capability) < 8:
        raise _cannot("cudnn", "needs a GPU of compute capability 8.0 or more", device.compute_capability)
    pairs, lengths = None, None
    if mask.pairs is not None and _has_lengths(request):
        key, value, lengths = _visible_first(key, value, jnp.broadcast_to(mask.pairs[:, 0, 0], (b, s)))
    else:
        # The kernel has no boolean masks: jax.nn turns them into a bias, which must have all pairs.
        pairs = combine_masks(mask.pairs, False, mask.ids, b, t, s)  # not causal: the kernel hides future keys itself
        bias, pairs = (None if x is None else jnp.broadcast_to(x, (*x.shape[:2], t, s)) for x in (bias, pairs))
        bias = None if bias is None else bias.astype(query.dtype)
    options: dict[str, Any] = {"scale": request.factor, "is_causal": mask.is_causal, "key_value_seq_lengths": lengths}
    try:
        out = jax.nn.dot_product_attention(query, key, value, bias, pairs, implementation="cudnn", **options)
    except RuntimeError as error:  # cuDNN cannot be traced without CUDA; older GPUs do not support all head sizes
        raise _cannot("cudnn", "needs a GPU whose cuDNN supports these arguments", repr(str(error))) from None
    return _zero_without_keys(out, mask, s)


def _visible_first(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K U"], visible: Bool[Array, "B S"]
) -> tuple[Array, Array, Int[Array, " B"]]:
    """Moves visible keys and values before hidden ones, and returns the number of visible keys per row, at least 1.

    cuDNN hides keys by a length, so hidden keys must come last. Without causality the order of keys does not matter.
    """
    order = jnp.argsort(~visible, axis=1)[..., None, None]  # False sorts before True
    key, value = (jnp.take_along_axis(x, order, axis=1) for x in (key, value))
    return key, value, jnp.maximum(visible.sum(axis=1, dtype=jnp.int32), 1)


def _splash(request: Request) -> Float[Array, "B T N U"]:
    """Computes a request by the splash attention of JAX, a Pallas kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a second to import

    (t, n), s, mask, sinks = request.query.shape[1:3], request.key.shape[1], request.mask, request.sinks
    rows, columns = _block(t), _block(s)
    query, key, value, ids = _in_blocks(request, rows, columns)
    shape = query.shape[2], key.shape[2]
    if mask.window is not None:
        pairs = splash.LocalMask(shape, mask.window, offset=s - t)  # with causality the right side of the window is 0
    else:
        pairs = splash.CausalMask(shape, offset=s - t) if mask.is_causal else splash.FullMask(shape)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{suffix}": columns for suffix in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pairs] * n),
        block_sizes=splash.BlockSizes(**blocks),
        attn_logits_soft_cap=request.logits_soft_cap,
    )
    # A sink of -0.3 times the largest float, above the logits of hidden keys, -0.7 times the largest float. If all keys
    # of a query are hidden, the sink takes the whole weight and the output is zero; otherwise its weight is zero.
    zero_sink = jnp.full(n, 0.3 * np.finfo(np.float32).min, jnp.float32)
    if sinks is not None:
        sinks = _float32_gradient(jnp.maximum(sinks.astype(jnp.float32), zero_sink))
    elif ids is not None:
        sinks = zero_sink
    segments = None if ids is None else splash.SegmentIds(*ids)
    out = jax.vmap(functools.partial(kernel, sinks=sinks))(query, key, value, segments)
    return cast(Array, out)[:, :, :t].swapaxes(1, 2)  # [B, N, padded T, U] to [B, T, N, U]


@jax.custom_vjp
def _float32_gradient(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x`, and casts its gradient to float32: splash returns the gradient of sinks in the queries' dtype."""
    return x


_float32_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (gradient.astype(jnp.float32),))


def _flash(request: Request) -> Float[Array, "B T N H"]:
    """Computes a request by the flash attention of JAX, a Pallas kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash  # a second to import

    (b, t, n), s, bias, mask = request.query.shape[:3], request.key.shape[1], request.bias, request.mask
    rows, columns = _block(t), _block(s)
    query, key, value, segments = _in_blocks(request, rows, columns)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (b, n, t, s))
        bias = _padded(_padded(bias, axis=2, size=rows, filling=0), axis=3, size=columns, filling=0)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_major_dkv", "_dkv", "_dq")}
    blocks |= {f"block_k{suffix}": columns for suffix in ("", "_major", "_major_dkv", "_dkv", "_major_dq", "_dq")}
    sizes = flash.BlockSizes(block_b=1, **blocks)
    segments = None if segments is None else flash.SegmentIds(*segments)
    out = flash.flash_attention(query, key, value, bias, segments, causal=mask.is_causal, block_sizes=sizes)
    return _zero_without_keys(out[:, :, :t].swapaxes(1, 2), mask, s)


def _in_blocks(request: Request, rows: int, columns: int) -> tuple[Array, Array, Array, _Ids | None]:
    """Returns scaled queries, keys and values, [B, N or K, padded length, H or U], and segment ids.

    Queries are padded to a multiple of `rows` and keys to a multiple of `columns`, the sizes of the kernel's blocks.
    Segment ids are the only way in which the kernels hide keys per row, so padding and masked keys get an id that no
    query has. In the kernels 0 is an ordinary segment. The ids are None if no key is hidden.
    """
    query, key, value, _, (mask, is_causal, _, ids, _), *_ = request
    if mask is not None or ids is not None or (not is_causal and key.shape[1] % columns > 0):
        if ids is None:
            ids = jnp.ones(query.shape[:2], jnp.int32), jnp.ones(key.shape[:2], jnp.int32)
        query_ids, key_ids = ids
        visible = (key_ids != 0) & (True if mask is None else mask[:, 0, 0])
        key_ids = jnp.where(visible, key_ids.astype(jnp.int32), jnp.int32(_HIDDEN_ID))
        ids = _padded(query_ids.astype(jnp.int32), 1, rows, 0), _padded(key_ids, 1, columns, _HIDDEN_ID)
    # Scaled in float32: a scale rounded to bfloat16 would change all logits by the same relative error.
    scaled = (query.astype(jnp.float32) * request.factor).astype(query.dtype)
    query, key, value = (
        _padded(x.swapaxes(1, 2), 2, size, 0) for x, size in ((scaled, rows), (key, columns), (value, columns))
    )
    return query, key, value, ids


def _block(length: int) -> int:
    """Returns a block size of at most `_LARGEST_BLOCK`, a multiple of LANES, that needs little padding."""
    num_blocks = -(-length // _LARGEST_BLOCK)  # -(-x // y) rounds the quotient up
    return -(-length // (num_blocks * LANES)) * LANES


def _padded(x: Array, axis: int, size: int, filling: int) -> Array:
    """Pads an axis at its end with `filling`, to a multiple of `size`."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)  # in Python, -x % size is the distance to the next multiple
    return jnp.pad(x, padding, constant_values=filling)


_KERNELS: dict[str, Callable[[Request], Float[Array, "B T N U"]]] = {
    "cudnn": _cudnn,
    "splash": _splash,
    "flash": _flash,
    "rows": _rows,
}
