"""Meshes of TPU slices and other clusters: they build, hosts share a batch without gap or overlap, and it assembles."""

import collections
import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from tfx_jax.errors import UserError
from tfx_jax.training.sharding.strategies import (
    BATCH,
    held_batch_shards,
    make_mesh,
    num_batch_shards,
    process_shard,
    shard_batch,
    take_batch_shard,
)

STRATEGIES = {
    "data": {},
    "fsdp": {"fsdp": 8},
    "fsdp of a slice": {"fsdp": 0},
    "two for tensor": {"tensor": 2},
    "eight for tensor": {"tensor": 8},
    "sequence": {"sequence": 4},
    "fsdp x tensor": {"fsdp": 2, "tensor": 4},
    "expert x tensor": {"expert": 4, "tensor": 2},
    "fsdp x sequence x tensor": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@dataclasses.dataclass(frozen=True)
class Device:
    """What meshes ask of a device."""

    id: int
    process_index: int
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def tpu_slices(shape, *, num_slices=1, device_kind="TPU v5 lite"):
    """The chips of slices, host by host: each host has a tile of 2x2, x before y."""
    devices = []
    tiles = [range(0, shape[2]), range(0, shape[1], 2), range(0, shape[0], 2)]
    for process, (number, z, y, x) in enumerate(itertools.product(range(num_slices), *tiles)):
        for dy, dx in itertools.product(range(2), range(2)):
            place = (x + dx, y + dy, z)
            devices.append(Device(len(devices), process, place, slice_index=number, device_kind=device_kind))
    return devices


def hosts(*num_devices, platform="cpu"):
    """Machines with so many devices each; to JAX, machines with GPUs are slices."""
    processes = [process for process, count in enumerate(num_devices) for _ in range(count)]
    return [
        Device(
            number, process, platform=platform, device_kind=platform, slice_index=process if platform == "gpu" else 0
        )
        for number, process in enumerate(processes)
    ]


def mesh_of(devices, num_slices, strategy):
    sizes = {axis: size or len(devices) // num_slices for axis, size in STRATEGIES[strategy].items()}
    mesh = make_mesh(**sizes, devices=devices)
    assert {axis: mesh.shape[axis] for axis in sizes} == sizes
    return mesh


def check_devices(mesh, devices):
    """Each device has one place, and only steps along "data" lead from slice to slice."""
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in devices)
    for group in mesh.devices:
        assert len({getattr(device, "slice_index", 0) for device in group.flat}) == 1


def check_shares(mesh):
    """Shares are equally large and numbered without gap; together they are the whole batch, once."""
    held = collections.defaultdict(set)
    for (data, fsdp, expert, *_), device in np.ndenumerate(mesh.devices):
        held[device.process_index].add((data * mesh.shape["fsdp"] + fsdp) * mesh.shape["expert"] + expert)
    shards = {process: process_shard(mesh, process) for process in held}
    assert {process: set(held_batch_shards(mesh, process)) for process in held} == held
    pairs = {(shard.index, held_batch_shards(mesh, process)) for process, shard in shards.items()}
    numbered = dict(pairs)
    assert len(numbered) == len(pairs)
    assert {shard.count for shard in shards.values()} == {len(numbered)}
    assert sorted(numbered) == list(range(len(numbered)))
    assert sorted(itertools.chain(*numbered.values())) == list(range(num_batch_shards(mesh)))
    assert len({len(shards) for shards in numbered.values()}) == 1


def assembled(mesh):
    """The batch that devices hold when each takes its part of what its process has read; no number comes twice."""
    count = 2 * num_batch_shards(mesh)
    whole = np.full((count, 3 * mesh.shape["sequence"]), -1)
    for device, index in NamedSharding(mesh, BATCH).devices_indices_map(whole.shape).items():
        shard = process_shard(mesh, device.process_index)
        read = np.arange(whole.size).reshape(shard.count, -1, whole.shape[1])[shard.index]
        part = take_batch_shard(read, index, mesh, device.process_index)
        assert np.all(whole[index] == -1) or np.array_equal(whole[index], part)
        whole[index] = part
    return whole


def check_batch(mesh):
    """Every example that any process has read is in the batch once and whole."""
    whole = assembled(mesh)
    np.testing.assert_array_equal(whole[np.argsort(whole[:, 0])], np.arange(whole.size).reshape(whole.shape))


@pytest.mark.aot
@each_strategy
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(
    "topology",
    [
        *("v4:2x2x2", "v4:4x4x4", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
        *("v5p:2x2x4", "v5p:4x4x4", "v6e:4x8", "v6e:16x16", "tpu7x:4x4x4"),
    ],
)
def test_hosts_of_real_slices_share_a_batch(tpu_devices, topology, num_slices, strategy):
    devices = tpu_devices(topology, num_slices)
    mesh = mesh_of(devices, num_slices, strategy)
    check_devices(mesh, devices)
    check_shares(mesh)
    check_batch(mesh)


@each_strategy
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(("device_kind", "shape"), [("TPU v5 lite", (4, 4, 1)), ("TPU v4", (4, 4, 4))])
def test_hosts_that_are_tiles_share_a_batch(device_kind, shape, num_slices, strategy):
    devices = tpu_slices(shape, num_slices=num_slices, device_kind=device_kind)
    mesh = mesh_of(devices, num_slices, strategy)
    check_devices(mesh, devices)
    check_shares(mesh)
    check_batch(mesh)


def test_what_a_tile_holds_is_no_block():
    mesh = make_mesh(fsdp=4, devices=tpu_slices((4, 4, 1)))
    held = {held_batch_shards(mesh, process) for process in range(4)}
    assert held == {(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)}


@pytest.mark.parametrize(
    ("sizes", "shards", "held"),
    [
        ({}, [(0, 2), (1, 2)], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"fsdp": 2, "tensor": 2}, [(0, 2), (1, 2)], [(0, 1), (2, 3)]),
        ({"data": 1, "tensor": 8}, [(0, 1), (0, 1)], [(0,), (0,)]),  # both have all rows and half of the model
    ],
)
def test_hosts_in_a_row_hold_blocks(sizes, shards, held):
    mesh = make_mesh(**sizes, devices=hosts(4, 4))
    assert [process_shard(mesh, process) for process in range(2)] == shards
    assert [held_batch_shards(mesh, process) for process in range(2)] == held
    np.testing.assert_array_equal(assembled(mesh).ravel(), np.arange(assembled(mesh).size))


def test_a_process_gives_its_devices_their_rows_of_what_it_has_read(monkeypatch):
    def assemble(shape, sharding, part):
        places = sharding.devices_indices_map(shape)
        return {device: part(place) for device, place in places.items() if device.process_index == 1}

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "make_array_from_callback", assemble)
    mesh = make_mesh(fsdp=4, devices=tpu_slices((4, 4, 1)))
    rows = np.arange(8 * 3).reshape(8, 3)
    given = shard_batch({"source": rows}, mesh)["source"]
    own = [given[device] for device in mesh.devices.flat if device.process_index == 1]
    np.testing.assert_array_equal(own, rows.reshape(4, 2, 3))


