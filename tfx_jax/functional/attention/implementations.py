"""Dense attention by other machinery: the same values at another cost.

The kernels are JAX's own, but for that of `row_attention`. Around them stands what they lack: causality aligned at the
last key, any length, zeros for queries without keys, and one line that says why where they cannot.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dense import check_sinks, dense_attention
from tfx_jax.functional.attention.masks import (
    AttentionMask,
    Bias,
    Mask,
    MaskMod,
    ScoreMod,
    SegmentIds,
    Window,
    add_key_lengths,
    check_shapes,
    check_window,
    combine_masks,
    pair_of_segment_ids,
)
from tfx_jax.functional.attention.row_kernel import LANES, LONGEST_ROW, row_attention

_Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
_LARGEST_BLOCK = 512
_SEEN_BY_NOBODY = np.iinfo(np.int32).min

_PLATFORMS = {"cudnn": "cuda", "splash": "tpu", "flash": "tpu", "rows": "tpu"}
_BEST = ("splash", "cudnn")

# Where kernels begin to be chosen. Compiled for a v5e, 8 rows of 8 causal heads of 64, bfloat16, forward and backward:
# at 512 the formula holds its weights in fast memory and is estimated at 0.30 ms, what surrounds a kernel alone at
# 0.27; at 1024 the formula takes 4.1 ms and 385 MiB, and around the kernel there are 0.57 ms and 34 MiB.
_LONG = 1024

# Likewise "rows" with the projections, and the kernels at half of the peak: 8 rows of 12 causal heads of 64 with
# dropout, 1024 long, 1.6 ms for the formula's 6.5; 16 rows of 16 heads of 64 with padding, 256 long, 0.75 for its 1.04.
_SHORT = 256


class UnsupportedError(ValueError):
    """An implementation cannot compute what is asked; the message says why, and which one can."""


class Request(NamedTuple):
    """The checked arguments of `tfx_jax.functional.dot_product_attention`, as implementations get them."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K U"]
    bias: Bias | None
    mask: AttentionMask
    scale: float | None
    dropout_rate: float
    dropout_rng: Array | None
    logits_soft_cap: float | None
    sinks: Float[Array, " N"] | None
    score_mod: ScoreMod | None
    return_lse: bool

    @property
    def factor(self) -> float:
        """What multiplies the logits."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.dropout_rng is not None and self.dropout_rate > 0

    @property
    def shaping(self) -> dict[str, Any]:
        """What decides the weights besides queries, keys, bias and mask, as options of `dense_attention`."""
        masks = {"is_causal": self.mask.is_causal, "window": self.mask.window, "segment_ids": self.mask.ids}
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask.mask_mod, "sinks": self.sinks}
        return {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap} | masks | mods


def make_request(
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
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    local_window_size: Window | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
) -> Request:
    """Checks the arguments of `tfx_jax.functional.dot_product_attention`."""
    check_shapes(query, key, value, bias, mask)
    check_sinks(sinks, query.shape[2])
    window, is_causal = check_window(local_window_size, is_causal)
    ids = None
    if segment_ids is not None:
        ids = pair_of_segment_ids(segment_ids, query.shape[0], query.shape[1], key.shape[1])
    seen = AttentionMask(add_key_lengths(mask, key_lengths, key), is_causal, window, ids, mask_mod)
    dropping = dropout_rate, dropout_rng
    return Request(query, key, value, bias, seen, scale, *dropping, logits_soft_cap, sinks, score_mod, return_lse)


def default_implementations(
    request: Request, *, return_weights: bool = False, platform: str | None = None
) -> tuple[str, ...]:
    """Returns what computes a request fastest, to be tried in order; shapes and dtypes alone decide.

    Args:
      request: the arguments.
      return_weights: whether the weights are asked for too: the formula has them anyway.
      platform: that of the devices, "tpu" for example, if the caller knows it.
    """
    length = min(request.query.shape[1], request.key.shape[1])
    if return_weights or isinstance(request.scale, jax.Array):
        return ("xla",)
    if platform == "tpu" and length >= _SHORT and _can("rows", request):
        return ("rows",)
    # What has all pairs has them in a kernel too.
    if length < _LONG or request.drops or request.bias is not None or not request.mask.is_padding:
        return ("xla",)
    return (*(name for name in _BEST if _can(name, request)), "xla")


def _can(implementation: str, request: Request) -> bool:
    try:
        _check(implementation, request)
    except UnsupportedError:
        return False
    return True


def is_undivided() -> bool:
    """Whether what is traced now is for one device: then no compiler has to divide it, which none can with a kernel.

    So it is inside `jax.shard_map`, and where there is but one device.
    """
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    return axis_types == {AxisType.Manual} or jax.device_count() == 1


def attend_by(implementations: tuple[str, ...], request: Request) -> Any:
    """Computes a request by the first of some implementations that can, on the platform that this is lowered for.

    Returns:
      The output, [B, T, N, U]; with `return_lse` a pair of it and the logarithms, [B, N, T].

    Raises:
      UnsupportedError: if none can.
      ValueError: if there is no such implementation.
    """
    if not implementations:
        raise ValueError("no implementation is named: use None to leave the choice to tfx_jax")
    able, errors = [], []
    for name in implementations:
        if name not in _ATTEND:
            raise ValueError(f"implementation must be {', '.join(_ATTEND)}, or a tuple of these, got {name!r}")
        try:
            _check(name, request)
            able.append(name)
        except UnsupportedError as error:
            errors.append(error)
    if not able:
        raise errors[0] if len(errors) == 1 else UnsupportedError("; ".join(map(str, errors)))
    platforms = {_PLATFORMS[name] for name in able if name in _PLATFORMS}
    if len(able) == 1 or not platforms or able[0] not in _PLATFORMS:
        return _attend(able[0], request)
    leaves, structure = jax.tree.flatten(request, is_leaf=lambda x: x is None)
    arrays = {id(x): x for x in leaves if isinstance(x, jax.Array | np.ndarray)}  # ids of self-attention are one array

    numbers = list(arrays)

    def first_of(names: list[str], *values: Array) -> Any:
        """The first that can be traced: not cuDNN where there is no CUDA, nor Pallas where shard_map has check_vma."""
        traced = dict(zip(numbers, values, strict=True))
        given = jax.tree.unflatten(structure, [traced.get(id(x), x) for x in leaves])
        for name in names[:-1]:
            try:
                return _attend(name, given)
            except ValueError:
                continue
        return _attend(names[-1], given)

    branches = {
        platform: functools.partial(first_of, [name for name in able if _PLATFORMS.get(name, platform) == platform])
        for platform in sorted(platforms)
    }
    anywhere = [name for name in able if name not in _PLATFORMS] or able
    return jax.lax.platform_dependent(*arrays.values(), default=functools.partial(first_of, anywhere), **branches)


def _attend(implementation: str, request: Request) -> Any:
    if implementation not in _PLATFORMS:
        return _ATTEND[implementation](request)
    query, bias, mask, s = request.query, request.bias, request.mask, request.key.shape[1]
    # The first of more causal queries than keys see nothing, and without them first query and first key are aligned.
    blind = max(0, query.shape[1] - s) if mask.is_causal else 0
    if blind:
        bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, blind:]
        query, mask = query[:, blind:], mask.without_queries(blind)
    query = _on_its_platform_p.bind(query, implementation=implementation)
    out = _ATTEND[implementation](request._replace(query=query, bias=bias, mask=mask))
    return jnp.pad(out, ((0, 0), (blind, 0), (0, 0), (0, 0)))


def _check(implementation: str, request: Request) -> None:
    """Raises UnsupportedError if an implementation cannot compute a request."""
    if implementation not in _PLATFORMS:
        return
    query, key, value, mask = request.query, request.key, request.value, request.mask
    if implementation != "rows" and request.drops:
        raise _cannot(implementation, "has no dropout", f"dropout_rate={request.dropout_rate}")
    options = {"score_mod": request.score_mod, "mask_mod": mask.mask_mod, "return_lse": request.return_lse or None}
    shaping = {"logits_soft_cap": request.logits_soft_cap, "sinks": request.sinks, "local_window_size": mask.window}
    for name, x in (options if implementation == "splash" else shaping | options).items():
        if x is not None:
            got = f"one of shape {x.shape}" if isinstance(x, jax.Array | np.ndarray) else "one" if callable(x) else x
            is_for_splash = name in shaping and _PLATFORMS[implementation] == _PLATFORMS["splash"]
            raise _cannot(implementation, f"has no {name}", got, "splash" if is_for_splash else "chunked")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise _cannot(implementation, "needs query, key and value of one dtype", dtypes)
    {"cudnn": _check_cudnn, "splash": _check_splash, "flash": _check_flash, "rows": _check_rows}[implementation](
        request
    )


def _sizes(request: Request) -> tuple[int, int]:
    """T, without the queries that see nothing, and S."""
    t, s = request.query.shape[1], request.key.shape[1]
    return (min(t, s) if request.mask.is_causal else t), s


def _check_cudnn(request: Request) -> None:
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
        needed = "needs even lengths with a bias, segment_ids, or a mask that is not padding alone"
        raise _cannot("cudnn", needed, f"T={t} and S={s}")


def _check_pallas(implementation: str, request: Request) -> None:
    query, mask = request.query, request.mask
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        raise _cannot(implementation, "needs float32 or bfloat16", query.dtype)
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    if query.dtype == jnp.bfloat16 and precision not in (None, "default"):
        needed = "multiplies bfloat16 at the default precision only"
        raise _cannot(implementation, needed, f"jax_default_matmul_precision={precision!r}")
    if mask.pairs is not None and not mask.is_padding:
        constraint = "takes a mask only as padding, [B or 1, 1, 1, S], beside is_causal and segment_ids"
        raise _cannot(implementation, constraint, f"shape {mask.pairs.shape}")
    if implementation != "flash" and request.bias is not None:
        raise _cannot(implementation, "has no bias", f"one of shape {request.bias.shape}", "flash")


def _check_splash(request: Request) -> None:
    _check_pallas("splash", request)
    (t, s), mask = _sizes(request), request.mask
    if mask.window is not None and t > s:
        needed = "needs at least as many keys as queries with local_window_size"
        raise _cannot("splash", needed, f"T={t} and S={s}")


def _check_square_heads(implementation: str, request: Request) -> None:
    _check_pallas(implementation, request)
    (n, h), (k, u) = request.query.shape[2:], request.value.shape[2:]
    if k != n:
        raise _cannot(implementation, "needs as many key heads as query heads", f"{k} and {n}", "splash")
    if u != h:
        raise _cannot(implementation, "needs values as wide as keys", f"d_v={u} and d_k={h}", "splash")


def _check_flash(request: Request) -> None:
    _check_square_heads("flash", request)
    (t, s), h = _sizes(request), request.query.shape[-1]
    if h > LANES and h % LANES:
        raise _cannot("flash", f"needs a head size below {LANES} or a multiple of it", h)
    if request.mask.is_causal and t != s:
        raise _cannot("flash", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}", "splash")


def _check_rows(request: Request) -> None:
    _check_square_heads("rows", request)
    (t, s), (n, h) = _sizes(request), request.query.shape[2:]
    if request.mask.ids is not None:
        raise _cannot("rows", "has no segment_ids", "some", "splash")
    if (LANES % h and h != 2 * LANES) or n * h % LANES:
        raise _cannot("rows", f"needs heads that fill {LANES} lanes, or twice as many each", f"{n} of {h}", "splash")
    if t % LANES or s % LANES or max(t, s) > LONGEST_ROW:
        needed = f"needs lengths that are multiples of {LANES}, at most {LONGEST_ROW}"
        raise _cannot("rows", needed, f"T={t} and S={s}", "splash")


def _cannot(implementation: str, constraint: str, given: object, instead: str = "chunked") -> UnsupportedError:
    return UnsupportedError(
        f"implementation='{implementation}' {constraint}, got {given}; use implementation='{instead}'"
    )


def _has_lengths(request: Request) -> bool:
    """Whether cuDNN can do with a number of keys for each row instead of a bias for all pairs."""
    mask = request.mask
    return mask.pairs is not None and mask.is_padding and not mask.is_causal and request.bias is mask.ids is None


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


def _zero_without_keys(out: Float[Array, "B T N U"], mask: AttentionMask, s: int) -> Float[Array, "B T N U"]:
    """Zeros for queries that see no key. Only a mask of all pairs or two kinds of segments cost a look at all pairs."""
    (b, t), pairs, ids = out.shape[:2], mask.pairs, mask.ids
    if pairs is None and ids is None:
        return out
    if pairs is None and ids is not None and ids[0] is ids[1]:  # a token sees itself
        has_keys = (ids[0] != 0)[..., None, None]
    elif pairs is not None and mask.is_padding and ids is None:
        seen = pairs[:, 0, 0]
        first = jnp.where(seen.any(axis=1), jnp.argmax(seen, axis=1), s)[:, None]
        last = jnp.arange(t)[None] if mask.is_causal else s - 1  # T = S, or the kernel could not be causal
        has_keys = (first <= last)[..., None, None]
    else:
        pairs = cast(Array, combine_masks(pairs, mask.is_causal, ids, b, t, s))
        has_keys = jnp.swapaxes(pairs.any(axis=-1), 1, 2)[..., None]
    return jnp.where(has_keys, out, jnp.zeros((), out.dtype))


def _xla(request: Request) -> Any:
    query, key, value, bias, mask, *_ = request
    dropping: dict[str, Any] = {"dropout_rate": request.dropout_rate, "dropout_rng": request.dropout_rng}
    dropping |= {"return_lse": request.return_lse}
    out, _, lse = dense_attention(query, key, value, bias, mask.pairs, **request.shaping, **dropping)
    return (out, lse) if request.return_lse else out


def _chunked(request: Request) -> Any:
    query, key, value, bias, mask, *_ = request
    options = request.shaping | {"dropout_rate": request.dropout_rate, "dropout_rng": request.dropout_rng}
    options |= {"local_window_size": options.pop("window"), "return_lse": request.return_lse}
    return chunked_attention(query, key, value, bias, mask.pairs, **options)


def _rows(request: Request) -> Float[Array, "B T N H"]:
    query, key, value, _, mask, *_ = request
    dropping: dict[str, Any] = {"dropout_rate": request.dropout_rate, "dropout_rng": request.dropout_rng}
    return row_attention(query, key, value, mask.pairs, is_causal=mask.is_causal, scale=request.factor, **dropping)


def _cudnn(request: Request) -> Float[Array, "B T N H"]:
    query, key, value, bias, mask, *_ = request
    (b, t), s = query.shape[:2], key.shape[1]
    device = jax.local_devices()[0]
    if device.platform == "gpu" and float(device.compute_capability) < 8:
        raise _cannot("cudnn", "needs a GPU of compute capability 8.0 or more", device.compute_capability)
    pairs, lengths = None, None
    if mask.pairs is not None and _has_lengths(request):
        key, value, lengths = _seen_first(key, value, jnp.broadcast_to(mask.pairs[:, 0, 0], (b, s)))
    else:
        # The kernel knows no boolean masks: jax.nn makes them a bias, which has to have all pairs.
        pairs = combine_masks(mask.pairs, False, mask.ids, b, t, s)
        bias, pairs = (None if x is None else jnp.broadcast_to(x, (*x.shape[:2], t, s)) for x in (bias, pairs))
        bias = None if bias is None else bias.astype(query.dtype)
    options: dict[str, Any] = {"scale": request.factor, "is_causal": mask.is_causal, "key_value_seq_lengths": lengths}
    try:
        out = jax.nn.dot_product_attention(query, key, value, bias, pairs, implementation="cudnn", **options)
    except RuntimeError as error:  # without CUDA cuDNN cannot even be traced; older GPUs have not all sizes
        raise _cannot("cudnn", "needs a GPU whose cuDNN has it", repr(str(error))) from None
    return _zero_without_keys(out, mask, s)


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


def _splash(request: Request) -> Float[Array, "B T N U"]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a second to import

    (t, n), s, mask, sinks = request.query.shape[1:3], request.key.shape[1], request.mask, request.sinks
    rows, columns = _block(t), _block(s)
    query, key, value, ids = _in_blocks(request, rows, columns)
    shape = query.shape[2], key.shape[2]
    if mask.window is not None:
        pairs = splash.LocalMask(shape, mask.window, offset=s - t)  # right is 0 where attention is causal
    else:
        pairs = splash.CausalMask(shape, offset=s - t) if mask.is_causal else splash.FullMask(shape)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{suffix}": columns for suffix in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pairs] * n),
        block_sizes=splash.BlockSizes(**blocks),
        attn_logits_soft_cap=request.logits_soft_cap,
    )
    # What all queries see besides their keys, without a value. Hidden keys have logits of -0.7 times the largest
    # number, so it weighs all where each key is hidden, which makes zeros, and nothing where one is not.
    nothing = jnp.full(n, 0.3 * np.finfo(np.float32).min, jnp.float32)
    if sinks is not None:
        sinks = _float32_gradient(jnp.maximum(sinks.astype(jnp.float32), nothing))
    elif ids is not None:
        sinks = nothing
    segments = None if ids is None else splash.SegmentIds(*ids)
    out = jax.vmap(functools.partial(kernel, sinks=sinks))(query, key, value, segments)
    return cast(Array, out)[:, :, :t].swapaxes(1, 2)


@jax.custom_vjp
def _float32_gradient(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The same float32 array; of sinks in float32, splash gives a gradient in the dtype of the queries."""
    return x


