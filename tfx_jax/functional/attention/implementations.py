"""Dense attention by other machinery: the same values at another cost.

The kernels are JAX's own, but for that of `row_attention`. Around them stands what they lack: causality aligned at the
last key, any length, zeros for queries without keys, and one line that says why where they cannot.
"""

import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.masks import Bias, Mask, SegmentIds, combine_masks, pair_of_segment_ids
from tfx_jax.functional.attention.row_kernel import LANES, LONGEST_ROW, row_attention

_Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
_LARGEST_BLOCK = 512
_SEEN_BY_NOBODY = np.iinfo(np.int32).min

_PLATFORMS = {"cudnn": "cuda", "splash": "tpu", "flash": "tpu", "rows": "tpu"}
_BEST = ("splash", "cudnn")

_MORE_OPTIONS = ("logits_soft_cap", "sinks", "local_window_size", "score_mod", "mask_mod", "return_lse")
_OPTIONS = {"splash": {"logits_soft_cap", "sinks", "window"}}
"""Of the options that not every implementation has, those of each kernel."""

# Where kernels begin to be chosen. Compiled for a v5e, 8 rows of 8 causal heads of 64, bfloat16, forward and backward:
# at 512 the formula holds its weights in fast memory and is estimated at 0.30 ms, what surrounds a kernel alone at
# 0.27; at 1024 the formula takes 4.1 ms and 385 MiB, and around the kernel there are 0.57 ms and 34 MiB.
_LONG = 1024

# Likewise "rows" with the projections, and the kernels at half of the peak: 8 rows of 12 causal heads of 64 with
# dropout, 1024 long, 1.6 ms for the formula's 6.5; 16 rows of 16 heads of 64 with padding, 256 long, 0.75 for its 1.04.
_SHORT = 256


def best_kernels(
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
    return_weights: bool = False,
    **others: Any,
) -> dict[str, str]:
    """For each platform the kernel that beats the formula at these arguments of `dot_product_attention`, if one does.

    Shapes and dtypes alone decide.
    """
    is_short = min(query.shape[1], key.shape[1]) < _LONG
    if is_short or return_weights or isinstance(scale, jax.Array) or (dropout_rng is not None and dropout_rate > 0):
        return {}
    if bias is not None or (mask is not None and not _is_padding(mask)):  # what has all pairs has them in a kernel too
        return {}
    arguments = (query, key, value, bias, mask, is_causal, segment_ids is not None)
    return {_PLATFORMS[name]: name for name in _BEST if next(_obstacles(name, *arguments, **others), None) is None}


def are_rows_best(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None = None,
    mask: Mask | None = None,
    **options: Any,
) -> bool:
    """Whether "rows" beats all else at these arguments of `dot_product_attention`, on a TPU, which the caller knows."""
    if min(query.shape[1], key.shape[1]) < _SHORT:
        return False
    if options.get("return_weights") or isinstance(options.get("scale"), jax.Array):
        return False
    is_causal, has_segments = options.get("is_causal", False), options.get("segment_ids") is not None
    others = {name: x for name, x in options.items() if name in _MORE_OPTIONS}
    return next(_obstacles("rows", query, key, value, bias, mask, is_causal, has_segments, **others), None) is None


def is_undivided() -> bool:
    """Whether what is traced now is for one device: then no compiler has to divide it, which none can with a kernel.

    So it is inside `jax.shard_map`, and where there is but one device.
    """
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    return axis_types == {AxisType.Manual} or jax.device_count() == 1


