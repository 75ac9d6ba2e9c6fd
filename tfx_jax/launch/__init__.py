"""Runs a command on several processes or machines: this machine, a Cloud TPU slice, XPK, a JobSet, Slurm.

A target is a module with a `SUMMARY`, `add_options(parser)` and `plan(options, command)`, where `command` is a verb of
`tfx-jax` and its arguments. A target first plans, then starts, so that `--dry-run` prints exactly what would run. Read
`plan`, then `local`, then any other target.
"""

from tfx_jax.launch import jobset, local, slurm, tpu_vm, xpk
from tfx_jax.launch.plan import Plan

__all__ = ["TARGETS", "Plan"]

TARGETS = {"local": local, "tpu-vm": tpu_vm, "xpk": xpk, "jobset": jobset, "slurm": slurm}
"""Targets by their names on the command line."""
