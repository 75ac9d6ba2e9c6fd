"""Dense attention by other machinery: the same values at another cost.

The kernels are JAX's own. Around them stands what they lack: causality aligned at the last key, any length, zeros for
queries without keys, and one line that says why where they cannot.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.chunked import chunked_attention
from tfx_jax.functional.masks import Bias, Mask, SegmentIds, check_shapes, combine_masks, pair_of_segment_ids

_Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
_LANES = 128  # of a TPU's vector unit: lengths are padded to a multiple
_LARGEST_BLOCK = 512
_SEEN_BY_NOBODY = np.iinfo(np.int32).min


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
) -> Float[Array, "B T N U"]:
    """`dot_product_attention` by "chunked", "cudnn", "splash" or "flash"; its docstring says what each can do."""
    if implementation == "chunked":
        options: dict[str, Any] = {"segment_ids": segment_ids, "dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        return cast(
            Array, chunked_attention(query, key, value, bias, mask, is_causal=is_causal, scale=scale, **options)
        )
    kernels = {"cudnn": _cudnn, "splash": _splash, "flash": _flash}
    if implementation not in kernels:
        raise ValueError(f"implementation must be xla, chunked, {', '.join(kernels)}, got {implementation!r}")
    check_shapes(query, key, value, bias, mask)
    if dropout_rng is not None and dropout_rate > 0:
        raise _cannot(implementation, "has no dropout", f"dropout_rate={dropout_rate}")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise _cannot(implementation, "needs query, key and value of one dtype", dtypes)

    (b, t, _, h), s = query.shape, key.shape[1]
    ids = None if segment_ids is None else pair_of_segment_ids(segment_ids, b, t, s)
    seen = combine_masks(mask, is_causal, segment_ids, b, t, s) if mask is not None or ids is not None else None
    # The first of more causal queries than keys see nothing, and without them first query and first key are aligned.
    blind = max(0, t - s) if is_causal else 0
    query, bias, mask = query[:, blind:], _without_rows(bias, blind), _without_rows(mask, blind)
    ids = None if ids is None else (ids[0][:, blind:], ids[1])
    out = kernels[implementation](query, key, value, bias, mask, ids, is_causal, h**-0.5 if scale is None else scale)
    out = jnp.pad(out, ((0, 0), (blind, 0), (0, 0), (0, 0)))
    if seen is None:
        return out
    # XLA fuses this into a reduction: no array of all pairs, unless the mask was one.
    has_keys = jnp.swapaxes(seen.any(axis=-1), 1, 2)[..., None]
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
    (b, t, _, h), s = query.shape, key.shape[1]
    _require_backend("cudnn", "gpu")
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        raise _cannot("cudnn", "needs float16 or bfloat16", query.dtype)
    if value.shape[-1] != h:
        raise _cannot("cudnn", "needs values as wide as keys", f"d_v={value.shape[-1]} and d_k={h}")
    if h % 8 or h > 256:
        raise _cannot("cudnn", "needs a head size that is a multiple of 8, at most 256 (128 before Hopper)", h)
    if is_causal and t != s:
        raise _cannot("cudnn", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}")
    mask = combine_masks(mask, False, ids, b, t, s)
    if (bias is not None or mask is not None) and (t % 2 or s % 2):
        raise _cannot("cudnn", "needs even lengths with a bias, a mask or segment_ids", f"T={t} and S={s}")
    # The kernel knows no boolean masks: jax.nn makes them a bias, which has to have all pairs.
    bias, mask = (None if x is None else jnp.broadcast_to(x, (*x.shape[:2], t, s)) for x in (bias, mask))
    bias = None if bias is None else bias.astype(query.dtype)
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, implementation="cudnn"
    )


def _splash(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K U"],
    bias: Bias | None,
    mask: Mask | None,
    ids: _Ids | None,
    is_causal: bool,
    scale: float,
) -> Float[Array, "B T N U"]:
    _require_tpu_kernel("splash", query, mask)
    if bias is not None:
        raise _cannot("splash", "has no bias", f"one of shape {bias.shape}", "flash")
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a second to import

    (t, n), s = query.shape[1:3], key.shape[1]
    rows, columns = _block(t), _block(s)
    query, key, value, ids = _in_blocks(query, key, value, mask, ids, rows, columns, is_causal, scale)
    shape = query.shape[2], key.shape[2]
    pairs = splash.CausalMask(shape, offset=s - t) if is_causal else splash.FullMask(shape)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_dkv", "_dq")}
    blocks |= {f"block_kv{suffix}": columns for suffix in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pairs] * n), block_sizes=splash.BlockSizes(**blocks)
    )
    arrays: list[Any] = [query, key, value]
    if ids is not None:
        arrays.append(splash.SegmentIds(*ids))
    out = cast(Array, jax.vmap(kernel)(*arrays))
    return out[:, :, :t].swapaxes(1, 2)


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
    (b, t, n, h), (_, s, k, u) = query.shape, value.shape
    _require_tpu_kernel("flash", query, mask)
    if k != n:
        raise _cannot("flash", "needs as many key heads as query heads", f"{k} and {n}", "splash")
    if u != h:
        raise _cannot("flash", "needs values as wide as keys", f"d_v={u} and d_k={h}", "splash")
    if h > _LANES and h % _LANES:
        raise _cannot("flash", f"needs a head size below {_LANES} or a multiple of it", h)
    if is_causal and t != s:
        raise _cannot("flash", "aligns causality at the first key and so needs T = S", f"T={t} and S={s}", "splash")
    from jax.experimental.pallas.ops.tpu import flash_attention as flash  # a second to import

    rows, columns = _block(t), _block(s)
    query, key, value, ids = _in_blocks(query, key, value, mask, ids, rows, columns, is_causal, scale)
    if bias is not None:
        bias = _padded(_padded(jnp.broadcast_to(bias, (b, n, t, s)), 2, rows, 0), 3, columns, 0)
    blocks: dict[str, Any] = {f"block_q{suffix}": rows for suffix in ("", "_major_dkv", "_dkv", "_dq")}
    blocks |= {f"block_k{suffix}": columns for suffix in ("", "_major", "_major_dkv", "_dkv", "_major_dq", "_dq")}
    segments = None if ids is None else flash.SegmentIds(*ids)
    out = flash.flash_attention(
        query, key, value, bias, segments, causal=is_causal, block_sizes=flash.BlockSizes(block_b=1, **blocks)
    )
    return out[:, :, :t].swapaxes(1, 2)


def _cannot(implementation: str, constraint: str, given: object, instead: str = "chunked") -> ValueError:
    return ValueError(f"implementation='{implementation}' {constraint}, got {given}; use implementation='{instead}'")


def _require_backend(implementation: str, backend: str) -> None:
    if jax.default_backend() != backend:
        raise _cannot(implementation, f"needs a {backend.upper()}", f"backend {jax.default_backend()!r}")


def _require_tpu_kernel(implementation: str, query: Array, mask: Mask | None) -> None:
    _require_backend(implementation, "tpu")
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        raise _cannot(implementation, "needs float32 or bfloat16", query.dtype)
    if mask is not None and mask.shape[1:3] != (1, 1):
        constraint = "takes a mask only as padding, [B or 1, 1, 1, S], beside is_causal and segment_ids"
        raise _cannot(implementation, constraint, f"shape {mask.shape}")


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
    return -(-length // (num_blocks * _LANES)) * _LANES


def _padded(x: Array, axis: int, size: int, filling: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, padding, constant_values=filling)
