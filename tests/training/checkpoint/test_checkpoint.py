"""Checkpoints: bit for bit, over any number of devices, and whatever happens to the disk."""

import contextlib
import errno
import gc
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint import checkpoints as checkpoints_module
from tfx_jax.training.checkpoint.checkpoints import (
    Checkpoints,
    average_checkpoints,
    best_or_latest_step,
    load_best_params,
    load_params,
)
from tfx_jax.training.sharding.strategies import DATA_PARALLEL, make_mesh, state_shardings, with_shardings
from tfx_jax.training.step import SkipState, TrainState, average_trees

OPTIMIZER = optax.adam(optax.constant_schedule(1e-3))
# What Orbax leaves behind when it cannot read a file: coroutines and tasks that no one awaits any more.
ignore_orphans = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine .* was never awaited:RuntimeWarning"
)


def host_state(step):
    """A state of NumPy arrays that depends on the step; `table` is large enough for Orbax to give it its own chunk."""
    rng = np.random.default_rng(step)

    def draw():
        return {
            "encoder": {"table": rng.normal(size=(70, 90)).astype(np.float32), "bias": np.float32(rng.normal(size=3))},
            "scale": np.asarray(rng.normal(), np.float32),
        }

    params = draw()
    moments = OPTIMIZER.init(params)
    adam = moments[0]._replace(count=np.asarray(step, np.int32), mu=draw(), nu=draw())
    schedule = moments[1]._replace(count=np.asarray(step, np.int32))
    skip_state = SkipState(np.asarray(rng.random(), np.float32), np.asarray(step % 3, np.int32))
    carry = {"memory": rng.normal(size=(8, 3)).astype(np.float32)}
    model_state = {"encoder": {"centroids": rng.normal(size=(4, 2)).astype(np.float32)}}
    return TrainState(np.asarray(step, np.int32), params, (adam, schedule), skip_state, model_state, carry)


def put(state, num_devices):
    return jax.device_put(state, state_shardings(state, make_mesh(num_devices), [DATA_PARALLEL]))


def abstract(num_devices):
    state = host_state(0)
    return with_shardings(state, state_shardings(state, make_mesh(num_devices), [DATA_PARALLEL]))


def extra_of(step):
    return {"data": {"portion": step, "batch": 2}, "evaluations": [{"step": step, "bleu": 0.1 + step}], "何": None}


