"""A Hugging Face folder as files: config.json and safetensors, in one file or several; nothing in it is executed."""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import check_regular, parse_json, read_small_file

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_LABELS = 1_000_000

# Of the names that a config.json may give an activation, ours; the first of several is the one written.
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
    """The values of a config.json, refused by name where a model cannot have them."""

    def __init__(self, values: dict[str, Any], path: epath.PathLike, names: Mapping[str, str] | None = None):
        self._values, self._path, self._names = values, path, names or {}

    def _name(self, name: str) -> str:
        return self._names.get(name, name)

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The same under other names: `names` has those of the file, by those that are asked for."""
        return Fields(self._values, self._path, names)

    def get(self, name: str, default: Any) -> Any:
        """A field's value, which has the type of `default`; that, if the file does not say or says null."""
        name = self._name(name)
        value = self._values.get(name)
        if value is None:
            return default
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if type(value) not in kinds:
            raise UserError(f"{self._path}: {name} is {value!r}, not of type {type(default).__name__}")
        if isinstance(default, float) and not math.isfinite(value):
            raise UserError(f"{self._path}: {name} is {value!r}, not a number")
        return value

    def optional(self, name: str, kind: type) -> Any:
        """A field's value, or None if the file does not say or says null."""
        return None if self._values.get(self._name(name)) is None else self.get(name, kind())

    def require(self, **fields: Any) -> None:
        """Refuses other values than these; each is also what a field means that the file leaves out."""
        for name, wanted in fields.items():
            name = self._name(name)
            value = self._values.get(name, wanted)
            if value != wanted:
                raise UserError(f"{self._path}: {name} is {value!r}, but only {wanted!r} is supported")

    def window(self) -> int:
        """The tokens around each token that its `attention_window` has, which is one number or one for each layer.

        Raises:
          UserError: if layers differ, or it is not an even number above 0.
        """
        value = self._values.get("attention_window", 512)
        size = value[0] if isinstance(value, list) and value else value
        if isinstance(value, list) and value != [size] * len(value):
            raise UserError(f"{self._path}: attention_window is {value!r}, but layers must have the same")
        if type(size) is not int or size < 2 or size % 2:
            raise UserError(f"{self._path}: attention_window is {value!r}, not an even number above 0")
        return size

    def choose(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Translates a field that names one of several things, such as an activation.

        Args:
          name: of the field.
          choices: from the names that it may have to ours.
          default: the name that it means where the file does not say.
        """
        value = self.get(name, default)
        if value not in choices:
            raise UserError(
                f"{self._path}: {self._name(name)} is {value!r}, but only {', '.join(choices)} are supported"
            )
        return choices[value]

    def labels(self) -> tuple[str, ...]:
        """The names of the classes, from id2label; a folder without has num_labels of them, 2 if it does not say.

        label2id says the same the other way round, and is not read.
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


def activation_field(activation: str, names: Mapping[str, str] = ACTIVATIONS) -> str:
    """What a config.json calls an activation of ours; `names` as `Fields.choose` has them."""
    return next(theirs for theirs, ours in names.items() if ours == activation)


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """The fields from which the names of classes are read again."""
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def read_json(path: epath.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      UserError: if there is none.
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


class Tensors:
    """The tensors of a folder, found by name and read when they are asked for.

    A file is open only while one group of tensors is read from it. It is mapped into memory, so an open file would
    count, with all that was read, beside the arrays made of it.

    Attributes:
      shapes: of all tensors, by name.
      num_bytes: size of the files.
    """

    def __init__(self, folder: epath.PathLike, renamed: Sequence[tuple[str, str]] = ()):
        """Finds out which file holds which tensor.

        Args:
          folder: with the files.
          renamed: patterns in names, and what stands there in the names by which the tensors are found here.

        Raises:
          UserError: if there are no safetensors, two tensors get one name, or a file is missing, damaged or outside
            the folder.
        """
        self._folder = pathlib.Path(folder)
        if (self._folder / _WEIGHTS).exists():
            files = [_WEIGHTS]
        elif (self._folder / _INDEX).exists():
            files = self._files_of_index()
        else:
            raise UserError(self._why_nothing_is_there())
        self.num_bytes = sum((self._folder / file).stat().st_size for file in files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._place_of: dict[str, tuple[str, str]] = {}
        for file in files:
            with self._open(file) as tensors:
                for stored in tensors.keys():  # noqa: SIM118, which is no dictionary
                    name = stored
                    for pattern, replacement in renamed:
                        name = re.sub(pattern, replacement, name)
                    if name in self._place_of:
                        raise UserError(f"{folder} has a tensor {self._place_of[name][1]} and another, {stored}")
                    self._place_of[name] = file, stored
                    self.shapes[name] = tuple(tensors.get_slice(stored).get_shape())

    def add_name(self, name: str, of: str) -> None:
        """Makes a tensor known by another name as well."""
        self._place_of[name], self.shapes[name] = self._place_of[of], self.shapes[of]

    def read(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Reads tensors one after the other, in the order of their names; each must exist."""
        position = 0
        while position < len(names):
            file, _ = self._place_of[names[position]]
            with self._open(file) as tensors:
                while position < len(names) and self._place_of[names[position]][0] == file:
                    yield self._guard(file, tensors.get_tensor, self._place_of[names[position]][1])
                    position += 1

    def _files_of_index(self) -> list[str]:
        path = self._folder / _INDEX
        weight_map = read_json(epath.Path(path)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{path} has no weight_map")
        for file in weight_map.values():
            # A name with a folder in it could point anywhere on the machine.
            if not isinstance(file, str) or pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
                raise UserError(f"{path} names {file!r}, which is not a .safetensors file beside it")
            if not (self._folder / file).exists():
                raise UserError(f"{path} names {file}, which does not exist: fetch the folder again")
        return sorted(set(weight_map.values()))

    def _why_nothing_is_there(self) -> str:
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
        path = self._folder / file
        self._guard(file, check_regular, path)
        return self._guard(file, safetensors.safe_open, str(path), "numpy")

    def _guard(self, file: str, read: Callable[..., Any], *arguments: Any) -> Any:
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
    """Writes the configuration and the tensors to files of these names, each file at once or not at all.

    Raises:
      UserError: if the disk does not allow it.
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
            partial.chmod(mode)  # safetensors makes a file again, for its owner alone
            partial.replace(folder / name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
