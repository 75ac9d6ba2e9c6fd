"""Plans a training run without its accelerators: compiles the real program for them and predicts memory and time."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.errors import UserError
from tfx_jax.planning.chips import CHIPS, Chip
from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.planning.programs import Kernel, Program, read_program
from tfx_jax.tasks.task import PlannedTask
from tfx_jax.training.config import ExperimentConfig, accelerator_settings, validate
from tfx_jax.training.flops import training_flops
from tfx_jax.training.guards.memory import state_memory
from tfx_jax.training.reporting.meter import peak_flops
from tfx_jax.training.run import frozen_paths, make_model
from tfx_jax.training.sharding.strategies import TrainSetup, batch_sharding, make_mesh, num_batch_shards, process_shard
from tfx_jax.training.train_setup import make_train_setup

_KERNEL_EFFICIENCY = 0.5  # assumed fraction of the peak for kernels that the compiler does not estimate


@dataclasses.dataclass
class Plan:
    """Predicted properties of a training step on some devices.

    Attributes:
      mesh: sizes of the mesh axes that are not 1.
      num_devices: devices in the mesh.
      device_kind: JAX's name of their kind.
      num_params: parameters of the model.
      batch: shapes of the largest batch, by name.
      hosts: number of hosts, and number of distinct shards of a batch that they read.
      error: one line that says why there is no program, or why it does not fit; None if it fits.
      fits: whether the program fits in the memory of a device.
      memory_bytes: memory of a device available to a program; None if unknown.
      argument_bytes: bytes of parameters, optimizer and batch per device.
      temporary_bytes: bytes of temporary buffers per device.
      peak_bytes: bytes needed at the same time per device.
      model_flops: model FLOPs of a step on all devices, see `tfx_jax.training.flops`.
      tokens: positions of a batch, including padding; the examples of a batch that has images and no sequences.
      unit: what `tokens` counts.
      collectives: for each kind of collective, their number per step and the bytes that leave each device.
      async_share: fraction of those bytes that is sent while the device computes.
      seconds: lower bounds of the step time by resource: "compute" (peak FLOP/s), "memory" (parameters and optimizer
        read and written once), "network", "cycles" (the compiler's estimate) and "kernels" (Pallas kernels, which it
        does not estimate, at half the device's peak or memory bandwidth, whichever takes longer).
      operations: the slowest source lines with their seconds, by the compiler's estimate or that for kernels.
    """

    mesh: dict[str, int]
    num_devices: int
    device_kind: str
    num_params: int
    batch: dict[str, tuple[int, ...]]
    hosts: tuple[int, int]
    error: str | None = None
    fits: bool = False
    memory_bytes: int | None = None
    argument_bytes: int = 0
    temporary_bytes: int = 0
    peak_bytes: int = 0
    model_flops: int = 0
    tokens: int = 0
    unit: str = "token"
    collectives: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    async_share: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    operations: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    @property
    def compiles(self) -> bool:
        """Whether there is a program, or would be with more memory."""
        return self.error is None or (not self.fits and self.peak_bytes > 0)

    @property
    def predicted_step_seconds(self) -> float | None:
        """Predicted seconds of a step: the compiler's estimate plus kernels plus network time that is not hidden.

        Without such an estimate, the longest of `seconds`, a lower bound. None if the program does not fit or the
        speeds of the device are unknown.
        """
        if not self.seconds or not self.fits:
            return None
        if self.is_bound:
            return max(self.seconds.values())
        network = self.seconds["network"]
        computed = self.seconds["cycles"] + self.seconds.get("kernels", 0.0)
        return max(computed + network * (1 - self.async_share), network)

    @property
    def is_bound(self) -> bool:
        """Whether the predicted time is a lower bound, as for GPUs, for which the compiler estimates nothing."""
        return bool(self.seconds) and "cycles" not in self.seconds

    @property
    def predicted_mfu(self) -> float | None:
        """Predicted model FLOPs utilization: model FLOPs divided by the devices' peak over the predicted time."""
        peak, seconds = peak_flops([self.device_kind] * self.num_devices), self.predicted_step_seconds
        return None if peak is None or seconds is None else self.model_flops / (peak * seconds)

    @property
    def bound(self) -> str | None:
        """Resource that limits the step time, a key of `seconds`."""
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.seconds else None


class PlannedStep(NamedTuple):
    """A training step on a mesh that is not compiled yet."""

    plan: Plan
    """The plan, without the fields that the compiled program determines."""
    setup: TrainSetup
    batch: dict[str, jax.ShapeDtypeStruct]
    """Shapes, dtypes and shardings of the largest batch."""


def plan_training(
    config: ExperimentConfig,
    devices: Sequence[Any],
    *,
    num_slices: int = 1,
    on_compile: Callable[[], None] = lambda: None,
) -> Plan:
    """Compiles a training step for devices and analyzes the program.

    Args:
      config: configuration of the run; no data is read.
      devices: attached devices or those of `tfx_jax.planning.topologies`; a small mesh uses the first ones.
      num_slices: number of TPU slices that they belong to.
      on_compile: called when the configuration turned out to be valid, before minutes of compilation.

    Raises:
      UserError: if the configuration is invalid for these devices, or has no vocabulary size.
    """
    step = plan_step(config, devices)
    on_compile()
    step_fn: Any = step.setup.step_fn  # a function of jax.jit
    device = jax.tree.leaves(step.batch)[0].sharding.mesh.devices.flat[0]  # any device of the mesh
    is_here = device.client is jax.devices()[0].client
    # For absent GPUs, JAX does not know that the vendor is NVIDIA.
    platforms = ("cuda",) if device.platform == "gpu" and not is_here else None
    traced = step_fn.trace(step.setup.abstract_state, step.batch, jax.random.key(0))
    lowered = traced.lower(lowering_platforms=platforms)
    # JAX could cache programs of absent devices, but not read them again.
    try:
        with contextlib.nullcontext() if is_here else without_compilation_cache():
            program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        _record_failure(step.plan, str(error))
        return step.plan
    return read_plan(step, program, num_slices=num_slices)


def plan_step(config: ExperimentConfig, devices: Sequence[Any]) -> PlannedStep:
    """Prepares the training step for devices without compiling it; see `plan_training`."""
    config = validate(config)
    if not config.model.vocab_size:
        raise UserError("config.model.vocab_size=0 is derived from the data, which a plan does not read: set it")
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    planned = _planned(config, mesh)
    task: Any = planned.task
    make_carry = getattr(task, "make_carry", lambda: None)

    make_this_model = functools.partial(make_model, config, task)
    setup = make_train_setup(config, make_this_model, task.loss, mesh, make_carry=make_carry)
    shapes = {name: array.shape for name, array in planned.batch.items()}
    # Sequences are [B, T] or [B, T, D]; images have four axes.
    num_positions = [math.prod(shape[:2]) for shape in shapes.values() if 2 <= len(shape) <= 3]
    kind = mesh.devices.flat[0].device_kind
    processes = sorted({device.process_index for device in mesh.devices.flat})
    plan = Plan(
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        num_devices=mesh.size,
        device_kind=kind,
        num_params=state_memory(setup.abstract_state, frozen_paths(nnx.eval_shape(make_this_model))).num_params,
        batch=shapes,
        hosts=(len(processes), process_shard(mesh, processes[0]).count),
        memory_bytes=CHIPS[kind].program_memory if kind in CHIPS else None,
        model_flops=training_flops(make_this_model, task.loss, planned.batch, make_carry=make_carry),
        tokens=max(num_positions, default=next(iter(shapes.values()))[0]),
        unit="token" if num_positions else task.unit,
    )
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=batch_sharding(mesh, len(array.shape)))
        for name, array in planned.batch.items()
    }
    return PlannedStep(plan, setup, batch)


