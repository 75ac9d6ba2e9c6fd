"""Builds a TFDS translation data set as array records, without TensorFlow.

TFDS's own builder determines the data set: files, languages, splits and order. Three parts that it leaves to TensorFlow
are replaced here: downloads (which TFDS cannot resume), unpacking, and the files for shuffling more than a gigabyte.
Completed steps are not repeated, so after an interruption the same command is run again.

TFDS reads whole text files, one pair at a time, and shuffles the first gigabyte of records in memory. For data of the
size of WMT14 de-en, 4.5 million pairs, that took 2.8 GB of memory and 10 minutes of one core.
"""

import contextlib
import errno
import fcntl
import io
import os
import pathlib
import resource
import shutil
import sys
import types
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tfx_jax.data.sources.download import RUN_AGAIN, Checksum, fetch, unpack, unpacked_name
from tfx_jax.data.sources.tfds import default_data_dir, import_tfds
from tfx_jax.errors import UserError, printable
from tfx_jax.files import is_local

_OPEN_FILES = 1_000 + 256  # TFDS shuffles in 1,000 files, open at once


class Prepared(NamedTuple):
    """A prepared data set on disk."""

    name: str  # data set and configuration, such as "wmt14_translate/de-en"
    data_dir: pathlib.Path  # value for `tfds_pairs` and config.task.data.data_dir
    sizes: dict[str, int]  # number of pairs by split


def prepare(
    name: str,
    data_dir: str | os.PathLike[str] = "",
    *,
    base_url: str | None = None,
    checksums: Mapping[str, Checksum] | None = None,
    first_pause: float = 1.0,
) -> Prepared:
    """Downloads and builds a data set, continuing an interrupted run; does nothing if the data set is complete.

    Args:
      name: data set and configuration such as "wmt14_translate/de-en".
      data_dir: a local folder; by default TFDS_DATA_DIR or ~/tensorflow_datasets. Downloads are stored in its folder
        `downloads` as HOST/PATH. Files put there by hand are not downloaded. The folder may be deleted afterwards.
      base_url: URL of a mirror that replaces `http://HOST` in every address.
      checksums: size and SHA-256 by address; None uses those that TFDS has registered.
      first_pause: seconds before the first retry of a lost connection; doubled at each further retry.

    Raises:
      UserError: if the data set does not exist or needs files to be downloaded by hand, a download fails or has a wrong
        checksum, another process is preparing data in this folder, or the disk is full.
    """
    root = os.fspath(default_data_dir(data_dir))
    if not is_local(root):
        raise UserError(
            f"array records can only be written to a local disk, not to {root}: prepare into a local folder DIR, "
            f"then run `gcloud storage cp -r DIR/{name.split('/')[0]} {root}/`"
        )
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise UserError(f"--base-url={base_url} should begin with http:// or https://")
    folder = pathlib.Path(root).absolute()
    if set("*?[") & set(str(folder)):
        raise UserError(f"--data-dir={folder} contains *, ? or [, which TFDS reads as wildcards: choose another folder")
    try:
        builder = _stock_builder(name, folder)
        if not (builder.data_path / "dataset_info.json").exists():
            with _exclusive_use(folder / "downloads"):
                _remove_leftovers(pathlib.Path(builder.data_dir))
                _build(builder, Archives(folder / "downloads", base_url, checksums, first_pause))
        splits = import_tfds().builder_from_directory(builder.data_dir).info.splits
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        raise UserError(f"{where}: {why}; fix this and {RUN_AGAIN}: it continues from here") from None
    return Prepared(name, folder, {split: info.num_examples for split, info in splits.items()})


def _stock_builder(name: str, folder: pathlib.Path) -> Any:
    """Returns TFDS's builder of a translation data set; raises UserError if there is none of this name."""
    tfds = import_tfds()
    import tensorflow_datasets.translate  # noqa: F401  registers these builders; TFDS itself does so only with h5py

    data_set, _, configuration = name.partition("/")
    try:
        kind = tfds.core.registered.imported_builder_cls(data_set)
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(f"TFDS has no data set {data_set}; wmt14_translate/de-en is one") from None
    if kind.builder_configs and configuration not in kind.builder_configs:
        raise UserError(
            f"{data_set} has no {configuration or 'default'!r}: add one of /{', /'.join(kind.builder_configs)}"
        )
    try:
        builder = kind(config=configuration or None, data_dir=folder, file_format="array_record")
    except ValueError as error:
        raise UserError(f"{folder}/{name}: {' '.join(str(error).split())}; take another --data-dir") from None
    if not isinstance(builder.info.features, tfds.features.Translation):
        raise UserError(f"{name} is not a translation data set: its elements have {', '.join(builder.info.features)}")
    return builder


def _build(builder: Any, archives: "Archives") -> None:
    """Builds a data set with TFDS's builder, which gets its files from `archives`.

    Raises:
      UserError: if files must be downloaded by hand or do not fit together.
      OSError: if the disk is full.
    """
    tfds = import_tfds()
    builder._make_download_manager = lambda **_: archives
    # Otherwise TFDS would first look for the data set in a Google Cloud bucket.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        # Discard TFDS's messages about unknown sizes on stdout.
        with contextlib.redirect_stdout(io.StringIO()), _shuffling_without_tensorflow():
            builder.download_and_prepare(download_config=config)
    except AssertionError as error:  # a file that must be fetched by hand, or texts of unequal length
        raise UserError(f"{builder.info.full_name}: {' '.join(str(error).split())}") from None
    except RuntimeError as error:  # how array_record reports a full disk, when a file is closed
        if "write() failed" not in str(error):
            raise
        raise OSError(errno.EIO, str(error).partition(";")[0], builder.data_dir) from None


