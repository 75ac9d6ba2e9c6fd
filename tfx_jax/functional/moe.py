"""Mixture of experts: a router sends every token to one or some of many feed-forward networks.

Shape letters: T tokens of one group, which compete for places in the experts' buffers; G groups; E experts; C places of
one expert for a group (its capacity); A experts of one token; D features. Tokens are moved by scatter and gather, so
memory is that of the experts' inputs, G * E * C * D; the papers' one-hot array of T x E x C is never formed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.signature import statistics_dtype
from tfx_jax.functional.layers import add_bias


class Routing(NamedTuple):
    """The experts of each token, its places in their buffers, and the weights of their answers."""

    expert: Int[Array, "T A"]
    """Index of the expert."""
    position: Int[Array, "T A"]
    """The token's place in the expert's buffer, or C, which is past its end, if the token is dropped."""
    weight: Float[Array, "T A"]
    """Weight of the expert's answer in the token's output; 0 if the token is dropped."""


Exchange = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""Two functions of an array [G, E, C, D]: the first moves buffers from the devices of the groups to those of the
experts, the second moves the answers back."""


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float, experts_per_token: int = 1) -> int:
    """Returns how many tokens an expert takes: `capacity_factor` times an even share, rounded up.

    An even share is num_tokens * experts_per_token / num_experts. Equation 3 of Fedus et al. (2021,
    https://arxiv.org/abs/2101.03961), who send a token to one expert; GShard (Lepikhin et al., 2020) has a factor of 1
    with two.

    Raises:
      ValueError: if an argument is not positive.

    >>> expert_capacity(100, 8, 1.25), expert_capacity(100, 8, 1.25, experts_per_token=2)
    (16, 32)
    """
    if min(num_tokens, num_experts, experts_per_token) < 1 or capacity_factor <= 0:
        raise ValueError(
            f"all must be positive: {num_tokens=}, {num_experts=}, {capacity_factor=}, {experts_per_token=}"
        )
    return math.ceil(capacity_factor * num_tokens * experts_per_token / num_experts)


def top_1_routing(logits: Float[Array, "T E"], capacity: int, *, mask: Bool[Array, " T"] | None = None) -> Routing:
    """Sends each token to its most probable expert, with the probability as weight (Switch Transformer).

    Equation 2 of Fedus et al. (2021, https://arxiv.org/abs/2101.03961). Experts take tokens in their order until they
    are full; further tokens are dropped: their output is zero, and only the residual connection passes them on.

    Args:
      logits: logits of the router, [T, E]; compute them in float32.
      capacity: C, tokens that each expert takes, from `expert_capacity`.
      mask: True for real tokens; padding is sent to no expert and takes no place.

    Returns:
      The `Routing`, with A = 1; its weights are float32 at least and differentiable in `logits`.

    Raises:
      ValueError: if an array has the wrong shape or `capacity` is below 1.

    >>> route = jax.jit(top_1_routing, static_argnames="capacity")
    >>> routing = route(jnp.array([[2.0, 0.0], [1.0, 0.0], [0.0, 9.0]]), capacity=1)
    >>> routing.expert.ravel().tolist(), routing.position.ravel().tolist()
    ([0, 0, 1], [0, 1, 0])
    """
    return top_k_routing(logits, capacity, num_choices=1, is_normalized=False, mask=mask)