@pytest.mark.parametrize("sizes", [{}, {"data": 1, "fsdp": 16}, {"fsdp": 4, "tensor": 2}])
def test_gpus_keep_their_order_however_many_hosts(sizes):
    devices = hosts(4, 4, 4, 4, platform="gpu")
    assert make_mesh(**sizes, devices=devices).devices.ravel().tolist() == devices


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_host_may_leave_chips_out(size):
    devices = tpu_slices((2, 2, 1))
    mesh = make_mesh(size, devices=devices)
    assert mesh.devices.ravel().tolist() == devices[:size]
    check_shares(mesh)


@pytest.mark.parametrize(
    ("sizes", "named"), [({"data": 3}, "data=3"), ({"data": 1, "fsdp": 8}, "fsdp=8"), ({"data": 1}, "data=1")]
)
@pytest.mark.parametrize("devices", [tpu_slices((4, 4, 1)), hosts(8, 8)], ids=["TPU", "CPU"])
def test_several_hosts_share_all_devices(devices, sizes, named):
    message = f"^config.mesh: {named} does not fit 16 devices of several processes, which must all be used; data=-1"
    with pytest.raises(UserError, match=message):
        make_mesh(**sizes, devices=devices)


@pytest.mark.parametrize("sizes", [{"fsdp": 32}, {"data": 1, "tensor": 32}])
def test_slices_divide_data_alone(sizes):
    with pytest.raises(
        UserError,
        match=r"^config.mesh: only the axis data can span TPU slices, so data=1 must be a multiple of the 2 slices: ",
    ):
        make_mesh(**sizes, devices=tpu_slices((4, 4, 1), num_slices=2))


@pytest.mark.parametrize(
    ("processes", "tensor", "one", "other"),
    [
        ([0, 0, 1, 1, 2, 2], 3, "[0]", "[0, 1]"),  # the middle host has a part of either group's model
        ([0, 1, 1, 2, 2, 0], 2, "[0, 1]", "[0, 2]"),
        ([0, 1, 1, 1], 1, "[0]", "[1, 2, 3]"),
    ],
)
def test_hosts_that_share_a_batch_unequally_are_refused(processes, tensor, one, other):
    devices = [Device(number, process, platform="cpu") for number, process in enumerate(processes)]
    mesh = make_mesh(tensor=tensor, devices=devices)
    message = f"one process would hold the batch shards {one}, and another {other}: make sequence"
    for process in set(processes):
        with pytest.raises(UserError, match=re.escape(message)):
            process_shard(mesh, process)


def test_process_without_a_device_in_the_mesh_has_no_share():
    with pytest.raises(UserError, match=r"^config.mesh: process 1 has no device in the mesh"):
        process_shard(Mesh(np.array(hosts(4)).reshape(4, 1, 1, 1, 1), make_mesh(1).axis_names), 1)
