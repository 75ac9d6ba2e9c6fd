"""Launches a workload on a GKE cluster through XPK: https://github.com/AI-Hypercomputer/xpk."""

import argparse
import functools
import math
import shlex
from collections.abc import Sequence

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import Plan, add_grace_option, dns_label, execute, literal, require_shared_workdir
from tfx_jax.planning.topologies import TOPOLOGIES
from tfx_jax.training.sharding.distributed import RESTART

SUMMARY = "TPU slices of a GKE cluster, through XPK"

# For each family of TPU types, its name in `tfx-jax plan`, and how many a type counts per chip: v4 and v5p count cores.
_GENERATIONS = {"v4": ("v4", 2), "v5litepod": ("v5e", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}


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
    text, topology = "\n".join(lines) + "\n", _topology(options.tpu_type)
    unknown = "" if topology else f"--tpu-type={options.tpu_type} is no TPU type that is known here: {_known_types()}"
    return Plan(text, "xpk", start, topology, options.num_slices, unknown)


def _topology(tpu_type: str) -> str | None:
    """Returns the topology of a TPU type as `tfx-jax plan` names it; None for an unknown type.

    >>> _topology("v5litepod-256"), _topology("v5p-16"), _topology("v6e-3")
    ('v5e:16x16', 'v5p:2x2x2', None)
    """
    return _types().get(tpu_type)


def _types() -> dict[str, str]:
    """Returns the topology of each TPU type: {"v4-8": "v4:2x2x1", ...}."""
    types = {}
    for family, (generation, count_per_chip) in _GENERATIONS.items():
        for topology in TOPOLOGIES:
            name, _, shape = topology.partition(":")
            if name == generation:
                types[f"{family}-{math.prod(map(int, shape.split('x'))) * count_per_chip}"] = topology
    return types


def _known_types() -> str:
    """Returns the first and the last TPU type of each family, for a message."""
    families = [[one for one in _types() if one.startswith(f"{family}-")] for family in _GENERATIONS]
    return "use " + ", ".join(f"{types[0]} to {types[-1]}" for types in families)
