"""Training: from a configuration of a model and a task to a trained model in a workdir.

Read `config`, `step`, `optimizer`, `loop` and `run`, in this order. The packages `sharding`, `checkpoint`, `reporting`
and `guards` support them.
"""

from tfx_jax.training.config import (
    ExperimentConfig,
    MeshConfig,
    OptimizerConfig,
    accelerator_variant,
    load_config,
    tiny_variant,
    validate,
)
from tfx_jax.training.loop import Result, train
from tfx_jax.training.predictor import LoadedModel, attention, load
from tfx_jax.training.run import Run, load_run, make_run

__all__ = [
    "ExperimentConfig",
    "LoadedModel",
    "MeshConfig",
    "OptimizerConfig",
    "Result",
    "Run",
    "accelerator_variant",
    "attention",
    "load",
    "load_config",
    "load_run",
    "make_run",
    "tiny_variant",
    "train",
    "validate",
]
