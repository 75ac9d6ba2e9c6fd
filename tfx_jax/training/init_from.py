"""Starting a run from the parameters of another run or a pretrained model: `config.init_from`."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from tfx_jax.arrays import leaves_by_path, path_name
from tfx_jax.errors import UserError
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.attention import AttentionConfig
from tfx_jax.nn.lora import first_magnitude
from tfx_jax.training.checkpoint.artifacts import has_checkpoints
from tfx_jax.training.checkpoint.base import base_record, initial_params
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.config import ExperimentConfig, load_config, load_valid_config
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import TrainSetup
from tfx_jax.training.step import TrainState
from tfx_jax.training.workdir import is_workdir

# Model fields that the experiment decides, not the initial model; so do all dropout rates.
_KEPT = ("attention", "coverage", "dtype", "problem_type", "remat", "unroll", "tagger")


def adopt_pretrained_config(config: ExperimentConfig, workdir: epath.PathLike | None = None) -> ExperimentConfig:
    """Returns the configuration with the model sizes of `config.init_from`; unchanged if `init_from` is empty.

    If `workdir` has a run that started from there, the sizes are those of the run: it can be resumed without the
    initial model, unless its checkpoints leave out frozen parameters.

    The fields `_KEPT` and all dropout rates keep the experiment's values. Exceptions are `attention` and `coverage`: if
    the experiment has their defaults, those of the initial model are taken, such as BigBird's attention.

    Raises:
      UserError: if there is no model at `init_from`, or its configuration is of another class.
    """
    if not config.init_from:
        return config
    saved = _saved_config(workdir)
    if saved is not None and saved.init_from == config.init_from:
        initial: Any = saved.model
    else:
        initial = _initial_config(local_folder(config.init_from))
    model: Any = config.model
    if type(initial) is not type(model):
        initial_kind, kind = type(initial).__name__, type(model).__name__
        raise UserError(f"config.init_from={config.init_from} has a {initial_kind}, but the experiment has a {kind}")
    names = {field.name for field in dataclasses.fields(model)}
    kept = {name: getattr(model, name) for name in names if name in _KEPT or name.endswith("dropout_rate")}
    for name, default in (("attention", AttentionConfig()), ("coverage", None)):
        if kept.get(name, default) == default:
            kept.pop(name, None)
    return dataclasses.replace(config, model=dataclasses.replace(initial, **kept))


def init_from_state(
    training: TrainSetup, init_from: str, frozen: Collection[str] = ()
) -> tuple[TrainState, dict[str, Any] | None, str]:
    """Returns the first state of a run with the parameters and model state of another model.

    Arrays are copied if path and shape are equal in both models. All others, such as heads of another size, keep their
    random initial values.

    Args:
      training: training program of the run.
      init_from: workdir or Hugging Face folder of the initial model, or its name on the hub.
      frozen: paths of the parameters that are not trained.

    Returns:
      The state; the record of the frozen arrays that were copied (see `checkpoint.base`), or None if there are none;
      and a message that says how many arrays were copied and which were not.

    Raises:
      UserError: if no array can be copied, or the model cannot be read.
    """
    state = training.first_state()
    expected = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves_by_path(state.variables).items()}
    initial = leaves_by_path(initial_params(local_folder(init_from), load_best_params))
    copied: dict[str, np.ndarray] = {}  # arrays of the initial model that this model has too, by path
    for path, value in initial.items():
        shape, dtype = expected.get(path, (None, None))
        if shape == value.shape:
            copied[path] = np.asarray(value, dtype)
    if not copied:
        raise UserError(f"config.init_from={init_from} has no parameter of this model")
    # Adapters with DoRA start with the norms of the copied matrices.
    magnitudes: dict[str, np.ndarray] = {}
    for path in expected:
        adapter, _, name = path.rpartition("/")
        kernel = copied.get(adapter.removesuffix("_adapter"))
        if name == "magnitude" and kernel is not None:
            a, b = (expected[f"{adapter}/{matrix}"][0] for matrix in "ab")
            magnitudes[path] = np.asarray(first_magnitude(jnp.asarray(kernel), a, b))

    def copy(path: Any, leaf: jax.Array) -> jax.Array:
        """Returns the initial model's array with the dtype and sharding of `leaf`, or `leaf` if there is none."""
        name = path_name(path[1:])  # path[0] is the index in the pair (params, model_state)
        value = copied.get(name, magnitudes.get(name))
        if value is None:
            return leaf
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    # Free the old optimizer state and average before new ones are made: both may not fit into memory.
    has_ema = state.ema is not None
    state = state._replace(opt_state=None, ema=None)
    params, model_state = jax.tree_util.tree_map_with_path(copy, (state.params, state.model_state))
    not_copied = sorted(expected.keys() - copied.keys() - magnitudes.keys())
    message = f"starts from {init_from}: {len(copied)} of {len(expected)} arrays"
    if not_copied:
        message += f"; randomly initialized: {', '.join(not_copied)}"
    left_out = {path: copied[path] for path in frozen if path in copied}
    record = base_record(init_from, left_out) if left_out else None
    state = state._replace(params=params, model_state=model_state)
    ema = jax.tree.map(jnp.copy, params) if has_ema else None
    opt_state = training.init_optimizer(params)  # "schedule_free" begins at the parameters
    return state._replace(opt_state=opt_state, ema=ema), record, message


def _saved_config(workdir: epath.PathLike | None) -> ExperimentConfig | None:
    """Returns the configuration of a run with checkpoints, or None if there is no such run."""
    folder = None if workdir is None else epath.Path(workdir)
    if folder is None or not (has_checkpoints(folder) and (folder / "config.json").exists()):
        return None
    return load_config(folder)


def _initial_config(folder: epath.Path) -> Any:
    """Returns the model configuration of a workdir (with the vocabulary size of its task) or pretrained model."""
    if not is_workdir(folder):
        return hf.load_config(folder)
    config = load_valid_config(folder)
    model: Any = config.model
    if "vocab_size" not in {field.name for field in dataclasses.fields(model)}:  # images
        return model
    task = make_run(config, folder, can_make=False).task
    return dataclasses.replace(model, vocab_size=task.model_config.vocab_size)
