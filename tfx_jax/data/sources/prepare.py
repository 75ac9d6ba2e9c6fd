"""Builds a TFDS translation data set as array records, without TensorFlow.

TFDS's own builder decides what the data set is: files, languages, splits, order. Three things it leaves to TensorFlow
are done here instead: downloads, which it cannot resume either; archives; and the files in which it shuffles what is
larger than a gigabyte. A step that is done stays done, so a command that was killed is simply run again.

TFDS reads one pair of text files at a time, whole, and shuffles the first gigabyte of records in memory. For texts of
the size of WMT14 de-en, 4.5 million pairs, that took 2.8 GB of memory and 10 minutes of one core.
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
    """A data set on disk."""

    name: str  # "wmt14_translate/de-en"
    data_dir: pathlib.Path  # what `tfds_pairs` and config.task.data.data_dir take
    sizes: dict[str, int]  # pairs of "train", "validation", "test"


def prepare(
    name: str,
    data_dir: str | os.PathLike[str] = "",
    *,
    base_url: str | None = None,
    checksums: Mapping[str, Checksum] | None = None,
    first_pause: float = 1.0,
) -> Prepared:
    """Downloads and builds a data set, or what is missing of it; one that is there is only described.

    Args:
      name: data set and configuration, "wmt14_translate/de-en".
      data_dir: a local folder; by default TFDS_DATA_DIR or ~/tensorflow_datasets. Downloads go to its folder
        `downloads`, as HOST/PATH: a file put there by hand is not fetched, and all of it may go once records are made.
      base_url: takes the place of `http://HOST` in every address, for a mirror.
      checksums: what each address must hold; None takes those that TFDS has registered for any of its data sets.
      first_pause: seconds before a lost connection is taken up; they double each time.

    Raises:
      UserError: if there is no such data set, it needs files that only a person may fetch, a download fails or is not
        what it should be, another process is preparing here, or the disk is full.
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
        raise UserError(f"TFDS would take {folder} for a pattern: choose a --data-dir without * ? [")
    try:
        builder = _stock_builder(name, folder)
        if not (builder.data_path / "dataset_info.json").exists():
            with _alone(folder / "downloads"):
                _remove_leftovers(pathlib.Path(builder.data_dir))
                _build(builder, Archives(folder / "downloads", base_url, checksums, first_pause))
        splits = import_tfds().builder_from_directory(builder.data_dir).info.splits
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        raise UserError(f"{where}: {why}; fix this and {RUN_AGAIN}: it goes on from here") from None
    return Prepared(name, folder, {split: info.num_examples for split, info in splits.items()})


def _stock_builder(name: str, folder: pathlib.Path) -> Any:
    """TFDS's builder of a translation data set."""
    tfds = import_tfds()
    import tensorflow_datasets.translate  # noqa: F401  by name TFDS finds these builders only where h5py is installed

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
    tfds = import_tfds()
    builder._make_download_manager = lambda **_: archives
    # Another try would look at a bucket of Google's first.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        # TFDS prints to stdout what sizes it does not know.
        with contextlib.redirect_stdout(io.StringIO()), _shuffling_without_tensorflow():
            builder.download_and_prepare(download_config=config)
    except AssertionError as error:  # a file that must be fetched by hand, or texts of unequal length
        raise UserError(f"{builder.info.full_name}: {' '.join(str(error).split())}") from None
    except RuntimeError as error:  # how array_record reports a full disk, when a file is closed
        if "write() failed" not in str(error):
            raise
        raise OSError(errno.EIO, str(error).partition(";")[0], builder.data_dir) from None


