"""Low-rank adapters in the folders of PEFT: adapter_config.json and adapter_model.safetensors.

`is_adapter` recognizes such a folder; `AdaptedTensors` are the tensors of a model of any family with an adapter merged
into them; `adapter_files` returns the files for the adapters that `tfx_jax.nn.lora` added to a model.
"""

import math
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath
from jaxtyping import Float

from tfx_jax.errors import UserError
from tfx_jax.files import check_regular
from tfx_jax.functional.layers import column_norms
from tfx_jax.models.hf.folder import Fields, Tensors, read_json
from tfx_jax.models.hf.names import Row, write_params
from tfx_jax.nn.lora import Adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(r"(.*)\.lora_(?:([AB])\.weight|(magnitude)_vector)")
# Options that change the function and are not supported, with the only value that is accepted.
_REQUIRED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}
# Starts of adapters that leave the matrices of the model as they are; others, such as "pissa", change them.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
# "task_type" by `kind` of a model's configuration.
_TASKS = {"encoder_decoder": "SEQ_2_SEQ_LM", "decoder": "CAUSAL_LM"}


def is_adapter(folder: epath.Path) -> bool:
    """Returns whether a folder has an adapter and no model."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def base_of(folder: epath.Path) -> str:
    """Returns the folder, or the name on the hub, of the model that an adapter belongs to.

    Raises:
      UserError: if adapter_config.json does not name it.
    """
    name = Fields(read_json(folder / CONFIG), folder / CONFIG).get("base_model_name_or_path", "")
    if not name:
        raise UserError(f"{folder / CONFIG} names no base_model_name_or_path: write there where the model is")
    return name


class AdaptedTensors(Tensors):
    """The tensors of a folder with an adapter merged into them."""

    def __init__(self, folder: epath.PathLike, renamed: Sequence[tuple[str, str]], adapter: epath.Path, prefix: str):
        """Reads an adapter and lists the tensors of its model.

        Args:
          folder: folder of the model.
          renamed: pairs (pattern, replacement) as in `Tensors`.
          adapter: folder of the adapter.
          prefix: start of tensor names that the adapter may have and the folder may lack.

        Raises:
          UserError: as for `Tensors`; if the adapter does not fit the tensors or has an option that is not supported.
        """
        super().__init__(folder, renamed)
        values = read_json(adapter / CONFIG)
        fields = Fields(values, adapter / CONFIG)
        fields.require(**_REQUIRED)
        if (start := values.get("init_lora_weights")) not in _STARTS:
            raise UserError(
                f"{adapter / CONFIG}: init_lora_weights is {start!r}, which also changed the matrices below it: "
                "save it with PEFT's path_initial_model_for_weight_conversion"
            )
        self._is_transposed = fields.get("fan_in_fan_out", False)
        self._parts: dict[str, dict[str, np.ndarray]] = {}  # "A", "B" and "magnitude" (DoRA) of each adapted tensor
        self._scales: dict[str, float] = {}  # factor of B A for each adapted tensor
        self._replaced: dict[str, np.ndarray] = {}  # tensors that were trained as a whole, such as heads
        for stored, array in _read(adapter / WEIGHTS).items():
            name = stored.removeprefix(_PREFIX)
            match = _PART.fullmatch(stored)
            if match is None:
                if ".lora_" in name:
                    raise UserError(f"{adapter / WEIGHTS}: {stored} is not supported, but only adapters of matrices")
                name = self._resolve(name, prefix) or name
                self._replaced[name], self.shapes[name] = array.astype(np.float32), array.shape
                continue
            module = match[1].removeprefix(_PREFIX)
            name = self._resolve(f"{module}.weight", prefix)
            if name is None:
                raise UserError(f"{adapter / WEIGHTS}: {folder} has no tensor {module}.weight for {stored}")
            self._parts.setdefault(name, {})[match[2] or match[3]] = array.astype(np.float32)
            self._scales[name] = _scale(fields, module)
        uses_dora = fields.get("use_dora", False)
        for name, parts in self._parts.items():
            # A must be [rank, inputs], B [outputs, rank], and with DoRA the magnitude [outputs].
            shapes: list[tuple[int, ...]] = [
                parts[part].shape if part in parts else () for part in ("A", "B", "magnitude")
            ]
            a_shape, b_shape, magnitude_shape = shapes
            expected = self.shapes[name][::-1] if self._is_transposed else self.shapes[name]  # [outputs, inputs]
            are_matrices = len(a_shape) == len(b_shape) == 2
            if not are_matrices or a_shape[0] != b_shape[1] or (b_shape[0], a_shape[1]) != expected:
                raise UserError(f"{adapter / WEIGHTS}: lora_A {a_shape} and lora_B {b_shape} do not fit {name}")
            if magnitude_shape != (expected[:1] if uses_dora else ()):
                raise UserError(
                    f"{adapter / WEIGHTS}: lora_magnitude_vector {magnitude_shape} does not fit {name} with "
                    f"use_dora={uses_dora}"
                )

    def check_replaced(
        self, names: Collection[str], table_names: Collection[str], prefix: str, copies: Sequence[tuple[str, str]]
    ) -> None:
        """Raises UserError if a tensor that was trained as a whole would be lost.

        That is, if it is of another architecture's head, or its copies, which PEFT does not change with it, were not.

        Args:
          names: names in the folder of all tensors of the model.
          table_names: names of the tensors in the table; these are no copies.
          prefix: start of the names in the folder that the table omits.
          copies: pairs (pattern, original) as in `Family`.
        """
        for name in sorted(self._replaced):
            if name not in names and not any(
                re.fullmatch(f"({re.escape(prefix)})?({copy})", name) for copy, _ in copies
            ):
                raise UserError(
                    f"the adapter has {name}, for which the model has no place: load it as the architecture that was "
                    "trained, such as architecture='BertForSequenceClassification'"
                )
        for pattern, original in copies:
            separate = {*table_names, *(name.removeprefix(prefix) for name in self._replaced)}
            is_whole = prefix + original in self._replaced and original in table_names
            if is_whole and not any(re.fullmatch(pattern, name) for name in separate):
                raise UserError(
                    f"the adapter replaces {prefix + original} but not {pattern}, and here they are one shared "
                    "parameter: list both in modules_to_save, with ensure_weight_tying=True"
                )

    def _resolve(self, name: str, prefix: str) -> str | None:
        """Returns the name in the folder of a tensor, with or without the prefix; None if there is no such tensor."""
        names = [name, name.removeprefix(prefix)]
        return next((candidate for candidate in names if candidate in self.shapes), None)

    def release(self, name: str) -> None:
        """Removes the pages of a tensor of the folder from memory; those of the adapter are no pages of a file."""
        if name not in self._replaced:
            super().release(name)

    def is_bfloat16(self, name: str) -> bool:
        """Returns whether a tensor is stored as bfloat16; what the adapter replaces is read as float32."""
        return name not in self._replaced and super().is_bfloat16(name)

    def read(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Yields the values of tensors, with adapters added, in the order of `names`."""
        stored = (tensor for tensor in super().read([name for name in names if name not in self._replaced]))
        for name in names:
            if name in self._replaced:
                yield self._replaced[name]
                continue
            tensor, parts = next(stored), self._parts.get(name)
            if parts is not None:
                matrix = tensor.astype(np.float32)
                matrix = matrix.T if self._is_transposed else matrix  # [outputs, inputs]
                matrix = matrix + self._scales[name] * (parts["B"] @ parts["A"])
                if "magnitude" in parts:
                    matrix *= (parts["magnitude"] / np.asarray(column_norms(jnp.asarray(matrix), axis=1)))[:, None]
                tensor = matrix.T if self._is_transposed else matrix
            yield tensor


