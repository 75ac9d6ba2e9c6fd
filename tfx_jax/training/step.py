"""One optimizer update as a pure function of (state, batch, rng)."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from tfx_jax.errors import UserError
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric
from tfx_jax.nn.distribution import DIRECT, Distribution, distributed
from tfx_jax.nn.moe import balance_experts
from tfx_jax.tasks.loss import LossOutput, Metric

Params = Any  # nested dictionary of arrays, as nnx.to_pure_dict returns it
Batch = dict[str, Any]  # nested dictionary of arrays
LossFn = Callable[..., LossOutput]
"""Maps a model, a batch, its random streams and, for tasks with a carry, the carry of the last batch to the loss."""

_MEAN_LOSS_DECAY = 0.99  # of the running mean that spikes are compared with

# Lets TPUs exchange the gradient of one layer while they compute that of another. By default the compiler merges the
# gradients of all layers into one exchange at the end; with these options it merges only gradients below the threshold.
_TPU_OPTIONS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 2**19,
}


class Metrics(NamedTuple):
    """Metrics of one training step."""

    means: dict[str, Metric]
    """Means over predictions: "loss" and the metrics that the loss function returns."""
    numbers: dict[str, Any]
    """Numbers of the whole step: "tokens" (tokens read), "grad_norm" and, if bad steps are skipped, "bad" (1 or 0) and
    "bad_in_a_row" (consecutive bad steps)."""


class SkipState(NamedTuple):
    """State used to detect bad steps."""

    mean_loss: Array  # running mean of the loss per prediction over good steps; 0 before the first good step
    in_a_row: Array  # bad steps since the last good one


class TrainState(NamedTuple):
    """Everything that training changes, as one pytree of arrays that is saved, restored and sharded as a whole."""

    step: Array
    params: Params
    opt_state: optax.OptState
    skip_state: SkipState
    model_state: Params
    """State without gradients, such as centroids: the model's Variables that are not `nnx.Param`."""
    carry: Any = None
    """State of the examples from batch to batch, such as memories: arrays [B, ...] or None; see `LossOutput`."""
    ema: Params | None = None
    """Average of `params` for evaluation: exponential, or that of the optimizer; None if there is none."""

    @property
    def variables(self) -> Params:
        """Parameters and model state as one tree, which `nnx.merge` combines with the graph definition.

        If the run averages its parameters, these are the averages.
        """
        return merge_trees(self.params if self.ema is None else self.ema, self.model_state)


def average_trees(load: Callable[[int], Params], steps: Sequence[int]) -> Params:
    """Returns the mean of the trees that `load(step)` returns, in the dtypes of the first."""
    first = load(steps[0])
    total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), first)
    for step in steps[1:]:
        total = jax.tree.map(np.add, total, load(step))
    return jax.tree.map(lambda leaf, like: np.asarray(leaf / len(steps), like.dtype), total, first)


def merge_trees(first: Params, second: Params) -> Params:
    """Merges two nested dictionaries that have no leaf path in common."""
    merged = dict(first)
    for name, value in second.items():
        merged[name] = merge_trees(first[name], value) if name in first else value
    return merged


def split_variables(model: nnx.Module) -> tuple[Params, Params]:
    """Returns the parameters of a model and its model state, as nested dictionaries of arrays.

    Raises:
      ValueError: if the model keeps random keys, as `nnx.Dropout` and Flax cells do if they are built with `rngs`.
    """
    params, keys, model_state = nnx.state(model, nnx.Param, nnx.RngState, ...)
    if paths := ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(keys)]:
        raise ValueError(
            f"{type(model).__name__} keeps random keys in {paths[0]}: use `rngs` in the constructor only to initialize "
            "parameters, and pass `rngs` to each call"
        )
    return nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)


