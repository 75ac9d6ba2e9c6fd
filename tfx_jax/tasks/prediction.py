"""A model over many batches: what evaluation and use have in common."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array


class Predictor:
    """Applies a function of a model and a batch to many batches; compiles once for each batch shape."""

    def __init__(self, graphdef: nnx.GraphDef, predict_fn: Callable[[Any, dict[str, Array]], Any]):
        """Remembers the model without its parameters, and what to do with it.

        Args:
          graphdef: of the model.
          predict_fn: `predict_fn(model, batch)`, a pytree of arrays: `tfx_jax.tasks.tagging.predict_tags`, say.
        """
        self._run = jax.jit(lambda params, batch: predict_fn(nnx.merge(graphdef, params), batch))

    def __call__(self, params: Any, batches: Iterable[dict[str, Any]]) -> Iterator[Any]:
        """Yields the result for each batch in NumPy arrays, one behind: a batch is made while the one before runs."""
        params = jax.device_put(params)  # once, not with every batch
        running = []
        for batch in batches:
            running.append(self._run(params, batch))
            if len(running) > 1:
                yield jax.device_get(running.pop(0))
        yield from map(jax.device_get, running)
