"""A mixture of feed-forward experts with its parameters."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.moe import (
    Routing,
    expert_capacity,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    top_1_routing,
)
from tfx_jax.nn.feed_forward import FeedForward
from tfx_jax.nn.stack import stack_layers


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
        self.router = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (d_model, num_experts), param_dtype))
        make_expert = functools.partial(
            FeedForward,
            d_model,
            d_ff,
            activation_fn=activation_fn,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.experts = stack_layers(lambda rngs: make_expert(rngs=rngs), num_experts, rngs)
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.routing_fn = routing_fn
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
        keys = jax.random.split(rngs.dropout(), self.num_experts) if rngs is not None and self.dropout_rate else None

        def answer(expert: FeedForward, buffer: Float[Array, "C D"], key: Array | None) -> Float[Array, "C D"]:
            return expert(buffer, rngs=None if key is None else nnx.Rngs(dropout=key))

        y = mixture_of_experts(
            x.astype(self.dtype),
            logits,
            lambda buffers: jax.vmap(answer)(self.experts, buffers, keys),
            capacity=expert_capacity(logits.size // self.num_experts, self.num_experts, self.capacity_factor),
            routing_fn=self.routing_fn,
            mask=mask,
        )
        return y, RouterLosses(load_balancing_loss(logits, mask), router_z_loss(logits, mask))
