"""Many layers as one: parameters stacked along a leading axis, run by `jax.lax.scan`.

This is the one representation of a stack in our states: against a list of layers it halves the time to trace and
compile a training step of the base model, makes it independent of depth, and leaves the time of the step as it is.
Decoding, where a scan would copy each layer's weights at every token, takes the stack apart once with
`unstack_layers`, outside its loop.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from tfx_jax.nn.lora import Frozen

Layer = TypeVar("Layer", bound=nnx.Module)

_CHANGING = nnx.Not(nnx.Any(nnx.Param, Frozen))
"""Variables of a layer that a training step may change by itself, such as running statistics."""


class LayerGroup(nnx.Module):
    """Different layers that a stack repeats in this order, such as one with local and one with dense attention.

    Attributes:
      layers: of one repetition, first the one nearest to the input.
    """

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(layers)


def stack_layers(
    make_layer: Callable[[nnx.Rngs], Layer] | Sequence[Callable[[nnx.Rngs], Layer]], num_layers: int, rngs: nnx.Rngs
) -> Layer:
    """Builds `num_layers` layers, each from its own key, as one module whose parameters have a leading layer axis.

    Args:
      make_layer: makes a layer; several make the first, the second ... layer, and begin again after the last of them.
        All layers take and give the same shapes.
      num_layers: how many.
      rngs: stream `params`.

    Returns:
      The stack; with several kinds of layers, a `LayerGroup` whose parameters have a leading axis of repetitions.

    Raises:
      ValueError: if there are no layers, or the kinds do not come out even.
    """
    kinds = make_layer if isinstance(make_layer, Sequence) else [make_layer]
    if num_layers < 1:
        raise ValueError(f"a stack needs at least one layer, got {num_layers}")
    if num_layers % len(kinds):
        raise ValueError(f"num_layers={num_layers} is no multiple of the {len(kinds)} layers of the pattern")

    def make(key: Array) -> Any:
        rngs = nnx.Rngs(params=key)
        return kinds[0](rngs) if len(kinds) == 1 else LayerGroup([make_layer(rngs) for make_layer in kinds])

    return jax.vmap(make)(jax.random.split(rngs.params(), num_layers // len(kinds)))


REMATS = ("none", "full", "dots")
"""What the backward pass may compute again instead of keeping it."""


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
      fn: one layer's work; `extra` is any pytree, None for nothing.
      layers: what `stack_layers` built.
      x: the input of the first layer; every layer keeps its shape and dtype.
      rngs: stream `dropout`, from which each layer gets its own; None means evaluation.
      inputs: what each layer is given besides, such as its cache, stacked along a leading layer axis: any pytree.
      repeats: how many times `x` goes through the whole stack, each time with dropout of its own: ALBERT's layers,
        which share their parameters. Extras are then of all passes, first pass first.
      remat: what the backward pass computes again instead of keeping it (Chen et al., 2016): nothing; "full", all of a
        layer from its input; or "dots", all but the results of matrix products with weights, which are dear to compute.
      unroll: whether to compile the layers one after the other instead of as a loop: the time to compile grows with
        their number. What a loop keeps for the backward pass it writes into arrays of all layers and reads again, by
        the compiler's estimates a fifth of a training step of GPT-2 on a TPU v5e, and it keeps more than the compiler
        would of layers that it sees.

    What `fn` changes in training in a layer's Variables that are no parameters, such as running statistics, is changed
    in `layers`.

    Returns:
      The output of the last layer and the extras, stacked along a leading layer axis.

    Raises:
      ValueError: if `remat` is none of the three; for `repeats` of layers with running statistics.
    """
    if repeats > 1:
        if jax.tree.leaves(nnx.state(layers, nnx.Not(nnx.Param))):
            raise ValueError("layers with running statistics cannot share their parameters")

        def again(x: Array, key: Array | None) -> tuple[Array, Any]:
            rngs = None if key is None else nnx.Rngs(dropout=key)
            return scan_layers(fn, layers, x, rngs, inputs=inputs, remat=remat)

        keys = None if rngs is None else jax.random.split(rngs.dropout(), repeats)
        x, extras = jax.lax.scan(again, x, keys, length=repeats, unroll=unroll)
        return x, jax.tree.map(lambda extra: extra.reshape(-1, *extra.shape[2:]), extras)
    members = _members(layers)
    keys = None if rngs is None else jax.random.split(rngs.dropout(), _num_groups(layers) * len(members))

    def one(x: Array, of_layer: tuple[nnx.Module, Array | None, Any]) -> tuple[Array, Any]:
        layer, key, given = of_layer
        x, extra = fn(layer, x, None if key is None else nnx.Rngs(dropout=key), *(() if given is None else (given,)))
        return x, (extra, None if key is None else nnx.state(layer, _CHANGING))

    one = _rematerialized(one, remat)

    def body(x: Array, of_group: list[Any]) -> tuple[Array, list[Any]]:
        results = []
        for of_layer in of_group:
            x, result = one(x, of_layer)
            results.append(result)
        return x, results

    # Layers of a group need not have the same structure, so each kind has a column of its own.
    columns = list(zip(members, *(_columns(tree, len(members)) for tree in (keys, inputs)), strict=True))
    x, results = jax.lax.scan(body, x, columns, unroll=unroll)
    for member, (_, model_state) in zip(members, results, strict=True):
        if jax.tree.leaves(model_state):
            nnx.update(member, model_state)
    return x, _interleaved([extra for extra, _ in results])