def kernel_attention(
    implementation: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    *,
    is_causal: bool,
    scale: float | None,
    segment_ids: SegmentIds | None,
    dropout_rate: float,
    dropout_rng: Array | None,
    window: tuple[int, int] | None = None,
    **others: Any,
) -> Any:
    """`dot_product_attention` by "chunked" or a kernel; its docstring says what each can do."""
    if implementation == "chunked":
        options: dict[str, Any] = {"segment_ids": segment_ids, "dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        options |= {"is_causal": is_causal, "scale": scale, "local_window_size": window} | others
        return chunked_attention(query, key, value, bias, mask, **options)
    if implementation not in _PLATFORMS:
        raise ValueError(f"implementation must be xla, chunked, {', '.join(_PLATFORMS)}, got {implementation!r}")
    if implementation != "rows" and dropout_rng is not None and dropout_rate > 0:
        raise _cannot(implementation, "has no dropout", f"dropout_rate={dropout_rate}")
    arguments = query, key, value, bias, mask, is_causal, segment_ids is not None
    for obstacle in _obstacles(implementation, *arguments, window=window, **others):
        raise obstacle

    (b, t, _, h), s = query.shape, key.shape[1]
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    # The first of more causal queries than keys see nothing, and without them first query and first key are aligned.
    blind = max(0, t - s) if is_causal else 0
    if blind:
        query, bias, mask = query[:, blind:], _without_rows(bias, blind), _without_rows(mask, blind)
        ids = None if ids is None else (ids[0][:, blind:], ids[1])
    query = _on_its_platform_p.bind(query, implementation=implementation)
    factor = h**-0.5 if scale is None else scale
    if implementation == "rows":
        dropping: dict[str, Any] = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        out = row_attention(query, key, value, mask, is_causal=is_causal, scale=factor, **dropping)
    elif implementation == "splash":
        more = {name: others.get(name) for name in ("logits_soft_cap", "sinks")}
        out = _splash(query, key, value, mask, ids, is_causal, factor, window=window, **more)
    else:
        kernel = _cudnn if implementation == "cudnn" else _flash
        out = kernel(query, key, value, bias, mask, ids, is_causal, factor)
    return jnp.pad(out, ((0, 0), (blind, 0), (0, 0), (0, 0)))


def _obstacles(
    implementation: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    is_causal: bool,
    has_segments: bool,
    **others: Any,
) -> Iterator[ValueError]:
    """What keeps a kernel from taking these arguments, each as the error that says so."""
    (n, h), (s, k, u) = query.shape[2:], value.shape[1:]
    for option, x in others.items():
        if x is not None and x is not False and option not in _OPTIONS.get(implementation, ()):
            name = "local_window_size" if option == "window" else option
            instead = "splash" if option in _OPTIONS["splash"] and _PLATFORMS[implementation] == "tpu" else "chunked"
            yield _cannot(implementation, f"has no {name}", _described(x), instead)
    t = min(query.shape[1], s) if is_causal else query.shape[1]  # without the queries that see nothing
    if key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        yield _cannot(implementation, "needs query, key and value of one dtype", dtypes)
    if implementation == "cudnn":
        if query.dtype not in (jnp.float16, jnp.bfloat16):
            yield _cannot("cudnn", "needs float16 or bfloat16", query.dtype)
        if u != h:
            yield _cannot("cudnn", "needs values as wide as keys", f"d_v={u} and d_k={h}")
        if h % 8 or h > 256:
            yield _cannot("cudnn", "needs a head size that is a multiple of 8, at most 256 (128 before Hopper)", h)
        if is_causal and t != s:
            yield _cannot("cudnn", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}")
        has_pairs = bias is not None or mask is not None or has_segments
        if has_pairs and not _has_lengths(bias, mask, has_segments, is_causal) and (t % 2 or s % 2):
            needed = "needs even lengths with a bias, segment_ids, or a mask that is not padding alone"
            yield _cannot("cudnn", needed, f"T={t} and S={s}")
        return
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        yield _cannot(implementation, "needs float32 or bfloat16", query.dtype)
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    if query.dtype == jnp.bfloat16 and precision not in (None, "default"):
        needed = "multiplies bfloat16 at the default precision only"
        yield _cannot(implementation, needed, f"jax_default_matmul_precision={precision!r}")
    if mask is not None and not _is_padding(mask):
        constraint = "takes a mask only as padding, [B or 1, 1, 1, S], beside is_causal and segment_ids"
        yield _cannot(implementation, constraint, f"shape {mask.shape}")
    if implementation != "flash" and bias is not None:
        yield _cannot(implementation, "has no bias", f"one of shape {bias.shape}", "flash")
    if implementation == "splash":
        if others.get("window") is not None and not is_causal and query.shape[1] > s:
            needed = "needs at least as many keys as queries with local_window_size"
            yield _cannot("splash", needed, f"T={query.shape[1]} and S={s}")
        return
    if k != n:
        yield _cannot(implementation, "needs as many key heads as query heads", f"{k} and {n}", "splash")
    if u != h:
        yield _cannot(implementation, "needs values as wide as keys", f"d_v={u} and d_k={h}", "splash")
    if implementation == "rows":
        if has_segments:
            yield _cannot("rows", "has no segment_ids", "some", "splash")
        if (LANES % h and h != 2 * LANES) or n * h % LANES:
            yield _cannot(
                "rows", f"needs heads that fill {LANES} lanes, or twice as many each", f"{n} of {h}", "splash"
            )
        if t % LANES or s % LANES or max(t, s) > LONGEST_ROW:
            needed = f"needs lengths that are multiples of {LANES}, at most {LONGEST_ROW}"
            yield _cannot("rows", needed, f"T={t} and S={s}", "splash")
        return
    if h > LANES and h % LANES:
        yield _cannot("flash", f"needs a head size below {LANES} or a multiple of it", h)
    if is_causal and t != s:
        yield _cannot("flash", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}", "splash")


def _cannot(implementation: str, constraint: str, given: object, instead: str = "chunked") -> ValueError:
    return ValueError(f"implementation='{implementation}' {constraint}, got {given}; use implementation='{instead}'")


def _described(x: object) -> str:
    return f"one of shape {x.shape}" if isinstance(x, jax.Array | np.ndarray) else "one" if callable(x) else str(x)


def _is_padding(mask: Mask) -> bool:
    return mask.shape[1:3] == (1, 1)


def _has_lengths(bias: Bias | None, mask: Mask | None, has_segments: bool, is_causal: bool) -> bool:
    """Whether cuDNN can do with a number of keys for each row instead of a bias for all pairs."""
    return mask is not None and _is_padding(mask) and bias is None and not has_segments and not is_causal


# What is lowered for another platform says so, instead of what Pallas or cuDNN would say. Tracing does not know.
_on_its_platform_p = Primitive("on_its_platform")
_on_its_platform_p.def_impl(lambda x, **params: jax.jit(lambda x: _on_its_platform_p.bind(x, **params))(x))
_on_its_platform_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_on_its_platform_p, lambda cotangent, _, **__: [cotangent])
batching.defvectorized(_on_its_platform_p)


