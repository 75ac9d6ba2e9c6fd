"""Many batches in, as many results out; what each task predicts is tested with the task."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tfx_jax.tasks.prediction import Predictor


class Scale(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.full((1, 1), 3.0))


def make_predictor(traced):
    def predict(model, batch):
        traced.append(batch["x"].shape)
        return {"scaled": model.factor[...] * batch["x"], "rows": batch["x"].sum(axis=1)}

    return Predictor(nnx.graphdef(Scale()), predict), nnx.to_pure_dict(nnx.state(Scale()))


def test_results_are_numpy_and_in_order_and_shapes_compile_once():
    traced = []
    predictor, params = make_predictor(traced)
    batches = [{"x": np.full((2, 3 + index % 2), index, np.float32)} for index in range(7)]
    for factor in (3.0, 5.0):  # other parameters, the same program
        params = jax.tree.map(lambda leaf, factor=factor: jnp.full_like(leaf, factor), params)
        results = list(predictor(params, batches))
        assert len(results) == 7
        for batch, result in zip(batches, results, strict=True):
            assert {type(value) for value in result.values()} == {np.ndarray}
            np.testing.assert_array_equal(result["scaled"], factor * batch["x"])
    assert sorted(traced) == [(2, 3), (2, 4)]


def test_batches_are_taken_one_ahead_and_not_all_at_once():
    predictor, params = make_predictor([])
    taken = []

    def batches():
        for index in range(5):
            taken.append(index)
            yield {"x": np.zeros((1, 1), np.float32)}

    results = predictor(params, batches())
    for index in range(5):
        next(results)
        assert len(taken) == min(index + 2, 5)
    assert list(results) == []


def test_no_batches():
    predictor, params = make_predictor([])
    assert list(predictor(params, [])) == []
