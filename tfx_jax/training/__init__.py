"""Training: a model and a task as a run.

Read `config`, `step`, `optimizer`, `loop` and `run`, in this order. `sharding`, `checkpoint`, `reporting` and
`guards` are
packages beside them.
"""

from tfx_jax.training.config import ExperimentConfig, MeshConfig, OptimizerConfig, load_config, tiny_variant, validate
from tfx_jax.training.loop import Result, train
from tfx_jax.training.predictor import LoadedModel, Predictor, load
from tfx_jax.training.run import Run, load_run, make_run

__all__ = [
    "ExperimentConfig",
    "LoadedModel",
    "MeshConfig",
    "OptimizerConfig",
    "Predictor",
    "Result",
    "Run",
    "load",
    "load_config",
    "load_run",
    "make_run",
    "tiny_variant",
    "train",
    "validate",
]