def _lower_on_its_platform(context: mlir.LoweringRuleContext, x: Any, *, implementation: str) -> list[Any]:
    needed = _PLATFORMS[implementation]
    for platform in context.module_context.platforms:
        if platform != needed:
            name = {"tpu": "TPU", "cuda": "GPU"}[needed]
            raise _cannot(implementation, f"needs a {name}", f"platform {platform!r}")
    return [x]


mlir.register_lowering(_on_its_platform_p, _lower_on_its_platform)


def _zero_without_keys(
    out: Float[Array, "B T N U"], mask: Mask | None, ids: _Ids | None, is_causal: bool, s: int
) -> Float[Array, "B T N U"]:
    """Zeros for queries that see no key. Only a mask of all pairs or two kinds of segments cost a look at all pairs."""
    if mask is None and ids is None:
        return out
    b, t = out.shape[:2]
    if mask is None and ids is not None and ids[0] is ids[1]:  # a token sees itself
        has_keys = (ids[0] != 0)[..., None, None]
    elif mask is not None and _is_padding(mask) and ids is None:
        seen = mask[:, 0, 0]
        first = jnp.where(seen.any(axis=1), jnp.argmax(seen, axis=1), s)[:, None]
        last = jnp.arange(t)[None] if is_causal else s - 1  # T = S, or the kernel could not be causal
        has_keys = (first <= last)[..., None, None]
    else:
        pairs = cast(Array, combine_masks(mask, is_causal, ids, b, t, s))
        has_keys = jnp.swapaxes(pairs.any(axis=-1), 1, 2)[..., None]
    return jnp.where(has_keys, out, jnp.zeros((), out.dtype))


def _cudnn(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    bias: Bias | None,
    mask: Mask | None,
    ids: _Ids | None,
    is_causal: bool,
    scale: float,
) -> Float[Array, "B T N H"]:
    (b, t), s = query.shape[:2], key.shape[1]
    device = jax.local_devices()[0]
    if device.platform == "gpu" and float(device.compute_capability) < 8:
        raise _cannot("cudnn", "needs a GPU of compute capability 8.0 or more", device.compute_capability)
    pairs, lengths = None, None
    if mask is not None and _has_lengths(bias, mask, ids is not None, is_causal):
        key, value, lengths = _seen_first(key, value, jnp.broadcast_to(mask[:, 0, 0], (b, s)))
    else:
        # The kernel knows no boolean masks: jax.nn makes them a bias, which has to have all pairs.
        pairs = combine_masks(mask, False, ids, b, t, s)
        bias, pairs = (None if x is None else jnp.broadcast_to(x, (*x.shape[:2], t, s)) for x in (bias, pairs))
        bias = None if bias is None else bias.astype(query.dtype)
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "key_value_seq_lengths": lengths}
    try:
        out = jax.nn.dot_product_attention(query, key, value, bias, pairs, implementation="cudnn", **options)
    except RuntimeError as error:  # without CUDA cuDNN cannot even be traced; older GPUs have not all sizes
        raise _cannot("cudnn", "needs a GPU whose cuDNN has it", repr(str(error))) from None
    return _zero_without_keys(out, mask, ids, is_causal, s)


def _seen_first(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K U"], seen: Bool[Array, "B S"]
) -> tuple[Array, Array, Int[Array, " B"]]:
    """Keys and values in another order, those that are seen before the others, and how many these are, at least one.

    Lengths can only hide the last ones, and of a traced mask no one knows whether it does that. Without causality the
    order of keys says nothing.
    """
    order = jnp.argsort(~seen, axis=1)[..., None, None]
    key, value = (jnp.take_along_axis(x, order, axis=1) for x in (key, value))
    return key, value, jnp.maximum(seen.sum(axis=1, dtype=jnp.int32), 1)


