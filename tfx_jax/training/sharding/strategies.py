"""Shardings of all arrays of a run: one mesh and one table of rules per strategy; layers contain no sharding."""

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

from tfx_jax.arrays import path_name
from tfx_jax.data.batching.batches import ProcessShard
from tfx_jax.errors import UserError
from tfx_jax.nn.stack import is_stack
from tfx_jax.tasks.loss import LossOutput
from tfx_jax.training.sharding.layers import BATCH_AXES, make_distribution, num_batch_shards
from tfx_jax.training.step import Batch, LossFn, Metrics, Params, TrainState, init_state, jit_update

Rules = tuple[tuple[str, P], ...]
"""Regular expressions of whole parameter paths, each with the mesh axes that shard the last dimensions."""

# Every device holds the whole state; only the batch is sharded.
DATA_PARALLEL: Rules = ()

# Every device holds a shard of each matrix; a layer's matrices are gathered when the layer runs (ZeRO stage 3:
# Rajbhandari et al., 2020).
FSDP: Rules = (
    (r".*/(query|key|value|output_gate)/kernel", P("fsdp", None, None)),
    (r".*/out/kernel", P("fsdp")),
    (r".*/attention_fn/(key|value)_up", P("fsdp", None)),
    (r".*/(up|gate)", P("fsdp", None)),
    (r".*/down", P("fsdp")),
    (r".*embedding/table", P("fsdp")),
)

# Every device computes some heads, some hidden units and the logits of a part of the vocabulary. Each sublayer ends
# with a sum over devices (Megatron: Shoeybi et al., 2019).
TENSOR_PARALLEL: Rules = (
    (r".*/(query|key|value|output_gate)/kernel", P("tensor", None)),
    (r".*/(query|key|value|output_gate)/bias", P("tensor", None)),
    (r".*/(query|key|value)_convolution/kernel", P("tensor", None)),
    (r".*/out/kernel", P("tensor", None, None)),
    (r".*/attention_fn/(key|value)_up", P("tensor", None, None)),
    (r".*/(up|up_bias|gate|gate_bias)", P("tensor")),
    (r".*/down", P("tensor", None)),
    (r".*embedding/table", P("tensor", None)),
)

# Every device holds some of the experts of each mixture; tokens are sent to their experts (GShard: Lepikhin et al.,
# 2020).
EXPERT_PARALLEL: Rules = (
    (r".*/experts/(up|gate|down)", P("expert", None, None)),
    (r".*/experts/(up|gate|down)_bias", P("expert", None)),
)

# All strategies apply at once; an axis of size 1 shards nothing.
STRATEGIES: tuple[Rules, ...] = (DATA_PARALLEL, FSDP, TENSOR_PARALLEL, EXPERT_PARALLEL)

