"""Launching a command on several processes or machines: this one, a Cloud TPU slice, XPK, a JobSet, Slurm.

A target is a module with a `SUMMARY`, `add_options(parser)` and `plan(options, command)`, where `command` is a verb of
`tfx-jax` and its arguments. It plans first and starts later, so that `--dry-run` shows exactly what would happen. Read
`plan`, then `local`, then any other target.
"""

from tfx_jax.launch import jobset, local, slurm, tpu_vm, xpk
from tfx_jax.launch.plan import Plan

__all__ = ["TARGETS", "Plan"]

TARGETS = {"local": local, "tpu-vm": tpu_vm, "xpk": xpk, "jobset": jobset, "slurm": slurm}
"""By their names on the command line."""
