"""A training on paper: its real program, compiled for accelerators that are not there, and what that says of a step."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.errors import UserError
from tfx_jax.planning.chips import CHIPS, Chip
from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.planning.programs import Kernel, Program, read_program
from tfx_jax.tasks.task import PlannedTask
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.flops import training_flops
from tfx_jax.training.guards.memory import state_memory
from tfx_jax.training.reporting.meter import peak_flops
from tfx_jax.training.run import make_model
from tfx_jax.training.sharding.strategies import TrainSetup, batch_sharding, make_mesh, num_batch_shards, process_shard
from tfx_jax.training.train_setup import make_train_setup

_KERNEL_EFFICIENCY = 0.5  # of a kernel that nothing estimates: the share of the peak that is assumed


@dataclasses.dataclass
class Plan:
    """What a training step would be on some devices.

    Attributes:
      mesh: sizes of the axes that are not 1.
      num_devices: of the mesh.
      device_kind: of each of them.
      num_params: of the model.
      batch: shapes of the largest batch, by name.
      hosts: how many there are, and how many distinct shares of a batch they read.
      error: why there is no program, on one line; None if there is one.
      fits: whether the program has room on a device.
      memory_bytes: that a program may have of a device; None where it is not known.
      argument_bytes: of parameters, optimizer and batch on a device.
      temporary_bytes: of what the step makes and drops.
      peak_bytes: of all that is there at once.
      model_flops: of a step on all devices, see `tfx_jax.training.flops`.
      tokens: positions of a batch, padding counted.
      collectives: by kind, how often a step exchanges something, and bytes that leave each device.
      async_share: of those bytes, the part that is sent while something is computed.
      seconds: what a step takes at least, by what it waits for: "compute" (peak FLOP/s), "memory" (parameters and
        optimizer read and written once), "network", "cycles", which the compiler expects, and "kernels", which it does
        not expect: Pallas, at half of the device's peak or of its memory's bandwidth, whichever takes longer.
      operations: the slowest, lines of source code and their seconds: by the compiler's estimate, and kernels by ours.
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
    collectives: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    async_share: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    operations: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    @property
    def compiles(self) -> bool:
        """Whether there is a program, or would be if there were more memory."""
        return self.error is None or (not self.fits and self.peak_bytes > 0)

    @property
    def predicted_step_seconds(self) -> float | None:
        """What the compiler expects of operations, and beside them kernels, and the exchanges that nothing hides.

        Where it expects nothing, the longest of what a step waits for, a bound: no step is faster. None without
        published speeds of the device, or without a program.
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
        """Whether the predicted time is no estimate but a bound, as for GPUs, whose compiler expects nothing."""
        return bool(self.seconds) and "cycles" not in self.seconds

    @property
    def predicted_mfu(self) -> float | None:
        """Model FLOPs over what the devices could do in the predicted time."""
        peak, seconds = peak_flops([self.device_kind] * self.num_devices), self.predicted_step_seconds
        return None if peak is None or seconds is None else self.model_flops / (peak * seconds)

    @property
    def bound(self) -> str | None:
        """What a step waits for longest."""
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.seconds else None


class PlannedStep(NamedTuple):
    """A training step that is laid out on devices and not compiled yet."""

    plan: Plan
    """What is known before it is compiled."""
    setup: TrainSetup
    batch: dict[str, jax.ShapeDtypeStruct]
    """The largest, with where its arrays lie."""


def plan_training(config: ExperimentConfig, devices: Sequence[Any], *, num_slices: int = 1) -> Plan:
    """Compiles a training step for devices and reads the program.

    Args:
      config: of the training; no data is read.
      devices: such as `tfx_jax.planning.topologies.tpu_devices` gives; all of them, or the first if the mesh is small.
      num_slices: how many slices they are.

    Raises:
      UserError: if the configuration is impossible on them, or does not say how many tokens the model has.
    """
    step = plan_step(config, devices)
    step_fn: Any = step.setup.step_fn  # of jax.jit
    device = jax.tree.leaves(step.batch)[0].sharding.mesh.devices.flat[0]
    is_here = device.client is jax.devices()[0].client
    # Of GPUs that are not there JAX does not know that they are NVIDIA's.
    platforms = ("cuda",) if device.platform == "gpu" and not is_here else None
    traced = step_fn.trace(step.setup.abstract_state, step.batch, jax.random.key(0))
    lowered = traced.lower(lowering_platforms=platforms)
    # JAX keeps the programs of devices that are not there, but cannot read them again.
    try:
        with contextlib.nullcontext() if is_here else without_compilation_cache():
            program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        _refused(step.plan, str(error))
        return step.plan
    return read_plan(step, program, num_slices=num_slices)


def plan_step(config: ExperimentConfig, devices: Sequence[Any]) -> PlannedStep:
    """Lays a training step out on devices, see `plan_training`."""
    config = validate(config)
    if not config.model.vocab_size:
        raise UserError("config.model.vocab_size=0 follows from a text, which a plan does not read: set it")
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    planned = _planned(config, mesh)
    task: Any = planned.task
    make_carry = getattr(task, "make_carry", lambda: None)

    make = functools.partial(make_model, config, task)
    setup = make_train_setup(config, make, task.loss, mesh, make_carry=make_carry)
    shapes = {name: array.shape for name, array in planned.batch.items()}
    kind = mesh.devices.flat[0].device_kind
    processes = sorted({device.process_index for device in mesh.devices.flat})
    plan = Plan(
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        num_devices=mesh.size,
        device_kind=kind,
        num_params=state_memory(setup.abstract_state).num_params,
        batch=shapes,
        hosts=(len(processes), process_shard(mesh, processes[0]).count),
        memory_bytes=CHIPS[kind].program_memory if kind in CHIPS else None,
        model_flops=training_flops(make, task.loss, planned.batch, make_carry=make_carry),
        tokens=max(shape[0] * shape[1] for shape in shapes.values() if len(shape) > 1),
    )
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=batch_sharding(mesh, len(array.shape)))
        for name, array in planned.batch.items()
    }
    return PlannedStep(plan, setup, batch)


def read_plan(step: PlannedStep, program: Any, *, num_slices: int = 1) -> Plan:
    """Completes the plan of a step by what its compiled program says."""
    plan, memory = step.plan, state_memory(step.setup.abstract_state)
    _measure(plan, program.memory_analysis())
    if plan.fits and plan.device_kind in CHIPS:
        chip, state_bytes = CHIPS[plan.device_kind], memory.params + memory.optimizer
        _predict(plan, read_program(program.as_text()), chip, state_bytes, num_slices)
    elif plan.fits:
        _exchange(plan, read_program(program.as_text()))
    return plan


def _planned(config: ExperimentConfig, mesh: Mesh) -> PlannedTask:
    options = LoaderOptions(
        seed=config.seed,
        batch_multiple=num_batch_shards(mesh) * config.accumulate,
        length_multiple=mesh.shape["sequence"],
        shard=process_shard(mesh, mesh.devices.flat[0].process_index),
    )
    return config.task.planned(config.model, options)


def _refused(plan: Plan, message: str) -> None:
    """Notes why there is no program; of one that is too large, how large it is."""
    plan.error = " ".join(message.split())[:300]
    amount = r"\(?([\d.]+)([KMG])\)?"
    needed = re.search(f"{amount} (?:of|exceeds available HBM) {amount}", message)
    if needed is not None:
        size = {"K": 2**10, "M": 2**20, "G": 2**30}
        plan.peak_bytes = round(float(needed[1]) * size[needed[2]])
        plan.error = f"needs {needed[1]}{needed[2]}iB of a device's {needed[3]}{needed[4]}iB"


def _measure(plan: Plan, analysis: Any) -> None:
    plan.argument_bytes = analysis.argument_size_in_bytes
    plan.temporary_bytes = analysis.temp_size_in_bytes
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    plan.peak_bytes = plan.argument_bytes + plan.temporary_bytes + new + analysis.generated_code_size_in_bytes
    plan.fits = plan.memory_bytes is None or plan.peak_bytes <= plan.memory_bytes
    if not plan.fits:
        plan.error = f"needs {plan.peak_bytes / 2**30:.2f} GiB of a device's {(plan.memory_bytes or 0) / 2**30:.2f} GiB"


def _exchange(plan: Plan, program: Program) -> None:
    hidden = 0.0
    for collective in program.collectives:
        of_kind = plan.collectives.setdefault(collective.kind, {"count": 0, "bytes": 0})
        of_kind["count"] += collective.count
        of_kind["bytes"] += round(collective.moved)
        hidden += collective.moved if collective.is_async else 0.0
    plan.async_share = hidden / max(sum(found["bytes"] for found in plan.collectives.values()), 1)


def _predict(plan: Plan, program: Program, chip: Chip, state_bytes: int, num_slices: int) -> None:
    _exchange(plan, program)
    num_near = plan.num_devices // (num_slices if chip.clock else plan.hosts[0])  # a node of GPUs is a host
    plan.seconds = {
        "memory": 2 * state_bytes / chip.memory_bandwidth,
        "network": sum(
            collective.moved / chip.bandwidth(collective.devices, num_near) for collective in program.collectives
        ),
    }
    peak = peak_flops([plan.device_kind])
    if peak is not None:
        plan.seconds["compute"] = plan.model_flops / (peak * plan.num_devices)
    if not program.cycles or not chip.clock:
        return
    operations = [(found.source, found.cycles / chip.clock) for found in program.operations]
    plan.seconds["cycles"] = sum(seconds for _, seconds in operations)
    kernels = [(found.source, _kernel_seconds(found, peak or math.inf, chip)) for found in program.kernels]
    if kernels:
        plan.seconds["kernels"] = sum(seconds for _, seconds in kernels)
    plan.operations = sorted([*operations, *kernels], key=lambda pair: -pair[1])[:5]


def _kernel_seconds(kernel: Kernel, peak: float, chip: Chip) -> float:
    return max(kernel.flops / peak, kernel.num_bytes / chip.memory_bandwidth) / _KERNEL_EFFICIENCY


def alternatives(config: ExperimentConfig, num_devices: int) -> Iterator[tuple[str, ExperimentConfig]]:
    """Changes of a configuration that need less memory, the cheapest in time first, and what they are called."""
    model: Any = config.model
    smaller, flags = model, list[str]()
    if getattr(model, "remat", "full") == "none":
        # Not "dots": in attention over long rows it overflows libtpu's stack, which ends the process.
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


def variants(config: ExperimentConfig, num_devices: int) -> Iterator[tuple[str, ExperimentConfig]]:
    """Meshes and rematerializations that a search tries."""
    model: Any = config.model
    remats = ["none", "full"] if hasattr(model, "remat") else [None]
    for fsdp, tensor in dict.fromkeys(((1, 1), (8, 1), (num_devices, 1), (1, 2), (1, 4), (8, 4))):
        if num_devices % (fsdp * tensor):
            continue
        mesh = dataclasses.replace(config.mesh, data=-1, fsdp=fsdp, tensor=tensor)
        for remat in remats:
            changed = model if remat is None else dataclasses.replace(model, remat=remat)
            name = f"--config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"
            name += "" if remat is None else f" --config.model.remat={remat}"
            yield name, dataclasses.replace(config, mesh=mesh, model=changed)
