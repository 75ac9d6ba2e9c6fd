"""Where a training starts from other parameters than drawn ones: `config.init_from`."""

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx

from tfx_jax.data.tokenizers.hf_tokenizer import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.attention import AttentionConfig
from tfx_jax.nn.lora import merge_params
from tfx_jax.training.checkpoint.artifacts import check_artifact
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.config import ExperimentConfig, load_valid_config
from tfx_jax.training.sharding.strategies import TrainSetup
from tfx_jax.training.step import Params, TrainState
from tfx_jax.training.workdir import is_workdir

# What an experiment decides whatever it starts from, beside dropout.
_KEPT = ("attention", "coverage", "dtype", "remat", "unroll", "tagger")


def adopt_pretrained_config(config: ExperimentConfig) -> ExperimentConfig:
    """Gives the model the sizes of the one it starts from, if it does; dropout, dtype and the like stay.

    So do attention and coverage that the experiment names; where it has none but the default, that of what it starts
    from is taken, such as BigBird's.

    Raises:
      UserError: if there is nothing, or a model of another class.
    """
    if not config.init_from:
        return config
    source: Any = _initial_config(local_folder(config.init_from))
    model: Any = config.model
    if type(source) is not type(model):
        names = type(source).__name__, type(model).__name__
        raise UserError(f"config.init_from={config.init_from} has a {names[0]}, but the experiment has a {names[1]}")
    names = {field.name for field in dataclasses.fields(model)}
    kept = {name: getattr(model, name) for name in names if name in _KEPT or name.endswith("dropout_rate")}
    for name, default in (("attention", AttentionConfig()), ("coverage", None)):
        if kept.get(name, default) == default:
            kept.pop(name, None)
    return dataclasses.replace(config, model=dataclasses.replace(source, **kept))


def tokenizer_folder(init_from: epath.PathLike) -> epath.Path:
    """The folder of the tokenizer that a model to start from was trained with; UserError if it is damaged."""
    folder = local_folder(init_from)
    if not is_workdir(folder):
        return folder
    check_artifact(folder, "tokenizer")
    return folder / "tokenizer"


def init_from_state(training: TrainSetup, init_from: epath.PathLike) -> tuple[TrainState, str]:
    """The first state of a training with the parameters and model state of another, as far as both have them.

    Parameters match that have one path and one shape; heads of other sizes are drawn, as is whatever is missing.

    Returns:
      The state, and what was taken, for a person.

    Raises:
      UserError: if no parameter matches.
    """
    state = training.first_state()
    drawn = _flat(state.variables)
    found = _flat(_initial_params(local_folder(init_from)))
    taken = {path: value for path, value in found.items() if path in drawn and drawn[path].shape == value.shape}
    if not taken:
        raise UserError(f"config.init_from={init_from} has no parameter of this model")

    def place(path: Any, leaf: jax.Array) -> jax.Array:  # the first of the path is which of both trees
        value = taken.get(_name(path[1:]))
        if value is None:
            return leaf
        value = np.asarray(value, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    params, model_state = jax.tree_util.tree_map_with_path(place, (state.params, state.model_state))
    new = sorted(drawn.keys() - taken.keys())
    text = f"starts from {init_from}: {len(taken)} of {len(drawn)} arrays"
    return state._replace(params=params, model_state=model_state), f"{text}; drawn: {', '.join(new)}" if new else text


def _initial_config(folder: epath.Path) -> Any:
    if not is_workdir(folder):
        return hf.load_config(folder)
    model: Any = load_valid_config(folder).model
    return dataclasses.replace(model, vocab_size=load_folder_tokenizer(tokenizer_folder(folder)).vocab_size)


def _initial_params(folder: epath.Path) -> Params:
    if is_workdir(folder):
        params, lora = load_best_params(folder), load_valid_config(folder).lora
        return merge_params(params, lora) if lora.rank else params
    model = hf.load(folder)
    params = nnx.to_pure_dict(nnx.state(model))
    body = getattr(model, "name_below_heads", None)  # a body alone is what models with heads contain
    return params if body is None else {body: params}


def _flat(params: Params) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
