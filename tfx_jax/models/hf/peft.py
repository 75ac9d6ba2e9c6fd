"""Low-rank adapters in the folders of PEFT: adapter_config.json and adapter_model.safetensors.

`adapter_folder` says whether a folder is one; `AdaptedTensors` are the tensors of a model with an adapter merged into
them, whatever its family; `adapter_files` writes the adapters that `tfx_jax.nn.lora` gave a model.
"""

import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import check_regular
from tfx_jax.models.hf.folder import Fields, Tensors, read_json
from tfx_jax.models.hf.names import Row, write_params
from tfx_jax.nn.lora import Adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.*)\.lora_([AB])\.weight")
# Of what a configuration may say, all that changes the function and is not done here, with the value that it must have.
_REQUIRED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "layer_replication": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}
_TASKS = {"encoder_decoder": "SEQ_2_SEQ_LM", "decoder": "CAUSAL_LM"}


def is_adapter(folder: epath.Path) -> bool:
    """Whether a folder has an adapter and no model."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def base_of(folder: epath.Path) -> str:
    """Returns the folder, or the name on the hub, of the model that an adapter belongs to.

    Raises:
      UserError: if the adapter does not say it.
    """
    name = Fields(read_json(folder / CONFIG), folder / CONFIG).get("base_model_name_or_path", "")
    if not name:
        raise UserError(f"{folder / CONFIG} names no base_model_name_or_path: write there where the model is")
    return name


class AdaptedTensors(Tensors):
    """The tensors of a folder with an adapter merged into them."""

    def __init__(self, folder: epath.PathLike, renamed: Sequence[tuple[str, str]], adapter: epath.Path, prefix: str):
        """Reads an adapter, and finds the tensors of its model.

        Args:
          folder: of the model.
          renamed: as for `Tensors`.
          adapter: its folder.
          prefix: what names of tensors may have in front that those of the folder lack, or the other way round.

        Raises:
          UserError: as for `Tensors`, and if the adapter does not fit or does what is not supported.
        """
        super().__init__(folder, renamed)
        fields = Fields(read_json(adapter / CONFIG), adapter / CONFIG)
        fields.require(**_REQUIRED)
        self._is_transposed = fields.get("fan_in_fan_out", False)
        self._pairs: dict[str, dict[str, np.ndarray]] = {}
        self._scales: dict[str, float] = {}
        self._replaced: dict[str, np.ndarray] = {}
        for stored, array in _read(adapter / WEIGHTS).items():
            name, match = stored.removeprefix(_PREFIX), _MATRIX.fullmatch(stored)
            if match is None:
                if ".lora_" in name:
                    raise UserError(f"{adapter / WEIGHTS}: {stored} is not supported, but only adapters of matrices")
                found = self._found(name, prefix) or name
                self._replaced[found], self.shapes[found] = array.astype(np.float32), array.shape
                continue
            module = match[1].removeprefix(_PREFIX)
            name = self._found(f"{module}.weight", prefix)
            if name is None:
                raise UserError(f"{adapter / WEIGHTS}: {folder} has no tensor {module}.weight for {stored}")
            self._pairs.setdefault(name, {})[match[2]] = array.astype(np.float32)
            self._scales[name] = _scale(fields, module)
        for name, pair in self._pairs.items():
            shapes: list[tuple[int, ...]] = [pair[which].shape if which in pair else () for which in "AB"]
            wanted = self.shapes[name][::-1] if self._is_transposed else self.shapes[name]
            if [*map(len, shapes)] != [2, 2] or shapes[0][0] != shapes[1][1] or (shapes[1][0], shapes[0][1]) != wanted:
                raise UserError(f"{adapter / WEIGHTS}: lora_A {shapes[0]} and lora_B {shapes[1]} do not fit {name}")

    def _found(self, name: str, prefix: str) -> str | None:
        """The name that a tensor has in the folder, which may lack the prefix of a whole model, or None."""
        names = [name, name.removeprefix(prefix)]
        return next((each for each in names if each in self.shapes), None)

    def read(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        stored = (tensor for tensor in super().read([name for name in names if name not in self._replaced]))
        for name in names:
            if name in self._replaced:
                yield self._replaced[name]
                continue
            tensor, pair = next(stored), self._pairs.get(name)
            if pair is not None:
                delta = self._scales[name] * (pair["B"] @ pair["A"])
                tensor = tensor.astype(np.float32) + (delta.T if self._is_transposed else delta)
            yield tensor


def _scale(fields: Fields, module: str) -> float:
    """By how much the product of a module's matrices is multiplied."""
    rank: Any = _of_pattern(fields.get("rank_pattern", {}), module, fields.get("r", 8))
    alpha: Any = _of_pattern(fields.get("alpha_pattern", {}), module, fields.get("lora_alpha", 8.0))
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{CONFIG}: the rank of {module} is {rank!r} and its alpha {alpha!r}: need numbers above 0")
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora", False) else rank)


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    matching = (value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(matching, default)


def _read(path: epath.Path) -> dict[str, np.ndarray]:
    try:
        check_regular(pathlib.Path(path))
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the folder of an adapter holds it beside {CONFIG}") from None
    except UserError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}): fetch it again") from None