def top_2_routing(
    logits: Float[Array, "T E"], capacity: int, *, mask: Bool[Array, " T"] | None = None, rng: Array | None = None
) -> Routing:
    """Sends each token to its two most probable experts, with weights proportional to probabilities (GShard).

    Algorithm 1 of Lepikhin et al. (2020, https://arxiv.org/abs/2006.16668): all first choices get places before any
    second choice. If one expert of a token is full, the weight of the other stays as it is. Second choices yield to
    first choices of later tokens, so with full experts a token's output depends on later tokens.

    Args:
      logits: the router's, [T, E].
      capacity: C, tokens that each expert takes, from `expert_capacity` with `experts_per_token=2`.
      mask: True for real tokens.
      rng: PRNG key for the paper's random dispatch: a token is sent to its second expert with probability
        min(1, 2 * weight), and takes no place there otherwise. None always sends it.

    Returns:
      The `Routing`, with A = 2, the first choice first.

    Raises:
      ValueError: if an array has the wrong shape or `capacity` is below 1.

    >>> routing = jax.jit(top_2_routing, static_argnames="capacity")(jnp.zeros((1, 2)), capacity=1)
    >>> routing.expert.tolist(), routing.weight.tolist()
    ([[0, 1]], [[0.5, 0.5]])
    """
    _check_router(logits, capacity, mask, num_choices=2)
    gates, expert = _top_k(_probabilities(logits), 2)
    weight = _normalized(gates)
    sent = _mark_sent(expert, mask)
    if rng is not None:
        takes_second = jax.random.uniform(rng, weight.shape[:1], weight.dtype) < 2 * weight[:, 1]
        sent = sent & jnp.stack([jnp.ones_like(takes_second), takes_second], axis=1)
    return _assign_places(expert, weight, sent, logits.shape[1], capacity)


def top_k_routing(
    logits: Float[Array, "T E"],
    capacity: int,
    *,
    num_choices: int,
    is_normalized: bool = True,
    mask: Bool[Array, " T"] | None = None,
    scores: str = "softmax",
    bias: Float[Array, " E"] | None = None,
    num_expert_groups: int = 1,
    groups_per_token: int = 1,
    group_choices: int = 1,
    scale: float = 1.0,
) -> Routing:
    """Sends each token to its `num_choices` best experts (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3).

    Section 2.1 of Mixtral (Jiang et al., 2024, https://arxiv.org/abs/2401.04088), whose softmax of the chosen logits is
    the same as probabilities divided by their sum. All first choices get places before any second choice.

    With `num_expert_groups` a token chooses among the experts of its `groups_per_token` best groups, so that it goes to
    few devices: section 2.2.2 of "DeepSeek-V2" (2024, https://arxiv.org/abs/2405.04434). `scores="sigmoid"` and `bias`
    are those of equations 13 to 16 of "DeepSeek-V3" (2024, https://arxiv.org/abs/2412.19437).

    Args:
      logits: the router's, [T, E].
      capacity: C; with T no token is dropped.
      num_choices: A, experts of a token.
      is_normalized: whether the weights of a token are divided by their sum; otherwise they are the scores.
      mask: True for real tokens.
      scores: "softmax" for probabilities of the experts, or "sigmoid" for a score of each expert alone.
      bias: added to the scores for the choice of experts, but not to their weights.
      num_expert_groups: number of groups of successive experts, a divisor of E.
      groups_per_token: number of groups in which a token may have experts.
      group_choices: how many of the best scores of a group add up to that of the group: 1 in DeepSeek-V2, 2 in V3.
      scale: multiplies the weights.

    Returns:
      The `Routing`, the first choice first.

    Raises:
      ValueError: if an array has the wrong shape, `capacity` is below 1, `scores` is unknown, or the groups have fewer
        than `num_choices` experts.

    >>> route = jax.jit(top_k_routing, static_argnames=("capacity", "num_choices"))
    >>> route(jnp.array([[0.0, 0.0, 0.0, 9.0]]), capacity=1, num_choices=3).expert.tolist()
    [[3, 0, 1]]
    """
    _check_router(logits, capacity, mask, num_choices)
    if scores not in ROUTER_SCORES:
        raise ValueError(f"scores must be one of {', '.join(ROUTER_SCORES)}, got {scores!r}")
    score = _probabilities(logits) if scores == "softmax" else jax.nn.sigmoid(_to_float32(logits))
    ranking = score if bias is None else add_bias(score, bias.astype(score.dtype))
    if num_expert_groups > 1:
        sizes = {"num_expert_groups": num_expert_groups, "groups_per_token": groups_per_token}
        check_expert_groups(logits.shape[1], num_choices, **sizes, group_choices=group_choices)
        ranking = _only_best_groups(ranking, **sizes, group_choices=group_choices)
    _, expert = _top_k(ranking, num_choices)
    weight = jnp.take_along_axis(score, expert, axis=-1)
    weight = _normalized(weight) if is_normalized else weight
    weight = weight if scale == 1.0 else weight * scale
    return _assign_places(expert, weight, _mark_sent(expert, mask), logits.shape[1], capacity)


