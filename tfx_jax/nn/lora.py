"""Fine-tuning with frozen parameters and low-rank adapters.

LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) freezes a matrix W and learns two small matrices A and B:
x W + (alpha / rank) (x A) B. DoRA (Liu et al., 2024, https://arxiv.org/abs/2402.09353) also learns the norm of each
column of W + (alpha / rank) A B. `adapt` adds adapters to any model of `tfx_jax.nn` layers; `merged` returns a model
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
from tfx_jax.functional.layers import LowRankSum, column_norms
from tfx_jax.nn.basic import FeedForward, Linear

Model = TypeVar("Model", bound=nnx.Module)


@documented
@dataclasses.dataclass(unsafe_hash=True)
class LoraConfig:
    """Low-rank adapters of a fine-tuning: `--config.lora.rank=8`. All that the model starts from is frozen."""

    rank: int = at_least(0, 0)  # columns of A and rows of B; 0: no adapters
    alpha: float = at_least(0, 16.0)  # adapters count alpha / rank times
    targets: str = "query|value"  # regular expression that occurs in the paths of the matrices with an adapter
    use_dora: bool = False  # whether to learn the norms of the columns of adapted matrices too (DoRA)


class Frozen(nnx.Variable[Array]):
    """A parameter that is not trained: it gets no gradient and no update."""


def freeze(module: nnx.Module) -> None:
    """Turns all parameters of a module and its submodules into `Frozen` variables of the same paths and values."""
    for _, owner, name in [*_params(module)]:  # a list, because the loop changes the module
        setattr(owner, name, Frozen(getattr(owner, name)[...]))


class Adapter(nnx.Module):
    """A learned matrix (alpha / rank) A B that is added to a matrix [*in, *out], or to each matrix of a stack.

    With DoRA, the columns of the sum are then scaled to the learned norms `magnitude`, [*stack, *out].
    """

    def __init__(
        self,
        kernel: Float[Array, "*stack_and_in_and_out"],
        config: LoraConfig,
        *,
        num_inputs: int,
        num_axes: int,
        rngs: Any,
    ):
        """Initializes A [*stack, *in, rank] as PyTorch's linear layer does, and B [*stack, rank, *out] with zeros.

        Args:
          kernel: the matrix, or the stack of matrices; `magnitude` starts with the norms of its columns.
          config: rank, alpha, and whether to use DoRA.
          num_inputs: number of input axes of a matrix.
          num_axes: number of its input and output axes.
          rngs: stream `params`.
        """
        num_stack_axes = kernel.ndim - num_axes
        stack, matrix = kernel.shape[:num_stack_axes], kernel.shape[num_stack_axes:]
        inputs, outputs = matrix[:num_inputs], matrix[num_inputs:]
        limit = math.prod(inputs) ** -0.5
        shape = (*stack, *inputs, config.rank)
        self.a = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
        self.b = nnx.Param(jnp.zeros((*stack, config.rank, *outputs)))
        self.magnitude = nnx.Param(first_magnitude(kernel, self.a.shape, self.b.shape)) if config.use_dora else None
        self.scale = config.alpha / config.rank

    def beside(self, kernel: Float[Array, "*in_and_out"]) -> LowRankSum:
        """Returns the matrix and its adapter as a `LowRankSum`, which `tfx_jax.functional.layers.linear` accepts."""
        magnitude = None if self.magnitude is None else self.magnitude[...]
        return LowRankSum(kernel, self.a[...], self.b[...] * self.scale, magnitude)

    def added_to(self, kernel: Float[Array, "*stack_and_in_and_out"]) -> Float[Array, "*stack_and_in_and_out"]:
        """Returns the matrix, or the stack of matrices, plus (alpha / rank) A B, with its norms if there are any."""
        magnitude = None if self.magnitude is None else self.magnitude[...]
        return _merge(kernel, self.a[...], self.b[...], self.scale, magnitude)


def _merge(kernel: Array, a: Array, b: Array, scale: float, magnitude: Array | None) -> Array:
    """Returns kernel + scale * a b, its columns scaled to the norms `magnitude`, in the dtype of the kernel.

    Args:
      kernel: [*stack, *in, *out].
      a: [*stack, *in, rank].
      b: [*stack, rank, *out].
      scale: factor of a b.
      magnitude: [*stack, *out]; None leaves the norms as they are.
    """
    stack = _stack_of(kernel.shape, a.shape, b.shape)
    a, b = a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, b.shape[len(stack)], -1)
    delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scale
    matrix = kernel.reshape(delta.shape).astype(delta.dtype) + delta
    if magnitude is not None:
        matrix *= magnitude.reshape(*stack, 1, -1) / column_norms(matrix, axis=-2)[..., None, :]
    return matrix.reshape(kernel.shape).astype(kernel.dtype)


def first_magnitude(
    kernel: Float[Array, "*stack_and_in_and_out"], a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> Float[Array, "*stack_and_out"]:
    """Returns the norms of the columns of a matrix, or a stack of matrices, for an adapter of these shapes."""
    num_stack_axes = len(_stack_of(kernel.shape, a_shape, b_shape))
    stack, outputs = kernel.shape[:num_stack_axes], b_shape[num_stack_axes + 1 :]
    norms = column_norms(kernel.astype(jnp.float32).reshape(*stack, -1, math.prod(outputs)), axis=-2)
    return norms.reshape(*stack, *outputs)


def _stack_of(kernel: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of the axes of the stack, from the shapes of a matrix and its adapter."""
    # a has the axes of stack, inputs and rank, b those of stack, rank and outputs, the kernel those of stack, inputs
    # and outputs. The difference is the number of axes of the stack.
    return kernel[: len(a) + len(b) - 2 - len(kernel)]


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
            kernel = getattr(owner, name)[...]
            adapter = Adapter(kernel, config, num_inputs=num_inputs, num_axes=num_axes, rngs=rngs)
            adapters.append((owner, name, adapter))
        if not adapters:
            example = f"such as {matrices[0][0]}" if matrices else "of which this model has none"
            raise ValueError(f"lora.targets={config.targets!r} matches none of the matrices, {example}")
    heads = getattr(model, "heads", ())
    if config.rank and not heads:
        parts = [name for name, part in vars(model).items() if hasattr(part, "base_model_prefix")]
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
        a, b, magnitude = adapter["a"], adapter["b"], adapter.get("magnitude")
        merged[kernel] = _merge(jnp.asarray(merged[kernel]), a, b, config.alpha / config.rank, magnitude)
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