def _scale(fields: Fields, module: str) -> float:
    """Returns the factor of B A for a module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    rank: Any = _of_pattern(fields.get("rank_pattern", {}), module, fields.get("r", 8))
    alpha: Any = _of_pattern(fields.get("alpha_pattern", {}), module, fields.get("lora_alpha", 8.0))
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{CONFIG}: the rank of {module} is {rank!r} and its alpha {alpha!r}: need numbers above 0")
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora", False) else rank)


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first regular expression in `pattern` that matches the end of a module's name."""
    for key, value in pattern.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise UserError(f"{CONFIG}: {key!r} is no regular expression ({error})") from None
    return default


def _read(path: epath.Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file; errors become a UserError that names the file."""
    try:
        check_regular(pathlib.Path(path))
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: an adapter's folder must contain both it and {CONFIG}") from None
    except UserError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}): fetch it again") from None


def adapter_files(
    adapters: Mapping[str, Adapter],
    heads: Collection[str],
    params: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    prefix: str,
    base: str,
    kind: str,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the content of adapter_config.json, and the tensors of adapter_model.safetensors by name.

    A tensor of the folder may hold several matrices of the model, such as query, key and value of GPT-2. Their adapters
    of rank r are then joined to one adapter of rank r times their number: A is concatenated, B is block diagonal.

    Args:
      adapters: adapters, by the paths of their matrices.
      heads: paths of the parameters that were trained as a whole.
      params: parameters of the model, by path.
      rows: table of names of the model's family.
      prefix: start of the family's tensor names that the table omits.
      base: folder of the model or its name on the hub, stored for PEFT.
      kind: `kind` of the model's configuration, "decoder" or "encoder_decoder", or another string.

    Raises:
      UserError: if PEFT cannot express an adapter, whose tensor is not the weight of one linear layer (but of all
        experts, for example), or a head.
    """
    row_of = {row.path: row for row in rows}
    blocks: dict[str, list[_Block]] = {}  # by module of PEFT: the adapters of all matrices that its tensor holds
    for path, adapter in adapters.items():
        row = row_of[path]
        if row.num_batch_axes or not row.tensor.endswith(".weight"):
            raise UserError(
                f"PEFT cannot express an adapter of {path}, as {row.tensor} is not the weight of one linear layer: "
                "leave it out of config.lora.targets, or write the merged model"
            )
        for name, block in _blocks_of(row, adapter):
            blocks.setdefault(f"{prefix}{name}".removesuffix(".weight"), []).append(block)
    first = next(iter(adapters.values()))  # all adapters have the same rank and alpha
    rank, alpha = first.a.shape[-1], first.scale * first.a.shape[-1]
    use_dora = first.magnitude is not None
    fan_in_fan_out = any(not row_of[path].is_transposed for path in adapters)
    # A tensor of DoRA may hold matrices without an adapter, whose columns keep their norms.
    adapted = {row_of[path].tensor for path in adapters}
    adapted_rows = [row for row in rows if use_dora and row.tensor in adapted]
    base_tensors = write_params(adapted_rows, {row.path: np.asarray(params[row.path]) for row in adapted_rows})
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, parts in blocks.items():
        joined_a = np.ascontiguousarray(np.concatenate([block.a for block in parts]))
        joined_b = np.zeros((parts[0].num_outputs, rank * len(parts)), np.float32)
        for index, block in enumerate(parts):
            joined_b[list(block.outputs), index * rank : (index + 1) * rank] = block.b
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = joined_a
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = joined_b
        if len(parts) > 1:
            ranks[module] = rank * len(parts)
        if use_dora:
            matrix = base_tensors[f"{module.removeprefix(prefix)}.weight"]
            magnitude = np.linalg.norm(matrix, axis=0 if fan_in_fan_out else 1)
            for block in parts:
                magnitude[list(block.outputs)] = block.magnitude
            tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = magnitude
    head_tensors = write_params(
        [row for row in rows if row.path in heads], {path: np.asarray(params[path]) for path in heads}
    )
    head_modules = sorted({prefix + name.rpartition(".")[0] for name in head_tensors})
    for module in head_modules:  # PEFT saves a module with all its submodules, which must all be trained
        inside = [row.tensor for row in rows if f"{prefix}{row.tensor}".startswith(f"{module}.")]
        if any(prefix + name.rpartition(".")[0] != module for name in inside):
            raise UserError(f"PEFT cannot express a trained head inside {module}: merge the adapters instead")
    tensors |= {f"{_PREFIX}{prefix}{name}": tensor for name, tensor in head_tensors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(kind),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "target_modules": _targets(sorted(blocks), rows, prefix),
        "modules_to_save": head_modules or None,
        "rank_pattern": ranks,
        "alpha_pattern": {module: alpha * joined_rank / rank for module, joined_rank in ranks.items()},
        "use_rslora": False,
        "use_dora": use_dora,
        "init_lora_weights": True,
    }
    return config, tensors


class _Block(NamedTuple):
    """Adapter of one matrix in PEFT's layout, and the place of the matrix among the outputs of its tensor."""

    outputs: Sequence[int]
    """Indices of the matrix's outputs in the tensor."""
    num_outputs: int
    """Number of outputs of the tensor."""
    a: Float[np.ndarray, "rank inputs"]
    b: Float[np.ndarray, "outputs rank"]
    magnitude: Float[np.ndarray, " outputs"] | None


def _blocks_of(row: Row, adapter: Adapter) -> Iterator[tuple[str, _Block]]:
    """Yields (name, block) for each tensor that holds a part of an adapted parameter: one per layer of a stack."""
    num_stack_axes = row.num_stack_axes
    a, b = np.asarray(adapter.a[...]), np.asarray(adapter.b[...])
    magnitude = None if adapter.magnitude is None else np.asarray(adapter.magnitude[...])
    assert a.ndim == num_stack_axes + row.num_inputs + 1
    for name, index in zip(row.tensor_names(a.shape), np.ndindex(a.shape[:num_stack_axes]), strict=True):
        block_a = a[index].reshape(-1, a.shape[-1]).T
        block_b = b[index].reshape(b.shape[num_stack_axes], -1).T
        part, num_parts = row.part
        outputs, num_outputs = range(part * len(block_b), (part + 1) * len(block_b)), num_parts * len(block_b)
        if row.outputs is not None:
            outputs, num_outputs = row.outputs, row.num_outputs
        yield (
            name,
            _Block(outputs, num_outputs, block_a, block_b, None if magnitude is None else magnitude[index].reshape(-1)),
        )


def _targets(modules: list[str], rows: Sequence[Row], prefix: str) -> list[str]:
    """Returns "target_modules": the last parts of the names, or whole names if other modules share a last part.

    Args:
      modules: names of all modules with an adapter.
      rows: table of names, to find other modules.
      prefix: start of the names that the table omits.
    """
    endings = {module.rpartition(".")[2] for module in modules}
    patterns = {re.escape(prefix + row.tensor.removesuffix(".weight")).replace(r"\{\}", r"\d+") for row in rows}
    matching = {pattern for pattern in patterns if pattern.rpartition(r"\.")[2] in endings}
    covered = all(any(re.fullmatch(pattern, module) for module in modules) for pattern in matching)
    return sorted(endings) if covered else modules
