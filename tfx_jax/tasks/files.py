"""Helpers for data whose splits are text files, shared by all tasks."""

import dataclasses
import glob
import itertools
import os
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from etils import epath

from tfx_jax.data.sources.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.files import is_local
from tfx_jax.hub import DATASETS, dataset_files
from tfx_jax.models.config import ModelConfig, check_max_length

GRAMMAR_SIZES: dict[Split, int] = {"train": 2_000, "validation": 200, "test": 200}
"""Number of labeled, tagged or answered examples of the built-in grammar in each split."""

Row = TypeVar("Row")

# Fewer lengths than `length_boundaries`: each length is compiled, and small data sets are trained on for minutes only.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)


class FileData(Protocol):
    """Common fields of these data, in addition to `train_file`, `validation_file` and `test_file`."""

    dataset: str
    data_dir: str
    max_length: int
    tokens_per_batch: int

    def has_split(self, split: Split) -> bool:
        """Returns whether the configuration names a split or holds one out; built-in data have all splits."""
        is_held_out = split == "validation" and getattr(self, "validation_share", 0) > 0
        return self.dataset != "files" or bool(_file(self, split)) or is_held_out

    def read_inputs(self, path: epath.PathLike, labels: Collection[str]) -> Iterable[Sequence[str]] | None:
        """Returns the inputs in a file that has the format of the training files, without its labels.

        Args:
          path: the file.
          labels: labels of the training split.

        Returns:
          Rows of strings, as `AnsweringTask.answer` takes them; None if each line of the file is an input.

        Raises:
          UserError: now or while iterating, if the file cannot be read or lacks a column.
        """
        return None


def split_path(data: FileData, split: Split) -> epath.Path:
    """Returns the path of the single file of a split."""
    return epath.Path(data.data_dir) / _file(data, split)


def split_paths(data: FileData, split: Split) -> list[epath.Path]:
    """Returns the paths of the files of a split, in order; see `named_paths`."""
    return named_paths(data.data_dir, _file(data, split))


def split_rows(
    data: FileData,
    split: Split,
    read: Callable[[Sequence[epath.Path]], Sequence[Row]],
    *,
    group: Callable[[Row], Hashable] | None = None,
) -> Sequence[Row]:
    """Reads the rows of a split; with `validation_share`, training rows are held out for validation.

    Of a share of 0.1, one of every ten rows is held out, because files may be sorted: a pseudo-random one, because
    their rows may alternate.

    Args:
      data: configuration of the data.
      split: the split.
      read: returns the rows of files.
      group: rows of which this returns the same value are held out together; None: each on its own.

    Raises:
      UserError: as `read`, and if no row would remain in one of the two splits.
    """
    share = getattr(data, "validation_share", 0)
    if not share or split == "test":
        return read(split_paths(data, split))
    rows = read(split_paths(data, "train"))
    keys: Sequence[Hashable] = range(len(rows)) if group is None else [group(row) for row in rows]
    groups = [*dict.fromkeys(keys)]
    held_out_keys: set[Hashable] = set()
    for part, numbers in itertools.groupby(range(len(groups)), key=lambda number: int(share * number)):
        members = [*numbers]  # 1 / share successive groups, of which one is held out, or the incomplete last ones
        if part < int(share * len(groups)):
            held_out_keys.add(groups[members[zlib.crc32(str(part).encode()) % len(members)]])
    if not 0 < len(held_out_keys) < len(groups):
        raise empty_split(share, len(groups), "training examples")
    held_out = [key in held_out_keys for key in keys]  # for each row
    is_validation = split == "validation"
    return [row for row, row_is_held_out in zip(rows, held_out, strict=True) if row_is_held_out == is_validation]


def empty_split(share: float, size: int, unit: str) -> UserError:
    """Returns the error of a `validation_share` of `size` units that leaves nothing to train on, or to validate on."""
    return UserError(
        f"config.task.data.validation_share={share} of the {size:,} {unit} leaves one split empty: name "
        "validation_file, or use another share"
    )


