"""`tfx-jax plan`: predicts whether a run compiles, fits and is fast enough on accelerators that are not attached."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP
from tfx_jax.cli.support.progress import Progress
from tfx_jax.cli.train import CONFIG_HELP, load_config_file
from tfx_jax.errors import UserError
from tfx_jax.planning.plan import Plan, alternatives, faster_settings, plan_training, variants
from tfx_jax.planning.topologies import absent_devices
from tfx_jax.training.config import ExperimentConfig

_GIB = 2**30
_GOOD_MFU = 0.4  # predicted utilization from which `plan` does not look for faster settings
_FASTER = 1.05  # least ratio of speeds at which they are named


class Faster(NamedTuple):
    """Settings with which a run would be faster."""

    flags: str
    predicted_step_seconds: float
    speedup: float
    """Speed with these settings divided by the speed without them."""


def run(argv: Sequence[str]) -> int:
    """Compiles a training step and prints the plan; the exit status is 0 if it fits in memory, else 1."""
    parser = Parser(
        "plan",
        "Compiles the training step of an experiment for a TPU slice or GPU nodes, without accelerators and without "
        "the data. Prints whether it compiles and fits in memory, its collectives and the predicted time per step. For "
        "TPUs it then compiles faster settings, if it knows any, and prints by how much they are faster (not with "
        "--json). For GPUs the time is a lower bound: no step is faster.",
    )
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument(
        "--topology",
        required=True,
        help="TPU slice such as v5e:4x4 or v5p:2x2x2, GPUs as h100:1x8x8 (slices x nodes x GPUs per node), or cpu:8 "
        "(simulated devices)",
    )
    parser.add_argument(
        "--slices", type=at_least_one, default=1, help="number of TPU slices of this topology; %(default)s by default"
    )
    parser.add_argument(
        "--price", type=_price, help="price of a device per hour, in any currency; adds the cost of the run to the plan"
    )
    parser.add_argument(
        "--search", action="store_true", help="try several meshes and remat settings, and rank those that fit"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.epilog = OVERRIDES_HELP
    arguments, overrides = parser.parse_known_args(argv)
    devices = _devices(arguments.topology, arguments.slices)
    set_up_program()
    config = load_config_file(arguments.config, overrides)
    if arguments.search:
        return _search(config, devices, arguments)
    progress = Progress()
    message = f"compiling {arguments.config} for {arguments.topology}, seconds to minutes"
    plan = plan_training(
        config,
        devices,
        num_slices=arguments.slices,
        on_compile=lambda: progress.stage(message, is_logged=True),  # an error before it is the only line
    )
    remedy = None if plan.fits or not plan.compiles else _remedy(config, devices, arguments, progress)
    progress.clear()
    cost = _cost(plan, config, arguments.price)
    if arguments.json:
        print(json.dumps(as_json(plan) | {"remedy": remedy, "cost": cost}))
        return 0 if plan.fits else 1
    lines = described(plan, remedy=remedy, cost=cost)
    if plan.fits and plan.predicted_step_seconds is not None:
        hours = config.num_steps * plan.predicted_step_seconds / 3600
        at_least = "at least " if plan.is_bound else ""
        lines.append(
            f"run          {at_least}{hours:,.1f} h for {config.num_steps:,} steps, "
            f"{hours * plan.num_devices:,.1f} device-hours"
        )
    print("\n".join(lines), flush=True)  # the next compilation takes minutes
    if faster := find_faster(plan, config, devices, arguments.slices, progress):
        milliseconds = 1e3 * faster.predicted_step_seconds
        print(f"faster       {faster.speedup:.2f} times, {milliseconds:.2f} ms a step, with {faster.flags}")
    return 0 if plan.fits else 1


def find_faster(
    plan: Plan, config: ExperimentConfig, devices: Sequence[Any], num_slices: int, progress: Progress | None = None
) -> Faster | None:
    """Plans the run with `faster_settings`; None if it would not be faster, or is good already.

    Nothing is compiled without a prediction, such as for CPUs and GPUs.
    """
    seconds, mfu, settings = plan.predicted_step_seconds, plan.predicted_mfu, faster_settings(config)
    if seconds is None or mfu is None or plan.is_bound or mfu >= _GOOD_MFU or settings is None:
        return None
    flags, faster_config = settings
    if progress is not None:
        progress.stage(f"compiling with {flags}", is_logged=True)
    try:
        predicted = plan_training(faster_config, devices, num_slices=num_slices).predicted_step_seconds
    except UserError:  # settings that the model does not support
        predicted = None
    if progress is not None:
        progress.clear()
    if predicted is None or seconds < _FASTER * predicted:
        return None
    return Faster(flags, predicted, seconds / predicted)


def plan_topology(
    config: str, overrides: Sequence[str], topology: str, num_slices: int = 1
) -> tuple[Plan, Faster | None]:
    """Plans the run that `--config` and its overrides describe, and returns settings with which it would be faster.

    Args:
      config: value of `--config`.
      overrides: flags of the form `--config.field=value`.
      topology: value of `--topology`.
      num_slices: number of TPU slices.

    Raises:
      UserError: if there is no such configuration or topology, or the configuration is invalid for it.
    """
    devices, experiment = _devices(topology, num_slices), load_config_file(config, overrides)
    plan = plan_training(experiment, devices, num_slices=num_slices)
    return plan, find_faster(plan, experiment, devices, num_slices)


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the JSON object that `--json` prints for a plan."""
    return {
        "compiles": plan.compiles,
        "fits": plan.fits,
        "error": plan.error,
        "device_kind": plan.device_kind,
        "num_devices": plan.num_devices,
        "mesh": plan.mesh,
        "num_params": plan.num_params,
        "batch": plan.batch,
        "hosts": plan.hosts[0],
        "batch_shares": plan.hosts[1],
        "memory_bytes": plan.memory_bytes,
        "peak_bytes": plan.peak_bytes,
        "argument_bytes": plan.argument_bytes,
        "temporary_bytes": plan.temporary_bytes,
        "collectives": plan.collectives,
        "async_share": plan.async_share,
        "model_flops": plan.model_flops,
        "seconds": plan.seconds,
        "bound": plan.bound,
        "predicted_step_seconds": plan.predicted_step_seconds,
        "is_bound": plan.is_bound,
        "unit": plan.unit,
        "predicted_tokens_per_second": _rate(plan),
        "predicted_mfu": plan.predicted_mfu,
        "dearest": [{"source": source, "seconds": seconds} for source, seconds in plan.operations],
    }