def save_scored(checkpoints, state, extra, score):
    checkpoints.save(state, extra)
    checkpoints.score(int(state.step), extra, score)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with the checkpoints 3, 6 and 9, written on eight devices; the best score is that of 3."""
    workdir = tmp_path_factory.mktemp("saved")
    with Checkpoints(workdir, keep_last=2) as checkpoints:
        for step, score in ((3, 7.0), (6, 5.0), (9, None)):
            save_scored(checkpoints, put(host_state(step), 8), extra_of(step), score)
        checkpoints.wait()
        assert checkpoints.steps == [3, 6, 9]
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    """A copy of `saved` to damage."""
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def restore(workdir, num_devices=1):
    with Checkpoints(workdir, keep_last=2) as checkpoints:
        return checkpoints.restore_latest(abstract(num_devices))


@pytest.mark.parametrize("num_devices", [8, 1])
def test_restored_bit_for_bit_on_any_number_of_devices(saved, num_devices):
    state, extra = restore(saved, num_devices)
    chex.assert_trees_all_equal_structs(state, host_state(9))
    chex.assert_trees_all_equal_dtypes(state, host_state(9))
    chex.assert_trees_all_equal(state, host_state(9))
    assert extra == extra_of(9)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, abstract(num_devices)
    )


def test_one_device_to_eight(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(put(host_state(4), 1), {"data": 1})
    state, extra = restore(tmp_path, num_devices=8)
    chex.assert_trees_all_equal(state, host_state(4))
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(state)} == {8}
    assert extra == {"data": 1}


def test_nothing_to_restore(tmp_path):
    assert restore(tmp_path) is None


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path):
    """The buffers of a state that is being saved are donated to the next step."""
    step_fn = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = put(host_state(1), 8)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"data": 0})
        for _ in range(3):
            state = step_fn(state)
    chex.assert_trees_all_equal(restore(tmp_path)[0], host_state(1))


def test_json_values_may_grow_while_a_checkpoint_is_written(tmp_path):
    evaluations = [{"bleu": 3.0}]
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 6):
            checkpoints.save(put(host_state(step), 1), {"evaluations": evaluations})
            evaluations.append({"bleu": float(step)})
            evaluations[0]["bleu"] += 1
    assert restore(tmp_path)[1] == {"evaluations": [{"bleu": 4.0}, {"bleu": 3.0}]}


def test_newest_and_best_are_kept(tmp_path):
    scores = {1: 5.0, 2: None, 3: 9.0, 4: 9.0, 5: 1.0, 6: None, 7: 2.0}
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        for step, score in scores.items():
            save_scored(checkpoints, put(host_state(step), 1), {"data": 0}, score)
        checkpoints.wait()
        assert checkpoints.steps == [4, 6, 7]  # of two that are equally good, the later
    chex.assert_trees_all_equal(load_params(tmp_path, "best"), host_state(4).variables)


class Killed(BaseException):
    pass


def files_of_arrays(workdir):
    paths = (workdir / "checkpoints" / "9" / "params").rglob("*")
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_score_leaves_the_arrays_where_they_are(workdir, monkeypatch, is_killed):
    """Also where an abrupt end cuts it off."""

    def write(path, content):
        if is_killed:
            raise Killed
        original(path, content)

    original = checkpoints_module.write_file
    monkeypatch.setattr(checkpoints_module, "write_file", write)
    arrays = files_of_arrays(workdir)
    with Checkpoints(workdir, keep_last=2) as checkpoints, contextlib.suppress(Killed):
        checkpoints.score(9, extra_of(100), 8.0)
    assert files_of_arrays(workdir) == arrays
    state, extra = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(9))
    assert extra == extra_of(9 if is_killed else 100)
    assert best_or_latest_step(workdir) == (3 if is_killed else 9)


def test_a_score_that_cannot_be_written_is_one_line(workdir, monkeypatch):
    def write(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "write_file", write)
    with Checkpoints(workdir) as checkpoints, pytest.raises(UserError, match=r"cannot save step 9 in .*No space left"):
        checkpoints.score(9, extra_of(9), 8.0)
    chex.assert_trees_all_equal(restore(workdir)[0], host_state(9))


def test_none_need_be_kept_for_its_score(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        for step, score in ((1, 9.0), (2, 1.0)):
            save_scored(checkpoints, put(host_state(step), 1), {"data": 0}, score)
        checkpoints.wait()
        assert checkpoints.steps == [2]


def test_multiples_are_kept_for_ever(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best=0, keep_every=4) as checkpoints:
        for step in range(1, 10):
            checkpoints.save(put(host_state(step), 1), {"data": 0})
        checkpoints.wait()
        assert checkpoints.steps == [4, 8, 9]


def test_checkpoint_of_the_same_step_is_replaced(workdir):
    newer = host_state(9)._replace(params=host_state(100).params)
    with Checkpoints(workdir) as checkpoints:
        save_scored(checkpoints, put(newer, 8), extra_of(100), 1.0)
        checkpoints.wait()
        assert checkpoints.steps == [3, 6, 9]
    state, extra = restore(workdir)
    chex.assert_trees_all_equal(state, newer)
    assert extra == extra_of(100)


@pytest.mark.parametrize(("step", "found"), [(None, 9), (6, 6), ("best", 3)])
def test_load_params(saved, step, found):
    params = load_params(saved, step)
    chex.assert_trees_all_equal(params, host_state(found).variables)
    assert {type(leaf) for leaf in jax.tree.leaves(params)} == {np.ndarray}


def test_load_params_takes_a_relative_string(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    chex.assert_trees_all_equal(load_params(saved.name, 6), host_state(6).variables)


def test_load_params_of_what_is_not_there(saved, tmp_path):
    with pytest.raises(UserError, match=r"has no checkpoint of step 4; there are 3, 6, 9$"):
        load_params(saved, 4)
    with pytest.raises(UserError, match=r"nowhere has no checkpoints: run tfx-jax train with this"):
        load_params(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"has no complete checkpoint yet: wait for the run"):
        load_params(tmp_path)
    with pytest.raises(UserError, match=r"has no average: run tfx-jax average --workdir=.* first$"):
        load_params(saved, "average")
    with pytest.raises(UserError, match=r"cannot average the last 4 checkpoints: .* has 3; --last must be 1 to 3"):
        average_checkpoints(saved, last=4)
    with pytest.raises(UserError, match="cannot average the last 0 checkpoints"):
        average_checkpoints(saved, last=0)


def test_best_needs_a_score(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(put(host_state(1), 1), {"data": 0})
    with pytest.raises(
        UserError, match=r"no checkpoint in .* has been evaluated, .* with --step, or lower config.eval_every$"
    ):
        load_params(tmp_path, "best")


def float64_mean(steps):
    return jax.tree.map(
        lambda *leaves: np.mean([leaf.astype(np.float64) for leaf in leaves], axis=0).astype(np.float32),
        *(host_state(step).variables for step in steps),
    )


def test_average_is_that_of_numpy(workdir):
    told = []
    assert average_checkpoints(workdir, last=2, on_checkpoint=lambda *counts: told.append(counts)) == [6, 9]
    assert told == [(1, 2), (2, 2)]
    average = load_params(workdir, "average")
    chex.assert_trees_all_equal(average, float64_mean([6, 9]))
    assert {type(leaf) for leaf in jax.tree.leaves(average)} == {np.ndarray}
    assert average_checkpoints(workdir, last=3) == [3, 6, 9]  # in place of the first
    chex.assert_trees_all_equal(load_params(workdir, "average"), float64_mean([3, 6, 9]))


def test_average_sums_in_float64():
    """In float32 the small terms would vanish beside the large one, whatever their number."""
    trees = {0: {"a": np.float32([2.0**24, 1.0])}} | {step: {"a": np.float32([1.0, 1.0])} for step in range(1, 8)}
    average = average_trees(trees.__getitem__, list(trees))
    assert average["a"].dtype == np.float32
    np.testing.assert_array_equal(average["a"], np.float32([(2**24 + 7) / 8, 1.0]))
    mixed = average_trees(lambda step: {"a": jnp.full(2, step, jnp.bfloat16)}, [1, 2])
    assert mixed["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(mixed["a"].astype(np.float32), [1.5, 1.5])


def data_files(workdir, step, part):
    """The files that hold the values, of which Orbax may keep small ones twice."""
    files = [path for path in (workdir / "checkpoints" / str(step) / part).rglob("d/*") if path.is_file()]
    assert files
    return files


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError(110, "Connection timed out"), r"checkpoints/9 cannot be reached \(.*\): rerun the same command$"),
        (ValueError("DEADLINE_EXCEEDED: reading params"), r"checkpoints/9 cannot be reached"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "^RESOURCE_EXHAUSTED"),
    ],
)
def test_a_checkpoint_that_is_out_of_reach_is_not_passed_over(workdir, monkeypatch, error, message):
    """To resume from an older one would overwrite it."""
    monkeypatch.setattr(checkpoints_module, "_load", mock.Mock(side_effect=error))
    with pytest.raises((UserError, jax.errors.JaxRuntimeError), match=message):
        restore(workdir)


@ignore_orphans
@pytest.mark.parametrize("part", slow_but(["params", "model_state", "rest"], "params", "rest"))
@pytest.mark.parametrize("damage", slow_but([truncate, flip_a_byte, pathlib.Path.unlink], flip_a_byte))
def test_damaged_checkpoint_is_passed_over_with_a_warning(workdir, caplog, part, damage):
    for path in data_files(workdir, 9, part):
        damage(path)
    with caplog.at_level(logging.WARNING):
        state, extra = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(6))
    assert extra == extra_of(6)
    messages = [record.getMessage() for record in caplog.records if record.name == "root"]
    assert len(messages) == 1
    assert f"checkpoint {workdir / 'checkpoints' / '9'} cannot be read (" in messages[0]
    assert messages[0].endswith("); trying the one before")
    if part == "params":
        with pytest.raises(UserError, match=r"checkpoints/9 cannot be read \(.*\); choose another with --step$"):
            load_params(workdir)
        chex.assert_trees_all_equal(load_params(workdir, 6), host_state(6).variables)
        with pytest.raises(UserError, match=r"checkpoints/9 cannot be read"):
            average_checkpoints(workdir, last=2)
    gc.collect()


@ignore_orphans
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "params/_METADATA", "rest/_METADATA"])
@pytest.mark.parametrize("damage", slow_but([truncate, pathlib.Path.unlink], truncate))
def test_damaged_description_is_passed_over_too(workdir, caplog, name, damage):
    damage(workdir / "checkpoints" / "9" / name)
    with caplog.at_level(logging.WARNING):
        state, extra = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(6))
    assert extra == extra_of(6)
    assert "checkpoints/9 cannot be read" in caplog.text
    gc.collect()


@ignore_orphans
def test_a_key_of_a_description_with_a_flipped_bit(workdir, caplog):
    """Orbax refuses the whole folder when one checkpoint has a key that it does not know."""
    path = workdir / "checkpoints" / "9" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"metrics"', '"metricc"'))
    with caplog.at_level(logging.WARNING):
        state, _ = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(6))
    assert "checkpoints/9 cannot be read" in caplog.text
    with pytest.raises(UserError, match=r"checkpoints/9 cannot be read \(.*metricc.*\); choose another with --step$"):
        load_params(workdir)
    chex.assert_trees_all_equal(load_params(workdir, 6), host_state(6).variables)
    gc.collect()


def changed(values):
    values["custom_metadata"]["score"] = 4.0
    return json.dumps(values)


def without_score(values):
    del values["custom_metadata"]["score"]
    return json.dumps(values)


@pytest.mark.parametrize("damage", [changed, without_score, lambda _: '{"custom', lambda _: "[7.0]", lambda _: ""])
def test_a_damaged_score_makes_no_other_checkpoint_the_best(workdir, damage):
    path = workdir / "checkpoints" / "3" / "_CHECKPOINT_METADATA"
    path.write_text(damage(json.loads(path.read_text())))
    for load in (load_best_params, lambda workdir: load_params(workdir, "best")):
        with pytest.raises(UserError, match=r"checkpoints/3 cannot be read \(.*\), so the best one is unknown: choose"):
            load(workdir)
    chex.assert_trees_all_equal(load_params(workdir, 6), host_state(6).variables)  # the remedy
    with Checkpoints(workdir) as checkpoints:  # a training goes on, and a checkpoint without a score is not the best
        checkpoints.score(9, extra_of(9), 1.0)
        checkpoints.save(put(host_state(12), 8), extra_of(12))
    chex.assert_trees_all_equal(restore(workdir)[0], host_state(12))


@ignore_orphans
def test_what_only_loading_parameters_needs_is_damaged(workdir, caplog):
    """A training does not go on from a checkpoint that no one can load afterwards."""
    truncate(workdir / "checkpoints" / "9" / "params" / "_sharding")
    with pytest.raises(UserError, match="checkpoints/9 cannot be read"):
        load_params(workdir)
    state, _ = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(6))
    assert "checkpoints/9 cannot be read" in caplog.text
    gc.collect()


@ignore_orphans
def test_a_changed_place_in_the_data_is_noticed(workdir, caplog):
    """Valid JSON that says something else: the training would go on with other batches."""
    path = workdir / "checkpoints" / "9" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    metadata["custom_metadata"]["data"] = {"portion": 7}
    path.write_text(json.dumps(metadata))
    state, extra = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(6))
    assert extra == extra_of(6)
    assert "the values of its metadata are damaged" in caplog.text
    gc.collect()


@ignore_orphans
def test_every_byte_of_the_values_counts(workdir):
    """A changed byte, wherever it is, must not become a changed parameter; Orbax alone would let it pass."""
    largest = max(data_files(workdir, 9, "params"), key=lambda path: path.stat().st_size)
    intact = largest.read_bytes()
    for place in range(50, len(intact) - 50, len(intact) // 8):
        largest.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
        try:
            params = load_params(workdir)
        except UserError:
            continue
        chex.assert_trees_all_equal(params, host_state(9).variables)  # a byte that is not used
    gc.collect()


@ignore_orphans
def test_processes_agree_on_the_checkpoint_if_one_cannot_read_its_metadata(saved, monkeypatch, caplog):
    told = []  # whether this process failed, as it tells the others about each checkpoint
    gather = checkpoints_module.gather_arrays

    def gathered(array):
        if array.dtype == np.bool_:
            told.append(bool(array.any()))
            return np.array([[len(told) == 2], *gather(array)])  # the other one cannot read checkpoint 6
        return gather(array)

    with Checkpoints(saved, keep_last=2) as checkpoints:
        metadata = checkpoints._checkpointer.metadata

        def fail(step):
            if step == 9:
                raise OSError("stale file handle")
            return metadata(step)

        monkeypatch.setattr(checkpoints_module, "gather_arrays", gathered)
        monkeypatch.setattr(checkpoints._checkpointer, "metadata", fail)
        state, _ = checkpoints.restore_latest(abstract(1))
    assert int(state.step) == 3
    assert told == [True, False, False]
    assert [record.message.split("(")[1].split(")")[0] for record in caplog.records] == [
        "stale file handle",
        "another process cannot read it",
    ]


@ignore_orphans
def test_all_damaged(workdir, caplog):
    for step in (3, 6, 9):
        for path in data_files(workdir, step, "params"):
            truncate(path)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read \(newest: .*\): ") as caught:
        restore(workdir)
    assert "delete" not in str(caught.value)  # they may be whole, and the disk or the configuration at fault
    assert caplog.text.count("trying the one before") == 3
    gc.collect()


@ignore_orphans
def test_training_goes_on_over_a_damaged_checkpoint(workdir):
    """Resumed before the damaged one, the run reaches its step again and replaces it."""
    for path in data_files(workdir, 9, "params"):
        flip_a_byte(path)
    with Checkpoints(workdir, keep_last=2) as checkpoints:
        state, _ = checkpoints.restore_latest(abstract(8))
        assert int(state.step) == 6
        checkpoints.save(put(host_state(9), 8), extra_of(9))
    chex.assert_trees_all_equal(restore(workdir)[0], host_state(9))
    gc.collect()


@ignore_orphans
def test_damaged_average(workdir):
    average_checkpoints(workdir, last=2)
    for path in (workdir / "average").rglob("d/*"):
        flip_a_byte(path)
    with pytest.raises(UserError, match=r"average cannot be read \(.*\): run tfx-jax average again$"):
        load_params(workdir, "average")
    gc.collect()


@ignore_orphans
def test_checkpoints_of_another_model_are_not_called_damaged(workdir):
    """A model of other sizes, because its tokenizer or its configuration is another one: the line says which sizes."""
    other = abstract(1)
    table = other.params["encoder"]["table"]
    other.params["encoder"]["table"] = jax.ShapeDtypeStruct((60, 90), table.dtype, sharding=table.sharding)
    with (
        Checkpoints(workdir, keep_last=2) as checkpoints,
        pytest.raises(UserError, match=r"newest: .*\(60, 90\).*\(70, 90\).*\): restore a copy of one, or"),
    ):
        checkpoints.restore_latest(other)
    chex.assert_trees_all_equal(restore(workdir)[0], host_state(9))
    gc.collect()


@pytest.mark.parametrize("value", slow_but([np.nan, -np.inf], -np.inf))
def test_parameters_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    state = host_state(5)
    state.params["encoder"]["table"][69, 89] = value
    with Checkpoints(tmp_path) as checkpoints:
        save_scored(checkpoints, put(host_state(4), 1), {"data": 0}, 1.0)
        save_scored(checkpoints, put(state, 1), {"data": 0}, 2.0)
    message = r"checkpoints/5: encoder/table has values that are NaN or infinite: take another copy"
    for load in (load_params, load_best_params, lambda workdir: average_checkpoints(workdir, 2)):
        with pytest.raises(UserError, match=message):
            load(tmp_path)
    assert not (tmp_path / "average").exists()
    chex.assert_trees_all_equal(load_params(tmp_path, 4), host_state(4).variables)
    for load in (load_params, load_best_params):
        chex.assert_trees_all_equal(load(tmp_path, allow_nonfinite=True), state.variables)
    assert average_checkpoints(tmp_path, 2, allow_nonfinite=True) == [4, 5]
    with pytest.raises(UserError, match=r"average: encoder/table has values that are NaN or infinite"):
        load_params(tmp_path, "average")
    found = load_params(tmp_path, "average", allow_nonfinite=True)["encoder"]["table"]
    np.testing.assert_array_equal(found[69, 89], value)
    assert np.isfinite(found).sum() == 70 * 90 - 1


def test_leftovers_of_an_interrupted_save_are_cleared(workdir):
    leftover = workdir / "checkpoints" / "12.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / "9", leftover)
    chex.assert_trees_all_equal(load_params(workdir), host_state(9).variables)
    assert leftover.exists()  # a reader deletes nothing: a run may be writing
    state, _ = restore(workdir)
    chex.assert_trees_all_equal(state, host_state(9))
    assert not leftover.exists()


@pytest.mark.slow
def test_reading_needs_no_devices_and_a_save_that_fails_names_the_last_good_checkpoint(workdir):
    """In a process with one device, and a limit on the size of files that is reached like the end of a disk."""
    program = """