def _splash(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask | None,
    ids: _Ids | None,
    is_causal: bool,
    scale: float,
    *,
    window: tuple[int, int] | None,
    logits_soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N U"]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a second to import

    (t, n), s = query.shape[1:3], key.shape[1]
    rows, columns = _block(t), _block(s)
    query, key, value, ids = _in_blocks(query, key, value, mask, ids, rows, columns, is_causal, scale)
    shape = query.shape[2], key.shape[2]
    if window is not None:
        pairs = splash.LocalMask(shape, window, offset=s - t)  # right is 0 where attention is causal
    else:
        pairs = splash.CausalMask(shape, offset=s - t) if is_causal else splash.FullMask(shape)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{suffix}": columns for suffix in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pairs] * n),
        block_sizes=splash.BlockSizes(**blocks),
        attn_logits_soft_cap=logits_soft_cap,
    )
    # What all queries see besides their keys, without a value. Hidden keys have logits of -0.7 times the largest
    # number, so it weighs all where each key is hidden, which makes zeros, and nothing where one is not.
    nothing = jnp.full(n, 0.3 * np.finfo(np.float32).min, jnp.float32)
    if sinks is not None:
        sinks = jnp.maximum(sinks.astype(jnp.float32), nothing)
    elif ids is not None:
        sinks = nothing
    segments = None if ids is None else splash.SegmentIds(*ids)
    out = jax.vmap(functools.partial(kernel, sinks=sinks))(query, key, value, segments)
    return cast(Array, out)[:, :, :t].swapaxes(1, 2)


def _flash(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    bias: Bias | None,
    mask: Mask | None,
    ids: _Ids | None,
    is_causal: bool,
    scale: float,
) -> Float[Array, "B T N H"]:
    (b, t, n), s = query.shape[:3], key.shape[1]
    from jax.experimental.pallas.ops.tpu import flash_attention as flash  # a second to import

    rows, columns = _block(t), _block(s)
    query, key, value, segments = _in_blocks(query, key, value, mask, ids, rows, columns, is_causal, scale)
    if bias is not None:
        bias = _padded(_padded(jnp.broadcast_to(bias, (b, n, t, s)), 2, rows, 0), 3, columns, 0)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_major_dkv", "_dkv", "_dq")}
    blocks |= {f"block_k{suffix}": columns for suffix in ("", "_major", "_major_dkv", "_dkv", "_major_dq", "_dq")}
    sizes = flash.BlockSizes(block_b=1, **blocks)
    segments = None if segments is None else flash.SegmentIds(*segments)
    out = flash.flash_attention(query, key, value, bias, segments, causal=is_causal, block_sizes=sizes)
    return _zero_without_keys(out[:, :, :t].swapaxes(1, 2), mask, ids, is_causal, s)


def _in_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    mask: Mask | None,
    ids: _Ids | None,
    rows: int,
    columns: int,
    is_causal: bool,
    scale: float,
) -> tuple[Array, Array, Array, _Ids | None]:
    """Scaled queries, keys and values with heads first, lengths multiples of the blocks, and the segments that hide.

    Padding is a segment: the kernels' only way to hide a key by its content. There 0 is a segment like any other.
    """
    if mask is not None or ids is not None or (not is_causal and key.shape[1] % columns > 0):
        query_ids, key_ids = (jnp.ones(x.shape[:2], jnp.int32) for x in (query, key)) if ids is None else ids
        seen = (key_ids != 0) & (True if mask is None else mask[:, 0, 0])
        key_ids = jnp.where(seen, key_ids.astype(jnp.int32), jnp.int32(_SEEN_BY_NOBODY))
        ids = _padded(query_ids.astype(jnp.int32), 1, rows, 0), _padded(key_ids, 1, columns, _SEEN_BY_NOBODY)
    # In float32: rounded to bfloat16, the scale itself would be wrong, and for every logit alike.
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    query, key, value = (
        _padded(x.swapaxes(1, 2), 2, size, 0) for x, size in ((scaled, rows), (key, columns), (value, columns))
    )
    return query, key, value, ids


def _without_rows(
    pairs: Float[Array, "#B #N #T #S"] | Bool[Array, "#B #N #T #S"] | None, num_rows: int
) -> Array | None:
    return pairs if pairs is None or pairs.shape[2] == 1 else pairs[:, :, num_rows:]


def _block(length: int) -> int:
    """A block of at most `_LARGEST_BLOCK`, of whole lanes, such that little is padded."""
    num_blocks = -(-length // _LARGEST_BLOCK)
    return -(-length // (num_blocks * LANES)) * LANES


def _padded(x: Array, axis: int, size: int, filling: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, padding, constant_values=filling)
