"""Arrays that checkpoints leave out, because another folder has them: their record, and reading them again."""

import json

import numpy as np
import pytest
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import base
from tfx_jax.training.checkpoint.base import base_record, initial_params, read_base, without

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


def test_the_first_model_with_the_recorded_values_is_used(tmp_path, monkeypatch):
    """One of the same name may stand elsewhere, and a store is no file of this machine."""
    (tmp_path / "other").mkdir()
    (tmp_path / "right").mkdir()
    monkeypatch.chdir(tmp_path)
    trees = {"other": {"layers": {0: {"up": np.zeros(3)}}}, str(tmp_path / "right"): TREE, "gs://bucket/right": TREE}
    asked = []

    def initial_params(folder, _):
        asked.append(str(folder))
        if str(folder) not in trees:
            raise UserError("it is not there")
        return trees[str(folder)]

    monkeypatch.setattr(base, "initial_params", initial_params)
    monkeypatch.setattr(base, "local_folder", str)

    def read(source, init_from):
        asked.clear()
        (tmp_path / "config.json").write_text(json.dumps({"init_from": init_from}))
        record = base_record("./nowhere", ARRAYS) | {"source": source}
        return read_base(record, epath.Path(tmp_path), lambda _: {})[0]

    assert read(str(tmp_path / "right"), "other").keys() == ARRAYS.keys()
    assert asked == ["other", str(tmp_path / "right")]
    assert read("/gone", "gs://bucket/right").keys() == ARRAYS.keys()
    assert asked == ["gs://bucket/right"]
    read(str(tmp_path / "right"), "owner/name")
    assert asked == [str(tmp_path / "right")]  # the hub is not asked
    with pytest.raises(
        UserError, match=r"parameters of /gone, which cannot be read \(it is not there\): restore it, or"
    ):
        read("/gone", "other")
    assert asked == ["other", "/gone"]
    with pytest.raises(
        UserError, match=r"^other has changed since the run in .*; the checkpoints in .* of /gone, which"
    ):
        read("/gone", "other")


@pytest.mark.parametrize("lora", [{"no_field": 1}, 3])
def test_a_damaged_configuration_of_the_base_is_one_line(tmp_path, lora):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_steps": 1, "lora": lora}))
    with pytest.raises(UserError, match=rf"^{path} is damaged \(.*\): restore a copy$"):
        initial_params(epath.Path(tmp_path), lambda _: {})
    path.write_text(json.dumps({"num_steps": 1, "sha256": "0"}))
    with pytest.raises(UserError, match=rf"^{path} is damaged \(its values do not match its checksum; .*\): restore"):
        initial_params(epath.Path(tmp_path), lambda _: {})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text("{}")
    record = base_record(str(tmp_path), ARRAYS)
    with pytest.raises(UserError, match=r"do not contain the frozen parameters of .* which cannot be read") as raised:
        read_base(record, epath.Path(tmp_path / "work"), lambda _: {})
    assert "\n" not in str(raised.value)


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