def read_plan(step: PlannedStep, program: Any, *, num_slices: int = 1) -> Plan:
    """Completes the plan of a step with the analysis of its compiled program."""
    plan, memory = step.plan, state_memory(step.setup.abstract_state)
    _set_memory(plan, program.memory_analysis())
    if not plan.fits:
        return plan
    content = read_program(program.as_text())
    if plan.device_kind in CHIPS:
        state_bytes = memory.params + memory.optimizer
        _set_times(plan, content, CHIPS[plan.device_kind], state_bytes, num_slices)
    else:  # no known speeds
        _set_collectives(plan, content)
    return plan


def _planned(config: ExperimentConfig, mesh: Mesh) -> PlannedTask:
    """Returns the task without data, and the shapes of its largest batch."""
    options = LoaderOptions(
        seed=config.seed,
        batch_multiple=num_batch_shards(mesh) * config.accumulate,
        length_multiple=mesh.shape["sequence"],
        shard=process_shard(mesh, mesh.devices.flat[0].process_index),
    )
    return config.task.planned(config.model, options)


def _record_failure(plan: Plan, message: str) -> None:
    """Stores the compiler's error in the plan and, if the program is too large, its size."""
    plan.error = " ".join(message.split())[:300]  # one line, without the compiler's stack trace
    # Such as "Used 20.5G of 15.75G hbm": the groups are number and unit of the needed and of the available memory.
    amount = r"\(?([\d.]+)([KMG])\)?"
    match = re.search(f"{amount} (?:of|exceeds available HBM) {amount}", message)
    if match is not None:
        needed, needed_unit, available, available_unit = match.groups()
        unit_bytes = {"K": 2**10, "M": 2**20, "G": 2**30}
        plan.peak_bytes = round(float(needed) * unit_bytes[needed_unit])
        plan.error = f"needs {needed}{needed_unit}iB, but a device has {available}{available_unit}iB"


def _set_memory(plan: Plan, analysis: Any) -> None:
    """Sets the memory fields of the plan from XLA's memory analysis."""
    plan.argument_bytes = analysis.argument_size_in_bytes
    plan.temporary_bytes = analysis.temp_size_in_bytes
    # Results that are not written into the buffers of donated arguments.
    result_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    plan.peak_bytes = plan.argument_bytes + plan.temporary_bytes + result_bytes + analysis.generated_code_size_in_bytes
    plan.fits = plan.memory_bytes is None or plan.peak_bytes <= plan.memory_bytes
    if not plan.fits:
        plan.error = (
            f"needs {plan.peak_bytes / 2**30:.2f} GiB, but a device has {(plan.memory_bytes or 0) / 2**30:.2f} GiB"
        )


