"""Layers without parameters: linear maps, normalization, feed-forward, dropout, int8 products."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, UInt32

from tfx_jax.functional.attention.signature import check_floats, statistics_dtype


def lookup(table: Float[Array, "V D"], ids: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """Looks up rows of a table, such as the vectors of tokens.

    Args:
      table: [V, D].
      ids: 0 .. V - 1, any shape.

    Returns:
      [*shape, D] in the dtype of `table`. The row of an id outside 0 .. V - 1 is NaN. Negative ids do not count from
      the end.

    >>> lookup(jnp.array([[0.5], [0.25]]), jnp.array([1, 0, -1, 2])).tolist()
    [[0.25], [0.5], [nan], [nan]]
    """
    return jnp.asarray(table).at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class LowRankSum(NamedTuple):
    """A matrix W + A B for `linear`, which multiplies by its parts.

    With a magnitude m, DoRA (Liu et al., 2024, https://arxiv.org/abs/2402.09353, equation 5): each column of W + A B is
    scaled to the norm m. The norms of the columns are constants in the backward pass (section 4.3).
    """

    kernel: Float[Array, "*in_and_out"]
    a: Float[Array, "*in R"]
    b: Float[Array, "R *out"]
    magnitude: Float[Array, "*out"] | None = None


class Int8Matrix(NamedTuple):
    """A matrix W for `linear`, which multiplies by `int8_product`: the rows of W^T, from `quantize_rows`."""

    values: Int8[Array, "*out D"]
    scales: Float[Array, "*out"]


def linear(
    x: Float[Array, "*batch_and_in"],
    kernel: Float[Array, "*in_and_out"] | LowRankSum | Int8Matrix,
    bias: Float[Array, "*out"] | None = None,
    *,
    num_axes: int = 1,
) -> Float[Array, "*batch_and_out"]:
    """Computes x W + b in the dtype of `x`; the gradients of W and b are computed in the dtypes of W and b.

    Mixed precision as in Micikevicius et al. (2018, https://arxiv.org/abs/1710.03740, section 3.1). bfloat16 products
    are summed in float32 anyway. Here the sum over all tokens is also not rounded before it becomes the gradient of W,
    nor is the sum over devices. If `x` and W have one dtype this is an ordinary product; if not, it is a
    `jax.custom_vjp`, which does not support `jax.jvp`.

    Args:
      x: [*batch, *in]; the sum runs over the last `num_axes` axes.
      kernel: W, [*in, *out], in the dtype of `x` or a more precise one; or W + A B (LoRA: Hu et al., 2021,
        https://arxiv.org/abs/2106.09685), with or without a magnitude; or W in int8, which has no gradient itself.
      bias: b, [*out]; None means 0.
      num_axes: number of axes of *in.

    Returns:
      [*batch, *out] in the dtype of `x`.

    >>> gradient = jax.grad(lambda kernel: linear(jnp.ones((3, 2), jnp.bfloat16), kernel)[0, 0].astype(jnp.float32))
    >>> gradient(jnp.ones((2, 1))).dtype
    dtype('float32')
    """
    if isinstance(kernel, LowRankSum):
        low_rank = linear(linear(x, kernel.a, num_axes=num_axes), kernel.b)
        if kernel.magnitude is None:
            return linear(x, kernel.kernel, bias, num_axes=num_axes) + low_rank
        w, a, b = jax.lax.stop_gradient((kernel.kernel, kernel.a, kernel.b))
        columns = w.astype(a.dtype) + jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
        scale = kernel.magnitude / column_norms(columns.reshape(-1, *kernel.magnitude.shape))
        y = linear(x, kernel.kernel, num_axes=num_axes) + low_rank
        scale = scale.reshape((1,) * (y.ndim - scale.ndim) + scale.shape)
        y = (y.astype(np.promote_types(x.dtype, scale.dtype)) * scale).astype(x.dtype)
        return y if bias is None else add_bias(y, bias)
    if isinstance(kernel, Int8Matrix):
        rows = x.reshape(*x.shape[: x.ndim - num_axes], -1)
        y = int8_product(rows, kernel.values.reshape(-1, rows.shape[-1]), kernel.scales.reshape(-1)).astype(x.dtype)
        y = y.reshape(*rows.shape[:-1], *kernel.scales.shape)
        return y if bias is None else add_bias(y, bias)
    if x.dtype == kernel.dtype:
        y = _product(x, kernel, tuple(range(num_axes)), x.dtype)
        return y if bias is None else add_bias(y, bias)
    # As a product of two matrices: a TPU's lanes hold the last axis, and sums over tokens are twice as fast if that
    # axis has all features instead of the 64 of one head. With one dtype, as on CPUs, this would cost a few percent.
    batch, out = x.shape[: x.ndim - num_axes], kernel.shape[num_axes:]
    matrix = kernel.reshape(math.prod(kernel.shape[:num_axes]), math.prod(out))
    y = _product(x.reshape(*batch, matrix.shape[0]), matrix, (0,), x.dtype)
    return (y if bias is None else add_bias(y, bias.reshape(-1))).reshape(*batch, *out)


def column_norms(matrix: Float[Array, "*shape"], axis: int = 0) -> Float[Array, "*remaining"]:
    """Returns the Euclidean norms along an axis; that of zeros is tiny instead of 0, so that it can be a divisor."""
    return jnp.maximum(jnp.linalg.norm(matrix, axis=axis), jnp.finfo(matrix.dtype).tiny)


def add_bias(x: Float[Array, "*batch_and_out"], bias: Float[Array, "*out"]) -> Float[Array, "*batch_and_out"]:
    """Adds a parameter over the last axes, such as learned positions; its gradient has its dtype, as in `linear`.

    Args:
      x: [*batch, *out].
      bias: [*out], in the dtype of `x` or a more precise one.

    Returns:
      [*batch, *out] in the dtype of `x`.
    """
    dtype = np.promote_types(x.dtype, bias.dtype)  # NumPy's rule: JAX's raises under strict promotion
    shape = (1,) * (x.ndim - bias.ndim) + bias.shape
    return (x.astype(dtype) + bias.astype(dtype).reshape(shape)).astype(x.dtype)


def linear_logits(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Computes x table^T, in float32 at least; gradients as in `linear`.

    Args:
      x: [*batch, D].
      table: [V, D], such as token embeddings, in the dtype of `x` or a more precise one.

    Returns:
      [*batch, V].
    """
    return _product(x, table, (1,), statistics_dtype(x))


def _product(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Multiplies, summing over the last axes of `x` and the given axes of `kernel`, its first or its last ones.

    `dtype` is that of the result. With different dtypes the gradient of the kernel is computed in the kernel's dtype.
    """
    if x.dtype == kernel.dtype:
        return _dot(x, kernel, axes, dtype)
    return _mixed_product(x, kernel, axes, jnp.dtype(dtype), kernel.dtype)


def _dot(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Multiplies arrays of one dtype, with the sum over the axes of `_product`; `dtype` is that of the result."""
    last = tuple(range(x.ndim - len(axes), x.ndim))
    return jax.lax.dot_general(x, kernel, ((last, axes), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _mixed_product(x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike) -> Array:
    """Multiplies in the dtype of `x`; the gradient of the kernel is computed in `kernel_dtype`."""
    del kernel_dtype
    return _dot(x, kernel.astype(x.dtype), axes, dtype)


def _forward(
    x: Array, kernel: Array, axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike
) -> tuple[Array, tuple[Array, Array]]:
    """Returns the product of `_mixed_product`, and its factors as the residuals of the backward pass."""
    del kernel_dtype
    cast_kernel = kernel.astype(x.dtype)
    return _dot(x, cast_kernel, axes, dtype), (x, cast_kernel)


def _backward(
    axes: tuple[int, ...], dtype: DTypeLike, kernel_dtype: DTypeLike, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """Returns the gradients of `x` and of the kernel, the latter in `kernel_dtype`."""
    del dtype
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)
    output_axes = tuple(axis for axis in range(kernel.ndim) if axis not in axes)
    batch = tuple(range(x.ndim - len(axes)))  # summed over in the gradient of the kernel
    # The kernel's input axes come first (as in `linear`) or last (`linear_logits`), and so in its gradient.
    factors = (x, gradient) if axes[0] == 0 else (gradient, x)
    kernel_gradient = jax.lax.dot_general(*factors, ((batch, batch), ((), ())), preferred_element_type=kernel_dtype)
    return _dot(gradient, kernel, output_axes, x.dtype), kernel_gradient


_mixed_product.defvjp(_forward, _backward)


def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "*batch D"]:
    """Normalizes each token to mean 0 and variance 1 over its D features, then scales and shifts (Ba et al., 2016).

    Unlike in batch normalization, the result of a token does not depend on other tokens or on padding.

    Args:
      x: [*batch, D], any float dtype.
      scale: factor of each feature; None means 1.
      bias: added to each feature; None means 0.
      epsilon: added to the (biased) variance.

    Returns:
      [*batch, D] in the dtype of `x`; the statistics are float32 (float64 for float64 inputs).

    >>> layer_norm(jnp.array([1.0, 3.0])).round(3).tolist()
    [-1.0, 1.0]
    """
    check_floats(x=x)
    dtype = statistics_dtype(x)
    centered = x.astype(dtype) - x.mean(axis=-1, keepdims=True, dtype=dtype)
    y = centered * jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + epsilon)
    last_axis = (1,) * (x.ndim - 1) + (-1,)  # shape [1, .., 1, D]
    if scale is not None:
        y = y * scale.astype(dtype).reshape(last_axis)
    if bias is not None:
        y = y + bias.astype(dtype).reshape(last_axis)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"] | None = None, *, epsilon: float = 1e-6
) -> Float[Array, "*batch D"]:
    """Normalizes each token to a root mean square of 1 over its D features, then scales (Zhang and Sennrich, 2019).

    Layer normalization without mean and bias (https://arxiv.org/abs/1910.07467).

    Args:
      x: [*batch, D], any float dtype.
      scale: factor of each feature; None means 1.
      epsilon: added to the mean square.

    Returns:
      [*batch, D] in the dtype of `x`; the statistics are float32 (float64 for float64 inputs).

    >>> rms_norm(jnp.array([4.0, 0.0, 0.0, 0.0])).round(3).tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    check_floats(x=x)
    dtype = statistics_dtype(x)
    y = x.astype(dtype)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + epsilon)
    if scale is not None:
        y = y * scale.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return y.astype(x.dtype)


def feed_forward(
    x: Float[Array, "*batch D"],
    up: Float[Array, "D F"] | LowRankSum,
    down: Float[Array, "F D"] | LowRankSum,
    up_bias: Float[Array, " F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    *,
    gate: Float[Array, "D F"] | LowRankSum | None = None,
    gate_bias: Float[Array, " F"] | None = None,
    gate_offset: float = 0.0,
    limit: float | None = None,
    activation_fn: Callable[[Array], Array] = jax.nn.relu,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Float[Array, "*batch D"]:
    """Computes max(0, x W1 + b1) W2 + b2 at every position (equation 2 of Vaswani et al., 2017).

    Args:
      x: [*batch, D].
      up: the paper's W1, [D, F]; like `down` and `gate` a kernel of `linear`.
      down: W2, [F, D].
      up_bias: b1; None means 0.
      down_bias: b2; None means 0.
      gate: matrix whose product with x multiplies the activations (Shazeer, 2020, https://arxiv.org/abs/2002.05202);
        None means no gate.
      gate_bias: added to x gate; None means 0.
      gate_offset: see `gated_units`.
      limit: see `gated_units`.
      activation_fn: activation; the paper's is ReLU.
      dropout_rate: dropout rate of the hidden units; the paper has no dropout there.
      dropout_rng: PRNG key; None disables dropout.

    Returns:
      [*batch, D] in the dtype of `x`; parameters may be more precise, see `linear`.

    >>> array = jax.numpy.array
    >>> feed_forward(array([2.0]), array([[1.0, -1.0]]), array([[3.0], [5.0]])).tolist()
    [6.0]
    """
    gate_factors = None if gate is None else linear(x, gate, gate_bias)
    hidden = gated_units(
        linear(x, up, up_bias), gate_factors, activation_fn=activation_fn, gate_offset=gate_offset, limit=limit
    )
    return linear(dropout(hidden, dropout_rate, dropout_rng), down, down_bias)


def gated_units(
    x: Float[Array, "*batch F"],
    gate: Float[Array, "*batch F"] | None = None,
    *,
    activation_fn: Callable[[Array], Array] = jax.nn.relu,
    gate_offset: float = 0.0,
    limit: float | None = None,
) -> Float[Array, "*batch F"]:
    """Computes the hidden units of `feed_forward`, activation(x) * (gate + offset).

    Args:
      x: inputs of the activation, [*batch, F].
      gate: factor of the hidden units, [*batch, F]; None means no gate, and `gate_offset` is unused.
      activation_fn: activation of `x`.
      gate_offset: added to `gate`: 1 in gpt-oss (https://arxiv.org/abs/2508.10925).
      limit: upper bound of `x`, and bound of `gate` on both sides: 7 in gpt-oss; None means no bound.

    Returns:
      [*batch, F].

    >>> gated_units(jax.numpy.array([9.0]), jax.numpy.array([-9.0]), gate_offset=1.0, limit=7.0).tolist()
    [-42.0]
    """
    hidden = activation_fn(x if limit is None else jnp.minimum(x, limit))
    if gate is None:
        return hidden
    gate = gate if limit is None else jnp.clip(gate, -limit, limit)
    return hidden * (gate + gate_offset if gate_offset else gate)


_LARGEST = 127  # of int8, symmetric


def quantize_rows(matrix: Float[Array, "*rows D"]) -> tuple[Int8[Array, "*rows D"], Float[Array, "*rows"]]:
    """Rounds each row to 255 levels, symmetric around 0; the element of largest magnitude is exact.

    Args:
      matrix: [*rows, D], any float dtype.

    Returns:
      int8 values, [*rows, D], and the float32 scale of each row, [*rows]. values * scale differs from the element by at
      most half a scale, 1/254 of the largest magnitude of the row. Rows with NaN or infinity get a non-finite scale, so
      that results computed from them are not finite either. Rows of zeros, and of numbers so small that their scale
      would not be a normal number, get values of 0 and a scale of 1.

    >>> import jax
    >>> values, scales = jax.jit(quantize_rows)(jnp.array([[0.4, -1.0], [0.0, 0.0]]))
    >>> values.tolist(), (1 / scales).round().tolist()
    ([[51, -127], [0, 0]], [127.0, 1.0])
    """
    matrix = matrix.astype(jnp.float32)
    largest = jnp.abs(matrix).max(axis=-1, keepdims=True)
    scales = largest / _LARGEST
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
    return jnp.round(matrix / scales).astype(jnp.int8), scales[..., 0]


def int8_product(
    x: Float[Array, "*rows D"], values: Int8[Array, "N D"], scales: Float[Array, " N"]
) -> Float[Array, "*rows N"]:
    """Computes x W^T with an int8 product: rows of `x` are quantized by `quantize_rows`, and integer sums are exact.

    The derivative is that of the product with values * scales, as if `x` were not rounded.

    Args:
      x: [*rows, D], any float dtype.
      values: int8 values of W from `quantize_rows`, [N, D].
      scales: scales of the rows of W, [N].

    Returns:
      float32, [*rows, N].

    >>> import jax
    >>> quantized = jax.jit(quantize_rows)(jnp.array([[0.5, -1.0]]))
    >>> jax.jit(int8_product)(jnp.array([2.0, -4.0]), *quantized).round().tolist()
    [5.0]
    """
    return _int8_product(x, values, scales)


@jax.custom_jvp
def _int8_product(x: Array, values: Array, scales: Array) -> Array:
    """Computes `int8_product`, whose derivative is given below, because that of rounding is 0."""
    rounded, row_scales = quantize_rows(x)
    rows = x.shape[:-1]
    is_single = math.prod(rows) == 1
    if is_single:
        # A row of zeros makes a single row a matrix, because XLA's fast int8 kernel for CPUs takes only matrices. One
        # row by 768 x 3,072 weights on a core: 4,100 us; with the row of zeros 180 us; float32 360 us. The row is added
        # on every device, because tracing does not know for which one it is.
        rounded = jnp.pad(rounded.reshape(1, -1), ((0, 1), (0, 0)))
    sums = jnp.einsum("...D,ND->...N", rounded, values, preferred_element_type=jnp.int32)
    if is_single:
        sums = sums[0].reshape(*rows, -1)
    return sums.astype(jnp.float32) * row_scales[..., None] * scales.reshape((1,) * (x.ndim - 1) + (-1,))


@_int8_product.defjvp
def _int8_product_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Returns the product, and that of the tangent of `x` with the matrix plus the product's share of the scales'."""
    (x, values, scales), (x_tangent, _, scales_tangent) = primals, tangents
    product = _int8_product(x, values, scales)
    per_output = (1,) * (x.ndim - 1) + (-1,)
    tangent = jnp.einsum("...D,ND->...N", x_tangent.astype(jnp.float32), values.astype(jnp.float32) * scales[:, None])
    return product, tangent + product * (scales_tangent / scales).reshape(per_output)


_LEVELS = 1 << 16  # values of the sixteen bits that decide about an element


def dropout(x: Float[Array, "*shape"], rate: float, rng: Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the rest to keep the mean (Srivastava et al., 2014).

    Two random words from the key select a hash function. Sixteen bits of the hash of an element's index decide whether
    it is dropped. That takes a dozen integer operations per element, which are fused with the surrounding operations on
    every kind of device, and the mask does not depend on the sharding. Arrays of more than 2^32 elements repeat it.

    Args:
      x: any shape, any float dtype.
      rate: probability of a zero, in [0, 1), rounded to a multiple of 1/65536; the scale uses the rounded value, so the
        expectation is exact.
      rng: PRNG key of any implementation; None means evaluation and returns `x` unchanged.

    Returns:
      An array in the shape and dtype of `x`.

    Raises:
      ValueError: if `rate` is outside [0, 1).

    >>> dropout(jnp.ones(3), 0.5, None).tolist()
    [1.0, 1.0, 1.0]
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate must be in [0, 1), got {rate}")
    if rng is None or num_kept_levels(rate) is None:
        return x
    return rescaled(x, hashed(_flat_indices(x.shape), *hash_words(rng)), rate)


def num_kept_levels(rate: float) -> int | None:
    """Returns how many of 65,536 equally likely hashes keep an element at a dropout rate, at least 1; None if all."""
    num_kept = _LEVELS - round(rate * _LEVELS)
    return None if num_kept == _LEVELS else max(num_kept, 1)


def hash_words(rng: Array) -> UInt32[Array, "2"]:
    """Returns the two random words with which a PRNG key selects a hash function."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def hashed(indices: UInt32[Array, "*shape"], first: Array, second: Array) -> UInt32[Array, "*shape"]:
    """Hashes each index by the function that the two words select from 2^64; also used inside a Pallas kernel."""
    return _mixed(_mixed(indices ^ first) ^ second)


def rescaled(x: Float[Array, "*shape"], bits: UInt32[Array, "*shape"], rate: float) -> Float[Array, "*shape"]:
    """Zeroes the elements that the upper 16 of their `bits` drop at this rate (above 0), and scales the rest."""
    num_kept = num_kept_levels(rate)
    assert num_kept is not None
    keep = (bits >> 16).astype(jnp.int32) < num_kept
    # Scaled in float32: a scale rounded to bfloat16 would bias all elements, by 0.16 % at rate 0.1.
    scaled = x.astype(statistics_dtype(x)) * (_LEVELS / num_kept)
    return jnp.where(keep, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


def _flat_indices(shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Returns the row-major index of each element, modulo 2^32."""
    indices = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        indices = indices + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return indices


def _mixed(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Applies a bijective hash of 32 bits in which every input bit flips each output bit with probability 1/2.

    Wellons's `lowbias32`, found by a search for the least bias (2018, https://nullprogram.com/blog/2018/07/31/).
    """
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