def adapter_files(
    adapters: Mapping[str, Adapter],
    heads: Mapping[str, np.ndarray],
    rows: Sequence[Row],
    *,
    prefix: str,
    base: str,
    kind: str,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns what adapter_config.json says, and the tensors.

    Several of our matrices may be one of theirs, such as query, key and value of GPT-2. Their adapters are then the
    blocks of one of a higher rank.

    Args:
      adapters: by the paths of their matrices.
      heads: parameters that were trained as a whole, by path.
      rows: the table of names of the model's family.
      prefix: of the names of the family.
      base: folder or name of the model, as PEFT will look for it.
      kind: of the model.

    Raises:
      UserError: for what PEFT cannot express: adapters of experts that share one tensor, some heads.
    """
    row_of = {row.ours: row for row in rows}
    blocks: dict[str, list[tuple[int, int, np.ndarray, np.ndarray]]] = {}
    for path, adapter in adapters.items():
        row = row_of[path]
        if row.num_batch_axes or not row.theirs.endswith(".weight"):
            raise UserError(f"PEFT cannot express an adapter of {path}: choose other config.lora.targets, or merge it")
        num_stack, num_inputs = row.num_stack_axes, row.num_inputs
        a, b = np.asarray(adapter.a[...]), np.asarray(adapter.b[...])
        for name, index in zip(row.tensor_names(a.shape), np.ndindex(a.shape[:num_stack]), strict=True):
            a_one, b_one = a[index].reshape(-1, a.shape[-1]).T, b[index].reshape(b.shape[num_stack], -1).T
            assert a.ndim == num_stack + num_inputs + 1
            start, total = row.part[0] * len(b_one), row.part[1] * len(b_one)
            if row.columns is not None:
                start, total = row.columns[0], row.columns[2]
            blocks.setdefault(f"{prefix}{name}".removesuffix(".weight"), []).append((start, total, a_one, b_one))
    first = next(iter(adapters.values()))
    rank, alpha = first.a.shape[-1], first.scale * first.a.shape[-1]
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, parts in blocks.items():
        joined = np.zeros((parts[0][1], rank * len(parts)), np.float32)
        for number, (start, _, _, b_one) in enumerate(parts):
            joined[start : start + len(b_one), number * rank : (number + 1) * rank] = b_one
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(np.concatenate([a for _, _, a, _ in parts]))
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = joined
        if len(parts) > 1:
            ranks[module] = rank * len(parts)
    saved = write_params([row for row in rows if row.ours in heads], heads)
    whole = sorted({prefix + name.rpartition(".")[0] for name in saved})
    for module in whole:  # PEFT saves a module with all that is inside it
        inside = [row.theirs for row in rows if f"{prefix}{row.theirs}".startswith(f"{module}.")]
        if any(prefix + name.rpartition(".")[0] != module for name in inside):
            raise UserError(f"PEFT cannot express a trained head inside {module}: merge the adapters instead")
    tensors |= {f"{_PREFIX}{prefix}{name}": tensor for name, tensor in saved.items()}
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(kind),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(not row_of[path].is_transposed for path in adapters),
        "target_modules": _targets(sorted(blocks), rows, prefix),
        "modules_to_save": whole or None,
        "rank_pattern": ranks,
        "alpha_pattern": {module: alpha * many / rank for module, many in ranks.items()},
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }
    return config, tensors


def _targets(modules: list[str], rows: Sequence[Row], prefix: str) -> list[str]:
    """The last parts of the names of the modules, where no other module has the same; else whole names."""
    endings = {module.rpartition(".")[2] for module in modules}
    patterns = {re.escape(prefix + row.theirs.removesuffix(".weight")).replace(r"\{\}", r"\d+") for row in rows}
    matching = {pattern for pattern in patterns if pattern.rpartition(r"\.")[2] in endings}
    covered = all(any(re.fullmatch(pattern, module) for module in modules) for pattern in matching)
    return sorted(endings) if covered else modules
