"""Attention and Transformers in JAX: pure functions, Flax modules and the experiments that train them.

    import tfx_jax as tfx

    tfx.train(config, "runs/topics")
    tfx.load("runs/topics").predict(["The market fell."])
    tfx.generate(tfx.load("gpt2"), "Once upon")
    tfx.attention(tfx.load("gpt2"), "Once upon").maps

Packages: `functional` (needs jax and jaxtyping only), `nn`, `models`, `generation`, `data`, `synthetic`, `metrics`,
`tasks`, `training` and `planning`. Each is imported at its first use, which keeps `import tfx_jax` fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "__version__",
    "attention",
    "data",
    "functional",
    "generate",
    "generation",
    "load",
    "metrics",
    "models",
    "nn",
    "planning",
    "synthetic",
    "tasks",
    "train",
    "training",
]

_FUNCTIONS = {"attention": "training", "generate": "generation", "load": "training", "train": "training"}

if TYPE_CHECKING:
    from tfx_jax import data, functional, generation, metrics, models, nn, planning, synthetic, tasks, training
    from tfx_jax.generation import generate
    from tfx_jax.training import attention, load, train

    __version__: str
else:  # hidden from type checkers: with `__getattr__` they would accept any attribute

    def __getattr__(name: str) -> Any:
        """Imports a package or function at first use."""
        if name == "__version__":
            from importlib.metadata import version

            return version("tfx-jax")
        try:
            if name in _FUNCTIONS:
                return getattr(importlib.import_module(f"tfx_jax.{_FUNCTIONS[name]}"), name)
            if name in __all__:
                return importlib.import_module(f"tfx_jax.{name}")
        except ModuleNotFoundError as error:  # installed with jax and jaxtyping only, which `functional` needs
            if error.name is None or error.name.partition(".")[0] == "tfx_jax":
                raise
            # No AttributeError: of that, `from tfx_jax import train` would say only that there is no such name.
            raise ImportError(
                f"tfx_jax.{name} needs the package {error.name}, which is not installed: install tfx-jax with its "
                "dependencies (without --no-deps)"
            ) from error
        raise AttributeError(f"module 'tfx_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists all public names, including packages and functions that are not imported yet.

    Where only what `functional` needs is installed, it lists no other package: `help(tfx_jax)` gets all that is listed.
    """
    from importlib.util import find_spec

    is_complete = all(find_spec(package) for package in ("etils", "flax", "grain", "optax", "orbax"))
    names = __all__ if is_complete else ["__version__", "functional"]
    return sorted({*globals(), *names} - {"TYPE_CHECKING", "Any", "importlib"})