def check_share(data: Any) -> None:
    """Raises UserError if a configuration both names validation files and holds out training examples."""
    if data.validation_file and data.validation_share:
        raise UserError("config.task.data.validation_file and validation_share must not both be set: keep one of them")


FROM_FILES = ("files", "folder", "fsdd")
"""Values of `dataset` for which data are read from the files or folders that the configuration names."""
_KINDS = ("file", "folder", "source", "target")
FILE_FIELDS = tuple(f"{split}_{kind}" for split in ("train", "validation", "test") for kind in _KINDS)
"""Fields of data that name files or folders."""


def named_fields(data: Any) -> list[str]:
    """Returns the fields that name files and folders, or a share of them, and do not have their defaults."""
    names = (*FILE_FIELDS, "validation_share", "validation_pairs")
    fields = [field for field in dataclasses.fields(data) if field.name in names]
    return [field.name for field in fields if getattr(data, field.name) != field.default]


def check_dataset(data: Any) -> None:
    """Raises UserError if a configuration names files or folders, but another `dataset`, which does not read them."""
    if getattr(data, "dataset", "files") not in FROM_FILES and (names := named_fields(data)):
        raise UserError(
            f'config.task.data.dataset="{data.dataset}" does not read {names[0]}={getattr(data, names[0])}: set '
            f'dataset="{"folder" if names[0].endswith("folder") else "files"}", or do not name it'
        )


def named_paths(folder: epath.PathLike, names: str) -> list[epath.Path]:
    """Returns the files of a comma-separated list of names and patterns such as "part-*.txt", whose files are sorted.

    An entry that begins with "hf://datasets/" is downloaded from the Hugging Face hub; see `hub.dataset_files`.

    Args:
      folder: folder to which other names are relative.
      names: the list; if a file has exactly this name, it is the only file.

    Raises:
      UserError: if a pattern matches no file, or a file cannot be downloaded.
    """
    folder = epath.Path(folder)
    paths: list[epath.Path] = []
    is_one_file = DATASETS not in names and (folder / names).exists()
    entries = [names] if is_one_file else [name.strip() for name in names.split(",")]
    for name in entries:
        if name.startswith(DATASETS):
            paths += dataset_files(name)
        elif not glob.has_magic(name) or (folder / name).exists():
            paths.append(folder / name)
        elif matching := _matching_paths(folder, name):
            paths += matching
        else:
            raise UserError(f"no file matches {folder / name}")
    return paths


def _matching_paths(folder: epath.Path, pattern: str) -> list[epath.Path]:
    """Returns the paths in a folder that match a pattern, sorted."""
    if not is_local(folder):
        return sorted(folder.glob(pattern))
    local = os.path.join(glob.escape(os.fspath(folder)), pattern)
    return [epath.Path(path) for path in sorted(glob.glob(local, recursive=True))]


def few_boundaries(max_length: int) -> tuple[int, ...]:
    """Returns the lengths to which batches of a small data set are padded."""
    return (*(length for length in _LENGTHS if length < max_length), max_length)


def check_files(data: FileData, model: ModelConfig, *, what: str) -> None:
    """Checks that a batch can hold an example, and that the model has a vocabulary and enough positions.

    Args:
      data: configuration of the data.
      model: configuration of the model.
      what: name of an example in messages.

    Raises:
      UserError: if one of these does not hold.
    """
    if model.vocab_size < 1:  # only translation derives the size from the data if it is 0
        raise UserError(f"config.model.vocab_size must be at least 1, got {model.vocab_size}")
    check_batch(data, what=what)
    check_max_length(model, data.max_length)


def check_batch(data: Any, *, what: str) -> None:
    """Checks that a batch can hold an example, which messages call `what`.

    Raises:
      UserError: if it cannot.
    """
    if data.tokens_per_batch < data.max_length:
        raise UserError(
            f"config.task.data.tokens_per_batch={data.tokens_per_batch} must be at least max_length={data.max_length}, "
            f"the size of one {what}"
        )


def _file(data: FileData, split: Split) -> str:
    """Returns the value of the field `SPLIT_file`; "" if the data have no such split."""
    return getattr(data, f"{split}_file")
