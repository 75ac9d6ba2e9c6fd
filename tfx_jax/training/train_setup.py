"""The training program of an experiment, which the loop runs and `tfx-jax bench step` measures."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.models.config import SelfAttentionConfig
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.sharding.layers import check_kernels
from tfx_jax.training.sharding.strategies import TrainSetup, shard_training
from tfx_jax.training.step import LossFn


def make_train_setup(
    config: ExperimentConfig,
    make_model: Callable[[], nnx.Module],
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    make_carry: Callable[[], Any] = lambda: None,
) -> TrainSetup:
    """Builds the sharded training program of an experiment for a mesh.

    Raises:
      UserError: if the configuration names an attention kernel that the devices do not support.
    """
    if isinstance(config.model, SelfAttentionConfig):
        check_kernels(config.model.attention, mesh)
    return shard_training(
        mesh,
        make_model,
        loss_fn,
        make_optimizer(config.optimizer, config.model.d_model, config.num_steps),
        make_carry=make_carry,
        accumulate=config.accumulate,
        skip_bad_steps=config.bad_steps == "skip" or config.spike_factor > 0,
        spike_factor=config.spike_factor,
    )


def base_rng(config: ExperimentConfig) -> Array:
    """Returns the PRNG key of a whole run; every step folds in its number."""
    return jax.random.key(config.seed)
