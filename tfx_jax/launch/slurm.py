"""Launches a batch job on GPU nodes of a Slurm cluster: https://slurm.schedmd.com/sbatch.html."""

import argparse
import functools
import re
import shlex
from collections.abc import Sequence

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.launch.plan import SAVED, Plan, add_grace_option, execute
from tfx_jax.training.sharding.distributed import RESTART

SUMMARY = "GPU nodes of a Slurm cluster"

# Under Slurm, JAX uses one process per GPU and selects the GPU by local process id, so all GPUs must be visible to all.
_SCRIPT = """\
#!/usr/bin/env bash
{directives}
status=0
# A process that still saves is not killed when another is done; one that hangs because another died is, later.
srun --gpu-bind=none --kill-on-bad-exit=0 --wait={grace} {command} || status=$?
# A line for each time that a process hung or died, which is {lost}, or 128 and the number of the signal that ended it.
# SLURM_RESTART_COUNT counts the restarts of saved jobs as well.
losses="slurm-$SLURM_JOB_ID.losses"
[[ {saved} || ($status != {lost} && $status -le 128) ]] || echo >> "$losses"
if [[ {saved} || (($status == {lost} || $status -gt 128) && $(wc -l < "$losses") -le {max_restarts}) ]]; then
  echo "status $status: back to the queue, to resume from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def add_options(parser: Parser) -> None:
    """Adds the flags of this target."""
    parser.add_argument("--name", type=_job_name, default="tfx-jax", help="name of the job; %(default)s by default")
    parser.add_argument(
        "--nodes", type=at_least_one, default=1, metavar="N", help="number of nodes; %(default)s by default"
    )
    parser.add_argument("--gpus-per-node", type=at_least_one, required=True, metavar="N", help="GPUs per node")
    parser.add_argument(
        "--time", type=_time, required=True, help="time limit of the job, for example 24:00:00 or 2-00:00:00"
    )
    parser.add_argument(
        "--sbatch",
        type=_directive,
        action="append",
        default=[],
        metavar="OPTION",
        help="additional option of sbatch, for example --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "--max-restarts",
        type=at_least_one,
        default=10,
        metavar="N",
        help="restarts allowed after a process hung or died; restarts of saved jobs do not count; %(default)s by "
        "default",
    )
    add_grace_option(
        parser, default=300, meaning="seconds before the time limit at which the run is asked to save and exit"
    )


def plan(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    """Plans one batch job."""
    directives = [
        f"--job-name={options.name}",
        f"--nodes={options.nodes}",
        f"--gpus-per-node={options.gpus_per_node}",
        f"--ntasks-per-node={options.gpus_per_node}",
        f"--time={options.time}",
        f"--signal=TERM@{options.grace}",  # sent to the processes of srun, not to the shell
        "--requeue",  # allows requeueing after a preemption or a node failure
        "--open-mode=append",
        *options.sbatch,
    ]
    text = _SCRIPT.format(
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        grace=options.grace,
        command=shlex.join(["tfx-jax", *command]),
        lost=RESTART,
        max_restarts=options.max_restarts,
        saved=" || ".join(f"$status == {status}" for status in SAVED),
    )
    return Plan(text, "sbatch", functools.partial(execute, ["sbatch"], text))


def _job_name(text: str) -> str:
    """Parses a name that sbatch accepts and that is safe in a script."""
    if not re.fullmatch(r"\w[-.\w]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f'"{text}" must consist of letters, digits, ".", "_" and "-"')
    return text


def _time(text: str) -> str:
    """Parses a time limit in one of sbatch's formats."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f'"{text}" must be a time such as 90 (minutes), 24:00:00 or 2-00:00:00')
    return text


def _directive(text: str) -> str:
    """Parses an option of sbatch, which becomes one line of the script."""
    if not text.startswith("-") or not text.isprintable():
        raise argparse.ArgumentTypeError(f'{text!r} must be an option of sbatch, beginning with "-", on one line')
    return text
