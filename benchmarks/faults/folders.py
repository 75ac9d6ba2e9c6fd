"""Hugging Face folders with changed fields, tensors, headers and tokenizers.

A folder with damaged tensors must give the same parameters or be rejected. A folder with another config.json or
tokenizer may be another model, which must then work.
"""

import copy
import json
import pathlib
import shutil
import struct
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from benchmarks.faults.campaign import Trial, doing
from benchmarks.faults.command import fresh
from benchmarks.faults.subjects import MODELS, model_folder
from tfx_jax.data.tokenizers import load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.models import hf

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 5, 7, 64, 10**6, 10**9, 2**31, 10**12, 10**30, 0.5, -0.5, 1e-30, 1e300),
    *(float("nan"), float("inf"), "", "x", "gelu", "relu", "gelu_new", "\x1b[2J", "日本" * 9, "a" * 3_000),
    *([], [1], [0] * 99, {}, {"a": {}}, {"0": "a", "1": "b"}, [[[]]], ["GPT2LMHeadModel"], ["BertModel"]),
)
_DTYPES = ("F16", "BF16", "F64", "F8_E4M3", "I8", "I64", "BOOL", "U8", "F99", "", 3)


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Makes a folder of each model with its tokenizer, and reads it; returns the function that makes a trial."""
    here = folder / "here"
    originals = {name: model_folder(name, folder.parent) for name in MODELS}
    expected = {name: _read(path) for name, path in originals.items()}

    def attempt(random: np.random.Generator) -> Trial:
        name = list(originals)[int(random.integers(len(originals)))]
        target = fresh(here) / "model"
        shutil.copytree(originals[name], target)
        harm = (_fields, _fields, _tensors, _header, _bytes, _tokenizer, _tokenizer, _files)[int(random.integers(8))]
        what = f"{name}: {harm(target, random)}"
        doing(what)
        try:
            result = _read(target)
        except UserError as error:
            message = str(error)
            return Trial(what, "line" if len(message) > 20 and message.isprintable() else "raw", message[:1_000])
        except Exception:
            return Trial(what, "traceback", traceback.format_exc()[-3_000:])
        is_same = _equal(result, expected[name])
        may_differ = harm in (_fields, _tokenizer)  # these determine the model and its words
        return Trial(what, "same" if is_same or may_differ else "silent", "" if is_same else "another model")

    return attempt


def _read(folder: pathlib.Path) -> tuple[Any, Any]:
    """Returns (parameters of a folder's model, ids of a text by its tokenizer)."""
    model = hf.load(folder)
    hf.end_ids(folder)
    params = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    tokenizer = load_folder_tokenizer(folder)
    ids = tokenizer.encode("The cat, sat on 3 mats. 日本")
    tokenizer.decode(ids)
    return params, ids


def _equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Compares two results of `_read`."""
    (params, ids), (other_params, other_ids) = one, other
    return ids == other_ids and len(params) == len(other_params) and all(map(np.array_equal, params, other_params))


def _value(random: np.random.Generator) -> Any:
    """Returns a random hostile value."""
    return copy.deepcopy(_VALUES[int(random.integers(len(_VALUES)))])


def _change(tree: Any, random: np.random.Generator, depth: int = 0) -> str:
    """Changes or removes one random value in nested lists and dictionaries, in place; returns a description."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return "nothing"
    key = keys[int(random.integers(len(keys)))]
    if isinstance(tree[key], dict | list) and tree[key] and random.random() < 0.8:
        return f"{key}/{_change(tree[key], random, depth + 1)}"
    if random.random() < 0.15:
        del tree[key]
        return f"{key} left out"
    is_integer = isinstance(tree[key], int) and not isinstance(tree[key], bool)
    near = [tree[key] + 1, tree[key] - 1, tree[key] * 2] if is_integer else []
    tree[key] = near[int(random.integers(3))] if near and random.random() < 0.4 else _value(random)
    return f"{key}={repr(tree[key])[:60]}"


def _change_json(path: pathlib.Path, random: np.random.Generator, times: int) -> str:
    """Changes some values of a JSON file; returns a description."""
    values = json.loads(path.read_text())
    changes = [_change(values, random) for _ in range(times)]
    path.write_text(json.dumps(values))
    return f"{path.name}: {', '.join(changes)}"


def _fields(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Changes values of config.json; returns a description."""
    return _change_json(folder / "config.json", random, int(random.integers(1, 3)))


def _tensors(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Changes the name, shape or values of a tensor; returns a description."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = sorted(tensors)[int(random.integers(len(tensors)))]
    tensor = tensors.pop(name)
    kind = int(random.integers(7))
    longer = np.concatenate([tensor, tensor[:1]])
    changed = {
        0: {},
        1: {f"{name}x": tensor},
        2: {name: longer},
        3: {name: tensor[None]},
        # A transposed square matrix has the right shape, so it could not be detected.
        4: {name: tensor.T.copy() if len(set(tensor.shape)) > 1 else longer},
        5: {name: tensor, f"copy.{name}": tensor + 1},
        6: {name: np.full_like(tensor, np.nan)},
    }[kind]
    safetensors.numpy.save_file(tensors | changed, path)
    how = ("left out", "renamed", "a row longer", "an axis more", "transposed", "there twice", "NaN")[kind]
    return f"{name} {how}"


def _header(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Changes the description of a tensor in the header of the safetensors file; returns a description."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])  # the file begins with the length of the header
    header = json.loads(data[8 : 8 + size])
    name = sorted(header.keys() - {"__metadata__"})[int(random.integers(len(header.keys() - {"__metadata__"})))]
    if random.random() < 0.4:
        header[name]["dtype"] = _DTYPES[int(random.integers(len(_DTYPES)))]
        change = f"dtype {header[name]['dtype']!r}"
    else:
        change = _change(header[name], random)
    text = json.dumps(header).encode()
    length = len(text) if random.random() < 0.8 else int(random.integers(2**63))
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
    return f"header of {name}: {change}, length {length}"


def _bytes(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Cuts a file or flips a bit of a JSON file or of the header; returns a description.

    Bits of tensors are not flipped: the values have no checksum.
    """
    path = _any_file(folder, random)
    data = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else len(data)
    if random.random() < 0.5 or not data:
        length = int(random.integers(len(data) + 1))
        path.write_bytes(data[:length])
        return f"{path.name} cut to {length} bytes"
    position, bit = int(random.integers(end)), int(random.integers(8))
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name}: bit {bit} of byte {position} flipped"


def _tokenizer(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Changes values of a file of the tokenizer; returns a description."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json")
    files = [folder / name for name in names if (folder / name).exists()]
    return _change_json(files[int(random.integers(len(files)))], random, int(random.integers(1, 4)))


def _files(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Removes a file or replaces it by something else; returns a description."""
    path = _any_file(folder, random)
    kind = ("gone", "a folder", "a link to itself", "another file", "nested without end")[int(random.integers(5))]
    other = _any_file(folder, random).read_bytes()
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "another file":
        path.write_bytes(other)
    elif kind == "nested without end":
        path.write_bytes(b"[" * 100_000)
    return f"{path.name} {kind}"


def _any_file(folder: pathlib.Path, random: np.random.Generator) -> pathlib.Path:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return files[int(random.integers(len(files)))]