def described(plan: Plan, *, remedy: str | None = None, cost: dict[str, float] | None = None) -> list[str]:
    """Formats a plan as lines of text, with the results of `_remedy` and `_cost`, if any."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
    hosts, shares = plan.hosts
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.batch.items())
    reading = f"{hosts} host{'s' * (hosts > 1)}"
    if hosts > 1:
        examples = next(iter(plan.batch.values()))[0]  # the first axis of every array of a batch
        reading += f", each reads {examples // shares} of {examples} examples"
        reading += "" if shares == hosts else f" ({shares} shares)"
    lines = [
        f"devices      {plan.num_devices} x {plan.device_kind}, {mesh}; {reading}",
        f"model        {plan.num_params / 1e6:,.1f} M parameters; largest batch: {shapes}",
    ]
    limit = "" if plan.memory_bytes is None else f" of {plan.memory_bytes / _GIB:.2f}"
    if not plan.fits:
        verdict = "does not fit" if plan.compiles else "does not compile"
        lines.append(f"{verdict:<13}{plan.error}")
        return lines + ([f"would fit    {remedy}"] if remedy else [])
    lines.append(
        f"memory       fits: {plan.peak_bytes / _GIB:.2f}{limit} GiB (state, batch {plan.argument_bytes / _GIB:.2f}, "
        f"temporary {plan.temporary_bytes / _GIB:.2f})"
    )
    exchanged = ", ".join(
        f"{kind} {total['count']:,} ({total['bytes'] / 2**20:,.1f} MiB)" for kind, total in plan.collectives.items()
    )
    lines.append(f"exchanges    {exchanged or 'none'}" + (f"; {plan.async_share:.0%} hidden" if exchanged else ""))
    if plan.seconds:
        bounds = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in plan.seconds.items())
        bounds += "; custom kernels are estimated at half the peak" * ("kernels" in plan.seconds)
        lines.append(f"bound        {plan.bound} ({bounds})")
    seconds, mfu = plan.predicted_step_seconds, plan.predicted_mfu
    if seconds is not None:
        utilization = "" if mfu is None else f", MFU {mfu:.1%}"
        at_least, at_most = ("at least ", "at most ") if plan.is_bound else ("", "")
        lines.append(
            f"prediction   {at_least}{1e3 * seconds:.2f} ms a step, {at_most}{_rate(plan):,.0f} {plan.unit}s/s"
            f"{utilization}"
        )
    if cost is not None:
        lines.append(
            f"cost         {cost['training']:,.2f} for the training, {cost['million_tokens']:.4f} for a million "
            f"{plan.unit}s"
        )
    for source, seconds in plan.operations:
        lines.append(f"slowest      {1e3 * seconds:7.2f} ms  {source}")
    return lines


def _search(config: ExperimentConfig, devices: Sequence[Any], arguments: argparse.Namespace) -> int:
    """Prints the plans of `variants` that fit, fastest first, and returns the exit status: 0 if any fits, else 1."""
    results = []  # (flags, plan or None if the configuration is invalid, error or None)
    progress = Progress()
    for flags, variant in variants(config, len(devices)):
        progress.stage(f"compiling {flags}", is_logged=True)
        try:
            plan = plan_training(variant, devices, num_slices=arguments.slices)
        except UserError as error:  # a mesh that the model or the batch does not allow
            results.append((flags, None, str(error)))
            continue
        results.append((flags, plan, plan.error))
    progress.clear()
    fitting = [(flags, plan) for flags, plan, _ in results if plan is not None and plan.fits]
    fitting.sort(key=lambda pair: (pair[1].predicted_step_seconds or 0.0, pair[1].peak_bytes))
    if arguments.json:
        ranked = [as_json(plan) | {"flags": flags} for flags, plan in fitting]
        refused = [{"flags": flags, "error": error} for flags, plan, error in results if plan is None or not plan.fits]
        print(json.dumps({"ranked": ranked, "refused": refused}))
        return 0 if fitting else 1
    for flags, plan in fitting:
        seconds = plan.predicted_step_seconds
        predicted = "" if seconds is None else f"{1e3 * seconds:9.2f} ms  {_rate(plan):12,.0f} {plan.unit}s/s  "
        print(f"{predicted}{plan.peak_bytes / _GIB:6.2f} GiB  {flags}")
    for flags, plan, error in results:
        if plan is None or not plan.fits:
            print(f"{flags}: {error}", file=sys.stderr)
    return 0 if fitting else 1


def _remedy(
    config: ExperimentConfig, devices: Sequence[Any], arguments: argparse.Namespace, progress: Progress
) -> str | None:
    """Returns the flags of the first alternative configuration that fits; None if none does."""
    for flags, changed in alternatives(config, len(devices)):
        progress.stage(f"does not fit; trying {flags}", is_logged=True)
        try:
            if plan_training(changed, devices, num_slices=arguments.slices).fits:
                return flags
        except UserError:  # such as a batch that the mesh does not divide
            continue
    return None


def _devices(topology: str, num_slices: int) -> Sequence[Any]:
    """Makes JAX use the CPU in this process, and returns the devices of a topology, which are absent or simulated.

    Raises:
      UserError: if there is no such topology, or JAX already started with too few simulated devices.
    """
    jax.config.update("jax_platforms", "cpu")
    kind, _, count = topology.partition(":")
    if kind != "cpu":
        return absent_devices(topology, num_slices)
    if not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"--topology={topology}: simulated devices have the form cpu:N with N at least 1, such as cpu:8"
        )
    if num_slices > 1:
        raise UserError(f"--topology={topology} has no slices: leave --slices={num_slices} out")
    with contextlib.suppress(RuntimeError):  # raised if JAX has already initialized its devices
        jax.config.update("jax_num_cpu_devices", int(count))
    if len(jax.devices()) < int(count):
        raise UserError(
            f"--topology={topology}: JAX already started in this process with {len(jax.devices())} devices, but the "
            f"plan simulates {count}: run the command in a new process"
        )
    return jax.devices()[: int(count)]


def _rate(plan: Plan) -> float | None:
    """Returns the predicted tokens, or what else `Plan.unit` names, per second; None without a predicted time."""
    return None if plan.predicted_step_seconds is None else plan.tokens / plan.predicted_step_seconds


def _cost(plan: Plan, config: ExperimentConfig, price: float | None) -> dict[str, float] | None:
    """Returns the cost of the whole run ("training") and of a million tokens, from the price of a device per hour.

    None without a price or a predicted time.
    """
    if price is None or plan.predicted_step_seconds is None:
        return None
    step_cost = price / 3600 * plan.num_devices * plan.predicted_step_seconds
    return {"training": step_cost * config.num_steps, "million_tokens": step_cost / plan.tokens * 1e6}


def _price(text: str) -> float:
    """Parses the value of --price."""
    try:
        price = float(text)
    except ValueError:
        price = -1.0  # rejected below
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a price: give a finite number of at least 0')
    return price