def new_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    *,
    model_state: Params | None = None,
    carry: Any = None,
    has_ema: bool = False,
) -> TrainState:
    """Returns the state at step 0 with these parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        skip_state=SkipState(mean_loss=jnp.zeros(()), in_a_row=jnp.zeros((), jnp.int32)),
        model_state=model_state or {},
        carry=carry,
        ema=jax.tree.map(jnp.copy, params) if has_ema else None,
    )


def init_state(
    make_model: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    *,
    make_carry: Callable[[], Any] = lambda: None,
    has_ema: bool = False,
) -> tuple[nnx.GraphDef[Any], Callable[[], TrainState]]:
    """Splits a model into its static definition and a function that computes the initial state.

    The model is built abstractly for the definition, and with arrays only inside the function. Jitted with output
    shardings, the function never puts more than its shard of the state on a device.

    Args:
      make_model: builds the model.
      optimizer: its state is part of the initial state.
      make_carry: returns the carry of the first batch, or None for a task without a carry.
      has_ema: whether the state has an average of the parameters.

    Returns:
      A pair: the graph definition, and a function without arguments that returns the state at step 0.
    """

    def first_state() -> TrainState:
        params, model_state = split_variables(make_model())
        return new_state(params, optimizer, model_state=model_state, carry=make_carry(), has_ema=has_ema)

    return nnx.graphdef(nnx.eval_shape(make_model)), first_state


def update(
    graphdef: nnx.GraphDef[Any],
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    rng: Array,
    *,
    axis_name: str | None = None,
    distribution: Distribution = DIRECT,
    accumulate: int = 1,
    skip_bad_steps: bool = False,
    spike_factor: float = 0.0,
    ema_decay: float = 0.0,
    averaged_params: Callable[[optax.OptState, Params], Params] | None = None,
) -> tuple[TrainState, Metrics]:
    """Takes one optimizer step on the mean loss per prediction plus the auxiliary losses of the model's parts.

    The function is pure and independent of devices: `jit_update` compiles it for a mesh. It also works under pmap,
    `jax.pmap(functools.partial(update, graphdef, loss_fn, optimizer, axis_name="data"), axis_name="data")`. Each device
    then passes a replica of the state, its examples of the batch and of the carry, and the same rng.

    Args:
      graphdef: static definition of the model.
      loss_fn: returns the `LossOutput` of a batch; it may change Variables of the model that are not parameters.
      optimizer: turns gradients into updates.
      state: state before the step.
      batch: a tree of arrays [B, ...].
      rng: key of the whole run. It is folded with the step number, so that a resumed run samples the same values.
      axis_name: the mapped axis under `jax.pmap`; None means that `batch` is the whole batch. Model state is averaged
        over the devices.
      distribution: how attention and experts run if the batch is sharded over a mesh.
      accumulate: number of equal parts of the batch that are processed one after the other, which divides the memory
        for activations. Without dropout, model state and experts, which share their places within a part, the result
        is the same.
      skip_bad_steps: whether to discard a step whose loss or gradient is not finite or whose loss is a spike.
      spike_factor: a loss per prediction above this many times its running mean is a spike; 0 disables the check.
      ema_decay: the decay of `state.ema` in this step, the n-th, is min(ema_decay, (1 + n) / (10 + n)), so that the
        initial values are soon forgotten; 0: the state has no such average.
      averaged_params: computes the average from the optimizer's state and the parameters; None: the optimizer has none.

    Returns:
      The next state and the metrics of the step. A discarded step changes only `step` and `skip_state`.

    Raises:
      ValueError: if `accumulate` does not divide the number of examples.
      UserError: if a trained part of the model has a dropout rate above 0, but the loss samples nothing from `rngs`.
    """
    rng = jax.random.fold_in(rng, state.step)
    if axis_name is not None:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))

    def gradient(
        examples: tuple[Batch, Any], rng: Array, model_state: Params
    ) -> tuple[Params, tuple[Metrics, Params, Any]]:
        """Returns the gradient of the summed loss of (batch, carry), and (metrics, model state, next carry)."""
        batch, carry = examples

        def loss(params: Params) -> tuple[Array, tuple[Metrics, Params, Any]]:
            """Returns (loss to minimize, (metrics, model state after the step, carry))."""
            model = nnx.merge(graphdef, merge_trees(params, model_state))
            rngs = nnx.Rngs(dropout=rng)
            count_before = rngs.dropout.count[...]
            output = loss_fn(model, batch, rngs, *(() if carry is None else (carry,)))
            if rngs.dropout.count[...] is count_before:  # sampling replaces the array
                _check_no_dropout(model)
            auxiliary_loss, step_metrics = _auxiliary(model, output.weight)
            means = output.metrics | step_metrics | {"loss": Metric(output.loss, output.weight)}
            metrics = Metrics(means, {"tokens": output.num_tokens})
            return output.loss + auxiliary_loss, (metrics, split_variables(model)[1], output.carry)

        with distributed(distribution):  # around the backward pass, too: reversible layers call their attention there
            return jax.grad(loss, has_aux=True)(state.params)

    if accumulate == 1:
        grads, (metrics, model_state, carry) = gradient((batch, state.carry), rng, state.model_state)
    else:
        grads, (metrics, model_state, carry) = _accumulate(gradient, state, batch, rng, accumulate)
    carry = jax.lax.stop_gradient(carry)
    if axis_name is not None:
        grads, metrics = jax.lax.psum((grads, metrics), axis_name)
        model_state = jax.lax.pmean(model_state, axis_name)
    model = nnx.merge(graphdef, merge_trees(state.params, model_state))
    balance_experts(model)
    model_state = split_variables(model)[1]
    # The sum of the losses is divided by the weight of the whole batch, so that every prediction counts the same.
    weight = metrics.means["loss"].weight
    grads = jax.tree.map(lambda grad: grad / jnp.maximum(weight, 1), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = metrics._replace(numbers=metrics.numbers | {"grad_norm": optax.tree.norm(grads)})
    ema = None
    if averaged_params is not None:
        ema = averaged_params(opt_state, params)
    elif ema_decay:
        ema = _moving_average(state.ema, params, ema_decay, state.step + 1)
    after = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skip_state=state.skip_state,
        model_state=model_state,
        carry=carry,
        ema=ema,
    )
    return _without_bad_step(state, after, metrics, spike_factor) if skip_bad_steps else (after, metrics)


def _moving_average(ema: Params, params: Params, max_decay: float, num_steps: Array) -> Params:
    """Returns decay * ema + (1 - decay) * params after `num_steps` steps; see `update` for the decay."""
    decay = jnp.minimum(max_decay, (1 + num_steps) / (10 + num_steps))
    return jax.tree.map(lambda mean, new: (mean + (1 - decay) * (new - mean)).astype(mean.dtype), ema, params)


def _check_no_dropout(model: nnx.Module) -> None:
    """Raises UserError if a trained part of the model has a dropout rate above 0."""
    for _, module in reversed([*nnx.iter_graph(model)]):  # outer modules first: they have the configured names
        if isinstance(module, nnx.Dropout):
            rates = {"dropout_rate": 0.0 if module.deterministic else module.rate}
        elif isinstance(module, nnx.Module) and jax.tree.leaves(nnx.state(module, nnx.Param)):
            rates = getattr(getattr(module, "config", None), "__dict__", {}) | vars(module)
        else:
            continue
        for name, rate in rates.items():
            if name.endswith("dropout_rate") and isinstance(rate, (int, float)) and rate > 0:
                raise UserError(
                    f"{type(module).__name__} has {name}={rate}, but the loss sampled nothing from the stream "
                    "`dropout`: pass its `rngs` to the model, as in model(x, rngs=rngs), or set the rate to 0"
                )


def _auxiliary(model: nnx.Module, weight: Array) -> tuple[Array | float, dict[str, Metric]]:
    """Reads the auxiliary losses and metrics that the model's parts recorded in a call.

    Returns:
      A pair: the sum of the auxiliary losses times `weight`, and the mean of each metric over the parts, by name.
    """
    losses, metrics, _ = nnx.state(model, AuxiliaryLoss, StepMetric, ...)
    values = collections.defaultdict[str, list[Array]](list)  # one for each part that records the metric
    for path, variable in nnx.to_flat_state(metrics):
        values[str(path[-1])].append(variable[...].mean())
    means = {name: sum(recorded) / len(recorded) for name, recorded in values.items()}
    total = sum(loss.sum() for loss in jax.tree.leaves(losses))
    # Times `weight`, because the caller divides all sums by the weight of the batch.
    return total * weight, {name: Metric(mean * weight, weight) for name, mean in means.items()}


def _accumulate(
    gradient: Callable[[tuple[Batch, Any], Array, Params], tuple[Params, tuple[Metrics, Params, Any]]],
    state: TrainState,
    batch: Batch,
    rng: Array,
    num_parts: int,
) -> tuple[Params, tuple[Metrics, Params, Any]]:
    """Sums gradients and metrics over parts of a batch; each part continues with the model state of the previous one.

    Args:
      gradient: `gradient((batch, carry), rng, model_state)` returns gradients and (metrics, model state, carry).
      state: state before the step.
      batch: the whole batch.
      rng: key of the step; each part folds in its number.
      num_parts: number of equal parts.

    Returns:
      The gradients and (metrics, model state, carry), as `gradient` does.
    """

    def split(array: Array) -> Array:
        """[B, ...] -> [parts, B / parts, ...]."""
        if array.shape[0] % num_parts:
            raise ValueError(
                f"accumulate={num_parts} does not divide the {array.shape[0]} examples of the batch: use a divisor"
            )
        # Strided parts rather than blocks: each device then finds its share of every part among its own examples.
        return array.reshape(-1, num_parts, *array.shape[1:]).swapaxes(0, 1)

    def join(array: Array) -> Array:
        """Undoes `split`."""
        return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])

    def add_part(
        sums: tuple[Params, Params], numbered_part: tuple[Array, Any]
    ) -> tuple[tuple[Params, Params], tuple[Metrics, Any]]:
        """Body of a scan whose carry is (sum of gradients, model state), over (number of a part, its examples)."""
        (grads, model_state), (number, examples) = sums, numbered_part
        part_grads, (metrics, model_state, carry) = gradient(examples, jax.random.fold_in(rng, number), model_state)
        return (jax.tree.map(jnp.add, grads, part_grads), model_state), (metrics, carry)

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    parts = jnp.arange(num_parts), jax.tree.map(split, (batch, state.carry))
    # The scan stacks the metrics and the carry of all parts: [parts, ...].
    (grads, model_state), (metrics, carry) = jax.lax.scan(add_part, (zeros, state.model_state), parts)
    total_metrics = jax.tree.map(lambda values: values.sum(axis=0), metrics)
    return grads, (total_metrics, model_state, jax.tree.map(join, carry))


def _without_bad_step(
    before: TrainState, after: TrainState, metrics: Metrics, spike_factor: float
) -> tuple[TrainState, Metrics]:
    """Returns the state `after` or, for a bad step, `before` with the new step number and skip state; and the metrics.

    A step is bad if its loss or gradient is not finite, or its loss is a spike (see `update`). The metrics get the
    numbers "bad" and "bad_in_a_row".
    """
    skip_state, mean_loss = before.skip_state, before.skip_state.mean_loss  # a mean of 0: no good step yet
    loss = metrics.means["loss"].mean
    is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(metrics.numbers["grad_norm"]))
    if spike_factor:
        is_bad |= (mean_loss > 0) & (loss > spike_factor * mean_loss)
    new_mean = jnp.where(mean_loss > 0, _MEAN_LOSS_DECAY * mean_loss + (1 - _MEAN_LOSS_DECAY) * loss, loss)
    in_a_row = jnp.where(is_bad, skip_state.in_a_row + 1, 0)
    keeps_mean = is_bad | (metrics.means["loss"].weight == 0)  # a batch without predictions has no loss
    skip_state = SkipState(mean_loss=jnp.where(keeps_mean, mean_loss, new_mean), in_a_row=in_a_row)
    state = jax.tree.map(
        lambda old, new: jnp.where(is_bad, old, new),
        before._replace(skip_state=skip_state),
        after._replace(skip_state=skip_state),
    )
    counts = {"bad": is_bad.astype(jnp.float32), "bad_in_a_row": in_a_row.astype(jnp.float32)}
    return state._replace(step=after.step), metrics._replace(numbers=metrics.numbers | counts)


def jit_update(
    graphdef: nnx.GraphDef[Any],
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state_shardings: TrainState,
    **options: Any,
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]:
    """Compiles `update`, with its options, into `step(state, batch, rng) -> (state, metrics)`; `state` is donated.

    Output shardings are fixed; otherwise GSPMD might choose others, and the second step would compile again. The number
    of examples must be a multiple of `accumulate` times the devices that share them. On several TPUs, gradients of one
    layer are exchanged while those of another are computed, if the layers are unrolled.
    """
    devices = jax.tree.leaves(state_shardings)[0].device_set
    is_multi_tpu = len(devices) > 1 and all(device.platform == "tpu" for device in devices)
    return jax.jit(
        functools.partial(update, graphdef, loss_fn, optimizer, **options),
        donate_argnums=0,
        out_shardings=(state_shardings, None),
        compiler_options=_TPU_OPTIONS if is_multi_tpu else None,
    )