import json, logging, resource, sys
import jax, numpy as np
from tests.training.checkpoint.test_checkpoint import host_state, put
from tfx_jax.errors import UserError
from tfx_jax.training.checkpoint.checkpoints import Checkpoints, average_checkpoints, load_params
logging.disable(logging.CRITICAL)
workdir, report = sys.argv[1], {"devices": jax.device_count()}
leaves = jax.tree.leaves(load_params(workdir))
report["same"] = all(map(np.array_equal, leaves, jax.tree.leaves(host_state(9).variables)))
report["types"] = sorted({type(leaf).__name__ for leaf in leaves})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
def attempt(action):
    try:
        action()
    except UserError as error:
        return str(error)
def fail_and_wait():
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(put(host_state(12), 1), {"data": 0})
        checkpoints.wait()
def fail_and_leave():
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(put(host_state(12), 1), {"data": 0})
def fail_after_an_error():
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(put(host_state(12), 1), {"data": 0})
        raise UserError("the loss is nan")
def fail_and_save_again():
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(put(host_state(12), 1), {"data": 0})
        checkpoints.save(put(host_state(15), 1), {"data": 0})
for action in (fail_and_wait, fail_and_leave, fail_after_an_error, fail_and_save_again):
    report[action.__name__] = attempt(action)