ROUTER_SCORES = ("softmax", "sigmoid")
"""Values of `scores` of `top_k_routing`."""


def check_expert_groups(
    num_experts: int, num_choices: int, *, num_expert_groups: int, groups_per_token: int, group_choices: int
) -> None:
    """Raises ValueError if experts cannot be divided into groups as `top_k_routing` is asked to."""
    if num_experts % num_expert_groups:
        raise ValueError(f"num_expert_groups={num_expert_groups} does not divide the {num_experts} experts")
    if groups_per_token > num_expert_groups:
        raise ValueError(f"{groups_per_token=} must be at most {num_expert_groups=}")
    size = num_experts // num_expert_groups
    if size < group_choices or groups_per_token * size < num_choices:
        raise ValueError(
            f"{groups_per_token} groups of {size} experts are too few for {num_choices} experts of a token and "
            f"group_choices={group_choices}"
        )


def _only_best_groups(
    ranking: Float[Array, "T E"], *, num_expert_groups: int, groups_per_token: int, group_choices: int
) -> Float[Array, "T E"]:
    """Replaces the scores of experts outside of the best groups of each token by -inf."""
    num_tokens, num_experts = ranking.shape
    grouped = ranking.reshape(num_tokens * num_expert_groups, -1)
    group_score = _top_k(grouped, group_choices)[0].sum(axis=-1).reshape(num_tokens, num_expert_groups)
    _, group = _top_k(group_score, groups_per_token)
    is_best = jax.nn.one_hot(group, num_expert_groups, dtype=jnp.bool_).any(axis=1)  # [T, groups]
    return jnp.where(jnp.repeat(is_best, num_experts // num_expert_groups, axis=1), ranking, -jnp.inf)


def dispatch(x: Float[Array, "T D"], routing: Routing, *, num_experts: int, capacity: int) -> Float[Array, "E C D"]:
    """Copies tokens into the buffers of their experts; places without a token are zero."""
    copies = jnp.broadcast_to(x[:, None], (*routing.expert.shape, x.shape[1]))  # [T, A, D], one for each expert
    buffers = jnp.zeros((num_experts, capacity, x.shape[1]), x.dtype)
    # Each place has at most one token, so add equals set, and the gradient of add is a plain gather. Position C, past
    # the end, is dropped.
    return buffers.at[routing.expert, routing.position].add(copies, mode="drop")


def combine(y: Float[Array, "E C D"], routing: Routing) -> Float[Array, "T D"]:
    """Returns the weighted sum of each token's answers, computed in float32 at least; zero for dropped tokens.

    Args:
      y: answers at the places of the experts' buffers.
      routing: experts, places and weights of the tokens.
    """
    answers = y.at[routing.expert, routing.position].get(mode="fill", fill_value=0)
    return jnp.einsum("TAD,TA->TD", answers.astype(routing.weight.dtype), routing.weight).astype(y.dtype)


def mixture_of_experts(
    x: Float[Array, "*batch D"],
    logits: Float[Array, "*batch E"],
    experts_fn: Callable[[Float[Array, "E GC D"]], Float[Array, "E GC D"]],
    *,
    capacity: int,
    num_groups: int = 1,
    routing_fn: Callable[..., Routing] = top_1_routing,
    mask: Bool[Array, "*batch"] | None = None,
    exchange: Exchange | None = None,
    return_routing: bool = False,
) -> Any:
    """Routes tokens, applies all experts at once and brings the answers back.

    Args:
      x: tokens, [*batch, D]. The tokens of a group compete for places, in the order of the flattened batch.
      logits: logits of the router, [*batch, E].
      experts_fn: maps the buffers of all experts, [E, G * C, D], such as `jax.vmap(feed_forward)` with parameters that
        have a leading axis E. To spread experts over devices, shard that axis.
      capacity: C, tokens that each expert takes of a group.
      num_groups: G, the number of equal blocks of the flattened batch, which are routed independently (Lepikhin et al.,
        2020, section 3.2). On a mesh, routing a group that lies on one device needs no communication.
      routing_fn: function of (logits [T, E], capacity, mask=) that returns a `Routing`, such as `top_1_routing`.
      mask: True for real tokens, [*batch].
      exchange: two functions that move buffers, [G, E, C, D], from the devices of the groups to those of the experts
        and answers back; None leaves this to the compiler.
      return_routing: also return the `Routing`.

    Returns:
      The outputs, [*batch, D], in the dtype of the experts' answers; with `return_routing` a pair of the outputs and
      the `Routing` of the flattened tokens, [G * T, A].

    Raises:
      ValueError: if shapes do not fit, or `num_groups` does not divide the number of tokens.

    >>> x = jnp.array([[1.0], [2.0], [3.0]])
    >>> mix = jax.jit(lambda x, logits: mixture_of_experts(x, logits, lambda x: 10 * x, capacity=2))
    >>> mix(x, jnp.zeros((3, 1))).ravel().tolist()
    [10.0, 20.0, 0.0]
    """
    if x.shape[:-1] != logits.shape[:-1]:
        raise ValueError(f"x and logits must have the same axes of tokens, got {x.shape[:-1]} and {logits.shape[:-1]}")
    if mask is not None and mask.shape != logits.shape[:-1]:
        raise ValueError(f"mask must have the axes of tokens {logits.shape[:-1]}, got {mask.shape}")
    d_model, num_experts = x.shape[-1], logits.shape[-1]
    num_tokens = logits.size // num_experts
    if num_groups < 1 or num_tokens % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide the {num_tokens} tokens: use a divisor")

    def to_groups(tokens: Array, *sizes: int) -> Array:
        """Splits the flattened batch into groups, [G, T, *sizes]."""
        return tokens.reshape(num_groups, -1, *sizes)

    def dispatch_group(x: Array, routing: Routing) -> Array:
        """Copies the tokens of one group, [T, D], into the buffers of their experts, [E, C, D]."""
        return dispatch(x, routing, num_experts=num_experts, capacity=capacity)

    routing = jax.vmap(lambda logits, mask: routing_fn(logits, capacity, mask=mask))(
        to_groups(logits, num_experts), None if mask is None else to_groups(mask)
    )
    buffers = jax.vmap(dispatch_group)(to_groups(x, d_model), routing)  # [G, E, C, D]
    to_experts, to_tokens = exchange or (lambda buffers: buffers, lambda answers: answers)
    answers = experts_fn(to_experts(buffers).swapaxes(0, 1).reshape(num_experts, -1, d_model))  # [E, G * C, D]
    answers = to_tokens(answers.reshape(num_experts, num_groups, capacity, -1).swapaxes(0, 1))  # [G, E, C, D]
    y = jax.vmap(combine)(answers, routing).reshape(*x.shape[:-1], -1)
    return (y, jax.tree.map(lambda leaf: leaf.reshape(num_tokens, -1), routing)) if return_routing else y


def load_balancing_loss(
    logits: Float[Array, "*batch E"], mask: Bool[Array, "*batch"] | None = None
) -> Float[Array, ""]:
    """Computes E * sum_e f_e P_e, which is 1 for an even load and E if one expert gets all tokens.

    f_e is the fraction of tokens whose first choice is e, dropped tokens included, and P_e the mean probability of e:
    equations 4 to 6 of Fedus et al. (2021) without their factor alpha = 0.01. The l_aux of GShard (Lepikhin et al.,
    2020, algorithm 1) is this divided by E^2.

    >>> float(jax.jit(load_balancing_loss)(jnp.array([[9.0, 9.0], [0.0, 0.0]])))
    1.0
    """
    probabilities = _probabilities(logits)
    num_experts = logits.shape[-1]
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), num_experts, dtype=probabilities.dtype)
    return num_experts * (_mean(chosen, mask) * _mean(probabilities, mask)).sum()


