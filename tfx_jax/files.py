"""Safe access to files and folders of unknown origin: no endless pipes, no huge files, clear errors for stores."""

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
"""Size limit of a configuration, vocabulary or tokenizer file; the largest published ones have a tenth of it."""


def read_small_file(path: epath.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file, local or remote, of at most `max_bytes`.

    Raises:
      OSError: if it cannot be read; FileNotFoundError if it does not exist.
      UserError: if it is a pipe, device or socket, or has more than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size if is_local(path) else epath.Path(path).stat().length
        # Files in /proc have size 0, and a file may grow meanwhile: limit the read, too.
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(data)) > max_bytes:
        raise UserError(f"{path} has {max(size, len(data)):,} bytes; such a file may have at most {max_bytes:,}")
    return data


def open_regular(path: epath.PathLike) -> BinaryIO:
    """Opens a file for reading in binary mode, local or remote, without waiting for the writer of a pipe.

    Raises:
      OSError: if it cannot be opened; FileNotFoundError if it does not exist.
      UserError: if it is a pipe, device or socket.
    """
    if not is_local(path):
        return cast(BinaryIO, epath.Path(path).open("rb"))
    check_regular(path)  # before opening: opening a device may have side effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)  # checks the opened file, in case the path was replaced
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: epath.PathLike) -> None:
    """Checks that a local path is a regular file; remote files always are.

    Raises:
      OSError: if the path cannot be accessed, or is a folder.
      UserError: if it is a pipe, device or socket, which may never end.
    """
    if is_local(path):
        _check_mode(pathlib.Path(path).stat().st_mode, path)


def _check_mode(mode: int, path: epath.PathLike) -> None:
    """Raises the errors of `check_regular` for the mode of a file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is a pipe, a device or a socket, not a file: replace it with a file")


def check_tree(folder: epath.PathLike, *, data_folder: str, max_bytes: int = MAX_BYTES) -> None:
    """Checks all files of a folder before another library reads it.

    Args:
      folder: a folder; nothing is checked if it is remote or does not exist.
      data_folder: name of the folders whose files may have any size.
      max_bytes: size limit of all other files, which are read completely into memory.

    Raises:
      OSError: if a folder cannot be listed.
      UserError: if there is a pipe, device or socket, a broken link, a link to a folder that contains `folder`, or a
        file that is too large.
    """
    if not is_local(folder) or not pathlib.Path(folder).is_dir():
        return
    unchecked = [pathlib.Path(folder)]
    seen: set[tuple[int, int]] = set()  # device and inode of each folder
    while unchecked:
        for path in sorted(unchecked.pop().iterdir()):
            try:
                status = path.stat()
            except FileNotFoundError:
                if not path.is_symlink():
                    continue  # deleted meanwhile: a run that trains in the folder deletes old checkpoints
                raise UserError(f"{path} is a broken link: delete it, or restore its target") from None
            except OSError as error:  # a link to itself
                raise UserError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
            if stat.S_ISDIR(status.st_mode):
                if path.is_symlink() and pathlib.Path(folder).resolve().is_relative_to(path.resolve()):
                    raise UserError(f"{path} is a link to {path.resolve()}, a folder that contains it: delete the link")
                if (status.st_dev, status.st_ino) not in seen:  # links may lead in circles
                    seen.add((status.st_dev, status.st_ino))
                    unchecked.append(path)
                continue
            _check_mode(status.st_mode, path)
            if path.parent.name != data_folder and status.st_size > max_bytes:
                raise UserError(f"{path} has {status.st_size:,} bytes; such a file may have at most {max_bytes:,}")


def check_no_links(folder: epath.PathLike, names: Iterable[str]) -> None:
    """Checks, before writing, that none of these names in a local folder is a symbolic link.

    Through a link, a folder of unknown origin could have files outside it written, replaced or deleted.

    Raises:
      UserError: if one is a symbolic link; the message names it.
    """
    for name in names:
        path = pathlib.Path(folder) / name
        if is_local(folder) and path.is_symlink():
            raise UserError(
                f"{path} is a symbolic link, and tfx_jax does not write through links: replace it with its target, or "
                "use another workdir (which may itself be a link)"
            )


def parse_json(text: str | bytes) -> Any:
    """Parses JSON in UTF-8, with or without a byte order mark.

    Raises:
      ValueError: if it is not JSON, not UTF-8 or nested too deeply, or if a string has half of a surrogate pair, which
        UTF-8 cannot encode.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError(
            "the JSON is nested deeper than Python can read, some thousand levels: write it with fewer"
        ) from None
    if re.search(r"\\u[dD][89a-fA-F]", text):  # an escape of a surrogate, such as "\ud83d"
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(
                f'a string has "\\u{half:04x}", half of a surrogate pair: delete it, or add the other half'
            ) from None
    return values


_STORES = ("gs", "s3", "az", "hf")  # schemes that etils supports; each needs an installed client


def reach(name: epath.PathLike) -> epath.Path:
    """Returns the path of a folder, which need not exist, after checking that it can be accessed.

    Raises:
      UserError: if the name is invalid, or its store cannot be reached or has no installed client.
    """
    check_store(name)
    if not is_local(name):
        _set_store_timeouts()
    try:
        path = epath.Path(name)
        path.exists()
    except ImportError as error:
        raise UserError(f"{name} cannot be reached ({one_line(error)}): install the missing package") from None
    except Exception as error:
        if isinstance(error, OSError) and is_local(name):
            raise UserError(f"{name} cannot be used ({error.strerror or error}): name another folder") from None
        raise UserError(f"{name} cannot be reached ({one_line(error)})") from None  # an error of the store's client
    return path


def check_store(name: epath.PathLike) -> None:
    """Checks that a path is local or in a supported store; it need not exist.

    Raises:
      UserError: if it has another scheme, such as https://.
    """
    scheme, separator, _ = os.fspath(name).partition("://")
    if separator and scheme not in _STORES:
        listed = ", ".join(f"{store}://" for store in _STORES)
        raise UserError(f"{name} cannot be read: name a local folder or one in a store ({listed})")


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns the absolute path, which Orbax requires; `resolve` would treat gs:// as a local folder "gs:"."""
    path = epath.Path(path)
    return path.resolve() if is_local(path) else path


def is_local(path: epath.PathLike) -> bool:
    """Returns whether a path is local rather than in a remote store."""
    return "://" not in os.fspath(path)


def _set_store_timeouts() -> None:
    """Sets timeouts after which clients of Google Cloud Storage abandon and retry an unanswered request.

    By default gcsfs waits six times for five minutes, and tensorstore forever. Timeouts the user has set are kept.
    """
    with contextlib.suppress(ImportError):
        import fsspec.config

        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", 20)
    for name, value in (("TIME_SECONDS", "20"), ("LIMIT_BYTES", "1")):
        os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{name}", value)
