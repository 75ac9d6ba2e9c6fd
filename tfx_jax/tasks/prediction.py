"""Running a trained model over many examples, for evaluation and prediction."""

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
"""`predict_fn(model, batch)` returns a pytree of arrays; it must be pure, because it is compiled."""

OnBatch = Callable[[int, int], object]
"""`on_batch(done, total)` is called with the progress."""


def _unchanged(value: Any) -> Any:
    return value


class TrainedModel:
    """A model with its parameters, and this process's share of the examples.

    Attributes:
      graphdef: static definition of the model.
      params: parameters and model state, NumPy arrays or arrays on devices.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Any,
        *,
        shard: ProcessShard = WHOLE,
        gather: Callable[[list[Any]], list[Any]] = _unchanged,
        place: Callable[[Batch], Batch] = _unchanged,
        on_batch: OnBatch | None = None,
    ):
        """Stores the parts of a model.

        Args:
          graphdef: static definition of the model.
          params: parameters and model state.
          shard: this process handles every `count`-th example, starting at `index`.
          gather: merges the result lists of all processes in the order of the examples; all processes call it.
          place: moves a batch to the devices of the parameters.
          on_batch: called with the number of this process's examples that are done, and their total.
        """
        self.graphdef, self.params = graphdef, params
        self._shard, self._gather, self._place, self._on_batch = shard, gather, place, on_batch
        self._programs: dict[Any, Any] = {}

    def replace(self, params: Any, on_batch: OnBatch | None = None) -> "TrainedModel":
        """Returns the same model with other parameters; both share compiled programs."""
        shared: dict[str, Any] = {"shard": self._shard, "gather": self._gather, "place": self._place}
        model = TrainedModel(self.graphdef, params, on_batch=on_batch, **shared)
        model._programs = self._programs
        return model

    @functools.cached_property
    def decoder(self) -> Any:
        """The decoder of a `tfx_jax.nn.decoding.DecodingModel`: its weights are rearranged once for all calls."""
        return nnx.merge(self.graphdef, to_device(self.params)).decoder(int8=False)

    def share(self, function: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
        """Applies a function of lists to this process's items, and returns the gathered results of all processes."""
        own_items = list(items[self._shard.index :: self._shard.count])
        return self._gather(function(own_items))

    def map_batches(self, predict_fn: PredictFn, batches: Iterable[Batch]) -> Iterator[Any]:
        """Applies a function to batches; compiles once per function and batch shape.

        Yields:
          The result for each batch as NumPy arrays. While a batch runs on the device, the next one is prepared.
        """
        run = self._program(predict_fn)
        params = to_device(self.params)  # once instead of with every batch
        pending = []  # results that a device may still compute: at most two
        for batch in batches:
            pending.append(run(params, self._place(batch)))
            if len(pending) > 1:
                yield to_host(pending.pop(0))
        yield from map(to_host, pending)

    def predict(self, predict_fn: PredictFn, examples: ExampleSource, spec: BatchSpec) -> list[Any]:
        """Applies a function to examples, which the processes share.

        Returns:
          For each example, its slice of the result as nested lists; if the function returns several arrays, a list with
          one slice for each array, in the order of `jax.tree.leaves`.
        """
        results: list[Any] = [None] * len(examples)
        batches, copies = itertools.tee(self._batches(examples, spec))  # tee keeps few batches in memory
        for batch, result in zip(batches, self.map_batches(predict_fn, copies), strict=True):
            arrays = [np.asarray(array).tolist() for array in jax.tree.leaves(result)]
            for row, index in enumerate(batch["index"].tolist()):
                if index >= 0:  # -1: a padding example
                    slices = [array[row] for array in arrays]
                    results[index] = slices if len(slices) > 1 else slices[0]
        return self._gather(results[self._shard.index :: self._shard.count])

    def sum_metrics(self, predict_fn: PredictFn, examples: ExampleSource, spec: BatchSpec) -> dict[str, Metric]:
        """Sums the metrics that a function returns for batches of examples, which the processes share."""
        batch_metrics = [
            jax.tree.map(float, metrics) for metrics in self.map_batches(predict_fn, self._batches(examples, spec))
        ]
        return add_metrics(self._gather([add_metrics(batch_metrics)]))

    def _batches(self, examples: ExampleSource, spec: BatchSpec) -> Iterator[Batch]:
        """Yields this process's batches and reports progress: at each request, all batches but the last are done."""
        done, total = 0, len(range(self._shard.index, len(examples), self._shard.count))
        for batch in eval_batches(examples, spec, shard=self._shard):
            yield batch
            done += int((batch["index"] >= 0).sum())  # without padding examples
            if self._on_batch is not None:
                self._on_batch(done, total)

    def _program(self, predict_fn: PredictFn) -> Any:
        """Returns the compiled `program(params, batch)` of a function, the same one for each call."""
        key: Any = predict_fn
        if isinstance(predict_fn, functools.partial):  # equal partials are different objects: compare their parts
            key = predict_fn.func, predict_fn.args, tuple(sorted(predict_fn.keywords.items()))
        if key not in self._programs:
            self._programs[key] = jax.jit(lambda params, batch: predict_fn(nnx.merge(self.graphdef, params), batch))
        return self._programs[key]


class PairAttention(NamedTuple):
    """Attention maps between two sequences.

    Attributes:
      maps: attention weights by name, each [N, T, S] float32, or [N, queries, keys] of another attention.
      source: tokens of the first sequence.
      target: tokens of the second sequence.
    """

    maps: dict[str, np.ndarray]
    source: list[str]
    target: list[str]


class ImageAttention(NamedTuple):
    """Attention maps over an image.

    Attributes:
      image: [Y, X, C] uint8.
      titles: title of each map: a word of a caption, or a layer.
      maps: weight of each cell of a square grid over the image, [maps, G, G] float32.
      answer: the caption, or the predicted class.
    """

    image: np.ndarray
    titles: list[str]
    maps: np.ndarray
    answer: str


def drawable_pair(pairs: Iterable[tuple[str, str]], encode: Callable[[str], Sequence[Any]]) -> tuple[str, str] | None:
    """Returns a pair that a plot shows legibly: the first, of a hundred, with 4 to 24 tokens in both texts; else None.

    Args:
      pairs: pairs of texts.
      encode: returns the tokens of a text.
    """
    for pair in itertools.islice(pairs, 100):
        if all(4 <= len(encode(text)) <= 24 for text in pair):
            return pair
    return None


def pair_attention(model: TrainedModel, source: Sequence[int], target: Sequence[int]) -> dict[str, np.ndarray]:
    """Computes every attention map of one pair of token sequences.

    Args:
      model: a model of two sequences, `model(source, target, return_attention=True)`.
      source: token ids of the first sequence, [S].
      target: token ids of the second sequence, [T].

    Returns:
      Maps by name, each [N, T, S] float32, or [N, queries, keys] of another attention.

    Raises:
      UserError: if the model cannot return attention maps.
    """
    batch = {"source": np.array([source], np.int32), "target": np.array([target], np.int32)}
    (maps,) = model.map_batches(_attention_maps, [batch])
    return {name: weights[0] for name, weights in maps.items()}


def check_returns_attention(model: Any) -> None:
    """Raises UserError if a module cannot return its attention maps."""
    if "return_attention" not in inspect.signature(model).parameters:
        raise UserError(
            f"{type(model).__name__} cannot return attention maps: its call has no argument return_attention"
        )


def _attention_maps(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the attention maps of a batch by name, for `TrainedModel.map_batches`."""
    check_returns_attention(model)
    _, maps = model(batch["source"], batch["target"], return_attention=True)
    return maps