def _set_collectives(plan: Plan, program: Program) -> None:
    """Sets the collectives of the plan and the share of their bytes that is hidden."""
    hidden_bytes = 0.0
    for collective in program.collectives:
        total = plan.collectives.setdefault(collective.kind, {"count": 0, "bytes": 0})
        total["count"] += collective.count
        total["bytes"] += round(collective.moved)
        hidden_bytes += collective.moved if collective.is_async else 0.0
    plan.async_share = hidden_bytes / max(sum(total["bytes"] for total in plan.collectives.values()), 1)


def _set_times(plan: Plan, program: Program, chip: Chip, state_bytes: int, num_slices: int) -> None:
    """Sets the times, operations and collectives of the plan; `state_bytes` are those of parameters and optimizer."""
    _set_collectives(plan, program)
    # Devices with a fast network between them: a TPU slice, or the GPUs of a host. Only TPUs have a known clock.
    num_near = plan.num_devices // (num_slices if chip.clock else plan.hosts[0])
    plan.seconds = {
        "memory": 2 * state_bytes / chip.memory_bandwidth,  # a step reads and writes parameters and optimizer state
        "network": sum(
            collective.moved / chip.bandwidth(collective.devices, num_near) for collective in program.collectives
        ),
    }
    peak = peak_flops([plan.device_kind])
    if peak is not None:
        plan.seconds["compute"] = plan.model_flops / (peak * plan.num_devices)
    if not program.cycles or not chip.clock:
        return
    operations = [(operation.source, operation.cycles / chip.clock) for operation in program.operations]
    plan.seconds["cycles"] = sum(seconds for _, seconds in operations)
    kernels = [(kernel.source, _kernel_seconds(kernel, peak or math.inf, chip)) for kernel in program.kernels]
    if kernels:
        plan.seconds["kernels"] = sum(seconds for _, seconds in kernels)
    plan.operations = sorted([*operations, *kernels], key=lambda pair: -pair[1])[:5]  # the slowest


def _kernel_seconds(kernel: Kernel, peak: float, chip: Chip) -> float:
    """Estimates the seconds of a kernel on a device whose peak is `peak` FLOP/s."""
    return max(kernel.flops / peak, kernel.num_bytes / chip.memory_bandwidth) / _KERNEL_EFFICIENCY


def alternatives(config: ExperimentConfig, num_devices: int) -> Iterator[tuple[str, ExperimentConfig]]:
    """Yields pairs (flags, configuration) that need less memory, those that cost least time first."""
    model: Any = config.model
    smaller, flags = model, list[str]()
    if getattr(model, "remat", "full") == "none":
        # Not "dots": in attention over long sequences it overflows libtpu's stack, which ends the process.
        smaller, flags = dataclasses.replace(model, remat="full"), ["--config.model.remat=full"]
        yield flags[0], dataclasses.replace(config, model=smaller)
    for accumulate in (2 * config.accumulate, 4 * config.accumulate, 8 * config.accumulate):
        yield (
            " ".join([*flags, f"--config.accumulate={accumulate}"]),
            dataclasses.replace(config, model=smaller, accumulate=accumulate),
        )
    if num_devices > 1 and config.mesh.fsdp == 1:
        mesh = dataclasses.replace(config.mesh, data=-1, fsdp=num_devices)
        yield (
            " ".join([*flags, f"--config.mesh.fsdp={num_devices}"]),
            dataclasses.replace(config, model=smaller, mesh=mesh),
        )


def faster_settings(config: ExperimentConfig) -> tuple[str, ExperimentConfig] | None:
    """Returns (flags, configuration) with `accelerator_settings`, which leave batches as they are; None without any."""
    model: Any = config.model
    changes = accelerator_settings(model)
    if not changes:
        return None
    flags = " ".join(f"--config.model.{name}={value}" for name, value in changes.items())
    return flags, dataclasses.replace(config, model=dataclasses.replace(model, **changes))


def variants(config: ExperimentConfig, num_devices: int) -> Iterator[tuple[str, ExperimentConfig]]:
    """Yields pairs (flags, configuration) with the meshes and remat settings that `plan --search` tries."""
    model: Any = config.model
    remats = ["none", "full"] if hasattr(model, "remat") else [None]
    # Sizes of the axes (fsdp, tensor); a dictionary without repetitions, because there may be one or eight devices.
    for fsdp, tensor in dict.fromkeys(((1, 1), (8, 1), (num_devices, 1), (1, 2), (1, 4), (8, 4))):
        if num_devices % (fsdp * tensor):
            continue
        mesh = dataclasses.replace(config.mesh, data=-1, fsdp=fsdp, tensor=tensor)
        for remat in remats:
            changed = model if remat is None else dataclasses.replace(model, remat=remat)
            name = f"--config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"
            name += "" if remat is None else f" --config.model.remat={remat}"
            yield name, dataclasses.replace(config, mesh=mesh, model=changed)
