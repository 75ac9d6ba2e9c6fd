"""Many examples in, as many results out; what each task predicts is tested with the task."""

import concurrent.futures
import functools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.data.batching.batches import BatchSpec, ExampleList, ProcessShard, eval_batches
from tfx_jax.tasks.loss import Metric
from tfx_jax.tasks.prediction import TrainedModel


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.full((1, 1), 3.0))


GRAPHDEF, PARAMS = nnx.graphdef(Scale()), {"factor": np.full((1, 1), 3, np.float32)}


def times(factor):
    return {"factor": np.full((1, 1), factor, np.float32)}


def make_predict(traced):
    def predict(model, batch):
        traced.append(batch["x"].shape)
        return {"scaled": model.factor[...] * batch["x"], "rows": batch["x"].sum(axis=1)}

    return predict


def test_results_are_numpy_and_in_order_and_shapes_compile_once():
    traced = []
    predict = make_predict(traced)
    trained = TrainedModel(GRAPHDEF, PARAMS)
    batches = [{"x": np.full((2, 3 + index % 2), index, np.float32)} for index in range(7)]
    for factor in (3.0, 5.0):  # other parameters, the same program
        trained = trained.replace(times(factor))
        results = list(trained.map_batches(predict, batches))
        assert len(results) == 7
        for batch, result in zip(batches, results, strict=True):
            assert {type(value) for value in result.values()} == {np.ndarray}
            np.testing.assert_array_equal(result["scaled"], factor * batch["x"])
    assert sorted(traced) == [(2, 3), (2, 4)]


def test_batches_are_taken_one_ahead_and_not_all_at_once():
    taken = []

    def batches():
        for index in range(5):
            taken.append(index)
            yield {"x": np.zeros((1, 1), np.float32)}

    results = TrainedModel(GRAPHDEF, PARAMS).map_batches(make_predict([]), batches())
    for index in range(5):
        next(results)
        assert len(taken) == min(index + 2, 5)
    assert list(results) == []


def test_no_batches():
    assert list(TrainedModel(GRAPHDEF, PARAMS).map_batches(make_predict([]), [])) == []


def test_models_that_were_replaced_share_programs_and_no_others_do():
    traced = []

    def run(trained, predict_fn):
        (found,) = trained.map_batches(predict_fn, [{"x": np.ones((1, 2), np.float32)}])
        return found.tolist()

    def plus(model, batch, *, offset):
        traced.append(offset)
        return model.factor[...] * batch["x"] + offset

    first = TrainedModel(GRAPHDEF, times(2))
    second = first.replace(times(4))
    assert run(second, functools.partial(plus, offset=1)) == [[5, 5]]
    assert run(first, functools.partial(plus, offset=1)) == [[3, 3]]  # its parameters are still its own
    assert traced == [1]
    assert run(first, functools.partial(plus, offset=2)) == [[4, 4]]  # another function
    assert run(second, functools.partial(plus, offset=2)) == [[6, 6]]
    assert traced == [1, 2]
    assert run(TrainedModel(GRAPHDEF, times(2)), functools.partial(plus, offset=1)) == [[3, 3]]
    assert traced == [1, 2, 1]


class Decoding(nnx.Module):
    """Notes how often it prepares its weights for decoding."""

    prepared = 0

    def __init__(self):
        self.factor = nnx.Param(jnp.full((1, 1), 3.0))

    def decoder(self, *, int8):
        type(self).prepared += 1
        assert not int8
        return self


def test_a_decoder_is_made_once_for_parameters_and_others_have_their_own():
    first = TrainedModel(nnx.graphdef(Decoding()), times(2))
    second = first.replace(times(4))
    decoders = [first.decoder, second.decoder, first.decoder, second.decoder]
    assert [float(decoder.factor[0, 0]) for decoder in decoders] == [2, 4, 2, 4]
    assert Decoding.prepared == 2
    assert decoders[0] is decoders[2]


SPEC = BatchSpec((4, 8), 16)


@pytest.fixture(scope="module")
def examples():
    """Of all lengths up to 8, so that batches have others than the list has neighbors."""
    lengths = np.random.default_rng(0).permutation(np.arange(23) % 8 + 1)
    return ExampleList([{"x": np.arange(1, n + 1, dtype=np.float32) * n} for n in lengths], by="x")


def scaled(model, batch):
    return model.factor[...] * batch["x"]


def sums_and_sizes(model, batch):
    x = model.factor[...] * batch["x"]
    return {"sum": x.sum(axis=1), "size": (x > 0).sum(axis=1)}


def means(model, batch):
    x = model.factor[...] * batch["x"]
    return {"mean": Metric(x.sum(), (x > 0).sum()), "largest": Metric(x.max(axis=1).sum(), (x > 0).any(axis=1).sum())}


