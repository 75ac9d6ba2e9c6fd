"""Basic layers with parameters: `Linear`, `Embedding`, normalization, `FeedForward`, dropout, pooling."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.convolution import last_tokens, short_convolution
from tfx_jax.functional.layers import (
    Int8Matrix,
    dropout,
    feed_forward,
    layer_norm,
    linear,
    linear_logits,
    lookup,
    rms_norm,
)
from tfx_jax.functional.positions import learned_positions

_LECUN_NORMAL = nnx.initializers.lecun_normal()


def check_sizes(**sizes: int | None) -> None:
    """Raises ValueError for a size below 1, by name; None is a size that is not set."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


class Buffer(nnx.Variable[Array]):
    """An array that belongs to a pretrained model but is not trained: it gets no gradient, and folders contain it."""


class Linear(nnx.Module):
    """Linear map from one or several axes to one or several axes, with a kernel [*in, *out].

    The parameters are those of `nnx.LinearGeneral`; unlike there, gradients are computed in the dtype of the parameters
    (`tfx_jax.functional.linear`).
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        use_bias: bool = True,
        kernel_init: nnx.Initializer = _LECUN_NORMAL,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters.

        Args:
          in_features: sizes of the last axes of the input, which are summed over.
          out_features: sizes of the axes that replace them in the output.
          use_bias: whether to add a bias.
          kernel_init: initializes the kernel as a matrix [in, out]; LeCun normal, as in Flax, by default.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: stream `params`.

        Raises:
          ValueError: if a size is below 1.
        """
        self.in_features = (in_features,) if isinstance(in_features, int) else tuple(in_features)
        out = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        check_sizes(in_features=min(self.in_features), out_features=min(out))
        matrix = kernel_init(rngs.params(), (math.prod(self.in_features), math.prod(out)), param_dtype)
        self.out_features = out
        self.kernel = nnx.Param(matrix.reshape(*self.in_features, *out))
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), out, param_dtype)) if use_bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch_and_in"]) -> Float[Array, "*batch_and_out"]:
        """Returns x W + b over the last axes."""
        bias = None if self.bias is None else self.bias[...]
        return linear(x.astype(self.dtype), matrix_of(self, "kernel"), bias, num_axes=len(self.in_features))


