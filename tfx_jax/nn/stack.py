"""Stacks of layers: parameters stacked along a leading axis, run by `jax.lax.scan`.

All models store their layers in this form. Compared with a list of layers, it halves the time to trace and compile a
training step of the base model, makes that time independent of the depth, and does not change the time of the step. In
decoding a scan would copy each layer's weights for every token, so `unstack_layers` splits the stack once before the
loop.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tfx_jax.nn.basic import check_sizes
from tfx_jax.nn.lora import Frozen

Layer = TypeVar("Layer", bound=nnx.Module)

_CHANGING = nnx.Not(nnx.Any(nnx.Param, Frozen))
"""Variables of a layer that a training step may change by itself, such as running statistics."""


class LayerGroup(nnx.Module):
    """Different layers that a stack repeats in order, such as one with local and one with dense attention.

    Attributes:
      layers: the layers of one repetition, from input to output.
    """

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(layers)


def stack_layers(
    make_layer: Callable[[nnx.Rngs], Layer] | Sequence[Callable[[nnx.Rngs], Layer]], num_layers: int, rngs: nnx.Rngs
) -> Layer:
    """Builds `num_layers` layers, each from its own key, as one module whose parameters have a leading layer axis.

    Args:
      make_layer: makes a layer; or several such functions, which are used in turn. The output of every layer has the
        shape of its input.
      num_layers: number of layers.
      rngs: stream `params`.

    Returns:
      The stack; with several kinds of layers, a `LayerGroup` whose parameters have a leading axis of repetitions.

    Raises:
      ValueError: if `num_layers` is below 1 or not a multiple of the number of functions.
    """
    make_kinds = make_layer if isinstance(make_layer, Sequence) else [make_layer]
    check_sizes(num_layers=num_layers)
    if num_layers % len(make_kinds):
        raise ValueError(f"num_layers={num_layers} must be a multiple of {len(make_kinds)}, the layers of the pattern")

    def make(key: Array) -> Any:
        """Makes one repetition: a layer, or a group with a layer of each kind."""
        rngs = nnx.Rngs(params=key)
        if len(make_kinds) == 1:
            return make_kinds[0](rngs)
        return LayerGroup([make_kind(rngs) for make_kind in make_kinds])

    return jax.vmap(make)(jax.random.split(rngs.params(), num_layers // len(make_kinds)))


REMATS = ("none", "full", "dots")
"""Values of `remat` of `scan_layers`: what the backward pass recomputes instead of storing it."""


def scan_layers(
    fn: Callable[..., tuple[Array, Any]],
    layers: nnx.Module,
    x: Array,
    rngs: nnx.Rngs | None,
    *,
    inputs: Any = None,
    repeats: int = 1,
    remat: str = "none",
    unroll: bool = False,
) -> tuple[Array, Any]:
    """Runs `x, extra = fn(layer, x, rngs)`, or `fn(layer, x, rngs, layer_inputs)`, through a stack of layers.

    Args:
      fn: computes one layer; `extra` is any pytree or None.
      layers: a stack from `stack_layers`.
      x: the input of the first layer; all layers keep its shape and dtype.
      rngs: stream `dropout`, split for the layers; None means evaluation.
      inputs: further inputs of each layer, such as its cache: any pytree, stacked along a leading layer axis.
      repeats: how many times `x` passes through the whole stack, with separate dropout in each pass: for ALBERT, whose
        layers share their parameters. The extras are those of all passes, in order.
      remat: what the backward pass recomputes instead of storing it (Chen et al., 2016). "none": nothing. "full": the
        whole layer from its input. "dots": all but the results of matrix products with weights, which are expensive.
      unroll: whether to compile the layers one after the other instead of as a loop. The compile time grows with their
        number. A loop writes the residuals of the backward pass into arrays over all layers and reads them again (by
        the compiler's estimates a fifth of a training step of GPT-2 on a TPU v5e), and it stores more residuals than
        unrolled layers need.

    In training, changes of `fn` to a layer's Variables other than parameters, such as running statistics, are written
    back to `layers`.

    Returns:
      The output of the last layer and the extras, stacked along a leading layer axis; see `per_layer`.

    Raises:
      ValueError: if `remat` is unknown, or `repeats` is above 1 for layers with running statistics.
    """
    if repeats > 1:
        if jax.tree.leaves(nnx.state(layers, _CHANGING)):
            raise ValueError("layers with running statistics cannot share their parameters")

        def run_pass(x: Array, key: Array | None) -> tuple[Array, Any]:
            """Runs `x` once through the whole stack."""
            rngs = None if key is None else nnx.Rngs(dropout=key)
            return scan_layers(fn, layers, x, rngs, inputs=inputs, remat=remat)

        keys = None if rngs is None else jax.random.split(rngs.dropout(), repeats)
        x, extras = jax.lax.scan(run_pass, x, keys, length=repeats, unroll=unroll)
        return x, jax.tree.map(lambda extra: extra.reshape(-1, *extra.shape[2:]), extras)
    members = _members(layers)
    keys = None if rngs is None else jax.random.split(rngs.dropout(), _num_groups(layers) * len(members))

    def run_layer(x: Array, layer_arguments: tuple[nnx.Module, Array | None, Any]) -> tuple[Array, Any]:
        """Returns the output of one layer, its extra and, in training, its variables that are not parameters."""
        layer, key, layer_inputs = layer_arguments
        optional_inputs = () if layer_inputs is None else (layer_inputs,)
        x, extra = fn(layer, x, None if key is None else nnx.Rngs(dropout=key), *optional_inputs)
        return x, (extra, None if key is None else nnx.state(layer, _CHANGING))

    run_layer = _rematerialized(run_layer, remat)

    def run_group(x: Array, group_arguments: list[Any]) -> tuple[Array, list[Any]]:
        """Runs one layer of each kind: one step of the scan."""
        results = []
        for layer_arguments in group_arguments:
            x, result = run_layer(x, layer_arguments)
            results.append(result)
        return x, results

    # The layers of a group may have different structures, so the arguments of each member are stacked separately.
    member_keys, member_inputs = (_split_by_member(tree, len(members)) for tree in (keys, inputs))
    arguments = list(zip(members, member_keys, member_inputs, strict=True))
    x, results = jax.lax.scan(run_group, x, arguments, unroll=unroll)
    for member, (_, model_state) in zip(members, results, strict=True):
        if jax.tree.leaves(model_state):
            nnx.update(member, model_state)
    return x, _interleaved([extra for extra, _ in results])


def scan_stacks(
    fn: Callable[..., tuple[Array, Any]], stacks: Sequence[nnx.Module], x: Array, rngs: nnx.Rngs | None, **options: Any
) -> tuple[Array, Any]:
    """Runs `scan_layers` through one stack after the other; arguments and errors are the same.

    Returns:
      The output of the last layer and the extras. With several stacks, whose layers may have different extras, these
      are None, or a dictionary of lists with one element per layer.
    """
    extras = []
    for layers in stacks:
        x, extra = scan_layers(fn, layers, x, rngs, **options)
        extras.append(extra)
    if len(extras) == 1 or extras[0] is None:
        return x, extras[0]
    sizes = [_num_groups(layers) * len(_members(layers)) for layers in stacks]
    joined = {
        name: [layer for extra, size in zip(extras, sizes, strict=True) for layer in per_layer(extra[name], size)]
        for name in extras[0]
    }
    return x, joined


def _rematerialized(run_layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Wraps `run_layer` so that its backward pass recomputes what `remat` of `scan_layers` says."""
    if remat == "none":
        return run_layer
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if remat not in policies:
        raise ValueError(f'remat must be "none", "full" or "dots", got {remat!r}')
    # Forward and backward pass are separate loops, so XLA cannot undo the recomputation by eliminating common
    # subexpressions, and no barriers are needed.
    return jax.checkpoint(run_layer, prevent_cse=False, policy=policies[remat])


def unstack_layers(layers: Layer) -> list[Layer]:
    """Splits a stack into a list of its layers."""
    members = _members(layers)
    indices = range(_num_groups(layers))
    return [jax.tree.map(operator.itemgetter(index), member) for index in indices for member in members]


def per_layer(extras: Any, num_layers: int) -> list[Any]:
    """Splits the extras of `scan_layers` into a list with one element per layer."""
    if isinstance(extras, list):
        return extras
    return [jax.tree.map(operator.itemgetter(index), extras) for index in range(num_layers)]


def map_layers(fn: Callable[[Any], Any], layers: nnx.Module) -> Any:
    """Calls `fn(layer)`, which returns a pytree of arrays, for each layer of a stack, and stacks the results."""
    return _interleaved([jax.vmap(fn)(member) for member in _members(layers)])


def _members(layers: Layer) -> list[Layer]:
    """Returns the members of a `LayerGroup`, each a stack over the repetitions; without a group, the stack itself."""
    return cast(list[Layer], list(layers.layers)) if isinstance(layers, LayerGroup) else [layers]


def is_stack(name: str) -> bool:
    """Whether an attribute of a model is a stack: the names of all stacks end in "_layers".

    >>> is_stack("encoder_layers"), is_stack("embedding")
    (True, False)
    """
    return name.endswith("_layers")


def _num_groups(layers: nnx.Module) -> int:
    """Returns the size of the leading axis: the number of groups, or of layers without groups."""
    return jax.tree.leaves(layers)[0].shape[0]


def _split_by_member(tree: Any, count: int) -> list[Any]:
    """Splits arrays stacked over all layers into `count` trees, one for each member of the groups."""
    if count == 1:
        return [tree]
    return [jax.tree.map(operator.itemgetter(slice(index, None, count)), tree) for index in range(count)]


def _interleaved(trees: list[Any]) -> Any:
    """Inverts `_split_by_member`: stacks the trees of all members in the order of the layers.

    If the structures differ, returns a list of the layers instead, also inside dictionaries with equal keys.
    """
    if len(trees) == 1:
        return trees[0]
    if len({jax.tree.structure(tree) for tree in trees}) > 1:
        have_equal_keys = all(isinstance(tree, dict) and tree.keys() == trees[0].keys() for tree in trees)
        if have_equal_keys:
            return {name: _interleaved([tree[name] for tree in trees]) for name in trees[0]}
        num_groups = jax.tree.leaves(trees)[0].shape[0]
        return [jax.tree.map(operator.itemgetter(i), tree) for i in range(num_groups) for tree in trees]

    def interleave(*leaves: Array) -> Array:
        """Interleaves the leading axes of arrays, one from each member."""
        return jnp.stack(leaves, axis=1).reshape(len(leaves) * leaves[0].shape[0], *leaves[0].shape[1:])

    return jax.tree.map(interleave, *trees)
