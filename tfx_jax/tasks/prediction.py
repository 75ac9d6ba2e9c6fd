"""A model over many examples: what evaluation and use have in common."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tfx_jax.arrays import to_device, to_host
from tfx_jax.data.batching.batches import WHOLE, Batch, BatchSpec, ExampleSource, ProcessShard, eval_batches
from tfx_jax.errors import UserError
from tfx_jax.tasks.loss import Metric, add_metrics

PredictFn = Callable[[Any, dict[str, Any]], Any]
"""`predict_fn(model, batch)` gives a pytree of arrays; pure, to be compiled."""

OnBatch = Callable[[int, int], object]
"""`on_batch(done, total)` is told how far it is."""


def _alone(mine: Any) -> Any:
    return mine


class TrainedModel:
    """A model, its parameters, and which examples this process works through of those that several share.

    Attributes:
      graphdef: of the model.
      params: its parameters and what else it keeps, NumPy arrays or arrays on devices.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Any,
        *,
        shard: ProcessShard = WHOLE,
        gather: Callable[[list[Any]], list[Any]] = _alone,
        place: Callable[[Batch], Batch] = _alone,
        on_batch: OnBatch | None = None,
    ):
        """Takes a model apart.

        Args:
          graphdef: of the model.
          params: its parameters.
          shard: this process takes every `count`-th example from the one at `index` on.
          gather: joins such lists of all processes, in the order of the examples; all processes call it.
          place: puts a batch where the parameters are.
          on_batch: is told how many examples of this process are done, and how many there are.
        """
        self.graphdef, self.params = graphdef, params
        self._shard, self._gather, self._place, self._on_batch = shard, gather, place, on_batch
        self._programs: dict[Any, Any] = {}

    def replace(self, params: Any, on_batch: OnBatch | None = None) -> "TrainedModel":
        """Returns the same model with other parameters, which shares the compiled programs."""
        shared: dict[str, Any] = {"shard": self._shard, "gather": self._gather, "place": self._place}
        other = TrainedModel(self.graphdef, params, on_batch=on_batch, **shared)
        other._programs = self._programs
        return other

    def share(self, function: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
        """Applies a function of lists to the items of this process, and gathers the results of all."""
        return self._gather(function(list(items[self._shard.index :: self._shard.count])))

    def map_batches(self, predict_fn: PredictFn, batches: Iterable[Batch]) -> Iterator[Any]:
        """Applies a function to batches; compiles once for each function and batch shape.

        Yields:
          The result for each batch in NumPy arrays, one behind: a batch is made while the one before runs.
        """
        run = self._program(predict_fn)
        params = to_device(self.params)  # once, not with every batch
        running = []
        for batch in batches:
            running.append(run(params, self._place(batch)))
            if len(running) > 1:
                yield to_host(running.pop(0))
        yield from map(to_host, running)

    def predict(self, predict_fn: PredictFn, examples: ExampleSource, spec: BatchSpec) -> list[Any]:
        """Applies a function to examples; processes share them.

        Returns:
          For each example its part of the array, as nested lists, or a list of its parts.
        """
        found: list[Any] = [None] * len(examples)
        batches, copies = itertools.tee(self._batches(examples, spec))  # few are there at a time
        for batch, result in zip(batches, self.map_batches(predict_fn, copies), strict=True):
            arrays = [np.asarray(array).tolist() for array in jax.tree.leaves(result)]
            for row, index in enumerate(batch["index"].tolist()):
                if index >= 0:
                    parts = [array[row] for array in arrays]
                    found[index] = parts if len(parts) > 1 else parts[0]
        return self._gather(found[self._shard.index :: self._shard.count])

    def sum_metrics(self, predict_fn: PredictFn, examples: ExampleSource, spec: BatchSpec) -> dict[str, Metric]:
        """Adds up the metrics that a function gives for batches of examples; processes share these."""
        found = [
            jax.tree.map(float, metrics) for metrics in self.map_batches(predict_fn, self._batches(examples, spec))
        ]
        return add_metrics(self._gather([add_metrics(found)]))

    def _batches(self, examples: ExampleSource, spec: BatchSpec) -> Iterator[Batch]:
        """Makes the batches of this process; when the next is asked for, the last but one is done."""
        done, total = 0, len(range(self._shard.index, len(examples), self._shard.count))
        for batch in eval_batches(examples, spec, shard=self._shard):
            yield batch
            done += int((batch["index"] >= 0).sum())
            if self._on_batch is not None:
                self._on_batch(done, total)

    def _program(self, predict_fn: PredictFn) -> Any:
        key: Any = predict_fn
        if isinstance(predict_fn, functools.partial):  # each is an object of its own, with the same parts
            key = predict_fn.func, predict_fn.args, tuple(sorted(predict_fn.keywords.items()))
        if key not in self._programs:
            self._programs[key] = jax.jit(lambda params, batch: predict_fn(nnx.merge(self.graphdef, params), batch))
        return self._programs[key]


class PairAttention(NamedTuple):
    """Where two sequences look.

    Attributes:
      maps: attention by name, each [N, T, S] float32 or of whatever else attends to what.
      source: the tokens of the first sequence.
      target: those of the second.
    """

    maps: dict[str, np.ndarray]
    source: list[str]
    target: list[str]


class ImageAttention(NamedTuple):
    """Where a model of images looks.

    Attributes:
      image: [Y, X, C] uint8.
      titles: what each map is: a word of a caption, or a layer.
      maps: how much is seen of each place of a square grid, [maps, G, G] float32.
      said: the caption, or the class that the model gives the image.
    """

    image: np.ndarray
    titles: list[str]
    maps: np.ndarray
    said: str


def drawable_pair(pairs: Iterable[tuple[str, str]], encode: Callable[[str], Sequence[Any]]) -> tuple[str, str] | None:
    """Returns the first of a hundred pairs whose sides have 4 to 24 tokens: quickly computed, and legible."""
    for pair in itertools.islice(pairs, 100):
        if all(4 <= len(encode(text)) <= 24 for text in pair):
            return pair
    return None


def pair_attention(model: TrainedModel, source: Sequence[int], target: Sequence[int]) -> dict[str, np.ndarray]:
    """Computes every attention map of one pair of token sequences.

    Args:
      model: one that reads two sequences, `model(source, target, return_attention=True)`.
      source: token ids, [S].
      target: token ids, [T].

    Returns:
      Maps by name, each [N, T, S] float32 or of whatever else attends to what.

    Raises:
      UserError: if the model gives no maps.
    """
    batch = {"source": np.array([source], np.int32), "target": np.array([target], np.int32)}
    (maps,) = model.map_batches(_attention_maps, [batch])
    return {name: weights[0] for name, weights in maps.items()}


def _attention_maps(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    if "return_attention" not in inspect.signature(model).parameters:
        raise UserError(f"{type(model).__name__} gives no attention maps: its call has no return_attention")
    return model(batch["source"], batch["target"], return_attention=True)[1]