def _rematerialized(body: Callable[..., Any], remat: str) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if remat not in policies:
        raise ValueError(f'remat must be "none", "full" or "dots", got {remat!r}')
    # Forward and backward are two loops, so there is no common subexpression that barriers would have to protect.
    return jax.checkpoint(body, prevent_cse=False, policy=policies[remat])


def unstack_layers(layers: Layer) -> list[Layer]:
    """Takes a stack apart into a list of its layers."""
    members = _members(layers)
    return [
        jax.tree.map(operator.itemgetter(index), member) for index in range(_num_groups(layers)) for member in members
    ]


def per_layer(extras: Any, num_layers: int) -> list[Any]:
    """Splits the extras of `scan_layers` into a list of the layers."""
    if isinstance(extras, list):
        return extras
    return [jax.tree.map(operator.itemgetter(index), extras) for index in range(num_layers)]


def map_layers(fn: Callable[[Any], Any], layers: nnx.Module) -> Any:
    """Calls `fn(layer)`, which returns a pytree of arrays, for each layer of a stack; stacks the results."""
    return _interleaved([jax.vmap(fn)(member) for member in _members(layers)])


def _members(layers: Layer) -> list[Layer]:
    """Returns the kinds of layers of a stack, each a stack of its own; one where all layers are alike."""
    return cast(list[Layer], list(layers.layers)) if isinstance(layers, LayerGroup) else [layers]


def is_stack(name: str) -> bool:
    """Whether an attribute of a model is a stack, which all of ours say by their names.

    >>> is_stack("encoder_layers"), is_stack("embedding")
    (True, False)
    """
    return name.endswith("_layers")


def _num_groups(layers: nnx.Module) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def _columns(tree: Any, count: int) -> list[Any]:
    """Divides what is stacked over layers among the first, the second ... layers of all groups."""
    if count == 1:
        return [tree]
    return [jax.tree.map(operator.itemgetter(slice(index, None, count)), tree) for index in range(count)]


def _interleaved(columns: list[Any]) -> Any:
    """Joins such columns in the order of the layers; of kinds with different structures, into a list of the layers."""
    if len(columns) == 1:
        return columns[0]
    if len({jax.tree.structure(column) for column in columns}) > 1:
        if all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
            return {name: _interleaved([column[name] for column in columns]) for name in columns[0]}
        num_groups = jax.tree.leaves(columns)[0].shape[0]
        return [jax.tree.map(operator.itemgetter(i), column) for i in range(num_groups) for column in columns]
    return jax.tree.map(
        lambda *leaves: jnp.stack(leaves, axis=1).reshape(len(leaves) * leaves[0].shape[0], *leaves[0].shape[1:]),
        *columns,
    )
