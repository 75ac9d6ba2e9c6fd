"""Fine-tuning with frozen parameters and low-rank adapters.

LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) freezes a matrix W and learns two small matrices A and B:
x W + (alpha / rank) (x A) B. `adapt` adds adapters to any model of `tfx_jax.nn` layers; `merged` returns a model
without adapters that computes the same.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tfx_jax.fields import at_least, documented
from tfx_jax.functional.layers import LowRankSum
from tfx_jax.nn.basic import FeedForward, Linear

Model = TypeVar("Model", bound=nnx.Module)


@documented
@dataclasses.dataclass(unsafe_hash=True)
class LoraConfig:
    """Low-rank adapters of a fine-tuning: `--config.lora.rank=8`. All that the model starts from is frozen."""

    rank: int = at_least(0, 0)  # columns of A and rows of B; 0: no adapters
    alpha: float = at_least(0, 16.0)  # adapters count alpha / rank times
    targets: str = "query|value"  # regular expression that occurs in the paths of the matrices with an adapter


class Frozen(nnx.Variable[Array]):
    """A parameter that is not trained: it gets no gradient and no update."""


class Adapter(nnx.Module):
    """A learned matrix (alpha / rank) A B that is added to a matrix [*in, *out], or to each matrix of a stack."""

    def __init__(
        self,
        stack: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        config: LoraConfig,
        *,
        rngs: Any,
    ):
        """Initializes A [*stack, *in, rank] as PyTorch's linear layer does, and B [*stack, rank, *out] with zeros.

        Args:
          stack: sizes of the leading axes along which matrices are stacked; empty for one matrix.
          inputs: sizes of the input axes of a matrix.
          outputs: sizes of its output axes.
          config: rank and alpha.
          rngs: stream `params`.
        """
        limit = math.prod(inputs) ** -0.5
        shape = (*stack, *inputs, config.rank)
        self.a = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
        self.b = nnx.Param(jnp.zeros((*stack, config.rank, *outputs)))
        self.scale = config.alpha / config.rank

    def beside(self, kernel: Float[Array, "*in_and_out"]) -> LowRankSum:
        """Returns the matrix and its adapter as a `LowRankSum`, which `tfx_jax.functional.layers.linear` accepts."""
        return LowRankSum(kernel, self.a[...], self.b[...] * self.scale)

    def added_to(self, kernel: Float[Array, "*stack_and_in_and_out"]) -> Float[Array, "*stack_and_in_and_out"]:
        """Returns the matrix, or the stack of matrices, plus (alpha / rank) A B."""
        return _sum(kernel, self.a[...], self.b[...], self.scale)


def _sum(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    """Returns kernel + scale * a b for kernel [*stack, *in, *out], a [*stack, *in, rank] and b [*stack, rank, *out]."""
    # a has the axes of stack, inputs and rank, b those of stack, rank and outputs, the kernel those of stack, inputs
    # and outputs. The difference is the number of axes of the stack.
    stack = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
    a, b = a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, b.shape[len(stack)], -1)
    delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scale
    return kernel + delta.reshape(kernel.shape).astype(kernel.dtype)


def adapt(model: nnx.Module, config: LoraConfig, *, frozen: str = "", seed: int = 0) -> None:
    """Adds adapters to matrices of a model and freezes parameters, in place.

    With adapters, all parameters that the model had are frozen, except those of its heads: modules that a new task adds
    to a pretrained model, such as a classifier. A model names their attributes in its class attribute `heads`.

    Args:
      model: a model without adapters and frozen parameters.
      config: options of the adapters; rank 0 means no adapters.
      frozen: regular expression; parameters are frozen too if it occurs in their paths. Empty freezes no others.
      seed: seed of the adapters' initial values.

    Raises:
      ValueError: if a pattern matches nothing or is not a regular expression, or no trainable parameter is left.
    """
    is_frozen: Callable[[str], bool] = _matcher("frozen", frozen) if frozen else lambda path: False
    names = [name for name, _, _ in _params(model)]
    if frozen and not any(map(is_frozen, names)):
        raise ValueError(f"frozen={frozen!r} matches none of the parameters, such as {names[0]}")
    adapters: list[tuple[nnx.Module, str, Adapter]] = []  # owner and name of a matrix, and its adapter
    if config.rank:
        is_target = _matcher("lora.targets", config.targets)
        rngs = nnx.Rngs(params=jax.random.fold_in(jax.random.key(seed), 1))
        matrices = [*matrices_of(model)]
        for path, owner, name, num_inputs, num_axes in matrices:
            if not is_target(path):
                continue
            shape = getattr(owner, name).shape
            num_stack_axes = len(shape) - num_axes
            stack, matrix = shape[:num_stack_axes], shape[num_stack_axes:]
            inputs, outputs = matrix[:num_inputs], matrix[num_inputs:]
            adapters.append((owner, name, Adapter(stack, inputs, outputs, config, rngs=rngs)))
        if not adapters:
            example = f"such as {matrices[0][0]}" if matrices else "of which this model has none"
            raise ValueError(f"lora.targets={config.targets!r} matches none of the matrices, {example}")
    heads = getattr(model, "heads", ())
    if config.rank and not heads:
        parts = [name for name, part in vars(model).items() if hasattr(part, "name_below_heads")]
        if parts:  # the rest of this model is a head over a pretrained encoder
            raise ValueError(f"{type(model).__name__} must name its new modules in a class attribute `heads`")
    for path, owner, name in [*_params(model)]:  # a list, because the loop changes the model
        if is_frozen(path) or (config.rank and path.partition("/")[0] not in heads):
            setattr(owner, name, Frozen(getattr(owner, name)[...]))
    for owner, name, adapter in adapters:
        setattr(owner, f"{name}_adapter", adapter)
    if not jax.tree.leaves(nnx.state(model, nnx.Param)):
        raise ValueError(f"frozen={frozen!r} leaves no parameter to learn")


def merged(model: Model) -> Model:
    """Returns a copy of a model with adapters added to their matrices and `Frozen` parameters as `nnx.Param` again.

    Returns the model itself if it has neither.
    """
    if not any(isinstance(node, (Adapter, Frozen)) for _, node in nnx.iter_graph(model)):
        return model
    model = nnx.clone(model)
    for _, module in [*nnx.iter_graph(model)]:
        if not isinstance(module, nnx.Module):
            continue
        for name, value in [*vars(module).items()]:
            if isinstance(value, Frozen):
                setattr(module, name, nnx.Param(value[...]))
        for name, adapter in [*vars(module).items()]:
            if isinstance(adapter, Adapter):
                kernel = getattr(module, name.removesuffix("_adapter"))
                kernel[...] = adapter.added_to(kernel[...])
                delattr(module, name)
    return model


def merge_params(params: dict[str, Any], config: LoraConfig) -> dict[str, Any]:
    """Adds adapters to their matrices, as `merged` does, in a nested dictionary of the parameters of a model."""
    merged = {name: merge_params(part, config) if isinstance(part, dict) else part for name, part in params.items()}
    for name in [name for name in merged if name.endswith("_adapter")]:
        adapter, kernel = merged.pop(name), name.removesuffix("_adapter")
        merged[kernel] = _sum(jnp.asarray(merged[kernel]), adapter["a"], adapter["b"], config.alpha / config.rank)
    return merged


def adapters_of(model: nnx.Module) -> dict[str, Adapter]:
    """Returns the adapters of a model, keyed by the paths of their matrices."""
    adapters = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Adapter))
    return {"/".join(map(str, path)).removesuffix("_adapter"): adapter for path, adapter in adapters}


def _matcher(field: str, pattern: str) -> Callable[[str], bool]:
    """Returns a function that tells whether `pattern` occurs in a path; `field` names the pattern in errors."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}={pattern!r} is not a regular expression ({error})") from None
    return lambda path: compiled.search(path) is not None


def _params(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields (path, owner, name) of each parameter: owner is the module that has it as attribute `name`."""
    for path, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Module):
            for name, value in vars(module).items():
                if isinstance(value, nnx.Param):
                    yield "/".join(map(str, (*path, name))), module, name


def matrices_of(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str, int, int]]:
    """Yields (path, owner, name, num_inputs, num_axes) of each matrix that may have an adapter.

    `num_inputs` counts the input axes of one matrix and `num_axes` its input and output axes, without those of a stack.
    """
    for path, owner, name in _params(model):
        if isinstance(owner, Linear) and name == "kernel":
            yield path, owner, name, len(owner.in_features), len(owner.in_features) + len(owner.out_features)
        elif isinstance(owner, FeedForward) and name in ("up", "gate", "down"):
            yield path, owner, name, 1, 2
