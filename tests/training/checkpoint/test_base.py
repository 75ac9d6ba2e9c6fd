"""Arrays that checkpoints leave out, because another folder has them: their record, and reading them again."""

import json

import numpy as np
import pytest
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import base
from tfx_jax.training.checkpoint.base import base_record, read_base, without

TREE = {"layers": {0: {"up": np.arange(3.0)}, 1: {"up": np.ones(2)}}, "head": np.zeros(1)}
ARRAYS = {"layers/0/up": np.arange(3, dtype=np.float32), "layers/1/up": np.ones(2, np.float32)}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads the arrays of a record where the model of any folder has the given tree."""

    def read(record, tree, init_from="x"):
        asked = []
        monkeypatch.setattr(base, "initial_params", lambda folder, _: asked.append(str(folder)) or tree)
        (tmp_path / "config.json").write_text(json.dumps({"init_from": init_from}))
        return *read_base(record, epath.Path(tmp_path), lambda _: {}), asked

    return read


def test_arrays_come_back_by_path_and_as_a_tree_with_the_names_of_a_checkpoint(read):
    record = json.loads(json.dumps(base_record("./nowhere", ARRAYS)))
    arrays, tree, asked = read(record, TREE)
    assert asked == ["nowhere"]
    assert arrays.keys() == ARRAYS.keys()
    for path, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, ARRAYS[path])
    assert tree.keys() == {"layers"}
    assert {name: [*part] for name, part in tree["layers"].items()} == {"0": ["up"], "1": ["up"]}


def test_a_model_that_was_moved_is_found_by_the_configuration(read, tmp_path):
    assert read(base_record("./nowhere", ARRAYS), TREE, init_from=str(tmp_path))[2] == [str(tmp_path)]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"layers": {0: TREE["layers"][0]}},
        {"layers": TREE["layers"] | {1: {"up": np.array([1.0, 1.0001])}}},
        {"layers": TREE["layers"] | {1: {"up": np.ones((2, 1))}}},
        {"layers": {0: TREE["layers"][1], 1: TREE["layers"][0]}},
    ],
)
def test_other_arrays_names_or_shapes_are_noticed(read, tree):
    with pytest.raises(UserError, match=r"\./nowhere has changed since the run in .* started from it"):
        read(base_record("./nowhere", ARRAYS), tree)


def test_arrays_are_left_out_with_the_dictionaries_that_have_no_others():
    assert without(TREE, {"layers/0/up"}) == {"layers": {1: TREE["layers"][1]}, "head": TREE["head"]}
    assert without(TREE, {"layers/0/up", "layers/1/up", "head"}) == {}
