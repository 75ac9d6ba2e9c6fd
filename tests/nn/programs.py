"""What tests of layers and models share: programs that answer in NumPy, and modules that are drawn in NumPy.

Outside of a program, every operation on an array of JAX is compiled as a program of its own, which is most of what such
a test costs. What is drawn and what is compared is therefore NumPy's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx


def jitted(function: Callable[..., Any], *, static: Sequence[str] = ()) -> Callable[..., Any]:
    """`jax.jit(function)` with NumPy arrays for results, of which any question may be asked at no cost."""
    program = jax.jit(function, static_argnames=tuple(static))
    return lambda *args, **options: jax.device_get(program(*args, **options))


def draw(
    make_module: Callable[[], Any],
    *,
    stddev: float | Callable[[str], float] = 0.4,
    mean: Callable[[str], float] = lambda name: float(name.endswith("scale")),
    seed: int = 0,
) -> Any:
    """Builds a module no parameter of which is at its start, where gains of 1 and offsets of 0 would hide mistakes.

    Args:
      make_module: what builds it; only its shapes are used.
      stddev: of the normal distribution of all parameters, or of the one of that name, as in "encoder/norm/scale".
      mean: likewise; 1 for gains and 0 for the rest unless it is given.
      seed: of the numbers; the same give the same module.
    """
    graphdef, params = nnx.split(nnx.eval_shape(make_module))
    rng = np.random.default_rng(seed)

    def of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spread = stddev(name) if callable(stddev) else stddev
        return jax.device_put(rng.normal(mean(name), spread, leaf.shape).astype(leaf.dtype))

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(of, nnx.to_pure_dict(params)))


def initial(make_module: Callable[[], Any]) -> Any:
    """Builds a module as it starts, in one program."""
    return jax.jit(make_module)()


def params_of(module: Any, dtype: Any = None) -> Any:
    """Copies the parameters of a module into nested dictionaries of NumPy arrays."""
    return jax.tree.map(lambda leaf: np.array(leaf, dtype), nnx.to_pure_dict(nnx.state(module)))


def normal(seed: int, *shape: int) -> np.ndarray:
    """Draws float32 numbers of the standard normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def started(decoder: Any, inputs: Any, token_mask: Any = None, **sizes: int) -> tuple[Callable[..., Any], Any, Any]:
    """Reads inputs; returns a decoder's step, the cache of the first step, and the tokens that it takes."""
    return decoder.step, *decoder.init_cache(decoder.encode(inputs, token_mask), **sizes)


def count_draws(function: Callable[..., Any], *args: Any) -> int:
    """Counts how often a function draws random bits, its loops run to their ends; nothing is compiled."""
    return sum(times for name, times in _operations(function, *args) if name == "random_bits")


def count_rematerialized(function: Callable[..., Any], *args: Any) -> int:
    """Counts the parts, such as layers, of which a gradient would compute the inside again; nothing is compiled."""
    return sum(times for name, times in _operations(function, *args) if name in ("checkpoint", "remat", "remat2"))


def _operations(function: Callable[..., Any], *args: Any) -> Iterator[tuple[str, int]]:
    """Names the operations of a program, and says how often each is run."""
    programs = [(jax.make_jaxpr(function)(*args).jaxpr, 1)]
    while programs:
        program, times = programs.pop()
        for equation in program.eqns:
            name = equation.primitive.name
            yield name, times
            inside = times * equation.params["length"] if name == "scan" else times
            parts = [getattr(value, "jaxpr", value) for value in equation.params.values()]
            programs += [(part, inside) for part in parts if hasattr(part, "eqns")]