def wanted_of(examples):
    return [(3 * examples[index]["x"]).tolist() for index in range(len(examples))]


def test_each_example_gets_its_part_of_the_arrays(examples):
    trained, wanted = TrainedModel(GRAPHDEF, PARAMS), wanted_of(examples)
    found = trained.predict(scaled, examples, SPEC)
    assert [row[: len(x)] for row, x in zip(found, wanted, strict=True)] == wanted
    assert {len(row) for row in found} == {4, 8}  # with its padding
    # Of several arrays, a list of parts, in the order in which JAX has them.
    assert trained.predict(sums_and_sizes, examples, SPEC) == [[len(x), sum(x)] for x in wanted]
    assert trained.predict(scaled, ExampleList([], by="x"), SPEC) == []


def test_batches_of_a_prediction_are_made_while_others_run(examples):
    made, seen = [], []

    class Watched(ExampleList):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    class Watching(TrainedModel):
        def map_batches(self, predict_fn, batches):
            for result in super().map_batches(predict_fn, batches):
                seen.append(len(made))
                yield result

    some = Watched([examples[index] for index in range(len(examples))], by="x")
    Watching(GRAPHDEF, PARAMS).predict(scaled, some, BatchSpec((4, 8), 8))
    made_until = np.cumsum([(batch["index"] >= 0).sum() for batch in eval_batches(examples, BatchSpec((4, 8), 8))])
    assert seen == [*made_until[1:], made_until[-1]]  # one ahead


def test_metrics_are_added_up_whatever_the_batches(examples):
    trained, wanted = TrainedModel(GRAPHDEF, PARAMS), wanted_of(examples)
    expected = {
        "mean": Metric(sum(map(sum, wanted)), sum(map(len, wanted))),
        "largest": Metric(sum(map(max, wanted)), len(wanted)),
    }
    for tokens_per_batch in (8, 16, 64):
        found = trained.sum_metrics(means, examples, SPEC._replace(tokens_per_batch=tokens_per_batch))
        assert found == expected
        assert {type(value) for value in jax.tree.leaves(found)} == {float}


def of_two_processes(function):
    """What `function` of a model gives two processes that exchange lists; and how many batches each worked through."""
    parts, barrier, counts = [None, None], threading.Barrier(2, timeout=60), [0, 0]

    def gather(index, mine):
        parts[index] = json.loads(json.dumps(mine))  # what goes from one process to another
        barrier.wait()
        joined = [parts[place % 2][place // 2] for place in range(sum(map(len, parts)))]
        barrier.wait()
        return joined

    class Counting(TrainedModel):
        def map_batches(self, predict_fn, batches):
            for result in super().map_batches(predict_fn, batches):
                counts[self._shard.index] += 1
                yield result

    def run(index):
        return function(
            Counting(GRAPHDEF, PARAMS, shard=ProcessShard(index, 2), gather=functools.partial(gather, index))
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2))), counts


@pytest.mark.parametrize("size", [23, 1])  # of one example, the second process has nothing
def test_two_processes_share_the_work_and_each_gets_the_whole(examples, size):
    some = ExampleList([examples[index] for index in range(size)], by="x")
    wanted = wanted_of(some)
    both, counts = of_two_processes(lambda trained: trained.predict(scaled, some, SPEC))
    for found in both:
        assert [row[: len(x)] for row, x in zip(found, wanted, strict=True)] == wanted
    alone = TrainedModel(GRAPHDEF, PARAMS)
    assert max(counts) < max(2, sum(1 for _ in alone.map_batches(scaled, eval_batches(some, SPEC))))
    assert (counts[1] > 0) == (size > 1)
    both, _ = of_two_processes(lambda trained: trained.sum_metrics(means, some, SPEC))
    assert both == [alone.sum_metrics(means, some, SPEC)] * 2
    both, _ = of_two_processes(lambda trained: trained.share(lambda items: [item * 10 for item in items], range(size)))
    assert both == [[item * 10 for item in range(size)]] * 2


def test_progress_counts_the_examples_of_this_process(examples):
    """Not the rows of padding, in batches of whatever size; each time it begins again."""
    seen = []
    share = ProcessShard(1, 2)
    counted = TrainedModel(GRAPHDEF, PARAMS, shard=share).replace(PARAMS, lambda *numbers: seen.append(numbers))
    counted.predict(scaled, examples, SPEC)
    (passes, totals) = zip(*seen, strict=True)
    assert set(totals) == {11}  # every second of 23
    assert list(passes) == sorted(set(passes))
    assert len(passes) > 2
    assert passes[-1] == 11
    before = seen.copy()
    seen.clear()
    counted.sum_metrics(means, examples, SPEC)
    assert seen == before
