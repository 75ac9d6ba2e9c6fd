"""The paper's optimizer and learning-rate schedule, and what larger models are trained with instead."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from tfx_jax.nn.stack import is_stack
from tfx_jax.training.config import OptimizerConfig


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """Rises linearly to `peak` at step `warmup_steps`, then falls as the inverse square root of the step.

    Equation 3 of Vaswani et al. (2017), d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), is the one whose peak is
    (d_model * warmup_steps)^-0.5. Steps count from 1: the first update is made at 1 / warmup_steps of the peak.
    """

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1.0
        return peak * jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / step))

    return schedule


def learning_rate(config: OptimizerConfig, d_model: int, num_steps: int | None = None) -> optax.Schedule:
    """The schedule of an experiment; without a peak of its own, that of the optimizer's paper.

    "cosine" (Loshchilov and Hutter, 2017, without restarts) and "linear" (Devlin et al., 2019) rise like the paper's,
    linearly up to the peak at step `warmup_steps`, and reach `final_fraction` of it at step `num_steps`.

    For Adafactor it is warmup_steps^-0.5, relative to the scale of each parameter: with 10,000 steps of warm-up, equal
    to min(1e-6 * step, step^-0.5) of Shazeer and Stern (2018), section 9.

    >>> f"{learning_rate(OptimizerConfig(warmup_steps=4_000), d_model=512)(3_999):.4e}"
    '6.9877e-04'
    """
    peak, warmup_steps = config.peak_learning_rate, config.warmup_steps
    if peak is None:
        peak = (warmup_steps if config.name == "adafactor" else d_model * warmup_steps) ** -0.5
    if config.schedule == "inverse_sqrt":
        return inverse_sqrt_schedule(peak, warmup_steps)
    if num_steps is None or config.schedule not in ("cosine", "linear"):
        raise ValueError(f"schedule={config.schedule!r} with num_steps={num_steps}")
    decay_steps, final = max(num_steps - warmup_steps, 1), config.final_fraction
    if config.schedule == "linear":
        decay = optax.linear_schedule(peak, final * peak, decay_steps)
    else:
        decay = optax.cosine_decay_schedule(peak, decay_steps, alpha=final)
    rise = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
    return optax.join_schedules([rise, decay], [warmup_steps - 1])


def make_optimizer(config: OptimizerConfig, d_model: int, num_steps: int | None = None) -> optax.GradientTransformation:
    """What an experiment asks for, behind the clipping of the gradient's global norm if there is one.

    "adam" with b1 = 0.9, b2 = 0.98, epsilon = 1e-9 is that of section 5.3 of Vaswani et al. (2017); "adamw" decays
    weights besides (Loshchilov and Hutter, 2019); "adafactor" keeps, of a matrix's second moments, only the means of
    rows and columns, and no first moments (Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235); "lion" takes
    steps of one size, the sign of b1 * moment + (1 - b1) * gradient, with a moment that decays by b2 (Chen et al.,
    2023, https://arxiv.org/abs/2302.06675); "sgd" has the momentum b1. Weight decay is a part weight_decay * learning
    rate of each weight a step, and spares biases and the gains of normalization.

    Raises:
      ValueError: if there is no such optimizer or schedule, or a schedule has no end.
    """
    rate = learning_rate(config, d_model, num_steps)
    if config.name == "adam":
        optimizer = optax.adam(rate, b1=config.b1, b2=config.b2, eps=config.epsilon)
    elif config.name == "adamw":
        optimizer = optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.epsilon, weight_decay=config.weight_decay, mask=is_decayed
        )
    elif config.name == "adafactor":
        # optax adds the decay behind the learning rate.
        decay = optax.add_decayed_weights(lambda count: -config.weight_decay * rate(count), mask=is_decayed)
        optimizer = optax.chain(_by_layer(optax.adafactor(rate, min_dim_size_to_factor=32)), decay)
    elif config.name == "lion":
        optimizer = optax.lion(rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=is_decayed)
    elif config.name == "sgd":
        optimizer = optax.sgd(rate, momentum=config.b1)
    else:
        raise ValueError(f'optimizer must be "adam", "adamw", "adafactor", "lion" or "sgd", got {config.name!r}')
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer


def is_decayed(params: Any) -> Any:
    """For each parameter whether weight decay applies: to all but biases and the gains of normalization.

    >>> is_decayed({"norm": {"scale": 1.0, "bias": 0.0}, "feed_forward": {"up": 2.0, "up_bias": 3.0}})
    {'feed_forward': {'up': True, 'up_bias': False}, 'norm': {'bias': False, 'scale': False}}
    """

    def of(path: Any, _: Any) -> bool:
        return not jax.tree_util.keystr(path, simple=True, separator="/").endswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(of, params)


def _by_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Treats each layer of a stack as parameters of its own.

    Adafactor looks at the rows, columns and root mean square of a whole matrix, not of a stack of them.
    """

    def each(fn: Any, *trees: dict[str, Any]) -> dict[str, Any]:
        return {name: (jax.vmap(fn) if is_stack(name) else fn)(*(tree[name] for tree in trees)) for name in trees[0]}

    def init(params: Any) -> Any:
        return each(optimizer.init, _parts(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found = each(optimizer.update, _parts(updates), state, _parts(params))
        parts, state = ({name: pair[index] for name, pair in found.items()} for index in (0, 1))
        return _joined(parts), state

    return optax.GradientTransformation(init, update)


def _parts(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Parameters cut where stacks begin, by path: a model may have them inside another, as a BERT below its head."""
    parts = {}
    for name, part in params.items():
        holds_stack = isinstance(part, dict) and not is_stack(name) and any(map(is_stack, part))
        parts |= _parts(part, f"{prefix}{name}/") if holds_stack else {prefix + name: part}
    return parts


def _joined(parts: dict[str, Any]) -> dict[str, Any]:
    """Undoes `_parts`."""
    params: dict[str, Any] = {}
    for path, part in parts.items():
        *outer, name = path.split("/")
        owner = params
        for step in outer:
            owner = owner.setdefault(step, {})
        owner[name] = part
    return params