def sequence_balancing_loss(
    logits: Float[Array, "*batch T E"], mask: Bool[Array, "*batch T"] | None = None, *, num_choices: int
) -> Float[Array, ""]:
    """Computes E / A * sum_e f_e P_e of each sequence and its mean over sequences: 1 for an even load.

    f_e is the fraction of the sequence's tokens for which e is among the A = `num_choices` largest sigmoid scores, and
    P_e the mean of the score of e divided by the sum of the token's scores. Equations 17 to 20 of "DeepSeek-V3" (2024,
    https://arxiv.org/abs/2412.19437), without their factor alpha = 0.0001. As there, neither a correction bias nor
    groups of experts enter.

    Args:
      logits: the router's, [*batch, T, E].
      mask: True for real tokens, [*batch, T]; sequences without any do not count.
      num_choices: A, experts of a token.

    >>> loss = jax.jit(lambda logits: sequence_balancing_loss(logits, num_choices=1))
    >>> loss(jnp.array([[[9.0, -9.0], [9.0, -9.0]]])).round(2).item()  # all tokens choose the first of two experts
    2.0
    """
    num_tokens, num_experts = logits.shape[-2:]
    score = jax.nn.sigmoid(_to_float32(logits)).reshape(-1, num_tokens, num_experts)
    real = jnp.ones(score.shape[:2], bool) if mask is None else mask.reshape(score.shape[:2])
    _, expert = _top_k(score.reshape(-1, num_experts), num_choices)
    is_chosen = jax.nn.one_hot(expert, num_experts, dtype=score.dtype).sum(axis=1).reshape(score.shape)
    share = _normalized(score)
    loads, shares = (jax.vmap(_mean)(values, real) for values in (is_chosen, share))  # [sequences, E]
    losses = num_experts / num_choices * (loads * shares).sum(axis=-1)
    return losses.sum() / jnp.maximum(real.any(axis=1).sum(), 1).astype(losses.dtype)


