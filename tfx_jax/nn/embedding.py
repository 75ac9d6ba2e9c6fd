"""Token embeddings, used at both ends of a model, and learned positions."""

import math

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tfx_jax.functional.linear import linear_logits
from tfx_jax.functional.lookup import lookup
from tfx_jax.functional.positions import learned_positions


class Embedding(nnx.Module):
    """One matrix [V, D] for source tokens, target tokens and the pre-softmax layer (Press and Wolf, 2017).

    Section 3.4 of Vaswani et al. (2017): looked up, the vectors are multiplied by sqrt(d_model), which gives them unit
    variance at the start; as the output layer the matrix is used as it is. Tie by calling one module twice.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        scale: float | None = None,
        init_stddev: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws the matrix from a normal distribution.

        Args:
          vocab_size: V.
          d_model: D.
          scale: of the vectors that are looked up; None means sqrt(d_model). BERT, GPT and T5 have 1.
          init_stddev: of the numbers drawn; None means d_model^-0.5.
          dtype: of the computation.
          param_dtype: of the matrix.
          rngs: stream `params`.
        """
        init = nnx.initializers.normal(d_model**-0.5 if init_stddev is None else init_stddev)
        self.table = nnx.Param(init(rngs.params(), (vocab_size, d_model), param_dtype))
        self.scale = math.sqrt(d_model) if scale is None else scale
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Looks tokens up and scales; the vector of an id outside 0 .. V - 1 is NaN."""
        return lookup(self.table[...], tokens).astype(self.dtype) * self.scale

    def attend(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores every token of the vocabulary against `x`; float32 logits."""
        return linear_logits(x.astype(self.dtype), self.table[...])


class LearnedPositions(nnx.Module):
    """A learned vector for each of `max_length` positions, drawn with `init_stddev` (None means d_model^-0.5)."""

    def __init__(
        self,
        max_length: int,
        d_model: int,
        *,
        init_stddev: float | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(d_model**-0.5 if init_stddev is None else init_stddev)
        self.table = nnx.Param(init(rngs.params(), (max_length, d_model), param_dtype))

    def __call__(self, positions: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
        """Looks positions up; see `tfx_jax.functional.learned_positions`."""
        return learned_positions(self.table[...], positions)
