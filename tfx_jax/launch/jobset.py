"""A JobSet for TPU slices of a GKE cluster: https://jobset.sigs.k8s.io."""

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

SUMMARY = "TPU slices of a GKE cluster, by a JobSet (0.10.1 or newer)"
_CONTAINER = "tfx-jax"

# GKE's names of TPUs, and ours: https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
_GENERATIONS = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}


def add_options(parser: Parser) -> None:
    """Adds what this target asks for."""
    parser.add_argument("--name", type=dns_label, required=True, help="of the JobSet")
    parser.add_argument("--image", required=True, help="container image with this package and the experiment file")
    parser.add_argument("--accelerator", required=True, help="GKE's name of the TPU, for example tpu-v6e-slice")
    parser.add_argument("--topology", type=_topology, required=True, help="of one slice, for example 4x4")
    parser.add_argument("--chips-per-host", type=at_least_one, default=4, metavar="N", help="chips of one node (4)")
    parser.add_argument("--num-slices", type=at_least_one, default=1, metavar="N", help="number of slices (1)")
    parser.add_argument("--queue", help="Kueue's LocalQueue to wait in")
    parser.add_argument("--namespace", help="that of kubectl's context by default")
    parser.add_argument("--service-account", help="Kubernetes account that may write to the bucket of --workdir")
    parser.add_argument(
        "--max-restarts", type=at_least_one, default=10, metavar="N", help="after failures; preemptions are free (10)"
    )
    add_grace_option(parser, 300, "between SIGTERM and SIGKILL")


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans the creation of one JobSet."""
    require_shared_workdir(command)
    text = yaml.safe_dump(manifest(options, command), sort_keys=False, allow_unicode=True)
    # `apply` would say nothing and do nothing where a finished JobSet of the same name is left.
    start = functools.partial(execute, ["kubectl", "create", "--filename=-"], text)
    generation = _GENERATIONS.get(options.accelerator)
    topology = None if generation is None else f"{generation}:{options.topology}"
    return Plan(text, "kubectl", start, topology, options.num_slices)


def manifest(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The JobSet as nested dictionaries; one Job for each slice, one pod for each of its hosts."""
    chips = math.prod(map(int, options.topology.split("x")))
    if chips % options.chips_per_host:
        raise UserError(
            f"--topology={options.topology} is {chips} chips, which --chips-per-host={options.chips_per_host} "
            "does not divide"
        )
    num_hosts = chips // options.chips_per_host
    metadata: dict[str, Any] = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    # A slice is a node pool: no two Jobs may meet in one.
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one process cannot go on alone: any failure is the slice's
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
    """Restarts what was saved or evicted however often, never a mistake, and `max_restarts` times what failed.

    Kubernetes gives every match of a podFailurePolicy the same reason and tells them apart in the message alone:
    "Container C for pod P failed with exit code 143 matching FailJob rule at index 0".
    """

    def rule(name: str, action: str, *patterns: str) -> dict[str, Any]:
        return {
            "name": name,
            "action": action,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": list(patterns),
        }

    saved = f"failed with exit code ({'|'.join(map(str, SAVED))}) "
    return {
        "maxRestarts": max_restarts,
        # Every old pod is gone before a new one starts: two trainings must not write to one workdir.
        "restartStrategy": "BlockingRecreate",
        "rules": [
            rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", saved, "has condition DisruptionTarget "),
            rule("mistake", "FailJobSet", f"failed with exit code {MISTAKE} "),
        ],
    }


def _pod(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # which a podFailurePolicy asks for
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
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise argparse.ArgumentTypeError(f'"{text}" is not a topology such as 4x4 or 2x2x4')
    return text
