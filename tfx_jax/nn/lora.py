"""Fine-tuning of some parameters: frozen ones, and low-rank adapters beside the matrices of a model.

LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) leaves a matrix W as it is and learns two small ones beside it:
x W + (alpha / rank) (x A) B. `adapt` does this to any model of `tfx_jax.nn` layers, and `merged` undoes it.
"""

import dataclasses
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
    """A parameter that no gradient changes; training keeps it beside what the model learns."""


class Adapter(nnx.Module):
    """What is added to one matrix [*in, *out], or to each of a stack of them: (alpha / rank) A B."""

    def __init__(
        self,
        stack: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        config: LoraConfig,
        *,
        rngs: Any,
    ):
        """Initializes A [*stack, *in, rank] as PyTorch does a linear layer, and B [*stack, rank, *out] with zeros."""
        fan_in = 1
        for size in inputs:
            fan_in *= size
        limit = fan_in**-0.5
        shape = (*stack, *inputs, config.rank)
        self.a = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
        self.b = nnx.Param(jnp.zeros((*stack, config.rank, *outputs)))
        self.scale = config.alpha / config.rank

    def beside(self, kernel: Float[Array, "*in_and_out"]) -> LowRankSum:
        """Returns what `tfx_jax.functional.layers.linear` takes for a matrix with this adapter."""
        return LowRankSum(kernel, self.a[...], self.b[...] * self.scale)

    def added_to(self, kernel: Float[Array, "*stack_and_in_and_out"]) -> Float[Array, "*stack_and_in_and_out"]:
        """Returns the sum of a matrix, or of a stack of them, and what the adapter adds."""
        return _sum(kernel, self.a[...], self.b[...], self.scale)


def _sum(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    stack = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
    a, b = a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, b.shape[len(stack)], -1)
    delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scale
    return kernel + delta.reshape(kernel.shape).astype(kernel.dtype)


def adapt(model: nnx.Module, config: LoraConfig, *, frozen: str = "", seed: int = 0) -> None:
    """Freezes parameters of a model and gives matrices adapters, in place.

    With adapters all parameters are frozen, but those of a head: of a model with a body that was trained before, such
    as BERT, only the body's are.

    Args:
      model: as it was made.
      config: of the adapters; a rank of 0 means none.
      frozen: regular expression that occurs in the paths of parameters to freeze besides; empty for none.
      seed: of the adapters.

    Raises:
      ValueError: if a pattern matches nothing, is no regular expression, or leaves nothing to learn.
    """
    is_frozen: Callable[[str], bool] = _matcher("frozen", frozen) if frozen else lambda path: False
    names = [name for name, _, _ in _params(model)]
    if frozen and not any(map(is_frozen, names)):
        raise ValueError(f"frozen={frozen!r} matches none of the parameters, such as {names[0]}")
    adapters: list[tuple[nnx.Module, str, Adapter]] = []
    body = ""
    if config.rank:
        is_target = _matcher("lora.targets", config.targets)
        rngs = nnx.Rngs(params=jax.random.fold_in(jax.random.key(seed), 1))
        matrices = [*_matrices(model)]
        for path, owner, name, num_inputs, num_axes in matrices:
            if not is_target(path):
                continue
            shape = getattr(owner, name).shape
            first = len(shape) - num_axes
            sizes = shape[:first], shape[first : first + num_inputs], shape[first + num_inputs :]
            adapters.append((owner, name, Adapter(*sizes, config, rngs=rngs)))
        if not adapters:
            such = f"such as {matrices[0][0]}" if matrices else "of which this model has none"
            raise ValueError(f"lora.targets={config.targets!r} matches none of the matrices, {such}")
        body = next((f"{name}/" for name, part in vars(model).items() if hasattr(part, "name_below_heads")), "")
    for path, owner, name in [*_params(model)]:
        if is_frozen(path) or (config.rank and path.startswith(body)):
            setattr(owner, name, Frozen(getattr(owner, name)[...]))
    for owner, name, adapter in adapters:
        setattr(owner, f"{name}_adapter", adapter)
    if not jax.tree.leaves(nnx.state(model, nnx.Param)):
        raise ValueError(f"frozen={frozen!r} leaves no parameter to learn")


def merged(model: Model) -> Model:
    """Returns a model without adapters, whose matrices contain them, and without frozen parameters.

    The model itself, if it has neither.
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
    """Returns the parameters of `merged`, given those of a model with adapters as a nested dictionary of arrays."""
    merged = {name: merge_params(part, config) if isinstance(part, dict) else part for name, part in params.items()}
    for name in [name for name in merged if name.endswith("_adapter")]:
        adapter, kernel = merged.pop(name), name.removesuffix("_adapter")
        merged[kernel] = _sum(jnp.asarray(merged[kernel]), adapter["a"], adapter["b"], config.alpha / config.rank)
    return merged


def adapters_of(model: nnx.Module) -> dict[str, Adapter]:
    """Returns the adapters of a model by the paths of their matrices."""
    found = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Adapter))
    return {"/".join(map(str, path)).removesuffix("_adapter"): adapter for path, adapter in found}


def _matcher(field: str, pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}={pattern!r} is not a regular expression ({error})") from None
    return lambda path: compiled.search(path) is not None


def _params(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields the path of each parameter, its owner and its name there."""
    for path, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Module):
            for name, value in vars(module).items():
                if isinstance(value, nnx.Param):
                    yield "/".join(map(str, (*path, name))), module, name


def _matrices(model: nnx.Module) -> Iterator[tuple[str, nnx.Module, str, int, int]]:
    """Yields of each matrix that may have an adapter its path, owner, name, number of input axes and of all axes."""
    for path, owner, name in _params(model):
        if isinstance(owner, Linear) and name == "kernel":
            yield path, owner, name, len(owner.in_features), len(owner.in_features) + len(owner.out_features)
        elif isinstance(owner, FeedForward) and name in ("up", "gate", "down"):
            yield path, owner, name, 1, 2
