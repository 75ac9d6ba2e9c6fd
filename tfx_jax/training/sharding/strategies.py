"""Where arrays live: one mesh, one table of rules for each strategy, no sharding inside layers."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tfx_jax.data.batching.batches import ProcessShard
from tfx_jax.errors import UserError
from tfx_jax.nn.distribution import Distribution
from tfx_jax.nn.stack import is_stack
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.sharding.attention import shard_attention
from tfx_jax.training.sharding.experts import expert_exchange
from tfx_jax.training.sharding.mesh_axes import BATCH_AXES, num_batch_shards
from tfx_jax.training.step import Batch, LossFn, Metrics, TrainState, init_state, jit_update

Rules = tuple[tuple[str, P], ...]
"""Patterns of whole paths, and which mesh axis divides each of the last dimensions of what they match."""

# Every device holds the whole state; only the batch is split.
DATA_PARALLEL: Rules = ()

# Every device holds a part of each matrix and gathers a layer's when it comes to that layer (ZeRO stage 3: Rajbhandari
# et al., 2020).
FSDP: Rules = (
    (r".*/(query|key|value)/kernel", P("fsdp", None, None)),
    (r".*/out/kernel", P("fsdp")),
    (r".*/(up|gate)", P("fsdp", None)),
    (r".*/down", P("fsdp")),
    (r".*embedding/table", P("fsdp")),
)

# Every device computes some heads, some hidden units and the logits of a part of the vocabulary; a sum over devices
# ends each sublayer (Megatron: Shoeybi et al., 2019).
TENSOR_PARALLEL: Rules = (
    (r".*/(query|key|value)/kernel", P("tensor", None)),
    (r".*/(query|key|value)/bias", P("tensor", None)),
    (r".*/out/kernel", P("tensor", None, None)),
    (r".*/(up|up_bias|gate)", P("tensor")),
    (r".*/down", P("tensor", None)),
    (r".*embedding/table", P("tensor", None)),
)

# Every device holds some of the experts of each mixture, and tokens travel to theirs (GShard: Lepikhin et al., 2020).
EXPERT_PARALLEL: Rules = (
    (r".*/experts/(up|down)", P("expert", None, None)),
    (r".*/experts/(up|down)_bias", P("expert", None)),
)

# All of them hold at once. The sizes of the mesh's axes choose: one of size 1 divides nothing.
STRATEGIES: tuple[Rules, ...] = (DATA_PARALLEL, FSDP, TENSOR_PARALLEL, EXPERT_PARALLEL)

_LARGE = 1 << 16  # numbers of an array that FSDP should not leave on every device

BATCH = P(BATCH_AXES, "sequence")


def make_mesh(
    data: int = -1,
    *,
    fsdp: int = 1,
    expert: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arranges devices as a mesh whose axes have these sizes; neighbors are close along the last ones.

    TPU slices, between which the network is slow, divide "data" alone between them.

    Args:
      data: devices that divide the rows of a batch, each with the whole model; -1 takes all that the others leave.
      fsdp: that divide the rows, and the parameters between them.
      expert: that divide the rows, and the experts of a mixture.
      sequence: that divide the positions.
      tensor: that divide heads, hidden units and vocabulary.
      devices: what to arrange, or the first of them if all belong to one process; None means `jax.devices()`.

    Raises:
      UserError: if the sizes do not fit the number of devices, processes or slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "sequence": sequence, "tensor": tensor}
    given = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
    if data == -1:
        sizes["data"] = len(devices) // max(fsdp * expert * sequence * tensor, 1)
    needed = math.prod(sizes.values())
    are_shared = len({device.process_index for device in devices}) > 1
    if min(sizes.values()) < 1 or needed > len(devices) or (needed < len(devices) and (data == -1 or are_shared)):
        owners = " of several processes, which share all of them" if are_shared else ""
        raise UserError(
            f"config.mesh: {given} does not fit {len(devices)} devices{owners}; data=-1 takes what the others leave"
        )
    arranged = _arrange(tuple(sizes.values()), devices[:needed])
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _arrange(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Places devices in an array of these sizes; those of a TPU slice lie beside each other as they do in its torus."""
    if devices[0].platform != "tpu":  # to JAX, every host with GPUs is a slice: the order of devices goes by hosts
        return mesh_utils.create_device_mesh(sizes, devices)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices > 1:
        data, *others = sizes
        if data % num_slices:
            raise UserError(
                f"config.mesh: {num_slices} slices divide data alone, and data={data} is no multiple of {num_slices}: "
                "lower fsdp, expert, sequence or tensor"
            )
        inside, across = (data // num_slices, *others), (num_slices, *(1 for _ in others))
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    box = np.ptp([(*device.coords, device.core_on_chip) for device in devices], axis=0) + 1
    if math.prod(box) > len(devices):  # three chips of a host, for example, are no torus
        return np.array(devices).reshape(sizes)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def state_shardings(tree: Any, mesh: Mesh, strategies: Sequence[Rules] = STRATEGIES) -> Any:
    """Gives each leaf the sharding that all tables together say; in each, the first pattern that matches counts.

    Optimizer moments have the paths of their parameters at the end, so the tables serve the whole state. The rows of a
    carry lie as those of a batch do. A dimension that its axes do not divide evenly, such as an odd vocabulary, stays
    whole. What no table of FSDP divides, a new layer's matrix or that odd vocabulary, is divided by "fsdp" along its
    largest dimension that can be, if it is large.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = np.shape(leaf)
        if name.startswith("carry/"):
            return NamedSharding(mesh, P(_dividing(mesh, shape[0], BATCH_AXES)))
        axes: list[tuple[str, ...]] = [()] * len(shape)
        for rules in strategies:
            spec = next((spec for pattern, spec in rules if re.fullmatch(pattern, name)), P())
            for dimension, axis in zip(range(-len(spec), 0), spec, strict=True):
                if axis is not None and len(spec) <= len(shape):
                    axes[dimension] += (axis,)
        dividing = [_dividing(mesh, *pair) for pair in zip(shape, axes, strict=True)]
        if any(rules is FSDP for rules in strategies) and math.prod(shape) >= _LARGE:
            _divide_anyway(mesh, shape, dividing)
        return NamedSharding(mesh, P(*dividing))

    return jax.tree_util.tree_map_with_path(of, tree)


def _divide_anyway(mesh: Mesh, shape: tuple[int, ...], dividing: list[tuple[str, ...] | None]) -> None:
    """Lets "fsdp" divide the largest dimension that is whole, if it divides none yet."""
    if mesh.shape["fsdp"] == 1 or any(axes and "fsdp" in axes for axes in dividing):
        return
    for dimension in sorted(range(len(shape)), key=lambda dimension: -shape[dimension]):
        if dividing[dimension] is None and shape[dimension] % mesh.shape["fsdp"] == 0:
            dividing[dimension] = ("fsdp",)
            return


def _dividing(mesh: Mesh, size: int, axes: tuple[str, ...]) -> tuple[str, ...] | None:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return axes if parts > 1 and size % parts == 0 else None


def gather_embeddings(mesh: Mesh, loss_fn: LossFn) -> LossFn:
    """Makes the loss of a model that is trained on a mesh.

    Under FSDP, the embedding is gathered before the model runs, a layer's matrices when its turn comes. The embedding
    is used at both ends of a model, and looking up columns that are spread over devices would have the compiler
    exchange what was found, and copy it on some meshes.
    """
    others = [rules for rules in STRATEGIES if rules is not FSDP]

    def loss(model: nnx.Module, *arguments: Any) -> LossOutput:
        if mesh.shape["fsdp"] == 1:
            return loss_fn(model, *arguments)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        shardings = state_shardings(params, mesh, others)

        def gather(path: Any, leaf: Array, sharding: NamedSharding) -> Array:
            is_in_stack = any(is_stack(str(getattr(key, "key", key))) for key in path)
            return leaf if is_in_stack else jax.lax.with_sharding_constraint(leaf, sharding)

        gathered = jax.tree_util.tree_map_with_path(gather, params, shardings)
        nnx.update(model, gathered)
        return loss_fn(model, *arguments)

    return loss


@functools.cache  # equal for equal meshes, so what JAX has traced for one is found again
def make_distribution(mesh: Mesh) -> Distribution:
    """Returns how attention and experts run on a mesh; a training step enters `tfx_jax.nn.distributed` with it.

    Evaluation and decoding enter nothing: rows and positions of their batches need not divide evenly, so where
    parameters are sharded, the compiler divides attention as it likes.
    """
    return Distribution(shard_attention(mesh), num_batch_shards(mesh), functools.partial(expert_exchange, mesh))


class TrainSetup(NamedTuple):
    """A training laid out on a mesh; nothing is made or compiled yet."""

    step_fn: Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]
    """What `jit_update` gives."""
    first_state: Callable[[], TrainState]
    """Draws the first state, every array where it belongs."""
    abstract_state: TrainState
    """Shape, dtype and sharding of each of its arrays."""


def shard_training(
    mesh: Mesh,
    make_model: Callable[[], nnx.Module],
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    make_carry: Callable[[], Any] = lambda: None,
    **options: Any,
) -> TrainSetup:
    """Lays a training out on a mesh.

    Args:
      mesh: from `make_mesh`.
      make_model: makes the model.
      loss_fn: loss and metrics of a batch, as for `update`.
      optimizer: what turns gradients into updates.
      make_carry: see `init_state`.
      **options: of `update`.
    """
    graphdef, first_state = init_state(make_model, optimizer, make_carry=make_carry)
    shapes = jax.eval_shape(first_state)
    shardings = state_shardings(shapes, mesh)
    loss_fn, distribution = gather_embeddings(mesh, loss_fn), make_distribution(mesh)
    step_fn = jit_update(graphdef, loss_fn, optimizer, shardings, distribution=distribution, **options)
    return TrainSetup(step_fn, jax.jit(first_state, out_shardings=shardings), with_shardings(shapes, shardings))


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of a tree, each with where it lies: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def process_shard(mesh: Mesh, process_index: int | None = None) -> ProcessShard:
    """Returns the examples that a process reads, by default this one.

    A host of a TPU slice is a tile of its torus, so what its devices hold of a batch is rarely one block. Shards number
    the distinct sets of batch shards that processes hold.

    Raises:
      UserError: if the sets of two processes overlap or differ in size, or the process has no device in the mesh.
    """
    return _shards_of(mesh, process_index)[0]


def held_batch_shards(mesh: Mesh, process_index: int | None = None) -> tuple[int, ...]:
    """Returns the shards of the whole batch that the devices of a process, by default this one, hold.

    The examples that it reads fill them in this order.

    Raises:
      UserError: as `process_shard` does.
    """
    return _shards_of(mesh, process_index)[1]


def _shards_of(mesh: Mesh, process_index: int | None) -> tuple[ProcessShard, tuple[int, ...]]:
    process_index = jax.process_index() if process_index is None else process_index
    shards = _shards_by_process(mesh)
    if process_index not in shards:
        raise UserError(
            f"config.mesh: process {process_index} has no device in it; data=-1 takes what the others leave"
        )
    return shards[process_index]


@functools.lru_cache  # every batch asks
def _shards_by_process(mesh: Mesh) -> dict[int, tuple[ProcessShard, tuple[int, ...]]]:
    """Returns for every process that has a device in the mesh what it reads and what its devices hold."""
    num_shards = num_batch_shards(mesh)
    held: dict[int, set[int]] = {}
    for device, (place,) in NamedSharding(mesh, P(BATCH_AXES)).devices_indices_map((num_shards,)).items():
        held.setdefault(device.process_index, set()).update(range(num_shards)[place])
    in_order = {process: tuple(sorted(shards)) for process, shards in held.items()}
    distinct = sorted(set(in_order.values()))
    if sum(map(len, distinct)) > num_shards or len(set(map(len, distinct))) > 1:
        one, other = next(
            pair
            for pair in itertools.combinations(distinct, 2)
            if set(pair[0]) & set(pair[1]) or len(pair[0]) != len(pair[1])
        )
        raise UserError(
            f"config.mesh: one process would hold the shards {[*one]} of a batch, and another {[*other]}: let "
            "sequence * tensor be a multiple or a divisor of the devices of a process"
        )
    number = {shards: index for index, shards in enumerate(distinct)}
    return {process: (ProcessShard(number[shards], len(number)), shards) for process, shards in in_order.items()}


def batch_sharding(mesh: Mesh, num_axes: int) -> NamedSharding:
    """Returns how an array of a batch lies on a mesh: rows first, then positions, if it has them."""
    return NamedSharding(mesh, P(*BATCH[:num_axes]))


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Spreads a batch of NumPy arrays over the mesh.

    Every process passes the rows of its `process_shard`, with all their positions.
    """
    count = process_shard(mesh).count

    def spread(rows: np.ndarray) -> jax.Array:
        shape = (count * len(rows), *rows.shape[1:])
        sharding = batch_sharding(mesh, rows.ndim)
        return jax.make_array_from_callback(shape, sharding, lambda index: take_batch_shard(rows, index, mesh))

    return jax.tree.map(spread, batch)


def take_batch_shard(rows: np.ndarray, index: Any, mesh: Mesh, process_index: int | None = None) -> np.ndarray:
    """Returns what lies at an index of the whole batch, of one batch shard, from the rows that a process has read."""
    shard, held = _shards_of(mesh, process_index)
    size = len(rows) // len(held)
    start, _, _ = index[0].indices(shard.count * len(rows))
    first = held.index(start // size) * size
    return rows[first : first + size, *index[1:]]


def shard_whole_batch(mesh: Mesh, batch: Batch) -> Batch:
    """Spreads the rows of a batch, which every process has whole, over the mesh, where they divide evenly."""

    def spread(rows: np.ndarray) -> jax.Array | np.ndarray:
        if len(rows) % num_batch_shards(mesh):
            return rows
        return jax.make_array_from_callback(rows.shape, batch_sharding(mesh, 1), rows.__getitem__)

    return jax.tree.map(spread, batch)
