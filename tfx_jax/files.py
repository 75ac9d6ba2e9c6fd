"""Files and folders from elsewhere: no pipe that never ends, no file that fills the memory, no store unreached."""

import contextlib
import errno
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterable
from typing import Any, BinaryIO, cast

from etils import epath

from tfx_jax.errors import UserError, one_line

MAX_BYTES = 256 << 20
"""Of a description, a vocabulary or a tokenizer; the largest that are published have a tenth of it."""


def read_small_file(path: epath.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file, local or remote, of at most `max_bytes`.

    Raises:
      OSError: if it cannot be read; FileNotFoundError if it does not exist.
      UserError: if it is a pipe, a device or the like, or has more than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size if is_local(path) else epath.Path(path).stat().length
        # A file of /proc has size 0, and a file may grow meanwhile: the read is bounded, too.
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(data)) > max_bytes:
        raise UserError(f"{path} has {max(size, len(data)):,} bytes; such a file may have at most {max_bytes:,}")
    return data


def open_regular(path: epath.PathLike) -> BinaryIO:
    """Opens a file for reading in binary mode, local or remote, and never waits for the writer of a pipe.

    Raises:
      OSError: if it cannot be opened; FileNotFoundError if it does not exist.
      UserError: if it is a pipe, a device or the like.
    """
    if not is_local(path):
        return cast(BinaryIO, epath.Path(path).open("rb"))
    check_regular(path)  # opening a device may already have an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)  # of what was opened, whatever has the name by now
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: epath.PathLike) -> None:
    """Checks that a local path leads to a regular file; remote files always are regular.

    Raises:
      OSError: if the path cannot be looked at, or is a folder.
      UserError: if it is a pipe, a device or the like, which may never end.
    """
    if is_local(path):
        _check_mode(pathlib.Path(path).stat().st_mode, path)


def _check_mode(mode: int, path: epath.PathLike) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is a pipe, a device or a socket, not a file: replace it with a file")


def check_tree(folder: epath.PathLike, *, data_folder: str, max_bytes: int = MAX_BYTES) -> None:
    """Checks all files of a folder that another library is going to read.

    Args:
      folder: local; nothing is checked in a store, or where there is no folder.
      data_folder: the name of folders whose files may have any size; other files are read as a whole.
      max_bytes: of these other files.

    Raises:
      OSError: if a folder cannot be listed.
      UserError: if there is a pipe, a device or the like, a link to nowhere or to a folder around `folder`, or a
        description that is too large.
    """
    if not is_local(folder) or not pathlib.Path(folder).is_dir():
        return
    waiting, seen = [pathlib.Path(folder)], set[tuple[int, int]]()
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            try:
                found = path.stat()
            except FileNotFoundError:
                if not path.is_symlink():
                    continue  # deleted meanwhile, as a training in the folder does with old checkpoints
                raise UserError(f"{path} is a link to nowhere: delete it, or put back what it names") from None
            except OSError as error:  # a link to itself
                raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
            if stat.S_ISDIR(found.st_mode):
                if path.is_symlink() and pathlib.Path(folder).resolve().is_relative_to(path.resolve()):
                    raise UserError(f"{path} is a link to a folder around it, {path.resolve()}: delete the link")
                if (found.st_dev, found.st_ino) not in seen:  # links may lead in circles
                    seen.add((found.st_dev, found.st_ino))
                    waiting.append(path)
                continue
            _check_mode(found.st_mode, path)
            if path.parent.name != data_folder and found.st_size > max_bytes:
                raise UserError(f"{path} has {found.st_size:,} bytes; such a file may have at most {max_bytes:,}")


def check_no_links(folder: epath.PathLike, names: Iterable[str]) -> None:
    """Checks, before something is written there, that nothing of these names in a local folder is a symbolic link.

    A folder from elsewhere could otherwise have files written, replaced or deleted in any other place.

    Raises:
      UserError: names the link.
    """
    for name in names:
        path = pathlib.Path(folder) / name
        if is_local(folder) and path.is_symlink():
            raise UserError(
                f"{path} is a symbolic link, through which nothing is written: replace it with what it names, or take "
                "another --workdir (which may itself be a link)"
            )


def parse_json(text: str | bytes) -> Any:
    """Parses JSON in UTF-8, with or without a byte order mark.

    Raises:
      ValueError: if it is not JSON, not UTF-8 or nested too deep, or if a string has half of a surrogate pair, which
        no text can hold.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(f'a string has half of a surrogate pair, "\\u{half:04x}"') from None
    return values


_STORES = ("gs", "s3", "az", "hf")  # that etils reads, each by a client that has to be installed


def reach(name: epath.PathLike) -> epath.Path:
    """Returns the path of a folder that need not be there.

    Raises:
      UserError: if it can be none, or is in a store that cannot be reached or for which no client is installed.
    """
    check_store(name)
    if not is_local(name):
        _end_waiting()
    try:
        path = epath.Path(name)
        path.exists()
    except ImportError as error:
        raise UserError(f"{name} cannot be reached ({one_line(error)}): install what is missing") from None
    except Exception as error:
        if isinstance(error, OSError) and is_local(name):
            raise UserError(f"{name} cannot be used ({error.strerror or error}): name another folder") from None
        raise UserError(f"{name} cannot be reached ({one_line(error)})") from None  # by whatever client it has
    return path


def check_store(name: epath.PathLike) -> None:
    """Checks that a name is of a disk, or of a store that can be read; whether it is there is not asked.

    Raises:
      UserError: if it is neither, as an address of the web.
    """
    store, mark, _ = os.fspath(name).partition("://")
    if mark and store not in _STORES:
        listed = ", ".join(f"{store}://" for store in _STORES)
        raise UserError(f"{name} cannot be read: name a local folder, or one in a store ({listed})")


def absolute(path: epath.PathLike) -> epath.Path:
    """The whole path, as Orbax asks for; `resolve` would take one in a store for a local folder named "gs:"."""
    found = epath.Path(path)
    return found.resolve() if is_local(found) else found


def is_local(path: epath.PathLike) -> bool:
    """Whether it is on a disk, and in no store."""
    return "://" not in os.fspath(path)


def _end_waiting() -> None:
    """Makes who reads Google's store give a request up that is not answered, after which it is tried again.

    By default gcsfs waits five minutes, six times, and tensorstore for ever; who has set something else keeps that.
    """
    with contextlib.suppress(ImportError):
        import fsspec.config

        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", 20)
    for name, value in (("TIME_SECONDS", "20"), ("LIMIT_BYTES", "1")):
        os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{name}", value)