report["average"] = attempt(lambda: average_checkpoints(workdir, 2))
print(json.dumps(report))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(workdir)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["devices"], report["same"], report["types"]) == (1, True, ["ndarray"])
    for way in ("fail_and_wait", "fail_and_leave", "fail_and_save_again"):
        assert report[way].startswith(f"cannot save step 12 in {workdir / 'checkpoints'} (")
        assert report[way].endswith("); the last good checkpoint is step 9; free disk space and rerun the same command")

    assert report["fail_after_an_error"] == "the loss is nan"  # a failed save does not hide what went wrong before
    assert "average" in report["average"]
    chex.assert_trees_all_equal(restore(workdir)[0], host_state(9))


def test_full_disk(tmp_path):
    """A real one, of a few hundred kilobytes in memory, where the machine lets us mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.strip()}")

    def fill(checkpoints):
        for step in range(1, 9):
            checkpoints.save(put(host_state(step), 1), {"data": 0})

    try:
        with Checkpoints(disk) as checkpoints:
            with pytest.raises(
                UserError, match=r"cannot save step \d .*; the last good checkpoint is step \d; free disk space"
            ):
                fill(checkpoints)
            good = checkpoints.steps[-1]
        chex.assert_trees_all_equal(load_params(disk), host_state(good).variables)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free disk space"), (errno.EROFS, "make the folder writable"), (errno.EIO, "fix this")],
)
def test_average_that_cannot_be_written_says_what_helps(workdir, monkeypatch, number, remedy):
    def refuse(path, *_, **__):
        unfinished = path.with_name(f"{path.name}.orbax-checkpoint-tmp")  # as Orbax calls it, and leaves it
        unfinished.mkdir()
        (unfinished / "array").write_text("1")
        raise ValueError("not saved") from OSError(number, os.strerror(number))

    average_checkpoints(workdir, last=1)
    monkeypatch.setattr("tfx_jax.training.checkpoint.checkpoints.ocp.save", refuse)
    before = sorted(workdir.iterdir())
    with pytest.raises(UserError, match=rf"^cannot write .*average \(.*{os.strerror(number)}\): {remedy} and rerun"):
        average_checkpoints(workdir, last=2)
    assert sorted(workdir.iterdir()) == before
    chex.assert_trees_all_equal(load_params(workdir, "average"), host_state(9).variables)  # the earlier one stays


def test_an_empty_folder_is_no_checkpoint_to_anybody(workdir):
    """Whether who reads chooses the newest, the best or all, and whether a training goes on."""
    empty = workdir / "checkpoints" / "42"
    with Checkpoints(workdir) as checkpoints:
        steps = checkpoints.steps
    empty.mkdir()
    chex.assert_trees_all_equal(load_params(workdir), load_params(workdir, steps[-1]))
    load_best_params(workdir)
    assert average_checkpoints(workdir, last=9, or_fewer=True) == steps
    with pytest.raises(UserError, match=r"has no checkpoint of step 42"):
        load_params(workdir, 42)
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.steps == steps
        assert not empty.exists()


def test_nothing_but_an_empty_folder_is_no_checkpoint_yet(tmp_path):
    (tmp_path / "checkpoints" / "42").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no complete checkpoint yet: wait for the run"):
        load_params(tmp_path)
