"""Many layers as one: parameters stacked along a leading axis, run by `jax.lax.scan`.

This is the one representation of a stack in our states: against a list of layers it halves the time to trace and
compile a training step of the base model, makes it independent of depth, and leaves the time of the step as it is.
Decoding, where a scan would copy each layer's weights at every token, takes the stack apart once with
`unstack_layers`, outside its loop.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array

Layer = TypeVar("Layer", bound=nnx.Module)


def stack_layers(make_layer: Callable[[nnx.Rngs], Layer], num_layers: int, rngs: nnx.Rngs) -> Layer:
    """Builds `num_layers` layers, each from its own key, as one module whose parameters have a leading layer axis."""
    if num_layers < 1:
        raise ValueError(f"a stack needs at least one layer, got {num_layers}")
    keys = jax.random.split(rngs.params(), num_layers)
    return jax.vmap(lambda key: make_layer(nnx.Rngs(params=key)))(keys)


REMATS = ("none", "full", "dots")
"""What the backward pass may compute again instead of keeping it."""


def scan_layers(
    fn: Callable[..., tuple[Array, Any]],
    layers: nnx.Module,
    x: Array,
    rngs: nnx.Rngs | None,
    *,
    inputs: Any = None,
    remat: str = "none",
) -> tuple[Array, Any]:
    """Runs `x, extra = fn(layer, x, rngs)`, or `fn(layer, x, rngs, layer_inputs)`, through a stack of layers.

    Args:
      fn: one layer's work; `extra` is any pytree, None for nothing.
      layers: what `stack_layers` built.
      x: the input of the first layer; every layer keeps its shape and dtype.
      rngs: stream `dropout`, from which each layer gets its own; None means evaluation.
      inputs: what each layer is given besides, such as its cache, stacked along a leading layer axis: any pytree.
      remat: what the backward pass computes again instead of keeping it (Chen et al., 2016): nothing; "full", all of a
        layer from its input; or "dots", all but the results of matrix products with weights, which are dear to compute.

    What `fn` changes in training in a layer's Variables that are no parameters, such as running statistics, is changed
    in `layers`.

    Returns:
      The output of the last layer and the extras, stacked along a leading layer axis.

    Raises:
      ValueError: if `remat` is none of the three.
    """
    keys = None if rngs is None else jax.random.split(rngs.dropout(), _num_layers(layers))

    def body(x: Array, of_layer: tuple[nnx.Module, Array | None, Any]) -> tuple[Array, tuple[Any, Any]]:
        layer, key, given = of_layer
        arguments = () if given is None else (given,)
        if key is None:
            x, extra = fn(layer, x, None, *arguments)
            return x, (extra, None)
        x, extra = fn(layer, x, nnx.Rngs(dropout=key), *arguments)
        return x, (extra, nnx.state(layer, nnx.Not(nnx.Param)))

    x, (extras, model_state) = jax.lax.scan(_rematerialised(body, remat), x, (layers, keys, inputs))
    if jax.tree.leaves(model_state):
        nnx.update(layers, model_state)
    return x, extras


def _rematerialised(body: Callable[..., Any], remat: str) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if remat not in policies:
        raise ValueError(f'remat must be "none", "full" or "dots", got {remat!r}')
    # Forward and backward are two loops, so there is no common subexpression that barriers would have to protect.
    return jax.checkpoint(body, prevent_cse=False, policy=policies[remat])


def unstack_layers(layers: Layer) -> list[Layer]:
    """Takes a stack apart into a list of its layers."""
    return [jax.tree.map(operator.itemgetter(index), layers) for index in range(_num_layers(layers))]


def is_stack(name: str) -> bool:
    """Whether an attribute of a model is a stack, which all of ours say by their names.

    >>> is_stack("encoder_layers"), is_stack("embedding")
    (True, False)
    """
    return name.endswith("_layers")


def _num_layers(layers: nnx.Module) -> int:
    return jax.tree.leaves(layers)[0].shape[0]