def expert_load(
    routing: Routing, num_experts: int, mask: Bool[Array, " T"] | None = None
) -> Float[Array, "{num_experts}"]:
    """Counts the tokens that choose each expert, dropped ones included.

    >>> load = jax.jit(lambda logits: expert_load(top_1_routing(logits, capacity=1), 2))
    >>> load(jnp.array([[9.0, 0.0], [9.0, 0.0]])).tolist()
    [2.0, 0.0]
    """
    is_sent = _mark_sent(routing.expert, mask)[..., None].astype(jnp.float32)
    return (jax.nn.one_hot(routing.expert, num_experts, dtype=jnp.float32) * is_sent).sum(axis=(0, 1))


def balanced_bias(
    bias: Float[Array, "*stack E"], load: Float[Array, "*stack E"], speed: float
) -> Float[Array, "*stack E"]:
    """Returns the `bias` of `top_k_routing` after a training step: lower for crowded experts, higher for others.

    Balancing without an auxiliary loss: algorithm 1 of Wang et al. (2024, https://arxiv.org/abs/2408.15664), as in
    section 2.1.2 of "DeepSeek-V3" (2024).

    Args:
      bias: the bias in the step, [*stack, E].
      load: tokens of the whole step that chose each expert, [*stack, E].
      speed: the change of a bias: 0.001 in both papers.

    >>> balanced_bias(jnp.zeros(3), jnp.array([5.0, 3.0, 1.0]), 0.5).tolist()
    [-0.5, 0.0, 0.5]
    """
    return bias + (speed * jnp.sign(load.mean(axis=-1, keepdims=True) - load)).astype(bias.dtype)


def router_z_loss(logits: Float[Array, "*batch E"], mask: Bool[Array, "*batch"] | None = None) -> Float[Array, ""]:
    """Computes the mean of logsumexp(logits)^2, which keeps the router's logits small.

    Equation 5 of ST-MoE (Zoph et al., 2022, https://arxiv.org/abs/2202.08906), without its factor 0.001.

    >>> float(jax.jit(router_z_loss)(jnp.zeros((3, 1))))
    0.0
    """
    normalizers = jax.nn.logsumexp(logits.astype(statistics_dtype(logits)), axis=-1, keepdims=True)
    return _mean(jnp.square(normalizers), mask)[0]


