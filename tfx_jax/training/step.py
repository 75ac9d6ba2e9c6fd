"""One optimizer update as a pure function of (state, batch, rng)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

Params = Any  # nested dictionary of arrays, as nnx.to_pure_dict returns it
Batch = dict[str, Array]
Metrics = dict[str, Array]
LossFn = Callable[[nnx.Module, Batch, nnx.Rngs | None], tuple[Array, Metrics]]
"""Returns the loss and the metrics, both summed over tokens; metrics["tokens"] counts them."""


class TrainState(NamedTuple):
    """Everything that training changes: a plain pytree of arrays."""

    step: Array
    params: Params
    opt_state: optax.OptState


def init_state(
    make_model: Callable[[], nnx.Module], optimizer: optax.GradientTransformation
) -> tuple[nnx.GraphDef, Callable[[], TrainState]]:
    """Splits a model into its static definition and a function that draws the first state.

    The model is built abstractly for the definition, and for real only inside the function, which can be jitted with
    output shardings: no device ever holds more of the state than its share.
    """

    def first_state() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(make_model()))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return nnx.graphdef(nnx.eval_shape(make_model)), first_state


def update(
    graphdef: nnx.GraphDef,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    rng: Array,
    *,
    axis_name: str | None = None,
) -> tuple[TrainState, Metrics]:
    """Takes one step down the gradient of the mean loss of a token.

    Pure and without a device in it: `jit_update` compiles it for a mesh. The classic way works as well,
    `jax.pmap(functools.partial(update, graphdef, loss_fn, optimizer, axis_name="data"), axis_name="data")`, where each
    device passes a replica of the state, its rows of the batch and the same rng.

    Args:
      graphdef: the model without its parameters.
      loss_fn: loss and metrics of a batch, as sums over tokens.
      optimizer: what turns gradients into updates.
      state: what to improve.
      batch: arrays with the rows in front.
      rng: the key of the whole run; each step folds its number in, so that a resumed run draws what it would have.
      axis_name: the mapped axis under `jax.pmap`; None means that `batch` is the whole batch.

    Returns:
      The next state and the sums of the metrics, "loss" among them.
    """
    rng = jax.random.fold_in(rng, state.step)
    if axis_name is not None:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))

    def loss(params: Params) -> tuple[Array, Metrics]:
        total, metrics = loss_fn(nnx.merge(graphdef, params), batch, nnx.Rngs(dropout=rng))
        return total, metrics | {"loss": total}

    grads, metrics = jax.grad(loss, has_aux=True)(state.params)
    if axis_name is not None:
        grads, metrics = jax.lax.psum((grads, metrics), axis_name)
    # Dividing the sum by the tokens of the whole batch weighs every token alike, however they are spread.
    grads = jax.tree.map(lambda grad: grad / jnp.maximum(metrics["tokens"], 1), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), metrics | {"grad_norm": optax.tree.norm(grads)}


def jit_update(
    graphdef: nnx.GraphDef, loss_fn: LossFn, optimizer: optax.GradientTransformation, state_shardings: TrainState
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]:
    """Compiles `update` into `step(state, batch, rng) -> (state, metrics)`; `state` is donated.

    The output shardings are pinned, or GSPMD might choose others and the second step would compile again.
    """
    return jax.jit(
        functools.partial(update, graphdef, loss_fn, optimizer),
        donate_argnums=0,
        out_shardings=(state_shardings, None),
    )