_LARGE = 1 << 16  # elements from which FSDP must not replicate an array

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
    """Arranges devices as a mesh with these axis sizes; devices that are close differ in the last axes.

    Several TPU slices, with a slow network between them, shard only the axis "data" between them.

    Args:
      data: devices that share the batch, each with the whole model; -1 takes all devices that the others leave.
      fsdp: devices that share the batch and the parameters.
      expert: devices that share the batch and the experts of a mixture.
      sequence: devices that share the positions.
      tensor: devices that share heads, hidden units and vocabulary.
      devices: devices to arrange; None means `jax.devices()`. If all belong to one process, only as many as needed are
        used.

    Raises:
      UserError: if the sizes do not fit the number of devices, processes or slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "sequence": sequence, "tensor": tensor}
    described = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
    if data == -1:
        sizes["data"] = len(devices) // max(fsdp * expert * sequence * tensor, 1)
    needed = math.prod(sizes.values())
    has_many_processes = len({device.process_index for device in devices}) > 1
    # With data=-1 or several processes, all devices must be used.
    leaves_devices = needed < len(devices) and (data == -1 or has_many_processes)
    if min(sizes.values()) < 1 or needed > len(devices) or leaves_devices:
        owners = " of several processes, which must all be used" if has_many_processes else ""
        raise UserError(
            f"config.mesh: {described} does not fit {len(devices)} devices{owners}; data=-1 takes all devices that the "
            "other axes leave"
        )
    arranged = _arrange(tuple(sizes.values()), devices[:needed])
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _arrange(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Returns an array of these sizes in which neighboring TPU chips are neighbors in the torus of their slice."""
    if devices[0].platform != "tpu":  # GPUs: JAX treats each host as a slice, and orders devices by host
        return mesh_utils.create_device_mesh(sizes, devices)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices > 1:
        data, *others = sizes
        if data % num_slices:
            raise UserError(
                f"config.mesh: only the axis data can span TPU slices, so data={data} must be a multiple of the "
                f"{num_slices} slices: lower fsdp, expert, sequence or tensor"
            )
        sizes_in_slice = (data // num_slices, *others)
        sizes_across_slices = (num_slices, *(1 for _ in others))
        return mesh_utils.create_hybrid_device_mesh(
            sizes_in_slice, sizes_across_slices, devices, allow_split_physical_axes=True
        )
    # Sizes of the smallest box of the torus that contains all devices.
    box = np.ptp([(*device.coords, device.core_on_chip) for device in devices], axis=0) + 1
    if math.prod(box) > len(devices):  # not a full torus, such as three chips of a host
        return np.array(devices).reshape(sizes)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def state_shardings(tree: Any, mesh: Mesh, strategies: Sequence[Rules] = STRATEGIES) -> Any:
    """Returns the sharding of each leaf: every table adds the mesh axes of its first rule that matches the leaf's path.

    Paths of optimizer moments end with those of their parameters, so the tables cover the whole state. A carry is
    sharded like a batch. A dimension that its axes do not divide evenly, such as an odd vocabulary size, is not
    sharded. A large array that no rule of FSDP shards, such as the matrix of a new layer, is sharded by "fsdp" along
    its largest possible dimension.

    Args:
      tree: a training state, or a part of it, of arrays or shapes.
      mesh: mesh from `make_mesh`.
      strategies: the tables of rules.
    """

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        """Returns the sharding of one array by the strategies' rules, as far as they divide its shape evenly."""
        name = path_name(path)
        shape = np.shape(leaf)
        if name.startswith("carry/"):
            return NamedSharding(mesh, P(_dividing_axes(mesh, shape[0], BATCH_AXES)))
        axes: list[tuple[str, ...]] = [()] * len(shape)  # mesh axes for each dimension
        for rules in strategies:
            spec = next((spec for pattern, spec in rules if re.fullmatch(pattern, name)), P())
            # A rule describes the last dimensions: the first ones may be those of a stack of layers.
            for dimension, axis in zip(range(-len(spec), 0), spec, strict=True):
                if axis is not None and len(spec) <= len(shape):
                    axes[dimension] += (axis,)
        sharded_by = [_dividing_axes(mesh, size, names) for size, names in zip(shape, axes, strict=True)]
        if any(rules is FSDP for rules in strategies) and math.prod(shape) >= _LARGE:
            _shard_largest_dimension(mesh, shape, sharded_by)
        return NamedSharding(mesh, P(*sharded_by))

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def _shard_largest_dimension(mesh: Mesh, shape: tuple[int, ...], sharded_by: list[tuple[str, ...] | None]) -> None:
    """Lets "fsdp" shard the largest unsharded dimension that it divides, unless it already shards one.

    Args:
      mesh: mesh of the array.
      shape: shape of the array.
      sharded_by: the mesh axes that shard each dimension, None for an unsharded one; changed in place.
    """
    if mesh.shape["fsdp"] == 1 or any(axes and "fsdp" in axes for axes in sharded_by):
        return
    for dimension in sorted(range(len(shape)), key=lambda dimension: -shape[dimension]):  # largest first
        if sharded_by[dimension] is None and shape[dimension] % mesh.shape["fsdp"] == 0:
            sharded_by[dimension] = ("fsdp",)
            return


def _dividing_axes(mesh: Mesh, size: int, axes: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns `axes` if they divide a dimension of this size evenly, else None."""
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return axes if parts > 1 and size % parts == 0 else None


def gather_embeddings(mesh: Mesh, loss_fn: LossFn) -> LossFn:
    """Returns a loss function that gathers embeddings over "fsdp" before it calls `loss_fn`.

    Under FSDP, a layer's matrices are gathered when the layer runs, but the embedding before the model runs: it is used
    at both ends of a model. If its columns were sharded, the compiler would exchange the vectors that are looked up,
    and on some meshes copy them.
    """
    other_strategies = [rules for rules in STRATEGIES if rules is not FSDP]

    def loss(model: nnx.Module, *arguments: Any) -> LossOutput:
        """Computes the loss with parameters outside of stacks gathered over "fsdp"."""
        if mesh.shape["fsdp"] == 1:
            return loss_fn(model, *arguments)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        shardings = state_shardings(params, mesh, other_strategies)

        def gather(path: Any, leaf: Array, sharding: NamedSharding) -> Array:
            is_in_stack = any(is_stack(str(getattr(key, "key", key))) for key in path)
            return leaf if is_in_stack else jax.lax.with_sharding_constraint(leaf, sharding)

        gathered = jax.tree_util.tree_map_with_path(gather, params, shardings)
        nnx.update(model, gathered)
        return loss_fn(model, *arguments)

    return loss


class TrainSetup(NamedTuple):
    """Functions and shapes of a run on a mesh; nothing is computed or compiled yet."""

    step_fn: Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]
    """Compiled training step, as returned by `jit_update`."""
    first_state: Callable[[], TrainState]
    """Returns the initial state, sharded over the mesh."""
    abstract_state: TrainState
    """Shape, dtype and sharding of each array of the state."""
    init_optimizer: Callable[[Params], optax.OptState]
    """Returns the optimizer's initial state for parameters."""


def shard_training(
    mesh: Mesh,
    make_model: Callable[[], nnx.Module],
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    make_carry: Callable[[], Any] = lambda: None,
    has_ema: bool = False,
    **options: Any,
) -> TrainSetup:
    """Builds the training program for a mesh.

    Args:
      mesh: mesh from `make_mesh`.
      make_model: builds the model.
      loss_fn: loss and metrics of a batch, as for `update`.
      optimizer: turns gradients into updates.
      make_carry: returns the carry of the first batch; see `init_state`.
      has_ema: whether the state has an average of the parameters.
      **options: options of `update`.
    """
    graphdef, first_state = init_state(make_model, optimizer, make_carry=make_carry, has_ema=has_ema)
    shapes = jax.eval_shape(first_state)
    shardings = state_shardings(shapes, mesh)
    loss_fn, distribution = gather_embeddings(mesh, loss_fn), make_distribution(mesh)
    step_fn = jit_update(graphdef, loss_fn, optimizer, shardings, distribution=distribution, **options)
    return TrainSetup(
        step_fn,
        jax.jit(first_state, out_shardings=shardings),
        with_shardings(shapes, shardings),
        jax.jit(optimizer.init, out_shardings=shardings.opt_state),
    )


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Returns shape, dtype and sharding of each array of a tree: the target for restoring a checkpoint."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def process_shard(mesh: Mesh, process_index: int | None = None) -> ProcessShard:
    """Returns the examples that a process reads, by default this one.

    Each host of a TPU slice is a tile of its torus, so its devices rarely hold one contiguous block of a batch.
    `ProcessShard` numbers the distinct sets of batch shards that processes hold.

    Raises:
      UserError: if the sets of two processes overlap or differ in size, or the process has no device in the mesh.
    """
    shard, _ = _shards_of(mesh, process_index)
    return shard


def held_batch_shards(mesh: Mesh, process_index: int | None = None) -> tuple[int, ...]:
    """Returns the indices of the batch shards that the devices of a process, by default this one, hold.

    The examples that the process reads fill these shards in this order.

    Raises:
      UserError: as `process_shard` does.
    """
    _, held = _shards_of(mesh, process_index)
    return held


def _shards_of(mesh: Mesh, process_index: int | None) -> tuple[ProcessShard, tuple[int, ...]]:
    """Returns `process_shard` and `held_batch_shards` of a process."""
    process_index = jax.process_index() if process_index is None else process_index
    shards = _shards_by_process(mesh)
    if process_index not in shards:
        raise UserError(
            f"config.mesh: process {process_index} has no device in the mesh, but every process needs one: set "
            "config.mesh.data=-1 to use all devices"
        )
    return shards[process_index]


@functools.lru_cache  # called for every batch
def _shards_by_process(mesh: Mesh) -> dict[int, tuple[ProcessShard, tuple[int, ...]]]:
    """Returns by process index the pair of `process_shard` and `held_batch_shards`, for every process in the mesh."""
    num_shards = num_batch_shards(mesh)
    held_sets: dict[int, set[int]] = {}  # batch shards by process
    # Where JAX would put an array with one element per batch shard shows which device holds which batch shard.
    for device, (index,) in NamedSharding(mesh, P(BATCH_AXES)).devices_indices_map((num_shards,)).items():
        held_sets.setdefault(device.process_index, set()).update(range(num_shards)[index])
    held = {process: tuple(sorted(shards)) for process, shards in held_sets.items()}
    distinct = sorted(set(held.values()))
    has_overlap = sum(map(len, distinct)) > num_shards
    if has_overlap or len(set(map(len, distinct))) > 1:
        one, other = next(
            pair
            for pair in itertools.combinations(distinct, 2)
            if set(pair[0]) & set(pair[1]) or len(pair[0]) != len(pair[1])
        )
        raise UserError(
            f"config.mesh: one process would hold the batch shards {[*one]}, and another {[*other]}: make sequence * "
            "tensor a multiple or a divisor of the number of devices of a process"
        )
    index_of = {shards: index for index, shards in enumerate(distinct)}
    return {
        process: (ProcessShard(index=index_of[shards], count=len(distinct)), shards) for process, shards in held.items()
    }


def batch_sharding(mesh: Mesh, num_axes: int) -> NamedSharding:
    """Returns the sharding of a batch array: examples over the batch axes, positions over "sequence".

    With `num_axes=1` only the examples are sharded; positions are not.
    """
    return NamedSharding(mesh, P(*BATCH[:num_axes]))


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Distributes a batch of NumPy arrays over the mesh.

    Every process passes the examples of its `process_shard`, with all their positions.
    """
    count = process_shard(mesh).count

    def spread(examples: np.ndarray) -> jax.Array:
        shape = (count * len(examples), *examples.shape[1:])
        sharding = batch_sharding(mesh, examples.ndim)
        return jax.make_array_from_callback(shape, sharding, lambda index: take_batch_shard(examples, index, mesh))

    return jax.tree.map(spread, batch)


def take_batch_shard(examples: np.ndarray, index: Any, mesh: Mesh, process_index: int | None = None) -> np.ndarray:
    """Returns a part of the whole batch from the examples that a process has read.

    Args:
      examples: the examples that the process has read, [examples, ...], see `process_shard`.
      index: slices of the whole batch, one per axis; those of the first axis are within one batch shard.
      mesh: mesh of the batch.
      process_index: the process; None means this one.
    """
    shard, held = _shards_of(mesh, process_index)
    shard_size = len(examples) // len(held)  # examples of a batch shard
    start, _, _ = index[0].indices(shard.count * len(examples))  # first example of the slice in the whole batch
    first = held.index(start // shard_size) * shard_size  # the same example in `examples`
    return examples[first : first + shard_size, *index[1:]]


def shard_whole_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Distributes a batch of NumPy arrays that every process has in full: examples over the batch axes of the mesh.

    An array whose number of examples is not a multiple of `num_batch_shards` is returned unchanged, as a NumPy array.
    """

    def spread(examples: np.ndarray) -> jax.Array | np.ndarray:
        """Shards an array over its examples, or returns it unchanged if they do not divide evenly."""
        if len(examples) % num_batch_shards(mesh):
            return examples
        by_example = batch_sharding(mesh, num_axes=1)  # positions are not sharded
        return jax.make_array_from_callback(examples.shape, by_example, examples.__getitem__)

    return jax.tree.map(spread, batch)
