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
LossFn = Callable[[Any, Batch, nnx.Rngs | None], tuple[Array, Metrics]]
"""Takes a model; returns the loss and the metrics, both summed over tokens; metrics["tokens"] counts them."""


_MEAN_LOSS_DECAY = 0.99


class Guard(NamedTuple):
    """What a bad step is told from; apart from the optimizer's state, so that a training can take it up or drop it."""

    mean_loss: Array  # running mean of a token's loss over the good steps; 0 before the first of them
    in_a_row: Array  # bad steps since the last good one


class TrainState(NamedTuple):
    """Everything that training changes: a plain pytree of arrays."""

    step: Array
    params: Params
    opt_state: optax.OptState
    guard: Guard | None = None  # None: bad steps are taken like any other


def init_state(
    make_model: Callable[[], nnx.Module], optimizer: optax.GradientTransformation, *, is_guarded: bool = False
) -> tuple[nnx.GraphDef, Callable[[], TrainState]]:
    """Splits a model into its static definition and a function that draws the first state.

    The model is built abstractly for the definition, and for real only inside the function, which can be jitted with
    output shardings: no device ever holds more of the state than its share. If `is_guarded`, `update` skips bad steps.
    """

    def first_state() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(make_model()))
        guard = Guard(jnp.zeros(()), jnp.zeros((), jnp.int32)) if is_guarded else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), guard)

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
    accumulate: int = 1,
    spike_factor: float = 0.0,
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
      accumulate: into how many equal parts the rows are split, to be worked through one after the other in that much
        less memory. Without dropout, the step is the same.
      spike_factor: for a guarded state, how many times its running mean a token's loss may be; 0 means any number.

    Returns:
      The next state and the sums of the metrics, "loss" among them. If the state has a guard, a step is bad whose loss
      or gradient is not finite or whose loss is a spike: all of the state but its step and guard stay what they were,
      "bad" is 1 (else 0) and "bad_in_a_row" counts.

    Raises:
      ValueError: if the rows cannot be split like that.
    """
    rng = jax.random.fold_in(rng, state.step)
    if axis_name is not None:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))

    def gradient(batch: Batch, rng: Array) -> tuple[Params, Metrics]:
        def loss(params: Params) -> tuple[Array, Metrics]:
            total, metrics = loss_fn(nnx.merge(graphdef, params), batch, nnx.Rngs(dropout=rng))
            return total, metrics | {"loss": total}

        return jax.grad(loss, has_aux=True)(state.params)

    if accumulate == 1:
        grads, metrics = gradient(batch, rng)
    else:
        grads, metrics = _accumulated(gradient, state.params, batch, rng, accumulate)
    if axis_name is not None:
        grads, metrics = jax.lax.psum((grads, metrics), axis_name)
    # Dividing the sum by the tokens of the whole batch weighs every token alike, however they are spread.
    grads = jax.tree.map(lambda grad: grad / jnp.maximum(metrics["tokens"], 1), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = metrics | {"grad_norm": optax.tree.norm(grads)}
    after = TrainState(state.step + 1, params, opt_state)
    return (after, metrics) if state.guard is None else _guarded(state, state.guard, after, metrics, spike_factor)


def _accumulated(
    gradient: Callable[[Batch, Array], tuple[Params, Metrics]], params: Params, batch: Batch, rng: Array, parts: int
) -> tuple[Params, Metrics]:
    """Sums gradients and metrics over parts of a batch."""

    def split(rows: Array) -> Array:
        if rows.shape[0] % parts:
            raise ValueError(f"accumulate={parts} does not divide the {rows.shape[0]} rows of the batch")
        # Every parts-th row to one part, not a block of rows: so each device finds its share of a part among its own.
        return rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1)

    def add(grads: Params, numbered: tuple[Array, Batch]) -> tuple[Params, Metrics]:
        number, part = numbered
        more, metrics = gradient(part, jax.random.fold_in(rng, number))
        return jax.tree.map(jnp.add, grads, more), metrics

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, metrics = jax.lax.scan(add, zeros, (jnp.arange(parts), jax.tree.map(split, batch)))
    return grads, jax.tree.map(lambda values: values.sum(axis=0), metrics)


def _guarded(
    before: TrainState, guard: Guard, after: TrainState, metrics: Metrics, spike_factor: float
) -> tuple[TrainState, Metrics]:
    """Takes a bad step back, all but its number."""
    loss, mean = metrics["loss"] / jnp.maximum(metrics["tokens"], 1), guard.mean_loss
    is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"]))
    if spike_factor:
        is_bad |= (mean > 0) & (loss > spike_factor * mean)
    new_mean = jnp.where(mean > 0, _MEAN_LOSS_DECAY * mean + (1 - _MEAN_LOSS_DECAY) * loss, loss)
    in_a_row = jnp.where(is_bad, guard.in_a_row + 1, 0)
    params, opt_state = jax.tree.map(
        lambda old, new: jnp.where(is_bad, old, new), (before.params, before.opt_state), (after.params, after.opt_state)
    )
    guard = Guard(jnp.where(is_bad | (metrics["tokens"] == 0), mean, new_mean), in_a_row)
    counts = {"bad": is_bad.astype(jnp.float32), "bad_in_a_row": in_a_row.astype(jnp.float32)}
    return TrainState(after.step, params, opt_state, guard), metrics | counts


def jit_update(
    graphdef: nnx.GraphDef,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state_shardings: TrainState,
    *,
    accumulate: int = 1,
    spike_factor: float = 0.0,
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]:
    """Compiles `update` into `step(state, batch, rng) -> (state, metrics)`; `state` is donated.

    The output shardings are pinned, or GSPMD might choose others and the second step would compile again. The rows of a
    batch must be a multiple of the devices that share them times `accumulate`.
    """
    return jax.jit(
        functools.partial(update, graphdef, loss_fn, optimizer, accumulate=accumulate, spike_factor=spike_factor),
        donate_argnums=0,
        out_shardings=(state_shardings, None),
    )
