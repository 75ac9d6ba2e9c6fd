"""Checkpoints of a run and the files that belong to them.

`checkpoints` saves, restores and averages parameters; `artifacts` stores tokenizers and labels with their checksums.
`base` reads the model that a run starts from, and its frozen parameters, which checkpoints leave out.
"""

from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts
from tfx_jax.training.checkpoint.checkpoints import (
    Checkpoints,
    average_checkpoints,
    best_or_latest_step,
    load_best_params,
    load_params,
    saved_checksums,
)

__all__ = [
    "Checkpoints",
    "WorkdirArtifacts",
    "average_checkpoints",
    "best_or_latest_step",
    "load_best_params",
    "load_params",
    "saved_checksums",
]
