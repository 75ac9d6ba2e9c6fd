"""Model FLOPs: the matrix products that a training step or a search cannot do without.

They are counted in the jaxpr of the model's own loss, by shapes alone: nothing is compiled. A multiplication and its
addition are two FLOPs. The backward pass repeats a product for each operand that depends on a parameter, so that a
weight costs 6 FLOPs for each position that it is applied to: the 6 N + 12 L H Q T of PaLM (Chowdhery et al., 2022,
appendix B, https://arxiv.org/abs/2204.02311). What is applied to the input itself, such as pixels, costs 4, and what is
frozen 2.

What an implementation does besides is left out: rematerialization, element-wise work, lookups, the optimizer. Every
attention counts as the dense one, and each expert of a mixture takes an even share of the tokens. As in PaLM, a causal
mask saves nothing; padding is computed, and so counted, like any token.
"""

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
      make_model: as the trainer calls it.
      loss_fn: of a task.
      batch: a tree of arrays, or of shapes and dtypes.
      make_carry: makes what the first batch begins with.
    """
    model = nnx.eval_shape(make_model)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, MixtureOfExperts):
            module.capacity_factor = module.experts_per_token
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
    """Counts the model FLOPs of a search whose hypotheses all have `max_length` tokens.

    Inputs are read once for all beams. Each hypothesis then costs one step for each position, whose query meets the
    positions so far: t of them at the t-th, as a cache allows. Ranking costs nothing.

    Args:
      decoder: of a model.
      inputs: an array or its shape and dtype, as `Decoder.encode` takes it, without padding.
      max_length: T, at least 1.
      num_beams: W.
    """

    def read(decoder: Decoder, inputs: Any, length: int) -> Any:
        memory = decoder.encode(inputs, jnp.ones(inputs.shape[:2], bool))
        return decoder.init_cache(memory, max_length=length)

    def forward_flops(function: Callable[..., Any], *arguments: Any) -> int:
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        return _product_flops(jaxpr, [False] * len(jaxpr.invars))[0]

    inputs = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)
    steps: list[int] = []
    for length in (1, max_length):
        cache, tokens = jax.eval_shape(
            lambda decoder, inputs, length=length: read(decoder, inputs, length), decoder, inputs
        )
        steps.append(forward_flops(lambda decoder, tokens, cache: decoder.step(tokens, cache), decoder, tokens, cache))
    once = forward_flops(lambda decoder, inputs: read(decoder, inputs, max_length), decoder, inputs)
    # A step costs a constant and a share for each place of its cache: the mean is that of the first and the last.
    return once + num_beams * max_length * sum(steps) // 2


def _attend_densely(attention_fn: Any, query: Array, key: Array, value: Array, *args: Any, **options: Any) -> Any:
    """The two products of dense attention; relative attention, whose distances cost more, is called as it is."""
    spec = spec_of(attention_fn)
    if query.ndim != 4 or options.get("return_weights") or (spec is not None and spec.name == "relative"):
        return attention_fn(query, key, value, *args, **options)
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    return jnp.einsum("BNTS,BSNU->BTNU", jnp.einsum("BTNH,BSNH->BNTS", query, key), value)


def _product_flops(jaxpr: core.Jaxpr, depends: Sequence[bool]) -> tuple[int, list[bool]]:
    """Counts the products of a program and of its backward pass.

    Args:
      jaxpr: the program.
      depends: which of its arguments depend on a parameter.

    Returns:
      FLOPs, and which of its results depend on a parameter.
    """
    total, known = 0, dict(zip(jaxpr.invars, depends, strict=True))

    def of(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, core.Literal) and known.get(atom, False) for atom in atoms]

    for equation in jaxpr.eqns:
        flops, results = _equation_flops(equation, of(equation.invars))
        total += flops
        known.update(zip(equation.outvars, results, strict=True))
    return total, of(jaxpr.outvars)


def _equation_flops(equation: Any, depends: list[bool]) -> tuple[int, list[bool]]:
    name, params = equation.primitive.name, equation.params
    results = [name != "stop_gradient" and any(depends)] * len(equation.outvars)
    products = 2 * (1 + sum(depends)) * equation.outvars[0].aval.size if equation.outvars else 0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return products * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted), results
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        return products * (kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]]), results
    if name == "scan":
        flops, results = _loop_flops(_open(params["jaxpr"]), depends, _carried(params))
        return params["length"] * flops, results
    if name == "while":  # has no backward pass and an unknown number of turns: one is counted
        depends = depends[params["cond_nconsts"] :]
        return _loop_flops(_open(params["body_jaxpr"]), depends, range(params["body_nconsts"], len(depends)))
    if name == "cond":
        branches = [_product_flops(_open(branch), depends[1:]) for branch in params["branches"]]
        return max(flops for flops, _ in branches), [
            any(column) for column in zip(*(r for _, r in branches), strict=True)
        ]
    for value in params.values():  # of jit, checkpoint, custom derivatives
        inner = _open(value)
        if isinstance(inner, core.Jaxpr) and (len(inner.invars), len(inner.outvars)) == (len(depends), len(results)):
            return _product_flops(inner, depends)
    return 0, results


def _open(jaxpr: Any) -> Any:
    """The program of a closed jaxpr, which since jax 0.12 is a jaxpr itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _carried(params: dict[str, Any]) -> range:
    """Which arguments of a scan are its carry, behind constants and before inputs."""
    if "num_consts" in params:
        constants, carry = params["num_consts"], params["num_carry"]
    else:  # since jax 0.12
        constants, carry, _ = map(len, params["ft_in"].unpack())
    return range(constants, constants + carry)


def _loop_flops(body: core.Jaxpr, depends: list[bool], carried: range) -> tuple[int, list[bool]]:
    """Counts one turn of a loop, whose carry depends on a parameter from the turn on that makes it so."""
    while True:
        flops, results = _product_flops(body, depends)
        later = [*depends]
        for index, result in zip(carried, results, strict=False):
            later[index] |= result
        if later == depends:
            return flops, results
        depends = later