class Archives:
    """Takes the place of TFDS's download manager: the same calls, but downloads resume and TensorFlow is not needed."""

    def __init__(
        self, folder: pathlib.Path, base_url: str | None, checksums: Mapping[str, Checksum] | None, first_pause: float
    ):
        self._folder = folder
        self._base_url = base_url
        self._checksums = registered_checksums() if checksums is None else checksums
        self._first_pause = first_pause
        self.downloaded_size = 0  # bytes, which TFDS notes in the data set's description

    @property
    def manual_dir(self) -> pathlib.Path:
        """Where files wait that only a person may fetch."""
        return self._folder / "manual"

    def download(self, urls: Any) -> Any:
        """Fetches every address of a nested structure; returns the paths in the same structure."""
        return _map(self._fetch, urls)

    def extract(self, paths: Any) -> Any:
        """Unpacks every path of a nested structure."""
        return _map(self._unpack, paths)

    def download_and_extract(self, urls: Any) -> Any:
        """Does both."""
        return _map(lambda url: self._unpack(self._fetch(url)), urls)

    def _fetch(self, url: str) -> pathlib.Path:
        path, checksum = self._folder / local_name(url), self._checksums.get(url)
        if not self._unpacked(path).exists():
            fetch(moved(url, self._base_url), path, checksum, first_pause=self._first_pause)
        if checksum is not None:  # otherwise unknown where the archive was deleted after it had been unpacked
            self.downloaded_size += checksum.size
        return path

    def _unpack(self, path: str | pathlib.Path) -> pathlib.Path:
        target = self._unpacked(pathlib.Path(path))
        if not target.exists():
            print(f"unpacking {printable(target.name)}", file=sys.stderr)
        unpack(pathlib.Path(path), target)
        return target

    def _unpacked(self, path: pathlib.Path) -> pathlib.Path:
        inside = path.relative_to(self._folder)
        return self._folder / "extracted" / inside.parent / unpacked_name(path.name)


def local_name(url: str) -> str:
    """Where a download lies under `downloads`, which is where `wget -x` would put it.

    >>> local_name("http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz")
    'www.statmt.org/wmt14/training-parallel-nc-v9.tgz'
    >>> local_name("http://opus.nlpl.eu/download.php?f=a/b.gz")
    'opus.nlpl.eu/download.php?f=a%2Fb.gz'
    """
    parts = urllib.parse.urlsplit(url)
    query = f"?{urllib.parse.quote(parts.query, safe='=&.')}" if parts.query else ""
    return parts.netloc + parts.path + query


def moved(url: str, base_url: str | None) -> str:
    """The address on a mirror.

    >>> moved("http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz", "https://mirror.org/statmt/")
    'https://mirror.org/statmt/wmt14/training-parallel-nc-v9.tgz'
    """
    if base_url is None:
        return url
    parts = urllib.parse.urlsplit(url)
    return base_url.rstrip("/") + urllib.parse.urlunsplit(("", "", *parts[2:]))


def registered_checksums() -> dict[str, Checksum]:
    """Those of all data sets: wmt14_translate lacks what it shares with wmt13_translate."""
    infos = import_tfds().core.download.checksums.get_all_url_infos()
    return {url: Checksum(int(info.size), info.checksum) for url, info in infos.items()}


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, dict):
        return {name: _map(function, part) for name, part in structure.items()}
    if isinstance(structure, list | tuple):
        return [_map(function, part) for part in structure]
    return function(structure)


@contextlib.contextmanager
def _shuffling_without_tensorflow() -> Iterator[None]:
    """Gives TFDS's shuffler plain files for the three functions of TensorFlow that it calls on them."""
    from tensorflow_datasets.core import shuffle

    files = types.SimpleNamespace(GFile=open, exists=os.path.exists, remove=os.remove)
    # A class that nothing raises: what a full disk raises is left to us.
    errors = types.SimpleNamespace(ResourceExhaustedError=type("ResourceExhaustedError", (Exception,), {}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    stand_in = types.SimpleNamespace(io=types.SimpleNamespace(gfile=files), errors=errors)
    tensorflow, shuffle.tf = shuffle.tf, stand_in
    try:
        yield
    finally:
        shuffle.tf = tensorflow


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a second process out; the system forgets the lock when the first one ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is preparing data in {folder}: wait for it") from None
        yield


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Deletes the records of a run that was killed: TFDS writes them in a folder with a random name each time."""
    for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
        shutil.rmtree(leftover)
