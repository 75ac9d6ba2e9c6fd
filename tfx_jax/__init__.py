"""Attention and Transformers in JAX: pure functions, Flax modules and the experiments that train them.

Its packages are `tfx_jax.functional` (jax and numpy only), `tfx_jax.nn`, `tfx_jax.models`, `tfx_jax.data`,
`tfx_jax.toy_grammar`, `tfx_jax.tasks` and `tfx_jax.training`; each is imported when it is first used, so that
`import tfx_jax` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["__version__", "data", "functional", "models", "nn", "tasks", "toy_grammar", "training"]

if TYPE_CHECKING:
    from tfx_jax import data, functional, models, nn, tasks, toy_grammar, training

    __version__: str
else:  # hidden from type checkers, which would take any name for a module

    def __getattr__(name: str) -> Any:
        """Imports a package, or asks which version is installed, at first use."""
        if name == "__version__":
            from importlib.metadata import version

            return version("tfx-jax")
        if name in __all__:
            return importlib.import_module(f"tfx_jax.{name}")
        raise AttributeError(f"module 'tfx_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the packages too that were not used yet."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "Any", "importlib"})
