"""Launches a JobSet on TPU slices of a GKE cluster: https://jobset.sigs.k8s.io."""

import argparse
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.errors import UserError
from tfx_jax.launch.plan import (
    MISTAKE,
    SAVED,
    Plan,
    add_grace_option,
    dns_label,
    execute,
    literal,
    require_shared_workdir,
)

SUMMARY = "TPU slices of a GKE cluster, with a JobSet (version 0.10.1 or newer)"
_CONTAINER = "tfx-jax"

# GKE's names of TPU generations and those of `tfx-jax plan`:
# https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
_GENERATIONS = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}


class _Dumper(yaml.SafeDumper):
    """Quotes text that kubectl, unlike PyYAML, reads as a number or a boolean, such as 1e-3, 0o17 and y."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"([-+]?\.?\d.*|[yYnN])$"), None)


def add_options(parser: Parser) -> None:
    """Adds the flags of this target."""
    parser.add_argument("--name", type=dns_label, required=True, help="name of the JobSet")
    parser.add_argument("--image", required=True, help="container image with this package and the experiment file")
    parser.add_argument("--accelerator", required=True, help="GKE's name of the TPU type, for example tpu-v6e-slice")
    parser.add_argument("--topology", type=_topology, required=True, help="topology of one slice, for example 4x4")
    parser.add_argument(
        "--chips-per-host", type=at_least_one, default=4, metavar="N", help="TPU chips per node; %(default)s by default"
    )
    parser.add_argument(
        "--num-slices", type=at_least_one, default=1, metavar="N", help="number of TPU slices; %(default)s by default"
    )
    parser.add_argument("--queue", help="Kueue LocalQueue to submit the JobSet to")
    parser.add_argument("--namespace", help="Kubernetes namespace; by default that of kubectl's context")
    parser.add_argument(
        "--service-account", help="Kubernetes service account with write access to the bucket of --workdir"
    )
    parser.add_argument(
        "--max-restarts",
        type=at_least_one,
        default=10,
        metavar="N",
        help="restarts allowed after failures; preemptions do not count; %(default)s by default",
    )
    add_grace_option(parser, default=300, meaning="seconds between SIGTERM and SIGKILL when a pod is stopped")


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans `kubectl create` of one JobSet; nothing is started yet.

    Raises:
      UserError: if the command has a relative --workdir, or the topology does not divide into hosts.
    """
    require_shared_workdir(command)
    text = yaml.dump(manifest(options, command), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # Not `apply`, which silently does nothing if a finished JobSet of this name still exists.
    start = functools.partial(execute, ["kubectl", "create", "--filename=-"], text)
    generation = _GENERATIONS.get(options.accelerator)
    topology = None if generation is None else f"{generation}:{options.topology}"
    known = ", ".join(_GENERATIONS)
    unknown = (
        "" if topology else f"--accelerator={options.accelerator} is no TPU that is known here: use one of {known}"
    )
    return Plan(text, "kubectl", start, topology, options.num_slices, unknown)


def manifest(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Returns the JobSet as nested dictionaries: one Job per slice, one pod per host of the slice."""
    chips = math.prod(map(int, options.topology.split("x")))
    if chips % options.chips_per_host:
        raise UserError(
            f"--topology={options.topology} has {chips} chips, which is not a multiple of "
            f"--chips-per-host={options.chips_per_host}"
        )
    num_hosts = chips // options.chips_per_host
    metadata: dict[str, Any] = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    # A slice is a node pool, which two Jobs must not share.
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # if one process fails, the slice has failed: its other processes cannot continue
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": sorted({*SAVED, MISTAKE})},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(options, command)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": _failure_policy(options.max_restarts),
            "replicatedJobs": [{"name": "slice", "replicas": options.num_slices, "template": {"spec": job}}],
        },
    }


def _failure_policy(max_restarts: int) -> dict[str, Any]:
    """Returns rules that restart saved or evicted runs without limit, failed runs `max_restarts` times, mistakes never.

    Kubernetes gives every match of a podFailurePolicy the same reason; only the message distinguishes them:
    "Container C for pod P failed with exit code 143 matching FailJob rule at index 0".
    """

    def rule(name: str, action: str, *patterns: str) -> dict[str, Any]:
        """Returns a rule that applies `action` to failures whose message matches one of `patterns`."""
        return {
            "name": name,
            "action": action,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": list(patterns),
        }

    saved = f"failed with exit code ({'|'.join(map(str, SAVED))}) "
    return {
        "maxRestarts": max_restarts,
        # All old pods end before new ones start: two runs must not write to one workdir.
        "restartStrategy": "BlockingRecreate",
        "rules": [
            rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", saved, "has condition DisruptionTarget "),
            rule("mistake", "FailJobSet", f"failed with exit code {MISTAKE} "),
        ],
    }


def _pod(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Returns the specification of a pod that runs the command on one host of a slice."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # required by podFailurePolicy
        "terminationGracePeriodSeconds": options.grace,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": options.accelerator,
            "cloud.google.com/gke-tpu-topology": options.topology,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "containers": [
            {
                "name": _CONTAINER,
                "image": options.image,
                "command": [literal(argument) for argument in ("tfx-jax", *command)],
                "resources": {"limits": {"google.com/tpu": options.chips_per_host}},
            }
        ],
    }
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    return pod


def _topology(text: str) -> str:
    """Parses the chips of a slice in each dimension, such as "4x4"."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise argparse.ArgumentTypeError(f'"{text}" must be a topology such as 4x4 or 2x2x4')
    return text
