"""Sentence pairs from a TFDS translation data set, without TensorFlow.

The data set must be stored as array records (prepared with `file_format="array_record"`), which have random access and
need no TensorFlow. The code that prepared it is not needed. A data set in a bucket is first copied to this machine,
once, because reading single records over the network is too slow for training.
"""

import os
import pathlib
import re
import shutil
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

from etils import epath

from tfx_jax.data.sources.text import Pair
from tfx_jax.errors import UserError, install_command
from tfx_jax.files import is_local


class TfdsPairs:
    """Source of pairs from two languages of a TFDS data source."""

    def __init__(self, records: Any, source_language: str, target_language: str, *, folder: epath.PathLike = ""):
        """Wraps a TFDS data source.

        Args:
          records: data source whose elements map a language to its sentence, str or bytes.
          source_language: language of the sources, a key of the elements.
          target_language: language of the targets.
          folder: folder of the data set, for error messages.
        """
        self._records, self._folder = records, folder
        self._languages = {"source": source_language, "target": target_language}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Pair]:
        """Returns several pairs in one call, which is many times faster than single reads.

        Raises:
          UserError: if a record is damaged.
        """
        try:
            return [self._pair(record) for record in self._records.__getitems__(indices)]
        except IndexError:
            raise
        except Exception as error:  # array_record, protobuf and the features raise errors of many types
            raise _damaged(self._folder, error) from None

    def _pair(self, record: dict[str, str | bytes]) -> Pair:
        return {side: _as_text(record[language]) for side, language in self._languages.items()}


def tfds_pairs(
    name: str, split: str, *, data_dir: epath.PathLike = "", source_language: str, target_language: str
) -> TfdsPairs:
    """Opens a prepared translation data set.

    No text is read or checked here. Pairs with an empty side, which some corpora have, are skipped by the batching.

    Args:
      name: data set and configuration such as "wmt14_translate/de-en": the newest version on disk, unless a version
        such as ":1.0.0" follows.
      split: a split or a part of one, such as "train" or "train[:90%]".
      data_dir: folder of TFDS's data sets, local or `gs://`; by default TFDS_DATA_DIR or ~/tensorflow_datasets. A
        `gs://` folder needs gcsfs and disk space for a copy in XDG_CACHE_HOME or ~/.cache.
      source_language: the language to translate from, such as "de".
      target_language: the language to translate to, such as "en".

    Raises:
      UserError: if TFDS is not installed, the data set, split or language does not exist, or the data set is not
        stored as array records.
    """
    tfds = import_tfds()
    root = default_data_dir(data_dir)
    folder = _find_version(root, name) if is_local(root) else _copy_here(root, name)
    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:  # json, protobuf and the features raise errors of many types
        raise _damaged(folder, error) from None
    for language in (source_language, target_language):
        if language not in (builder.info.features or {}):
            raise UserError(
                f"{name} has no language {language!r}; it has {', '.join(builder.info.features or ())}: "
                "choose two as config.task.data.source_language and target_language"
            )
    try:
        records = builder.as_data_source(split)
        _check_shards(folder, builder, name)
    except NotImplementedError:
        raise UserError(
            f"{folder} is stored as {builder.info.file_format}, not as array records: "
            f"run `tfx-jax prepare {name.partition(':')[0]}` with another --data-dir"
        ) from None
    except ValueError as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None  # TFDS's message lists the splits
    return TfdsPairs(records, source_language, target_language, folder=folder)


def _damaged(folder: epath.PathLike, error: Exception) -> UserError:
    """Returns the error for a data set in `folder` that cannot be read."""
    why = next(iter(str(error).splitlines()), "")[:100] or type(error).__name__  # only the first line of the message
    return UserError(f"the data set in {folder} is damaged ({why}): delete it, then prepare or copy it again")


def import_tfds() -> Any:
    """Returns TensorFlow Datasets, imported at first use: it is an optional package, and slow to import.

    Raises:
      UserError: if it is not installed.
    """
    try:
        import array_record  # noqa: F401  needed to read the files; TFDS itself imports it too late for this message
        import tensorflow_datasets

        return tensorflow_datasets
    except ImportError as error:
        raise UserError(f"TFDS data sets need more packages ({error}): {install_command('tfds')}") from None


def default_data_dir(data_dir: epath.PathLike = "") -> epath.Path:
    """Returns `data_dir`, or by default TFDS's folder of data sets."""
    return epath.Path(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()


def _find_version(data_dir: epath.Path, name: str) -> epath.Path:
    """Returns the folder of a version, by default the newest.

    Args:
      data_dir: folder of TFDS's data sets.
      name: data_set/configuration[:version].

    Raises:
      UserError: if there is no such version.
    """
    name, _, version = name.partition(":")
    folder = data_dir / name
    versions = [
        child
        for child in (folder.iterdir() if folder.is_dir() else ())
        # Only complete versions have a version number as name; TFDS may leave incomplete ones beside them.
        if re.fullmatch(r"\d+(\.\d+)*", child.name)
        and version in ("", child.name)
        and (child / "dataset_info.json").exists()
    ]
    if not versions:
        raise UserError(
            f"{folder / version} holds no prepared TFDS data set: run `tfx-jax prepare {name} --data-dir=DIR`, "
            "then train with --config.task.data.data_dir=DIR"
        )
    return max(versions, key=lambda child: [int(number) for number in child.name.split(".")])


def _check_shards(folder: epath.Path, builder: Any, name: str) -> None:
    """Checks at the start that every shard has all its records, so that training does not fail later.

    Args:
      folder: folder of the data set, for the message.
      builder: TFDS's builder of the data set.
      name: name of the data set, for the message.

    Raises:
      UserError: if a shard is missing or damaged.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    for split in builder.info.splits.values():
        for path, length in zip(split.filepaths, split.shard_lengths, strict=True):
            try:
                num_records = ArrayRecordReader(os.fspath(path)).num_records()
            except RuntimeError:
                num_records = None
            if num_records != length:
                command = f"tfx-jax prepare {name.partition(':')[0]}"
                raise UserError(f"{path} is missing or damaged: delete {folder}, then run `{command}` or copy it again")


def _copy_here(data_dir: epath.Path, name: str) -> epath.Path:
    """Returns the local copy of a data set's folder in a bucket; the first call makes it, and other processes wait.

    Raises:
      UserError: if the data set does not exist or cannot be copied.
    """
    import fcntl

    try:
        remote = _find_version(data_dir, name)
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tfx_jax" / "tfds"
        local = cache / urllib.parse.quote(os.fspath(data_dir), safe="") / remote.relative_to(data_dir)
        local.parent.mkdir(parents=True, exist_ok=True)
        with local.with_name(f"{local.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not local.exists():
                print(f"copying {remote} to {local}", file=sys.stderr)
                partial = local.with_name(f"{local.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                for path in remote.iterdir():
                    path.copy(partial / path.name)
                partial.rename(local)
        return epath.Path(local)
    except UserError:
        raise
    except Exception as error:  # clients of file systems raise errors of many types
        hint = ": install the missing package" if isinstance(error, ImportError) else ""
        why = " ".join(str(error).split())
        raise UserError(f"cannot copy {data_dir}/{name} to this machine: {why}{hint}") from None


def _as_text(sentence: str | bytes) -> str:
    return sentence.decode() if isinstance(sentence, bytes) else sentence
