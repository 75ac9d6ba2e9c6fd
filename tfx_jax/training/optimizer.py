"""Optimizers and learning-rate schedules of `OptimizerConfig`, as functions of optax."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon, schedule_free

from tfx_jax.arrays import path_name
from tfx_jax.nn.stack import is_stack
from tfx_jax.training.config import OptimizerConfig


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """Returns a schedule that rises linearly to `peak` at step `warmup_steps`, then falls as 1 / sqrt(step).

    With peak = (d_model * warmup_steps)^-0.5, it is equation 3 of Vaswani et al. (2017): d_model^-0.5 * min(step^-0.5,
    step * warmup_steps^-1.5). Optax calls the schedule with the number of updates done before, 0 for the first; the
    step in the formula is this number plus 1, so the first update uses peak / warmup_steps.
    """

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1.0
        return peak * jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / step))

    return schedule


def learning_rate(config: OptimizerConfig, d_model: int, num_steps: int | None = None) -> optax.Schedule:
    """Returns the learning-rate schedule of a configuration.

    All schedules rise linearly to the peak at step `warmup_steps`. "inverse_sqrt" then falls as in
    `inverse_sqrt_schedule`, and "constant" stays; "cosine" (Loshchilov and Hutter, 2017, without restarts) and "linear"
    (Devlin et al., 2019) fall to `final_fraction` of the peak at step `num_steps`. Steps that are skipped as bad do not
    count.

    If `config.peak_learning_rate` is None, the peak is (d_model * warmup_steps)^-0.5. For Adafactor, whose learning
    rate is relative to the scale of each parameter, it is warmup_steps^-0.5; with "inverse_sqrt" and 10,000 steps of
    warm-up, this equals min(1e-6 * step, step^-0.5) of Shazeer and Stern (2018), section 9.

    Args:
      config: the configuration.
      d_model: width of the model; used only if the configuration has no peak.
      num_steps: number of steps of the run; "cosine" and "linear" need it.

    Returns:
      A function from the number of updates done before (0 for the first) to the learning rate.

    Raises:
      ValueError: if the schedule is unknown, or needs `num_steps` and it is None.

    >>> f"{learning_rate(OptimizerConfig(warmup_steps=4_000), d_model=512)(3_999):.4e}"
    '6.9877e-04'
    """
    peak, warmup_steps = config.peak_learning_rate, config.warmup_steps
    if peak is None:
        peak = (warmup_steps if config.name == "adafactor" else d_model * warmup_steps) ** -0.5
    if config.schedule == "inverse_sqrt":
        return inverse_sqrt_schedule(peak, warmup_steps)
    warmup = optax.linear_schedule(init_value=peak / warmup_steps, end_value=peak, transition_steps=warmup_steps - 1)
    if config.schedule == "constant":
        return warmup
    if num_steps is None or config.schedule not in ("cosine", "linear"):
        raise ValueError(
            'schedule must be "inverse_sqrt", "constant" or, with num_steps, "cosine" or "linear", '
            f"got schedule={config.schedule!r} with num_steps={num_steps}"
        )
    decay_steps = max(num_steps - warmup_steps, 1)
    final_fraction = config.final_fraction
    if config.schedule == "linear":
        line = optax.linear_schedule(init_value=peak, end_value=final_fraction * peak, transition_steps=decay_steps)

        def decay(count: ArrayLike, /) -> ArrayLike:
            return jnp.maximum(line(count), final_fraction * peak)  # rounding goes below the end

    else:
        decay = optax.cosine_decay_schedule(peak, decay_steps, alpha=final_fraction)
    return optax.join_schedules([warmup, decay], boundaries=[warmup_steps - 1])


# Coefficients of the five steps of the Newton-Schulz iteration, as in the `muon` repository of Jordan. One triple per
# step: with a single triple, optax 0.2.8 unrolls the steps and keeps the intermediate matrices of all layers.
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
_MUON_RMS = 0.2  # root mean square of an update before the learning rate; about that of Adam (Liu et al., 2025)


def make_optimizer(
    config: OptimizerConfig,
    d_model: int,
    num_steps: int | None = None,
    matrices: Mapping[str, tuple[int, int]] | None = None,
) -> optax.GradientTransformation:
    """Returns the optimizer of a configuration, after gradient clipping by global norm if `clip_norm` is not 0.

    - "adam": with b1 = 0.9, b2 = 0.98 and epsilon = 1e-9, the optimizer of section 5.3 of Vaswani et al. (2017).
    - "adamw": Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    - "adafactor": stores only the row and column means of a matrix's second moments, and no first moments (Shazeer and
      Stern, 2018, https://arxiv.org/abs/1804.04235).
    - "lion": every update is learning rate * sign(b1 * moment + (1 - b1) * gradient); the moment decays by b2 (Chen et
      al., 2023, https://arxiv.org/abs/2302.06675).
    - "sgd": stochastic gradient descent with momentum b1.
    - "muon": Nesterov momentum b1, orthogonalized by five steps of a Newton-Schulz iteration, for `matrices` (Jordan et
      al., 2024, https://kellerjordan.github.io/posts/muon/). Updates are multiplied by 0.2 sqrt(max(inputs, outputs)),
      so that learning rate and weight decay of AdamW can be used (Liu et al., 2025, https://arxiv.org/abs/2502.16982,
      equation 4). All other parameters are updated by AdamW.
    - "schedule_free": AdamW without a first moment, whose iterates are averaged with weights learning rate^2; gradients
      are those at b1 * average + (1 - b1) * iterate, which are the parameters (Defazio et al., 2024,
      https://arxiv.org/abs/2405.15682, equations 3 to 5). `averaged_params` returns the average, for evaluation.

    Weight decay subtracts weight_decay * learning rate * parameter in each step, for the parameters of `is_decayed`.

    Args:
      config: the configuration.
      d_model: see `learning_rate`.
      num_steps: see `learning_rate`.
      matrices: by path, the numbers of input and output axes of the hidden matrices, which are the last axes of their
        arrays; only Muon uses them.

    Raises:
      ValueError: if the optimizer or the schedule is unknown, or the schedule needs `num_steps` and it is None.
    """
    schedule = learning_rate(config, d_model, num_steps)
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.epsilon, weight_decay=config.weight_decay, mask=is_decayed
    )
    if config.name == "adam":
        optimizer = optax.adam(schedule, b1=config.b1, b2=config.b2, eps=config.epsilon)
    elif config.name == "adamw":
        optimizer = adamw
    elif config.name == "muon":
        optimizer = _muon(config, schedule, matrices or {}, others=adamw)
    elif config.name == "adafactor":
        # `optax.adafactor` returns updates that already contain the negative learning rate, so the decay must, too.
        decay = optax.add_decayed_weights(lambda count: -config.weight_decay * schedule(count), mask=is_decayed)
        optimizer = optax.chain(_for_each_layer(optax.adafactor(schedule, min_dim_size_to_factor=32)), decay)
    elif config.name == "lion":
        optimizer = optax.lion(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=is_decayed)
    elif config.name == "sgd":
        optimizer = optax.sgd(schedule, momentum=config.b1)
    elif config.name == "schedule_free":
        base = optax.adamw(
            schedule, b1=0.0, b2=config.b2, eps=config.epsilon, weight_decay=config.weight_decay, mask=is_decayed
        )
        # Optax counts from 1 where it weights the average, and from 0 in the base optimizer.
        optimizer = schedule_free(base, lambda count: schedule(count - 1), b1=config.b1)
    else:
        raise ValueError(
            'optimizer must be "adam", "adamw", "adafactor", "lion", "sgd", "muon" or "schedule_free", got '
            f"{config.name!r}"
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer


def averaged_params(config: OptimizerConfig, opt_state: optax.OptState, params: Any) -> Any:
    """Returns the average that "schedule_free" evaluates: (params - (1 - b1) * iterate) / b1.

    Args:
      config: the configuration, which names "schedule_free".
      opt_state: state of its optimizer, which holds the iterate.
      params: the parameters, where gradients are taken.
    """
    iterates = optax.tree.get(opt_state, "z")  # y and z are the paper's names of parameters and iterates
    return jax.tree.map(lambda y, z: ((y - (1 - config.b1) * z) / config.b1).astype(y.dtype), params, iterates)


def _muon(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    matrices: Mapping[str, tuple[int, int]],
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns Muon for `matrices` (see `make_optimizer`) and the optimizer `others` for all other parameters."""

    def axes(path: Any, update: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the input axes and the output axes of a matrix; the axes before them are those of a stack."""
        num_inputs, num_outputs = matrices[path_name(path)]
        first = update.ndim - num_inputs - num_outputs
        return tuple(range(first, first + num_inputs)), tuple(range(first + num_inputs, update.ndim))

    def dimension_numbers(updates: Any) -> Any:
        """Returns, for each matrix, which axes optax has to treat as rows and as columns."""
        return jax.tree_util.tree_map_with_path(lambda path, update: MuonDimensionNumbers(*axes(path, update)), updates)

    def scale(updates: Any, params: Any) -> Any:
        """Multiplies each update by 0.2 sqrt(max(inputs, outputs))."""
        del params  # the signature is that of optax

        def scaled(path: Any, update: Array) -> Array:
            """Scales the update of one matrix."""
            input_axes, output_axes = axes(path, update)
            num_inputs = math.prod(update.shape[axis] for axis in input_axes)
            num_outputs = math.prod(update.shape[axis] for axis in output_axes)
            return _MUON_RMS * math.sqrt(max(num_inputs, num_outputs)) * update

        return jax.tree_util.tree_map_with_path(scaled, updates)

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if path_name(path) in matrices else "others", params
        )

    muon = optax.chain(
        scale_by_muon(_NEWTON_SCHULZ, beta=config.b1, weight_dimension_numbers=dimension_numbers),
        optax.stateless(scale),
        optax.add_decayed_weights(config.weight_decay, mask=is_decayed),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": muon, "others": others}, labels)


def is_decayed(params: Any) -> Any:
    """Returns, in the tree of the parameters, whether each gets weight decay: all but biases and normalization scales.

    >>> is_decayed({"norm": {"scale": 1.0, "bias": 0.0}, "feed_forward": {"up": 2.0, "up_bias": 3.0}})
    {'feed_forward': {'up': True, 'up_bias': False}, 'norm': {'bias': False, 'scale': False}}
    """

    def is_decayed_leaf(path: Any, _: Any) -> bool:
        return not path_name(path).endswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(is_decayed_leaf, params)


def _for_each_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that updates each layer of a stack as if its parameters were not stacked.

    The parameters of all layers of a stack are stored as arrays [layers, ...]. Adafactor computes means over the rows
    and columns of a matrix and its root mean square, which must not extend over several layers.
    """

    def apply(fn: Any, *trees: dict[str, Any]) -> dict[str, Any]:
        """Calls `fn` with the values of each name in `trees`, which `_split_at_stacks` returned; vmapped for stacks."""
        results = {}
        for name in trees[0]:
            fn_of_part = jax.vmap(fn) if is_stack(name) else fn  # one call for all layers of a stack
            results[name] = fn_of_part(*(tree[name] for tree in trees))
        return results

    def init(params: Any) -> Any:
        return apply(optimizer.init, _split_at_stacks(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Updates each part by itself, and each layer of a stack."""
        results = apply(optimizer.update, _split_at_stacks(updates), state, _split_at_stacks(params))
        new_updates = {name: part_updates for name, (part_updates, _) in results.items()}
        new_state = {name: part_state for name, (_, part_state) in results.items()}
        return _join(new_updates), new_state

    return optax.GradientTransformation(init, update)


def _split_at_stacks(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Splits nested parameters into subtrees by path ("bert/layers"), so that each stack is a subtree of its own.

    Only dictionaries that contain a stack are split. The stack may be inside another module, as in a BERT with a head.
    """
    parts = {}
    for name, part in params.items():
        holds_stack = isinstance(part, dict) and not is_stack(name) and any(map(is_stack, part))
        parts |= _split_at_stacks(part, f"{prefix}{name}/") if holds_stack else {prefix + name: part}
    return parts


def _join(parts: dict[str, Any]) -> dict[str, Any]:
    """Undoes `_split_at_stacks`."""
    params: dict[str, Any] = {}
    for path, part in parts.items():
        *parents, name = path.split("/")
        parent = params
        for parent_name in parents:
            parent = parent.setdefault(parent_name, {})
        parent[name] = part
    return params
