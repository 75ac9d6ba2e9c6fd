"""`MixtureOfExperts`, feed-forward experts with a router, and `ExpertsConfig`, its part of a model's configuration."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, one_of
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.moe import (
    ROUTER_SCORES,
    Routing,
    balanced_bias,
    check_expert_groups,
    expert_capacity,
    expert_load,
    load_balancing_loss,
    mixture_of_experts,
    router_z_loss,
    sequence_balancing_loss,
    top_1_routing,
    top_k_routing,
)
from tfx_jax.nn.auxiliary import AuxiliaryLoss, ExpertLoad, StepMetric
from tfx_jax.nn.basic import Buffer, FeedForward, Linear, check_sizes
from tfx_jax.nn.distribution import current_distribution
from tfx_jax.nn.stack import stack_layers


@documented
@dataclasses.dataclass(unsafe_hash=True)  # part of a model's configuration, which is a static part of the model
class ExpertsConfig:
    """The mixtures of experts of a model, in place of feed-forward networks: `--config.model.experts.num_experts=8`."""

    num_experts: int = at_least(0, 0)  # of each mixture; 0: there is none
    every: int = at_least(1, 2)  # which layers have one: the second, the fourth ... as in GShard and Switch
    experts_per_token: int = at_least(1, 1)  # 1 as in Switch, 2 as in GShard and Mixtral, or more
    is_normalized: bool | None = None  # whether a token's weights have the sum 1; None: of several experts, not of one
    d_ff: int | None = at_least(1, None)  # hidden units of an expert; None: as in other feed-forward networks
    use_router_bias: bool = False  # whether the router has offsets, as in gpt-oss
    router_scores: str = one_of(ROUTER_SCORES, "softmax")  # of experts: probabilities, or "sigmoid" as in DeepSeek-V3
    use_correction_bias: bool = False  # whether a bias that evens out loads is added to scores to choose experts
    bias_speed: float = at_least(0, 0.001)  # change of that bias in a training step, see `balanced_bias`
    num_expert_groups: int = at_least(1, 1)  # groups of successive experts, of which a token may use some only
    groups_per_token: int = at_least(1, 1)  # groups in which a token may have experts
    group_choices: int = at_least(1, 1)  # best scores of a group that add up to the group's: 1 in DeepSeek-V2, 2 in V3
    weight_scale: float = at_least(0, 1.0)  # multiplies the weights of a token's experts: 2.5 in DeepSeek-V3
    shared_d_ff: int = at_least(0, 0)  # hidden units of a network that all tokens go through too; 0: there is none
    use_shared_gate: bool = False  # whether the outputs of that network are multiplied by a sigmoid, as in Qwen2-MoE
    capacity_factor: float = at_least(0, 1.25)  # places of an expert in training, in even shares; GShard: 1
    num_groups: int = at_least(0, 0)  # of a batch, whose tokens compete for places; 0: one for each device with rows
    load_balancing: float = at_least(0, 0.01)  # weight of the loss that spreads tokens evenly; DeepSeek-V3: 0.0001
    router_z_loss: float = at_least(0, 0.001)  # weight of the loss that keeps the router's logits small

    def validate(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.num_experts and self.num_experts < self.experts_per_token:
            raise ValueError(
                f"experts.num_experts={self.num_experts} must be at least experts.experts_per_token="
                f"{self.experts_per_token}"
            )
        if not self.capacity_factor:
            raise ValueError(f"experts.capacity_factor must be above 0, got {self.capacity_factor}")
        if self.use_shared_gate and not self.shared_d_ff:
            raise ValueError("experts.use_shared_gate needs a shared network: set experts.shared_d_ff")
        if self.groups_per_token > self.num_expert_groups:
            raise ValueError(
                f"experts.groups_per_token={self.groups_per_token} must be at most experts.num_expert_groups="
                f"{self.num_expert_groups}"
            )
        if self.num_experts and self.num_expert_groups > 1:
            groups = ("num_expert_groups", "groups_per_token", "group_choices")
            try:
                check_expert_groups(
                    self.num_experts, self.experts_per_token, **{name: getattr(self, name) for name in groups}
                )
            except ValueError as error:
                raise ValueError(f"experts: {error}") from None

    def pattern(self) -> list[bool]:
        """Returns whether each layer of the pattern that a model's layers repeat has a mixture of experts."""
        return [False] * (self.every - 1) + [True] if self.num_experts else [False]

    @property
    def has_normalized_weights(self) -> bool:
        """Whether a token's weights have the sum 1."""
        return self.experts_per_token > 1 if self.is_normalized is None else self.is_normalized

    def make(self, d_model: int, d_ff: int, *, rngs: nnx.Rngs, **options: Any) -> "MixtureOfExperts":
        """Makes the mixture of a layer.

        Args:
          d_model: width of a token.
          d_ff: hidden units of an expert if this configuration sets none.
          rngs: stream `params`.
          **options: options of `FeedForward` for the experts.
        """
        return MixtureOfExperts(
            d_model,
            d_ff if self.d_ff is None else self.d_ff,
            self.num_experts,
            capacity_factor=self.capacity_factor,
            routing_fn=_routing(
                num_choices=self.experts_per_token,
                is_normalized=self.has_normalized_weights,
                scores=self.router_scores,
                num_expert_groups=self.num_expert_groups,
                groups_per_token=self.groups_per_token,
                group_choices=self.group_choices,
                scale=self.weight_scale,
            ),
            use_router_bias=self.use_router_bias,
            use_correction_bias=self.use_correction_bias,
            bias_speed=self.bias_speed,
            balancing_loss_fn=_balancing_loss(self.router_scores, self.experts_per_token),
            shared_d_ff=self.shared_d_ff,
            use_shared_gate=self.use_shared_gate,
            num_groups=self.num_groups,
            load_balancing_weight=self.load_balancing,
            router_z_weight=self.router_z_loss,
            rngs=rngs,
            **options,
        )


