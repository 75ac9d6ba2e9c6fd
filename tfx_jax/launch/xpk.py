"""Launches a workload on a GKE cluster through XPK: https://github.com/AI-Hypercomputer/xpk."""

import argparse
import functools
import shlex
from collections.abc import Sequence

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import Plan, add_grace_option, dns_label, execute, literal, require_shared_workdir
from tfx_jax.planning.topologies import CLOUD_TYPES
from tfx_jax.training.sharding.distributed import RESTART

SUMMARY = "TPU slices of a GKE cluster, through XPK"


def add_options(parser: Parser) -> None:
    """Adds the flags of this target."""
    parser.add_argument("--name", type=dns_label, required=True, help="name of the workload")
    parser.add_argument("--cluster", required=True, help="name of the GKE cluster")
    parser.add_argument("--tpu-type", required=True, help="TPU type of one slice, for example v5litepod-16")
    parser.add_argument("--image", required=True, help="container image with this package and the experiment file")
    parser.add_argument(
        "--num-slices", type=at_least_one, default=1, metavar="N", help="number of TPU slices; %(default)s by default"
    )
    parser.add_argument("--zone", help="zone of the cluster; by default that of gcloud's configuration")
    parser.add_argument(
        "--project", help="Google Cloud project of the cluster; by default that of gcloud's configuration"
    )
    parser.add_argument(
        "--max-restarts",
        type=at_least_one,
        default=50,
        metavar="N",
        help="restarts allowed, including those after preemptions; %(default)s by default",
    )
    add_grace_option(parser, default=300, meaning="seconds between SIGTERM and SIGKILL when a pod is stopped")


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans one call of xpk."""
    require_shared_workdir(command)
    for argument in command:
        if not argument.isprintable():
            raise UserError(
                f"XPK writes the command on one line of a YAML file, but {argument!r} has line breaks or control "
                "characters"
            )
    argv = [
        *("xpk", "workload", "create"),
        f"--workload={options.name}",
        f"--cluster={options.cluster}",
        f"--tpu-type={options.tpu_type}",
        f"--num-slices={options.num_slices}",
        f"--docker-image={options.image}",
        f"--max-restarts={options.max_restarts}",
        # XPK restarts after 42 and 127 to 255, thus after a signal; 1 is an unexpected error.
        f"--restart-on-exit-codes=1,{RESTART}",
        f"--termination-grace-period-seconds={options.grace}",
        # XPK sends SIGTERM to the shell that runs this command; exec replaces the shell by the run.
        f"--command=exec {literal(shlex.join(['tfx-jax', *command]))}",
    ]
    argv += [f"--{name}={value}" for name in ("zone", "project") if (value := getattr(options, name))]
    # As a script, "xpk workload create" with one option per line.
    lines = ["#!/usr/bin/env bash", " \\\n  ".join([" ".join(argv[:3]), *map(shlex.quote, argv[3:])])]
    start = functools.partial(execute, argv)
    text, topology = "\n".join(lines) + "\n", CLOUD_TYPES.get(options.tpu_type)
    unknown = "" if topology else f"--tpu-type={options.tpu_type} is no TPU type that is known here: {_known_types()}"
    return Plan(text, "xpk", start, topology, options.num_slices, unknown)


def _known_types() -> str:
    """Returns the first and the last TPU type of each family, for a message."""
    last = {name.partition("-")[0]: name for name in CLOUD_TYPES}  # by family, the last of its types
    first = {name.partition("-")[0]: name for name in reversed(CLOUD_TYPES)}
    return "use " + ", ".join(f"{first[family]} to {last[family]}" for family in last)
