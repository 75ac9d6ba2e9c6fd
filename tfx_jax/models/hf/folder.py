"""Reads and writes the files of a Hugging Face folder: config.json and safetensors; nothing in them is executed."""

import json
import math
import mmap
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import check_regular, parse_json, read_small_file

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_LABELS = 1_000_000

# Our names of activations by their names in config.json. If several have the same value, the first one is written.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "swish": "swish",
    "silu": "swish",
    "quick_gelu": "quick_gelu",
}


class Fields:
    """The values of a config.json; errors name the file and the field."""

    def __init__(
        self,
        values: dict[str, Any],
        path: epath.PathLike,
        names: Mapping[str, str] | None = None,
        names_read: set[str] | None = None,
    ):
        """Wraps values.

        Args:
          values: the JSON object.
          path: the file, for errors.
          names: names in the file of fields that callers ask for under another name.
          names_read: set to which the names in the file of all fields that callers ask for are added.
        """
        self._values, self._path, self._names = values, path, names or {}
        self._names_read = set[str]() if names_read is None else names_read

    def _name(self, name: str) -> str:
        """Returns the name in the file of a field that callers ask for as `name`."""
        name_in_file = self._names.get(name, name)
        self._names_read.add(name_in_file)
        return name_in_file

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """Returns the same values with other names: `names` maps the names that callers use to those in the file."""
        return Fields(self._values, self._path, names, self._names_read)

    def with_defaults(self, values: Mapping[str, Any]) -> "Fields":
        """Returns the fields with `values` for those that are missing; null in the file is not missing."""
        return Fields({**values, **self._values}, self._path, self._names, self._names_read)

    def rotary(self) -> dict[str, Any]:
        """Returns "rope_parameters" or, in folders of older versions, "rope_scaling"; empty if both are absent.

        Raises:
          UserError: if there are both and they differ.
        """
        parameters, scaling = self.get("rope_parameters", {}), self.get("rope_scaling", {})
        if parameters and scaling and parameters != scaling:
            raise UserError(f"{self._path}: rope_parameters and rope_scaling differ: leave one of them out")
        return parameters or scaling

    def nested(self, name: str) -> "Fields":
        """Returns the fields of the JSON object in the field `name`, such as "text_config"; empty without one.

        Fields of "text_config_dict", which older files have, take precedence. Errors name the file and the object.
        """
        return Fields({**self.get(name, {}), **self.get(f"{name}_dict", {})}, f"{self._path}: {name}")

    def get(self, name: str, default: Any) -> Any:
        """Returns a field's value, or `default` if the field is missing or null.

        Null is false where `default` is true or false, as in transformers.

        Raises:
          UserError: if the value does not have the type of `default` or is a NaN or infinite float.
        """
        name = self._name(name)
        value = self._values.get(name)
        if value is None:
            return False if type(default) is bool and name in self._values else default
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if type(value) not in kinds:
            raise UserError(f"{self._path}: {name} is {value!r}, not of type {type(default).__name__}")
        if isinstance(default, float) and not math.isfinite(value):
            raise UserError(f"{self._path}: {name} is {value!r}, not a number")
        return value

    def optional(self, name: str, kind: type) -> Any:
        """Returns a field's value of type `kind`, or None if it is missing or null; null is false for `bool`."""
        name_in_file = self._name(name)
        is_missing = name_in_file not in self._values or (kind is not bool and self._values[name_in_file] is None)
        return None if is_missing else self.get(name, kind())

    def error(self, problem: str) -> UserError:
        """Returns an error that names the file."""
        return UserError(f"{self._path}: {problem}")

    def require(self, **fields: Any) -> None:
        """Raises UserError if a field has another value than the given one; a missing field is accepted."""
        for name, required in fields.items():
            name = self._name(name)
            value = self._values.get(name, required)
            if value != required:
                raise UserError(f"{self._path}: {name} is {value!r}, but only {required!r} is supported")

    def window(self) -> int:
        """Returns `attention_window`, the number of tokens around each token.

        The file has one number, or a list with one number per layer.

        Raises:
          UserError: if layers differ, or the value is not an even number above 0.
        """
        value = self._values.get("attention_window", 512)
        size = value[0] if isinstance(value, list) and value else value
        if isinstance(value, list) and value != [size] * len(value):
            raise UserError(f"{self._path}: attention_window is {value!r}, but layers must have the same")
        if type(size) is not int or size < 2 or size % 2:
            raise UserError(f"{self._path}: attention_window is {value!r}, not an even number above 0")
        return size

    def choose(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Translates a field with a fixed set of values, such as an activation.

        Args:
          name: name of the field.
          choices: our names of the values, by the names that the file may have.
          default: value if the field is missing, a key of `choices`.

        Raises:
          UserError: if the value is not in `choices`.
        """
        return self.chosen(name, self.get(name, default), choices)

    def chosen(self, name: str, value: Any, choices: Mapping[str, str]) -> str:
        """Translates a value of the field `name`, as `choose` does."""
        if not isinstance(value, str) or value not in choices:
            raise UserError(
                f"{self._path}: {self._name(name)} is {value!r}, but only {', '.join(choices)} are supported"
            )
        return choices[value]

    def labels(self) -> tuple[str, ...]:
        """Returns the names of the classes, from id2label.

        Without id2label they are "LABEL_0", "LABEL_1" and so on, num_labels of them, 2 by default. label2id is the
        inverse of id2label and is not read.

        Raises:
          UserError: if id2label does not name the classes 0, 1, ..., or num_labels is out of range.
        """
        names = self.get("id2label", {})
        if not names:
            count = self.get("num_labels", 2)
            if not 0 <= count <= _MAX_LABELS:
                raise UserError(f"{self._path}: num_labels is {count:,}, not in 0 to {_MAX_LABELS:,}")
            return tuple(f"LABEL_{index}" for index in range(count))
        labels = tuple(names.get(str(index)) for index in range(len(names)))
        if not all(isinstance(label, str) for label in labels):
            raise UserError(f"{self._path}: id2label is {names!r}, but has to name the classes 0 to {len(names) - 1}")
        return labels

    def classifier_options(self) -> dict[str, Any]:
        """Returns the options that all configurations of classifiers have: `labels` and `problem_type`."""
        return {"labels": self.labels(), "problem_type": self.optional("problem_type", str)}


def shortest_pattern(names: list[str]) -> list[str]:
    """Returns the shortest list whose repetition is `names`, the kinds of all layers."""
    divisors = [size for size in range(1, len(names) + 1) if len(names) % size == 0]
    return names[: next((size for size in divisors if names == names[:size] * (len(names) // size)), 0)]


def activation_field(activation: str, names: Mapping[str, str] = ACTIVATIONS) -> str:
    """Returns the name in config.json of one of our activations; `names` maps names in config.json to ours."""
    return next(theirs for theirs, ours in names.items() if ours == activation)


def classifier_fields(config: Any) -> dict[str, Any]:
    """Returns the fields that `Fields.classifier_options` reads, and label2id, for a configuration with labels."""
    return {
        "id2label": {str(index): label for index, label in enumerate(config.labels)},
        "label2id": {label: index for index, label in enumerate(config.labels)},
        "problem_type": config.problem_type,
    }


def read_json(path: epath.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      UserError: if the file is missing, cannot be read, or does not contain a JSON object.
    """
    try:
        values = parse_json(read_small_file(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: --model and load() take a Hugging Face folder") from None
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not an object")
    return values


_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}  # of parameters


class _Map:
    """A safetensors file in memory: 8 bytes with the size of a JSON header, the header, and the tensors."""

    def __init__(self, path: pathlib.Path):
        """Maps the file and parses its header."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = 8 + int.from_bytes(self._bytes[:8], "little")
        self._entries: dict[str, Any] = json.loads(self._bytes[8 : self._start])

    def tensor(self, name: str) -> np.ndarray:
        """Returns a view of a tensor."""
        entry = self._entries[name]
        if (stored := entry["dtype"]) not in _DTYPES:
            raise UserError(
                f"{name} has the dtype {stored}, which is not read: take a folder whose weights are not quantized"
            )
        start, stop = entry["data_offsets"]
        shape, dtype = entry["shape"], np.dtype(_DTYPES[entry["dtype"]])
        if stop - start != math.prod(shape) * dtype.itemsize or self._start + stop > len(self._bytes):
            raise ValueError(f"{name} has the wrong size")
        values = np.frombuffer(self._bytes, np.uint8, count=stop - start, offset=self._start + start)
        if (self._start + start) % dtype.itemsize:
            values = values.copy()  # rare: not aligned
        return values.view(dtype).reshape(shape)

    def release(self, name: str) -> None:
        """Removes the pages of a tensor from the process's memory; they are read again when needed."""
        start, stop = (self._start + offset for offset in self._entries[name]["data_offsets"])
        first = start - start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and stop > first:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, stop - first)


class Tensors:
    """The tensors of a folder by name; values are read only by `read`.

    Files stay mapped into memory as long as this object exists. The pages of a tensor count as used memory, in addition
    to the array made from them, until the next tensor is read.

    Attributes:
      shapes: shapes of all tensors, by name.
      num_bytes: total size of the files.
    """

    def __init__(self, folder: epath.PathLike, renamed: Sequence[tuple[str, str]] = ()):
        """Lists the tensors of the files.

        Args:
          folder: folder with model.safetensors, or with several files and their index.
          renamed: pairs (pattern, replacement) that are applied to the names in the files.

        Raises:
          UserError: if there are no safetensors, two tensors get the same name, or a file is missing, damaged or
            outside the folder.
        """
        self._folder = pathlib.Path(folder)
        if (self._folder / _WEIGHTS).exists():
            files = [_WEIGHTS]
        elif (self._folder / _INDEX).exists():
            files = self._files_of_index()
        else:
            raise UserError(self._describe_missing_weights())
        self.num_bytes = sum((self._folder / file).stat().st_size for file in files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._location_of: dict[str, tuple[str, str]] = {}  # file and name in it, by name
        self._bfloat16: set[str] = set()
        self._maps: dict[str, _Map] = {}  # files that have been read from
        self._lock = threading.Lock()
        for file in files:
            with self._open(file) as tensors:
                for stored in tensors.keys():  # noqa: SIM118, `tensors` is not a dictionary
                    name = stored
                    for pattern, replacement in renamed:
                        name = re.sub(pattern, replacement, name)
                    if name in self._location_of:
                        raise UserError(f"{folder} has a tensor {self._location_of[name][1]} and another, {stored}")
                    self._location_of[name] = file, stored
                    part = tensors.get_slice(stored)
                    self.shapes[name] = tuple(part.get_shape())
                    if part.get_dtype() == "BF16":
                        self._bfloat16.add(name)

    def add_name(self, name: str, of: str) -> None:
        """Adds `name` as a second name of the tensor `of`."""
        self._location_of[name], self.shapes[name] = self._location_of[of], self.shapes[of]
        if of in self._bfloat16:
            self._bfloat16.add(name)

    def read(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Yields the values of tensors in the order of `names`, each of which must exist, as views of the mapped files.

        The pages of a tensor leave the process's memory when the next one is requested.
        """
        for name in names:
            file, stored = self._location_of[name]
            with self._lock:
                if file not in self._maps:
                    self._maps[file] = self._guard(file, _Map, self._folder / file)
            yield self._guard(file, self._maps[file].tensor, stored)
            self._maps[file].release(stored)

    def release(self, name: str) -> None:
        """Removes the pages of a tensor that `read` returns from the process's memory; it may still be used."""
        file, stored = self._location_of[name]
        if file in self._maps:
            self._maps[file].release(stored)

    def is_bfloat16(self, name: str) -> bool:
        """Returns whether a tensor is stored as bfloat16."""
        return name in self._bfloat16

    def _files_of_index(self) -> list[str]:
        """Returns the names of the files that the index lists, after checking that they exist in this folder."""
        path = self._folder / _INDEX
        weight_map = read_json(epath.Path(path)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{path} is not an index of weight files, as it has no weight_map: fetch the folder again")
        for file in weight_map.values():
            # A name with a folder in it could point anywhere on the machine.
            if not isinstance(file, str) or pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
                raise UserError(f"{path} names {file!r}, which is not a .safetensors file beside it")
            if not (self._folder / file).exists():
                raise UserError(f"{path} names {file}, which does not exist: fetch the folder again")
        return sorted(set(weight_map.values()))

    def _describe_missing_weights(self) -> str:
        """Returns the error message for a folder without safetensors."""
        if not self._folder.is_dir():
            return f"{self._folder} is not a folder"
        pickled = next(iter([*sorted(self._folder.glob("*.bin")), *sorted(self._folder.glob("*.pt*"))]), None)
        if pickled is not None:
            return (
                f"{self._folder} has its weights as {pickled.name} only, a pickle, which could run any code: "
                f"save them as {_WEIGHTS}"
            )
        return f"{self._folder} has no {_WEIGHTS} and no {_INDEX}"

    def _open(self, file: str) -> Any:
        """Opens a file of the folder; the result is a context manager."""
        path = self._folder / file
        self._guard(file, check_regular, path)
        return self._guard(file, safetensors.safe_open, str(path), "numpy")

    def _guard(self, file: str, read: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `read(*arguments)`; errors become a UserError that names the file."""
        try:
            return read(*arguments)
        except UserError:
            raise
        except PermissionError:
            raise UserError(f"{self._folder / file} may not be read: change its permissions") from None
        except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
            raise UserError(f"{self._folder / file} is damaged or cut short ({error}): fetch it again") from None


def write_folder(
    folder: epath.PathLike,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    names: tuple[str, str] = ("config.json", _WEIGHTS),
) -> None:
    """Writes the configuration and the tensors; each file is replaced atomically.

    Args:
      folder: created if needed.
      config: the JSON object of the first file.
      tensors: contents of the second file.
      names: names of the two files.

    Raises:
      UserError: if a file cannot be written.
    """
    folder = pathlib.Path(folder)
    contents = {
        names[1]: lambda path: safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"}),
        names[0]: lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in contents.items():
            partial = folder / f"{name}.partial"
            partial.unlink(missing_ok=True)
            partial.touch()
            mode = partial.stat().st_mode
            write(partial)
            partial.chmod(mode)  # safetensors replaces the file by one that only its owner may read
            partial.replace(folder / name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