@functools.lru_cache
def _routing(**options: Any) -> Callable[..., Routing]:
    """Returns the routing function; the same object for equal options, so that compiled programs are shared."""
    return functools.partial(top_k_routing, **options)


@functools.lru_cache
def _balancing_loss(scores: str, num_choices: int) -> Callable[..., Array]:
    """Returns the loss that spreads tokens evenly for a kind of scores; the same object for equal arguments."""
    if scores == "sigmoid":
        return functools.partial(sequence_balancing_loss, num_choices=num_choices)
    return load_balancing_loss


class MixtureOfExperts(nnx.Module):
    """`num_experts` feed-forward networks and a router that sends each token to one of them (Fedus et al., 2021).

    With `routing_fn=top_2_routing`, each token is sent to two experts (Lepikhin et al., 2020); with `top_k_routing`, to
    more. With `shared_d_ff`, all tokens also go through one shared network, whose output is added (DeepSeekMoE: Dai et
    al., 2024, section 3.2, https://arxiv.org/abs/2401.06066).

    In training an expert takes at most `expert_capacity` tokens and drops the rest, and the loss of the router is
    written to `auxiliary_loss`, which the training step adds to its loss. Evaluation drops no token, so an output does
    not depend on other tokens.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        capacity_factor: float = 1.25,
        routing_fn: Callable[..., Routing] = top_1_routing,
        use_router_bias: bool = False,
        use_correction_bias: bool = False,
        bias_speed: float = 0.001,
        balancing_loss_fn: Callable[..., Float[Array, ""]] = load_balancing_loss,
        shared_d_ff: int = 0,
        use_shared_gate: bool = False,
        num_groups: int = 0,
        load_balancing_weight: float = 0.01,
        router_z_weight: float = 0.001,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Initializes the parameters.

        Args:
          d_model: width of a token.
          d_ff: hidden units of an expert.
          num_experts: number of experts, E.
          capacity_factor: how many tokens an expert takes in training, as a multiple of its even share of all choices,
            see `tfx_jax.functional.expert_capacity`.
          routing_fn: function of (logits [T, E], capacity, mask=) that returns a `Routing`, such as `top_1_routing`.
          use_router_bias: whether the router has a bias.
          use_correction_bias: whether `routing_fn` gets a `bias`. It has no gradient; `balance_experts` changes it by
            the load of a training step, as in DeepSeek-V3.
          bias_speed: change of that bias in a step, see `tfx_jax.functional.balanced_bias`.
          balancing_loss_fn: function of (logits [*batch, T, E], mask [*batch, T]) that returns the loss that spreads
            tokens evenly, such as `tfx_jax.functional.sequence_balancing_loss`.
          shared_d_ff: hidden units of the shared network; 0 means none.
          use_shared_gate: whether the output of the shared network is multiplied by the logistic function of a linear
            map of the token (Qwen2-MoE).
          num_groups: number of groups into which a training batch is cut, whose tokens compete for places in the
            experts, see `tfx_jax.functional.mixture_of_experts`; 0 means one for each device that has examples.
          load_balancing_weight: weight of `balancing_loss_fn` in the auxiliary loss.
          router_z_weight: weight of `tfx_jax.functional.router_z_loss` in the auxiliary loss.
          dtype: dtype of the experts' computation; the router computes in float32.
          param_dtype: dtype of the parameters.
          rngs: stream `params`.
          **options: options of `FeedForward` for the experts.

        Raises:
          ValueError: if a size is below 1.
        """
        check_sizes(d_model=d_model, d_ff=d_ff, num_experts=num_experts)
        router = nnx.initializers.glorot_uniform()(rngs.params(), (d_model, num_experts), param_dtype)
        self.router: nnx.Variable[Array] = nnx.Param(router)  # a `Frozen` one in some fine-tunings
        self.router_bias = nnx.Param(jnp.zeros(num_experts, param_dtype)) if use_router_bias else None
        self.correction_bias = Buffer(jnp.zeros(num_experts, param_dtype)) if use_correction_bias else None
        self.load = ExpertLoad(jnp.zeros(num_experts)) if use_correction_bias else None
        make_expert = functools.partial(FeedForward, d_model, d_ff, dtype=dtype, param_dtype=param_dtype, **options)
        self.experts = stack_layers(lambda rngs: make_expert(rngs=rngs), num_experts, rngs)
        make_shared = functools.partial(FeedForward, d_model, shared_d_ff, dtype=dtype, param_dtype=param_dtype)
        self.shared: Any = make_shared(rngs=rngs, **options) if shared_d_ff else None
        make_gate = functools.partial(Linear, d_model, 1, use_bias=False, dtype=dtype, param_dtype=param_dtype)
        self.shared_gate = make_gate(rngs=rngs) if use_shared_gate else None
        self.auxiliary_loss = AuxiliaryLoss(jnp.zeros(()))
        self.load_balancing = StepMetric(jnp.zeros(()))
        self.dropped_tokens = StepMetric(jnp.zeros(()))
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.routing_fn = routing_fn
        self.num_groups = num_groups
        self.bias_speed = bias_speed
        self.balancing_loss_fn = balancing_loss_fn
        self.load_balancing_weight, self.router_z_weight = load_balancing_weight, router_z_weight
        self.dropout_rate = self.experts.dropout_rate
        self.dtype = dtype

    @property
    def networks(self) -> list[FeedForward]:
        """The stack of experts and, if it exists, the shared network."""
        return [self.experts] if self.shared is None else [self.experts, self.shared]

    @property
    def experts_per_token(self) -> int:
        """A, the number of experts of a token."""
        logits = jax.ShapeDtypeStruct((1, self.num_experts), jnp.float32)
        return jax.eval_shape(functools.partial(self.routing_fn, capacity=1), logits).expert.shape[1]

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        *,
        token_mask: Bool[Array, "*batch"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch D"]:
        """Returns the weighted sum of the experts' answers for each token, zero for dropped tokens.

        The answer of the shared network is added for all tokens, dropped ones and padding too.

        Args:
          x: tokens, [*batch, D]. In training the tokens of a group compete for places.
          token_mask: True for real tokens; padding is sent to no expert and counts in no loss.
          rngs: stream `dropout`; None means evaluation.

        Raises:
          UserError: in training, if `num_groups` does not divide the number of tokens.
        """
        y = self._answer(x, token_mask, rngs)
        if self.shared is None:
            return y
        shared = self.shared(x.astype(self.dtype), **({} if rngs is None else {"rngs": rngs}))
        return y + (shared if self.shared_gate is None else shared * jax.nn.sigmoid(self.shared_gate(x)))

    def _answer(
        self, x: Float[Array, "*batch D"], mask: Bool[Array, "*batch"] | None, rngs: nnx.Rngs | None
    ) -> Float[Array, "*batch D"]:
        """Returns the weighted sum of the experts' answers; the arguments are those of `__call__`."""
        # In float32 for every `dtype`, as in the Switch Transformer: rounding could change the expert of a token.
        logits = jnp.einsum("...D,DE->...E", x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.router_bias is not None:
            logits = add_bias(logits, self.router_bias[...].astype(jnp.float32))
        routing_fn = self.routing_fn
        if self.correction_bias is not None:
            routing_fn = functools.partial(routing_fn, bias=self.correction_bias[...])
        num_tokens = logits.size // self.num_experts
        if rngs is None and num_tokens * self.experts_per_token <= self.num_experts:
            return self._answer_few(x.astype(self.dtype), logits, mask, routing_fn)
        # Evaluation: one group, in which every expert has a place for every token.
        num_groups, capacity, exchange = 1, num_tokens, None
        if rngs is not None:
            distribution = current_distribution()
            num_groups = self.num_groups or distribution.num_groups
            exchange = distribution.exchange(num_groups, self.num_experts)
            if num_tokens % num_groups:
                raise UserError(
                    f"config.model.experts.num_groups={num_groups} does not divide the {num_tokens} tokens of a batch: "
                    "0 means one group for each device, or choose a divisor"
                )
            group_size = num_tokens // num_groups
            capacity = expert_capacity(group_size, self.num_experts, self.capacity_factor, self.experts_per_token)
            capacity = min(capacity, group_size)  # an expert gets a token once
        keys = jax.random.split(rngs.dropout(), self.num_experts) if rngs is not None and self.dropout_rate else None

        def answer(expert: FeedForward, buffer: Float[Array, "C D"], key: Array | None) -> Float[Array, "C D"]:
            """Applies one expert to the tokens in its buffer."""
            return expert(buffer, rngs=None if key is None else nnx.Rngs(dropout=key))

        y, routing = mixture_of_experts(
            x.astype(self.dtype),
            logits,
            lambda buffers: jax.vmap(answer)(self.experts, buffers, keys),
            capacity=capacity,
            num_groups=num_groups,
            routing_fn=routing_fn,
            mask=mask,
            exchange=exchange,
            return_routing=True,
        )
        if rngs is not None:
            balance, z_loss = self.balancing_loss_fn(logits, mask), router_z_loss(logits, mask)
            self.auxiliary_loss[...] = self.load_balancing_weight * balance + self.router_z_weight * z_loss
            self.load_balancing[...] = balance
            is_real = jnp.ones(num_tokens, bool) if mask is None else mask.reshape(-1)
            # Position `capacity` is past the end of a buffer; it means that an expert did not take the token.
            is_dropped = is_real & (routing.position == capacity).all(axis=1)
            self.dropped_tokens[...] = is_dropped.sum() / jnp.maximum(is_real.sum(), 1)
            if self.load is not None:
                self.load[...] += expert_load(routing, self.num_experts, is_real)
        return y

    def _answer_few(
        self,
        x: Float[Array, "*batch D"],
        logits: Float[Array, "*batch E"],
        mask: Bool[Array, "*batch"] | None,
        routing_fn: Callable[..., Routing],
    ) -> Float[Array, "*batch D"]:
        """Evaluates a few tokens, such as those of a decoding step: gathers the parameters of their experts only.

        Each of the T tokens goes to its A experts, whose outputs are summed with the weights of the routing.
        """
        tokens, mask = x.reshape(-1, x.shape[-1]), None if mask is None else mask.reshape(-1)
        routing = routing_fn(logits.reshape(-1, self.num_experts), capacity=len(tokens), mask=mask)  # room for all
        chosen = jax.tree.map(lambda leaf: leaf[routing.expert], self.experts)  # leaves [T, A, ...]
        answer_all = jax.vmap(lambda expert, token: expert(token), in_axes=(0, None))
        answers = jax.vmap(answer_all)(chosen, tokens)
        y = jnp.einsum("TAD,TA->TD", answers.astype(routing.weight.dtype), routing.weight)
        return y.astype(answers.dtype).reshape(x.shape)


def balance_experts(model: nnx.Module) -> None:
    """Changes correction biases by the loads of the training calls since the last time, in place.

    The training step calls this once, after all parts of a batch. The bias of a router that is not trained stays.
    """
    for _, module in nnx.iter_graph(model):
        if isinstance(module, MixtureOfExperts) and module.correction_bias is not None and module.load is not None:
            bias, load = module.correction_bias, module.load  # [*stack, E]
            if isinstance(module.router, nnx.Param):
                bias[...] = balanced_bias(bias[...], load[...], module.bias_speed)
            load[...] = jnp.zeros_like(load[...])
