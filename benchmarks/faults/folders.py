"""Hugging Face folders with fields, tensors, headers and tokenizers that others might have made, or no one should.

A folder whose tensors are hurt gives the same parameters or is refused; one whose config.json says something else may
be another model, which then has to be one that computes.
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
    """Makes a folder of each model with its tokenizer, and reads it."""
    here = folder / "here"
    originals = {name: model_folder(name, folder.parent) for name in MODELS}
    wanted = {name: _read(path) for name, path in originals.items()}

    def attempt(random: np.random.Generator) -> Trial:
        name = list(originals)[int(random.integers(len(originals)))]
        target = fresh(here) / "model"
        shutil.copytree(originals[name], target)
        harm = (_fields, _fields, _tensors, _header, _bytes, _tokenizer, _tokenizer, _files)[int(random.integers(8))]
        what = f"{name}: {harm(target, random)}"
        doing(what)
        try:
            found = _read(target)
        except UserError as error:
            told = str(error)
            return Trial(what, "line" if len(told) > 20 and told.isprintable() else "raw", told[:1_000])
        except Exception:
            return Trial(what, "traceback", traceback.format_exc()[-3_000:])
        is_same = _equal(found, wanted[name])
        may_differ = harm in (_fields, _tokenizer)  # they say what the model and its words are
        return Trial(what, "same" if is_same or may_differ else "silent", "" if is_same else "another model")

    return attempt


def _read(folder: pathlib.Path) -> tuple[Any, Any]:
    """The parameters of a folder, and the ids of a text."""
    model = hf.load(folder)
    hf.end_ids(folder)
    params = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    tokenizer = load_folder_tokenizer(folder)
    ids = tokenizer.encode("The cat, sat on 3 mats. 日本")
    tokenizer.decode(ids)
    return params, ids


def _equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(np.array_equal, one[0], other[0]))


def _value(random: np.random.Generator) -> Any:
    return copy.deepcopy(_VALUES[int(random.integers(len(_VALUES)))])


def _change(tree: Any, random: np.random.Generator, depth: int = 0) -> str:
    """Changes, adds or removes one value in nested lists and dictionaries; returns which."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return "nothing"
    key = keys[int(random.integers(len(keys)))]
    if isinstance(tree[key], dict | list) and tree[key] and random.random() < 0.8:
        return f"{key}/{_change(tree[key], random, depth + 1)}"
    if random.random() < 0.15:
        del tree[key]
        return f"{key} left out"
    number = isinstance(tree[key], int) and not isinstance(tree[key], bool)
    near = [tree[key] + 1, tree[key] - 1, tree[key] * 2] if number else []
    tree[key] = near[int(random.integers(3))] if near and random.random() < 0.4 else _value(random)
    return f"{key}={repr(tree[key])[:60]}"


def _changed_json(path: pathlib.Path, random: np.random.Generator, times: int) -> str:
    values = json.loads(path.read_text())
    done = [_change(values, random) for _ in range(times)]
    path.write_text(json.dumps(values))
    return f"{path.name}: {', '.join(done)}"


def _fields(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Values of config.json."""
    return _changed_json(folder / "config.json", random, int(random.integers(1, 3)))


def _tensors(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Names and shapes of whole tensors."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = sorted(tensors)[int(random.integers(len(tensors)))]
    tensor, kind = tensors.pop(name), int(random.integers(7))
    rows = np.concatenate([tensor, tensor[:1]])
    changed = {
        0: {},
        1: {f"{name}x": tensor},
        2: {name: rows},
        3: {name: tensor[None]},
        4: {name: tensor.T.copy() if len(set(tensor.shape)) > 1 else rows},  # no file can tell which way a square lies
        5: {name: tensor, f"copy.{name}": tensor + 1},
        6: {name: np.full_like(tensor, np.nan)},
    }[kind]
    safetensors.numpy.save_file(tensors | changed, path)
    how = ("left out", "renamed", "a row longer", "an axis more", "transposed", "there twice", "NaN")[kind]
    return f"{name} {how}"


def _header(folder: pathlib.Path, random: np.random.Generator) -> str:
    """What the header says of tensors."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = sorted(header.keys() - {"__metadata__"})[int(random.integers(len(header.keys() - {"__metadata__"})))]
    if random.random() < 0.4:
        header[name]["dtype"] = _DTYPES[int(random.integers(len(_DTYPES)))]
        done = f"dtype {header[name]['dtype']!r}"
    else:
        done = _change(header[name], random)
    text = json.dumps(header).encode()
    length = len(text) if random.random() < 0.8 else int(random.integers(2**63))
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
    return f"header of {name}: {done}, length {length}"


def _bytes(folder: pathlib.Path, random: np.random.Generator) -> str:
    """A bit of a JSON file or of the header; values of tensors have no checksum that could tell."""
    path = _any_file(folder, random)
    data = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else len(data)
    if random.random() < 0.5 or not data:
        place = int(random.integers(len(data) + 1))
        path.write_bytes(data[:place])
        return f"{path.name} cut to {place} bytes"
    place, bit = int(random.integers(end)), int(random.integers(8))
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name}: bit {bit} of byte {place} flipped"


def _tokenizer(folder: pathlib.Path, random: np.random.Generator) -> str:
    """Values of the tokenizer's files."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json")
    found = [folder / name for name in names if (folder / name).exists()]
    return _changed_json(found[int(random.integers(len(found)))], random, int(random.integers(1, 4)))


def _files(folder: pathlib.Path, random: np.random.Generator) -> str:
    """A file that is gone, a folder, a link to nothing, or another one."""
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
