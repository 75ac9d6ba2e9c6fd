"""Model FLOPs: the matrix products that a training step or a search needs at least.

They are counted in the jaxpr of the model's own loss, from shapes alone: nothing is compiled. A multiplication and its
addition are two FLOPs. The backward pass repeats a product for each operand that depends on a parameter, so that a
weight costs 6 FLOPs for each position that it is applied to: the 6 N + 12 L H Q T of PaLM (Chowdhery et al., 2022,
appendix B, https://arxiv.org/abs/2204.02311). A weight that is applied to the input itself, such as pixels, costs 4,
and a frozen weight 2.

Not counted: rematerialization, element-wise operations, lookups, the optimizer. Every attention counts as dense
attention, and each expert of a mixture is assumed to get an equal share of the tokens. As in PaLM, a causal mask saves
nothing; padding counts like any token, because it is computed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jaxtyping import Array

from tfx_jax.nn.attention import spec_of
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.distribution import Distribution, distributed
from tfx_jax.nn.moe import MixtureOfExperts
from tfx_jax.training.step import LossFn


def training_flops(
    make_model: Callable[[], nnx.Module], loss_fn: LossFn, batch: Any, *, make_carry: Callable[[], Any] = lambda: None
) -> int:
    """Counts the model FLOPs of a training step.

    Args:
      make_model: builds the model, as the trainer calls it.
      loss_fn: loss of the task.
      batch: a tree of arrays, or of shapes and dtypes.
      make_carry: returns the carry of the first batch, or None for a task without a carry.
    """
    model = nnx.eval_shape(make_model)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, MixtureOfExperts):
            module.capacity_factor = 1  # experts get equal shares, see the module's docstring
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, others: Any, batch: Any, carry: Any) -> Array:
        model = nnx.merge(graphdef, params, others)
        return loss_fn(model, batch, nnx.Rngs(dropout=0), *(() if carry is None else (carry,))).loss

    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
    with distributed(Distribution(attend=_attend_densely)):
        jaxpr = jax.make_jaxpr(loss)(params, others, shapes, jax.eval_shape(make_carry)).jaxpr
    num_params = len(jax.tree.leaves(params))
    return _product_flops(jaxpr, [index < num_params for index in range(len(jaxpr.invars))])[0]


def decoding_flops(decoder: Decoder, inputs: Any, *, max_length: int, num_beams: int = 1) -> int:
    """Counts the model FLOPs of a search in which all hypotheses reach `max_length` tokens.

    Inputs are encoded once for all beams. Each hypothesis then takes one step per position; with a cache, the query of
    step t attends to t positions. Ranking the hypotheses is not counted.

    Args:
      decoder: decoder of a model.
      inputs: an array or its shape and dtype, as `Decoder.encode` takes it, without padding.
      max_length: T, at least 1.
      num_beams: W.
    """

    def encode(decoder: Decoder, inputs: Any, length: int) -> Any:
        """Returns (cache, first tokens), as `Decoder.init_cache` does for a cache of `length` positions."""
        memory = decoder.encode(inputs, jnp.ones(inputs.shape[:2], bool))
        return decoder.init_cache(memory, max_length=length)

    def forward_flops(function: Callable[..., Any], *arguments: Any) -> int:
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        return _product_flops(jaxpr, [False] * len(jaxpr.invars))[0]

    inputs = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)
    step_flops: list[int] = []  # of the first and the last step
    for length in (1, max_length):
        # Only shapes: `functools.partial` fixes the length, which is not an array.
        cache, tokens = jax.eval_shape(functools.partial(encode, length=length), decoder, inputs)
        step_flops.append(
            forward_flops(lambda decoder, tokens, cache: decoder.step(tokens, cache), decoder, tokens, cache)
        )
    encoding_flops = forward_flops(lambda decoder, inputs: encode(decoder, inputs, max_length), decoder, inputs)
    # The cost of a step is linear in the length of its cache: the mean is that of the first and the last step.
    return encoding_flops + num_beams * max_length * sum(step_flops) // 2


def _attend_densely(attention_fn: Any, query: Array, key: Array, value: Array, *args: Any, **options: Any) -> Any:
    """Computes the two products of dense attention; relative and latent attention, which cost more, run unchanged."""
    spec = spec_of(attention_fn)
    costs_more = spec is not None and (spec.name == "relative" or spec.head_sizes is not None)
    if query.ndim != 4 or options.get("return_weights") or costs_more:
        return attention_fn(query, key, value, *args, **options)
    group_size = query.shape[2] // key.shape[2]  # query heads for each key head
    key, value = (jnp.repeat(array, group_size, axis=2) for array in (key, value))  # [B, S, N, H]
    return jnp.einsum("BNTS,BSNU->BTNU", jnp.einsum("BTNH,BSNH->BNTS", query, key), value)


def _product_flops(jaxpr: core.Jaxpr, depends: Sequence[bool]) -> tuple[int, list[bool]]:
    """Counts the FLOPs of the products of a program and of its backward pass.

    Args:
      jaxpr: the program.
      depends: for each argument, whether it depends on a parameter.

    Returns:
      A pair: the FLOPs, and for each result of the program whether it depends on a parameter.
    """
    total = 0
    dependence = dict(zip(jaxpr.invars, depends, strict=True))  # for each variable, whether it depends on a parameter

    def are_dependent(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, core.Literal) and dependence.get(atom, False) for atom in atoms]

    for equation in jaxpr.eqns:
        flops, results = _equation_flops(equation, are_dependent(equation.invars))
        total += flops
        dependence.update(zip(equation.outvars, results, strict=True))
    return total, are_dependent(jaxpr.outvars)


def _equation_flops(equation: Any, depends: list[bool]) -> tuple[int, list[bool]]:
    """Returns FLOPs and dependence of results, as `_product_flops` does, for one equation of a program."""
    name, params = equation.primitive.name, equation.params
    results = [name != "stop_gradient" and any(depends)] * len(equation.outvars)
    # FLOPs for one term of the sum in each output element: a multiplication and an addition, in the forward pass and
    # once more in the backward pass for each operand that depends on a parameter.
    flops_per_term = 2 * (1 + sum(depends)) * equation.outvars[0].aval.size if equation.outvars else 0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return flops_per_term * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted), results
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval  # terms: its elements for one output channel, whose axis is rhs_spec[0]
        return flops_per_term * (kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]]), results
    if name == "scan":
        flops, results = _loop_flops(_open(params["jaxpr"]), depends, _carried(params))
        return params["length"] * flops, results
    if name == "while":  # no backward pass; the number of iterations is unknown: counts one
        depends = depends[params["cond_nconsts"] :]
        return _loop_flops(_open(params["body_jaxpr"]), depends, range(params["body_nconsts"], len(depends)))
    if name == "cond":
        branches = [_product_flops(_open(branch), depends[1:]) for branch in params["branches"]]
        branch_results = zip(*(dependence for _, dependence in branches), strict=True)
        return max(flops for flops, _ in branches), [any(results) for results in branch_results]
    for value in params.values():  # inner programs of jit, checkpoint and custom derivatives
        inner = _open(value)
        if isinstance(inner, core.Jaxpr) and (len(inner.invars), len(inner.outvars)) == (len(depends), len(results)):
            # A program with as many arguments and results as the equation is what the equation calls.
            return _product_flops(inner, depends)
    return 0, results


def _open(jaxpr: Any) -> Any:
    """Returns the program of a closed jaxpr; since jax 0.12 it is a jaxpr itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _carried(params: dict[str, Any]) -> range:
    """Returns which arguments of a scan are its carry: those after the constants and before the inputs."""
    if "num_consts" in params:
        constants, carry = params["num_consts"], params["num_carry"]
    else:  # since jax 0.12
        constants, carry, _ = map(len, params["ft_in"].unpack())
    return range(constants, constants + carry)


def _loop_flops(body: core.Jaxpr, depends: list[bool], carried: range) -> tuple[int, list[bool]]:
    """Counts the FLOPs of one iteration of a loop; a carry that ever depends on a parameter does so from the start.

    Args:
      body: program of an iteration, which returns the next carry first.
      depends: for each argument of the body, whether it depends on a parameter before the first iteration.
      carried: indices of the arguments that are the carry.

    Returns:
      As `_product_flops`.
    """
    while True:
        flops, results = _product_flops(body, depends)
        depends_later = [*depends]
        for index, result in zip(carried, results, strict=False):
            depends_later[index] |= result
        if depends_later == depends:
            return flops, results
        depends = depends_later