def _probabilities(logits: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    """Returns the softmax of the router's logits, in float32 at least."""
    return jax.nn.softmax(_to_float32(logits), axis=-1)


def _to_float32(logits: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
    """Casts to float32 at least."""
    return logits.astype(statistics_dtype(logits))


def _top_k(probabilities: Float[Array, "T E"], count: int) -> tuple[Float[Array, "T {count}"], Int[Array, "T {count}"]]:
    """Returns the `count` largest probabilities of each token and their experts, in descending order.

    Repeated argmax replaces `jax.lax.top_k`, for which compilers gather the tokens of all devices on each device.
    """
    chosen, remaining = [], probabilities
    for _ in range(count):
        chosen.append(jnp.argmax(remaining, axis=-1))
        remaining = jnp.where(jax.nn.one_hot(chosen[-1], remaining.shape[-1], dtype=jnp.bool_), -jnp.inf, remaining)
    expert = jnp.stack(chosen, axis=-1)
    return jnp.take_along_axis(probabilities, expert, axis=-1), expert


def _mean(x: Float[Array, "*batch E"], mask: Bool[Array, "*batch"] | None) -> Float[Array, " E"]:
    """Returns the mean over the real tokens, or zero if there are none."""
    x = x.reshape(-1, x.shape[-1])
    if mask is None:
        return x.mean(axis=0)
    real = mask.reshape(-1, 1)
    count = jnp.maximum(real.sum(), 1).astype(x.dtype)
    return jnp.where(real, x, jnp.zeros((), x.dtype)).sum(axis=0) / count


def _mark_sent(expert: Int[Array, "T A"], mask: Bool[Array, " T"] | None) -> Bool[Array, "T A"]:
    """Returns whether a token is sent to each of its experts: True for real tokens."""
    return jnp.broadcast_to(jnp.ones((1, 1), jnp.bool_) if mask is None else mask[:, None], expert.shape)


def _assign_places(
    expert: Int[Array, "T A"], weight: Float[Array, "T A"], sent: Bool[Array, "T A"], num_experts: int, capacity: int
) -> Routing:
    """Assigns places in the order of the tokens, all first choices before all second choices.

    Args:
      expert: experts of each token.
      weight: weights of their answers.
      sent: whether a token is sent to each of its experts.
      num_experts: E.
      capacity: C.
    """
    num_tokens, num_choices = expert.shape
    # Transposed, so that all first choices come first: [A * T].
    choices, is_sent = expert.T.reshape(-1), sent.T.reshape(-1)
    arrivals = ((choices[:, None] == jnp.arange(num_experts)[None]) & is_sent[:, None]).astype(jnp.int32)
    num_arrived = jnp.cumsum(arrivals, axis=0)  # tokens sent to each expert so far, this one included: [A * T, E]
    position = jnp.take_along_axis(num_arrived, choices[:, None], axis=1)[:, 0] - 1
    position = jnp.where(is_sent, jnp.minimum(position, capacity), capacity).reshape(num_choices, num_tokens).T
    return Routing(expert, position, jnp.where(position < capacity, weight, jnp.zeros((), weight.dtype)))


def _normalized(scores: Float[Array, "*batch A"]) -> Float[Array, "*batch A"]:
    """Divides scores by their sum; zeros if all of them have underflowed."""
    return scores / jnp.maximum(scores.sum(axis=-1, keepdims=True), jnp.finfo(scores.dtype).tiny)


def _check_router(logits: Array, capacity: int, mask: Array | None, num_choices: int) -> None:
    """Raises ValueError for logits or a mask of the wrong shape, too few experts or a capacity below 1."""
    if num_choices < 1:
        raise ValueError(f"num_choices must be at least 1, got {num_choices}")
    if logits.ndim != 2 or logits.shape[1] < num_choices:
        raise ValueError(f"top-{num_choices} routing needs logits [T, E] with E >= {num_choices}, got {logits.shape}")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if mask is not None and mask.shape != logits.shape[:1]:
        raise ValueError(f"mask must have shape [T] = {logits.shape[:1]}, got {mask.shape}")
