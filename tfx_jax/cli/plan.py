"""`tfx-jax plan`: whether a training starts, fits and pays on accelerators that are not there."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP
from tfx_jax.cli.support.progress import Progress
from tfx_jax.cli.train import CONFIG_HELP, load_config_file
from tfx_jax.errors import UserError
from tfx_jax.planning.plan import Plan, alternatives, plan_training, variants
from tfx_jax.planning.topologies import absent_devices
from tfx_jax.training.config import ExperimentConfig

_GIB = 2**30


def run(argv: Sequence[str]) -> int:
    """Compiles a training step and says what it would be; the exit status is 1 where it does not fit."""
    parser = Parser(
        "plan",
        "Compiles the training step of an experiment for a TPU slice or nodes of GPUs, without any and without the "
        "data, and says whether it starts and fits, what it exchanges and how long it should take. Times are "
        "predictions; those for GPUs are bounds: no step is faster.",
    )
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument(
        "--topology",
        required=True,
        help="such as v5e:4x4, v5p:2x2x2; of GPUs h100:1x8x8, slices x nodes x GPUs; cpu:8 is simulated",
    )
    parser.add_argument("--slices", type=at_least_one, default=1, help="how many such TPU slices (1)")
    parser.add_argument("--price", type=_price, help="of a device for an hour, to say what the training costs")
    parser.add_argument("--search", action="store_true", help="try meshes and rematerializations, and rank what fits")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead")
    parser.epilog = OVERRIDES_HELP
    arguments, overrides = parser.parse_known_args(argv)
    devices = _devices(arguments.topology, arguments.slices)
    set_up_program()
    config = load_config_file(arguments.config, overrides)
    if arguments.search:
        return _search(config, devices, arguments)
    progress = Progress()
    progress.stage(f"compiling for {arguments.topology}")
    plan = plan_training(config, devices, num_slices=arguments.slices)
    remedy = None if plan.fits or not plan.compiles else _remedy(config, devices, arguments, progress)
    progress.clear()
    cost = _cost(plan, config, arguments.price)
    if arguments.json:
        print(json.dumps(as_json(plan) | {"remedy": remedy, "cost": cost}))
    else:
        print("\n".join(described(plan, remedy=remedy, cost=cost)))
    return 0 if plan.fits else 1


def plan_topology(config: str, overrides: Sequence[str], topology: str, num_slices: int = 1) -> Plan:
    """Plans the training that `--config` and its overrides name.

    Raises:
      UserError: if there is no such configuration or topology, or it is impossible there.
    """
    devices = _devices(topology, num_slices)
    return plan_training(load_config_file(config, overrides), devices, num_slices=num_slices)


def as_json(plan: Plan) -> dict[str, Any]:
    """What `--json` prints of a plan."""
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
        "predicted_tokens_per_second": _rate(plan),
        "predicted_mfu": plan.predicted_mfu,
        "dearest": [{"source": source, "seconds": seconds} for source, seconds in plan.operations],
    }


def described(plan: Plan, *, remedy: str | None = None, cost: dict[str, float] | None = None) -> list[str]:
    """The same for a person, line by line."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
    hosts, shares = plan.hosts
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in plan.batch.items())
    reading = f"{hosts} host{'s' * (hosts > 1)}"
    if hosts > 1:
        rows = next(iter(plan.batch.values()))[0]
        reading += f", each reads {rows // shares} of {rows} rows" + ("" if shares == hosts else f" ({shares} shares)")
    lines = [
        f"devices      {plan.num_devices} x {plan.device_kind}, {mesh}; {reading}",
        f"model        {plan.num_params / 1e6:,.1f} M parameters; largest batch: {shapes}",
    ]
    limit = "" if plan.memory_bytes is None else f" of {plan.memory_bytes / _GIB:.2f}"
    if not plan.fits:
        why = "does not fit" if plan.compiles else "does not compile"
        lines.append(f"{why:<13}{plan.error}")
        return lines + ([f"would fit    {remedy}"] if remedy else [])
    lines.append(
        f"memory       fits: {plan.peak_bytes / _GIB:.2f}{limit} GiB (state, batch {plan.argument_bytes / _GIB:.2f}, "
        f"temporary {plan.temporary_bytes / _GIB:.2f})"
    )
    exchanged = ", ".join(
        f"{kind} {found['count']:,} ({found['bytes'] / 2**20:,.1f} MiB)" for kind, found in plan.collectives.items()
    )
    lines.append(f"exchanges    {exchanged or 'none'}" + (f"; {plan.async_share:.0%} hidden" if exchanged else ""))
    if plan.seconds:
        bounds = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in plan.seconds.items())
        bounds += "; kernels by an estimate of ours, at half the peak" * ("kernels" in plan.seconds)
        lines.append(f"bound        {plan.bound} ({bounds})")
    seconds, mfu = plan.predicted_step_seconds, plan.predicted_mfu
    if seconds is not None:
        utilization = "" if mfu is None else f", MFU {mfu:.1%}"
        step, at_most = (f"at least {1e3 * seconds:.2f}", "at most ") if plan.is_bound else (f"{1e3 * seconds:.2f}", "")
        lines.append(f"prediction   {step} ms a step, {at_most}{_rate(plan):,.0f} tokens/s{utilization}")
    if cost is not None:
        lines.append(
            f"cost         {cost['training']:,.2f} for the training, {cost['million_tokens']:.4f} for a million tokens"
        )
    for source, seconds in plan.operations:
        lines.append(f"dearest      {1e3 * seconds:7.2f} ms  {source}")
    return lines