class ShortConvolution(nnx.Module):
    """Causal convolution over tokens, separate for each feature, then SiLU; see `tfx_jax.functional.short_convolution`.

    Its parameters are a kernel [W, *features].
    """

    def __init__(self, width: int, *features: int, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        """Initializes the kernel uniformly between -1 / sqrt(W) and 1 / sqrt(W), as PyTorch does.

        Args:
          width: W, the number of tokens in a sum, the token itself included.
          features: sizes of the last axes of the input.
          param_dtype: dtype of the kernel.
          rngs: stream `params`.
        """
        limit = width**-0.5
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), (width, *features), param_dtype, -limit, limit))

    def __call__(
        self, x: Float[Array, "B T *features"], past: Float[Array, "B W-1 *features"] | None = None, **options: Any
    ) -> Float[Array, "B T *features"]:
        """Convolves and activates; `options` are those of `tfx_jax.functional.short_convolution`."""
        return jax.nn.silu(short_convolution(x, self.kernel[...], past, **options))

    def last_tokens(
        self,
        x: Float[Array, "B T *features"],
        past: Float[Array, "B W-1 *features"] | None = None,
        token_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B W-1 *features"]:
        """Returns the `past` of the tokens after `x`."""
        return last_tokens(x, self.kernel.shape[0] - 1, past, token_mask=token_mask)


def matrix_of(module: nnx.Module, name: str) -> Any:
    """Returns the matrix `name` of a module as a kernel of `tfx_jax.functional.linear`.

    It is an array; a `LowRankSum`, if `tfx_jax.nn.lora` has put an adapter beside it; or an `Int8Matrix`, if it has the
    scales of `tfx_jax.nn.layers.quantized`.
    """
    param, adapter = getattr(module, name), getattr(module, f"{name}_adapter", None)
    if (scales := getattr(module, f"{name}_scales", None)) is not None:
        return Int8Matrix(param[...], scales[...])
    return param[...] if adapter is None else adapter.beside(param[...])


class Embedding(nnx.Module):
    """Embedding matrix [V, D] for tokens and for the output layer (Press and Wolf, 2017).

    To tie input and output embeddings, use the same module for both. With `scale=sqrt(d_model)` (Vaswani et al., 2017,
    section 3.4) the embeddings start with unit variance; the output layer uses the matrix without the scale.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        scale: float = 1.0,
        init_stddev: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the matrix from a normal distribution.

        Args:
          vocab_size: V.
          d_model: D.
          scale: multiplies the embeddings that `__call__` returns. Vaswani et al. (2017) use sqrt(d_model).
          init_stddev: standard deviation of the distribution; None means d_model^-0.5.
          dtype: dtype of the computation.
          param_dtype: dtype of the matrix.
          rngs: stream `params`.
        """
        init = nnx.initializers.normal(d_model**-0.5 if init_stddev is None else init_stddev)
        self.table = nnx.Param(init(rngs.params(), (vocab_size, d_model), param_dtype))
        self.scale = scale
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Looks up and scales the embeddings of tokens; that of an id outside 0 .. V - 1 is NaN."""
        return lookup(self.table[...], tokens).astype(self.dtype) * self.scale

    def attend(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Returns float32 logits, the product of `x` with every row of the matrix."""
        return linear_logits(x.astype(self.dtype), self.table[...])


class LearnedPositions(nnx.Module):
    """Learned embeddings of `max_length` positions, initialized with `init_stddev` (None means d_model^-0.5)."""

    def __init__(
        self,
        max_length: int,
        d_model: int,
        *,
        init_stddev: float | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the table [max_length, d_model] from a normal distribution."""
        init = nnx.initializers.normal(d_model**-0.5 if init_stddev is None else init_stddev)
        self.table = nnx.Param(init(rngs.params(), (max_length, d_model), param_dtype))

    def __call__(self, positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
        """Looks up the embeddings of positions; that of a position outside the table is NaN."""
        return learned_positions(self.table[...], positions)


class LayerNorm(nnx.Module):
    """Layer normalization (Ba et al., 2016) with a learned scale and, with `use_bias`, a bias for each feature."""

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,  # unused, as in Flax
    ):
        """Initializes the scale with ones and the bias with zeros; `epsilon` is added to the variance."""
        self.scale = nnx.Param(jnp.ones(d_model, param_dtype))
        self.bias = nnx.Param(jnp.zeros(d_model, param_dtype)) if use_bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalizes the last axis."""
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, epsilon=self.epsilon)


class RMSNorm(nnx.Module):
    """Normalization by the root mean square (Zhang and Sennrich, 2019) with a learned scale for each feature."""

    def __init__(
        self,
        d_model: int,
        *,
        epsilon: float = 1e-6,
        scale_offset: float = 0.0,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,  # unused, as in Flax: the scale starts as one
    ):
        """Initializes the scale.

        Args:
          d_model: width D.
          epsilon: added to the mean square.
          scale_offset: added to the parameter to get the scale; 1 in Gemma, so that weight decay pulls the scale to 1.
          param_dtype: dtype of the parameter.
          rngs: unused.
        """
        self.scale = nnx.Param(jnp.full(d_model, 1.0 - scale_offset, param_dtype))
        self.epsilon = epsilon
        self.scale_offset = scale_offset

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalizes the last axis."""
        scale = self.scale[...]
        return rms_norm(x, scale + self.scale_offset if self.scale_offset else scale, epsilon=self.epsilon)


# Activations by their names in configurations.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swish": jax.nn.swish,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


class FeedForward(nnx.Module):
    """Two linear maps around an activation, the same at every position (Vaswani et al., 2017, section 3.3)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation_fn: Callable[[Array], Array] = jax.nn.relu,
        use_bias: bool = True,
        is_gated: bool = False,
        gate_offset: float = 0.0,
        limit: float | None = None,
        dropout_rate: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the matrices by Glorot and Bengio (2010) and biases with zeros.

        Args:
          d_model: width D of inputs and outputs.
          d_ff: number F of hidden units.
          activation_fn: activation of x up.
          use_bias: whether the linear maps have biases.
          is_gated: whether a third matrix, `gate`, multiplies the activations.
          gate_offset: see `tfx_jax.functional.gated_units`.
          limit: see `tfx_jax.functional.gated_units`.
          dropout_rate: dropout rate of the hidden units.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: stream `params`.

        Raises:
          ValueError: if a size is below 1.
        """
        check_sizes(d_model=d_model, d_ff=d_ff)
        init = nnx.initializers.glorot_uniform()
        self.up = nnx.Param(init(rngs.params(), (d_model, d_ff), param_dtype))
        self.up_bias = nnx.Param(jnp.zeros(d_ff, param_dtype)) if use_bias else None
        self.gate = nnx.Param(init(rngs.params(), (d_model, d_ff), param_dtype)) if is_gated else None
        self.gate_bias = nnx.Param(jnp.zeros(d_ff, param_dtype)) if is_gated and use_bias else None
        self.down = nnx.Param(init(rngs.params(), (d_ff, d_model), param_dtype))
        self.down_bias = nnx.Param(jnp.zeros(d_model, param_dtype)) if use_bias else None
        self.activation_fn = activation_fn
        self.gate_offset, self.limit = gate_offset, limit
        self.dropout_rate = dropout_rate
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "*batch D"]:
        """Transforms each position separately; `rngs=None` means evaluation."""
        biases = (self.up_bias, self.down_bias, self.gate_bias)
        up_bias, down_bias, gate_bias = (None if p is None else p[...] for p in biases)
        return feed_forward(
            x.astype(self.dtype),
            matrix_of(self, "up"),
            matrix_of(self, "down"),
            up_bias,
            down_bias,
            gate=None if self.gate is None else matrix_of(self, "gate"),
            gate_bias=gate_bias,
            gate_offset=self.gate_offset,
            limit=self.limit,
            activation_fn=self.activation_fn,
            dropout_rate=self.dropout_rate,
            dropout_rng=rngs.dropout() if rngs is not None and self.dropout_rate else None,
        )


def drop(x: Float[Array, "*shape"], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "*shape"]:
    """Applies `tfx_jax.functional.dropout` with a key of the stream `dropout`.

    Args:
      x: any shape.
      rate: probability of a zero. With rate 0 no key is taken, so that the keys of other layers do not change.
      rngs: None means evaluation and returns `x` unchanged.
    """
    return dropout(x, rate, rngs.dropout() if rngs is not None and rate else None)


def dropout_mask(shape: tuple[int, ...], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "*shape"] | None:
    """Returns a scaled dropout mask, for dropout that is the same at every step; None if there is no dropout."""
    return drop(jnp.ones(shape), rate, rngs) if rngs is not None and rate else None


def mean_over_tokens(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B D"]:
    """Returns the mean over the tokens of each row, float32 [B, D]; zeros for a row without tokens."""
    total = jnp.where(token_mask[..., None], x.astype(jnp.float32), 0.0).sum(axis=1)
    num_tokens = token_mask.sum(axis=1, keepdims=True)
    return total / jnp.maximum(num_tokens, 1).astype(jnp.float32)


def max_over_tokens(x: Float[Array, "B T D"], token_mask: Bool[Array, "B T"]) -> Float[Array, "B D"]:
    """Returns each feature's maximum over the tokens of each row, float32 [B, D]; zeros for a row without tokens."""
    largest = jnp.where(token_mask[..., None], x.astype(jnp.float32), -jnp.inf).max(axis=1)
    return jnp.where(token_mask.any(axis=1, keepdims=True), largest, 0.0)
