"""A mixture of feed-forward experts with its parameters."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.feed_forward import feed_forward
from tfx_jax.functional.moe import (
    Routing,
    expert_capacity,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    top_1_routing,
)


class RouterLosses(NamedTuple):
    """To be added to the loss of the task, with small factors."""

    load_balancing: Float[Array, ""]
    z: Float[Array, ""]


class MixtureOfExperts(nnx.Module):
    """`num_experts` feed-forward networks and a router that sends each token to one of them (Fedus et al., 2021).

    With `routing_fn=top_2_routing` and twice the capacity factor, to two of them (Lepikhin et al., 2020).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        capacity_factor: float = 1.25,
        routing_fn: Callable[..., Routing] = top_1_routing,
        activation_fn: Callable[[Array], Array] = jax.nn.relu,
        dropout_rate: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.glorot_uniform(batch_axis=0)
        self.router = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (d_model, num_experts), param_dtype))
        self.up = nnx.Param(init(rngs.params(), (num_experts, d_model, d_ff), param_dtype))
        self.up_bias = nnx.Param(jnp.zeros((num_experts, d_ff), param_dtype))
        self.down = nnx.Param(init(rngs.params(), (num_experts, d_ff, d_model), param_dtype))
        self.down_bias = nnx.Param(jnp.zeros((num_experts, d_model), param_dtype))
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.routing_fn = routing_fn
        self.activation_fn = activation_fn
        self.dropout_rate = dropout_rate
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        *,
        mask: Bool[Array, "*batch"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "*batch D"], RouterLosses]:
        """Returns the experts' answers, zero for dropped tokens, and the router's losses.

        Args:
          x: tokens, [*batch, D], which all compete for places.
          mask: True for real tokens; padding is sent to no expert and counts in no loss.
          rngs: for dropout of hidden units; None means evaluation.
        """
        # In float32 whatever `dtype`, as in the Switch Transformer: a rounding here can send a token elsewhere.
        logits = jnp.einsum("...D,DE->...E", x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        dropout_rng = rngs.dropout() if rngs is not None and self.dropout_rate else None
        apply = jax.vmap(
            functools.partial(feed_forward, activation_fn=self.activation_fn, dropout_rate=self.dropout_rate)
        )
        params = [param[...].astype(self.dtype) for param in (self.up, self.down, self.up_bias, self.down_bias)]

        def experts_fn(buffers: Float[Array, "E C D"]) -> Float[Array, "E C D"]:
            each = None if dropout_rng is None else jax.random.split(dropout_rng, self.num_experts)
            return apply(buffers, *params, dropout_rng=each)

        y = mixture_of_experts(
            x.astype(self.dtype),
            logits,
            experts_fn,
            capacity=expert_capacity(logits.size // self.num_experts, self.num_experts, self.capacity_factor),
            routing_fn=self.routing_fn,
            mask=mask,
        )
        return y, RouterLosses(load_balancing_loss(logits, mask), router_z_loss(logits, mask))