_float32_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (gradient.astype(jnp.float32),))


def _flash(request: Request) -> Float[Array, "B T N H"]:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash  # a second to import

    (b, t, n), s, bias, mask = request.query.shape[:3], request.key.shape[1], request.bias, request.mask
    rows, columns = _block(t), _block(s)
    query, key, value, segments = _in_blocks(request, rows, columns)
    if bias is not None:
        bias = _padded(_padded(jnp.broadcast_to(bias, (b, n, t, s)), 2, rows, 0), 3, columns, 0)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_major_dkv", "_dkv", "_dq")}
    blocks |= {f"block_k{suffix}": columns for suffix in ("", "_major", "_major_dkv", "_dkv", "_major_dq", "_dq")}
    sizes = flash.BlockSizes(block_b=1, **blocks)
    segments = None if segments is None else flash.SegmentIds(*segments)
    out = flash.flash_attention(query, key, value, bias, segments, causal=mask.is_causal, block_sizes=sizes)
    return _zero_without_keys(out[:, :, :t].swapaxes(1, 2), mask, s)


def _in_blocks(request: Request, rows: int, columns: int) -> tuple[Array, Array, Array, _Ids | None]:
    """Scaled queries, keys and values with heads first, lengths multiples of the blocks, and the segments that hide.

    Padding is a segment: the kernels' only way to hide a key by its content. There 0 is a segment like any other.
    """
    query, key, value, _, (mask, is_causal, _, ids, _), *_ = request
    if mask is not None or ids is not None or (not is_causal and key.shape[1] % columns > 0):
        query_ids, key_ids = (jnp.ones(x.shape[:2], jnp.int32) for x in (query, key)) if ids is None else ids
        seen = (key_ids != 0) & (True if mask is None else mask[:, 0, 0])
        key_ids = jnp.where(seen, key_ids.astype(jnp.int32), jnp.int32(_SEEN_BY_NOBODY))
        ids = _padded(query_ids.astype(jnp.int32), 1, rows, 0), _padded(key_ids, 1, columns, _SEEN_BY_NOBODY)
    # In float32: rounded to bfloat16, the scale itself would be wrong, and for every logit alike.
    scaled = (query.astype(jnp.float32) * request.factor).astype(query.dtype)
    query, key, value = (
        _padded(x.swapaxes(1, 2), 2, size, 0) for x, size in ((scaled, rows), (key, columns), (value, columns))
    )
    return query, key, value, ids


def _block(length: int) -> int:
    """A block of at most `_LARGEST_BLOCK`, of whole lanes, such that little is padded."""
    num_blocks = -(-length // _LARGEST_BLOCK)
    return -(-length // (num_blocks * LANES)) * LANES


def _padded(x: Array, axis: int, size: int, filling: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, padding, constant_values=filling)


_ATTEND: dict[str, Callable[[Request], Any]] = {
    "xla": _xla,
    "chunked": _chunked,
    "cudnn": _cudnn,
    "splash": _splash,
    "flash": _flash,
    "rows": _rows,
}