def _search(config: ExperimentConfig, devices: Sequence[Any], arguments: argparse.Namespace) -> int:
    found, progress = [], Progress()
    for flags, variant in variants(config, len(devices)):
        progress.stage(f"compiling {flags}")
        try:
            plan = plan_training(variant, devices, num_slices=arguments.slices)
        except UserError as error:  # a mesh that the model or the batch does not allow
            found.append((flags, None, str(error)))
            continue
        found.append((flags, plan, plan.error))
    progress.clear()
    fitting = [(flags, plan) for flags, plan, _ in found if plan is not None and plan.fits]
    fitting.sort(key=lambda pair: (pair[1].predicted_step_seconds or 0.0, pair[1].peak_bytes))
    if arguments.json:
        ranked = [as_json(plan) | {"flags": flags} for flags, plan in fitting]
        refused = [{"flags": flags, "error": error} for flags, plan, error in found if plan is None or not plan.fits]
        print(json.dumps({"ranked": ranked, "refused": refused}))
        return 0 if fitting else 1
    for flags, plan in fitting:
        seconds = plan.predicted_step_seconds
        predicted = "" if seconds is None else f"{1e3 * seconds:9.2f} ms  {_rate(plan):12,.0f} tokens/s  "
        print(f"{predicted}{plan.peak_bytes / _GIB:6.2f} GiB  {flags}")
    for flags, plan, error in found:
        if plan is None or not plan.fits:
            print(f"{flags}: {error}", file=sys.stderr)
    return 0 if fitting else 1


def _remedy(
    config: ExperimentConfig, devices: Sequence[Any], arguments: argparse.Namespace, progress: Progress
) -> str | None:
    """The first change that fits; None where none does."""
    for flags, changed in alternatives(config, len(devices)):
        progress.stage(f"does not fit; trying {flags}")
        try:
            if plan_training(changed, devices, num_slices=arguments.slices).fits:
                return flags
        except UserError:  # such as rows that do not divide into so many parts
            continue
    return None


def _devices(topology: str, num_slices: int) -> Sequence[Any]:
    """Those of a topology; this process itself computes on its CPU, whatever else it has."""
    jax.config.update("jax_platforms", "cpu")
    kind, _, count = topology.partition(":")
    if kind != "cpu":
        return absent_devices(topology, num_slices)
    if not count.isdecimal() or int(count) < 1 or num_slices > 1:
        raise UserError(f"--topology={topology}: cpu:8 is eight simulated devices of one slice")
    with contextlib.suppress(RuntimeError):  # which says that JAX has made its devices before
        jax.config.update("jax_num_cpu_devices", int(count))
    if len(jax.devices()) < int(count):
        raise UserError(f"--topology={topology}: this process has {len(jax.devices())} devices already")
    return jax.devices()[: int(count)]


def _rate(plan: Plan) -> float | None:
    return None if plan.predicted_step_seconds is None else plan.tokens / plan.predicted_step_seconds


def _cost(plan: Plan, config: ExperimentConfig, price: float | None) -> dict[str, float] | None:
    if price is None or plan.predicted_step_seconds is None:
        return None
    of_step = price / 3600 * plan.num_devices * plan.predicted_step_seconds
    return {"training": of_step * config.num_steps, "million_tokens": of_step / plan.tokens * 1e6}


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is no price')
    return price