class Archives:
    """Replaces TFDS's download manager: the same methods, with resumable downloads and without TensorFlow."""

    def __init__(
        self, folder: pathlib.Path, base_url: str | None, checksums: Mapping[str, Checksum] | None, first_pause: float
    ):
        """Stores the folder of the downloads and arguments of `prepare`."""
        self._folder = folder
        self._base_url = base_url
        self._checksums = registered_checksums() if checksums is None else checksums
        self._first_pause = first_pause
        self.downloaded_size = 0  # bytes; TFDS stores it in the data set's description

    @property
    def manual_dir(self) -> pathlib.Path:
        """Folder of files that must be downloaded by hand."""
        return self._folder / "manual"

    def download(self, urls: Any) -> Any:
        """Downloads every address of a nested structure; returns the paths in the same structure."""
        return _map(self._fetch, urls)

    def extract(self, paths: Any) -> Any:
        """Unpacks every path of a nested structure; returns the unpacked paths in the same structure."""
        return _map(self._unpack, paths)

    def download_and_extract(self, urls: Any) -> Any:
        """Downloads and unpacks every address of a nested structure."""
        return _map(lambda url: self._unpack(self._fetch(url)), urls)

    def _fetch(self, url: str) -> pathlib.Path:
        """Downloads a file unless it or its unpacked content exists; returns its path."""
        path, checksum = self._folder / local_name(url), self._checksums.get(url)
        if not self._unpacked(path).exists():
            fetch(moved(url, self._base_url), path, checksum, first_pause=self._first_pause)
        if checksum is not None:  # otherwise the size is unknown if the archive was deleted after unpacking
            self.downloaded_size += checksum.size
        return path

    def _unpack(self, path: str | pathlib.Path) -> pathlib.Path:
        """Unpacks a download unless that is done; returns the path of the unpacked file or folder."""
        target = self._unpacked(pathlib.Path(path))
        if not target.exists():
            print(f"unpacking {printable(target.name)}", file=sys.stderr)
        unpack(pathlib.Path(path), target)
        return target

    def _unpacked(self, path: pathlib.Path) -> pathlib.Path:
        """Returns the path to which a download is unpacked, in the subfolder `extracted`."""
        relative = path.relative_to(self._folder)
        return self._folder / "extracted" / relative.parent / unpacked_name(path.name)


def local_name(url: str) -> str:
    """Returns the path of a download below `downloads`, the same as with `wget -x`.

    >>> local_name("http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz")
    'www.statmt.org/wmt14/training-parallel-nc-v9.tgz'
    >>> local_name("http://opus.nlpl.eu/download.php?f=a/b.gz")
    'opus.nlpl.eu/download.php?f=a%2Fb.gz'
    """
    parts = urllib.parse.urlsplit(url)
    query = f"?{urllib.parse.quote(parts.query, safe='=&.')}" if parts.query else ""
    return parts.netloc + parts.path + query


def moved(url: str, base_url: str | None) -> str:
    """Returns the address on a mirror, or `url` without one.

    >>> moved("http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz", "https://mirror.org/statmt/")
    'https://mirror.org/statmt/wmt14/training-parallel-nc-v9.tgz'
    """
    if base_url is None:
        return url
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.urlunsplit(parts._replace(scheme="", netloc=""))  # with query and fragment, if any
    return base_url.rstrip("/") + path


def registered_checksums() -> dict[str, Checksum]:
    """Returns the checksums of all of TFDS's data sets, because wmt14_translate's own lack files of wmt13_translate."""
    infos = import_tfds().core.download.checksums.get_all_url_infos()
    return {url: Checksum(int(info.size), info.checksum) for url, info in infos.items()}


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies a function to each leaf of nested dictionaries, lists and tuples; tuples become lists."""
    if isinstance(structure, dict):
        return {name: _map(function, part) for name, part in structure.items()}
    if isinstance(structure, list | tuple):
        return [_map(function, part) for part in structure]
    return function(structure)


@contextlib.contextmanager
def _shuffling_without_tensorflow() -> Iterator[None]:
    """Replaces the three TensorFlow functions that TFDS's shuffler calls by those of plain Python files."""
    from tensorflow_datasets.core import shuffle

    files = types.SimpleNamespace(GFile=open, exists=os.path.exists, remove=os.remove)
    # An exception class that is never raised, so that the error of a full disk reaches `prepare`.
    errors = types.SimpleNamespace(ResourceExhaustedError=type("ResourceExhaustedError", (Exception,), {}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # current limit of open files, and its upper bound
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    tensorflow = shuffle.tf
    shuffle.tf = types.SimpleNamespace(io=types.SimpleNamespace(gfile=files), errors=errors)
    try:
        yield
    finally:
        shuffle.tf = tensorflow


@contextlib.contextmanager
def _exclusive_use(folder: pathlib.Path) -> Iterator[None]:
    """Holds a lock on the folder; raises UserError if another process has it. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is preparing data in {folder}: wait for it") from None
        yield


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Deletes incomplete records of interrupted runs, which TFDS writes to folders with random names."""
    for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
        shutil.rmtree(leftover)
