"""Meshes, tables of rules, and batches spread over devices."""

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tfx_jax.errors import UserError
from tfx_jax.training.sharding import DATA_PARALLEL, make_mesh, shard_batch, state_shardings
from tfx_jax.training.step import TrainState


@pytest.mark.parametrize(("data", "size"), [(-1, 8), (8, 8), (3, 3), (1, 1)])
def test_mesh_takes_the_first_devices(data, size):
    mesh = make_mesh(data)
    assert mesh.axis_names == ("data",)
    assert mesh.axis_types == (AxisType.Auto,)
    assert mesh.devices.tolist() == jax.devices()[:size]


@pytest.mark.parametrize("data", [0, -2, 9])
def test_mesh_of_devices_that_are_not_there(data):
    with pytest.raises(UserError, match=f"config.mesh.data={data}, but there are 8 devices; -1 takes all"):
        make_mesh(data)


PARAMS = {
    "encoder": {"query": {"kernel": np.zeros((4, 2, 8))}, "norm": {"scale": np.zeros(4)}},
    "head": {"kernel": np.zeros((4, 16))},
}
STATE = TrainState(np.zeros((), np.int32), PARAMS, optax.adam(1e-3).init(PARAMS))


def test_data_parallel_replicates_everything():
    mesh = make_mesh(4)
    shardings = state_shardings(STATE, mesh, DATA_PARALLEL)
    chex.assert_trees_all_equal_structs(shardings, STATE)
    assert set(jax.tree.leaves(shardings)) == {NamedSharding(mesh, P())}


def test_first_matching_rule_decides_for_parameters_and_moments_alike():
    mesh = make_mesh(2)
    rules = (
        (".*query/kernel", P(None, "data")),
        (".*/kernel", P(None, "data")),
        (".*norm.*", P("data", None)),
        (".*", P()),
    )
    shardings = state_shardings(STATE, mesh, rules)
    expected = {
        "encoder": {
            "query": {"kernel": NamedSharding(mesh, P(None, "data"))},
            "norm": {"scale": NamedSharding(mesh, P())},  # a rule with more axes than the array leaves it whole
        },
        "head": {"kernel": NamedSharding(mesh, P(None, "data"))},
    }
    for tree in (shardings.params, shardings.opt_state[0].mu, shardings.opt_state[0].nu):
        assert tree == expected
    assert shardings.step.spec == shardings.opt_state[0].count.spec == P()


def test_pattern_must_match_the_whole_path():
    mesh = make_mesh(2)
    shardings = state_shardings({"up": np.zeros(2), "upper": np.zeros(2)}, mesh, (("up", P("data")), (".*", P())))
    assert [shardings[name].spec for name in ("up", "upper")] == [P("data"), P()]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_rows_are_dealt_to_devices_in_order(count):
    rows = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
    batch = shard_batch({"source": rows, "target": rows + 100}, make_mesh(count))
    assert batch["source"].dtype == np.int32
    for side, offset in (("source", 0), ("target", 100)):
        np.testing.assert_array_equal(batch[side], rows + offset)
        shards = sorted(batch[side].addressable_shards, key=lambda shard: shard.device.id)
        assert [shard.data.shape for shard in shards] == [(16 // count, 3)] * count
        np.testing.assert_array_equal(np.concatenate([shard.data for shard in shards]), rows + offset)
