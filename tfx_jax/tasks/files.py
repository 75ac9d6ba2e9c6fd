"""What the data of all tasks share whose splits are files of text."""

import glob
import os
from typing import Any, Protocol

from etils import epath

from tfx_jax.data.sources.splits import Split
from tfx_jax.errors import UserError
from tfx_jax.files import is_local
from tfx_jax.models.config import ModelConfig, check_max_length

GRAMMAR_SIZES: dict[Split, int] = {"train": 2_000, "validation": 200, "test": 200}
"""How many labeled, tagged or answered examples of the built-in grammar each split has."""

# Coarser than `length_boundaries`: each length is a program to compile, and small data sets are trained on for minutes.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)


class FileData(Protocol):
    """The fields that these data have in common, beside `train_file`, `validation_file` and `test_file`."""

    dataset: str
    data_dir: str
    max_length: int
    tokens_per_batch: int

    def has_split(self, split: Split) -> bool:
        """Tells whether the configuration names a split; built-in data have all of them."""
        return self.dataset != "files" or bool(_file(self, split))


def split_path(data: FileData, split: Split) -> epath.Path:
    """Returns the path of the one file of a split."""
    return epath.Path(data.data_dir) / _file(data, split)


def split_paths(data: FileData, split: Split) -> list[epath.Path]:
    """Returns the paths of the files of a split, one or more, in their order; see `named_paths`."""
    return named_paths(data.data_dir, _file(data, split))


def named_paths(folder: epath.PathLike, names: str) -> list[epath.Path]:
    """Finds files by their names with commas between, or by patterns such as "part-*.txt", of which it sorts the files.

    Args:
      folder: that names are relative to.
      names: what the configuration says; a file that is named just so is one file.

    Raises:
      UserError: for a pattern that fits no file.
    """
    folder = epath.Path(folder)
    found = []
    for name in [names] if (folder / names).exists() else [name.strip() for name in names.split(",")]:
        if not glob.has_magic(name) or (folder / name).exists():
            found.append(folder / name)
        elif paths := _fitting(folder, name):
            found += paths
        else:
            raise UserError(f"no file is named {folder / name}")
    return found


def _fitting(folder: epath.Path, pattern: str) -> list[epath.Path]:
    if not is_local(folder):
        return sorted(folder.glob(pattern))
    local = os.path.join(glob.escape(os.fspath(folder)), pattern)
    return [epath.Path(path) for path in sorted(glob.glob(local, recursive=True))]


def few_boundaries(max_length: int) -> tuple[int, ...]:
    """Returns the lengths that batches of a small data set may have."""
    return (*(length for length in _LENGTHS if length < max_length), max_length)


def check_files(data: FileData, model: ModelConfig, *, what: str) -> None:
    """Checks that a batch holds an example, and that the model has a vocabulary, and positions for one.

    Args:
      data: the configuration.
      model: what is trained on them.
      what: an example is called.

    Raises:
      UserError: if not.
    """
    if model.vocab_size < 1:  # 0, for the size of the text to decide, is of translation alone
        raise UserError(f"config.model.vocab_size must be at least 1, got {model.vocab_size}")
    check_batch(data, what=what)
    check_max_length(model, data.max_length)


def check_batch(data: Any, *, what: str) -> None:
    """Checks that a batch holds an example; `what` is what messages call it.

    Raises:
      UserError: if not.
    """
    if data.tokens_per_batch < data.max_length:
        raise UserError(
            f"config.task.data.tokens_per_batch={data.tokens_per_batch} holds no {what} of max_length={data.max_length}"
        )


def _file(data: FileData, split: Split) -> str:
    return getattr(data, f"{split}_file")
