"""The training program of an experiment, which the loop runs and `tfx-jax bench step` measures."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tfx_jax.errors import UserError
from tfx_jax.models.config import SelfAttentionConfig
from tfx_jax.nn.lora import matrices_of
from tfx_jax.nn.stack import is_stack
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.optimizer import averaged_params, make_optimizer
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
    """Builds the step function and the first state of an experiment on a mesh, sharded and not yet compiled.

    Args:
      config: configuration of the experiment.
      make_model: builds the model.
      loss_fn: loss and metrics of a batch, see `tfx_jax.training.step.update`.
      mesh: mesh from `make_mesh`.
      make_carry: returns the carry of the first batch; only for models with a memory of earlier batches.

    Returns:
      A `TrainSetup`: step function, function that returns the first state, shapes and shardings of the state, and
      function that returns the optimizer's state for parameters.

    Raises:
      UserError: if the configuration names an attention kernel that the devices do not support, or Muon for a model
        without hidden matrices.
    """
    if isinstance(config.model, SelfAttentionConfig):
        check_kernels(config.model.attention, mesh)
    matrices: dict[str, tuple[int, int]] = {}
    if config.optimizer.name == "muon":
        matrices = hidden_matrices(nnx.eval_shape(make_model))
        if not matrices:
            raise UserError(
                'config.optimizer.name="muon" orthogonalizes the trained matrices of layers, and this model has none: '
                'use "adamw"'
            )
    is_schedule_free = config.optimizer.name == "schedule_free"
    averaged = functools.partial(averaged_params, config.optimizer) if is_schedule_free else None
    return shard_training(
        mesh,
        make_model,
        loss_fn,
        make_optimizer(config.optimizer, config.model.d_model, config.num_steps, matrices),
        make_carry=make_carry,
        accumulate=config.accumulate,
        # A spike of the loss is handled like a gradient that is not finite: the step is skipped.
        skip_bad_steps=config.bad_steps == "skip" or config.spike_factor > 0,
        spike_factor=config.spike_factor,
        has_ema=config.optimizer.ema_decay > 0 or averaged is not None,
        ema_decay=config.optimizer.ema_decay,
        averaged_params=averaged,
    )


def hidden_matrices(model: nnx.Module) -> dict[str, tuple[int, int]]:
    """Returns the trained matrices in stacks of layers: by path, the numbers of their input and output axes."""
    return {
        path: (num_inputs, num_axes - num_inputs)
        for path, _, _, num_inputs, num_axes in matrices_of(model)
        if any(map(is_stack, path.split("/")))
    }


def base_rng(config: ExperimentConfig) -> Array:
    """Returns the PRNG key of a whole run; every step folds in its number."""
    return jax.random.key(config.seed)
