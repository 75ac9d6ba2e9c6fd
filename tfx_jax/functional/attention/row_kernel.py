"""Pallas kernel for TPUs that keeps whole rows of weights in fast memory, for short sequences, with dropout.

All keys of a head fit into fast memory together with a block of queries, so each row's softmax is computed at once,
without rescaling. The backward pass recomputes the weights from queries and keys and needs no other residuals. Arrays
keep the layout of the projections, [B, T, N * H]. A program processes the heads that share 128 lanes, such as two of
size 64, and separates them by zeros in the lanes of the other heads. This costs nothing extra, because a product with
narrower heads takes the same time.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from tfx_jax.functional.layers import hash_words, hashed, num_kept_levels, rescaled

LANES = 128
"""Lanes of a TPU's vector unit. Lengths and N * H must be multiples of it."""

LONGEST_ROW = 1024
"""The largest number of queries or keys with which the backward pass fits a v5e's fast memory (float32, H = 256)."""

_BLOCK = 256  # queries in a block; with causality the keys after the last query of the block are skipped


class _Options(NamedTuple):
    """Static options of the kernel."""

    scale: float
    is_causal: bool
    dropout_rate: float  # 0 without a PRNG key
    head_size: int
    num_heads: int

    @property
    def width(self) -> int:
        """Lanes that one program processes."""
        return max(self.head_size, LANES)

    @property
    def heads(self) -> range:
        """The heads that one program processes, counted from 0."""
        return range(self.width // self.head_size)


def row_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B 1 1 S"] | None = None,
    *,
    is_causal: bool = False,
    scale: float,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `tfx_jax.functional.dot_product_attention` of at most `LONGEST_ROW` queries and keys.

    Args:
      query: [B, T, N, H]; H divides LANES or is a multiple of it, and N * H, T and S are multiples of LANES.
      key: [B, S, N, H].
      value: [B, S, N, H].
      mask: True for visible keys, [B or 1, 1, 1, S].
      is_causal: query t sees keys 0 .. t + S - T only; requires T <= S.
      scale: multiplies the logits.
      dropout_rate: probability in [0, 1) of dropping a weight. With the same key, the formula drops the same weights.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      [B, T, N, H] in the dtype of `query`; softmax and sums are float32.
    """
    (b, t, n, h), s = query.shape, key.shape[1]
    words = None if num_kept_levels(dropout_rate) is None or dropout_rng is None else hash_words(dropout_rng)
    options = _Options(scale, is_causal, 0.0 if words is None else dropout_rate, h, n)
    words = jnp.zeros(2, jnp.uint32) if words is None else words
    visible = None if mask is None else jnp.broadcast_to(mask[:, 0], (b, 1, s)).astype(jnp.int32)
    query, key, value = (x.reshape(*x.shape[:2], n * h) for x in (query, key, value))
    return cast(Array, _attend(options, words, query, key, value, visible)).reshape(b, t, n, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options,
    words: UInt32[Array, "2"],
    query: Float[Array, "B T D"],
    key: Float[Array, "B S D"],
    value: Float[Array, "B S D"],
    visible: Int[Array, "B 1 S"] | None,
) -> Float[Array, "B T D"]:
    """Runs the forward kernel on flattened heads, D = N * H; its gradient is the backward kernel.

    `words` are the two hash words of the dropout; `visible` is 1 for tokens and 0 for padding.
    """
    arrays = (query, key, value)
    return _call(_mix, options, words, visible, arrays, results=[query], num_products=2)[0]  # Q K^T, weights V


def _forward(options: _Options, *arrays: Any) -> tuple[Float[Array, "B T D"], Any]:
    """Returns the output, and the inputs as the residuals of the backward pass."""
    return _attend(options, *arrays), arrays


def _backward(options: _Options, residuals: Any, gradient: Float[Array, "B T D"]) -> tuple[Any, ...]:
    """Runs the backward kernel; the hash words and the mask have no gradient."""
    words, query, key, value, visible = residuals
    arrays = (query, key, value, gradient)
    results = [query, key, value]
    gradients = _call(_mix_gradient, options, words, visible, arrays, results=results, num_products=5)
    return None, *gradients, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    options: _Options,
    words: Array,
    visible: Array | None,
    arrays: tuple[Array, ...],
    *,
    results: list[Array],
    num_products: int,
) -> list[Array]:
    """Runs a kernel with one program for each sequence of the batch and each tile of lanes.

    Args:
      kernel: `_mix` or `_mix_gradient`.
      options: static options of the kernel.
      words: the two hash words of the dropout.
      visible: 1 for visible keys, [B, 1, S]; None without a mask.
      arrays: inputs of the kernel, [B, T or S, D]; the first two are query and key.
      results: arrays with the shapes and dtypes of the results; each but the first gets a float32 accumulator.
      num_products: number of matrix products that the kernel computes, for the cost estimate.
    """
    from jax.experimental import pallas as pl  # imported here, because it takes a second
    from jax.experimental.pallas import tpu

    (b, t, d), s = arrays[0].shape, arrays[1].shape[1]
    masks = [] if visible is None else [visible]

    def block(x: Array) -> Any:
        """Cuts [B, T or S, D] into the whole rows and the tile of lanes of one program."""
        return pl.BlockSpec((1, x.shape[1], options.width), lambda sequence, tile, *_: (sequence, 0, tile))

    num_bytes = sum(x.size * x.dtype.itemsize for x in (*arrays, *results))
    pairs = b * t * s * options.num_heads
    call = pl.pallas_call(
        functools.partial(kernel, options, visible is not None),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, d // options.width),
            in_specs=[
                *(pl.BlockSpec((1, 1, s), lambda sequence, tile, *_: (sequence, 0, 0)) for _ in masks),
                *map(block, arrays),
            ],
            out_specs=[block(x) for x in results],
            scratch_shapes=[tpu.VMEM((s, options.width), jnp.float32) for _ in results[1:]],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products * pairs * options.head_size, transcendentals=pairs, bytes_accessed=num_bytes
        ),
        name="row_attention",
    )
    return cast(list[Array], call(words, *masks, *arrays))


def _mix(options: _Options, is_masked: bool, words: Any, *refs: Any) -> None:
    """Computes the output for one sequence and one tile of lanes (forward kernel).

    Args:
      options: static options of the kernel.
      is_masked: whether the first reference is a mask.
      words: the two hash words of the dropout.
      refs: references of the mask, [1, 1, S], and of query, key, value and output, [1, T or S, lanes].
    """
    mask, (query, key, value, out) = _with_mask(is_masked, refs)
    for rows, columns in _blocks(query.shape[1], key.shape[1], options.is_causal):
        mixed = jnp.zeros((rows.stop - rows.start, options.width), jnp.float32)
        for head in options.heads:
            weights, dropped = _weights(options, words, mask, query, key, rows, columns, head)
            out_of_head = jnp.dot(
                dropped(weights).astype(value.dtype), value[0, columns], preferred_element_type=jnp.float32
            )
            mixed += _only_head(out_of_head, head, options)
        out[0, rows] = mixed.astype(out.dtype)


def _mix_gradient(options: _Options, is_masked: bool, words: Any, *refs: Any) -> None:
    """Computes the gradients (backward kernel) by equations 13 to 16 of FlashAttention (Dao et al., 2022, app. B.2).

    Args:
      options: static options of the kernel.
      is_masked: whether the first reference is a mask.
      words: the two hash words of the dropout.
      refs: references of the mask, [1, 1, S]; of query, key, value and the gradient of the output, [1, T or S, lanes];
        of the three gradients to write; and of two float32 accumulators for keys and values, [S, lanes].
    """
    mask, (query, key, value, gradient, *results) = _with_mask(is_masked, refs)
    query_result, key_result, value_result, key_sum, value_sum = results
    key_sum[...], value_sum[...] = jnp.zeros_like(key_sum), jnp.zeros_like(value_sum)
    for rows, columns in _blocks(query.shape[1], key.shape[1], options.is_causal):
        query_sum = jnp.zeros((rows.stop - rows.start, options.width), jnp.float32)
        for head in options.heads:
            weights, dropped = _weights(options, words, mask, query, key, rows, columns, head)
            out_gradient = _only_head(gradient[0, rows], head, options)
            value_sum[columns] += _dot(dropped(weights).astype(value.dtype), out_gradient, 0)
            weight_gradient = dropped(_dot(out_gradient, value[0, columns], 1))
            logit_gradient = (
                weights * (weight_gradient - (weights * weight_gradient).sum(axis=1, keepdims=True)) * options.scale
            )
            logit_gradient = logit_gradient.astype(query.dtype)
            key_sum[columns] += _dot(logit_gradient, _only_head(query[0, rows], head, options), 0)
            query_sum += _only_head(
                jnp.dot(logit_gradient, key[0, columns], preferred_element_type=jnp.float32), head, options
            )
        query_result[0, rows] = query_sum.astype(query_result.dtype)
    key_result[0], value_result[0] = key_sum[...].astype(key_result.dtype), value_sum[...].astype(value_result.dtype)


def _with_mask(is_masked: bool, refs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Splits the references of a kernel into the mask, [1, S] or None without one, and the others."""
    if not is_masked:
        return None, refs
    mask, *others = refs
    return mask[0] != 0, tuple(others)


def _blocks(t: int, s: int, is_causal: bool) -> list[tuple[slice, slice]]:
    """Returns blocks of queries, each with the range of keys that its queries may see, in multiples of LANES.

    >>> _blocks(512, 512, True)
    [(slice(0, 256, None), slice(0, 256, None)), (slice(256, 512, None), slice(0, 512, None))]
    """
    blocks: list[tuple[slice, slice]] = []
    for start in range(0, t, _BLOCK):
        end = min(start + _BLOCK, t)
        # The block's last query sees `end + s - t` keys, rounded up to a multiple of LANES.
        num_keys = -(-(end + s - t) // LANES) * LANES if is_causal else s
        blocks.append((slice(start, end), slice(0, num_keys)))
    return blocks


def _weights(
    options: _Options, words: Any, mask: Any, query: Any, key: Any, rows: slice, columns: slice, head: int
) -> tuple[Float[Array, "rows columns"], Any]:
    """Computes the softmax weights of one head for a block of queries.

    Args:
      options: static options of the kernel.
      words: the two hash words of the dropout, uint32.
      mask: True for visible keys, [1, S]; None without a mask.
      query: reference of the queries of this program, [1, T, lanes].
      key: reference of its keys, [1, S, lanes].
      rows: the queries of the block.
      columns: the keys that the block may see.
      head: the head, counted from 0 within this program.

    Returns:
      The weights, and a function that applies their dropout to an array of this shape.
    """
    from jax.experimental import pallas as pl

    t, s = query.shape[1], key.shape[1]
    logits = _dot(_only_head(query[0, rows], head, options), key[0, columns], 1) * options.scale
    query_index, key_index = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
    query_index += rows.start  # `columns` always start at 0
    visible = None if mask is None else mask[:, columns]
    if options.is_causal:
        past = key_index <= query_index + (s - t)
        visible = past if visible is None else past & visible
    weights = _softmax(logits, visible)
    if not options.dropout_rate:
        return weights, lambda x: x
    # Hash the index in the dense weights [B, N, T, S], so that the same weights are dropped as by the formula. Programs
    # are numbered by (sequence, tile of lanes), and a tile has `len(options.heads)` heads.
    head_index = pl.program_id(0) * options.num_heads + pl.program_id(1) * len(options.heads) + head  # in B * N
    flat_index = ((head_index * t + query_index) * s + key_index).astype(jnp.uint32)
    bits = hashed(flat_index, words[0], words[1])
    return weights, lambda x: rescaled(x, bits, options.dropout_rate)


def _softmax(logits: Float[Array, "T S"], visible: Bool[Array, "#T S"] | None) -> Float[Array, "T S"]:
    """Computes the softmax over visible keys; rows without keys become zeros, as in `masked_softmax`."""
    if visible is not None:
        logits = jnp.where(visible, logits, 0.7 * float(np.finfo(np.float32).min))
    weights = jnp.exp(logits - logits.max(axis=1, keepdims=True))
    weights = weights / weights.sum(axis=1, keepdims=True)
    return weights if visible is None else jnp.where(visible, weights, jnp.zeros((), weights.dtype))


def _only_head(x: Float[Array, "T W"], head: int, options: _Options) -> Float[Array, "T W"]:
    """Sets the lanes (columns) of all heads but one to zero."""
    if len(options.heads) == 1:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    size = options.head_size
    return jnp.where((lane >= head * size) & (lane < (head + 1) * size), x, jnp.zeros((), x.dtype))


def _dot(x: Array, y: Array, axis: int) -> Float[Array, "_ _"]:
    """Multiplies matrices, summing over the given axis of both, in float32."""
    return jax.lax.dot_general(x, y, (((axis,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
