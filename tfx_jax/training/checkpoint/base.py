"""The pretrained model that a run starts from: its parameters, and the record that checkpoints keep of frozen ones.

Frozen parameters that a run copied from `config.init_from` never change, so its checkpoints do not store them. They
store a record instead: where the model was, the paths and dtypes of these arrays, and a checksum of their values.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath
from flax import nnx

from tfx_jax.errors import UserError, one_line
from tfx_jax.files import is_local
from tfx_jax.hub import local_folder
from tfx_jax.models import hf
from tfx_jax.nn.lora import LoraConfig, merge_params
from tfx_jax.training.checkpoint.artifacts import read_sealed
from tfx_jax.training.workdir import is_workdir

Tree = dict[str, Any]


def initial_params(folder: epath.Path, load_workdir: Callable[[epath.Path], Tree]) -> Tree:
    """Returns the parameters of a pretrained model, or those of a workdir with LoRA adapters merged.

    Args:
      folder: Hugging Face folder or workdir.
      load_workdir: returns the best parameters of a workdir.

    Raises:
      UserError: if there is no model, or it cannot be read.
    """
    if is_workdir(folder):
        lora = _lora(folder / "config.json")
        params = load_workdir(folder)
        return merge_params(params, lora) if lora.rank else params
    model = hf.load(folder)
    params = nnx.to_pure_dict(nnx.state(model))
    # A pretrained encoder without a head: models with heads hold it in the attribute of this name.
    encoder_name = getattr(model, "base_model_prefix", None)
    return params if encoder_name is None else {encoder_name: params}


def _lora(path: epath.Path) -> LoraConfig:
    """Returns the adapters of a run; raises UserError if its configuration cannot be read."""
    try:
        return LoraConfig(**read_sealed(path).get("lora", {}))
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({one_line(error)}): restore a copy") from None


def absolute_source(source: str) -> str:
    """Returns the absolute path of a local folder; a name on the hub or a path in a store is returned unchanged."""
    return str(epath.Path(source).resolve()) if is_local(source) and os.path.exists(source) else source


def base_record(source: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the record, as JSON values, of arrays (by path) that checkpoints leave out."""
    dtypes = {path: array.dtype.name for path, array in sorted(arrays.items())}
    return {"source": absolute_source(source), "dtypes": dtypes, "checksum": _checksum(arrays)}


def read_base(
    record: dict[str, Any], workdir: epath.Path, load_workdir: Callable[[epath.Path], Tree]
) -> tuple[dict[str, np.ndarray], Tree]:
    """Reads the frozen arrays that the checkpoints of a run leave out from the model that the run started from.

    The model may be where `init_from` in `config.json` says, or at the recorded source. The first of these whose arrays
    are those of the record is used; a folder that exists is tried first.

    Args:
      record: value of `base_record`.
      workdir: folder of the run.
      load_workdir: as for `initial_params`.

    Returns:
      The arrays by path, and as nested dictionaries.

    Raises:
      UserError: if neither model can be read and has the values of the record.
    """
    try:
        configured = read_sealed(workdir / "config.json")["init_from"]
    except (OSError, ValueError, KeyError):  # config.json has its own checks
        configured = ""
    sources = dict.fromkeys(source for source in (configured, record["source"]) if source and isinstance(source, str))
    # Names that are no folder here come last, because they may be looked up on the hub.
    ordered = sorted(sources, key=lambda source: is_local(source) and not os.path.exists(source))
    problems = []
    for source in ordered:
        try:
            tree, arrays = _select(initial_params(local_folder(source), load_workdir), record["dtypes"])
        except (UserError, OSError, ValueError, TypeError) as error:
            reason = error if isinstance(error, UserError) else one_line(error)
            problems.append(
                f"the checkpoints in {workdir} do not contain the frozen parameters of {source}, which cannot be read "
                f"({reason})"
            )
            continue
        if arrays.keys() == record["dtypes"].keys() and _checksum(arrays) == record["checksum"]:
            return arrays, tree
        problems.append(
            f"{source} has changed since the run in {workdir} started from it, and the checkpoints do not contain its "
            "frozen parameters"
        )
    remedy = f"restore it, or write where it is as init_from into {workdir / 'config.json'}, without the line sha256"
    raise UserError(f"{'; '.join(problems)}: {remedy}")


def without(tree: Tree, paths: Any, prefix: str = "") -> Tree:
    """Returns nested dictionaries without the leaves at these paths, such as "decoder_layers/out/kernel"."""
    remaining = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            if inner := without(value, paths, f"{path}/"):
                remaining[name] = inner
        elif path not in paths:
            remaining[name] = value
    return remaining


def _select(tree: Tree, dtypes: dict[str, str], prefix: str = "") -> tuple[Tree, dict[str, np.ndarray]]:
    """Returns the leaves at the paths of `dtypes`, with these dtypes, as nested dictionaries and by path.

    Numbers as keys become strings, as in trees that Orbax restores, to which these are added.
    """
    selected, arrays = {}, {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            inner, inner_arrays = _select(value, dtypes, f"{path}/")
            if inner:
                selected[str(name)] = inner
                arrays |= inner_arrays
        elif path in dtypes:
            selected[str(name)] = arrays[path] = np.asarray(value, dtypes[path])
    return selected, arrays


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    """Returns a BLAKE2b checksum of paths, shapes, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for path, array in sorted(arrays.items()):
        digest.update(f"{path} {array.shape} {array.dtype.name};".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # the array's bytes
    return digest.hexdigest()
