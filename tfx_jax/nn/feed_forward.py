"""The position-wise feed-forward network with its parameters."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tfx_jax.functional.feed_forward import feed_forward

# By the names that configurations have for them.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swish": jax.nn.swish,
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
        dropout_rate: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.glorot_uniform()
        self.up = nnx.Param(init(rngs.params(), (d_model, d_ff), param_dtype))
        self.up_bias = nnx.Param(jnp.zeros(d_ff, param_dtype)) if use_bias else None
        self.gate = nnx.Param(init(rngs.params(), (d_model, d_ff), param_dtype)) if is_gated else None
        self.down = nnx.Param(init(rngs.params(), (d_ff, d_model), param_dtype))
        self.down_bias = nnx.Param(jnp.zeros(d_model, param_dtype)) if use_bias else None
        self.activation_fn = activation_fn
        self.dropout_rate = dropout_rate
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "*batch D"]:
        """Transforms every position alone; `rngs=None` means evaluation."""
        biases_and_gate = (self.up_bias, self.down_bias, self.gate)
        up_bias, down_bias, gate = (None if p is None else p[...] for p in biases_and_gate)
        return feed_forward(
            x.astype(self.dtype),
            self.up[...],
            self.down[...],
            up_bias,
            down_bias,
            gate=gate,
            activation_fn=self.activation_fn,
            dropout_rate=self.dropout_rate,
            dropout_rng=rngs.dropout() if rngs is not None and self.dropout_rate else None,
        )
